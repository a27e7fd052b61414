# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The chunked gated delta rule as one plain expression, for tracers: no buffers and no in-place work.

The formulas are those of `gated_delta_rule_forward.py`. Compilers, exporters and function transforms can look into it,
and autograd can differentiate it any number of times; in eager mode it is slower and holds more memory than the
hand-written pair.
"""

import torch
from torch import Tensor

from loopergy.modeling.kernels.gated_delta_rule_forward import L2_EPS, LOG_DECAY_FLOOR, Inputs, Problem, sum_dtype


def unit_lower_inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of lower triangular matrices with ones on the diagonal, by halves.

        [[X, 0], [Y, Z]]^-1 = [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]]

    Both diagonal blocks are inverted as one batch, so C rows cost log2(C) rounds of products. As stable as
    substitution, unlike powers of the strictly lower part.

    Args:
        matrix: [..., C, C]; the diagonal is taken to be one, what stands above it is not read.

    Returns:
        [..., C, C].
    """
    size = matrix.shape[-1]
    if size <= 1:
        return torch.ones_like(matrix)
    if size % 2:
        return unit_lower_inverse(torch.nn.functional.pad(matrix, [0, 1, 0, 1]))[..., :size, :size]
    half = size // 2
    blocks = torch.stack([matrix[..., :half, :half], matrix[..., half:, half:]])
    upper, lower = unit_lower_inverse(blocks).unbind(0)
    corner = -lower @ matrix[..., half:, :half] @ upper
    return torch.cat([torch.cat([upper, torch.zeros_like(corner)], -1), torch.cat([corner, lower], -1)], -2)


def _decay(log_decay: Tensor, floor: float, dtype: torch.dtype) -> Tensor:
    counts = log_decay > -floor
    return torch.where(counts, torch.where(counts, log_decay, 0.0).to(dtype).exp(), 0.0)


def traced_gated_delta_rule(problem: Problem, inputs: Inputs, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run the rule.

    Args:
        problem: how to compute the call; only `layout`, `scale`, `normalize` and `dtype` matter.
        inputs: q, k [B, L, H, K], v [B, L, H, V], g, beta [B, L, H].
        initial: [D, B, H, K, V], or None for zeros.

    Returns:
        Output [B, L, H, V] in the dtype of `v`, final states [D, B, H, K, V].
    """
    layout, dtype, floor = problem.layout, problem.dtype, LOG_DECAY_FLOOR[problem.dtype]
    q, k, v, g, beta = (layout.to_chunks(x, 0, layout.num_chunks) for x in inputs)
    q, k, v, beta = (x.to(dtype) for x in (q, k, v, beta))
    if problem.normalize:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
    q = q * problem.scale
    total = g.to(sum_dtype(g.device, dtype)).clamp(min=-floor - 1).cumsum(-1)
    past = torch.ones(layout.chunk_size, layout.chunk_size, dtype=torch.bool, device=g.device).tril()
    between = total[..., :, None] - total[..., None, :]
    decay = _decay(between.masked_fill(~past, -torch.inf), floor, dtype)
    since, until = _decay(total, floor, dtype)[..., None], _decay(total[..., -1:] - total, floor, dtype)[..., None]
    inverse = unit_lower_inverse((beta[..., None] * k @ k.mT) * decay)
    scores, read, write = (q @ k.mT) * decay, since * k, (until * k).mT

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
