# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The gated delta rule (Gated DeltaNet's token mixing) in plain torch: sequence form and step form.

Every head carries a state `S` of shape [K, V] and does, for every token `t`:

    S   <- exp(g_t) S
    S   <- S + k_t (beta_t (v_t - S^T k_t))^T
    o_t  = S^T (scale q_t)

`chunk_gated_delta_rule` is for sequences, `recurrent_gated_delta_rule` for single tokens; both give the same numbers,
continue from any state and keep packed documents apart. Names, arguments and layouts are those of transformers and
flash-linear-attention.

Shape letters: B batch, T length, H heads, K key width, V value width, D documents, N chunks, C tokens of a chunk.

Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv 2412.06464), equation 10.
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from loopergy.modeling.kernels.chunk_layout import chunk_layout, document_boundaries
from loopergy.modeling.kernels.gated_delta_rule_backward import chunk_backward
from loopergy.modeling.kernels.gated_delta_rule_forward import L2_EPS, Inputs, Kept, Problem, chunk_forward
from loopergy.modeling.kernels.gated_delta_rule_traced import traced_gated_delta_rule

# The rows and values of a segment, or the states of a group, are to fit a core's cache: 2**17 numbers are 512 KB. More
# pairs at once mean fewer, larger products; fewer chunks mean more states to keep.
_CACHED_NUMBERS = 2**17
_MOST_PAIRS = 16
_FEWEST_CHUNKS = 4
_LARGEST_CHUNK = 32
# So that buffers stay small beside a short call's own tensors, it is cut into so many segments, of half as many chunks
# if need be; more with backward, which has twice the buffers.
_SEGMENTS = {False: 4, True: 8}


def chunk_gated_delta_rule(
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
    """Run the gated delta rule over sequences, chunk by chunk.

    Memory is linear in T. Gradients reach q, k, v, g, beta and initial_state through a hand-written backward, which
    keeps the inputs, two small matrices per chunk and one state per segment of chunks. Where torch.compile,
    torch.export or torch.func trace the call, and for gradients of gradients, a plain expression of the same chunks
    is used. Any log decay down to -inf is allowed; decays under 6e-16 (float64: 2e-35) count as zero inside a chunk.

    Args:
        q: [B, T, H, K], queries. H may divide the number of value heads, each query and key head then serves a run of
            value heads.
        k: [B, T, H, K], keys.
        v: [B, T, H, V], values.
        g: [B, T, H], natural logarithm of the decay, at most 0.
        beta: [B, T, H], write strength.
        scale: factor of the queries; K ** -0.5 if None.
        initial_state: [B, H, K, V] (with `cu_seqlens`: [D, H, K, V]), the state to continue from; zeros if None.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: whether to divide queries and keys by sqrt(|x|^2 + 1e-6) first.
        cu_seqlens: [D + 1], edges of the documents packed into the single row, rising from 0 to T; None for one
            document per row.
        chunk_size: tokens per chunk; chosen from the shape if None. Changes speed, not results.

    Returns:
        Output [B, T, H, V] in the dtype of `v`, and the final state ([B or D, H, K, V], float32, or float64 if any
        input is float64) or None.

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    call = _checked(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    if chunk_size is None:
        chunk_size = _chunk_size(call)
    elif chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}.")
    layout = chunk_layout(v.shape[1], chunk_size, call.boundaries, q.device)
    problem = Problem(layout, call.scale, use_qk_l2norm_in_kernel, call.dtype, 1, 1)
    with torch.autocast(q.device.type, enabled=False):
        if _is_traced():
            out, final = traced_gated_delta_rule(problem, call.inputs, call.state)
        else:
            out, final = _ChunkGatedDeltaRule.apply(problem, *call.inputs, call.state)
    return out, call.states_as_given(final) if output_final_state else None


def recurrent_gated_delta_rule(
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
    """Run the gated delta rule token by token; with T = 1 this is the decoding step, which reads the state once.

    The step multiplies `[k; q]` with the state in one product and uses `o = exp(g) S^T q + (q . k) d`, where `d` is
    what the token writes. Differentiable by autograd any number of times, at the price of one state per token.

    Args:
        q: [B, T, H, K], queries. H may divide the number of value heads, each query and key head then serves a run of
            value heads.
        k: [B, T, H, K], keys.
        v: [B, T, H, V], values.
        g: [B, T, H], natural logarithm of the decay.
        beta: [B, T, H], write strength.
        scale: factor of the queries; K ** -0.5 if None.
        initial_state: [B, H, K, V] (with `cu_seqlens`: [D, H, K, V]), the state to continue from; zeros if None.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: whether to divide queries and keys by sqrt(|x|^2 + 1e-6) first.
        cu_seqlens: [D + 1], edges of the documents packed into the single row, rising from 0 to T; None for one
            document per row.

    Returns:
        Output [B, T, H, V] in the dtype of `v`, and the final state ([B or D, H, K, V], float32, or float64 if any
        input is float64) or None.

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    call = _checked(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    one = v.shape[1] == 1 and call.boundaries is None and not _is_traced()
    if one and not (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*call.inputs, call.state))
    ):
        return _one_step(call, use_qk_l2norm_in_kernel, output_final_state)
    with torch.autocast(q.device.type, enabled=False):
        out, final = _all_steps(call, use_qk_l2norm_in_kernel)
    return out, call.states_as_given(final) if output_final_state else None


class _Call(NamedTuple):
    """The checked arguments of a call; `state` is [D, B, H, K, V], where D = 1 without packing and B = 1 with it."""

    inputs: Inputs
    state: Tensor | None
    boundaries: list[int] | None
    scale: float
    dtype: torch.dtype

    def states_as_given(self, states: Tensor) -> Tensor:
        return states[0] if self.boundaries is None else states[:, 0]


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> _Call:
    """Check shapes, spread grouped query and key heads over the value heads, and fill in defaults."""
    if (
        k.dim() != 4
        or v.dim() != 4
        or q.shape != k.shape
        or k.shape[:2] != v.shape[:2]
        or v.shape[2] % max(k.shape[2], 1)
    ):
        raise ValueError(
            "`q` and `k` must be [B, T, heads, K], `v` [B, T, value heads, V], value heads a multiple of heads, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
    if g.shape != v.shape[:3] or beta.shape != v.shape[:3]:
        raise ValueError(
            f"`g` and `beta` must be {tuple(v.shape[:3])} like `v`, got g {tuple(g.shape)}, beta {tuple(beta.shape)}."
        )
    batch, length, heads, values = v.shape
    boundaries = document_boundaries(cu_seqlens, batch, length)
    dtype = torch.float32
    for x in (q, k, v, g, beta):
        dtype = torch.promote_types(dtype, x.dtype)
    if state is not None:
        expected = (batch if boundaries is None else len(boundaries) - 1, heads, k.shape[3], values)
        if state.shape != expected:
            raise ValueError(
                f"`initial_state` must be {expected} (documents or rows, heads, K, V), got {tuple(state.shape)}."
            )
        state = state.to(dtype).unsqueeze(0 if boundaries is None else 1)
    if k.shape[2] != heads:
        q, k = (x.repeat_interleave(heads // k.shape[2], dim=2) for x in (q, k))
    return _Call(Inputs(q, k, v, g, beta), state, boundaries, k.shape[3] ** -0.5 if scale is None else scale, dtype)


def _all_steps(call: _Call, normalize: bool) -> tuple[Tensor, Tensor]:
    """Take all tokens of all documents, without changing anything in place; return outputs and final states."""
    q, k, v, g, beta = (x.to(call.dtype) for x in call.inputs)
    if normalize:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q, decay = q * call.scale, g.exp()[..., None, None]
    documents = list(pairwise(call.boundaries or [0, v.shape[1]]))
    zeros = v.new_zeros(len(documents), v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    finals = list((zeros if call.state is None else call.state).unbind(0))
    outputs = []
    for document, (start, stop) in enumerate(documents):
        for t in range(start, stop):
            state = finals[document] * decay[:, t]
            reads = torch.stack([k[:, t], q[:, t]], 2) @ state
            written = beta[:, t, :, None] * (v[:, t] - reads[:, :, 0])
            finals[document] = state + k[:, t, :, :, None] * written[:, :, None]
            outputs.append(reads[:, :, 1] + (q[:, t] * k[:, t]).sum(-1, keepdim=True) * written)
    out = torch.stack(outputs, 1) if outputs else v
    return out.to(call.inputs.v.dtype), torch.stack(finals)


def _one_step(call: _Call, normalize: bool, write: bool) -> tuple[Tensor, Tensor | None]:
    """Take a single token without gradients: the state is read once and written once."""
    q, k, v, g, beta = (x if x.dtype == call.dtype else x.to(call.dtype) for x in call.inputs)
    batch, _, heads, values = v.shape
    pairs = batch * heads
    rows = torch.stack((k, q), dim=3).view(pairs, 2, -1)
    if normalize:
        rows.mul_((rows * rows).sum(-1, keepdim=True).add_(L2_EPS).rsqrt_())
    key, query = rows[:, 0], rows[:, 1].mul_(call.scale)
    written = v.reshape(pairs, values)
    decay, strength = g.reshape(pairs, 1, 1).exp(), beta.reshape(pairs, 1)
    overlap = (key * query).sum(-1, keepdim=True)
    if call.state is None:
        written = strength * written
        out, state = overlap * written, key[:, :, None] * written[:, None] if write else None
    else:
        before = call.state.reshape(pairs, -1, values)
        reads = torch.bmm(rows, before).mul_(decay)
        written = (written - reads[:, 0]).mul_(strength)
        out = torch.addcmul(reads[:, 1], overlap, written)
        state = torch.mul(before, decay).addcmul_(key[:, :, None], written[:, None]) if write else None
    out = out.view(batch, 1, heads, values).to(call.inputs.v.dtype)
    return out, None if state is None else state.view(batch, heads, -1, values)


def _chunk_size(call: _Call) -> int:
    """Return the length of the longest document, but no more than what is fastest for long ones."""
    if torch.compiler.is_compiling() and call.boundaries is None:
        return _LARGEST_CHUNK  # a size that follows the length would make each short length a new program
    documents = pairwise(call.boundaries or [0, call.inputs.v.shape[1]])
    return max(1, min(max(stop - start for start, stop in documents), _LARGEST_CHUNK))


def _cut(problem: Problem, inputs: Inputs, backward: bool) -> Problem:
    """Choose how much to work on at once."""
    on_cpu = inputs.v.device.type == "cpu"
    threads = torch.get_num_threads() if on_cpu else 64
    (batch, _, heads, values), width = inputs.v.shape, inputs.k.shape[-1]
    pairs = min(batch * heads, _MOST_PAIRS * threads, threads * _CACHED_NUMBERS // max(1, width * values))
    pairs = max(1, pairs)
    numbers = pairs * problem.layout.chunk_size * (width + values)
    chunks = max(_FEWEST_CHUNKS, threads * _CACHED_NUMBERS // max(1, numbers))
    if on_cpu and backward:
        # A backward keeps a state of every pair per segment, and buffers of some pairs for one: about as much of both.
        groups = -(-batch * heads // pairs)
        buffers = 8 * problem.layout.chunk_size * (width + values)
        chunks = max(chunks, math.isqrt(groups * problem.layout.num_chunks * width * values // buffers))
    if on_cpu:
        share = batch * heads * problem.layout.num_chunks // (pairs * _SEGMENTS[backward])
        chunks = min(chunks, max(1, _FEWEST_CHUNKS // 2, share))
    return problem._replace(pairs=pairs, chunks=chunks)


def _is_traced() -> bool:
    """Tell whether torch.compile, torch.export or torch.func need operations they can look into."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """`chunk_forward` with `chunk_backward`; the gradient of the gradient goes through the expression for tracers."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        inputs, keep = Inputs(q, k, v, g, beta), any(ctx.needs_input_grad)
        problem = _cut(problem, inputs, keep)
        if initial is None:
            final = v.new_zeros(
                problem.layout.documents, v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=problem.dtype
            )
        else:
            final = initial.clone(memory_format=torch.contiguous_format)
        out, kept = chunk_forward(problem, inputs, initial, final, keep)
        ctx.problem = problem
        ctx.save_for_backward(*inputs, initial, *(x for room in kept for x in room))
        return out, final

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, initial, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *_differentiable_backward(ctx, Inputs(q, k, v, g, beta), initial, grad_out, grad_final)
        size = len(Kept._fields)
        rooms = [Kept(*kept[i : i + size]) for i in range(0, len(kept), size)]
        grads = chunk_backward(ctx.problem, Inputs(q, k, v, g, beta), initial, rooms, grad_out, grad_final)
        return None, *grads[:5], grads.initial if initial is not None else None


def _differentiable_backward(
    ctx: Any, inputs: Inputs, initial: Tensor | None, grad_out: Tensor, grad_final: Tensor
) -> list[Tensor | None]:
    """Return the gradients as functions that can be differentiated again, as `create_graph=True` asks for."""
    tensors = [*inputs, initial]
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
    with torch.autocast(inputs.v.device.type, enabled=False):
        outputs = traced_gated_delta_rule(ctx.problem, inputs, initial)
    grads = torch.autograd.grad(
        outputs, [tensors[i] for i in wanted], (grad_out, grad_final), create_graph=True, allow_unused=True
    )
    found = dict(zip(wanted, grads, strict=True))
    return [found.get(i) for i in range(len(tensors))]
