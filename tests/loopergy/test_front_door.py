# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Importing loopergy makes the Auto classes know its models."""

import logging
import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

import loopergy

FAMILIES = {"ouro": "Ouro", "lt2": "LT2"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_auto_classes_return_our_classes(model_type):
    prefix = FAMILIES[model_type]
    config = getattr(loopergy, f"{prefix}Config").from_preset("tiny")
    assert type(AutoConfig.for_model(model_type)) is getattr(loopergy, f"{prefix}Config")
    for auto, suffix in (
        (AutoModel, "Model"),
        (AutoModelForCausalLM, "ForCausalLM"),
        (AutoModelForSequenceClassification, "ForSequenceClassification"),
    ):
        assert type(auto.from_config(config)) is getattr(loopergy, f"{prefix}{suffix}")


def test_registering_twice_is_harmless_and_silent(caplog):
    with caplog.at_level(logging.WARNING):
        loopergy.register()
        loopergy.register()
    assert caplog.text == ""


BEFORE = """
from transformers import AutoConfig, PreTrainedConfig
class OuroConfig(PreTrainedConfig):
    model_type = "ouro"
AutoConfig.register("ouro", OuroConfig)
import loopergy
assert type(AutoConfig.for_model("ouro")) is loopergy.OuroConfig
"""


def test_ours_wins_over_an_earlier_registration_and_the_log_says_so(tmp_path):
    """Guards E10."""
    done = subprocess.run([sys.executable, "-c", BEFORE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "registered as __main__.OuroConfig" in done.stderr
    assert "loopergy's OuroConfig takes its place" in done.stderr


def test_ours_wins_again_after_a_later_registration(monkeypatch):
    """Guards E10."""

    class Other(LlamaConfig):
        model_type = "ouro"

    AutoConfig.register("ouro", Other, exist_ok=True)
    assert type(AutoConfig.for_model("ouro")) is Other
    loopergy.register()
    assert type(AutoConfig.for_model("ouro")) is loopergy.OuroConfig


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loopergy.nothing


def test_lazy_names_are_the_objects_of_their_files():
    from loopergy.conversion.convert import convert

    assert loopergy.convert is convert
    assert set(loopergy.__all__) <= set(dir(loopergy))
