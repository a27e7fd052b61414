# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""`loopergy task`: small tasks to train and measure any causal language model on."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from loopergy.cli_options import SET_HELP, Device, Fields, Settings, example, expanded, settings

task_app = typer.Typer(
    name="task",
    help="Train and measure a model on a small task: ListOps, characters, recall, state tracking, needle.",
    epilog=example("loopergy task list"),
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="Task; `loopergy task list` shows them.")]
OPTION_HELP = "Option of the task. " + SET_HELP
Options = Annotated[list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help=OPTION_HELP)]
OUTPUT_HELP = "Folder of the run; the same call goes on with it."
TYPE_HELP = "Type of a fresh model (llama, ouro, ...), or a folder to go on from."
CONFIG_HELP = "Field of a fresh model's config. " + SET_HELP
Config = Annotated[list[str] | None, typer.Option("--config", metavar="KEY=VALUE", help=CONFIG_HELP)]


@task_app.command("list", epilog=example("loopergy task list"))
def list_tasks() -> None:
    """List the tasks, with the defaults of their options."""
    from loopergy.tasks.catalog import TASKS, task_options

    for name, kind in TASKS.items():
        typer.echo(f"{name}\n    {(kind.__doc__ or '').splitlines()[0]}")
        shown = {key: list(value) if isinstance(value, tuple) else value for key, value in task_options(name).items()}
        pairs = [f"{key}={value}" for key, value in shown.items()]
        typer.echo(f"    {'  '.join(pairs)}")


@task_app.command(epilog=example("loopergy task train recall llama -o runs/recall --set max_steps=500"))
def train(
    name: Name,
    model: Annotated[str, typer.Argument(help=TYPE_HELP, callback=expanded)],
    output: Annotated[Path, typer.Option("--output", "-o", help=OUTPUT_HELP, callback=expanded)],
    option: Options = None,
    config: Config = None,
    setting: Settings = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, rows and dropout.")] = 0,
    fields: Fields = False,
) -> None:
    """Train a model on a task, and measure it; writes the model, its tokenizer and history.json."""
    from transformers import CONFIG_MAPPING

    from loopergy.tasks.new_model import new_model
    from loopergy.tasks.training import TaskConfig, train_on_task
    from loopergy.training.processes import join_processes

    quiet()
    values = settings(setting)
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(TaskConfig)})
    if unknown:
        raise ValueError(f"--set: there is no setting {', '.join(map(repr, unknown))}; --fields lists all.")
    if "output_dir" in values:
        raise ValueError(f"--set output_dir={values['output_dir']}: the folder of the run is --output (-o).")
    say = typer.echo if join_processes().is_main_process else lambda line: None
    if model in CONFIG_MAPPING and Path(model).is_dir():
        say(f"{model} is a model type and a folder here: training a fresh {model}; ./{model} is the folder.")
    if model not in CONFIG_MAPPING and Path(model).is_dir():
        if config:
            raise ValueError(f"--config shapes a fresh model, but {model} is a folder with a model.")
        task, network = task_for(name, settings(option, "--option"), model), load(model)
    else:
        task = task_for(name, settings(option, "--option"), None)
        network = new_model(model, task, seed, **settings(config, "--config"))
    args = TaskConfig(**{"output_dir": str(output), "seed": seed, **values})
    say(f"{name}: {network.config.model_type}, {network.num_parameters():,} parameters")
    history = train_on_task(network, task, args, [print_logs()])
    say("test: " + ", ".join(f"{key} {value:.4f}" for key, value in history.test.items()))
    say(f"written to {output}")


@task_app.command("eval", epilog=example("loopergy task eval recall runs/recall --count 500"))
def evaluate(
    name: Name,
    model: Annotated[str, typer.Argument(help="Folder or Hub id.", callback=expanded)],
    option: Options = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    count: Annotated[int, typer.Option(min=1, help="Examples at most.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the examples.")] = 0,
    sample: Annotated[
        bool, typer.Option("--sample", help="listops: sample instead of taking the best token.")
    ] = False,
    operator: Annotated[str | None, typer.Option(help="listops: samples of this operation alone.")] = None,
    device: Device = None,
) -> None:
    """Measure a model on a task; options are those that it was trained with, unless given."""
    from loopergy.loading import checked_device, found_model
    from loopergy.tasks.training import check_fits

    quiet()
    extra: dict[str, Any] = {"sample": True} if sample else {}
    extra |= {"operator": operator} if operator else {}
    if extra and name != "listops":
        raise ValueError(f"--sample and --operator are for listops; the task is {name!r}.")
    place, model = checked_device(device), found_model(model)
    task, network = task_for(name, settings(option, "--option"), model), load(model)
    check_fits(network, task)
    network.to(place)
    result = task.evaluate(network, split, count, batch, seed, **extra)  # type: ignore[arg-type]
    for line in result.lines():
        typer.echo(line)


def print_logs() -> Any:
    """Return a trainer's callback that prints loss, accuracy and learning rate as they come."""
    from transformers import TrainerCallback

    class PrintLogs(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            names = ("loss", "learning_rate", "eval_loss", "eval_accuracy")
            parts = [f"{name} {logs[name]:.4g}" for name in names if name in logs]
            if parts and state.is_world_process_zero:
                typer.echo(f"step {state.global_step:>6}  " + "  ".join(parts))

    return PrintLogs()


def quiet() -> None:
    """Show no progress bars: a run on a task saves often, and in no time."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def load(model: str) -> Any:
    """Load a causal language model in float32, whole."""
    from transformers import AutoModelForCausalLM

    from loopergy.conversion.whole_loading import load_whole

    return load_whole(AutoModelForCausalLM, model, dtype="float32")


def task_for(name: str, options: dict[str, Any], model: str | None) -> Any:
    """Make a task; with a model, with its tokenizer where the task takes one, and by default with its run's options.

    Raises:
        ValueError: The model's vocabulary is not that of the task, or its training is not finished.
    """
    from transformers import AutoTokenizer

    from loopergy.tasks.catalog import make_task, takes_vocabulary
    from loopergy.tasks.training import is_finished, task_of_run

    if model is None:
        return make_task(name, **options)
    run = task_of_run(model) or {}
    if run and not is_finished(model):
        raise ValueError(f"{model} holds an unfinished run; the call of `loopergy task train` that began it ends it.")
    kept = {key: value for key, value in run.items() if key != "task"} if run.get("task") == name else {}
    tokenizer = AutoTokenizer.from_pretrained(model)
    if name == "needle":
        kept["vocabulary"] = tokenizer
    task = make_task(name, **{**kept, **options})
    own = task.tokenizer.get_vocab() == tokenizer.get_vocab()
    if not own and not run and takes_vocabulary(name):
        # Such as a model whose training had the task in its text.
        return make_task(name, vocabulary=tokenizer, **options)
    if not own:
        raise ValueError(
            f"{model} has another vocabulary than task {name!r} with these options: {len(tokenizer)} tokens, not "
            f"{len(task.tokenizer)}. Give the options it was trained with, or train it on this task."
        )
    return task
