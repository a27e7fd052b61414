# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from loopergy import LT2Config
from loopergy.modeling.mixers.mamba2 import Mamba2


@torch.no_grad()
def test_the_mixer_equals_that_of_transformers():
    torch.manual_seed(0)
    config = LT2Config.from_preset("tiny", layer_mixers="mamba2", mamba2_num_heads=4, mamba2_state_size=16)
    mixer = Mamba2(config).eval()
    for name, parameter in mixer.named_parameters():
        if name not in ("A_log", "dt_bias"):
            parameter.copy_(0.3 * torch.randn(parameter.shape) + (name in ("norm.weight", "D")))
    sizes = {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "expand": 2, "conv_kernel": 4}
    peer = Mamba2Mixer(
        Mamba2Config(hidden_size=64, layer_norm_epsilon=1e-6, use_bias=False, chunk_size=16, **sizes), layer_idx=0
    ).eval()
    peer.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 70, 64)
    torch.testing.assert_close(mixer(x)[0], peer(x), rtol=1e-4, atol=1e-4)
