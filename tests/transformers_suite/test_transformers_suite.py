# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Run transformers' own model tests on our models; `LOOPERGY_TRANSFORMERS_TESTS` says where they are unpacked."""

import pytest
import transformers_sdist
from looped_model_tests import build

import loopergy

SUITE = transformers_sdist.load()
if isinstance(SUITE, str):
    pytest.skip(SUITE, allow_module_level=True)


def family(prefix: str) -> dict[str, type]:
    """Return a family's classes by role."""
    roles = {"config": "Config", "base": "Model", "causal": "ForCausalLM", "classifier": "ForSequenceClassification"}
    return {role: getattr(loopergy, prefix + suffix) for role, suffix in roles.items()}


OURO = {"num_hidden_layers": 2, "total_ut_steps": 2, "num_key_value_heads": 4}
LT2 = {"num_hidden_layers": 2, "num_loops": 2, "num_key_value_heads": 2}
NRGPT = {"num_hidden_layers": 2}
CEM = {"num_hidden_layers": 2, "num_key_value_heads": 2}

OuroModelTest = build(SUITE, "OuroModelTest", family("Ouro"), OURO, visits=4, attention_visits=4)
LT2FullModelTest = build(
    SUITE, "LT2FullModelTest", family("LT2"), LT2 | {"layer_mixers": ["full", "full"]}, visits=4, attention_visits=4
)
LT2WindowModelTest = build(
    SUITE,
    "LT2WindowModelTest",
    family("LT2"),
    LT2 | {"layer_mixers": ["window", "full"], "sliding_window": 16},
    visits=4,
    attention_visits=4,
)
LT2HybridModelTest = build(
    SUITE,
    "LT2HybridModelTest",
    family("LT2"),
    LT2 | {"layer_mixers": ["gdn", "full"], "gdn_num_heads": 4, "gdn_head_dim": 8},
    visits=4,
    attention_visits=2,
)
DSA = {"dsa_latent_dim": 12, "dsa_tail_dim": 4, "dsa_topk": 5, "dsa_index_head_dim": 8, "dsa_rope": True}
DSA |= {"dsa_indexer": "deepseek", "dsa_indexer_loss_weight": 0.1}
LT2IndexedModelTest = build(
    SUITE,
    "LT2IndexedModelTest",
    family("LT2"),
    LT2 | {"layer_mixers": ["gdn", "dsa"], "gdn_num_heads": 4, "gdn_head_dim": 8} | DSA,
    visits=4,
    attention_visits=0,
)
LT2BlockSparseModelTest = build(
    SUITE,
    "LT2BlockSparseModelTest",
    family("LT2"),
    LT2 | {"layer_mixers": ["nsa", "nsa"], "nsa_block_size": 2, "nsa_block_count": 3, "nsa_window": 3},
    visits=4,
    attention_visits=0,
)
NRGPTModelTest = build(SUITE, "NRGPTModelTest", family("NRGPT"), NRGPT, visits=2, attention_visits=2)
NRGPTStrictModelTest = build(
    SUITE,
    "NRGPTStrictModelTest",
    family("NRGPT"),
    NRGPT | {"ff_energy": "ff1", "exclude_self": True, "eta_type": "scalar"},
    visits=2,
    attention_visits=2,
)
NRGPTGuaranteedModelTest = build(
    SUITE,
    "NRGPTGuaranteedModelTest",
    family("NRGPT"),
    NRGPT
    | {
        "ff_energy": "ff2",
        "exclude_self": True,
        "eta_type": "gamma",
        "norm_type": "layernorm",
        "learn_alpha": True,
        "tangent_projection": True,
    },
    visits=2,
    attention_visits=2,
)
CEMLlamaOneStepModelTest = build(
    SUITE,
    "CEMLlamaOneStepModelTest",
    family("CEMLlama"),
    CEM | {"cem_diag": "none"},
    visits=2,
    attention_visits=2,
)
CEMLlamaDiagonalModelTest = build(
    SUITE,
    "CEMLlamaDiagonalModelTest",
    family("CEMLlama"),
    CEM | {"cem_diag": "shared", "cem_attn_steps": 2, "cem_mlp_steps": 2, "cem_precond": "dlr"},
    visits=2,
    attention_visits=2,
)
CEMLlamaAttentionModelTest = build(
    SUITE,
    "CEMLlamaAttentionModelTest",
    family("CEMLlama"),
    CEM | {"cem_mlp": False},
    visits=2,
    attention_visits=2,
)
LT2KimiModelTest = build(
    SUITE, "LT2KimiModelTest", family("LT2"), LT2 | {"layer_mixers": ["kda"] * 2}, visits=4, attention_visits=0
)
LT2WindowMambaModelTest = build(
    SUITE,
    "LT2WindowMambaModelTest",
    family("LT2"),
    LT2 | {"layer_mixers": ["window", "mamba2"], "sliding_window": 4},
    visits=4,
    attention_visits=2,
)
