# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Ranges of the fields that the configs share, and two names for one number."""

import re

import pytest
from huggingface_hub.errors import StrictDataclassError

from loopergy import CEMLlamaConfig, GPTBaselineConfig, LT2Config, NRGPTConfig, OuroConfig

CONFIGS = (CEMLlamaConfig, OuroConfig, LT2Config, NRGPTConfig, GPTBaselineConfig)
NAN, INFINITY = float("nan"), float("inf")
WRONG = {
    "vocab_size": (0,),
    "hidden_size": (0,),
    "intermediate_size": (0, -4),
    "num_attention_heads": (0,),
    "num_key_value_heads": (0, -2),
    "head_dim": (0, -2),
    "max_position_embeddings": (0,),
    "hidden_act": ("foo",),
    "attention_dropout": (2.0, -0.5, 1.0, NAN),
    "dropout": (2.0, -0.5, NAN),
    "rms_norm_eps": (-1.0, 0.0, NAN, INFINITY),
    "layer_norm_eps": (-1.0, NAN, INFINITY),
    "gdn_norm_eps": (-1.0,),
    "attention_beta": (INFINITY, NAN),
    "stop_tolerance": (INFINITY, NAN, -1),
    "cem_diag_init": (NAN, -INFINITY),
    "cem_step_size": (NAN, -1),
    "cem_temperature": (0,),
    "early_exit_threshold": (NAN, -0.5),
}


@pytest.mark.parametrize(
    ("config", "field"),
    [(config, field) for config in CONFIGS for field in WRONG if field in config.__dataclass_fields__],
)
def test_a_value_out_of_range_is_refused_by_name(config, field):
    for value in WRONG[field]:
        with pytest.raises(StrictDataclassError, match=rf"(?s){field}.*{re.escape(str(value))}"):
            config.from_preset("tiny", **{field: value})


def test_two_names_for_one_number_may_not_disagree(tmp_path):
    for build in (
        lambda **fields: CEMLlamaConfig(num_steps=2, cem_attn_steps=3, **fields),
        lambda **fields: CEMLlamaConfig(num_steps=2, cem_attn_steps=2, cem_mlp_steps=3, **fields),
        lambda **fields: NRGPTConfig(num_steps=2, num_hidden_layers=5, **fields),
        lambda **fields: OuroConfig(num_loops=2, total_ut_steps=5, **fields),
    ):
        with pytest.raises(ValueError, match=r"=2 and .* contradict each other: give one of them"):
            build()
    assert CEMLlamaConfig(num_steps=3, cem_attn_steps=3).num_steps == 3
    for config, preset, name in (
        (CEMLlamaConfig, "paper-full-s512", "num_steps"),
        (NRGPTConfig, "tiny", "num_steps"),
        (OuroConfig, "tiny", "num_loops"),
    ):
        made = config.from_preset(preset, **{name: 5})
        assert getattr(made, name) == 5
        made.save_pretrained(tmp_path / preset)
        assert getattr(config.from_pretrained(tmp_path / preset), name) == 5
        assert getattr(config.from_pretrained(tmp_path / preset, **{name: 2}), name) == 2
