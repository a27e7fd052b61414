# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from loopergy.modeling.kernels.triangular_inverse import unit_lower_inverse


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33])
def test_inverse_of_unit_lower_triangular_matrices_reads_the_strict_lower_part_only(size):
    matrix = torch.randn(4, size, size, dtype=torch.float64)
    unit = matrix.tril(-1) + torch.eye(size, dtype=torch.float64)
    assert torch.allclose(unit_lower_inverse(matrix) @ unit, torch.eye(size, dtype=torch.float64), atol=1e-8)


def test_inverse_stays_accurate_on_equal_keys():
    """Powers of the strict lower part would lose every digit here."""
    matrix = torch.ones(1, 64, 64)
    unit = matrix.tril(-1) + torch.eye(64)
    assert torch.allclose(unit_lower_inverse(matrix) @ unit, torch.eye(64), atol=1e-5)
