# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Attention whose scores have a part that all heads share, on a CPU: one head and a chunk of queries at a time.

Weights are \(\alpha_{ij}^h = \mathrm{softmax}_j((q_i^h \cdot k_j + (d \odot x_i) \cdot c_j) / \tau)\). They average
keys, head by head, and context, summed over heads. One head's weights of one chunk stay in the processor's cache while
they are made and used; the backward pass finds them kept, and forms nothing larger than one head's either.

Shapes: B batch, S queries, L keys, D width of the context, H query heads, G key heads, d head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loopergy.modeling.kernels.tracing import is_traced

# Queries, how many keys they reach, and what they may see: True where visible, (B or 1, 1, queries, reach). None hides
# all keys later than a query; the last query's own key is then the last.
Chunk = tuple[slice, int, Tensor | None]


def fits(query: Tensor, context: Tensor, diagonal: Tensor, mask: Tensor | None) -> bool:
    """Tell whether [`attend_head_by_head`] serves: full precision, on a CPU, one diagonal, several queries.

    Args:
        query (`torch.Tensor` of shape (B, H, S, d)).
        context (`torch.Tensor` of shape (B, N, L, D / N)): must be in one piece, N = 1.
        diagonal (`torch.Tensor` of shape (K, D)): must be one for all heads, K = 1.
        mask (*optional*): must be the same for all heads, and say what is visible.
    """
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64) or is_traced():
        return False
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1):
        return False
    single = len(diagonal) == context.shape[1] == 1 and query.shape[2] > 1
    return single and query.dtype == context.dtype == diagonal.dtype


def attend_head_by_head(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    temperature: float,
    chunks: list[Chunk],
    expression: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    r"""Average keys and context by the weights.

    Args:
        tensors: query (B, H, S, d), keys (B, G, L, d), point x (B, S, D), context c (B, L, D), diagonal d (D).
        temperature (`float`): tau.
        chunks: the queries, cut.
        expression: the same function of `tensors`, which autograd can see through, for gradients of gradients.

    Returns:
        \(\sum_j \alpha_{ij}^h k_j\) of shape (B, S, H, d), and \(d \odot \sum_h \sum_j \alpha_{ij}^h c_j\) of shape
        (B, S, D).
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _HeadByHead.apply(temperature, chunks, expression, *tensors)
    return _forward(tensors, temperature, chunks, None)


def _forward(
    tensors: tuple[Tensor, ...], temperature: float, chunks: list[Chunk], kept: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return the two averages, and add the weights (H, queries, reach) of each row and chunk to `kept`."""
    query, keys, point, context, diagonal = tensors
    batch, heads, length, width = query.shape
    averages, moves = query.new_empty(batch, length, heads, width), torch.empty_like(point)
    room = _Room(query, chunks, 3)
    for row in range(batch):
        for rows, reach, mask in chunks:
            seen, (shared, spare, total) = context[row, :reach], room.of(rows, reach)
            weights = [spare] * heads if kept is None else query.new_empty(heads, *shared.shape)
            torch.mm(point[row, rows] * (diagonal / temperature), seen.T, out=shared)
            _hide(shared, mask, row)
            total.zero_()
            for head, weight in enumerate(weights):
                key = keys[row, _group_of(head, query, keys), :reach]
                torch.addmm(shared, query[row, head, rows], key.T, alpha=1 / temperature, out=weight)
                torch.softmax(weight, dim=-1, out=weight)
                torch.mm(weight, key, out=averages[row, rows, head])
                total += weight
            torch.mm(total, seen, out=moves[row, rows])
            if isinstance(weights, Tensor) and kept is not None:
                kept.append(weights)
    return averages, moves.mul_(diagonal)


def _backward(
    tensors: tuple[Tensor, ...],
    temperature: float,
    chunks: list[Chunk],
    kept: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Return the gradients of all tensors, given those of the two averages."""
    query, keys, point, context, diagonal = tensors
    of_query, of_keys, of_point = torch.empty_like(query), torch.zeros_like(keys), torch.empty_like(point)
    of_context, of_diagonal = torch.zeros_like(context), torch.zeros_like(diagonal)
    room, weights_of = _Room(query, chunks, 4), iter(kept)
    for row in range(len(query)):
        for rows, reach, mask in chunks:
            seen, (shared, scores, total, total_scores) = context[row, :reach], room.of(rows, reach)
            here, grad_move = point[row, rows], grads[1][row, rows]
            torch.mm(grad_move * diagonal, seen.T, out=shared)
            total.zero_()
            total_scores.zero_()
            for head, weight in enumerate(next(weights_of)):
                group, grad_average = _group_of(head, query, keys), grads[0][row, rows, head]
                key, of_key = keys[row, group, :reach], of_keys[row, group, :reach]
                torch.addmm(shared, grad_average, key.T, out=scores)
                _through_softmax(scores, weight)
                if mask is not None:  # a query that sees nothing has weights, and no scores
                    scores.masked_fill_(~mask[_row_of(mask, row), 0], 0)
                torch.mm(scores, key, out=of_query[row, head, rows])
                of_key.addmm_(scores.T, query[row, head, rows], alpha=1 / temperature)
                of_key.addmm_(weight.T, grad_average)
                total += weight
                total_scores += scores
            of_wide, moved = total_scores @ seen / temperature, total.T @ grad_move
            torch.mul(of_wide, diagonal, out=of_point[row, rows])
            of_diagonal += (of_wide * here).sum(dim=0) + (moved * seen).sum(dim=0)
            of_context[row, :reach].addcmul_(moved, diagonal).addmm_(total_scores.T, here * (diagonal / temperature))
    return of_query.div_(temperature), of_keys, of_point, of_context, of_diagonal


class _HeadByHead(torch.autograd.Function):
    """Keep the weights for the backward pass; the gradient of the gradient goes through the expression."""

    @staticmethod
    def forward(
        ctx: Any,
        temperature: float,
        chunks: list[Chunk],
        expression: Callable[..., tuple[Tensor, Tensor]],
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        averages, moves = _forward(tensors, temperature, chunks, kept)
        ctx.save_for_backward(*tensors, *kept)
        ctx.temperature, ctx.chunks, ctx.expression = temperature, chunks, expression
        return averages, moves

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: checkpointing allows no second time
        tensors, kept = saved[:5], saved[5:]
        if not torch.is_grad_enabled():
            return None, None, None, *_backward(tensors, ctx.temperature, ctx.chunks, kept, grads)
        needed = ctx.needs_input_grad[3:]
        wanted = [x for x, need in zip(tensors, needed, strict=True) if need]
        found = iter(torch.autograd.grad(ctx.expression(*tensors), wanted, grads, create_graph=True))
        return None, None, None, *(next(found) if need else None for need in needed)


class _Room:
    """Hold matrices (queries, keys) that one chunk after the other uses, so that they stay in the cache."""

    def __init__(self, like: Tensor, chunks: list[Chunk], count: int):
        largest = max((rows.stop - rows.start) * reach for rows, reach, _ in chunks)
        self.matrices = like.new_empty(count, largest)

    def of(self, rows: slice, reach: int) -> list[Tensor]:
        """Return the matrices in a chunk's size, filled with anything."""
        size = rows.stop - rows.start
        return [matrix[: size * reach].view(size, reach) for matrix in self.matrices]


def _group_of(head: int, query: Tensor, keys: Tensor) -> int:
    return head * keys.shape[1] // query.shape[1]


def _row_of(mask: Tensor, row: int) -> int:
    return row if len(mask) > 1 else 0


def _hide(scores: Tensor, mask: Tensor | None, row: int) -> None:
    """Set what one row's queries must not see to the lowest number, which a head's own part does not change."""
    lowest, size = torch.finfo(scores.dtype).min, len(scores)
    if mask is not None:
        scores.masked_fill_(~mask[_row_of(mask, row), 0], lowest)
    elif size > 1:
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        scores[:, -size:].masked_fill_(later, lowest)


def _through_softmax(grads: Tensor, weights: Tensor) -> None:
    """Turn gradients of weights into gradients of scores, in their place."""
    torch.ops.aten._softmax_backward_data.out(grads, weights, -1, weights.dtype, grad_input=grads)
