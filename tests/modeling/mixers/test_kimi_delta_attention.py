# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import torch
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from loopergy import LT2Config
from loopergy.modeling.mixers.kimi_delta_attention import KimiDeltaAttention


@torch.no_grad()
def test_the_mixer_equals_that_of_transformers():
    torch.manual_seed(0)
    config = LT2Config.from_preset("tiny", layer_mixers="kda", kda_num_heads=4, kda_head_dim=16, kda_norm_eps=1e-6)
    mixer = KimiDeltaAttention(config).eval()
    for name, parameter in mixer.named_parameters():
        if name not in ("A_log", "dt_bias"):
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (name == "o_norm.weight"))
    # Theirs has no bias there.
    mixer.g_proj[1].bias.zero_()
    linear = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": []}
    peer = KimiLinearDeltaAttention(
        KimiLinearConfig(hidden_size=64, num_hidden_layers=1, rms_norm_eps=1e-6, linear_attn_config=linear),
        layer_idx=0,
    ).eval()
    weights = {f"{name}.weight": getattr(mixer, name).weight for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    weights |= {f"{name}.weight": getattr(mixer, name).weight for name in ("b_proj", "o_norm")}
    weights |= {
        "conv1d.weight": torch.cat([getattr(mixer, f"{name}_conv1d").weight for name in "qkv"]),
        "forget_gate.dt_bias": mixer.dt_bias,
        "forget_gate.A_log": mixer.A_log.view(1, 1, 4, 1),
        "forget_gate.f_a_proj.weight": mixer.f_proj[0].weight,
        "forget_gate.f_b_proj.weight": mixer.f_proj[1].weight,
        "g_a_proj.weight": mixer.g_proj[0].weight,
        "g_b_proj.weight": mixer.g_proj[1].weight,
    }
    peer.load_state_dict(weights)
    x = torch.randn(2, 70, 64)
    torch.testing.assert_close(mixer(x)[0], peer(x), rtol=1e-4, atol=1e-4)
