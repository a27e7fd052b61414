# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from loopergy.modeling.kernels import recurrent_gated_delta_rule
from loopergy.modeling.kernels.gated_delta_rule_step import gated_delta_rule_step


def draw(batch, heads, keys, values, dtype=torch.float64):
    q, k = torch.randn(2, batch, heads, keys, dtype=dtype)
    v = torch.randn(batch, heads, values, dtype=dtype)
    g = -3 * torch.rand(batch, heads, dtype=dtype)
    return q, k, v, g, torch.rand(batch, heads, dtype=dtype), torch.randn(batch, heads, keys, values, dtype=dtype)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 8, 5), (3, 5, 4, 16)])
def test_a_step_equals_the_recurrence_and_leaves_its_state_behind(shape):
    """Guards F1."""
    q, k, v, g, beta, state = draw(*shape)
    expected, after = recurrent_gated_delta_rule(
        *(x[:, None] for x in (q, k, v)),
        g=g[:, None],
        beta=beta[:, None],
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    output = gated_delta_rule_step(q, k, v, g, beta, state)
    torch.testing.assert_close(output, expected[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, after, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, -20.0, -1000.0, -torch.inf])
def test_any_decay_is_finite(decay):
    """Guards F2."""
    q, k, v, g, beta, state = draw(2, 3, 8, 5)
    output = gated_delta_rule_step(q, k, v, torch.full_like(g, decay), beta, state)
    assert output.isfinite().all()
    assert state.isfinite().all()


def test_half_precision_inputs_meet_a_float32_state():
    q, k, v, g, beta, state = draw(2, 3, 8, 5, dtype=torch.float32)
    exact = state.clone()
    expected = gated_delta_rule_step(q, k, v, g, beta, exact)
    output = gated_delta_rule_step(q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta, state)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
