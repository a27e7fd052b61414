# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What sparse attention is made of: choosing, fetching and weighing keys, a few queries at a time.

Letters: B batch, S new tokens, L cached + new tokens, N keys in reach, H heads, D width.
A token's *rank* counts the real tokens of its row before it; without padding it is the column.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from loopergy.modeling.kernels.precision import at_least_float32
from loopergy.modeling.kernels.tracing import in_functorch, is_traced

# Numbers that one piece of work may fetch: what stays in a CPU's cache, for each thread, or keeps a GPU busy.
_PIECE_PER_THREAD = 2**19
_PIECE_ELSEWHERE = 2**26
_TRACED_THREADS = 4  # a compiled program cannot ask for threads; it unrolls its pieces, so they are few and large


class TokenOrder(NamedTuple):
    """Say where the tokens of each row lie.

    Attributes:
        ranks (`torch.LongTensor` of shape (B or 1, S)): rank of each new token; at padding that of the real token
            before.
        columns (`torch.LongTensor` of shape (B, L), *optional*): column of the token of each rank; `None` without
            padding, where rank and column are the same.
    """

    ranks: torch.Tensor
    columns: torch.Tensor | None

    def column(self, ranks: torch.Tensor) -> torch.Tensor:
        """Return the columns of the tokens of the given ranks, (B, ...)."""
        if self.columns is None:
            return ranks
        return self.columns.gather(1, ranks.flatten(1)).view(ranks.shape)


def real_tokens(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Check a padding mask and return it as booleans.

    Args:
        attention_mask (`torch.Tensor` of shape (B, L), *optional*): 0 at padding, over cached and new tokens.

    Raises:
        ValueError: for a mask of another number of dimensions.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: sparse attention chooses its keys itself, so it "
            "takes the padding mask (batch, cached + new tokens) and no mask per query and key. For packed documents "
            "pass restarting position_ids, seq_idx or cu_seq_lens_q."
        )
    return attention_mask.to(torch.bool)


def check_covers(real: torch.Tensor, past: int | torch.Tensor, new: int) -> None:
    """Raise `ValueError` for a mask (B, L) that ends before the last of the new tokens, where that can be told."""
    if isinstance(past, int) and real.shape[1] < past + new:
        raise ValueError(
            f"attention_mask has {real.shape[1]} columns for {past} cached and {new} new tokens: it must cover both."
        )


def real_among_new(real: torch.Tensor, past: int | torch.Tensor, new: int) -> torch.Tensor:
    """Return which of the new tokens are real, (B, S); raise as [`check_covers`]."""
    check_covers(real, past, new)
    return real[:, past + torch.arange(new, device=real.device)]


def fit(real: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Widen a mask of real tokens to `length` columns; those beyond it (of a static cache) hold nothing yet."""
    if real is None or real.shape[1] == length:
        return real
    return torch.nn.functional.pad(real, (0, length - real.shape[1]))


def token_order(real: torch.Tensor | None, past: int | torch.Tensor, new: int, device: torch.device) -> TokenOrder:
    """Find the ranks of the new tokens.

    Args:
        real (`torch.BoolTensor` of shape (B, L), *optional*): False at padding, over cached and new tokens.
        past (`int` or `torch.Tensor`): tokens in the cache.
        new (`int`): S.
        device: where to put the result.
    """
    columns = past + torch.arange(new, device=device)[None]
    if real is None:
        return TokenOrder(columns, None)
    length = real.shape[1]
    ranks = real.cumsum(dim=1) - 1
    # Padding goes to a place of its own after the others, which is cut off.
    targets = torch.where(real, ranks, length)
    order = targets.new_zeros(real.shape[0], length + 1)
    order = order.scatter(1, targets, torch.arange(length, device=device).expand_as(targets))[:, :length]
    return TokenOrder(ranks.gather(1, columns.expand(real.shape[0], -1)).clamp(min=0), order)


def piece_size(numbers_per_query: int, device: torch.device) -> int:
    """Return how many queries to work on at a time when each fetches so many numbers."""
    threads = _TRACED_THREADS if torch.compiler.is_compiling() else torch.get_num_threads()
    numbers = _PIECE_PER_THREAD * threads if device.type == "cpu" else _PIECE_ELSEWHERE
    return max(1, numbers // max(1, numbers_per_query))


def pieces(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut start..end into (start, end) of at most `size`."""
    count = -(-(end - start) // size)  # a compiled program then serves all lengths of as many pieces
    for index in range(count):
        begin = start + index * size
        yield begin, end if index + 1 == count else begin + size


def document_slices(cu_seqlens: torch.Tensor) -> list[slice]:
    """Return the columns of each document of a flattened batch, from their boundaries (documents + 1,)."""
    boundaries = cu_seqlens.tolist()
    return [slice(start, end) for start, end in itertools.pairwise(boundaries) if end > start]


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call `function(*inputs)`; where gradients are wanted, keep the inputs alone and compute it again for them.

    Transforms of torch.func cannot do without what was computed, so under them everything is kept.
    """
    if not torch.is_grad_enabled() or in_functorch():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


@torch.no_grad()
def top_indices(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` largest scores along the last dimension, of equal ones the first.

    Args:
        scores (`torch.Tensor` of shape (..., N)).
        count (`int`): at most N.

    Returns:
        `torch.LongTensor` of shape (..., count), rising, so that sums over them always run in the order of the tokens.
    """
    best = scores.topk(count, dim=-1, sorted=False)
    least = best.values.amin(dim=-1, keepdim=True)
    # On a CPU reading the answer costs nothing, and ties with the last of the largest are rare.
    readable = scores.device.type == "cpu" and not is_traced()
    if readable and int((scores >= least).sum()) == best.indices.numel():
        return best.indices.sort(dim=-1).values
    above, level = scores > least, scores == least
    room = count - above.sum(dim=-1, keepdim=True)
    kept = above | (level & (level.cumsum(dim=-1) <= room))
    order = torch.arange(scores.shape[-1], 0, -1, device=scores.device)
    return torch.where(kept, order, 0).topk(count, dim=-1).indices


def take_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Fetch rows by number: (B, N, D) and (B, M) give (B, M, D).

    Args:
        rows (`torch.Tensor` of shape (B, N, D)): may be the filled front of a larger buffer.
        index (`torch.LongTensor` of shape (B, M)).
    """
    batch, length, width = rows.shape
    if rows.device.type == "cpu" and rows.requires_grad and not is_traced():
        # The gradients of a table's rows are added up row by row, those of `gather` number by number.
        row = index + length * torch.arange(batch, device=index.device)[:, None]
        return torch.nn.functional.embedding(row, rows.reshape(-1, width))
    plain = rows.stride(2) == 1 and rows.stride(1) == width and rows.stride(0) % max(width, 1) == 0
    if not plain or rows.requires_grad or is_traced():
        return rows.gather(1, index[..., None].expand(-1, -1, width))
    # All rows of the buffer in one list: fetching from that moves whole rows, and copies nothing else.
    step = rows.stride(0) // width
    listed = rows.as_strided(((batch - 1) * step + length, width), (width, 1))
    listed_at = index + step * torch.arange(batch, device=index.device)[:, None]
    return listed.index_select(0, listed_at.flatten()).view(*index.shape, width)


def visible_softmax(scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Normalise scores over the visible keys, in float32 at least.

    Args:
        scores (`torch.Tensor` of shape (..., N)): overwritten.
        visible (`torch.BoolTensor`, *optional*): broadcastable to the scores; all are visible without it. Where none
            is, the weights are finite and mean nothing.
    """
    scores = at_least_float32(scores)
    if visible is not None:
        scores = scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1)


def attend_own(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """Attend to keys that each query has for itself.

    Args:
        query (`torch.Tensor` of shape (..., H, D)): scaled; all heads share the keys.
        keys, values (`torch.Tensor` of shape (..., M, D)).
        visible (`torch.BoolTensor` of shape (..., M), *optional*): all are without it. Where none is, the output is
            finite and means nothing.

    Returns:
        `torch.Tensor` of shape (..., H, D).
    """
    if query.device.type != "cpu":
        weights = visible_softmax(query @ keys.mT, None if visible is None else visible[..., None, :])
        return weights.to(values.dtype) @ values
    # On a CPU, one fused function takes half of the time of two products and a softmax.
    mask = None if visible is None else visible.reshape(-1, 1, 1, visible.shape[-1])
    flat = (x.reshape(-1, 1, *x.shape[-2:]) for x in (query, keys, values))
    return torch.nn.functional.scaled_dot_product_attention(*flat, attn_mask=mask, scale=1.0).reshape(query.shape)
