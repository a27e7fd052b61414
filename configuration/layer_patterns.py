# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Read layer patterns: which mixer each layer has, and which window each loop puts on attention.

| spelling | meaning | example, N layers |
|---|---|---|
| `["gdn", "full", ...]` | one name per layer | length N |
| `"gdn*4,full"` | segments, repeated until N layers are named | N=10: layers 4 and 9 full |
| `"interleaved:4:1:gdn:full"` | the same in LT2's own spelling | N=21: 4, 9, 14, 19 full |
| `"4:1"` | 4 windowed, 1 full, repeated (LT2's `attention_pattern`) | N=7: w w w w f w w |
| `"bookend:2"`, `"bookend:2:gdn"` | 2 full at both ends, the rest windowed (or as named) | N=6: f f w w f f |
| `"front:4:gdn"`, `"back:4:gdn"` | 4 full layers first, or last | |

Loop windows: `"full->SWA=512->256->128"`, or a list with one entry per loop.

Source: LT2 (arXiv 2605.20670), sections on layouts; spellings of its released recipes.
"""

import re
from collections.abc import Sequence

from loopergy.configuration.linear_fields import LINEAR_MIXERS

MIXERS = ("full", "window", *LINEAR_MIXERS, "nsa", "dsa")


def parse_layer_mixers(pattern: str | Sequence[str], num_layers: int, mixers: Sequence[str] = MIXERS) -> list[str]:
    """Expand a pattern to one mixer name per physical layer.

    Args:
        pattern (`str` or `list[str]`): a spelling of the table at the head of this file.
        num_layers (`int`): N.
        mixers (`list[str]`, *optional*): the allowed names.

    Returns:
        `list[str]` of length N.

    Raises:
        ValueError: for an unknown name, a wrong length or a spelling that is not understood.
    """
    if not isinstance(pattern, str):
        names = list(pattern)
        if len(names) != num_layers:
            raise ValueError(
                f"layer_mixers has {len(names)} entries but num_hidden_layers={num_layers}: give one name per "
                'physical layer, or a pattern such as "gdn*4,full".'
            )
        return [_check_name(name, mixers) for name in names]

    text = pattern.strip()
    head, *parts = [part.strip() for part in text.split(":")]
    if head in ("bookend", "sandwich", "front", "back") and len(parts) in (1, 2):
        return _edges(head, _count(parts[0], text), parts[1] if len(parts) == 2 else "window", num_layers, mixers)
    if head == "interleaved" and len(parts) == 4:
        period = [parts[2]] * _count(parts[0], text) + [parts[3]] * _count(parts[1], text)
    elif len(parts) == 1 and head.isdigit():
        period = ["window"] * _count(head, text) + ["full"] * _count(parts[0], text)
    elif not parts:
        period = []
        for segment in text.split(","):
            name, star, count = segment.partition("*")
            period += [name.strip()] * (_count(count, text) if star else 1)
    else:
        raise ValueError(
            f"layer_mixers={pattern!r} is not understood. Use a list of names, 'gdn*4,full', "
            "'interleaved:4:1:gdn:full', '4:1', 'bookend:2:gdn', 'front:4:gdn' or 'back:4:gdn'."
        )
    if not period:
        raise ValueError(f"layer_mixers={pattern!r} names no layer.")
    period = [_check_name(name, mixers) for name in period]
    return [period[layer % len(period)] for layer in range(num_layers)]


def parse_loop_windows(
    windows: str | Sequence | None, num_loops: int, num_layers: int, loops_field: str = "num_loops"
) -> list[int | list[int | None] | None] | None:
    """Expand the windows of attention layers per loop.

    Args:
        windows (`str` or `list`, *optional*): `"full->SWA=128->64"`, or one entry per loop: an `int` (tokens, the
            token itself included), `None` or `"full"` (no window), or a list with one such entry per layer.
        num_loops (`int`): T; there must be exactly T entries.
        num_layers (`int`): N.
        loops_field (`str`): the config's field that holds T, for error messages.

    Returns:
        list of T entries, each an `int`, `None` or a list of N of them; `None` if `windows` is `None`.

    Raises:
        ValueError: for a wrong number of entries or a window that is not a positive whole number.
    """
    if windows is None:
        return None
    entries = windows.split("->") if isinstance(windows, str) else list(windows)
    if len(entries) != num_loops:
        raise ValueError(
            f"loop_windows={windows!r} has {len(entries)} entries but {loops_field}={num_loops}: "
            f"give one for each of the {num_loops} loops."
        )
    parsed = []
    for entry in entries:
        if not isinstance(entry, (list, tuple)):
            parsed.append(_window(entry))
            continue
        if len(entry) != num_layers:
            raise ValueError(
                f"loop_windows: the entry {list(entry)!r} has {len(entry)} values but num_hidden_layers={num_layers}: "
                "give one per layer, or one number for the whole loop."
            )
        parsed.append([_window(value) for value in entry])
    return parsed


def _edges(head: str, count: int, inner: str, num_layers: int, mixers: Sequence[str]) -> list[str]:
    both = head in ("bookend", "sandwich")
    if count * (2 if both else 1) > num_layers:
        raise ValueError(f"layer_mixers='{head}:{count}' keeps more full layers than num_hidden_layers={num_layers}.")
    names = [_check_name(inner, mixers)] * num_layers
    if head != "back":
        names[:count] = ["full"] * count
    if head != "front":
        names[num_layers - count :] = ["full"] * count
    return names


def _check_name(name: str, mixers: Sequence[str]) -> str:
    if name not in mixers:
        raise ValueError(f"layer_mixers: unknown mixer {name!r}. Allowed names: {', '.join(mixers)}.")
    return name


def _count(text: str, pattern: str) -> int:
    if not re.fullmatch(r"\d+", text.strip()):
        raise ValueError(f"layer_mixers={pattern!r}: {text!r} is not a number of layers.")
    return int(text)


def _window(value) -> int | None:
    if isinstance(value, str):
        text = value.strip().removeprefix("SWA=")
        value = None if text in ("full", "None") else int(text) if text.isdigit() else text
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"loop_windows: {value!r} is no window: give a positive number of tokens, or 'full' (None).")
