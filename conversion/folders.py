# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Write a folder so that it is there whole or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
