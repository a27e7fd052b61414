# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""`loopergy eval` and `loopergy card`: measure a model, and write down what is known about it."""

from pathlib import Path
from typing import Annotated

import typer

from loopergy.cli_options import Device, Dtype, checked_file, expanded

TASKS_HELP = (
    "Tasks, separated by commas: names of lm-eval (mmlu, arc_easy, ...), .yaml or .jsonl files, or a folder of .jsonl "
    "files."
)
INCLUDE_HELP = "Folder of further lm-eval YAML tasks."
OUTPUT_HELP = "JSON file to write; by default one in the folder evaluation/ of the model, or here for a Hub id."
OVERWRITE_HELP = "Replace a card that was edited by hand; its licence, parent and language stay."


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or Hub id.", callback=expanded)],
    tasks: Annotated[str, typer.Option("--tasks", "-t", help=TASKS_HELP)],
    limit: Annotated[float | None, typer.Option(help="Only the first examples of a task; below 1 a share.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Solved examples in front of a question.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at once; changes no result.")] = 8,
    num_loops: Annotated[int | None, typer.Option(min=1, help="Loops to run; the model's own by default.")] = None,
    num_steps: Annotated[int | None, typer.Option(min=1, help="Steps to run; the model's own by default.")] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Ask as in a chat.")] = False,
    include_path: Annotated[Path | None, typer.Option(help=INCLUDE_HELP, callback=expanded)] = None,
    dtype: Dtype = None,
    device: Device = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=OUTPUT_HELP, callback=expanded)] = None,
) -> None:
    """Measure a model with lm-eval, on its tasks or on files of your own; `loopergy card` reads what is written."""
    from loopergy.evaluation import RESULTS_FOLDER
    from loopergy.evaluation import evaluate as measure

    place = Path(model) if Path(model).is_dir() else Path()
    checked_file(output or place / RESULTS_FOLDER / "result.json")
    result = measure(
        model,
        tasks,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        num_loops=num_loops,
        num_steps=num_steps,
        apply_chat_template=apply_chat_template,
        include_path=include_path,
        dtype=dtype,
        device=device,
    )
    if result is None:  # another process of this run writes
        return
    for line in result.lines():
        typer.echo(line)
    typer.echo(f"written to {result.save(output or place / RESULTS_FOLDER / result.file_name())}")


def card(
    folder: Annotated[Path, typer.Argument(help="Folder of a model, exported or not.", callback=expanded)],
    repo_id: Annotated[str | None, typer.Option(help="USER/NAME it will have on the Hub.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence of the weights, as the Hub names it.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the parent; by default from the files.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help=OVERWRITE_HELP)] = False,
) -> None:
    """Write the model card from the files in the folder: config, provenance, training, results, energies."""
    from loopergy.model_card import write_card

    place = write_card(folder, repo_id=repo_id, license=license, base_model=base_model, overwrite=overwrite)
    typer.echo(f"written to {place}")
