# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Read the files that the official code of a paper writes, without running what is in them."""

import json
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from loopergy.conversion.errors import ConversionError


def read_tensor_file(path: str | os.PathLike) -> Mapping[str, Any]:
    """Read a pickled dictionary of tensors and plain values, with `weights_only=True`.

    Args:
        path (`str` or `Path`): A `.pt` or `.pth` file.

    Returns:
        `dict`: What is in it, on the CPU.

    Raises:
        ConversionError: If there is no such file, it is damaged, holds no dictionary, or holds objects.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConversionError(f"{str(file)!r} is not a file: pass the path of a .pt checkpoint")
    with file.open("rb") as stream:
        try:
            content = torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle raises anything: KeyError, struct.error, OSError, ...
            if isinstance(error, pickle.UnpicklingError) and re.search("GLOBAL|allowlisted", str(error)):
                raise ConversionError(
                    f"{str(file)!r} holds more than tensors and plain values, and reading it could run code. If you "
                    "trust it, load it yourself and pass its state dict."
                ) from error
            raise ConversionError(
                f"{str(file)!r} is damaged, cut short or no file of tensors ({type(error).__name__}): get it again"
            ) from error
    if not isinstance(content, Mapping):
        raise ConversionError(f"{str(file)!r} holds a {type(content).__name__}, not a dictionary of tensors")
    return content


def check_whole_numbers(content: Mapping[str, Any], names: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Refuse fields of a foreign config that are not whole numbers of at least 1; optional ones may be null.

    Fields that are missing pass.

    Raises:
        ConversionError: Naming the field and its value.
    """
    for name in (*names, *optional):
        value = content.get(name)
        if name in content and not (value is None and name in optional) and (type(value) is not int or value < 1):
            raise ConversionError(f"{name}={value!r} must be a whole number of at least 1")


def read_json_file(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ConversionError: If it is no JSON, or holds something else; the text names the file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{os.fspath(path)!r} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConversionError(f"{os.fspath(path)!r} holds a {type(content).__name__}, not an object with fields")
    return content
