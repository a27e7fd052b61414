# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Attention to summaries of blocks, to whole selected blocks, and to a window (Native Sparse Attention).

Keys and values are averaged over blocks of tokens; attention to these averages is the first branch, and its weights
select the blocks that the second branch reads token by token; the third reads the last tokens. Blocks are counted in
real tokens from the beginning of each row, so padding does not move them. Queries are taken a few at a time.

Letters: B batch, S new tokens, L cached + new tokens, H heads, E key-value heads, G = H / E, D head dimension,
C blocks.
Source: Native Sparse Attention, arXiv 2502.11089, equations 5 to 12.
"""

from typing import NamedTuple

import torch

from loopergy.modeling.kernels.sparse_attention import (
    TokenOrder,
    attend_own,
    fit,
    piece_size,
    pieces,
    recomputed,
    take_rows,
    token_order,
    top_indices,
    visible_softmax,
)


class Pooling(NamedTuple):
    """Say which tokens an average is over: block c covers `size` tokens from `c * stride` on."""

    size: int
    stride: int

    def complete(self, tokens: int) -> int:
        """Return how many blocks lie entirely within the first `tokens` tokens."""
        return max(0, (tokens - self.size) // self.stride + 1)


def pool_blocks(
    tokens: torch.Tensor,
    blocks: torch.Tensor | None,
    pooling: Pooling,
    past: int | torch.Tensor,
    new: int,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Average the blocks that the new tokens complete, and append them to those known before.

    Args:
        tokens (`torch.Tensor` of shape (B, E, L, D)): keys or values, cached and new.
        blocks (`torch.Tensor` of shape (B, E, C, D), *optional*): averages of the blocks complete before.
        pooling ([`Pooling`]): size and stride.
        past (`int` or `torch.Tensor`), new (`int`): tokens before, and S.
        real (`torch.BoolTensor` of shape (B, L), *optional*): False at padding.

    Returns:
        `torch.Tensor` of shape (B, E, C', D) in the type of the tokens, C' = complete(L). A row with padding has
        fewer complete blocks than columns; the last ones mean nothing.
    """
    length = tokens.shape[2]
    count = pooling.complete(length)
    known = tokens.new_zeros(*tokens.shape[:2], 0, tokens.shape[3]) if blocks is None else blocks.to(tokens.dtype)
    if real is None and isinstance(past, int):
        first = pooling.complete(past)
        if count == first:
            return known
        fresh = tokens[:, :, first * pooling.stride :].unfold(2, pooling.size, pooling.stride).mean(dim=-1)
        return torch.cat((known, fresh), dim=2)
    columns = torch.nn.functional.pad(known, (0, 0, 0, count + 1 - known.shape[2]))
    index, fresh = completed_blocks(tokens, pooling, past, new, real)
    return columns.scatter(2, index[:, None, :, None].expand_as(fresh), fresh)[:, :, :count]


def completed_blocks(
    tokens: torch.Tensor, pooling: Pooling, past: int | torch.Tensor, new: int, real: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Average the blocks that the new tokens may complete in each row.

    Args:
        tokens, pooling, past, new, real: as in [`pool_blocks`].

    Returns:
        `torch.LongTensor` of shape (B, M): number of each block, at most complete(L); and the averages, (B, E, M, D).
        Those of blocks that are not complete mean nothing: no query sees them, and they are made again.
    """
    batch, heads, length, width = tokens.shape
    size, stride = pooling
    columns = torch.arange(length, device=tokens.device)
    before = torch.as_tensor(past, device=tokens.device).view(1, 1)
    if real is not None:
        before = (real & (columns < past)).sum(dim=1, keepdim=True)
    first = ((before - size).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    most = min(-(-new // stride), pooling.complete(length))
    index = (first + torch.arange(most, device=tokens.device)).expand(batch, -1)
    ranks = (index[..., None] * stride + torch.arange(size, device=tokens.device)).flatten(1)
    places = token_order(real, 0, 1, tokens.device).column(ranks.clamp(max=length - 1))
    rows = take_rows(tokens.flatten(0, 1), _per_head(places, heads))
    means = rows.view(batch, heads, most, size, width).mean(dim=3)
    return index, means


def _per_head(index: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat an index (B, N) for the rows (B * heads, N) of keys of several heads."""
    return index[:, None].expand(-1, heads, -1).flatten(0, 1)


class Branches(NamedTuple):
    """Say what the three branches read.

    Attributes:
        pooling ([`Pooling`]): the averages.
        block_size (`int`), block_count (`int`): tokens of a block, and blocks that a query selects. The first block,
            the query's own and the one before it are always among them.
        window (`int`): tokens of the window, the query's own included.
    """

    pooling: Pooling
    block_size: int
    block_count: int
    window: int


def native_sparse_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pooled_keys: torch.Tensor,
    pooled_values: torch.Tensor,
    gates: torch.Tensor,
    branches: Branches,
    scale: float,
    past: int | torch.Tensor = 0,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Add up the three branches, \(o = g_1 o_\mathrm{pooled} + g_2 o_\mathrm{selected} + g_3 o_\mathrm{window}\).

    Args:
        query (`torch.Tensor` of shape (B, S, H, D)).
        keys, values (`torch.Tensor` of shape (B, E, L, D)): E divides H.
        pooled_keys, pooled_values (`torch.Tensor` of shape (B, E, C, D)): as [`pool_blocks`] gives them.
        gates (`torch.Tensor` of shape (B, S, H, 3)): g.
        branches ([`Branches`]): what the branches read.
        scale (`float`): of the attention scores.
        past (`int` or `torch.Tensor`): tokens before the new ones; a tensor with a static cache.
        real (`torch.BoolTensor` of shape (B, up to L), *optional*): False at padding, which no query sees.

    Returns:
        `torch.Tensor` of shape (B, S, H, D). A branch in which a query sees nothing gives 0.
    """
    batch, length, heads, width = query.shape
    groups, total = keys.shape[1:3]
    order = token_order(fit(real, total), past, length, query.device)
    selected = groups * branches.block_count * branches.block_size * width
    size = piece_size(batch * max(selected, heads * pooled_keys.shape[2]), query.device)
    outputs = []
    for start, end in pieces(0, length, size):
        reach = past + end if isinstance(past, int) else total
        blocks = branches.pooling.complete(reach)
        output = recomputed(
            _attend_piece,
            query[:, start:end].unflatten(2, (groups, -1)).transpose(1, 2) * scale,
            gates[:, start:end],
            order._replace(ranks=order.ranks[:, start:end]),
            (keys, values),
            (pooled_keys[:, :, :blocks], pooled_values[:, :, :blocks]),
            reach,
            branches,
        )
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


# From here on queries are (B, E, S, G, D), scaled, and `reach` is the number of columns that they may see.


def _attend_piece(
    query: torch.Tensor,
    gates: torch.Tensor,
    order: TokenOrder,
    tokens: tuple[torch.Tensor, torch.Tensor],
    pooled: tuple[torch.Tensor, torch.Tensor],
    reach: int,
    branches: Branches,
) -> torch.Tensor:
    summary, weights = _pooled(query, pooled, order.ranks, branches.pooling)
    if reach <= branches.block_count * branches.block_size:
        selection = _span(query, tokens, order, torch.zeros_like(order.ranks[:, :1]), reach, reach)
    else:
        blocks = _select(weights, order.ranks, reach, branches)
        selection = _selected(query, tokens, order, blocks, branches.block_size)
    first = (order.ranks[:, :1] - branches.window + 1).clamp(min=0)
    recent = min(query.shape[2] + branches.window - 1, reach)
    window = _span(query, tokens, order, first, recent, branches.window)
    outputs = torch.stack((summary, selection, window), dim=-1).transpose(1, 2).flatten(2, 3)
    return (outputs * gates[..., None, :]).sum(dim=-1)


def _pooled(
    query: torch.Tensor, pooled: tuple[torch.Tensor, torch.Tensor], ranks: torch.Tensor, pooling: Pooling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the averages of complete blocks; return the output and the weights (B, E, S, G, C)."""
    keys, values = pooled
    last = torch.arange(keys.shape[2], device=keys.device) * pooling.stride + pooling.size - 1
    visible = (last <= ranks[..., None])[:, None, :, None]
    weights = visible_softmax((query.flatten(2, 3) @ keys.mT).unflatten(2, query.shape[2:4]), visible)
    weights = weights * visible.any(dim=-1, keepdim=True)
    output = weights.to(values.dtype).flatten(2, 3) @ values
    return output.unflatten(2, query.shape[2:4]), weights


@torch.no_grad()
def _select(weights: torch.Tensor, ranks: torch.Tensor, reach: int, branches: Branches) -> torch.Tensor:
    """Return the blocks (B, E, S, n) that each query and group reads."""
    count = -(-reach // branches.block_size)
    scores = block_importance(weights.sum(dim=3), branches.pooling, branches.block_size, count)
    current = (ranks // branches.block_size)[:, None, :, None]
    block = torch.arange(count, device=ranks.device)
    scores = scores.masked_fill((block == 0) | (block == current) | (block == current - 1), torch.inf)
    return top_indices(scores, branches.block_count)


def block_importance(weights: torch.Tensor, pooling: Pooling, block_size: int, count: int) -> torch.Tensor:
    """Turn weights on averages into scores of blocks: each average counts once per stride that it has in the block.

    Args:
        weights (`torch.Tensor` of shape (..., C)).
        pooling ([`Pooling`]): its stride divides its size and `block_size`.
        block_size (`int`), count (`int`): tokens of a block, and how many blocks there are.

    Returns:
        `torch.Tensor` of shape (..., count).
    """
    per_block = block_size // pooling.stride
    strides = weights.new_zeros(*weights.shape[:-1], count * per_block)
    for offset in range(pooling.size // pooling.stride):
        strides[..., offset : offset + weights.shape[-1]] += weights
    return strides.unflatten(-1, (count, per_block)).sum(dim=-1)


def _selected(
    query: torch.Tensor,
    tokens: tuple[torch.Tensor, torch.Tensor],
    order: TokenOrder,
    blocks: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Attend to the tokens of the selected blocks, up to the query's own."""
    batch, groups, length = blocks.shape[:3]
    ranks = (blocks[..., None] * block_size + torch.arange(block_size, device=blocks.device)).flatten(3)
    visible = ranks <= order.ranks[:, None, :, None]
    columns = order.column(ranks.clamp(max=tokens[0].shape[2] - 1)).reshape(batch * groups, -1)
    keys, values = (
        take_rows(part.flatten(0, 1), columns).view(batch, groups, length, -1, part.shape[-1]) for part in tokens
    )
    return attend_own(query, keys, values, visible)


def _span(
    query: torch.Tensor,
    tokens: tuple[torch.Tensor, torch.Tensor],
    order: TokenOrder,
    first: torch.Tensor,
    length: int,
    window: int,
) -> torch.Tensor:
    """Attend to the last `window` of the tokens of ranks first .. first + length, first (B or 1, 1)."""
    batch, groups = query.shape[:2]
    ranks = first + torch.arange(length, device=first.device)
    distance = order.ranks[..., None] - ranks[:, None]
    visible = ((distance >= 0) & (distance < window))[:, None, :, None]
    columns = order.column(ranks.clamp(max=tokens[0].shape[2] - 1).expand(batch, -1))
    keys, values = (
        take_rows(part.flatten(0, 1), _per_head(columns, groups)).unflatten(0, (batch, groups)) for part in tokens
    )
    weights = visible_softmax((query.flatten(2, 3) @ keys.mT).unflatten(2, query.shape[2:4]), visible)
    output = weights.to(values.dtype).flatten(2, 3) @ values
    return output.unflatten(2, query.shape[2:4])
