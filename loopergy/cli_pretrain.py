# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The verb `loopergy pretrain`."""

from pathlib import Path
from typing import Annotated

import typer

from loopergy.cli_options import Settings, expanded, settings, with_settings
from loopergy.stage_printer import print_stage

RECIPE_HELP = "YAML recipe, or the name of one that `loopergy recipes` lists."
RUN_HELP = "Folder of the run: one subfolder a stage."


def pretrain(
    recipe: Annotated[Path, typer.Argument(help=RECIPE_HELP, callback=expanded)],
    output: Annotated[Path, typer.Option("--output", "-o", help=RUN_HELP, callback=expanded)],
    option: Settings = None,
) -> None:
    """Train a small Ouro from nothing: tokenizer, Ouro's own objective, exit gate; what was interrupted goes on."""
    from loopergy.distill.pretrain_recipe import PretrainRecipe, PretrainRun
    from loopergy.recipes import find_recipe

    values = with_settings(vars(PretrainRecipe.from_yaml(find_recipe(recipe))), settings(option))
    job = PretrainRun(PretrainRecipe.from_dict(values, str(recipe)), output, on_stage=print_stage)
    job.run()
    if job.is_main:
        typer.echo(f"model: {job.model_folder()}")
