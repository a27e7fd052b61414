# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Describe a tiny looped model to transformers' model tests."""

import copy
import unittest
from unittest.mock import patch

import torch
from differences import CHANGED, SKIPPED, SKIPPED_FOR, SKIPPED_WITHOUT_GENERATION_TESTS
from transformers.models.auto import modeling_auto
from transformers_sdist import Suite


class LoopedModelTester:
    """Hold a tiny config and inputs, and the numbers that the tests compare outputs with.

    Args:
        parent: The test case, for its assertions.
        config_class: The config class under test.
        fields: Config fields beyond the common sizes.
        visits: How many hidden states the layers give: loops times layers.
        attention_visits: How many of these come from a mixer with attention weights.
    """

    batch_size = 3
    seq_length = 8
    is_training = True
    hidden_size = 32
    num_attention_heads = 4
    vocab_size = 99

    def __init__(self, parent, config_class: type, fields: dict, visits: int, attention_visits: int) -> None:
        self.parent = parent
        self.config_class = config_class
        self.fields = fields
        self.num_hidden_layers = attention_visits
        self.expected_num_hidden_layers = visits + 1

    def get_config(self):
        """Build the tiny config afresh."""
        return self.config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=48,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **copy.deepcopy(self.fields),
        )

    def prepare_config_and_inputs_for_common(self):
        """Return a config and a batch whose second row is padded on the left."""
        input_ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        mask = torch.ones_like(input_ids)
        mask[1, :2] = 0
        return self.get_config(), {"input_ids": input_ids, "attention_mask": mask}


def as_own_decoder_view(test):
    """Run a test of `CHANGED` with `get_text_config` giving the config itself, and without a cache to size by it."""

    def run(self) -> None:
        self.model_tester.fields = self.model_tester.fields | {"use_cache": False}
        with patch.object(self.model_tester.config_class, "get_text_config", lambda config, **_: config):
            test(self)

    return run


def check_gradients(self) -> None:
    """Fail unless the loss of each head moves every parameter, exit gate and indexers of a classifier excepted."""
    for model_class in self.all_model_classes[1:]:
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        model = model_class(config).train()
        labels = inputs["input_ids"] if "CausalLM" in model_class.__name__ else torch.zeros(3, dtype=torch.long)
        model(**inputs, labels=labels).loss.backward()
        still = {name for name, parameter in model.named_parameters() if parameter.grad is None}
        if "CausalLM" not in model_class.__name__:
            still = {name for name in still if "early_exit_gate" not in name and "_score_" not in name}
        assert still == set(), model_class.__name__


def differences(suite: Suite, name: str) -> dict[str, object]:
    """Return the members of a test class that stand in for transformers' tests, by the table of differences."""
    reasons = SKIPPED | SKIPPED_FOR.get(name, {})
    if "generation" in suite.missing:
        reasons = reasons | SKIPPED_WITHOUT_GENERATION_TESTS
    members: dict[str, object] = {
        test: unittest.skip(reason)(getattr(suite.model_tests, test)) for test, reason in reasons.items()
    }
    scaling = [test for test in dir(suite.model_tests) if test.startswith("test_model_rope_scaling_from_config_")]
    members |= {test: as_own_decoder_view(getattr(suite.model_tests, test)) for test in scaling if test not in reasons}
    members["test_all_params_have_gradient"] = False
    members["test_gradients_reach_every_parameter_but_the_exit_gate"] = check_gradients
    unexplained = [test for test in (*scaling, "test_all_params_have_gradient") if not test.startswith(tuple(CHANGED))]
    if unexplained:
        raise ValueError(f"changed without a reason in differences.CHANGED: {unexplained}")
    return members


def build(
    suite: Suite, name: str, classes: dict[str, type], fields: dict, visits: int, attention_visits: int
) -> type[unittest.TestCase]:
    """Make the test case of one model: transformers' tests, less the differences of the table.

    Args:
        suite: What `transformers_sdist.load` gave.
        name: Name of the test class, as in `SKIPPED_FOR`.
        classes: The model's classes by role: `config`, `base`, `causal`, `classifier`.
        fields: Config fields beyond the common sizes.
        visits: Loops times layers.
        attention_visits: Those of the visits whose mixer gives attention weights.
    """

    def set_up(self) -> None:
        self.model_tester = LoopedModelTester(self, classes["config"], fields, visits, attention_visits)
        self.config_tester = suite.config_tester(self, config_class=classes["config"], hidden_size=32, **fields)

    def set_up_class(cls) -> None:
        # The tests look up by class name which heads take which labels.
        model_type = classes["config"].model_type
        for table, role in (
            ("MODEL_MAPPING_NAMES", "base"),
            ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "causal"),
            ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "classifier"),
        ):
            entry = patch.dict(getattr(modeling_auto, table), {model_type: classes[role].__name__})
            entry.start()
            cls.addClassCleanup(entry.stop)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    members = {
        "all_model_classes": (classes["base"], classes["causal"], classes["classifier"]),
        "setUp": set_up,
        "setUpClass": classmethod(set_up_class),
        "has_attentions": attention_visits > 0,
        "test_config": test_config,
    }
    members |= differences(suite, name)
    bases = (suite.model_tests, suite.generation_tests, unittest.TestCase)
    return type(name, bases, members | {"__module__": __name__})
