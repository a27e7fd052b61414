# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Name what a model was made from without saying where on this machine it lies."""

import os
from pathlib import Path


def public_name(source: str | os.PathLike) -> str:
    """Return the name of a model or of data as reports and cards may publish it.

    Args:
        source (`str` or `Path`): A Hub id, a plain word such as `"smollm2"`, or a file or folder.

    Returns:
        `str`: The last part of a path that exists, is absolute, or begins with `.` or `~`; everything else as it is.
    """
    text = os.fspath(source)
    path = Path(text).expanduser()
    if text and (path.exists() or path.is_absolute() or text[0] in ".~"):
        return Path(os.path.abspath(path)).name or text
    return text
