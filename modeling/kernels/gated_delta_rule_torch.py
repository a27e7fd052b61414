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
from typing import Any

import torch
from torch import Tensor

from loopergy.modeling.kernels.chunk_layout import chunk_layout
from loopergy.modeling.kernels.gated_delta_rule_backward import chunk_backward
from loopergy.modeling.kernels.gated_delta_rule_forward import Inputs, Kept, Problem, chunk_forward
from loopergy.modeling.kernels.gated_delta_rule_traced import traced_gated_delta_rule
from loopergy.modeling.kernels.precision import own_precision
from loopergy.modeling.kernels.segments import Call, checked_call, differentiable_gradients
from loopergy.modeling.kernels.tracing import is_traced
from loopergy.modeling.kernels.unit_length import unit_length, unit_length_

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
        cu_seqlens: [D + 1], boundaries of the documents packed into the single row, rising from 0 to T; None for
            one document per row.
        chunk_size: tokens per chunk; chosen from the shape if None. Changes speed, not results.

    Returns:
        Output [B, T, H, V] in the dtype of `v`, and the final state ([B or D, H, K, V], float32, or float64 if any
        input is float64) or None.

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    call = _checked(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    layout = chunk_layout(v.shape[1], call.chunk_size(chunk_size, _LARGEST_CHUNK), call.boundaries, q.device)
    problem = Problem(layout, call.scale, use_qk_l2norm_in_kernel, call.dtype, 1, 1)
    with own_precision(v):
        if is_traced():
            out, final = traced_gated_delta_rule(problem, Inputs(*call.tensors), call.state)
        else:
            out, final = _ChunkGatedDeltaRule.apply(problem, *call.tensors, call.state)
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
        cu_seqlens: [D + 1], boundaries of the documents packed into the single row, rising from 0 to T; None for
            one document per row.

    Returns:
        Output [B, T, H, V] in the dtype of `v`, and the final state ([B or D, H, K, V], float32, or float64 if any
        input is float64) or None.

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    call = _checked(q, k, v, g, beta, scale, initial_state, cu_seqlens)
    with own_precision(v):
        if v.shape[1] == 1 and call.boundaries is None and not is_traced() and not call.tracked():
            return _one_step(call, use_qk_l2norm_in_kernel, output_final_state)
        out, final = _all_steps(call, use_qk_l2norm_in_kernel)
    return out, call.states_as_given(final) if output_final_state else None


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
    if g.shape != v.shape[:3] or beta.shape != v.shape[:3]:
        raise ValueError(
            f"`g` and `beta` must be {tuple(v.shape[:3])} like `v`, got g {tuple(g.shape)}, beta {tuple(beta.shape)}."
        )
    return call


def _all_steps(call: Call, normalize: bool) -> tuple[Tensor, Tensor]:
    """Take all tokens of all documents, without changing anything in place; return outputs and final states."""
    q, k, v, g, beta = (x.to(call.dtype) for x in call.tensors)
    if normalize:
        q, k = unit_length(q), unit_length(k)
    q, decay = q * call.scale, g.exp()[..., None, None]
    finals, outputs = list(call.first_states().unbind(0)), []
    for document, (start, stop) in enumerate(call.documents()):
        for t in range(start, stop):
            state = finals[document] * decay[:, t]
            reads = torch.stack([k[:, t], q[:, t]], 2) @ state
            written = beta[:, t, :, None] * (v[:, t] - reads[:, :, 0])
            finals[document] = state + k[:, t, :, :, None] * written[:, :, None]
            outputs.append(reads[:, :, 1] + (q[:, t] * k[:, t]).sum(-1, keepdim=True) * written)
    out = torch.stack(outputs, 1) if outputs else v
    return out.to(call.tensors[2].dtype), torch.stack(finals)


def _one_step(call: Call, normalize: bool, write: bool) -> tuple[Tensor, Tensor | None]:
    """Take a single token without gradients: the state is read once and written once."""
    q, k, v, g, beta = (x if x.dtype == call.dtype else x.to(call.dtype) for x in call.tensors)
    batch, _, heads, values = v.shape
    pairs = batch * heads
    rows = torch.stack((k, q), dim=3).view(pairs, 2, -1)
    if normalize:
        unit_length_(rows)
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
    out = out.view(batch, 1, heads, values).to(call.tensors[2].dtype)
    return out, None if state is None else state.view(batch, heads, -1, values)


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
            with own_precision(v):
                outputs = traced_gated_delta_rule(ctx.problem, Inputs(q, k, v, g, beta), initial)
            sources = (q, k, v, g, beta, initial)
            return None, *differentiable_gradients(outputs, sources, ctx.needs_input_grad[1:], (grad_out, grad_final))
        size = len(Kept._fields)
        rooms = [Kept(*kept[i : i + size]) for i in range(0, len(kept), size)]
        grads = chunk_backward(ctx.problem, Inputs(q, k, v, g, beta), initial, rooms, grad_out, grad_final)
        return None, *grads[:5], grads.initial if initial is not None else None
