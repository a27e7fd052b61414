# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Check that NRGPT's config keeps what it is given, knows the published sizes, and refuses what cannot be."""

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError

from loopergy import NRGPTConfig
from loopergy.configuration.configuration_nrgpt import LISTOPS_WIDTHS, NRGPT_PRESETS, resolve_num_steps


def test_the_defaults_are_those_of_the_official_code():
    config = NRGPTConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (768, 12, 12)
    assert (config.intermediate_size, config.max_position_embeddings) == (3072, 1024)
    assert (config.ff_energy, config.exclude_self, config.eta_type) == ("ff2w", False, "full")
    assert (config.norm_type, config.attention_beta, config.dropout) == ("bare_layernorm", 1.0, 0.0)
    assert (config.tie_word_embeddings, config.lm_head_bias) == (False, True)


def test_steps_are_the_layers_under_another_name(tmp_path):
    """Guards D4."""
    config = NRGPTConfig.from_preset("tiny", num_steps=7)
    assert config.num_hidden_layers == config.num_steps == 7
    config.num_steps = 4
    config.save_pretrained(tmp_path)
    assert NRGPTConfig.from_pretrained(tmp_path).num_hidden_layers == 4
    assert NRGPTConfig.from_pretrained(tmp_path, num_steps=2).num_hidden_layers == 2
    assert "num_steps" not in config.to_dict()
    with pytest.raises(StrictDataclassFieldValidationError, match="num_hidden_layers"):
        config.num_steps = 0


def test_a_config_survives_its_file(tmp_path):
    fields = {"ff_energy": "ff1", "exclude_self": True, "eta_type": "gamma", "norm_type": "rmsnorm"}
    fields |= {"learn_alpha": True, "tangent_projection": True, "stop_tolerance": 0.1, "attention_beta": 2}
    config = NRGPTConfig.from_preset("tiny", **fields)
    config.save_pretrained(tmp_path)
    assert NRGPTConfig.from_pretrained(tmp_path).to_dict() | {"_name_or_path": ""} == config.to_dict()


@pytest.mark.parametrize("name", list(NRGPT_PRESETS))
def test_every_preset_builds_and_gives_way_to_keywords(name):
    config = NRGPTConfig.from_preset(name, ff_energy="ff1")
    assert config.ff_energy == "ff1"
    assert config.intermediate_size == 4 * config.hidden_size


def test_the_listops_presets_are_the_widths_of_the_sweep():
    assert len(LISTOPS_WIDTHS) == 16
    config = NRGPTConfig.from_preset("listops-50")
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (20, 50, 5)
    assert (config.num_attention_heads, config.exclude_self, config.max_position_embeddings) == (1, True, 128)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"listops-8.*tiny"):
        NRGPTConfig.from_preset("7b")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ff_energy": "ff3"}, "ff_energy='ff3' must be one of 'ff1', 'ff2', 'ff2w'"),
        ({"eta_type": "free"}, "eta_type='free' must be one of"),
        ({"norm_type": "batchnorm"}, "norm_type='batchnorm' must be one of"),
        ({"intermediate_size": 0}, "intermediate_size=0"),
        ({"attention_beta": 0.0}, "attention_beta=0.0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0"),
        ({"stop_tolerance": -0.1}, "stop_tolerance=-0.1"),
        ({"norm_type": "none", "tangent_projection": True}, "tangent_projection=True needs a norm"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(StrictDataclassClassValidationError) as error:
        NRGPTConfig(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("fields", [{"num_attention_heads": 0}, {"vocab_size": 0}, {"exclude_self": "yes"}])
def test_values_of_the_wrong_kind_are_refused(fields):
    with pytest.raises(StrictDataclassFieldValidationError, match=next(iter(fields))):
        NRGPTConfig(**fields)


def test_step_counts_of_a_call_are_checked(caplog):
    config = NRGPTConfig.from_preset("tiny")
    assert resolve_num_steps(config, None) == 3
    assert resolve_num_steps(config, 2) == 2
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            resolve_num_steps(config, wrong)  # pyright: ignore[reportArgumentType]
