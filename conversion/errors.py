# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The error that conversions raise, and how its texts list the names of tensors."""

from collections.abc import Iterable

_LISTED = 12


class ConversionError(ValueError):
    """A teacher cannot be converted; the text names what is not supported or which tensors do not fit."""


def list_names(names: Iterable[str]) -> str:
    """Write tensor names for an error text: the first twelve in order, then a count of the rest."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more
