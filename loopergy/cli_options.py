# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What the verbs of the command line share: how they read KEY=VALUE, and how they show an example."""

import dataclasses
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from loopergy.training.yaml_values import yaml_value

_Place = TypeVar("_Place", str, Path, None)
DTYPE_HELP = "float32, bfloat16, float16 or float64; by default that of the weights."
Dtype = Annotated[str | None, typer.Option(help=DTYPE_HELP)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; a GPU if there is one by default.")]
SET_HELP = "KEY=VALUE, read as YAML; may be given many times."
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET_HELP)]


def expanded(place: _Place) -> _Place:
    """Replace a `~` at the front, which a shell leaves in `--output=~/run` and in quotes: a callback for paths."""
    return place if place is None else type(place)(os.path.expanduser(place))


def checked_file(file: Path, endings: Collection[str] = ()) -> Path:
    """Return a file that a verb writes when its work is done, if it can be written.

    Args:
        file (`Path`): The file; folders above it need not be there.
        endings (collection of `str`): Those that it may have; any by default.

    Raises:
        ValueError: For another ending.
        OSError: If it is a folder, lies in a file, or must not be written.
    """
    if endings and file.suffix.removeprefix(".").lower() not in endings:
        raise ValueError(f"{file}: the ending must be one of {', '.join(sorted(endings))}")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; give the name of a file")
    above = next(place for place in file.absolute().parents if place.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{file}: {above} is a file; give a name in a folder")
    if not os.access(above, os.W_OK):
        raise PermissionError(f"{file}: {above} must not be written to; give another place")
    return file


def settings(pairs: list[str] | None, flag: str = "--set") -> dict[str, Any]:
    """Read `KEY=VALUE` pairs, the values as YAML.

    Raises:
        ValueError: For a pair without `=` or with an empty key.
    """
    values = {}
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{flag} {pair!r} is not of the form KEY=VALUE, for example --set learning_rate=1e-4")
        value = yaml_value(text)
        # YAML 1.1 reads a bare `no` as false; fields such as `eval_strategy` mean the word.
        values[key.strip()] = "no" if value is False and key.strip().endswith("_strategy") else value
    return values


def example(line: str) -> str:
    """Return the epilog that shows one working call of a verb."""
    return f"Example:  [bold]{line}[/bold]"


def print_fields(kind: type) -> None:
    """Print the fields of a dataclass of settings with their defaults and meaning."""
    from transformers import TrainingArguments

    common = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    trains = issubclass(kind, TrainingArguments)
    for field in dataclasses.fields(kind):
        if trains and field.name in common and field.default == common[field.name]:
            continue
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default  # type: ignore[misc]
        typer.echo(f"{field.name} = {default!r}\n    {field.metadata.get('help', '')}")
    if trains:
        typer.echo("... and every field of transformers.TrainingArguments.")


def list_fields(context: typer.Context, wanted: bool) -> None:
    """Print what a verb's `--set` takes and stop, before anything else that the verb needs is asked for."""
    if not wanted:
        return
    from loopergy.distill.recipe import STAGE_CLASSES, SelectSettings
    from loopergy.tasks.training import TaskConfig

    kinds = {"select": SelectSettings, "train": TaskConfig} | {name: kinds[0] for name, kinds in STAGE_CLASSES.items()}
    print_fields(kinds[str(context.command.name)])
    raise typer.Exit


Fields = Annotated[
    bool, typer.Option("--fields", help="List what --set takes, and stop.", is_eager=True, callback=list_fields)
]


def with_settings(values: dict[str, Any], pairs: dict[str, Any]) -> dict[str, Any]:
    """Put `KEY=VALUE` and `PART.KEY=VALUE` pairs over a recipe's values.

    Raises:
        ValueError: For a key below a part that has no keys.
    """
    values = dict(values)
    for key, value in pairs.items():
        part, dot, name = key.partition(".")
        if not dot:
            values[key] = value
        elif isinstance(values.get(part) or {}, dict):
            values[part] = {**(values.get(part) or {}), name: value}
        else:
            raise ValueError(f"--set {key}: the recipe's {part!r} has no parts; give --set {part}=...")
    return values
