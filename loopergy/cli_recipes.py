# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The verb `loopergy recipes`."""

from typing import Annotated

import typer

from loopergy.recipes import find_recipe, recipe_files


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this one's file alone, for another command.")] = None,
) -> None:
    """List the recipes that travel with the package, with what each begins with."""
    if name is not None:
        typer.echo(find_recipe(name))
        return
    for each, file in recipe_files().items():
        typer.echo(f"{each}\n    {file.read_text('utf-8').splitlines()[0].removeprefix('# ')}")
