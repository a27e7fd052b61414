# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import json
import logging
import re

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from loopergy import CEMLlamaConfig
from loopergy.configuration.configuration_cem_llama import CEM_LLAMA_PRESETS, check_num_steps


def test_defaults_are_those_of_the_documentation():
    config = CEMLlamaConfig()
    fields = {name: getattr(config, name) for name in vars(config) if name.startswith("cem_")}
    assert fields == {
        "cem_attention": True,
        "cem_mlp": True,
        "cem_attn_steps": 1,
        "cem_mlp_steps": 1,
        "cem_step_size": 1.0,
        "cem_learn_step_size": False,
        "cem_step_size_div_steps": True,
        "cem_diag": "shared",
        "cem_diag_init": 0.0,
        "cem_rope_values": "exact",
        "cem_norm_mode": "once",
        "cem_precond": "none",
        "cem_precond_rank": 8,
        "cem_mlp_act_on": "tied",
        "cem_temperature": None,
        "cem_tie_kv": True,
        "cem_tie_qo": True,
        "cem_tie_mlp": True,
    }
    assert (config.num_key_value_heads, config.head_dim) == (12, 64)


def test_every_preset_builds_and_takes_overrides():
    for name in CEM_LLAMA_PRESETS:
        assert CEMLlamaConfig.from_preset(name, cem_diag="none").cem_diag == "none"
    full = CEMLlamaConfig.from_preset("paper-full-s768")
    assert (full.num_steps, full.cem_diag, full.cem_precond) == (2, "shared", "dlr")
    with pytest.raises(ValueError, match="cem-s512, cem-s768"):
        CEMLlamaConfig.from_preset("cem-7b")


def test_a_config_survives_its_file_twice(tmp_path):
    config = CEMLlamaConfig.from_preset("tiny", num_steps=2, cem_diag="per_head", rope_parameters={"rope_theta": 5e5})
    for _ in range(2):
        config.save_pretrained(tmp_path)
        loaded = AutoConfig.from_pretrained(tmp_path)
        assert type(loaded) is CEMLlamaConfig
        elsewhere = {"transformers_version": None, "_name_or_path": None}
        assert loaded.to_dict() | elsewhere == config.to_dict() | elsewhere
        config = loaded
    assert "num_steps" not in json.loads((tmp_path / "config.json").read_text())
    assert config.rope_parameters["rope_theta"] == 5e5


def test_old_rotary_keys_are_read():
    """Guards E11."""
    assert CEMLlamaConfig(rope_theta=1e6).rope_parameters["rope_theta"] == 1e6


def test_num_steps_sets_both_counts_wherever_it_is_given(tmp_path):
    config = CEMLlamaConfig(num_steps=3)
    assert (config.cem_attn_steps, config.cem_mlp_steps, config.num_steps) == (3, 3, 3)
    config.save_pretrained(tmp_path)
    loaded = CEMLlamaConfig.from_pretrained(tmp_path, num_steps=2)
    assert (loaded.cem_attn_steps, loaded.cem_mlp_steps) == (2, 2)
    loaded.cem_mlp_steps = 1
    assert loaded.num_steps is None
    loaded.num_steps = 4
    assert (loaded.cem_attn_steps, loaded.cem_mlp_steps) == (4, 4)
    with pytest.raises(StrictDataclassError, match="cem_attn_steps"):
        CEMLlamaConfig.from_pretrained(tmp_path, num_steps=0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"cem_diag": "full"}, "cem_diag='full' must be one of 'none', 'shared', 'per_head'"),
        ({"cem_norm_mode": "never"}, "cem_norm_mode='never' must be one of"),
        ({"cem_rope_values": "plain"}, "Set cem_diag='none'"),
        ({"cem_tie_kv": False}, "Set cem_diag='none'"),
        ({"cem_step_size": 0.0}, "cem_step_size=0.0 must be a finite number above 0"),
        ({"cem_step_size": float("inf")}, "cem_step_size=inf"),
        ({"cem_temperature": -1.0}, "cem_temperature=-1.0"),
        ({"cem_attn_steps": 0}, "cem_attn_steps"),
        ({"cem_precond_rank": 0}, "cem_precond_rank"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5 must divide num_attention_heads=12"),
        ({"head_dim": 63}, "head_dim=63 must be even"),
        ({"hidden_size": 760, "head_dim": 64}, "must divide hidden_size=760"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields, text):
    with pytest.raises(StrictDataclassError, match=re.escape(text)):
        CEMLlamaConfig(**fields)


def test_what_is_wrong_for_cem_attention_does_not_matter_to_a_stock_one():
    CEMLlamaConfig(cem_attention=False, cem_rope_values="plain", cem_tie_kv=False)
    assert not CEMLlamaConfig(cem_attention=False).has_diagonal
    assert CEMLlamaConfig().has_diagonal


def test_dropout_warns_that_the_gradient_is_no_longer_exact(caplog):
    transformers_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        CEMLlamaConfig(attention_dropout=0.125)
    transformers_logging.disable_propagation()
    assert "attention_dropout=0.125" in caplog.text


def test_step_counts_of_a_call_are_checked():
    check_num_steps(None)
    check_num_steps(3)
    for wrong in (0, -2, 1.0, True, "2"):
        with pytest.raises(ValueError, match="cem_attn_steps and cem_mlp_steps"):
            check_num_steps(wrong)
