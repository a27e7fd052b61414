# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Write folders and files so that they are there whole or not at all, and find what lies beside a model's weights."""

import glob
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging
from transformers.utils.hub import cached_file

logger = logging.get_logger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_new_folder(folder: str | Path, *, overwrite: bool = False, source: str | Path | None = None) -> Path:
    """Return where a folder will be if it may be written, before hours are spent on its content.

    Args:
        folder (`str` or `Path`): Its name; `~` and links are followed.
        overwrite (`bool`): Whether a folder that holds something may be replaced.
        source (`str` or `Path`, *optional*): What the content is made from, which is never replaced.

    Returns:
        `Path`: The final place, absolute.

    Raises:
        FileExistsError: If it, or what it lies in, is a file; if it holds something and `overwrite` is False.
        ValueError: If it holds something and cannot be replaced: the source, a mount point, the current folder or one
            above it.
    """
    # Not `Path.resolve`, which fails for links in a circle.
    target = Path(os.path.realpath(Path(folder).expanduser()))
    for place in (target, *target.parents):
        if place.exists() and not place.is_dir():
            raise FileExistsError(f"{place} is a file; give the name of a folder")
    if not target.is_dir() or not any(target.iterdir()):
        return target
    if not overwrite:
        raise FileExistsError(f"{target} is not empty; give another folder or overwrite=True (--overwrite)")
    if os.path.ismount(target) or Path.cwd().is_relative_to(target):
        raise ValueError(
            f"{target} holds something and cannot be replaced: it is a mount point, or the current folder or one "
            "above it; give another folder, or one inside it"
        )
    made_from = None if source is None else Path(source).expanduser()
    if made_from is not None and made_from.exists() and Path(os.path.realpath(made_from)).is_relative_to(target):
        raise ValueError(f"{target} holds {source}, which the new model is made from; give another folder")
    return target


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder to write to, and put it in the place of `folder` when the block ends without an error.

    Args:
        folder (`str` or `Path`): The final name; `check_new_folder` says where that is.
        overwrite (`bool`): Replace a folder that holds something. It is replaced as a whole.

    Yields:
        `Path`: A hidden folder beside the final one, or in it if that is a mount point; removed if the block raises.
            A final folder that is there and empty is filled, not replaced: it may be somebody's current one.

    Raises:
        FileExistsError, ValueError: As `check_new_folder`.
    """
    target = check_new_folder(folder, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    _mention_leftovers(target)
    mark = uuid.uuid4().hex[:8]
    unfinished = (target if os.path.ismount(target) else target.parent) / f".{target.name}.unfinished-{mark}"
    unfinished.mkdir()
    try:
        yield unfinished
        if target.is_dir() and set(target.iterdir()) <= {unfinished}:
            # config.json last: it is what makes a folder a model.
            for part in sorted(unfinished.iterdir(), key=lambda part: part.name == "config.json"):
                shutil.move(part, target)
            return
        # Checked again: the block may have taken hours.
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


def _mention_leftovers(target: Path) -> None:
    """Say what runs that were killed may have left of this folder; one that still writes looks the same."""
    found = target.parent.glob(f".{glob.escape(target.name)}.*-*")
    left = sorted(str(path) for path in found if re.search(r"\.(unfinished|replaced)-[0-9a-f]{8}$", path.name))
    if left:
        logger.warning(f"left by a run that was killed, unless one is writing there now; remove it: {', '.join(left)}")


def replace_file(file: str | Path, text: str) -> Path:
    """Write a text file, replacing an old one in one step; missing folders above it are made.

    Args:
        file (`str` or `Path`): Its name.
        text (`str`): Its content, written as UTF-8.

    Returns:
        `Path`: The file.

    Raises:
        IsADirectoryError: If it is a folder.
    """
    file = Path(file).expanduser()
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; give the name of a file")
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.unfinished-{uuid.uuid4().hex[:8]}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file


def saved_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """Return the tokenizer beside a model's weights, or None if there is none.

    Args:
        source (`str` or `Path`): Folder, Hub id, or a `.gguf` file, which holds its own.
        revision (`str`, *optional*): Of a Hub id.

    Returns:
        `PreTrainedTokenizerBase` or None: The tokenizer.

    Raises:
        ValueError: If there is one that cannot be read.
    """
    from transformers import AutoTokenizer

    place = os.path.expanduser(os.fspath(source))
    options = {"revision": revision or "main"}
    if place.endswith(".gguf"):
        options["gguf_file"], place = Path(place).name, str(Path(place).parent)
    elif not _has_tokenizer(place, revision):
        return None
    try:
        return AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:  # the tokenizers library raises nothing more special
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"the tokenizer of {str(source)!r} cannot be read ({text}); mend or remove its files, or pass the loaded "
            "model instead of its name"
        ) from error


def _has_tokenizer(place: str, revision: str | None) -> bool:
    """Say whether a folder or a repository of the Hub holds the files of a tokenizer."""
    if not place or Path(place).is_dir():
        return place != "" and any((Path(place) / name).exists() for name in TOKENIZER_FILES)
    try:
        # Many repositories hold weights alone.
        optional = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
        return any(cached_file(place, name, **optional) is not None for name in TOKENIZER_FILES)
    except OSError:
        return False
