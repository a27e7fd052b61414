# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The gated delta rule over whole sequences in plain torch: chunked, cache blocked, with a hand-written backward.

Inside a chunk of `C` tokens, with `G` the running sum of the log decays `g`, `D_ij = exp(G_i - G_j)` for `j <= i`
(else 0) and `S` the state at the chunk's start, the recurrence of `gated_delta_rule_torch.py` is the same as

    T = (I + strictly_lower(beta_i (k_i . k_j) D_ij))^-1
    R = beta (V - exp(G) K S)              what each token would write if it were alone in its chunk
    U = T R                                what it writes, corrected for the tokens before it
    O = exp(G) Q S + (lower(Q K^T) D) U
    S <- exp(G_C) S + (exp(G_C - G) K)^T U

Nothing is divided by a decay: only exponentials of numbers <= 0 are taken. The state passes through one product per
chunk; all else is done for a segment of chunks at once, in buffers that stay in the processor's cache. Backward is
left the inputs, T, U and one state per segment, and computes the rest again.

Shape letters: B batch, L length, H heads, K key width, V value width, C tokens of a chunk, s chunks of a segment,
p pairs of a row and a head that are worked on together, n = s * p, D documents. "Rows" are the C query rows of a chunk
above its C key rows.

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464), section 3.3. Unlike there, T is not multiplied into K.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from loopergy.modeling.kernels.chunk_layout import ChunkLayout, Chunks
from loopergy.modeling.kernels.decay import LOG_DECAY_FLOOR, running_sums, without_negligible_
from loopergy.modeling.kernels.segments import Buffers
from loopergy.modeling.kernels.unit_length import inverse_length


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
        rows, columns = max(1, self.pairs // heads), -(-heads // -(-heads // self.pairs))
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

    def of_group(self, layout: ChunkLayout, segment: Segment) -> list[Chunks]:
        """Return the chunks of every tensor, of the group that a segment belongs to."""
        return [Chunks(layout, x[segment.batch, :, segment.heads]) for x in self]


class Gates(NamedTuple):
    """What decays and write strengths amount to inside each chunk; every tensor [chunks, B, H, rows, 1].

    Args:
        beta: C rows, write strength.
        log_decay: C rows, sum of the log decays from the chunk's start on.
        log_decay_rest: C rows, what rounding took from `log_decay`.
        row_decay: 2C rows, exp(G) for queries, -exp(G) for keys.
        read: 2C rows, exp(G) for queries, -beta exp(G) for keys.
        write: C rows, exp(G_C - G).
        carry: one row, exp(G_C).
    """

    beta: Tensor
    log_decay: Tensor
    log_decay_rest: Tensor
    row_decay: Tensor
    read: Tensor
    write: Tensor
    carry: Tensor

    def parts(self, segments: list[Segment]) -> list["Gates"]:
        """Return those of every segment of a group."""
        of_group = (gate[:, segments[0].batch, segments[0].heads] for gate in self)
        return [Gates(*part) for part in zip(*(gate.split(segments[0].end) for gate in of_group), strict=True)]


class Workspace(Buffers):
    """The buffers of one call, and its constants [C, C]: `eye`, `future` (inf above the diagonal), `minus_past`."""

    def __init__(self, like: Tensor, problem: Problem) -> None:
        super().__init__(like, problem.dtype)
        self.halves: dict[tuple[str | int, ...], tuple[Tensor, Tensor, Tensor]] = {}
        chunk = problem.layout.chunk_size
        self.eye = torch.eye(chunk, dtype=self.dtype, device=like.device)
        self.future = torch.full_like(self.eye, torch.inf).triu_(1)
        self.minus_past = torch.full_like(self.eye, -1.0).tril_(-1)

    def take_halves(self, name: str, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the buffer [..., 2C, columns] of that name, its upper and its lower C rows."""
        halves = self.halves.get((name, *shape))
        if halves is None:
            whole = self.take(name, *shape)
            upper, lower = whole.chunk(2, -2)
            halves = self.halves[(name, *shape)] = (whole, upper, lower)
        return halves


class Within(NamedTuple):
    """What chunks compute without looking at a state: [s, B, H, 2C or C, K or C]."""

    rows: Tensor
    queries: Tensor
    keys: Tensor
    write: Tensor
    decay: Tensor


class Kept(NamedTuple):
    """What forward leaves to backward for one group of p pairs.

    Args:
        states: [segments - 1, p, K, V], the states between segments.
        updates: [chunks, p, C, V], U.
        inverse: [chunks, p, C, C], T.
        row_factor: [chunks, p, 2C, 1], what queries and keys were multiplied by.
    """

    states: Tensor
    updates: Tensor
    inverse: Tensor
    row_factor: Tensor

    def part(self, segment: Segment) -> "Kept":
        """Return all states, and the rest for a segment."""
        return Kept(self.states, *(x[segment.first : segment.end] for x in self[1:]))


def _decay(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    return without_negligible_(log_decay.clamp(min=-LOG_DECAY_FLOOR[dtype]).exp_().to(dtype))


def make_gates(layout: ChunkLayout, g: Tensor, beta: Tensor, dtype: torch.dtype) -> Gates:
    """Return the gates of all chunks for log decays `g` and write strengths `beta`, both [B, L, H]."""
    g, beta = (layout.to_chunks(x, 0, layout.num_chunks).contiguous() for x in (g, beta))
    beta = beta.to(dtype)
    total, log_decay, rest = running_sums(g, dtype)
    write, since = _decay(total[..., -1:] - total, dtype), _decay(total, dtype)
    row_decay, read = torch.cat([since, -since], -1), torch.cat([since, -beta * since], -1)
    gates = (beta, log_decay, rest, row_decay, read, write, since[..., -1:])
    return Gates(*(gate.unsqueeze(-1) for gate in gates))


def _take_norms(space: Workspace, problem: Problem, q: Tensor, k: Tensor, row_factor: Tensor) -> None:
    """Fill `row_factor` [s, p, 2C, 1] with what queries and keys [s, B, H, C, K] are to be multiplied by."""
    chunk, width = k.shape[-2:]
    if problem.normalize:
        # Over rows that lie one after the other; over the strided inputs it would take several times as long.
        rows, queries, keys = space.take_halves("rows", *k.shape[:3], 2 * chunk, width)
        queries.copy_(q)
        keys.copy_(k)
        inverse_length(rows.view(-1, width), out=row_factor.view(-1, 1))
    else:
        row_factor.fill_(1.0)
    row_factor[:, :, :chunk].mul_(problem.scale)


def within_chunks(
    space: Workspace, q: Tensor, k: Tensor, gates: Gates, row_factor: Tensor, rows_are_copied: bool
) -> Within:
    """Compute what needs no state.

    Args:
        space: the call's buffers.
        q: [s, B, H, C, K], queries as given.
        k: [s, B, H, C, K], keys as given.
        gates: the segment's.
        row_factor: [s, p, 2C, 1], factor of queries above that of keys.
        rows_are_copied: whether the buffer "rows" already holds queries and keys as given.

    Returns:
        The results; in `decay` negligible decays and those from the future are yet to be dropped.
    """
    *lead, chunk, width = k.shape
    rows, queries, keys = space.take_halves("rows", *lead, 2 * chunk, width)
    row_factor = row_factor.view(*lead, 2 * chunk, 1)
    if rows_are_copied:
        rows.mul_(row_factor)
    else:
        torch.mul(q, row_factor[..., :chunk, :], out=queries)
        torch.mul(k, row_factor[..., chunk:, :], out=keys)
    write = torch.mul(keys, gates.write, out=space.take("write", *lead, chunk, width))

    decay = space.take("decay", *lead, chunk, chunk)
    torch.sub(gates.log_decay, gates.log_decay.mT, out=decay)
    decay.add_(gates.log_decay_rest).sub_(gates.log_decay_rest.mT)
    # The future is pushed below the floor before the exponential, which could be infinite there.
    decay.sub_(space.future).clamp_(min=-LOG_DECAY_FLOOR[space.dtype]).exp_()
    return Within(rows, queries, keys, write, decay)


def _scores_and_inverse(space: Workspace, within: Within, gates: Gates, inverse: Tensor) -> Tensor:
    """Return lower(Q K^T) D as [n, C, C], fill `inverse` [n, C, C] with T, and make D exact."""
    n, chunk, _ = inverse.shape
    scores, upper, lower = space.take_halves("scores", n, 2 * chunk, chunk)
    rows = within.rows.view(n, 2 * chunk, -1)
    torch.bmm(rows, rows[:, chunk:].mT, out=scores)
    decay = within.decay.view(n, chunk, chunk)
    system = torch.mul(lower, decay, out=space.take("system", n, chunk, chunk))
    system.view(within.decay.shape).mul_(gates.beta)
    # The system is solved before negligible decays are dropped: between zeros, products of decays would become
    # denormal. Of the inverse they are dropped afterwards.
    torch.linalg.solve_triangular(system, space.eye, upper=False, unitriangular=True, out=inverse)
    without_negligible_(decay)
    inverse.mul_(torch.sign(decay, out=system))
    return upper.mul_(decay)


def pairs_of(states: Tensor, segment: Segment) -> Tensor:
    """Return a group's part [D, p, K, V] of states [D, B, H, K, V]; always a view."""
    return states[:, segment.batch, segment.heads].flatten(1, 2)


def state_at_start(layout: ChunkLayout, chunk: int, carried: Tensor | None, initial: Tensor | None) -> Tensor | None:
    """Return the state [p, K, V] before a chunk, None for zero: the one carried there or a document's first."""
    if chunk not in layout.first_chunks:
        return carried
    return None if initial is None else initial[layout.first_chunks[chunk]]


def advance(state: Tensor | None, carry: Tensor, write: Tensor, update: Tensor, out: Tensor) -> Tensor:
    """Return the state [p, K, V] after a chunk, in `out`; `write` is [p, K, C]."""
    if state is None:
        return torch.bmm(write, update, out=out)
    return torch.mul(state, carry, out=out).baddbmm_(write, update)


class _Segment(NamedTuple):
    """What a segment needs once its states are known.

    Args:
        read: [s, B, H, 2C, K], exp(G) Q above -beta exp(G) K.
        write: [s, B, H, C, K], exp(G_C - G) K.
        scores: [n, C, C], lower(Q K^T) D.
        pending: [s, B, H, 2C, V], zeros above beta V; what the state gives to queries and keys is added.
    """

    read: Tensor
    write: Tensor
    scores: Tensor
    pending: Tensor


def _scan(
    layout: ChunkLayout,
    first: int,
    ready: _Segment,
    gates: Gates,
    kept: Kept,
    state: Tensor | None,
    buffer: Tensor,
    initial: Tensor | None,
    final: Tensor,
) -> None:
    """Carry the state through a segment.

    Args:
        layout: where the tokens stand.
        first: first chunk of the segment.
        ready: the segment's.
        gates: the segment's.
        kept: T and U of the segment; U is filled.
        state: [p, K, V], or None for zero.
        buffer: [p, K, V], left with the state after the segment; may be `state`.
        initial: [D, p, K, V], the documents' first states, or None for zeros.
        final: [D, p, K, V], filled with their last states.
    """
    s, p, chunk, _ = kept.updates.shape
    carries, inverses = gates.carry.reshape(s, p, 1, 1).unbind(0), kept.inverse.unbind(0)
    updates = kept.updates.unbind(0)
    reads, writes = ready.read.view(s, p, 2 * chunk, -1).unbind(0), ready.write.view(s, p, chunk, -1).mT.unbind(0)
    pending = ready.pending.flatten(1, 2)
    targets, sources = pending.unbind(0), pending[:, :, chunk:].unbind(0)
    for i in range(s):
        state = state_at_start(layout, first + i, state, initial)
        if state is not None:
            targets[i].baddbmm_(reads[i], state)
        torch.bmm(inverses[i], sources[i], out=updates[i])
        state = advance(state, carries[i], writes[i], updates[i], buffer)
        if first + i in layout.last_chunks:
            final[layout.last_chunks[first + i]].copy_(state)


def _room_to_keep(space: Workspace, segments: list[Segment], p: int, inputs: Inputs, keep: bool) -> Kept:
    """Return tensors for what a group's segments leave behind, or buffers that hold one segment's part of it."""
    chunk, width, values = space.eye.shape[0], inputs.k.shape[-1], inputs.v.shape[-1]
    count = segments[-1 if keep else 0].end
    shapes = {
        "states": ((len(segments) if keep else 1) - 1, p, width, values),
        "updates": (count, p, chunk, values),
        "inverse": (count, p, chunk, chunk),
        "row_factor": (count, p, 2 * chunk, 1),
    }
    if keep:
        return Kept(*(space.like.new_empty(shape, dtype=space.dtype) for shape in shapes.values()))
    return Kept(*(space.take(name, *shape) for name, shape in shapes.items()))


def _before_states(
    space: Workspace, problem: Problem, q: Tensor, k: Tensor, v: Tensor, gates: Gates, kept: Kept
) -> _Segment:
    """Do what needs no state, for q, k, v [s, B, H, C, K or V], and fill T."""
    _take_norms(space, problem, q, k, kept.row_factor)
    within = within_chunks(space, q, k, gates, kept.row_factor, rows_are_copied=problem.normalize)
    scores = _scores_and_inverse(space, within, gates, kept.inverse.flatten(0, 1))
    pending, zeros, writes = space.take_halves("pending", *v.shape[:3], 2 * v.shape[3], v.shape[4])
    zeros.zero_()
    torch.mul(v, gates.beta, out=writes)
    return _Segment(within.rows.mul_(gates.read), within.write, scores, pending)


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
    layout = problem.layout
    all_gates = make_gates(layout, inputs.g, inputs.beta, problem.dtype)
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    space, all_kept = Workspace(inputs.v, problem), []
    for segments in problem.groups(inputs.v.shape[0], inputs.v.shape[2]):
        group_initial = None if initial is None else pairs_of(initial, segments[0])
        group_final = pairs_of(final, segments[0])
        buffer, state = space.take("state", *group_final.shape[1:]), None
        room = _room_to_keep(space, segments, group_final.shape[1], inputs, keep)
        group = inputs.of_group(layout, segments[0])[:3]
        target = Chunks(layout, out[segments[0].batch, :, segments[0].heads])
        for segment, gates in zip(segments, all_gates.parts(segments), strict=True):
            kept = room.part(segment if keep else segment._replace(first=0, end=segment.end - segment.first))
            q, k, v = (x.part(segment.first, segment.end) for x in group)
            ready = _before_states(space, problem, q, k, v, gates, kept)
            if keep and segment.index > 0:
                room.states[segment.index - 1].copy_(buffer)
            _scan(layout, segment.first, ready, gates, kept, state, buffer, group_initial, group_final)
            state, updates = buffer, kept.updates.flatten(0, 1)
            # The rows have served; their place is used for what the chunks' own tokens give.
            inside = torch.bmm(ready.scores, updates, out=space.take("rows", *updates.shape))
            with target.writing(segment.first, segment.end) as place:
                torch.add(inside.view(place.shape), ready.pending.chunk(2, -2)[0], out=place)
        if keep:
            all_kept.append(room)
    return out, all_kept
