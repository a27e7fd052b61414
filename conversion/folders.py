# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Write folders and files so that they are there whole or not at all, and find what lies beside a model's weights."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_new_folder(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Return `folder` as a path if it may be written, before hours are spent on its content.

    Raises:
        FileExistsError: If it is a file, or holds something and `overwrite` is False.
    """
    target = Path(folder).expanduser()
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; give the name of a folder")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise FileExistsError(f"{target} is not empty; give another folder or overwrite=True")
    return target


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder to write to, and put it in the place of `folder` when the block ends without an error.

    Args:
        folder (`str` or `Path`): The final name.
        overwrite (`bool`): Replace a folder that holds something. It is replaced as a whole.

    Yields:
        `Path`: A hidden folder beside the final one, removed if the block raises.

    Raises:
        FileExistsError: If `folder` is a file, or holds something and `overwrite` is False.
    """
    target = check_new_folder(folder, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    unfinished = target.with_name(f".{target.name}.unfinished-{mark}")
    unfinished.mkdir()
    try:
        yield unfinished
        # Looked at once more: the block may have taken hours.
        check_new_folder(target, overwrite=overwrite)
        if target.exists():
            replaced = target.with_name(f".{target.name}.replaced-{mark}")
            os.replace(target, replaced)
            os.replace(unfinished, target)
            shutil.rmtree(replaced)
        else:
            os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def replace_file(file: str | Path, text: str) -> Path:
    """Write a text file, in the place of an old one in one step; folders above it are made.

    Args:
        file (`str` or `Path`): Its name.
        text (`str`): Its content, written as UTF-8.

    Returns:
        `Path`: The file.
    """
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)
    return file


def saved_tokenizer(source: str | Path) -> Any:
    """Return the tokenizer beside a model's weights, or None if there is none.

    Args:
        source (`str` or `Path`): Folder or Hub id.

    Raises:
        Exception: As `AutoTokenizer` does, for a folder whose tokenizer files cannot be read.
    """
    from transformers import AutoTokenizer

    if Path(source).is_dir():
        found = any((Path(source) / name).exists() for name in TOKENIZER_FILES)
        return AutoTokenizer.from_pretrained(source) if found else None
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):
        # Many repositories hold weights alone.
        return None
