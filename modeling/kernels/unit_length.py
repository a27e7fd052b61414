# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Queries and keys of unit length: `x / sqrt(|x|^2 + 1e-6)`, as the kernels of the delta rule take them.

The epsilon is that of flash-linear-attention and transformers, and keeps a vector of zeros at zero.
"""

import torch
from torch import Tensor

L2_EPS = 1e-6


def unit_length(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return [..., K] divided by its length.

    Args:
        x: [..., K].
        out: where the result goes, without gradients; None for a new tensor, differentiable any number of times.
    """
    if out is None:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)
    return torch.mul(x, inverse_length(x), out=out)


def unit_length_(x: Tensor) -> Tensor:
    """Divide [..., K] by its length in place, without gradients; the numbers are those of a new tensor above."""
    return x.mul_((x * x).sum(-1, keepdim=True).add_(L2_EPS).rsqrt_())


def inverse_length(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return `1 / sqrt(|x|^2 + 1e-6)` [..., 1] of [..., K], without gradients, in `out` if given."""
    # Unlike the sum of `x * x`, this holds no squares of `x`.
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=out).square_().add_(L2_EPS).rsqrt_()
