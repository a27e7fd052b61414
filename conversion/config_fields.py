# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Refuse unknown names of fields and options, which a config would accept and nothing would read."""

import dataclasses
from collections.abc import Iterable

from transformers import PreTrainedConfig


def check_names(owner: str, names: Iterable[str], known: Iterable[str], what: str = "field") -> None:
    """Raise `ValueError` unless all names are known; the text lists the unknown and the known ones.

    Args:
        owner (`str`): What has the fields, for the message.
        names (`Iterable[str]`): Those asked for.
        known (`Iterable[str]`): Those that there are.
        what (`str`): What they are names of, in the singular.
    """
    known = set(known)
    if unknown := sorted(set(names) - known):
        has = ", ".join(sorted(known)) or "none"
        raise ValueError(f"{owner} has no {what} {', '.join(unknown)}; it has {has}.")


def check_field_names(kind: type[PreTrainedConfig], names: Iterable[str]) -> set[str]:
    """Return the names of a config class's fields, general names included.

    Args:
        kind (`type[PreTrainedConfig]`): The class.
        names (`Iterable[str]`): Fields that it is given.

    Raises:
        ValueError: One of `names` is not among them.
    """
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    if "rope_parameters" in known:
        known |= {"rope_theta", "rope_scaling"}  # its older spelling, which every such config still reads
    check_names(kind.__name__, names, known)
    return known
