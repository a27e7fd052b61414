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
