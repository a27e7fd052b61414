# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The code that travels with a model, so that what is saved loads where loopergy is not installed.

transformers copies the code of classes that are marked for it (`register_for_auto_class`) beside their weights, but
only that of a flat folder with relative imports. Ours lives in rooms with absolute imports, so [`carry_code`] gives
each family, when its model type is registered, a `save_pretrained` that writes the flat form. It hangs on the config,
which every way of saving a whole model goes through: `model.save_pretrained`, `model.push_to_hub`, a Trainer's
checkpoints, sharded training. The pushed classes need nothing of this: what transformers does then fits them.
"""

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

_PACKAGE = "loopergy."


@dataclass(frozen=True)
class FamilyCode:
    """The files that a family consists of, and the names of its classes in transformers' Auto classes.

    Args:
        classes (`dict[str, type]`): Auto class to the class that it stands for, `AutoConfig` included.
    """

    classes: dict[str, type]

    @cached_property
    def auto_map(self) -> dict[str, str]:
        """Return the entry of `config.json`: Auto class to `file.Class`."""
        return {role: f"{_file(kind.__module__)}.{kind.__name__}" for role, kind in self.classes.items()}

    @cached_property
    def files(self) -> dict[str, str]:
        """Return file name to text: the files of the classes and all of ours that they import, imports made flat.

        A file that holds a class of the Auto classes names, at its end, all files that it needs, directly or not.
        transformers copies what a file names, and what that names in turn, but nothing for a file that is there
        already: of several processes that load a repository at once, one would go on with what another has copied.

        Raises:
            ValueError: if a file is installed without its source.
        """
        texts: dict[str, str] = {}
        ends: dict[str, str] = {}
        for entry in {kind.__module__ for kind in self.classes.values()}:
            needed = _closure(entry)
            texts |= needed
            names = sorted(needed.keys() - {_file(entry)})
            ends[_file(entry)] = "\n# All files that this one needs, so that all are fetched before it is imported.\n"
            ends[_file(entry)] += "".join(f"from .{name} import __doc__ as _  # noqa\n" for name in names)
        return {f"{name}.py": text + ends.get(name, "") for name, text in texts.items()}


# From a config class to the code of its family.
_FAMILIES: dict[type, FamilyCode] = {}


def code_of(config: Any) -> FamilyCode | None:
    """Return the code that belongs to a config, or None for a config that is not one of ours.

    A subclass is not: it may compute something else, and its author may mark it with `register_for_auto_class`.
    """
    return _FAMILIES.get(type(config))


def carry_code(classes: dict[str, type], push_to_hub: Callable) -> None:
    """Make everything that a family saves or pushes hold the family's code and an `auto_map`.

    Args:
        classes (`dict[str, type]`): Auto class to the class of the family that it stands for.
        push_to_hub (`Callable`): the models' method of this name.
    """
    config_class: Any = classes["AutoConfig"]
    if config_class in _FAMILIES:
        return
    _FAMILIES[config_class] = FamilyCode(classes)
    plain = config_class.save_pretrained

    @wraps(plain)
    def save_pretrained(self: Any, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        _write_code(self, Path(save_directory))
        return plain(self, save_directory, *args, **kwargs)

    config_class.save_pretrained = save_pretrained
    for kind in set(classes.values()) - {config_class}:
        kind.push_to_hub = push_to_hub  # pyright: ignore[reportAttributeAccessIssue]


def _write_code(config: Any, folder: Path) -> None:
    code = code_of(config)
    if code is None:
        return
    try:
        files = code.files
    except ValueError as error:
        # The weights must be saved in any case.
        logger.warning_once(f"{folder} is saved without code, so it loads only where loopergy is installed: {error}")
        return
    config.auto_map = dict(code.auto_map)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _closure(entry: str) -> dict[str, str]:
    """Return file (without its suffix) to flat text: a module and all of ours that it imports, directly or not."""
    texts: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        if _file(module) not in texts:
            texts[_file(module)], imported = _flat(_source(module))
            waiting += imported
    return texts


def _file(module: str) -> str:
    return module.rpartition(".")[2]


def _source(module: str) -> str:
    spec = find_spec(module)
    text = spec.loader.get_source(module) if spec and hasattr(spec.loader, "get_source") else None  # pyright: ignore
    if text is None:
        raise ValueError(f"{module} has no source file; install loopergy from a wheel or from source.")
    return text


def _flat(text: str) -> tuple[str, list[str]]:
    """Rewrite `from loopergy.room.file import` to `from .file import`; return the text and the modules."""
    lines = text.splitlines(keepends=True)
    modules = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            module = str(node.module)
            row = node.lineno - 1
            lines[row] = lines[row].replace(f"from {module} import", f"from .{_file(module)} import", 1)
            modules.append(module)
    return "".join(lines), modules
