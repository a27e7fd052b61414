# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Run a recurrence over long sequences in segments that fit a processor's cache, in memory linear in the length.

A *rule* is a plain differentiable expression that takes some tokens and the state before them to their outputs and the
state after them. Here it is applied to one segment of tokens after the other, for some rows and heads at a time.
Forward leaves behind the inputs and one state per segment; backward applies the rule to each segment again, last one
first, and differentiates it on the spot. So a rule is written once, and what autograd holds at any time is one
segment's.

Shape letters: B batch, T length, H value heads, G heads of queries and keys (H is a multiple), K key width, V value
width, D documents.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loopergy.modeling.kernels.chunk_layout import document_boundaries
from loopergy.modeling.kernels.precision import own_precision
from loopergy.modeling.kernels.tracing import is_traced

# Numbers in the queries, keys and values of a segment, per thread: 2 MB in float32.
_SEGMENT_NUMBERS = 2**19
# Up to here autograd keeps the whole expression, which saves computing it again.
_SHORT_NUMBERS = 2**20
# States a segment passes through are held at once, too.
_STATE_NUMBERS = 2**18


class Buffers:
    """The buffers of one call, found again by name so that the next segment meets them warm in the cache.

    Args:
        like: gives the device.
        dtype: of the buffers.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype):
        self.like, self.dtype = like, dtype
        self.buffers: dict[str, Tensor] = {}
        self.views: dict[tuple[str | int, ...], Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the buffer of that name in that shape, filled with anything."""
        view = self.views.get((name, *shape))
        if view is None:
            numel = math.prod(shape)
            if name not in self.buffers or self.buffers[name].numel() < numel:
                self.buffers[name] = self.like.new_empty(numel, dtype=self.dtype)
            view = self.views[(name, *shape)] = self.buffers[name][:numel].view(shape)
        return view


class Space:
    """Where the results of a rule go.

    Args:
        like: gives the device.
        dtype: of the results.
        reuse: False where results must outlive the segment, as autograd and tracers need; every buffer is then None,
            which torch functions take as `out` for "a new tensor".
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, reuse: bool):
        self.like, self.dtype, self.reuse = like, dtype, reuse
        self.buffers = Buffers(like, dtype)
        self.constants: dict[Callable[..., Tensor], Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor | None:
        """Return the buffer of that name in that shape, filled with anything; None without `reuse`."""
        return self.buffers.take(name, *shape) if self.reuse else None

    def constant(self, make: Callable[[int, Tensor], Tensor], size: int) -> Tensor:
        """Return `make(size, like)`, made once for the call."""
        if make not in self.constants:
            self.constants[make] = make(size, self.like).to(self.dtype)
        return self.constants[make]

    def over(self, x: Tensor) -> Tensor | None:
        """Return `x` as the place for a result that replaces it, None where it must not be overwritten."""
        return x if self.reuse else None


# rule(space, state, q, k, v, ...) maps tokens q, k [b, t, g, K], v [b, t, h, V], others [b, t, h, ...] and a state
# [b, h, K, V] to outputs in chunks [s, b * h, C, V] and the state [b, h, K, V] after them, in buffers of `space`.
# Outputs are linear in the queries; their factor is left to whoever copies the outputs.
Rule = Callable[..., tuple[Tensor, Tensor]]


class Part(NamedTuple):
    """Name a segment: rows, heads of queries and keys, document and tokens."""

    rows: slice
    heads: slice
    document: int
    tokens: slice

    def of(self, x: Tensor, groups: int) -> Tensor:
        """Return the segment's part of tokens [B, T, G or H, ...], given G; always a view."""
        return x[self.rows, self.tokens, self._heads(x.shape[2] // groups)]

    def of_states(self, states: Tensor, groups: int) -> Tensor:
        """Return the part [b, h, K, V] of states [D, B, H, K, V]; always a view."""
        return states[self.document, self.rows, self._heads(states.shape[2] // groups)]

    def _heads(self, ratio: int) -> slice:
        return slice(self.heads.start * ratio, self.heads.stop * ratio)


class Call(NamedTuple):
    """Hold the checked arguments of a kernel.

    Args:
        tensors: q, k, v and what else has a value per token.
        state: [D, B, H, K, V], None if none was given; D = 1 without packing and B = 1 with it.
        boundaries: first tokens of packed documents and one past the last token, None without packing.
        scale: factor of the queries.
        dtype: of arithmetic and states.
    """

    tensors: tuple[Tensor, ...]
    state: Tensor | None
    boundaries: list[int] | None
    scale: float
    dtype: torch.dtype

    @property
    def groups(self) -> int:
        """Heads of queries and keys, G."""
        return self.tensors[0].shape[2]

    def documents(self) -> list[tuple[int, int]]:
        """Return first and one past the last token of every document."""
        return list(pairwise(self.boundaries or [0, self.tensors[2].shape[1]]))

    def first_states(self) -> Tensor:
        """Return the states before the first tokens [D, B, H, K, V]: those given, or zeros."""
        if self.state is not None:
            return self.state
        (batch, _, heads, values), width = self.tensors[2].shape, self.tensors[1].shape[3]
        documents = 1 if self.boundaries is None else len(self.boundaries) - 1
        return self.tensors[2].new_zeros(documents, batch, heads, width, values, dtype=self.dtype)

    def ungrouped(self) -> "Call":
        """Return the call with queries and keys repeated, so that each head of values has its own."""
        q, k, v = self.tensors[:3]
        if k.shape[2] == v.shape[2]:
            return self
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for x in (q, k))
        return self._replace(tensors=(q, k, *self.tensors[2:]))

    def tracked(self) -> bool:
        """Tell whether gradients of the call are wanted."""
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (self.state, *self.tensors))

    def chunk_size(self, asked: int | None, default: int) -> int:
        """Return the chunk size asked for, or the length of the longest document, but no more than the default.

        Raises:
            ValueError: it is less than 1.
        """
        if asked is not None:
            if asked < 1:
                raise ValueError(f"`chunk_size` must be at least 1, got {asked}.")
            return asked
        if torch.compiler.is_compiling() and self.boundaries is None:
            return default  # a size that follows the length would make each short length a new program
        return max(1, min(max(stop - start for start, stop in self.documents()), default))

    def states_as_given(self, states: Tensor) -> Tensor:
        """Return states [D, B, H, K, V] as [B or D, H, K, V]."""
        return states[0] if self.boundaries is None else states[:, 0]

    def parts(self, chunk_size: int) -> Iterator[list[Part]]:
        """Return the segments of each group of rows and heads, document by document, in order."""
        q, _, v = self.tensors[:3]
        threads = torch.get_num_threads() if v.device.type == "cpu" else 64
        batch, groups, ratio = v.shape[0], self.groups, v.shape[2] // self.groups
        width, values = q.shape[-1], v.shape[-1]
        per_token = 2 * width + ratio * values
        pairs = max(1, min(batch * groups, threads * _SEGMENT_NUMBERS // (per_token * chunk_size)))
        pairs = max(1, min(pairs, threads * _STATE_NUMBERS // (ratio * width * values)))
        rows, heads = max(1, pairs // groups), min(pairs, groups)
        used = rows * heads
        chunks = min(
            threads * _SEGMENT_NUMBERS // (used * per_token * chunk_size),
            4 * threads * _STATE_NUMBERS // (used * ratio * width * values),
        )
        documents = [
            (start, stop, _step(stop - start, max(1, chunks), chunk_size)) for start, stop in self.documents()
        ]
        for row in range(0, batch, rows):
            for head in range(0, groups, heads):
                where = slice(row, min(row + rows, batch)), slice(head, min(head + heads, groups))
                yield [
                    Part(*where, document, slice(first, min(first + step, stop)))
                    for document, (start, stop, step) in enumerate(documents)
                    for first in range(start, stop, step)
                ]


def _step(length: int, most: int, chunk_size: int) -> int:
    """Return the tokens of a segment: as many as fit, but no segment much shorter than the others."""
    chunks = -(-length // chunk_size)
    segments = max(1, -(-chunks // most))
    return max(1, -(-chunks // segments)) * chunk_size


def checked_call(
    tensors: tuple[Tensor, ...],
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Call:
    """Check q, k, v, the state and the documents, and fill in defaults.

    Args:
        tensors: q, k [B, T, G, K], v [B, T, H, V], others [B, T, H, ...].
        scale: factor of the queries; K ** -0.5 if None.
        initial_state: [B or D, H, K, V], or None.
        cu_seqlens: [D + 1], or None.

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    q, k, v = tensors[:3]
    fits = k.dim() == v.dim() == 4 and q.shape == k.shape and k.shape[:2] == v.shape[:2]
    if not fits or v.shape[2] % max(k.shape[2], 1):
        raise ValueError(
            "`q` and `k` must be [B, T, heads, K], `v` [B, T, value heads, V], value heads a multiple of heads, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
    batch, length, heads, values = v.shape
    boundaries = document_boundaries(cu_seqlens, batch, length)
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    state = initial_state
    if state is not None:
        expected = (batch if boundaries is None else len(boundaries) - 1, heads, k.shape[3], values)
        if state.shape != expected:
            raise ValueError(
                f"`initial_state` must be {expected} (documents or rows, heads, K, V), got {tuple(state.shape)}."
            )
        state = state.to(dtype).unsqueeze(0 if boundaries is None else 1)
    return Call(tensors, state, boundaries, k.shape[3] ** -0.5 if scale is None else scale, dtype)


def run(call: Call, rule: Rule, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Apply a rule to whole sequences.

    Args:
        call: the arguments.
        rule: what to apply; sees documents apart.
        chunk_size: tokens that the rule works on together; segments are cut at multiples of it.

    Returns:
        Outputs [B, T, H, V] in the dtype of `v`, and final states [B or D, H, K, V].
    """
    q, _, v = call.tensors[:3]
    with own_precision(v):
        first, tracked = call.first_states(), call.tracked()
        if is_traced() or (tracked and 2 * q.numel() + v.numel() <= _SHORT_NUMBERS):
            out, final = _whole(call, first, rule)
        elif tracked:
            out, final = _InSegments.apply(call, rule, chunk_size, first, *call.tensors)
        else:
            out, final, _ = _in_segments(call, first, rule, chunk_size)
    return out, call.states_as_given(final)


def to_chunks(
    x: Tensor,
    size: int,
    space: Space | None = None,
    name: str = "",
    factor: float = 1.0,
    place: Tensor | None = None,
) -> Tensor:
    """Return tokens [b, t, h, ...] as chunks [s, b * h, C, ...], filled up with zeros.

    Args:
        x: the tokens.
        size: C.
        space: where the result goes, in one piece and in its dtype; None for a view or copy as it comes.
        name: the buffer's.
        factor: what to multiply by on the way into a buffer or `place`.
        place: a tensor of the result's shape to fill instead of a buffer of its own.
    """
    batch, length, heads = x.shape[:3]
    rest = -length % size
    if rest:
        x = torch.nn.functional.pad(x, [0, 0] * (x.dim() - 2) + [0, rest])
    chunks = x.unflatten(1, (-1, size)).movedim(1, 0).transpose(2, 3)
    if space is None:
        return chunks.flatten(1, 2)
    shape = (len(chunks), batch * heads, size, *x.shape[3:])
    buffer = space.take(name, *shape) if place is None else place
    if buffer is None:
        return chunks.to(space.dtype).reshape(shape).contiguous()
    target = buffer.unflatten(1, (batch, heads))
    if factor == 1.0:
        target.copy_(chunks)
    else:
        torch.mul(chunks, factor, out=target)
    return buffer


def _from_chunks(chunks: Tensor, batch: int) -> Tensor:
    """Return chunks [s, b * h, C, V] as [b, s, C, h, V]; always a view."""
    return chunks.unflatten(1, (batch, -1)).movedim(0, 1).transpose(2, 3)


def _write_chunks(place: Tensor, chunks: Tensor, factor: float) -> None:
    """Write chunks [s, b * h, C, V] times a factor to tokens [b, t, h, V]."""
    tokens, size = _from_chunks(chunks, len(place)), chunks.shape[2]
    full = place.shape[1] // size
    torch.mul(tokens[:, :full], factor, out=place[:, : full * size].unflatten(1, (full, size)))
    if full < len(chunks):
        rest = place[:, full * size :]
        torch.mul(tokens[:, full, : rest.shape[1]], factor, out=rest)


def _whole(call: Call, first: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Apply the rule to each document in one piece, as one expression that can be traced and differentiated."""
    outputs, finals, batch = [], [], call.tensors[2].shape[0]
    space = Space(first, call.dtype, reuse=False)
    for document, (start, stop) in enumerate(call.documents()):
        state = first[document]
        if start < stop:
            chunks, state = rule(space, state, *(x[:, start:stop] for x in call.tensors))
            outputs.append(_from_chunks(chunks, batch).flatten(1, 2)[:, : stop - start] * call.scale)
        finals.append(state)
    v = call.tensors[2]
    out = torch.cat(outputs, 1) if outputs else torch.zeros_like(v)
    return out.to(v.dtype), torch.stack(finals)


def _in_segments(
    call: Call, first: Tensor, rule: Rule, chunk_size: int, keep: bool = False
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Apply the rule segment by segment.

    Returns:
        The outputs, the last states [D, B, H, K, V] and, with `keep`, the state before every segment; None for a
        document's first one.
    """
    final = first.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(call.tensors[2], memory_format=torch.contiguous_format)
    space, starts = Space(first, call.dtype, reuse=True), []
    for parts in call.parts(chunk_size):
        state = None
        for part in parts:
            carried = part.of_states(final, call.groups)
            start = None
            if state is None or part.tokens.start == call.documents()[part.document][0]:
                # A document's first segment starts from the state that `final` still holds.
                state = carried
            elif keep:
                start = state.clone()
            starts.append(start)
            result, state = rule(space, state, *(part.of(x, call.groups) for x in call.tensors))
            _write_chunks(part.of(out, call.groups), result, call.scale)
            if part.tokens.stop == call.documents()[part.document][1]:
                carried.copy_(state)
    return out, final, starts


class _InSegments(torch.autograd.Function):
    """Apply a rule segment by segment; the gradient of the gradient goes through the whole expression."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, rule: Rule, chunk_size: int, initial: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, final, starts = _in_segments(call._replace(tensors=tensors), initial, rule, chunk_size, keep=True)
        ctx.call = call._replace(tensors=(), state=None)
        ctx.rule, ctx.chunk_size = rule, chunk_size
        ctx.kept = [start is None for start in starts]
        ctx.save_for_backward(initial, *tensors, *(start for start in starts if start is not None))
        ctx.count = len(tensors)
        return out, final

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        initial, *saved = ctx.saved_tensors
        tensors, starts = tuple(saved[: ctx.count]), iter(saved[ctx.count :])
        call = ctx.call._replace(tensors=tensors)
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            with own_precision(initial):
                outputs = _whole(call, initial, ctx.rule)
            found = differentiable_gradients(outputs, (initial, *tensors), wanted, (grad_out, grad_final))
            return None, None, None, *found
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        grad_initial = grad_final.clone(memory_format=torch.contiguous_format)
        fresh = iter(ctx.kept)
        cut = call.parts(ctx.chunk_size)
        groups = [[(part, initial if next(fresh) else next(starts)) for part in parts] for parts in cut]
        with own_precision(initial):
            for group in groups:
                _group_backward(call, ctx.rule, group, initial, grads, grad_initial, grad_out)
        return None, None, None, grad_initial if wanted[0] else None, *grads


def _group_backward(
    call: Call,
    rule: Rule,
    group: list[tuple[Part, Tensor]],
    initial: Tensor,
    grads: list[Tensor],
    grad_initial: Tensor,
    grad_out: Tensor,
) -> None:
    """Fill the gradients of a group's tokens; in `grad_initial` those of last states give way to those of first."""
    groups, grad_state = call.groups, None
    space = Space(initial, call.dtype, reuse=False)
    for part, start in reversed(group):
        of_document = part.of_states(grad_initial, groups)
        if grad_state is None or part.tokens.stop == call.documents()[part.document][1]:
            grad_state = of_document
        fresh = start is initial
        state = (part.of_states(initial, groups) if fresh else start).detach().requires_grad_()
        inputs = [part.of(x, groups).detach().requires_grad_() for x in call.tensors]
        with torch.enable_grad():
            out, after = rule(space, state, *inputs)
        grad = torch.empty_like(out)
        to_chunks(part.of(grad_out, groups), out.shape[2], space, factor=call.scale, place=grad)
        grad_state, *found = torch.autograd.grad((out, after), (state, *inputs), (grad, grad_state))
        for target, value in zip(grads, found, strict=True):
            part.of(target, groups).copy_(value)
        if fresh:
            of_document.copy_(grad_state)


def differentiable_gradients(
    outputs: Sequence[Tensor], sources: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients as functions that can be differentiated again, as `create_graph=True` asks for.

    Args:
        outputs: computed from the sources by operations that autograd knows.
        sources: what to differentiate by, where `needed`; None for what is absent.
        needed: for each source, whether its gradient is asked for.
        grads: gradients of the outputs.

    Returns:
        For each source its gradient, None where it is not needed or where nothing depends on it.
    """
    asked = [x if need else None for x, need in zip(sources, needed, strict=True)]
    wanted = [x for x in asked if x is not None]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [None if x is None else next(found) for x in asked]
