# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Refuse fields that a config does not have: it would take them, and nothing would read them."""

import dataclasses
from collections.abc import Iterable

from transformers import PreTrainedConfig


def check_fields(kind: type[PreTrainedConfig], names: Iterable[str]) -> set[str]:
    """Return the names of a config class's fields, general names included.

    Raises:
        ValueError: One of `names` is none.
    """
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    if "rope_parameters" in known:
        known |= {"rope_theta", "rope_scaling"}  # its older spelling, which every such config still reads
    unknown = sorted(set(names) - known)
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    return known
