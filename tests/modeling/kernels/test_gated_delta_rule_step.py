# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from loopergy.modeling.kernels import recurrent_gated_delta_rule
from loopergy.modeling.kernels.gated_delta_rule_step import gated_delta_rule_step


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_step_in_place_equals_the_step_form_token_by_token(dtype):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 3, 4), torch.randn(2, 6, 3, 4), torch.randn(2, 6, 3, 5)
    g, beta = -torch.rand(2, 6, 3), torch.rand(2, 6, 3)
    state_type = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    g, beta, state = (x.to(state_type) for x in (g, beta, torch.randn(2, 3, 4, 5)))
    expected, last = recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=state.clone(), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    address = state.data_ptr()
    qk = torch.stack((q, k), dim=2)
    outputs = [gated_delta_rule_step(qk[:, t], v[:, t], g[:, t], beta[:, t], state) for t in range(6)]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert state.data_ptr() == address
    assert torch.allclose(state, last, atol=tolerance)
    assert torch.allclose(torch.stack(outputs, 1).to(dtype), expected, atol=tolerance, rtol=1e-2)


def test_tensors_without_data_have_the_shapes_of_the_results():
    inputs = [torch.randn(1, 5, 2, 4, device="meta") for _ in range(3)] + [torch.randn(1, 5, 2, device="meta")] * 2
    out, state = recurrent_gated_delta_rule(*inputs, output_final_state=True)
    assert out.shape == (1, 5, 2, 4)
    assert state.shape == (1, 2, 4, 4)
