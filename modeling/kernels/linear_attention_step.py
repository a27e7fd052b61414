# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Linear attention and the delta rule with channel decay for one new token, writing into the state.

Same recurrences and numbers as [`recurrent_simple_gla`], [`recurrent_gla`] and [`recurrent_kda`] with one token.
Writing in place saves copies of the state, which is what decoding on a CPU spends its time on.
"""

import torch
from torch import Tensor

from loopergy.modeling.kernels.unit_length import inverse_length


def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, g: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Advance `state` by one token, in place.

    Args:
        q, k: [B, G, K], queries and keys; G may divide the number of value heads.
        v: [B, H, V], values.
        state: [B, H, K, V], contiguous, float32 or float64; holds the new state afterwards.
        g: [B, H] or [B, H, K], natural logarithm of the decay per head or per channel; None for no decay.
        scale: factor of the queries; K ** -0.5 if None.

    Returns:
        Output [B, H, V] in the dtype of `state`.
    """
    batch, groups, width = q.shape
    q, k, v = (x.to(state.dtype) for x in (q, k, v))
    if g is not None:
        state.mul_(g.to(state.dtype).exp().view(batch, -1, 1 if g.dim() == 2 else width, 1))
    memory = state.view(batch, groups, -1, width, state.shape[-1])
    memory.addcmul_(k[:, :, None, :, None], v.view(batch, groups, -1, 1, v.shape[-1]))
    q = q * (width**-0.5 if scale is None else scale)
    return (q[:, :, None, None] @ memory).view(v.shape)


def kda_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Advance `state` by one token, in place, with q and k of unit length and scale K ** -0.5.

    Args:
        q, k: [B, H, K], queries and keys, normalised here by sqrt(|x|^2 + 1e-6).
        v: [B, H, V], values.
        g: [B, H, K], natural logarithm of the decay.
        beta: [B, H], write strength.
        state: [B, H, K, V], contiguous, float32 or float64; holds the new state afterwards.

    Returns:
        Output [B, H, V] in the dtype of `state`.
    """
    heads, width = q.shape[0] * q.shape[1], q.shape[2]
    memory = state.view(heads, width, -1)
    pair = torch.stack((k, q), dim=2).view(heads, 2, width).to(state.dtype)
    pair = pair * inverse_length(pair)
    key, query = pair[:, 0], pair[:, 1]
    memory.mul_(g.to(state.dtype).exp().reshape(heads, width, 1))
    recalled = torch.bmm(pair, memory)
    written = (v.reshape(heads, -1) - recalled[:, 0]) * beta.to(state.dtype).reshape(heads, 1)
    memory.addcmul_(key[:, :, None], written[:, None, :])
    output = torch.addcmul(recalled[:, 1], (query * key).sum(-1, keepdim=True), written)
    return output.mul_(width**-0.5).view(*q.shape[:2], -1)
