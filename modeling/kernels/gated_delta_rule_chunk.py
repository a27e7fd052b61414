# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The gated delta rule over whole sequences in plain torch: chunked, cache blocked, with a hand-written backward.

Inside a chunk of `C` tokens, with `G` the running sum of the log decays `g`, `D_ij = exp(G_i - G_j)` for `j <= i` (else 0) and `S` the state
at the chunk's start, the recurrence of `gated_delta_rule.py` is the same as

    T = (I + strictly_lower(beta_i (k_i . k_j) D_ij))^-1
    R = beta (V - exp(G) K S)              what each token would write if it were alone in its chunk
    U = T R                                what it writes, corrected for the tokens before it
    O = exp(G) Q S + (lower(Q K^T) D) U
    S <- exp(G_C) S + (exp(G_C - G) K)^T U

No decay is ever turned round: only exponentials of numbers <= 0 are taken. The state passes through one product per chunk; all else is done
for a segment of chunks at once, in buffers that stay in the processor's cache. Backward keeps the inputs and one state per segment and
computes the rest again.

Shape letters: B batch, L length, H heads, K key width, V value width, C tokens of a chunk, s chunks of a segment, p = B * H pairs worked on
together, D documents. "Rows" are the C query rows of a chunk above its C key rows.

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464), section 3.3. Unlike there, T is not multiplied into K.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loopergy.modeling.kernels.chunk_layout import ChunkLayout

# Decays below exp(-floor) count as zero. That is far below the rounding error of the sums they would enter, and far above the denormal
# numbers that make processors a hundred times slower.
LOG_DECAY_FLOOR = {torch.float32: 35.0, torch.float64: 80.0}
L2_EPS = 1e-6


class Problem(NamedTuple):
    """One call, cut into pieces.

    Args:
        layout: where the tokens stand.
        scale: factor of the queries.
        normalize: whether queries and keys are divided by their length.
        dtype: of all arithmetic and of the states.
        pairs: (batch, head) pairs worked on together, at most.
        segment: chunks worked on together, at most.
    """

    layout: ChunkLayout
    scale: float
    normalize: bool
    dtype: torch.dtype
    pairs: int
    segment: int

    def segments(self) -> list[tuple[int, int]]:
        num_chunks = self.layout.num_chunks
        return [(first, min(first + self.segment, num_chunks)) for first in range(0, num_chunks, self.segment)]

    def groups(self, batch: int, heads: int) -> Iterator[tuple[slice, slice]]:
        rows, columns = max(1, self.pairs // heads), min(heads, self.pairs)
        for row in range(0, batch, rows):
            for column in range(0, heads, columns):
                yield slice(row, row + rows), slice(column, column + columns)


class _Gates(NamedTuple):
    """What decays and write strengths amount to inside each chunk: [chunks, B, H, C], `row_decay` and `read` [chunks, B, H, 2C]."""

    beta: Tensor
    log_decay: Tensor
    log_decay_rest: Tensor
    row_decay: Tensor
    read: Tensor
    write: Tensor
    carry: Tensor

    def part(self, first: int, end: int, batch: slice, heads: slice) -> "_Gates":
        return _Gates(*(gate[first:end, batch, heads] for gate in self))


class _Workspace:
    """The buffers of one call, found again by name so that the next segment meets them warm in the cache."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype, self.buffers = like, dtype, dict[str, Tensor]()

    def take(self, name: str, *shape: int) -> Tensor:
        numel = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < numel:
            self.buffers[name] = self.like.new_empty(numel, dtype=self.dtype)
        return self.buffers[name][:numel].view(shape)


class _Within(NamedTuple):
    """What chunks compute without looking at a state; n = s * p matrices."""

    rows: Tensor
    row_norms: Tensor | None
    read: Tensor
    write: Tensor
    decay: Tensor
    scores: Tensor
    inverse: Tensor


def _floored_exp_(log_decay: Tensor, floor: float) -> Tensor:
    """Turn log decays into decays in place, with exact zeros for the negligible ones and for -inf."""
    return torch.nn.functional.threshold_(log_decay.clamp_(min=-floor).exp_(), math.exp(-floor) * 1.001, 0.0)


def _make_gates(layout: ChunkLayout, g: Tensor, beta: Tensor, dtype: torch.dtype) -> _Gates:
    floor = LOG_DECAY_FLOOR[dtype]
    beta = layout.to_chunks(beta, 0, layout.num_chunks).to(dtype)
    # Summed in float64 and kept as a pair of numbers: differences of long sums would cost three digits at strong decay. Clamped because
    # -inf - -inf is not a number.
    total = layout.to_chunks(g, 0, layout.num_chunks).to(torch.float64).clamp(min=-floor - 1).cumsum(-1)
    log_decay = total.to(dtype)
    write = _floored_exp_(total[..., -1:] - total, floor).to(dtype)
    since = _floored_exp_(total.clone(), floor).to(dtype)
    row_decay, read = torch.cat([since, -since], -1), torch.cat([since, -beta * since], -1)
    return _Gates(beta, log_decay, (total - log_decay).to(dtype), row_decay, read, write, since[..., -1:])


def _within_chunks(space: _Workspace, problem: Problem, q: Tensor, k: Tensor, gates: _Gates) -> _Within:
    """Compute what needs no state, for chunks of queries and keys [s, B, H, C, K]."""
    chunk, width = k.shape[-2:]
    lead, n = k.shape[:3], k.shape[:3].numel()
    rows = space.take("rows", *lead, 2 * chunk, width)
    rows[..., :chunk, :].copy_(q)
    rows[..., chunk:, :].copy_(k)
    row_norms = None
    if problem.normalize:
        row_norms = torch.linalg.vector_norm(rows.view(-1, width), dim=-1).square_().add_(L2_EPS).rsqrt_().view(*lead, 2 * chunk)
        row_norms[..., :chunk].mul_(problem.scale)
        rows.mul_(row_norms[..., None])
    else:
        rows[..., :chunk, :].mul_(problem.scale)
    keys = rows[..., chunk:, :]
    read = torch.mul(rows, gates.read[..., None], out=space.take("read", *lead, 2 * chunk, width))
    write = torch.mul(keys, gates.write[..., None], out=space.take("write", *lead, chunk, width))

    decay = space.take("decay", *lead, chunk, chunk)
    torch.sub(gates.log_decay[..., :, None], gates.log_decay[..., None, :], out=decay)
    decay.add_(gates.log_decay_rest[..., :, None]).sub_(gates.log_decay_rest[..., None, :])
    # The future is pushed below the floor before the exponential: a growing exponential could be infinite there.
    decay.sub_(decay.new_full((chunk, chunk), torch.inf).triu_(1))
    _floored_exp_(decay, LOG_DECAY_FLOOR[problem.dtype])

    scores = space.take("scores", n, 2 * chunk, chunk)
    torch.bmm(rows.view(n, 2 * chunk, width), keys.reshape(n, chunk, width).mT, out=scores)
    both = scores.view(*lead, 2, chunk, chunk)
    system = torch.mul(both[..., 1, :, :], decay, out=space.take("system", *lead, chunk, chunk)).mul_(gates.beta[..., None])
    both[..., 0, :, :].mul_(decay)
    inverse = space.take("inverse", n, chunk, chunk)
    eye = torch.eye(chunk, dtype=problem.dtype, device=k.device)
    torch.linalg.solve_triangular(system.view(n, chunk, chunk), eye, upper=False, unitriangular=True, out=inverse)
    return _Within(rows, row_norms, read, write, decay, scores[:, :chunk], inverse)


class _Scan(NamedTuple):
    """What the scan over a segment works on; s chunks, p pairs.

    Args:
        first: first chunk of the segment.
        read: [s, p, C or 2C, K], what reads the state.
        pending: [s, p, C or 2C, V], beta V in its last C rows; gets what is read added and then ends with R.
        updates: [s, p, C, V], filled with U.
        ends: s tensors [p, K, V] for the states at the chunks' ends; may be one tensor s times.
        initial: [D, p, K, V], the documents' first states, or None for zeros.
        final: [D, p, K, V], filled with their last ones.
    """

    first: int
    read: Tensor
    pending: Tensor
    updates: Tensor
    ends: list[Tensor]
    initial: Tensor | None
    final: Tensor

    def run(self, layout: ChunkLayout, within: _Within, gates: _Gates, state: Tensor | None) -> list[Tensor | None]:
        """Carry `state` (None for zero) through the segment; return the states at the chunks' starts."""
        s, p, chunk, _ = self.updates.shape
        inverse = within.inverse.view(s, p, chunk, chunk).unbind(0)
        write = within.write.view(s, p, chunk, -1).mT.unbind(0)
        carry = gates.carry.reshape(s, p, 1, 1).unbind(0)
        read, pending, updates = self.read.unbind(0), self.pending.unbind(0), self.updates.unbind(0)
        sources = self.pending[:, :, -chunk:].unbind(0)
        starts: list[Tensor | None] = []
        for i in range(s):
            if self.first + i in layout.first_chunks:
                state = None if self.initial is None else self.initial[layout.first_chunks[self.first + i]]
            starts.append(state)
            if state is None:
                torch.bmm(inverse[i], sources[i], out=updates[i])
                state = torch.bmm(write[i], updates[i], out=self.ends[i])
            else:
                pending[i].baddbmm_(read[i], state)
                torch.bmm(inverse[i], sources[i], out=updates[i])
                state = torch.mul(state, carry[i], out=self.ends[i]).baddbmm_(write[i], updates[i])
            if self.first + i in layout.last_chunks:
                self.final[layout.last_chunks[self.first + i]].copy_(state)
        return starts


class Inputs(NamedTuple):
    """The tensors of a call: q, k [B, L, H, K], v [B, L, H, V], g, beta [B, L, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def chunks(self, layout: ChunkLayout, first: int, end: int, batch: slice, heads: slice) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (layout.to_chunks(x[batch, :, heads], first, end) for x in (self.q, self.k, self.v))
        return q, k, v


def _pairs(states: Tensor, batch: slice, heads: slice) -> Tensor:
    """Return a group's part [D, p, K, V] of states [D, B, H, K, V]; a view, as a group takes all heads or one row."""
    return states[:, batch, heads].flatten(1, 2)


def chunk_forward(problem: Problem, inputs: Inputs, initial: Tensor | None, final: Tensor, kept: Tensor | None) -> Tensor:
    """Run the rule forward.

    Args:
        problem: how to cut the call.
        inputs: its tensors.
        initial: [D, B, H, K, V], first states, or None for zeros.
        final: [D, B, H, K, V], filled with the last states of the documents that have tokens.
        kept: [segments - 1, B, H, K, V], filled with the states between segments, or None.

    Returns:
        The output [B, L, H, V] in the dtype of `v`.
    """
    layout, chunk = problem.layout, problem.layout.chunk_size
    width, values = inputs.k.shape[-1], inputs.v.shape[-1]
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    all_gates = _make_gates(layout, inputs.g, inputs.beta, problem.dtype)
    space = _Workspace(inputs.v, problem.dtype)
    for batch, heads in problem.groups(inputs.v.shape[0], inputs.v.shape[2]):
        group_initial = None if initial is None else _pairs(initial, batch, heads)
        group_final, target, state = final[:, batch, heads].flatten(1, 2), out[batch, :, heads], None
        for index, (first, end) in enumerate(problem.segments()):
            if kept is not None and index > 0:
                kept[index - 1, batch, heads].flatten(0, 1).copy_(state)
            gates = all_gates.part(first, end, batch, heads)
            q, k, v = inputs.chunks(layout, first, end, batch, heads)
            s, b, h = v.shape[:3]
            within = _within_chunks(space, problem, q, k, gates)
            pending = space.take("pending", s, b, h, 2 * chunk, values)
            pending[..., :chunk, :].zero_()
            torch.mul(v, gates.beta[..., None], out=pending[..., chunk:, :])
            updates = space.take("updates", s, b * h, chunk, values)
            read, written = within.read.view(s, b * h, 2 * chunk, width), pending.view(s, b * h, 2 * chunk, values)
            ends = [space.take("state", b * h, width, values)] * s
            scan = _Scan(first, read, written, updates, ends, group_initial, group_final)
            scan.run(layout, within, gates, state)
            state = ends[-1]
            inside = torch.bmm(within.scores[:, :chunk], updates.view(-1, chunk, values), out=space.take("inside", s * b * h, chunk, values))
            with layout.writing(target, first, end) as place:
                torch.add(inside.view(s, b, h, chunk, values), pending[..., :chunk, :], out=place)
    return out


class _ReverseScan(NamedTuple):
    """The scan of a segment run backwards; shapes as in `_Scan`.

    Args:
        first: first chunk of the segment.
        starts: states at the chunks' starts, None for zero.
        rows: [s, p, 2C, V], the output's gradient in its first C rows; the last C are filled with the gradient of R.
        updates: [s, p, C, V], what of the gradient of U comes from the outputs; what comes from later states is added.
        corrected: [s, p, C, V], filled with the gradient of R.
        read: [s, p, 2C, K], filled with `rows` times the transposed state.
        ends: [s, p, K, V], filled with the gradients of the states at the chunks' ends.
        edges: [D, p, K, V], gradients of the documents' last states; overwritten by those of their first ones.
    """

    first: int
    starts: list[Tensor | None]
    rows: Tensor
    updates: Tensor
    corrected: Tensor
    read: Tensor
    ends: Tensor
    edges: Tensor

    def run(self, layout: ChunkLayout, within: _Within, gates: _Gates, state: Tensor) -> None:
        """Carry the gradient of the state after the segment, `state`, through it, in place."""
        s, p, chunk, _ = self.updates.shape
        inverse = within.inverse.view(s, p, chunk, chunk).mT.unbind(0)
        write, read = within.write.view(s, p, chunk, -1).unbind(0), within.read.view(s, p, 2 * chunk, -1).mT.unbind(0)
        carry = gates.carry.reshape(s, p, 1, 1).unbind(0)
        rows, lower_rows, ends = self.rows.unbind(0), self.rows[:, :, chunk:].unbind(0), self.ends.unbind(0)
        updates, corrected, grad_read = self.updates.unbind(0), self.corrected.unbind(0), self.read.unbind(0)
        ends[-1].copy_(state)
        for i in reversed(range(s)):
            if self.first + i in layout.last_chunks:
                ends[i].copy_(self.edges[layout.last_chunks[self.first + i]])
            updates[i].baddbmm_(write[i], ends[i])
            lower_rows[i].copy_(torch.bmm(inverse[i], updates[i], out=corrected[i]))
            start = self.starts[i]
            if start is None:
                grad_read[i].zero_()
            else:
                torch.bmm(rows[i], start.mT, out=grad_read[i])
            before = torch.mul(ends[i], carry[i], out=ends[i - 1] if i > 0 else state).baddbmm_(read[i], rows[i])
            if self.first + i in layout.first_chunks:
                self.edges[layout.first_chunks[self.first + i]].copy_(before)


class Gradients(NamedTuple):
    """Gradients of the inputs, shaped like `Inputs`, and of the first states [D, B, H, K, V]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial: Tensor


def chunk_backward(
    problem: Problem, inputs: Inputs, initial: Tensor | None, kept: Tensor, grad_out: Tensor, grad_final: Tensor
) -> Gradients:
    """Return the gradients of all inputs, given those of the output and of the final states.

    Args:
        problem: as given to `chunk_forward`.
        inputs: as given to `chunk_forward`.
        initial: as given to `chunk_forward`.
        kept: as filled by `chunk_forward`.
        grad_out: [B, L, H, V], any strides.
        grad_final: [D, B, H, K, V].

    Returns:
        The gradients. That of `initial` is the gradient of the final state for documents without tokens.
    """
    layout, chunk = problem.layout, problem.layout.chunk_size
    width, values = inputs.k.shape[-1], inputs.v.shape[-1]
    grads = Gradients(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs), grad_final.clone())
    all_gates = _make_gates(layout, inputs.g, inputs.beta, problem.dtype)
    space = _Workspace(inputs.v, problem.dtype)
    for batch, heads in problem.groups(inputs.v.shape[0], inputs.v.shape[2]):
        group_initial = None if initial is None else _pairs(initial, batch, heads)
        edges = _pairs(grads.initial, batch, heads)
        grad_state = space.take("grad_state", edges.shape[1], width, values)
        for index, (first, end) in reversed(list(enumerate(problem.segments()))):
            gates = all_gates.part(first, end, batch, heads)
            q, k, v = inputs.chunks(layout, first, end, batch, heads)
            s, b, h = v.shape[:3]
            p = b * h
            within = _within_chunks(space, problem, q, k, gates)

            pending = torch.mul(v, gates.beta[..., None], out=space.take("pending", s, b, h, chunk, values)).view(s, p, chunk, values)
            updates, ends = space.take("updates", s, p, chunk, values), space.take("ends", s, p, width, values)
            read = within.read.view(s, p, 2 * chunk, width)[:, :, chunk:]
            state = None if index == 0 else _pairs(kept[index - 1 : index], batch, heads)[0]
            scan = _Scan(first, read, pending, updates, list(ends.unbind(0)), group_initial, torch.empty_like(edges))
            starts = scan.run(layout, within, gates, state)

            rows = space.take("grad_rows", s, b, h, 2 * chunk, values)
            rows[..., :chunk, :].copy_(layout.to_chunks(grad_out[batch, :, heads], first, end))
            rows = rows.view(s, p, 2 * chunk, values)
            grad_updates = space.take("grad_updates", s * p, chunk, values)
            torch.bmm(within.scores[:, :chunk].mT, rows.view(-1, 2 * chunk, values)[:, :chunk], out=grad_updates)
            back = _ReverseScan(
                first, starts, rows, grad_updates.view(s, p, chunk, values), pending,
                space.take("grad_read", s, p, 2 * chunk, width), space.take("grad_ends", s, p, width, values), edges,
            )  # fmt: skip
            back.run(layout, within, gates, grad_state)
            _collect(space, problem, within, gates, back, updates, ends, v, grads, first, end, batch, heads)
    floor = LOG_DECAY_FLOOR[problem.dtype]
    grads.g.masked_fill_(inputs.g <= -floor - 1, 0)
    return grads


def _collect(space, problem, within, gates, back, updates, ends, v, grads, first, end, batch, heads):
    layout, chunk = problem.layout, problem.layout.chunk_size
    lead, n = v.shape[:3], v.shape[:3].numel()
    width, values = within.rows.shape[-1], v.shape[-1]
    flat_rows = within.rows.view(n, 2 * chunk, width)
    keys = within.rows[..., chunk:, :]
    pairs = torch.bmm(back.rows.view(n, 2 * chunk, values), updates.view(n, chunk, values).mT, out=space.take("grad_scores", n, 2 * chunk, chunk))
    both = pairs.view(*lead, 2, chunk, chunk)
    both.mul_(within.decay.unsqueeze(3))
    both[..., 1, :, :].mul_(pairs.new_full((chunk, chunk), -1.0).tril_(-1))
    read = back.read.view(*lead, 2 * chunk, width).mul_(gates.row_decay[..., None])
    read.view(n, 2 * chunk, width).baddbmm_(pairs, flat_rows[:, chunk:])
    write = torch.bmm(updates.view(n, chunk, values), back.ends.view(n, width, values).mT, out=space.take("grad_write", n, chunk, width))
    write.view(*lead, chunk, width).mul_(gates.write[..., None])
    both[..., 1, :, :].mul_(gates.beta[..., None])
    write = write.baddbmm_(pairs.mT, flat_rows).view(*lead, chunk, width)

    row_dots = torch.mul(within.rows, read, out=space.take("read", *lead, 2 * chunk, width)).sum(-1)
    q_dots, read_dots = row_dots[..., :chunk], row_dots[..., chunk:]
    write_dots = torch.mul(keys, write, out=space.take("write", *lead, chunk, width)).sum(-1)
    corrected = back.corrected.view(*lead, chunk, values)
    v_dots = torch.mul(v, corrected, out=space.take("v_dots", *lead, chunk, values)).sum(-1)
    grad_log_decay = q_dots + gates.beta * read_dots - write_dots
    grad_log_decay[..., -1] += torch.mul(ends, back.ends, out=space.take("state_dots", *ends.shape)).flatten(2).sum(-1).view(lead)
    write.addcmul_(read[..., chunk:, :], gates.beta[..., None])
    queries = read[..., :chunk, :]
    if within.row_norms is not None:
        queries.addcmul_(within.rows[..., :chunk, :], q_dots[..., None], value=-(problem.scale**-2))
        write.addcmul_(keys, (gates.beta * read_dots + write_dots)[..., None], value=-1)
        q_factor, k_factor = within.row_norms[..., :chunk, None], within.row_norms[..., chunk:, None]
    else:
        q_factor, k_factor = problem.scale, 1.0
    for target, value, factor in (
        (grads.q, queries, q_factor),
        (grads.k, write, k_factor),
        (grads.v, corrected, gates.beta[..., None]),
        (grads.g, grad_log_decay.flip(-1).cumsum(-1).flip(-1), 1.0),
        (grads.beta, read_dots + v_dots, 1.0),
    ):
        with layout.writing(target[batch, :, heads], first, end) as place:
            torch.mul(value, factor, out=place)
