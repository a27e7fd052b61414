# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Copy what lies beside a model without saying where on this machine its teacher, its text and its run lay."""

import html
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.utils import logging

from loopergy.conversion.public_names import public_name

logger = logging.get_logger(__name__)

# What a model read or wrote: text that may begin like a path.
_TEXTS = ("samples", "tokens")
_REWRITTEN = (".json", ".html")


def copy_public(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files; in those of JSON and HTML a path of this machine is cut to its last part.

    A path is what stands alone in some JSON file and is absolute or exists. A JSON or HTML file that cannot be read is
    left out, with a warning.

    Args:
        files (mapping of `str` to `Path`): Path in `folder` to the file.
        folder (`Path`): Where to copy to.
    """
    texts: dict[str, str] = {}
    places: dict[str, str] = {}
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if file.suffix not in _REWRITTEN:
            shutil.copy(file, folder / name)
            continue
        try:
            texts[name] = file.read_text(encoding="utf-8")
            values = json.loads(texts[name]) if file.suffix == ".json" else None
        except ValueError as error:
            texts.pop(name, None)
            logger.warning(f"{file} is left out, as it cannot be read: {error}")
            continue
        places |= {text: public_name(text) for text in _strings(values) if public_name(text) != text}
    for name, text in texts.items():
        write = html.escape if name.endswith(".html") else _json_escape
        (folder / name).write_text(_replaced(text, {write(old): write(new) for old, new in places.items()}), "utf-8")


def _strings(values: Any) -> Iterator[str]:
    """Yield the strings of a JSON value that name something; long ones are texts, not names of files."""
    if isinstance(values, str):
        if len(values) < 1024 and "\n" not in values:
            yield values
    elif isinstance(values, dict):
        for key, value in values.items():
            if key not in _TEXTS:
                yield from _strings(value)
    elif isinstance(values, list):
        for value in values:
            yield from _strings(value)


def _json_escape(text: str) -> str:
    return json.dumps(text)[1:-1]


def _replaced(text: str, names: Mapping[str, str]) -> str:
    """Replace whole names, the longest that fits; a name may stand in a sentence."""
    if not names:
        return text
    longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w/])({longest_first})(?![\w/])", lambda found: names[found[0]], text)
