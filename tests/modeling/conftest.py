# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Tiny models in float64, with weights large enough for a wrong cache or mask to show."""

import pytest
import torch

from loopergy import (
    CEMLlamaConfig,
    CEMLlamaForCausalLM,
    GPTBaselineConfig,
    GPTBaselineForCausalLM,
    LT2Config,
    LT2ForCausalLM,
    NRGPTConfig,
    NRGPTForCausalLM,
    OuroConfig,
    OuroForCausalLM,
)

# Sparse mixers that leave something out at the lengths of the tests.
SMALL_NSA = {"nsa_num_key_value_heads": 2, "nsa_block_size": 4, "nsa_block_count": 4, "nsa_window": 3}
SMALL_DSA = {"dsa_latent_dim": 12, "dsa_tail_dim": 4, "dsa_topk": 5, "dsa_index_head_dim": 8}

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
    "kda": {"layer_mixers": "kda", "kda_expand_v": 1.5},
    "kda-negative": {"layer_mixers": "kda,full", "kda_allow_neg_eigval": True, "kda_use_short_conv": False},
    "deltanet": {"layer_mixers": "deltanet", "deltanet_allow_neg_eigval": True},
    "mamba2": {"layer_mixers": "mamba2", "mamba2_state_size": 12},
    "hgrn2": {"layer_mixers": "hgrn2"},
    "retnet": {"layer_mixers": "retnet"},
    "gla": {"layer_mixers": "gla", "gla_gate_logit_normalizer": 2},
    "la": {"layer_mixers": "la", "attention_bias": True},
    "random-1": {"layer_mixers": "mamba2,window,retnet,deltanet", "sliding_window": 4, "attention_bias": True},
    "random-2": {"layer_mixers": "hgrn2,full,kda,gla", "attention_bias": True},
    "nsa": {"layer_mixers": "nsa", **SMALL_NSA},
    "nsa-overlap": {"layer_mixers": "nsa,window", "sliding_window": 4, **SMALL_NSA, "nsa_pool_stride": 2},
    "dsa": {"layer_mixers": "dsa", **SMALL_DSA},
    "gdn-dsa": {
        "layer_mixers": "gdn,dsa",
        "dsa_indexer": "deepseek",
        "dsa_rope": True,
        "dsa_indexer_loss_weight": 0.5,
        **SMALL_DSA,
    },
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

# One CEM-Llama per corner of the design space; each test that holds for "every kind" runs over these.
CEM_KINDS = {
    "no-diagonal": {"cem_diag": "none"},
    "shared": {"cem_diag": "shared", "num_steps": 2},
    "per-head": {"cem_diag": "per_head", "num_steps": 3, "num_key_value_heads": 2, "cem_norm_mode": "every_step"},
    "low-rank": {"cem_diag": "none", "num_steps": 2, "num_key_value_heads": 1, "cem_precond": "dlr"},
    "jacobian": {"num_steps": 2, "cem_norm_mode": "exact_jacobian", "cem_precond": "diag", "cem_mlp_act_on": "gate"},
    "plain": {"cem_diag": "none", "cem_rope_values": "plain", "num_key_value_heads": 2},
    "attention-only": {"cem_mlp": False, "attention_bias": True, "mlp_bias": True, "cem_learn_step_size": True},
    "mlp-only": {"cem_attention": False, "num_steps": 2, "cem_learn_step_size": True},
    "untied": {"cem_diag": "none", "cem_tie_kv": False, "cem_tie_qo": False, "cem_tie_mlp": False, "num_steps": 2},
    "untied-output": {"cem_tie_qo": False, "cem_temperature": 3.0, "cem_step_size": 0.7},
}

# NRGPT by feed-forward form, norm and rate, and its baselines.
NRGPT_KINDS = {
    "ff2w": {},
    "ff1": {"ff_energy": "ff1", "exclude_self": True},
    "ff2": {"ff_energy": "ff2", "exclude_self": True, "eta_type": "gamma", "norm_type": "layernorm"},
    "rms": {"norm_type": "rmsnorm", "eta_type": "diag", "attention_beta": 0.5, "learn_alpha": True},
}
GPT_KINDS = {recurrence: {"recurrence": recurrence} for recurrence in ("none", "sequential", "parallel")}


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


def build_cem(dtype=torch.float64, **fields) -> CEMLlamaForCausalLM:
    torch.manual_seed(0)
    settings = {"initializer_range": 0.2, **fields}
    return shaken(CEMLlamaForCausalLM(CEMLlamaConfig.from_preset("tiny", **settings))).to(dtype)


def build_nrgpt(dtype=torch.float64, **fields) -> NRGPTForCausalLM:
    torch.manual_seed(0)
    settings = {"initializer_range": 0.2, **fields}
    return shaken(NRGPTForCausalLM(NRGPTConfig.from_preset("tiny", **settings))).to(dtype)


def build_gpt(dtype=torch.float64, **fields) -> GPTBaselineForCausalLM:
    torch.manual_seed(0)
    settings = {"initializer_range": 0.2, **fields}
    return shaken(GPTBaselineForCausalLM(GPTBaselineConfig.from_preset("tiny", **settings))).to(dtype)


# Every kind of every family by name, and one of each family whose parts meet each other.
BUILDERS = {"ouro": build_ouro, "lt2": build_lt2, "cem": build_cem, "nrgpt": build_nrgpt, "gpt": build_gpt}
EVERY_KIND = {"ouro": ("ouro", {})}
for _family, _kinds in (("lt2", LT2_KINDS), ("cem", CEM_KINDS), ("nrgpt", NRGPT_KINDS), ("gpt", GPT_KINDS)):
    EVERY_KIND |= {f"{_family}-{_name}": (_family, _fields) for _name, _fields in _kinds.items()}
EACH_FAMILY = ("ouro", "lt2-mixed", "lt2-gdn-dsa", "cem-shared", "nrgpt-ff2w", "nrgpt-ff1", "gpt-parallel")


@pytest.fixture
def build_kind():
    """Build a model by the name of its kind, with further config fields."""

    def build(name: str, dtype: torch.dtype = torch.float64, **fields):
        family, own = EVERY_KIND[name]
        return BUILDERS[family](dtype, **own, **fields)

    return build


@pytest.fixture(params=list(EVERY_KIND))
def every_model(request, build_kind):
    """Give a model of each kind of each family in turn."""
    return build_kind(request.param)


@pytest.fixture(params=EACH_FAMILY)
def each_family(request):
    """Give the names of a few kinds, every family among them, in turn."""
    return request.param


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


@pytest.fixture(params=list(CEM_KINDS))
def any_cem(request):
    """Give a CEM-Llama of each kind in turn."""
    return build_cem(**CEM_KINDS[request.param])


@pytest.fixture
def make_cem():
    """Build a CEM-Llama with the given config fields."""
    return build_cem


def random_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def make_ids():
    """Draw token ids of a shape, the same for the same seed."""
    return random_ids
