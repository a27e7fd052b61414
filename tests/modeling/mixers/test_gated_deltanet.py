# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from torch.nn import functional as F
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from loopergy import LT2Config
from loopergy.modeling.mixers.gated_deltanet import GatedDeltaNet


def build(dtype=torch.float64, **fields) -> GatedDeltaNet:
    torch.manual_seed(0)
    config = LT2Config.from_preset("tiny", layer_mixers="gdn", **fields)
    mixer = GatedDeltaNet(config)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name not in ("A_log", "dt_bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape) + (name == "o_norm.weight"))
    return mixer.to(dtype).eval()


def by_hand(mixer: GatedDeltaNet, x: torch.Tensor) -> torch.Tensor:
    """Compute the mixer one token and one head at a time from the recurrence in its docstring."""
    batch, length, _ = x.shape
    parts = {name: F.linear(x, getattr(mixer, f"{name}_proj").weight) for name in "qkvab"}
    for name in "qkv":
        if mixer.conv_size:
            kernel = getattr(mixer, f"{name}_conv1d").weight[:, 0]
            padded = F.pad(parts[name], (0, 0, mixer.conv_size - 1, 0))
            taps = range(mixer.conv_size)
            parts[name] = sum(padded[:, tap : tap + length] * kernel[:, tap] for tap in taps)
        parts[name] = F.silu(parts[name])
    keys, values = mixer.head_dim, mixer.value_head_dim
    output = torch.zeros(batch, length, mixer.num_heads * values, dtype=x.dtype)
    for row in range(batch):
        for head in range(mixer.num_heads):
            state = torch.zeros(keys, values, dtype=x.dtype)
            cut, cut_v = slice(head * keys, (head + 1) * keys), slice(head * values, (head + 1) * values)
            for t in range(length):
                q, k = (parts[name][row, t, cut] for name in "qk")
                q, k = (vector / torch.sqrt(vector @ vector + 1e-6) for vector in (q, k))
                v = parts["v"][row, t, cut_v]
                beta = mixer.max_beta * parts["b"][row, t, head].sigmoid()
                g = -mixer.A_log[head].exp() * F.softplus(parts["a"][row, t, head] + mixer.dt_bias[head])
                state = g.exp() * state
                state = state + torch.outer(k, beta * (v - state.T @ k))
                o = state.T @ q / keys**0.5
                o = o / torch.sqrt((o * o).mean() + mixer.o_norm.variance_epsilon) * mixer.o_norm.weight
                if mixer.g_proj is not None:
                    o = o * F.silu(F.linear(x[row, t], mixer.g_proj.weight))[cut_v]
                output[row, t, cut_v] = o
    return F.linear(output, mixer.o_proj.weight)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gdn_use_short_conv": False},
        {"gdn_use_gate": False},
        {"gdn_allow_neg_eigval": True},
        {"gdn_num_heads": 3, "gdn_head_dim": 5, "gdn_expand_v": 1, "gdn_conv_size": 3},
    ],
)
@pytest.mark.parametrize("length", [1, 17, 65])
@torch.no_grad()
def test_the_mixer_equals_its_recurrence_written_out(fields, length):
    """Guards F1."""
    mixer = build(**fields)
    x = torch.randn(2, length, 64, dtype=torch.float64)
    torch.testing.assert_close(mixer(x)[0], by_hand(mixer, x), rtol=0, atol=1e-10)


@torch.no_grad()
def test_the_mixer_equals_that_of_transformers():
    mixer = build(dtype=torch.float32, gdn_num_heads=4, gdn_head_dim=8, gdn_expand_v=2, gdn_norm_eps=1e-6)
    config = Qwen3NextConfig(
        hidden_size=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-6,
    )
    peer = Qwen3NextGatedDeltaNet(config, layer_idx=0).eval()
    # Its projections are fused per head: [q k v z] and [b a].
    heads = [getattr(mixer, f"{name}_proj").weight.unflatten(0, (4, -1)) for name in "qkvg"]
    peer.in_proj_qkvz.weight.copy_(torch.cat(heads, dim=1).flatten(0, 1))
    gates = [getattr(mixer, f"{name}_proj").weight.unflatten(0, (4, -1)) for name in "ba"]
    peer.in_proj_ba.weight.copy_(torch.cat(gates, dim=1).flatten(0, 1))
    peer.conv1d.weight.copy_(torch.cat([getattr(mixer, f"{name}_conv1d").weight for name in "qkv"]))
    peer.A_log.copy_(mixer.A_log)
    peer.dt_bias.copy_(mixer.dt_bias)
    peer.norm.weight.copy_(mixer.o_norm.weight)
    peer.out_proj.weight.copy_(mixer.o_proj.weight)
    x = torch.randn(2, 70, 64)
    torch.testing.assert_close(mixer(x)[0], peer(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_without_decay_and_with_orthonormal_keys_values_come_back_exactly():
    """Property G3, at the mixer's own kernel."""
    from loopergy.modeling.kernels import chunk_gated_delta_rule

    keys = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q[None, :, None]
    values = torch.randn(1, 8, 1, 5, dtype=torch.float64)
    zero, one = torch.zeros(1, 8, 1, dtype=torch.float64), torch.ones(1, 8, 1, dtype=torch.float64)
    _, state = chunk_gated_delta_rule(keys, keys, values, g=zero, beta=one, output_final_state=True)
    torch.testing.assert_close(keys[0, :, 0] @ state[0, 0], values[0, :, 0], rtol=0, atol=1e-12)


@torch.no_grad()
def test_not_even_nan_at_padding_reaches_a_real_token():
    """Guards B1: a padded row of attention may be NaN, and NaN times a mask of 0 still is."""
    mixer, mask = build(), torch.tensor([[0, 0, 1, 1, 0, 1, 1]])
    x = torch.randn(1, 7, 64, dtype=torch.float64)
    expected = mixer(x[:, mask[0].bool()])[0]
    x[:, ~mask[0].bool()] = torch.nan
    torch.testing.assert_close(mixer(x, attention_mask=mask)[0][:, mask[0].bool()], expected, rtol=0, atol=1e-12)


def test_a_mixer_built_alone_has_the_start_of_one_in_a_model():
    """Guards F14."""
    config = LT2Config.from_preset("tiny", layer_mixers="gdn", gdn_num_heads=64, gdn_head_dim=1)
    mixer = GatedDeltaNet(config)
    step = F.softplus(mixer.dt_bias)
    assert 0 < mixer.A_log.exp().min() < 4 < 12 < mixer.A_log.exp().max() <= 16
    assert 0.999e-3 <= step.min() < step.max() <= 0.1001
