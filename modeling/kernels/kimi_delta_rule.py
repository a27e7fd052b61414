# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The delta rule with a decay per channel (Kimi Delta Attention) in plain torch: sequence form and step form.

Every head carries a state `S` of shape [K, V] and does, for every token `t`, with a log decay `g_t` per row of S:

    S   <- diag(exp(g_t)) S
    S   <- S + k_t (beta_t (v_t - S^T k_t))^T
    o_t  = S^T (scale q_t)

The decay comes first: one that differs from channel to channel does not commute with the write. With D as in
`decay.py`, and `lower`, `strict` the lower triangles of `sum_c rows_ic D_ijc k_jc` with and without diagonal, a chunk
of C tokens does

    T = (I + beta strict(K))^-1
    U = T beta (V - (exp(G) K) S)
    O = (exp(G) Q) S + lower(Q) U
    S <- exp(G_C) S + (exp(G_C - G) K)^T U

Names, arguments and layouts are those of flash-linear-attention.

Shape letters: B batch, T length, H heads, K key width, V value width, D documents, s chunks of a segment, p (row,
head) pairs, n = s * p, C tokens of a chunk.

Source: Kimi Team, "Kimi Linear" (arXiv 2510.26692), section 3.
"""

from functools import partial

import torch
from torch import Tensor

from loopergy.modeling.kernels.decay import channel_chunk_size, channel_chunks, pass_on
from loopergy.modeling.kernels.precision import own_precision
from loopergy.modeling.kernels.segments import Call, Space, checked_call, run, to_chunks
from loopergy.modeling.kernels.tracing import is_traced
from loopergy.modeling.kernels.triangular_inverse import unit_lower_inverse
from loopergy.modeling.kernels.unit_length import unit_length

_CHUNK = 16


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the delta rule with a decay per channel over sequences, chunk by chunk.

    Memory is linear in T. Differentiable any number of times with respect to everything that is a tensor. Exact for
    any decay: see [`loopergy.modeling.kernels.decay`].

    Args:
        q: [B, T, H, K], queries. H may divide the number of value heads, each query and key head then serves a run of
            value heads.
        k: [B, T, H, K], keys.
        v: [B, T, H, V], values.
        g: [B, T, H, K], natural logarithm of the decay per value head and key channel, at most 0, -inf allowed.
        beta: [B, T, H], write strength, up to 2 for keys of unit length.
        scale: factor of the queries; K ** -0.5 if None.
        initial_state: [B, H, K, V] (with `cu_seqlens`: [D, H, K, V]), the state to continue from; zeros if None.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: whether to divide queries and keys by sqrt(|x|^2 + 1e-6) first.
        cu_seqlens: [D + 1], boundaries of the documents packed into the single row, rising from 0 to T; None for
            one document per row.
        chunk_size: tokens per chunk, a power of two; 16 if None. Changes speed, not results.

    Returns:
        Output [B, T, H, V] in the dtype of `v`, and the final state ([B or D, H, K, V], float32, or float64 if any
        input is float64) or None.

    Raises:
        ValueError: shapes that do not fit together, a chunk size that is no power of two, or `cu_seqlens` with more
            than one row.
    """
    call = _checked(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    size = channel_chunk_size(call, chunk_size, _CHUNK)
    out, final = run(call, partial(_rule, use_qk_l2norm_in_kernel, size), size)
    return out, final if output_final_state else None


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the delta rule with a decay per channel token by token; arguments as in [`chunk_kda`].

    Differentiable by autograd any number of times, at the price of one state per token.
    """
    call = _checked(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    with own_precision(v):
        q, k, v, g, beta = (x.to(call.dtype) for x in call.tensors)
        if use_qk_l2norm_in_kernel:
            q, k = unit_length(q), unit_length(k)
        q, factor = q * call.scale, g.exp()[..., None]
        finals, outputs = list(call.first_states().unbind(0)), []
        for document, (start, stop) in enumerate(call.documents()):
            for t in range(start, stop):
                state, key = finals[document] * factor[:, t], k[:, t, :, :, None]
                written = beta[:, t, :, None, None] * (v[:, t, :, None] - key.mT @ state)
                finals[document] = state + key * written
                outputs.append((q[:, t, :, None] @ finals[document]).squeeze(2))
        out = torch.stack(outputs, 1) if outputs else torch.zeros_like(v)
    return out.to(call.tensors[2].dtype), call.states_as_given(torch.stack(finals)) if output_final_state else None


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Call:
    call = checked_call((q, k, v, g, beta), scale, state, cu_seqlens).ungrouped()
    if g.shape != (*v.shape[:3], *k.shape[3:]) or beta.shape != v.shape[:3]:
        raise ValueError(
            f"`g` must be {(*v.shape[:3], *k.shape[3:])} and `beta` {tuple(v.shape[:3])} for these keys and values, "
            f"got g {tuple(g.shape)}, beta {tuple(beta.shape)}."
        )
    return call


def _rule(
    normalize: bool,
    size: int,
    space: Space,
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor]:
    """Apply the expression at the head of this file to some tokens; a [`Rule`]."""
    q, k, g = (to_chunks(x, size).to(space.dtype) for x in (q, k, g))
    v, beta = to_chunks(v, size, space, "v"), to_chunks(beta, size, space, "beta")
    (s, p, _, width), values, n, take = g.shape, v.shape[-1], g.shape[0] * g.shape[1], space.take
    if normalize:
        q, k = unit_length(q, take("q", *q.shape)), unit_length(k, take("k", *k.shape))
    scores, read, write, carry, divided = channel_chunks(space, (q, k), k, g)

    strength = beta.view(n, size, 1)
    system = torch.mul(scores[:, 1], strength, out=take("system", n, size, size))
    inverse = _inverse(space, system)
    pending = torch.mul(v.flatten(0, 1), strength, out=space.over(v.flatten(0, 1)))
    alone = torch.bmm(inverse, pending, out=take("updates", n, size, values)).view(s, p, size, values)
    strong = torch.mul(read[:, 1], strength, out=take("strong", n, size, width))
    recall = torch.bmm(inverse, strong, out=take("recall", n, size, width)).view(s, p, size, width)
    write, carry = write.view(s, p, size, width).mT, carry.view(s, p, width, 1)
    before, updates, after = _scan(space, alone, recall, write, carry, divided, state.flatten(0, 1))

    out = torch.bmm(scores[:, 0], updates.flatten(0, 1), out=space.over(pending))
    out = torch.baddbmm(out, read[:, 0], before.flatten(0, 1), out=space.over(out))
    return out.view(s, p, size, values), after.view_as(state)


def _inverse(space: Space, system: Tensor) -> Tensor:
    """Return the inverse of I + the strictly lower part of [n, C, C]."""
    if is_traced():
        return unit_lower_inverse(system)
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    return torch.linalg.solve_triangular(
        system, eye, upper=False, unitriangular=True, out=space.take("inverse", *system.shape)
    )


def _scan(
    space: Space, alone: Tensor, recall: Tensor, write: Tensor, carry: Tensor, divided: bool, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state through the chunks.

    Args:
        space: where results go.
        alone: [s, p, C, V], T beta V, overwritten in buffers.
        recall: [s, p, C, K], T beta exp(G) K.
        write: [s, p, K, C], keys that write.
        carry: [s, p, K, 1], decay of the chunks.
        divided: as in `ChannelChunks`.
        state: [p, K, V].

    Returns:
        The states before the chunks [s, p, K, V], what the chunks write [s, p, C, V], and the state after the last.
    """
    room = space.take("states", len(alone) + 1, *state.shape)
    places = None if room is None else room.unbind(0)
    states, updates = [], []
    if places is not None:
        state = places[0].copy_(state)
    steps = zip(*(x.unbind(0) for x in (alone, recall, write, carry)), strict=True)
    for i, (own, recalled, key, factor) in enumerate(steps):
        states.append(state)
        updates.append(torch.baddbmm(own, recalled, state, alpha=-1, out=space.over(own)))
        state = pass_on(state, key, updates[-1], factor, divided, out=None if places is None else places[i + 1])
    if room is not None:
        return room[:-1], alone, state
    return torch.stack(states), torch.stack(updates), state
