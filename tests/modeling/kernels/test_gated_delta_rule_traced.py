# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from loopergy.modeling.kernels import chunk_gated_delta_rule


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
