# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The gated delta rule over whole sequences in plain torch: chunked, cache blocked, with a hand-written backward.

Inside a chunk of `C` tokens, with `G` the running sum of the log decays `g`, `D_ij = exp(G_i - G_j)` for `j <= i`
(else 0) and `S` the state at the chunk's start, the recurrence of `gated_delta_rule_torch.py` is the same as

    T = (I + strictly_lower(beta_i (k_i . k_j) D_ij))^-1
    R = beta (V - exp(G) K S)              what each token would write if it were alone in its chunk
    U = T R                                what it writes, corrected for the tokens before it
    O = exp(G) Q S + (lower(Q K^T) D) U
    S <- exp(G_C) S + (exp(G_C - G) K)^T U

No decay is ever turned round: only exponentials of numbers <= 0 are taken. The state passes through one product per
chunk; all else is done for a segment of chunks at once, in buffers that stay in the processor's cache. Backward keeps
the inputs and one state per segment and computes the rest again.

Shape letters: B batch, L length, H heads, K key width, V value width, C tokens of a chunk, s chunks of a segment, p =
B * H pairs worked on together, D documents. "Rows" are the C query rows of a chunk above its C key rows.

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464), section 3.3. Unlike there, T is not multiplied into K.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from loopergy.modeling.kernels.chunk_layout import ChunkLayout

# Decays below exp(-floor) count as zero. That is far below the rounding error of the sums they would enter, and far
# above the denormal numbers that make processors a hundred times slower.
LOG_DECAY_FLOOR = {torch.float32: 35.0, torch.float64: 80.0}
L2_EPS = 1e-6


class Segment(NamedTuple):
    """A run of chunks of a group of (batch, head) pairs: what is worked on at once."""

    index: int
    first: int
    end: int
    batch: slice
    heads: slice


class Problem(NamedTuple):
    """How to cut and compute one call.

    Args:
        layout: where the tokens stand.
        scale: factor of the queries.
        normalize: whether queries and keys are divided by their length.
        dtype: of all arithmetic and of the states.
        pairs: (batch, head) pairs in a group, at most.
        chunks: chunks in a segment, at most.
    """

    layout: ChunkLayout
    scale: float
    normalize: bool
    dtype: torch.dtype
    pairs: int
    chunks: int

    def groups(self, batch: int, heads: int) -> list[list[Segment]]:
        """Return the segments of every group, in order. A group has all heads of some rows or some of one row."""
        rows, columns = max(1, self.pairs // heads), min(heads, self.pairs)
        firsts = list(enumerate(range(0, self.layout.num_chunks, self.chunks)))
        if not firsts:
            return []
        return [
            [
                Segment(
                    index,
                    first,
                    min(first + self.chunks, self.layout.num_chunks),
                    slice(row, row + rows),
                    slice(head, head + columns),
                )
                for index, first in firsts
            ]
            for row in range(0, batch, rows)
            for head in range(0, heads, columns)
        ]


class Inputs(NamedTuple):
    """The tensors of a call: q, k [B, L, H, K], v [B, L, H, V], g, beta [B, L, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def part(self, layout: ChunkLayout, segment: Segment) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v of a segment as [s, B, H, C, K or V]."""
        q, k, v = (
            layout.to_chunks(x[segment.batch, :, segment.heads], segment.first, segment.end)
            for x in (self.q, self.k, self.v)
        )
        return q, k, v


class Gates(NamedTuple):
    """What decays and write strengths amount to inside each chunk.

    Args:
        beta: [chunks, B, H, C], write strength.
        log_decay: [chunks, B, H, C], sum of the log decays from the chunk's start on.
        log_decay_rest: [chunks, B, H, C], what rounding took from `log_decay`.
        row_decay: [chunks, B, H, 2C], exp(G) for query rows, -exp(G) for key rows.
        read: [chunks, B, H, 2C], exp(G) for query rows, -beta exp(G) for key rows.
        write: [chunks, B, H, C], exp(G_C - G).
        carry: [chunks, B, H, 1], exp(G_C).
    """

    beta: Tensor
    log_decay: Tensor
    log_decay_rest: Tensor
    row_decay: Tensor
    read: Tensor
    write: Tensor
    carry: Tensor

    def part(self, segment: Segment) -> "Gates":
        """Return those of a segment."""
        return Gates(*(gate[segment.first : segment.end, segment.batch, segment.heads] for gate in self))


class Workspace:
    """The buffers of one call, found again by name so that the next segment meets them warm in the cache."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype, self.buffers = like, dtype, dict[str, Tensor]()

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the buffer of that name, of that shape, filled with anything."""
        numel = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < numel:
            self.buffers[name] = self.like.new_empty(numel, dtype=self.dtype)
        return self.buffers[name][:numel].view(shape)


class Within(NamedTuple):
    """What chunks compute without looking at a state: [s, B, H, 2C or C, K or C]."""

    rows: Tensor
    row_norms: Tensor | None
    read: Tensor
    write: Tensor
    decay: Tensor


class Kept(NamedTuple):
    """What forward leaves to backward for one group of p pairs.

    Args:
        states: [segments - 1, p, K, V], the states between segments.
        updates: [chunks, p, C, V], U.
        inverse: [chunks, p, C, C], T.
    """

    states: Tensor
    updates: Tensor
    inverse: Tensor

    def part(self, segment: Segment) -> "Kept":
        """Return all states, and U and T of a segment."""
        return Kept(self.states, self.updates[segment.first : segment.end], self.inverse[segment.first : segment.end])


def floored_exp_(log_decay: Tensor, floor: float) -> Tensor:
    """Turn log decays into decays in place, with exact zeros for the negligible ones and for -inf."""
    return torch.nn.functional.threshold_(log_decay.clamp_(min=-floor).exp_(), math.exp(-floor) * 1.001, 0.0)


def sum_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of log decays: differences of float32 sums lose three digits at strong decay."""
    return dtype if device.type == "mps" else torch.float64


def make_gates(layout: ChunkLayout, g: Tensor, beta: Tensor, dtype: torch.dtype) -> Gates:
    """Return the gates of all chunks for log decays `g` and write strengths `beta`, both [B, L, H]."""
    floor = LOG_DECAY_FLOOR[dtype]
    beta = layout.to_chunks(beta, 0, layout.num_chunks).to(dtype)
    # Summed in float64 and kept as a pair of numbers: differences of long sums would cost three digits at strong
    # decay. Clamped because -inf - -inf is not a number.
    total = layout.to_chunks(g, 0, layout.num_chunks).to(torch.float64).clamp(min=-floor - 1).cumsum(-1)
    log_decay = total.to(dtype)
    write = floored_exp_(total[..., -1:] - total, floor).to(dtype)
    since = floored_exp_(total.clone(), floor).to(dtype)
    row_decay, read = torch.cat([since, -since], -1), torch.cat([since, -beta * since], -1)
    return Gates(beta, log_decay, (total - log_decay).to(dtype), row_decay, read, write, since[..., -1:])


def within_chunks(space: Workspace, problem: Problem, q: Tensor, k: Tensor, gates: Gates) -> Within:
    """Compute what needs no state, for chunks of queries and keys [s, B, H, C, K]."""
    chunk, width = k.shape[-2:]
    lead = k.shape[:3]
    rows = space.take("rows", *lead, 2 * chunk, width)
    rows[..., :chunk, :].copy_(q)
    rows[..., chunk:, :].copy_(k)
    row_norms = None
    if problem.normalize:
        row_norms = (
            torch.linalg.vector_norm(rows.view(-1, width), dim=-1)
            .square_()
            .add_(L2_EPS)
            .rsqrt_()
            .view(*lead, 2 * chunk)
        )
        row_norms[..., :chunk].mul_(problem.scale)
        rows.mul_(row_norms[..., None])
    else:
        rows[..., :chunk, :].mul_(problem.scale)
    read = torch.mul(rows, gates.read[..., None], out=space.take("read", *lead, 2 * chunk, width))
    write = torch.mul(rows[..., chunk:, :], gates.write[..., None], out=space.take("write", *lead, chunk, width))

    decay = space.take("decay", *lead, chunk, chunk)
    torch.sub(gates.log_decay[..., :, None], gates.log_decay[..., None, :], out=decay)
    decay.add_(gates.log_decay_rest[..., :, None]).sub_(gates.log_decay_rest[..., None, :])
    # The future is pushed below the floor before the exponential, which could be infinite there.
    decay.sub_(decay.new_full((chunk, chunk), torch.inf).triu_(1))
    return Within(rows, row_norms, read, write, floored_exp_(decay, LOG_DECAY_FLOOR[problem.dtype]))


def _scores_and_inverse(space: Workspace, within: Within, gates: Gates, inverse: Tensor) -> Tensor:
    """Return lower(Q K^T) D as [n, C, C] and fill `inverse` [n, C, C] with T."""
    lead, chunk, width = within.write.shape[:3], *within.write.shape[3:]
    n = lead.numel()
    rows = within.rows.view(n, 2 * chunk, width)
    scores = torch.bmm(rows, rows[:, chunk:].mT, out=space.take("scores", n, 2 * chunk, chunk))
    both = scores.view(*lead, 2, chunk, chunk)
    system = torch.mul(both[..., 1, :, :], within.decay, out=space.take("system", *lead, chunk, chunk)).mul_(
        gates.beta[..., None]
    )
    both[..., 0, :, :].mul_(within.decay)
    eye = torch.eye(chunk, dtype=rows.dtype, device=rows.device)
    torch.linalg.solve_triangular(system.view(n, chunk, chunk), eye, upper=False, unitriangular=True, out=inverse)
    return scores[:, :chunk]


def pairs_of(states: Tensor | None, segment: Segment) -> Tensor | None:
    """Return a group's part [D, p, K, V] of states [D, B, H, K, V]; always a view."""
    return None if states is None else states[:, segment.batch, segment.heads].flatten(1, 2)


def state_at_start(layout: ChunkLayout, chunk: int, carried: Tensor | None, initial: Tensor | None) -> Tensor | None:
    """Return the state [p, K, V] before a chunk, None for zero: the one carried there or a document's first."""
    if chunk not in layout.first_chunks:
        return carried
    return None if initial is None else initial[layout.first_chunks[chunk]]


def advance(state: Tensor | None, carry: Tensor, write: Tensor, update: Tensor, out: Tensor) -> Tensor:
    """Return the state [p, K, V] after a chunk, in `out`."""
    if state is None:
        return torch.bmm(write.mT, update, out=out)
    return torch.mul(state, carry, out=out).baddbmm_(write.mT, update)


def _scan(
    layout: ChunkLayout, first: int, within: Within, gates: Gates, pending: Tensor, kept: Kept, state: Tensor | None,
        buffer: Tensor,
    initial: Tensor | None, final: Tensor,
) -> None:  # fmt: skip
    """Carry the state through a segment.

    Args:
        layout: where the tokens stand.
        first: first chunk of the segment.
        within: what needs no state.
        gates: the segment's.
        pending: [s, p, 2C, V], zeros above beta V; what the state gives to queries and keys is added.
        kept: T and U of the segment; U is filled.
        state: [p, K, V], or None for zero.
        buffer: [p, K, V], left with the state after the segment; may be `state`.
        initial: [D, p, K, V], the documents' first states, or None for zeros.
        final: [D, p, K, V], filled with their last states.
    """
    s, p, chunk, _ = kept.updates.shape
    width = within.rows.shape[-1]
    carries = gates.carry.reshape(s, p, 1, 1).unbind(0)
    reads, writes = within.read.view(s, p, 2 * chunk, width).unbind(0), within.write.view(s, p, chunk, width).unbind(0)
    targets, sources = pending.unbind(0), pending[:, :, chunk:].unbind(0)
    inverses, updates = kept.inverse.unbind(0), kept.updates.unbind(0)
    for i in range(s):
        state = state_at_start(layout, first + i, state, initial)
        if state is not None:
            targets[i].baddbmm_(reads[i], state)
        torch.bmm(inverses[i], sources[i], out=updates[i])
        state = advance(state, carries[i], writes[i], updates[i], buffer)
        if first + i in layout.last_chunks:
            final[layout.last_chunks[first + i]].copy_(state)


def _room_to_keep(
    space: Workspace, problem: Problem, segments: list[Segment], p: int, widths: tuple[int, int], keep: bool
) -> Kept:
    """Return tensors for what a group's segments leave behind, or one segment's worth of the workspace."""
    chunk, (width, values) = problem.layout.chunk_size, widths
    if keep:
        count = segments[-1].end
        shapes = (len(segments) - 1, p, width, values), (count, p, chunk, values), (count, p, chunk, chunk)
        return Kept(*(space.like.new_empty(shape, dtype=space.dtype) for shape in shapes))
    count = segments[0].end
    none = space.take("none", 0, p, width, values)
    return Kept(none, space.take("updates", count, p, chunk, values), space.take("inverse", count, p, chunk, chunk))


def chunk_forward(
    problem: Problem, inputs: Inputs, initial: Tensor | None, final: Tensor, keep: bool
) -> tuple[Tensor, list[Kept]]:
    """Run the rule forward.

    Args:
        problem: how to cut the call.
        inputs: its tensors.
        initial: [D, B, H, K, V], first states, or None for zeros.
        final: [D, B, H, K, V], filled with the last states of the documents that have tokens.
        keep: whether backward will follow.

    Returns:
        The output [B, L, H, V] in the dtype of `v`, and what backward needs of each group (nothing unless `keep`).
    """
    layout, chunk = problem.layout, problem.layout.chunk_size
    width, values = inputs.k.shape[-1], inputs.v.shape[-1]
    all_gates = make_gates(layout, inputs.g, inputs.beta, problem.dtype)
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    space, all_kept = Workspace(inputs.v, problem.dtype), []
    for segments in problem.groups(inputs.v.shape[0], inputs.v.shape[2]):
        group_initial, group_final = pairs_of(initial, segments[0]), pairs_of(final, segments[0])
        p, state = group_final.shape[1], None
        buffer = space.take("state", p, width, values)
        room = _room_to_keep(space, problem, segments, p, (width, values), keep)
        for segment in segments:
            gates = all_gates.part(segment)
            q, k, v = inputs.part(layout, segment)
            within = within_chunks(space, problem, q, k, gates)
            if keep and state is not None:
                room.states[segment.index - 1].copy_(state)
            kept = (
                room.part(segment) if keep else room.part(segment._replace(first=0, end=segment.end - segment.first))
            )
            scores = _scores_and_inverse(space, within, gates, kept.inverse.flatten(0, 1))
            pending = space.take("pending", *v.shape[:3], 2 * chunk, values)
            pending[..., :chunk, :].zero_()
            torch.mul(v, gates.beta[..., None], out=pending[..., chunk:, :])
            _scan(
                layout,
                segment.first,
                within,
                gates,
                pending.flatten(1, 2),
                kept,
                state,
                buffer,
                group_initial,
                group_final,
            )
            state = buffer
            inside = torch.bmm(
                scores, kept.updates.flatten(0, 1), out=space.take("inside", scores.shape[0], chunk, values)
            )
            with layout.writing(out[segment.batch, :, segment.heads], segment.first, segment.end) as place:
                torch.add(inside.view(v.shape), pending[..., :chunk, :], out=place)
        if keep:
            all_kept.append(room)
    return out, all_kept
