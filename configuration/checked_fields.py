# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Range checks for fields that several configs share, and for call arguments that override them."""

import operator
from collections.abc import Iterable, Mapping
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
    # The model's epsilon first: those of mixers may be derived from it.
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
    """Refuse anything but a finite number of at least 0.

    Raises:
        ValueError: naming the argument and its value.
    """
    if not isinstance(value, (int, float)) or not 0 <= value < INFINITY:
        raise ValueError(f"{name}={value!r} must be a finite number of at least 0.")


def check_choices(config: Any, choices: Mapping[str, Iterable[str]]) -> None:
    """Check fields whose value is one of a few names.

    Args:
        config: holds the fields.
        choices (`dict`): field -> allowed values.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    for field, allowed in choices.items():
        value = getattr(config, field)
        if value not in allowed:
            raise ValueError(f"{field}={value!r} must be one of {', '.join(map(repr, allowed))}.")


def check_heads(config: Any, field: str = "num_key_value_heads") -> None:
    """Check that key heads divide `num_attention_heads`, and that `head_dim` can be rotated.

    Args:
        config: holds the fields; those that are `None` are not checked.
        field (`str`): number of key heads.

    Raises:
        ValueError: naming the field and its value.
    """
    heads, groups = config.num_attention_heads, getattr(config, field)
    if groups is not None and (groups < 1 or heads % groups):
        raise ValueError(f"{field}={groups} must divide num_attention_heads={heads}.")
    check_even("head_dim", config.head_dim)


def check_even(field: str, value: int | None) -> None:
    """Refuse an odd width of a head with rotary embeddings.

    Raises:
        ValueError: naming the field and its value.
    """
    if value is not None and value % 2:
        raise ValueError(f"{field}={value} must be even: rotary embeddings turn pairs of dimensions.")


def check_count(name: str, value: Any, otherwise: str) -> int:
    """Return the number of loops or steps given in a call; integers of numpy and torch are accepted.

    Args:
        name (`str`): name of the argument.
        value: value of the argument.
        otherwise (`str`): what is used when the argument is left out, for the error message.

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
    """Refuse an alias that contradicts the fields it sets, where these were given too.

    Args:
        config: before `alias` is set; a field at its default counts as not given.
        alias (`str`), value: the alias and its value; `None` means that it was not given.
        fields: names of the fields that the alias sets.

    Raises:
        ValueError: naming both.
    """
    for field in fields:
        given = getattr(config, field)
        if value is not None and given not in (value, type(config).__dataclass_fields__[field].default):
            raise ValueError(f"{alias}={value} and {field}={given} contradict each other: give one of them.")


def preset_fields(
    config: type,
    presets: Mapping[str, dict[str, Any]],
    name: str,
    overrides: dict[str, Any],
    **aliases: tuple[str, ...],
) -> dict[str, Any]:
    """Return the fields of a preset, overridden by those of the caller.

    Args:
        config (`type`): the config class, for the error message.
        presets (`dict`): name -> fields.
        name (`str`): the wanted preset.
        overrides (`dict`): fields that replace those of the preset.
        aliases: alias -> the fields that it sets; an alias among the overrides replaces these fields.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    if name not in presets:
        raise ValueError(f"Unknown preset {name!r} for {config.__name__}. Known presets: {', '.join(presets)}.")
    replaced = {field for alias, fields in aliases.items() if alias in overrides for field in fields}
    return {**{field: value for field, value in presets[name].items() if field not in replaced}, **overrides}


__all__ = [
    "check_alias",
    "check_choices",
    "check_count",
    "check_even",
    "check_fields",
    "check_heads",
    "check_not_negative",
    "preset_fields",
]
