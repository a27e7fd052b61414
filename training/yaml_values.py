# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""YAML with the numbers that YAML 1.1 takes for text."""

import re
from typing import Any

import yaml

_NUMBER = re.compile(r"[-+]?[\d.]+[eE][-+]?\d+")


class _UniqueKeys(yaml.SafeLoader):
    """The safe loader, which lets the last of two equal keys win, without that."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        values = super().construct_mapping(node, deep)
        names = [key.value for key, _ in node.value]
        if len(values) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twice!r} is given twice; merge the two.")
        return values


def yaml_value(text: str) -> Any:
    """Read a YAML value; unlike in YAML 1.1, `1e-4` is a number, at any depth, and a bare `None` is null.

    Raises:
        ValueError: A key that is given twice.
    """
    return None if text.strip() == "None" else _with_numbers(yaml.load(text, _UniqueKeys))


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_numbers(entry) for entry in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
