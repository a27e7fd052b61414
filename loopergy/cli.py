# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The `loopergy` command: one verb for each thing that the package does.

The verbs only read their arguments; the work is done by the functions and trainers that Python users call.
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

import loopergy
from loopergy.cli_evaluation import card, evaluate
from loopergy.cli_options import (
    Device,
    Dtype,
    Fields,
    Settings,
    checked_file,
    example,
    expanded,
    settings,
    with_settings,
)
from loopergy.cli_pretrain import RECIPE_HELP, RUN_HELP, pretrain
from loopergy.cli_recipes import recipes
from loopergy.cli_tasks import task_app
from loopergy.stage_printer import print_stage

app = typer.Typer(
    name="loopergy",
    help="Looped and energy-based language models as ordinary transformers models: convert, distil, generate, trace.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MODEL_HELP = "Folder, Hub id, or .gguf file."
MIXER_HELP = (
    "Mixer of the other layers: gdn (the default), window, kda, deltanet, mamba2, hgrn2, retnet, gla, la, nsa or dsa; "
    "or a pattern over these layers, such as gdn*3,dsa."
)
KEEP_HELP = "Layers that keep full attention: 3,7,11, a count, a share such as 0.25, all or none."
FORMAT_HELP = (
    "lt2; or rewritten exactly: llama (of cem_llama), cem_llama (of a tied llama), nrgpt (of an official .pt)."
)
PLOT_HELP = "Write the picture here (.png, .svg, .pdf)."
TRACED_HELP = "Folder or Hub id of a CEM-Llama or NRGPT model with its tokenizer."
INFO_HELP = "Folder, Hub id, config.json or preset. Without it: this installation."
SOURCE_HELP = "Folder or Hub id."
DEMO_HELP = "Gets the report and the student."
OUTPUT_HELP = "Folder to write; it appears whole or not at all."
Output = Annotated[Path, typer.Option("--output", "-o", help=OUTPUT_HELP, callback=expanded)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output folder if it holds something.")]


def show_version(wanted: bool) -> None:
    """Print the version and stop, if it was asked for."""
    if wanted:
        typer.echo(f"loopergy {loopergy.__version__}")
        raise typer.Exit


app.add_typer(task_app, name="task")


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Read what comes before the verb; `main` looks at `--debug`."""


@app.command(epilog=example("loopergy demo --teacher ouro-tiny -o demo-output"))
def demo(
    teacher: Annotated[str, typer.Option(help="smollm2, ouro-tiny, or auto for the first that is there.")] = "auto",
    output: Annotated[Path, typer.Option("--output", "-o", help=DEMO_HELP, callback=expanded)] = Path("demo-output"),
) -> None:
    """Walk the whole way with a small model, offline, in minutes; ends with a report to look at."""
    from loopergy.demo import run_demo

    run_demo(teacher, output)


@app.command(epilog=example("loopergy convert ByteDance/Ouro-1.4B --keep-layers 6 -o ouro-hybrid"))
def convert(
    teacher: Annotated[str, typer.Argument(help=MODEL_HELP)],
    output: Output,
    keep_layers: Annotated[str | None, typer.Option("--keep-layers", "-k", help=KEEP_HELP)] = None,
    mixer: Annotated[str | None, typer.Option(help=MIXER_HELP)] = None,
    to: Annotated[str, typer.Option(help=FORMAT_HELP)] = "lt2",
    seed: Annotated[int | None, typer.Option(help="Seed of the fresh tensors; 0 by default.")] = None,
    dtype: Dtype = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a Hub id.")] = None,
    option: Settings = None,
    overwrite: Overwrite = False,
) -> None:
    """Turn an Ouro or Llama-shaped model into a hybrid, and report where each tensor came from.

    With --to, or given an LT2 in the format of other code (a consolidated folder of the official one, a
    StudentForCausalLM of hybrid-distillation), rewrite a checkpoint in a format that computes the same.
    """
    from loopergy.conversion.exact_formats import convert_format, is_lt2_elsewhere
    from loopergy.conversion.folders import check_new_folder

    check_new_folder(output, overwrite=overwrite, source=teacher)
    loading, options = {"dtype": dtype, "revision": revision}, settings(option)
    if flags := sorted({"keep_layers", "mixer", "seed", "overwrite", *loading} & set(options)):
        raise ValueError(f"--set {', '.join(flags)}: give it as a flag, --{flags[0].replace('_', '-')}")
    if to != "lt2" or is_lt2_elsewhere(teacher, revision):
        hybrid = {"--keep-layers": keep_layers, "--mixer": mixer, "--seed": seed}
        if unused := [flag for flag, value in hybrid.items() if value is not None]:
            raise ValueError(f"{teacher} is rewritten exactly, as a {to}: without {', '.join(unused)}")
        convert_format(teacher, to, output, overwrite=overwrite, **loading, **options)
        typer.echo(f"written to {output}")
        return
    if keep_layers is None:
        raise ValueError(f"give --keep-layers. {KEEP_HELP}")
    layers = parse_layers(keep_layers)
    result = loopergy.convert(teacher, layers, mixer or "gdn", seed=seed or 0, **loading, **options)
    result.save_pretrained(output, overwrite=overwrite)
    result.report.print()
    typer.echo(f"written to {output}")


def parse_layers(text: str) -> str | int | float | list[int]:
    """Read `--keep-layers`: a bare number is a count or a share; the library reads everything else."""
    text = text.strip()
    if text == "none":
        return []
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


RunFolder = Annotated[Path, typer.Option("--output", "-o", help=RUN_HELP, callback=expanded)]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", "-r", help="YAML recipe; see recipes/.", callback=expanded)
]
Teacher = Annotated[str | None, typer.Option(help="Folder, Hub id, .gguf file or smollm2; overrides the recipe's.")]
Data = Annotated[str | None, typer.Option(help="Text: offline, a file, a folder, or a Hub data set; overrides.")]


def stage_recipe(stage: str, folder: Path, recipe: Path | None, flags: dict[str, str | None], pairs: dict) -> Any:
    """Build the recipe of one stage: the file, flags and `--set` over it, and the stages before as they were done.

    Args:
        stage: The stage to run.
        folder: The run's folder.
        recipe: YAML file, or None for the defaults.
        flags: Keys of the recipe given as flags; None for those that were not.
        pairs: Fields of the stage.

    Returns:
        A `Recipe` that ends with this stage.

    Raises:
        ValueError: No teacher is named, or a stage before this one is not done.
    """
    from loopergy.distill.recipe import STAGES, Recipe
    from loopergy.distill.recipe_settings import read_recipe
    from loopergy.distill.stage import StageRecord
    from loopergy.recipes import find_recipe

    if recipe is None and not flags["teacher"]:
        raise ValueError("no teacher: give --teacher NAME, or --recipe FILE with a `teacher`")
    whole = Recipe(teacher="") if recipe is None else Recipe.from_yaml(find_recipe(recipe))
    changes: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    changes[stage] = {**(getattr(whole, stage) or {}), **pairs}
    position = STAGES.index(stage)
    asked = {} if recipe is None else read_recipe(find_recipe(recipe))
    for earlier in STAGES[:position]:
        record = StageRecord.load(folder / earlier)
        if record is not None:
            changes[earlier] = record.metrics["settings"]
        elif earlier == "select" and stage == "distill" and asked.get("select", {}) is not None:
            raise ValueError(
                f"stage 'select' is not done in {folder}: run `loopergy select` with the same options first, or give "
                "a recipe with `select: null` to keep no layer"
            )
        elif earlier == "select" or (earlier == "calibrate" and stage != "align"):
            changes[earlier] = None
        elif stage != "align":
            raise ValueError(f"stage {earlier!r} is not done in {folder}: `loopergy run` does all stages in order")
    return dataclasses.replace(whole, **changes, **dict.fromkeys(STAGES[position + 1 :]))


def run_stage(
    stage: str,
    folder: Path,
    recipe: Path | None,
    flags: dict[str, str | None],
    pairs: list[str] | None,
) -> None:
    """Run one stage of a run."""
    from loopergy.distill.recipe import RecipeRun

    whole = stage_recipe(stage, folder, recipe, flags, settings(pairs))
    run_and_report(RecipeRun(whole, folder, on_stage=print_stage))


def run_and_report(job: Any) -> None:
    """Run a recipe; only the main process says where the report is."""
    job.run()
    if job.is_main:
        typer.echo(f"report: {job.folder / 'report.html'}")


@app.command(epilog=example("loopergy align --teacher smollm2 -o runs/smollm2 --set target_tokens=1_000_000"))
def align(
    output: RunFolder,
    recipe: RecipeFile = None,
    teacher: Teacher = None,
    data: Data = None,
    option: Settings = None,
    fields: Fields = False,
) -> None:
    """Stage 1: convert, and let each new mixer learn the attention that it replaces."""
    run_stage("align", output, recipe, {"teacher": teacher, "data": data}, option)


@app.command(epilog=example("loopergy select --teacher smollm2 -o runs/smollm2 --set keep=6"))
def select(
    output: RunFolder,
    recipe: RecipeFile = None,
    teacher: Teacher = None,
    data: Data = None,
    option: Settings = None,
    fields: Fields = False,
) -> None:
    """Choose the layers that keep full attention, by the KL that each one saves."""
    run_stage("select", output, recipe, {"teacher": teacher, "data": data}, option)


@app.command(epilog=example("loopergy distill --recipe recipes/smollm2-135m.yaml -o runs/smollm2"))
def distill(
    output: RunFolder,
    recipe: RecipeFile = None,
    teacher: Teacher = None,
    data: Data = None,
    option: Settings = None,
    fields: Fields = False,
) -> None:
    """Stage 2: the student learns the teacher's distribution over next tokens."""
    run_stage("distill", output, recipe, {"teacher": teacher, "data": data}, option)


@app.command(
    epilog=example("loopergy extend --teacher smollm2 -o runs/smollm2 --set length=8192 --set target_tokens=1_000_000")
)
def extend(
    output: RunFolder,
    recipe: RecipeFile = None,
    teacher: Teacher = None,
    data: Data = None,
    option: Settings = None,
    fields: Fields = False,
) -> None:
    """Stage 3: train on long texts."""
    run_stage("extend", output, recipe, {"teacher": teacher, "data": data}, option)


@app.command(epilog=example("loopergy run recipes/smollm2-135m.yaml -o runs/smollm2 --set align.target_tokens=4096"))
def run(
    recipe: Annotated[Path, typer.Argument(help=RECIPE_HELP, callback=expanded)],
    output: RunFolder,
    option: Settings = None,
) -> None:
    """Run all stages of a recipe; what is done is skipped, what was interrupted goes on."""
    from loopergy.distill.recipe import Recipe, RecipeRun
    from loopergy.recipes import find_recipe

    values = with_settings(vars(Recipe.from_yaml(find_recipe(recipe))), settings(option))
    run_and_report(RecipeRun(Recipe.from_dict(values, str(recipe)), output, on_stage=print_stage))


app.command(epilog=example("loopergy pretrain ouro-10m -o runs/ouro-10m --set pretrain.target_tokens=100_000"))(
    pretrain
)
app.command(epilog=example("loopergy recipes accelerate/ddp"))(recipes)


@app.command(epilog=example('loopergy generate ByteDance/Ouro-1.4B-Thinking "Why is the sky blue?" --num-loops 2'))
def generate(
    model: Annotated[str, typer.Argument(help=SOURCE_HELP, callback=expanded)],
    prompt: Annotated[str, typer.Argument(help="What to answer, or with --raw what to continue.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 256,
    num_loops: Annotated[int | None, typer.Option(min=1, help="Loops to run; the model's own by default.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; do not apply the chat template.")] = False,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="The chat template's switch, where it has one.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sample at this temperature; greedy by default.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Answer a prompt with any causal language model, and say how fast."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed

    from loopergy.conversion.whole_loading import checked_dtype, load_whole
    from loopergy.loading import check_run_options, checked_device, found_model
    from loopergy.tasks.vocabulary import encode

    set_seed(seed)
    place, model = checked_device(device), found_model(model)
    check_run_options(model, num_loops)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if raw or tokenizer.chat_template is None:
        inputs = encode(tokenizer, prompt, return_tensors="pt")
    else:
        turns = [{"role": "user", "content": prompt}]
        switch = {} if thinking is None else {"enable_thinking": thinking}
        inputs = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True, **switch
        )
    network: Any = load_whole(AutoModelForCausalLM, model, dtype=checked_dtype(dtype), num_loops=num_loops)
    network.to(place)
    sampling = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    began = time.perf_counter()
    tokens = network.generate(
        **inputs.to(network.device),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
    )
    count = tokens.shape[1] - inputs["input_ids"].shape[1]
    seconds = time.perf_counter() - began
    typer.echo(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s on {network.device}", err=True)


@app.command(epilog=example("loopergy info ByteDance/Ouro-1.4B --context 32768 --batch 8"))
def info(
    model: Annotated[str | None, typer.Argument(help=INFO_HELP, callback=expanded)] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Cached tokens per sequence; 4096 by default, or what the model can hold."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="Type of weights and cache; the config's by default.")] = None,
) -> None:
    """Describe a model by its config alone: loops, mixers, parameters, cache bytes, arithmetic."""
    from loopergy import describe
    from loopergy.conversion.whole_loading import checked_dtype

    if model is None:
        rows, table = describe.describe_installation(), []
    else:
        config = describe.find_config(model)
        cost = describe.model_cost(config, context, batch, checked_dtype(dtype))
        rows, table = describe.describe_cost(model, config, cost), describe.slot_table(config, cost)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")
    for line in table:
        typer.echo(line)


@app.command(epilog=example('loopergy trace runs/cem "def main(" --plot energies.png'))
def trace(
    model: Annotated[str, typer.Argument(help=TRACED_HELP, callback=expanded)],
    text: Annotated[str, typer.Argument(help="What to run the model on.")],
    num_steps: Annotated[int | None, typer.Option(min=1, help="Steps to run; the model's own by default.")] = None,
    plot: Annotated[Path | None, typer.Option(help=PLOT_HELP, callback=expanded)] = None,
    json: Annotated[Path | None, typer.Option(help="Write all energies here.", callback=expanded)] = None,
) -> None:
    """Show the energy of every token over the steps, and how many tokens rise."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from loopergy.conversion.whole_loading import load_whole
    from loopergy.energy_trace import picture_endings
    from loopergy.loading import found_model
    from loopergy.tasks.vocabulary import encode

    if json is not None:
        checked_file(json)
    if plot is not None:
        checked_file(plot, picture_endings())
    model = found_model(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = encode(tokenizer, text).input_ids
    network = load_whole(AutoModelForCausalLM, model)
    result = loopergy.trace(network, ids, num_steps=num_steps, tokenizer=tokenizer)
    typer.echo(str(result))
    if json is not None:
        result.to_json(json)
    if plot is not None:
        result.plot(plot)


app.command("eval", epilog=example("loopergy eval runs/smollm2/distill --tasks arc_easy,mmlu --limit 100"))(evaluate)
app.command(epilog=example("loopergy card smollm2-hybrid --license apache-2.0"))(card)


@app.command(epilog=example("loopergy export runs/smollm2/distill -o smollm2-hybrid"))
def export(
    model: Annotated[str, typer.Argument(help="Folder (a Trainer's checkpoint too) or Hub id.", callback=expanded)],
    output: Output,
    dtype: Dtype = None,
    overwrite: Overwrite = False,
) -> None:
    """Write one folder that loads with trust_remote_code=True where loopergy is not installed."""
    loopergy.export(model, output, dtype=dtype, overwrite=overwrite)
    typer.echo(f"written to {output}; publish it with: loopergy push {output} USER/NAME")


@app.command(epilog=example("loopergy push smollm2-hybrid USER/smollm2-hybrid"))
def push(
    folder: Annotated[Path, typer.Argument(help="What `loopergy export` wrote.", callback=expanded)],
    repo_id: Annotated[str, typer.Argument(help="USER/NAME; made if it does not exist.")],
    private: Annotated[bool | None, typer.Option("--private/--public", help="For a new repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to.")] = None,
) -> None:
    """Publish an exported folder on the Hub in one commit."""
    from loopergy.hub_export import push as publish

    typer.echo(publish(folder, repo_id, private=private, revision=revision))


@app.command(
    epilog=example("loopergy serve ByteDance/Ouro-1.4B-Thinking --port 8000"),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=SOURCE_HELP, callback=expanded)],
) -> None:
    """Answer chats over HTTP: `transformers serve` with loopergy's models, and with all of its options.

    `transformers serve --help` lists them; `transformers chat MODEL http://localhost:8000/v1` talks to the server.
    """
    from transformers.cli.transformers import app as transformers_app

    from loopergy.loading import check_whole, checked_device, found_model

    for word, value in zip(context.args, [*context.args[1:], ""], strict=False):
        if word == "--device" and value != "auto":
            checked_device(value)
        elif word.startswith("--device=") and word != "--device=auto":
            checked_device(word.partition("=")[2])
    model = found_model(model)
    check_whole(model)
    transformers_app(["serve", model, *context.args])


def message_of(error: Exception) -> str | None:
    """Return one line on an error that input or the machine can cause; None for one that is a bug of ours."""
    import yaml
    from huggingface_hub.errors import HTTPError, StrictDataclassError
    from safetensors import SafetensorError

    line = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError | ImportError):
        return line
    # These libraries' errors are not `ValueError`s.
    if isinstance(error, SafetensorError):
        if line.startswith("Error while serializing"):
            return f"a .safetensors file cannot be written: {line}"
        return f"a .safetensors file is damaged or cut short: {line}"
    if isinstance(error, HTTPError):
        return f"the Hub cannot be reached: {line or type(error).__name__}"
    if isinstance(error, yaml.YAMLError):
        return f"no YAML: {line}"
    return f"the model's config: {line}" if isinstance(error, StrictDataclassError) else None


def main() -> None:
    """Run the command. An error raised on purpose becomes one line and exit code 2, not a traceback."""
    try:
        app()
    except Exception as error:
        message = message_of(error)
        if message is None or "--debug" in sys.argv:
            raise
        typer.echo(f"loopergy: {message}", err=True)
        typer.echo("(loopergy --debug VERB ... shows where it came from)", err=True)
        raise SystemExit(2) from None
    finally:
        # A process group that is still open when Python ends can abort a run that is already complete.
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
