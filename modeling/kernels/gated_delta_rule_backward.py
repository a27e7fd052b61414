# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The hand-written backward of `gated_delta_rule_forward.py`, which explains the letters.

With `dO` and `dS'` the gradients of a chunk's output and of the state after it, `E = exp(G)`, `W = exp(G_C - G) K`
and `P = lower(Q K^T) D`:

    dU = P^T dO + W dS'                      dR = T^T dU
    dS = exp(G_C) dS' + (E Q)^T dO - (beta E K)^T dR
    dP = (dO U^T) D                          dA = -strictly_lower(dR U^T) D
    dQ = E dO S^T + dP K
    r  = -E dR S^T + dA K                    w  = exp(G_C - G) U dS'^T + dP^T Q + (beta dA)^T K
    dK = beta r + w                          dV = beta dR
    dbeta = k . r + v . dR                   dG = q . dq + beta k . r - k . w,  + <dS', S'> at the last token

where `r` comes from keys that read the state and `w` from keys that write to it.
Queries and keys that read carry `exp(+G)`, keys that write carry `exp(-G)`, which is why the gradient of `G` needs
nothing but products of tensors with their own gradients. `dg` is the sum of `dG` from each token to the chunk's end.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loopergy.modeling.kernels.chunk_layout import ChunkLayout, Chunks
from loopergy.modeling.kernels.decay import LOG_DECAY_FLOOR, without_negligible_
from loopergy.modeling.kernels.gated_delta_rule_forward import (
    Gates,
    Inputs,
    Kept,
    Problem,
    Segment,
    Within,
    Workspace,
    advance,
    make_gates,
    pairs_of,
    state_at_start,
    within_chunks,
)


class Gradients(NamedTuple):
    """Gradients of the inputs, shaped like `Inputs`, and of the first states [D, B, H, K, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial: Tensor


class _Flow(NamedTuple):
    """Gradients inside a segment.

    Args:
        rows: [s, p, 2C, V], dO above dR.
        corrected: [s, p, C, V], dR once more, in one piece.
        read: [s, p, 2C, K], `rows` times the transposed state.
        starts: states before the chunks, None for zero.
        ends: [s, p, K, V], the states after the chunks.
        grad_ends: [s, p, K, V], their gradients.
    """

    rows: Tensor
    corrected: Tensor
    read: Tensor
    starts: list[Tensor | None]
    ends: Tensor
    grad_ends: Tensor


def _replay(
    layout: ChunkLayout,
    first: int,
    write: Tensor,
    gates: Gates,
    kept: Kept,
    state: Tensor | None,
    ends: Tensor,
    initial: Tensor | None,
) -> list[Tensor | None]:
    """Compute the states of a segment again: fill `ends` [s, p, K, V], return the states before the chunks."""
    s, p, chunk, _ = kept.updates.shape
    carries, writes = gates.carry.reshape(s, p, 1, 1).unbind(0), write.view(s, p, chunk, -1).mT.unbind(0)
    updates, results = kept.updates.unbind(0), ends.unbind(0)
    starts = []
    for i in range(s):
        starts.append(state_at_start(layout, first + i, state, initial))
        state = advance(starts[-1], carries[i], writes[i], updates[i], results[i])
    return starts


def _scan_back(
    layout: ChunkLayout,
    first: int,
    read: Tensor,
    write: Tensor,
    gates: Gates,
    kept: Kept,
    flow: _Flow,
    grad_updates: Tensor,
    grad_state: Tensor,
    grad_documents: Tensor,
) -> None:
    """Carry the gradient of the state backwards through a segment and fill `flow`.

    Args:
        layout: where the tokens stand.
        first: first chunk of the segment.
        read: [s, B, H, 2C, K], exp(G) Q above -beta exp(G) K.
        write: [s, B, H, C, K], exp(G_C - G) K.
        gates: the segment's.
        kept: T of the segment.
        flow: filled, but for `starts`, `ends` and the upper half of `rows`.
        grad_updates: [s, p, C, V], P^T dO; overwritten.
        grad_state: [p, K, V], gradient of the state after the segment; overwritten by that of the state before it.
        grad_documents: [D, p, K, V], gradients of the documents' last states; overwritten by those of their first
            ones.
    """
    s, p, chunk, _ = grad_updates.shape
    carries = gates.carry.reshape(s, p, 1, 1).unbind(0)
    inverses, reads = kept.inverse.mT.unbind(0), read.view(s, p, 2 * chunk, -1).mT.unbind(0)
    writes, updates = write.view(s, p, chunk, -1).unbind(0), grad_updates.unbind(0)
    rows, lower_rows, corrected = flow.rows.unbind(0), flow.rows[:, :, chunk:].unbind(0), flow.corrected.unbind(0)
    grad_reads, grad_ends = flow.read.unbind(0), flow.grad_ends.unbind(0)
    grad_ends[-1].copy_(grad_state)
    for i in reversed(range(s)):
        if first + i in layout.last_chunks:
            grad_ends[i].copy_(grad_documents[layout.last_chunks[first + i]])
        updates[i].baddbmm_(writes[i], grad_ends[i])
        lower_rows[i].copy_(torch.bmm(inverses[i], updates[i], out=corrected[i]))
        start = flow.starts[i]
        if start is None:
            grad_reads[i].zero_()
        else:
            torch.bmm(rows[i], start.mT, out=grad_reads[i])
        before = torch.mul(grad_ends[i], carries[i], out=grad_ends[i - 1] if i > 0 else grad_state)
        before.baddbmm_(reads[i], rows[i])
        if first + i in layout.first_chunks:
            grad_documents[layout.first_chunks[first + i]].copy_(before)


def _flow(
    space: Workspace,
    problem: Problem,
    segment: Segment,
    within: Within,
    gates: Gates,
    kept: Kept,
    grad_out: Tensor,
    grad_state: Tensor,
    initial: Tensor | None,
    grad_documents: Tensor,
) -> _Flow:
    """Return the gradients inside a segment; `grad_out` [s, B, H, C, V]; the others as in `_scan_back`."""
    layout, (s, p, chunk, values), width = problem.layout, kept.updates.shape, within.rows.shape[-1]
    n = s * p
    state = None if segment.index == 0 else kept.states[segment.index - 1]
    ends = space.take("ends", s, p, width, values)
    starts = _replay(layout, segment.first, within.write, gates, kept, state, ends, initial)

    stacked = within.rows.view(n, 2 * chunk, width)
    rows, upper_rows, _ = space.take_halves("grad_rows", *grad_out.shape[:3], 2 * chunk, values)
    upper_rows.copy_(grad_out)
    scores = torch.bmm(stacked[:, :chunk], stacked[:, chunk:].mT, out=space.take("scores", n, chunk, chunk))
    scores.mul_(within.decay.view(n, chunk, chunk))
    grad_updates = space.take("grad_updates", n, chunk, values)
    torch.bmm(scores.mT, upper_rows.flatten(0, 2), out=grad_updates)
    flow = _Flow(
        rows.flatten(1, 2),
        space.take("corrected", s, p, chunk, values),
        space.take("grad_read", s, p, 2 * chunk, width),
        starts,
        ends,
        space.take("grad_ends", s, p, width, values),
    )
    read = torch.mul(within.rows, gates.read, out=space.take("products", *within.rows.shape))
    grad_updates = grad_updates.view(s, p, chunk, values)
    _scan_back(layout, segment.first, read, within.write, gates, kept, flow, grad_updates, grad_state, grad_documents)
    return flow


def _row_gradients(space: Workspace, within: Within, gates: Gates, kept: Kept, flow: _Flow) -> tuple[Tensor, Tensor]:
    """Return dQ above r, [s, B, H, 2C, K], and w, [s, B, H, C, K]."""
    lead, chunk, width = within.write.shape[:3], *within.write.shape[3:]
    n = lead.numel()
    rows, updates = within.rows.view(n, 2 * chunk, width), kept.updates.flatten(0, 1)
    grad_scores = torch.bmm(flow.rows.flatten(0, 1), updates.mT, out=space.take("grad_scores", n, 2 * chunk, chunk))
    both = grad_scores.view(*lead, 2, chunk, chunk).mul_(within.decay.unsqueeze(3))
    both[..., 1, :, :].mul_(space.minus_past)
    read = flow.read.view(*lead, 2 * chunk, width).mul_(gates.row_decay)
    read.view(n, 2 * chunk, width).baddbmm_(grad_scores, rows[:, chunk:])

    write = torch.bmm(updates, flow.grad_ends.flatten(0, 1).mT, out=space.take("grad_updates", n, chunk, width))
    write.view(*lead, chunk, width).mul_(gates.write)
    both[..., 1, :, :].mul_(gates.beta)
    return read, write.baddbmm_(grad_scores.mT, rows).view(*lead, chunk, width)


def _input_gradients(
    space: Workspace, problem: Problem, within: Within, gates: Gates, kept: Kept, flow: _Flow, v: Tensor
) -> list[tuple[Tensor, Tensor | float]]:
    """Return the gradients of q, k, v, g, beta, each as two factors [s, B, H, C, ...] yet to be multiplied."""
    lead, chunk = within.write.shape[:3], within.write.shape[3]
    read, write = _row_gradients(space, within, gates, kept, flow)
    queries, keys = within.queries, within.keys
    query_factor, key_factor = kept.row_factor.view(*lead, 2 * chunk, 1).chunk(2, -2)
    corrected = flow.corrected.view(v.shape)
    # `within.write` and `flow.ends` have served; their place is used for products.
    row_dots = torch.mul(within.rows, read, out=space.take("products", *read.shape)).sum(-1, keepdim=True)
    query_dots, read_dots = row_dots[..., :chunk, :], row_dots[..., chunk:, :]
    write_dots = torch.mul(keys, write, out=within.write).sum(-1, keepdim=True)
    value_dots = torch.mul(v, corrected, out=space.take("products", *v.shape)).sum(-1, keepdim=True)
    state_dots = torch.mul(flow.ends, flow.grad_ends, out=flow.ends).flatten(2).sum(-1)

    key_dots = gates.beta * read_dots
    grad_total = (query_dots + key_dots - write_dots).squeeze(-1)
    grad_total[..., -1] += state_dots.view(lead)
    grad_q, grad_k = read[..., :chunk, :], write.addcmul_(read[..., chunk:, :], gates.beta)
    if problem.normalize:
        grad_q.addcmul_(queries, query_dots, value=-(problem.scale**-2))
        grad_k.addcmul_(keys, key_dots + write_dots, value=-1)
    return [
        (grad_q, query_factor),
        (grad_k, key_factor),
        (corrected, gates.beta),
        (grad_total.flip(-1).cumsum(-1).flip(-1), 1.0),
        ((read_dots + value_dots).squeeze(-1), 1.0),
    ]


def chunk_backward(
    problem: Problem,
    inputs: Inputs,
    initial: Tensor | None,
    all_kept: list[Kept],
    grad_out: Tensor,
    grad_final: Tensor,
) -> Gradients:
    """Return the gradients of all inputs.

    Args:
        problem: as given to `chunk_forward`.
        inputs: as given to `chunk_forward`.
        initial: as given to `chunk_forward`.
        all_kept: as returned by `chunk_forward`.
        grad_out: [B, L, H, V], gradient of the output, any strides.
        grad_final: [D, B, H, K, V], gradient of the final states.

    Returns:
        The gradients. That of `initial` is the gradient of the final state for documents without tokens.
    """
    layout, values, width = problem.layout, inputs.v.shape[-1], inputs.k.shape[-1]
    empty = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
    grads = Gradients._make((*empty, grad_final.clone()))
    all_gates = make_gates(layout, inputs.g, inputs.beta, problem.dtype)
    space = Workspace(inputs.v, problem)
    for segments, room in zip(problem.groups(inputs.v.shape[0], inputs.v.shape[2]), all_kept, strict=True):
        group_initial = None if initial is None else pairs_of(initial, segments[0])
        grad_documents = pairs_of(grads.initial, segments[0])
        grad_state = space.take("grad_state", grad_documents.shape[1], width, values)
        group = inputs.of_group(layout, segments[0])[:3]
        upstream = Chunks(layout, grad_out[segments[0].batch, :, segments[0].heads])
        targets = Inputs(*grads[:5]).of_group(layout, segments[0])
        for segment, gates in reversed(list(zip(segments, all_gates.parts(segments), strict=True))):
            kept = room.part(segment)
            q, k, v = (x.part(segment.first, segment.end) for x in group)
            within = within_chunks(space, q, k, gates, kept.row_factor, rows_are_copied=False)
            without_negligible_(within.decay)
            grad = upstream.part(segment.first, segment.end)
            flow = _flow(space, problem, segment, within, gates, kept, grad, grad_state, group_initial, grad_documents)
            results = _input_gradients(space, problem, within, gates, kept, flow, v)
            for target, (value, factor) in zip(targets, results, strict=True):
                with target.writing(segment.first, segment.end) as place:
                    torch.mul(value, factor, out=place)
    # Where the sum of log decays was clamped, the true gradient is zero and the computed one rounding noise.
    grads.g.masked_fill_(inputs.g <= -LOG_DECAY_FLOOR[problem.dtype] - 1, 0)
    return grads
