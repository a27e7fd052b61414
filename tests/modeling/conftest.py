# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Tiny models in float64, with weights large enough for a wrong cache or mask to show."""

import pytest
import torch

from loopergy import LT2Config, LT2ForCausalLM, OuroConfig, OuroForCausalLM

# One LT2 per way of mixing; each test that holds for "every mixer" runs over these.
LT2_KINDS = {
    "gdn": {"layer_mixers": "gdn"},
    "gdn-without-conv": {"layer_mixers": "gdn", "gdn_use_short_conv": False},
    "gdn-negative": {"layer_mixers": "gdn", "gdn_allow_neg_eigval": True, "gdn_use_gate": False},
    "gdn-biased": {"layer_mixers": "gdn,full", "attention_bias": True},
    "full": {"layer_mixers": "full", "num_key_value_heads": 2},
    "full-gated": {"layer_mixers": "full", "attn_output_gate": True},
    "window": {"layer_mixers": "window", "sliding_window": 4},
    "hybrid": {"layer_mixers": "gdn,full"},
    "mixed": {"layer_mixers": "window,gdn,full,gdn", "sliding_window": 5},
    "loop-windows": {"layer_mixers": "gdn,full", "loop_windows": "full->5->3"},
    "sandwich": {
        "layer_mixers": "gdn,full",
        "block_style": "sandwich",
        "norm_between_loops": True,
        "use_loop_residual": False,
        "early_exit_gate": True,
        "gdn_use_short_conv": False,
        "gdn_expand_v": 1,
    },
}


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """Move what starts at zero or one off it, so that no part of the model is without effect."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 3 and (parameter == parameter.flatten()[0]).all():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def build_lt2(dtype=torch.float64, **fields) -> LT2ForCausalLM:
    torch.manual_seed(0)
    settings = {"vocab_size": 128, "num_hidden_layers": 4, "num_loops": 3, "initializer_range": 0.2, **fields}
    return shaken(LT2ForCausalLM(LT2Config.from_preset("tiny", **settings))).to(dtype)


def build_ouro(dtype=torch.float64, **fields) -> OuroForCausalLM:
    torch.manual_seed(0)
    settings = {"initializer_range": 0.2, "eos_token_id": None, **fields}
    return shaken(OuroForCausalLM(OuroConfig.from_preset("tiny", **settings))).to(dtype)


@pytest.fixture(params=["ouro", *LT2_KINDS])
def any_model(request):
    """Give Ouro and an LT2 of each kind in turn."""
    return build_ouro() if request.param == "ouro" else build_lt2(**LT2_KINDS[request.param])


@pytest.fixture(params=list(LT2_KINDS))
def lt2(request):
    """Give an LT2 of each kind in turn."""
    return build_lt2(**LT2_KINDS[request.param])


@pytest.fixture
def make_lt2():
    """Build an LT2 with the given config fields."""
    return build_lt2


@pytest.fixture
def make_ouro():
    """Build an Ouro with the given config fields."""
    return build_ouro


def random_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def make_ids():
    """Draw token ids of a shape, the same for the same seed."""
    return random_ids
