# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Attention to the keys that an indexer ranks highest (DeepSeek Sparse Attention).

A small indexer scores every earlier token, \(I_{tj}\); the query attends to the `top_k` tokens of the largest scores
alone. All heads share one key per token, and the value is the key's first numbers. Queries are taken a few at a time,
so memory grows with the length and no table of length times length is ever held.

Letters: B batch, S new tokens, L cached + new tokens, H heads, K key width, V value width, J index heads,
I index width.
Source: DeepSeek-V3.2-Exp (arXiv 2512.02556), section 2; LT2 (arXiv 2605.20670) for the released scoring.
"""

from typing import NamedTuple

import torch

from loopergy.modeling.kernels.precision import at_least_float32
from loopergy.modeling.kernels.sparse_attention import (
    attend_own,
    fit,
    piece_size,
    pieces,
    recomputed,
    take_rows,
    top_indices,
    visible_softmax,
)


class Indexer(NamedTuple):
    r"""Hold what the scores are made of.

    Without weights \(I_{tj} = \frac1J \sum_h q_{th} \cdot k_j\), with them
    \(I_{tj} = \sum_h w_{th}\,\mathrm{ReLU}(q_{th} \cdot k_j)\).

    Attributes:
        query (`torch.Tensor` of shape (B, S, J, I)).
        keys (`torch.Tensor` of shape (B, L, I)).
        weights (`torch.Tensor` of shape (B, S, J), *optional*).
    """

    query: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor | None = None

    def part(self, queries: slice, keys: slice) -> "Indexer":
        """Return some of the queries and of the keys."""
        weights = None if self.weights is None else self.weights[:, queries]
        return Indexer(self.query[:, queries], self.keys[:, keys], weights)

    def flattened(self) -> "Indexer":
        """Return all rows of the batch as one."""
        weights = None if self.weights is None else self.weights.flatten(0, 1)[None]
        return Indexer(self.query.flatten(0, 1)[None], self.keys.flatten(0, 1)[None], weights)

    def fetched(self, index: torch.Tensor) -> "Indexer":
        """Return the same with each query's own keys (B, S, M, I), those of `index` (B, S, M)."""
        keys = take_rows(self.keys, index.flatten(1)).unflatten(1, index.shape[1:])
        return self._replace(keys=keys)

    def scores(self) -> torch.Tensor:
        """Return the scores (B, S, L), in float32 at least."""
        query, keys = at_least_float32(self.query), at_least_float32(self.keys).mT
        if self.weights is None:
            # The mean of the heads' products is the product with the mean head.
            query = query.mean(dim=2, keepdim=True)
        own = keys.ndim == 4
        products = query @ keys if own else (query.flatten(1, 2) @ keys).unflatten(1, query.shape[1:3])
        if self.weights is None:
            return products.squeeze(2)
        return (at_least_float32(self.weights)[:, :, None] @ products.relu_()).squeeze(2)


def indexed_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    value_dim: int,
    indexer: Indexer,
    top_k: int,
    scale: float,
    past: int | torch.Tensor = 0,
    real: torch.Tensor | None = None,
    keep_current: bool = False,
    dense: bool = False,
    output_divergence: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to the `top_k` visible keys of the largest index scores, to all of them where there are no more.

    Args:
        query (`torch.Tensor` of shape (B, S, H, K)).
        keys (`torch.Tensor` of shape (B, L, K)): one per token; the first `value_dim` numbers are the value.
        value_dim (`int`): V.
        indexer ([`Indexer`]): the scores. Equal ones are taken in the order of the tokens.
        top_k (`int`): keys per query.
        scale (`float`): of the attention scores.
        past (`int` or `torch.Tensor`): tokens before the new ones; a tensor with a static cache.
        real (`torch.BoolTensor` of shape (B, up to L), *optional*): False at padding, which no query sees.
        keep_current (`bool`): the query's own token is always one of the `top_k`.
        dense (`bool`): attend to all visible keys whatever `top_k`.
        output_divergence (`bool`): return the divergence too; without it no gradient reaches the indexer.

    Returns:
        output of shape (B, S, H, V); and, if asked for, KL(attention || softmax of the index scores) of shape (B, S),
        over the keys attended to, the attention averaged over heads and without gradient.
    """
    batch, length, heads, width = query.shape
    total = keys.shape[1]
    real = fit(real, total)
    counted = isinstance(past, int)
    few = length  # queries before this one see `top_k` keys at the most
    if not dense and total > top_k:
        few = min(max(top_k - past, 0), length) if counted else 0
    parts = []
    for start, end in pieces(0, few, piece_size(batch * heads * total, query.device)):
        reach = past + end if counted else total
        own = indexer.part(slice(start, end), slice(reach)) if output_divergence else None
        visible = _visible(past, start, end, reach, real, query.device)
        inputs = (query[:, start:end], keys[:, :reach], own, visible, value_dim, scale)
        parts.append(recomputed(_attend_all, *inputs))

    inner = piece_size(batch * top_k * width, query.device)
    scored = batch * (1 if indexer.weights is None else indexer.query.shape[2]) * total
    for start, end in pieces(few, length, piece_size(scored, query.device)):
        reach = past + end if counted else total
        part = indexer.part(slice(start, end), slice(reach))
        visible = _visible(past, start, end, reach, real, query.device)
        chosen = _choose(part, visible, top_k, past + start if keep_current else None)
        # Without padding these queries see at least `top_k` keys, so that all they choose is visible.
        seen = None
        if visible is not None and not (counted and real is None):
            seen = visible.expand(batch, -1, -1).gather(-1, chosen)
        for first, last in pieces(0, end - start, inner):
            own = part.part(slice(first, last), slice(reach)) if output_divergence else None
            shown = None if seen is None else seen[:, first:last]
            inputs = (query[:, start + first : start + last], keys[:, :reach], own, shown, value_dim, scale)
            parts.append(recomputed(_attend_chosen, chosen[:, first:last], *inputs))
    outputs, divergences = zip(*parts, strict=True)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return output, torch.cat(divergences, dim=1) if output_divergence else None


def _visible(
    past: int | torch.Tensor, start: int, end: int, reach: int, real: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Say which of the first `reach` keys the queries start..end see, (B or 1, S, reach); `None` if all."""
    if end - start == 1 and real is None and isinstance(past, int):
        return None
    columns = torch.arange(reach, device=device)
    visible = (columns <= (past + torch.arange(start, end, device=device))[:, None])[None]
    return visible if real is None else visible & real[:, None, :reach]


@torch.no_grad()
def _choose(
    indexer: Indexer, visible: torch.Tensor | None, top_k: int, current: int | torch.Tensor | None
) -> torch.Tensor:
    """Return the columns (B, S, top_k) of the largest scores; invisible ones where too few are visible."""
    scores = indexer.scores()
    if visible is not None:
        scores = scores.masked_fill_(~visible, -torch.inf)
    if current is not None:
        own = current + torch.arange(scores.shape[1], device=scores.device)[None, :, None]
        scores = scores.scatter_(-1, own.expand(scores.shape[0], -1, -1), torch.inf)
    return top_indices(scores, top_k)


def _attend_all(
    query: torch.Tensor,
    keys: torch.Tensor,
    indexer: Indexer | None,
    visible: torch.Tensor | None,
    value_dim: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to all visible keys (B, N, K); return output and divergence."""
    heads = query.shape[1:3]
    scores = ((query * scale).flatten(1, 2) @ keys.mT).unflatten(1, heads)
    weights = visible_softmax(scores, None if visible is None else visible[:, :, None])
    output = (weights.to(keys.dtype).flatten(1, 2) @ keys[..., :value_dim]).unflatten(1, heads)
    return output, None if indexer is None else _divergence(weights, indexer.scores(), visible)


def _attend_chosen(
    chosen: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    indexer: Indexer | None,
    seen: torch.Tensor | None,
    value_dim: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to the keys of the columns `chosen` (B, S, M), where `seen`; return output and divergence."""
    fetched = take_rows(keys, chosen.flatten(1)).unflatten(1, chosen.shape[1:])
    if indexer is None:
        return attend_own(query * scale, fetched, fetched, seen)[..., :value_dim], None
    weights = visible_softmax((query * scale) @ fetched.mT, None if seen is None else seen[:, :, None])
    output = weights.to(keys.dtype) @ fetched[..., :value_dim]
    return output, _divergence(weights, indexer.fetched(chosen).scores(), seen)


def _divergence(weights: torch.Tensor, scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Return KL(weights (B, S, H, N), averaged over heads || softmax of the scores (B, S, N)), (B, S)."""
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    target = weights.detach().mean(dim=2)
    return (torch.xlogy(target, target) - target * scores.log_softmax(dim=-1)).sum(dim=-1)
