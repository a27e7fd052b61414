# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Linear regression on any number of tokens in constant memory: sums of products, and what follows from them.

Letters: A the features `[tokens, width]`, B the targets `[tokens, outputs]`, M the solution `[width, outputs]`. All is
batched over leading dimensions.
"""

import torch

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
# Where nothing can be held out.
RIDGE = 1e-2


class Sums:
    """Add up A^T A and A^T B over tokens for each fold: each batch in its own precision, the sum in float64."""

    def __init__(self) -> None:
        self.grams: dict[int, torch.Tensor] = {}
        self.crosses: dict[int, torch.Tensor] = {}
        self.squares: dict[int, torch.Tensor] = {}

    def add(self, features: torch.Tensor, targets: torch.Tensor, fold: int = 0) -> None:
        """Take in features `[..., tokens, width]` and targets `[..., tokens, outputs]`."""
        dtype = torch.promote_types(torch.promote_types(features.dtype, targets.dtype), torch.float32)
        features, targets = features.to(dtype), targets.to(dtype)
        new = features.mT @ features, features.mT @ targets, targets.square().sum((-2, -1))
        for sums, value in zip((self.grams, self.crosses, self.squares), new, strict=True):
            sums[fold] = sums[fold] + value if fold in sums else value.double()

    def total(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sums of all folds: `[..., width, width]`, `[..., width, outputs]`, `[...]`."""
        gram, cross, squares = (sum(sums.values()) for sums in (self.grams, self.crosses, self.squares))
        return gram, cross, squares  # type: ignore[return-value]


def solve(gram: torch.Tensor, cross: torch.Tensor, ridge: float, start: torch.Tensor | None = None) -> torch.Tensor:
    """Return the M of least `|B - A M|^2 + strength |M - start|^2`.

    Args:
        gram (`torch.Tensor` of shape `[..., width, width]`): A^T A.
        cross (`torch.Tensor` of shape `[..., width, outputs]`): A^T B.
        ridge (`float`): Strength, as a multiple of the mean diagonal of A^T A. With 0, the M nearest to `start` of all
            that have the least error.
        start (`torch.Tensor` of shape `[..., width, outputs]`, *optional*): What M is drawn to. Default: zero.

    Returns:
        `torch.Tensor` of shape `[..., width, outputs]`.
    """
    left = cross if start is None else cross - gram @ start
    if ridge == 0:
        out = torch.linalg.pinv(gram, hermitian=True) @ left
    else:
        strength = ridge * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        strength = torch.where(strength > 0, strength, 1.0)
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        out = torch.linalg.solve(gram + strength[..., None, None] * identity, left)
    return out if start is None else start + out


def squared_error(sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor], solution: torch.Tensor) -> torch.Tensor:
    """Return `|B - A M|^2` from A^T A, A^T B and |B|^2, with the last two dimensions summed."""
    gram, cross, squares = sums
    return squares - 2 * (solution * cross).sum((-2, -1)) + (solution * (gram @ solution)).sum((-2, -1))


def choose_ridge(sums: Sums, start: torch.Tensor) -> float:
    """Return the ridge whose fit on either fold does best on the other: two-fold cross-validation.

    Args:
        sums (`Sums`): Of one regression, in folds 0 and 1. With one fold alone the answer is `RIDGE`.
        start (`torch.Tensor` of shape `[width, outputs]`): As in `solve`.

    Returns:
        `float`: One of `RIDGES`.
    """
    if len(sums.grams) < 2:
        return RIDGE
    folds = [(sums.grams[fold], sums.crosses[fold], sums.squares[fold]) for fold in (0, 1)]
    errors = [
        sum(float(squared_error(folds[1 - fold], solve(*folds[fold][:2], ridge, start))) for fold in (0, 1))
        for ridge in RIDGES
    ]
    return RIDGES[errors.index(min(errors))]
