# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The chunked gated delta rule as one plain expression, for tracers: no buffers and no in-place work.

The formulas are those of `gated_delta_rule_forward.py`. Compilers, exporters and function transforms can look into it,
and autograd can differentiate it any number of times; in eager mode it is slower and holds more memory than the
hand-written pair.
"""

import torch
from torch import Tensor

from loopergy.modeling.kernels.decay import decay, running_sums
from loopergy.modeling.kernels.gated_delta_rule_forward import Inputs, Problem
from loopergy.modeling.kernels.triangular_inverse import unit_lower_inverse
from loopergy.modeling.kernels.unit_length import unit_length


def traced_gated_delta_rule(problem: Problem, inputs: Inputs, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the rule.

    Args:
        problem: how to compute the call; only `layout`, `scale`, `normalize` and `dtype` matter.
        inputs: q, k [B, L, H, K], v [B, L, H, V], g, beta [B, L, H].
        initial: [D, B, H, K, V], or None for zeros.

    Returns:
        Output [B, L, H, V] in the dtype of `v`, final states [D, B, H, K, V].
    """
    layout, dtype = problem.layout, problem.dtype
    q, k, v, g, beta = (layout.to_chunks(x, 0, layout.num_chunks) for x in inputs)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    if problem.normalize:
        q, k = unit_length(q), unit_length(k)
    q = q * problem.scale
    total, rounded, _ = running_sums(g, dtype)
    past = torch.ones(layout.chunk_size, layout.chunk_size, dtype=torch.bool, device=g.device).tril()
    between = total[..., :, None] - total[..., None, :]
    between = decay(between.masked_fill(~past, -torch.inf).to(dtype))
    since, until = decay(rounded)[..., None], decay((total[..., -1:] - total).to(dtype))[..., None]
    inverse = unit_lower_inverse((beta[..., None] * k @ k.mT) * between)
    scores, read, write = (q @ k.mT) * between, since * k, (until * k).mT

    none = v.new_zeros(layout.documents, *v.shape[1:3], k.shape[-1], v.shape[-1]) if initial is None else initial
    finals, outputs, state = list(none.unbind(0)), [], none[0]
    for chunk in range(layout.num_chunks):
        if chunk in layout.first_chunks:
            state = none[layout.first_chunks[chunk]]
        update = inverse[chunk] @ (beta[chunk][..., None] * (v[chunk] - read[chunk] @ state))
        outputs.append((since[chunk] * q[chunk]) @ state + scores[chunk] @ update)
        state = since[chunk][..., -1:, :] * state + write[chunk] @ update
        if chunk in layout.last_chunks:
            finals[layout.last_chunks[chunk]] = state
    if not outputs:
        return torch.zeros_like(inputs.v), torch.stack(finals)
    return layout.from_chunks(torch.stack(outputs), 0, layout.num_chunks).to(inputs.v.dtype), torch.stack(finals)
