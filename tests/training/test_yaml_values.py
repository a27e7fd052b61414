# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""YAML values: numbers in the notation of everyone but YAML 1.1, at any depth."""

import pytest

from loopergy.training.yaml_values import yaml_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2.5E+3", -2500.0),
        ("[1e-4, {share: 5e-1}]", [1e-4, {"share": 0.5}]),
        ("rate: 1e-4", {"rate": 1e-4}),
        ("None", None),
        ("null", None),
        ("'[None]'", "[None]"),
        ("3,7", "3,7"),
        ("e-4", "e-4"),
    ],
)
def test_values_are_read_as_written(text, value):
    assert yaml_value(text) == value
    assert type(yaml_value(text)) is type(value)


@pytest.mark.parametrize("text", ["align: {length: 2}\nselect: null\nalign: {}", "{a: {b: 1, c: 2, b: 3}}"])
def test_a_key_given_twice_is_refused(text):
    with pytest.raises(ValueError, match=r"the key '(align|b)' is given twice"):
        yaml_value(text)
