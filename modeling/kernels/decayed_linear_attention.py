# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Linear attention with decay in plain torch, per head (simple GLA) or per channel (GLA): sequence and step form.

Every head carries a state `S` of shape [K, V] and does, for every token `t`:

    S   <- exp(g_t) S + k_t v_t^T
    o_t  = S^T (scale q_t)

with `g_t` absent (linear attention), a number per head (RetNet), per token and head (Mamba2), or per token, head and
channel of the keys (GLA, HGRN2), which scales the rows of `S`. With `G` its sum from a chunk's start on and D as in
`decay.py`, a chunk of C tokens does

    O  = exp(G) Q S + (lower(Q K^T) D) V
    S <- exp(G_C) S + (exp(G_C - G) K)^T V

Names, arguments and layouts are those of flash-linear-attention. One expression per kernel serves forward, backward
and tracers (`segments.py`).

Shape letters: B batch, T length, H value heads, G heads of queries and keys, K key width, V value width, D documents,
s chunks of a segment, p (row, head) pairs, C tokens of a chunk, r = H / G.

Source: Yang et al., "Gated Linear Attention Transformers" (arXiv 2312.06635), section 4; Dao and Gu, "Transformers are
SSMs" (arXiv 2405.21060), section 6.
"""

from functools import partial

import torch
from torch import Tensor

from loopergy.modeling.kernels.decay import (
    HeadDecay,
    channel_chunk_size,
    channel_chunks,
    mild_decays,
    pass_state,
    scan,
)
from loopergy.modeling.kernels.precision import own_precision
from loopergy.modeling.kernels.segments import Call, Space, checked_call, run, to_chunks

_CHUNK = 32
_CHANNEL_CHUNK = 32


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run linear attention with no decay or one per head over sequences, chunk by chunk.

    Memory is linear in T. Differentiable any number of times with respect to everything that is a tensor.

    Args:
        q: [B, T, G, K], queries. G may divide the number of value heads: heads that share queries and keys cost one
            product for all (Mamba2).
        k: [B, T, G, K], keys.
        v: [B, T, H, V], values.
        g: [B, T, H], natural logarithm of the decay, at most 0, -inf allowed; None for no decay.
        scale: factor of the queries; K ** -0.5 if None.
        initial_state: [B, H, K, V] (with `cu_seqlens`: [D, H, K, V]), the state to continue from; zeros if None.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: [D + 1], boundaries of the documents packed into the single row, rising from 0 to T; None for
            one document per row.
        chunk_size: tokens per chunk; 32 if None. Changes speed, not results.

    Returns:
        Output [B, T, H, V] in the dtype of `v`, and the final state ([B or D, H, K, V], float32, or float64 if any
        input is float64) or None.

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    call = _checked_simple(q, k, v, g, scale, initial_state, cu_seqlens)
    size = call.chunk_size(chunk_size, _CHUNK)
    out, final = run(call, partial(_simple_rule, size), size)
    return out, final if output_final_state else None


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run linear attention with a decay per channel over sequences, chunk by chunk.

    Exact for any decay: on a CPU, chunks with mild decays (none below e^-40 over a chunk) take one matrix product; the
    others are cut in halves.

    Args:
        q, k: [B, T, H, K], queries and keys.
        v: [B, T, H, V], values.
        g: [B, T, H, K], natural logarithm of the decay per key channel, at most 0, -inf allowed.
        chunk_size: tokens per chunk, a power of two; 32 if None. Changes speed, not results.
        scale, initial_state, output_final_state, cu_seqlens: as in [`chunk_simple_gla`].

    Returns:
        As [`chunk_simple_gla`].

    Raises:
        ValueError: shapes that do not fit together, a chunk size that is no power of two, or `cu_seqlens` with more
            than one row.
    """
    call = _checked_channel(q, k, v, g, scale, initial_state, cu_seqlens)
    size = channel_chunk_size(call, chunk_size, _CHANNEL_CHUNK)
    out, final = run(call, partial(_channel_rule, size), size)
    return out, final if output_final_state else None


def recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run linear attention with no decay or one per head token by token; arguments as in [`chunk_simple_gla`].

    Differentiable by autograd any number of times, at the price of one state per token.
    """
    call = _checked_simple(q, k, v, g, scale, initial_state, cu_seqlens)
    return _all_steps(call, output_final_state)


def recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run linear attention with a decay per channel token by token; arguments as in [`chunk_gla`].

    Differentiable by autograd any number of times, at the price of one state per token.
    """
    call = _checked_channel(q, k, v, g, scale, initial_state, cu_seqlens)
    return _all_steps(call, output_final_state)


def _checked_simple(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Call:
    if g is not None and g.shape != v.shape[:3]:
        raise ValueError(f"`g` must be {tuple(v.shape[:3])} like `v`, got {tuple(g.shape)}.")
    return checked_call((q, k, v) if g is None else (q, k, v, g), scale, state, cu_seqlens)


def _checked_channel(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None, state: Tensor | None, cu_seqlens: Tensor | None
) -> Call:
    if k.shape[:3] != v.shape[:3] or g.shape != k.shape:
        raise ValueError(
            "`q`, `k` and `g` must be [B, T, heads, K] and `v` [B, T, heads, V], "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, g {tuple(g.shape)}."
        )
    return checked_call((q, k, v, g), scale, state, cu_seqlens)


def _simple_rule(
    size: int, space: Space, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the expression at the head of this file to some tokens; a [`Rule`]."""
    shared, take = v.shape[2] // k.shape[2], space.take
    q, k, v = to_chunks(q, size, space, "q"), to_chunks(k, size, space, "k"), to_chunks(v, size, space, "v")
    n = k.shape[0] * k.shape[1]
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out=take("scores", n, size, size))[:, None]
    since = until = carry = None
    if g is None:
        scores = (scores.tril_() if space.reuse else scores.tril()).expand(-1, shared, -1, -1)
    else:
        decays = HeadDecay(space, to_chunks(g, size).flatten(0, 1))
        between = decays.between.unflatten(0, (n, shared))
        scores = torch.mul(scores, between, out=space.over(between))
        since, until = (x.unflatten(0, v.shape[:2]) for x in (decays.since, decays.until))
        carry = since[:, :, -1:]
    scores = scores.reshape(*v.shape[:3], size)
    if shared > 1:
        return _read_shared(space, scores, q, k, v, since, until, state)
    if since is not None and until is not None:
        q, k = torch.mul(q, since, out=space.over(q)), torch.mul(k, until, out=space.over(k))
    return pass_state(space, scores, q, k, v, carry, state)


def _read_shared(
    space: Space,
    scores: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    since: Tensor | None,
    until: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Do what [`pass_state`] does for r heads that share queries and keys: their values lie side by side in products.

    Args:
        space: where results go.
        scores: [s, p r, C, C], what tokens of a chunk take from each other.
        q, k: [s, p, C, K], queries and keys of the p groups.
        v: [s, p r, C, V], values.
        since, until: [s, p r, C, 1], decays from the chunk's start and to its end; None for none.
        state: [b, h, K, V].
    """
    (_, groups, size, width), (_, heads, _, values), take = q.shape, v.shape, space.take
    shared = heads // groups

    def beside(x: Tensor) -> Tensor:
        """Return [s, p r, rows, V] as [s p, rows, r V]."""
        return x.unflatten(1, (groups, shared)).transpose(2, 3).flatten(3).flatten(0, 1)

    def apart(x: Tensor) -> Tensor:
        """Return [s p, rows, r V] as [s, p r, rows, V]."""
        return x.unflatten(0, (-1, groups)).unflatten(3, (shared, values)).transpose(2, 3).flatten(1, 2)

    n = len(q) * groups
    out = torch.bmm(scores.flatten(0, 1), v.flatten(0, 1), out=take("out", n * shared, size, values)).view(v.shape)
    written = v if until is None else torch.mul(v, until, out=space.over(v))
    writes = torch.bmm(k.flatten(0, 1).mT, beside(written), out=take("writes", n, width, shared * values))
    carry = None if since is None else since[:, :, -1:]
    before, after = scan(space, carry, apart(writes), state.flatten(0, 1))
    read = apart(torch.bmm(q.flatten(0, 1), beside(before), out=take("read", n, size, shared * values)))
    if since is None:
        return torch.add(out, read, out=space.over(out)), after.view_as(state)
    return torch.addcmul(out, read, since, out=space.over(out)), after.view_as(state)


def _channel_rule(
    size: int, space: Space, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the expression at the head of this file, with a decay per channel, to some tokens; a [`Rule`]."""
    if space.reuse and len(g) == 1 and g.shape[1] % size == 0:
        done = _mild_row(size, space, state, q, k, v, g)
        if done is not None:
            return done
    q, k, v, g = (to_chunks(x, size).to(space.dtype) for x in (q, k, v, g))
    chunks = channel_chunks(space, [q], k, g)
    scores, read, write = (x.view(*g.shape[:2], size, -1) for x in chunks[:3])
    return pass_state(space, scores, read, write, v, chunks.carry.view(*g.shape[:2], -1, 1), state, chunks.divided)


def _mild_row(
    size: int, space: Space, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Do the same to full chunks of one row where decays are mild, else return None.

    Up to the products all heads' channels stay side by side, as they are stored: so memory is gone through from front
    to back, which a CPU reads ahead.
    """
    chunks, heads = g.shape[1] // size, g.shape[2]

    def apart(x: Tensor) -> Tensor:
        """Return [s, 1, C, h X] as [s, h, C, X]."""
        return x.view(chunks, size, heads, -1).transpose(1, 2)

    q, k, v, g = (x.to(space.dtype).reshape(chunks, 1, size, -1) for x in (q, k, v, g))
    decays = mild_decays(g, space.take("decays", *g.shape))
    scores = space.take("scores", chunks, heads, size, size)
    if decays is None or scores is None:
        return None
    carry = decays[:, :, -1].clone().view(chunks, heads, -1, 1)
    read = apart(torch.mul(q, decays, out=space.take("read", *g.shape)))
    write = apart(torch.div(k, decays, out=decays))
    for rows, keys, target in zip(read.unbind(0), write.mT.unbind(0), scores.unbind(0), strict=True):
        torch.bmm(rows, keys, out=target)
    return pass_state(space, scores.tril_(), read, write, apart(v), carry, state, divided=True)


def _all_steps(call: Call, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """Take all tokens of all documents, one by one."""
    with own_precision(call.tensors[2]):
        q, k, v, *gates = (x.to(call.dtype) for x in call.ungrouped().tensors)
        q = q * call.scale
        factor = None
        if gates:
            factor = gates[0].exp()[..., None]
            factor = factor[..., None] if factor.dim() == 4 else factor
        finals, outputs = list(call.first_states().unbind(0)), []
        for document, (start, stop) in enumerate(call.documents()):
            for t in range(start, stop):
                state = finals[document] if factor is None else finals[document] * factor[:, t]
                finals[document] = state + k[:, t, :, :, None] * v[:, t, :, None]
                outputs.append((q[:, t, :, None] @ finals[document]).squeeze(2))
        out = torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    final = call.states_as_given(torch.stack(finals)) if output_final_state else None
    return out.to(call.tensors[2].dtype), final
