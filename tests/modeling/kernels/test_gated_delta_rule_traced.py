# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from loopergy.modeling.kernels import chunk_gated_delta_rule
from loopergy.modeling.kernels.gated_delta_rule_traced import unit_lower_inverse


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


@pytest.mark.filterwarnings("ignore")
def test_exported_program_gives_the_same_numbers():
    class Rule(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)

    arguments = [torch.randn(1, 40, 2, 4), torch.randn(1, 40, 2, 4), torch.randn(1, 40, 2, 6)]
    arguments += [-torch.rand(1, 40, 2), torch.rand(1, 40, 2)]
    exported = torch.export.export(Rule(), tuple(arguments), strict=False).module()
    for left, right in zip(exported(*arguments), Rule()(*arguments), strict=True):
        assert torch.allclose(left, right, atol=1e-5)
