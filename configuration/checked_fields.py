# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The borders of the fields that several configs have, and of what a call gives in their place."""

import operator
from typing import Any

from transformers.activations import ACT2FN

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SIZES += ("max_position_embeddings",)
_ABOVE_ZERO = ("attention_beta", "cem_step_size", "cem_temperature", "layer_norm_eps")
_NOT_NEGATIVE = ("stop_tolerance", "dsa_indexer_loss_weight")
_SHARES = ("attention_dropout", "dropout")
_FINITE = ("cem_diag_init",)
INFINITY = float("inf")


def check_fields(config: Any) -> None:
    """Check sizes, epsilons, dropouts and activations: those fields that the config has and that are not `None`.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    # The model's epsilon first, as those of mixers follow it.
    for field, value in sorted(vars(config).items(), key=lambda item: item[0] != "rms_norm_eps"):
        if value is None:
            continue
        if field in _SIZES and value < 1:
            raise ValueError(f"{field}={value} must be at least 1.")
        if (field in _ABOVE_ZERO or field.endswith("_norm_eps")) and not 0 < value < INFINITY:
            raise ValueError(f"{field}={value} must be a finite number above 0.")
        if field in _FINITE and not -INFINITY < value < INFINITY:
            raise ValueError(f"{field}={value} must be a finite number.")
        if field in _SHARES and not 0 <= value < 1:
            raise ValueError(f"{field}={value} must be at least 0 and below 1.")
        if field in _NOT_NEGATIVE:
            check_not_negative(field, value)
        if field == "hidden_act" and value not in ACT2FN:
            raise ValueError(f"hidden_act={value!r} must be one of {', '.join(map(repr, ACT2FN))}.")


def check_not_negative(name: str, value: Any) -> None:
    """Refuse what is no number, no finite one, or below 0.

    Raises:
        ValueError: naming the argument and its value.
    """
    if not isinstance(value, (int, float)) or not 0 <= value < INFINITY:
        raise ValueError(f"{name}={value!r} must be a finite number of at least 0.")


def check_count(name: str, value: Any, otherwise: str) -> int:
    """Return a number of loops or steps that a call gives; whole numbers of numpy and torch count.

    Args:
        name (`str`): the argument.
        value: what it got.
        otherwise (`str`): what a call without it uses.

    Raises:
        ValueError: for anything but a whole number of at least 1.
    """
    count = value
    if not isinstance(value, int):
        try:
            count = operator.index(value)
        except TypeError:
            count = 0
    if isinstance(value, bool) or count < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1; leave it out to use {otherwise}.")
    return count


def check_alias(config: Any, alias: str, value: Any, *fields: str) -> None:
    """Refuse two numbers for one thing: a field that was given too, and differs from what `alias` would set it to.

    Args:
        config: before `alias` is set; a field at its default counts as not given.
        alias (`str`), value: the other name, and what it got; `None` means nothing.
        fields: what the alias sets.

    Raises:
        ValueError: naming both.
    """
    for field in fields:
        given = getattr(config, field)
        if value is not None and given not in (value, type(config).__dataclass_fields__[field].default):
            raise ValueError(f"{alias}={value} and {field}={given} contradict each other: give one of them.")


def with_overrides(preset: dict[str, Any], overrides: dict[str, Any], **aliases: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a preset with those that the caller gave in their place, under whatever name.

    Args:
        preset, overrides (`dict`): fields.
        aliases: the names that set other fields, and which.
    """
    replaced = {field for alias, fields in aliases.items() if alias in overrides for field in fields}
    return {**{field: value for field, value in preset.items() if field not in replaced}, **overrides}


__all__ = ["check_alias", "check_count", "check_fields", "check_not_negative", "with_overrides"]
