# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Check that the baselines' config keeps what it is given and refuses what cannot be."""

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError

from loopergy import GPTBaselineConfig
from loopergy.configuration.configuration_gpt_baselines import GPT_BASELINE_PRESETS


@pytest.mark.parametrize("name", list(GPT_BASELINE_PRESETS))
def test_every_preset_builds_and_survives_its_file(name, tmp_path):
    config = GPTBaselineConfig.from_preset(name, recurrence="sequential")
    config.save_pretrained(tmp_path)
    assert GPTBaselineConfig.from_pretrained(tmp_path).to_dict() | {"_name_or_path": ""} == config.to_dict()
    assert config.intermediate_size == 4 * config.hidden_size


def test_heads_that_do_not_divide_the_width_are_rounded_down():
    assert GPTBaselineConfig(hidden_size=380, num_attention_heads=8).head_dim == 47


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recurrence": "loop"}, "recurrence='loop' must be one of 'none', 'sequential', 'parallel'"),
        ({"hidden_size": 4, "num_attention_heads": 8}, "num_attention_heads=8 is more than hidden_size=4"),
        ({"intermediate_size": 0}, "intermediate_size=0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(StrictDataclassClassValidationError) as error:
        GPTBaselineConfig(**fields)
    assert message in str(error.value)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="tiny"):
        GPTBaselineConfig.from_preset("7b")
