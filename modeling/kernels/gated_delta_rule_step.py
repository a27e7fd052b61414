# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""The gated delta rule for one new token, writing into the state: what decoding on a CPU spends its time on.

Same recurrence and numbers as [`recurrent_gated_delta_rule`] with one token. Writing in place saves two copies of the
state, and the output needs no second pass over it: with S the decayed state and d what the token writes,
\(o = S_\mathrm{new}^T q = S^T q + (q \cdot k)\, d\).
"""

import torch
from torch import Tensor

from loopergy.modeling.kernels.unit_length import inverse_length


def gated_delta_rule_step(qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Advance `state` by one token, in place, with q and k of unit length and scale K ** -0.5.

    Args:
        qk: [B, 2, H, K], queries and keys, normalised here by sqrt(|x|^2 + 1e-6).
        v: [B, H, V], values.
        g: [B, H], natural logarithm of the decay, in the dtype of `state`.
        beta: [B, H], write strength, in the dtype of `state`.
        state: [B, H, K, V], contiguous, float32 or float64; holds the new state afterwards.

    Returns:
        Output [B, H, V] in the dtype of `state`.
    """
    heads, width = state.shape[0] * state.shape[1], state.shape[2]
    memory = state.view(heads, width, -1)
    # A view where the batch is one row.
    pair = qk.to(state.dtype).transpose(1, 2).reshape(heads, 2, width)
    pair = pair * inverse_length(pair)
    query, key = pair[:, 0], pair[:, 1]
    memory.mul_(g.exp().reshape(heads, 1, 1))
    recalled = torch.bmm(pair, memory)
    written = torch.sub(v.reshape(heads, -1), recalled[:, 1]).mul_(beta.reshape(heads, 1))
    memory.addcmul_(key[:, :, None], written[:, None, :])
    output = recalled[:, 0].addcmul_((query * key).sum(-1, keepdim=True), written)
    return output.mul_(width**-0.5).view(*state.shape[:2], -1)
