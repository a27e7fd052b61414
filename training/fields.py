# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Fields of settings: values of the types that a dataclass declares, and those that may change within a run."""

import dataclasses
import math
import numbers
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainingArguments

# What may differ between two starts of one run: what is logged, kept and shown, and how rows are fetched. The number
# of a data loader's workers may not: each has documents of its own.
HARMLESS = ("logging_steps", "logging_strategy", "logging_first_step", "logging_nan_inf_filter", "report_to")
HARMLESS += ("log_level", "log_level_replica", "log_on_each_node", "include_num_input_tokens_seen", "disable_tqdm")
HARMLESS += ("save_steps", "save_strategy", "save_total_limit", "skip_memory_metrics", "ddp_timeout", "run_name")
HARMLESS += ("dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers")

_NUMBERS = {int, float, bool, type(None)}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def field_names(kind: type) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [entry.name for entry in dataclasses.fields(kind)]


def check_keys(where: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `ValueError` for what is not a mapping, or for unknown keys; the text lists the known ones."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: this must be a mapping of fields, such as {{{known[0]}: ...}}, got {values!r}.")
    unknown = sorted(set(values) - set(known), key=str)
    if unknown:
        raise ValueError(f"{where}: unknown keys {unknown}. Known are: {', '.join(sorted(known))}.")


def read_value(name: str, value: Any, hint: Any) -> Any:
    """Convert a value to what its type hint declares: `100.0` is 100 where a whole number is expected.

    Args:
        name (`str`): What the value is, for the message.
        value: Anything.
        hint: A type hint: classes, `Literal`, lists and mappings of those, and unions.

    Raises:
        ValueError: A value of another type, or a number that is not finite.
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(value) in options and not isinstance(value, float):
        return value
    # A number is a share rather than a count where both are allowed.
    for option in sorted(options, key=lambda option: option is int):
        try:
            return _read(value, option)
        except TypeError:
            continue
    words = list(dict.fromkeys(_word(option) for option in options if option is not type(None)))
    if isinstance(value, float) and not math.isfinite(value) and float in options:
        words = ["a finite number"]
    raise ValueError(f"{name} must be {' or '.join(words)}, got {value!r}.")


def _read(value: Any, option: Any) -> Any:
    """Return a value as one option of a hint wants it, or raise `TypeError`."""
    kind, inner = typing.get_origin(option) or option, typing.get_args(option)
    if kind is Any:
        return value
    if kind is typing.Literal:
        fits = value in inner
    elif kind in (int, float):
        fits = _is_number(value) and math.isfinite(value)
        if fits and kind is int:
            whole = int(value)
            fits, value = value == whole, whole
    elif kind is str:
        fits = isinstance(value, str | os.PathLike)
    elif kind in (dict, Mapping):
        fits = isinstance(value, Mapping)
        if fits and inner:
            return {key: read_value(f"`{key}`", entry, inner[1]) for key, entry in value.items()}
    elif kind in (list, tuple, Sequence):
        fits = isinstance(value, Sequence) and not isinstance(value, str)
        if fits and inner:
            entries = [_read_entry(entry, inner[0]) for entry in value]
            return tuple(entries) if isinstance(value, tuple) else entries
    else:
        fits = isinstance(value, kind)
    if not fits:
        raise TypeError
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _read_entry(value: Any, hint: Any) -> Any:
    try:
        return read_value("", value, hint)
    except ValueError:
        raise TypeError from None


def _word(option: Any) -> str:
    kind, inner = typing.get_origin(option) or option, typing.get_args(option)
    if kind is typing.Literal:
        return " or ".join(map(repr, inner))
    if kind in (dict, Mapping):
        return "a mapping"
    if kind in (list, tuple, Sequence):
        entry = _word(inner[0]).removeprefix("a ") if inner else ""
        return f"a list of {entry}s" if entry in ("whole number", "number", "text", "mapping") else "a list"
    return _WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")


def _hints(kind: type) -> dict[str, Any]:
    """Return the hints of a dataclass's fields that say what they take.

    Those of `TrainingArguments` do so for numbers and switches alone; it checks its words itself.
    """
    hints = typing.get_type_hints(kind)
    loose = issubclass(kind, TrainingArguments)
    return {
        name: hints[name]
        for name in field_names(kind)
        if not loose or set(typing.get_args(hints[name]) or (hints[name],)) <= _NUMBERS
    }


def read_part(where: str, values: Any, kind: type, more: Sequence[str] = ()) -> dict[str, Any]:
    """Convert the values of a mapping to the types that a dataclass declares, by [`read_value`].

    Args:
        where (`str`): Name of the part, for messages.
        values (mapping): Fields and their values.
        kind (`type`): The dataclass that they are for.
        more (sequence of `str`): Other keys that the part may have.

    Raises:
        ValueError: Not a mapping, an unknown key, or a value of another type.
    """
    check_keys(where, values, [*field_names(kind), *more])
    hints = _hints(kind)
    return {
        name: read_value(f"{where}: `{name}`", value, hints[name]) if name in hints else value
        for name, value in values.items()
    }


def read_fields(settings: Any) -> None:
    """Convert the fields of a dataclass instance to their declared types, by [`read_value`]; for its `__post_init__`.

    Raises:
        ValueError: A value of another type.
    """
    for name, hint in _hints(type(settings)).items():
        setattr(settings, name, read_value(f"`{name}`", getattr(settings, name), hint))


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the entries in which two nested mappings differ, by dotted names, with the values of both sides."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*there, *here}):
        one, other = there.get(name), here.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found |= differences(one, other, f"{prefix}{name}.")
        elif one != other:
            found[f"{prefix}{name}"] = one, other
    return found
