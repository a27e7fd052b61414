# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The inverse of triangular matrices in matrix products alone, which tracers and gradients of any order can follow."""

import torch
from torch import Tensor


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
