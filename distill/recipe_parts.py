# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What recipes of every kind share: reading them, refusing what no part takes, running stages that are not done yet.

A folder holds one recipe's work. Each finished stage records its settings and what it was made from; a stage that is
running has the same beside its checkpoints, in `run.json`. A recipe that says otherwise is refused before it starts.
"""

import gc
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers.trainer_utils import get_last_checkpoint

from loopergy.conversion.folders import replace_file
from loopergy.distill.calibrate import PARTS
from loopergy.distill.stage import StageError, StageRecord, StageTrainer
from loopergy.training.checks import check_least
from loopergy.training.fields import HARMLESS, read_part
from loopergy.training.processes import alone, whole

RUN_FILE = "run.json"


@dataclass
class EvaluateSettings:
    """The `evaluate` part of a recipe: the held-out text after every stage."""

    num_tokens: int = field(default=32768, metadata={"help": "Held-out tokens; 0 skips the evaluation."})
    length: int = field(default=512, metadata={"help": "Tokens in a row of them."})
    batch_size: int = field(default=1, metadata={"help": "Rows in a batch of them."})

    def __post_init__(self):
        check_least("evaluate", self, num_tokens=0, length=2, batch_size=1)


@dataclass
class CalibrateSettings:
    """The `calibrate` part of a recipe: a closed-form start of the new mixers, before any training."""

    num_tokens: int = field(default=8192, metadata={"help": "Tokens to fit on, of the training documents."})
    length: int = field(default=512, metadata={"help": "Tokens in a row of them."})
    batch_size: int = field(default=1, metadata={"help": "Rows in a batch of them."})
    parts: list[str] = field(
        default_factory=lambda: list(PARTS), metadata={"help": "What to fit: memory, output, or both."}
    )

    def __post_init__(self):
        check_least("calibrate", self, num_tokens=1, length=2, batch_size=1)
        if set(self.parts) - set(PARTS):
            raise ValueError(f"calibrate: `parts` must be a list of some of {PARTS}, got {self.parts!r}.")


@dataclass
class SelectSettings:
    """The `select` part of a recipe."""

    keep: int | float | list[int] | str = field(
        default=0.25, metadata={"help": "Layers to keep: a number, a share, or the layers (strategy given)."}
    )
    strategy: str = field(
        default="oneshot",
        metadata={"help": "One of oneshot, greedy_add, greedy_remove, leave_one_out, mse, uniform, given."},
    )
    num_tokens: int = field(
        default=65536, metadata={"help": "Tokens to score the candidates on, of the training documents."}
    )
    length: int = field(default=512, metadata={"help": "Tokens in a row of them."})
    batch_size: int = field(default=1, metadata={"help": "Rows in a batch of them."})
    budget_tokens: int = field(default=0, metadata={"help": "Tokens to train each candidate on first (oneshot only)."})
    tasks: list[dict[str, Any]] = field(
        default_factory=list, metadata={"help": "Score the candidates on these tasks instead of text."}
    )

    def __post_init__(self):
        unseen = self.strategy in ("given", "uniform")
        check_least("select", self, num_tokens=0 if unseen else 1, length=2, batch_size=1, budget_tokens=0)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read the keys and values of a YAML file; `1e-4` is a number.

    Raises:
        ValueError: The file is not a mapping.
    """
    values = _numbers(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a recipe is a mapping of keys, got {type(values).__name__}.")
    return values


def _numbers(value: Any) -> Any:
    """Read `1e-4` as a number, as everyone but YAML 1.1 does."""
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value)
    return float(value) if is_number else value


# What a part of a recipe may not set: the recipe as a whole, or the command, does.
_NOT_IN_A_PART = {
    "output_dir": "the folder of the run holds every stage; give it to the command (-o)",
    "data_seed": "the order of the data comes from the recipe's own `seed`; set that",
}


def read_stage(
    name: str, values: Any, kind: type, more: Sequence[str] = (), barred: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the part of a recipe for a stage that trains, as [`read_part`] does.

    Args:
        name (`str`): The stage.
        values (mapping): Fields of its config class.
        kind (`type`): The config class.
        more (sequence of `str`): Other keys that the part may have.
        barred (mapping, *optional*): Fields that it may not have, and why, beside those of every stage.

    Raises:
        ValueError: As `read_part`, or a field that it may not have.
    """
    part = read_part(name, values, kind, more)
    for key, reason in {**_NOT_IN_A_PART, **(barred or {})}.items():
        if key in part:
            raise ValueError(f"{name}: `{key}` cannot be set here, got {part[key]!r}: {reason}.")
    return part


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Put the name of a recipe's part in front of a `ValueError` that does not tell it."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{part}:"):
            raise
        raise ValueError(f"{part}: {error}") from error


def train_stage(trainer: StageTrainer, folder: Path, measure: Callable[[Any, float], dict[str, Any]]) -> StageRecord:
    """Train a stage, or what of it an interrupted run left; measure it and write its folder.

    Args:
        trainer ([`StageTrainer`]): The caller must not keep it: its optimizer has to be gone before the next stage
            makes its own.
        folder (`Path`): Of the stage.
        measure (callable): Takes the trained model and the seconds of training, those before an interruption
            included; returns what the record holds as metrics.
    """
    trainer.train_or_resume()
    record = trainer.save_stage(folder, measure(whole(trainer.student), trainer.seconds))
    trainer.accelerator.free_memory()
    # A trainer is full of reference cycles.
    del trainer
    gc.collect()
    return record


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the entries in which two nested mappings differ, by dotted names, with the values of both sides."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in sorted({*there, *here}):
        one, other = there.get(name), here.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found |= differences(one, other, f"{prefix}{name}.")
        elif one != other:
            found[f"{prefix}{name}"] = one, other
    return found


def run_stages(
    job: Any,
    stages: Mapping[str, dict[str, Any]],
    perform: Callable[[str], StageRecord],
    *,
    order: Sequence[str],
    origin: Callable[[str], dict[str, Any]] = lambda name: {},
) -> None:
    """Run the stages of a job that its folder does not have yet, and tell of each.

    Args:
        job ([`RecipeRun`] or alike): With `folder`, `processes`, `is_main` and `on_stage`.
        stages (mapping): Name of a stage, in order, to the settings that its record holds.
        perform (callable): Runs a stage.
        order (sequence of `str`): All stages that there are, those that the recipe leaves out included. Each is made
            from the one before it.
        origin (callable, *optional*): Gives what a stage depends on beside its settings, which its record holds as
            `run`; what an older record does not hold of it is not compared.

    Raises:
        StageError: A stage that was finished or interrupted with other settings, or whose successor was made without
            it.
        ValueError: A folder that another run is writing to.
    """
    with alone(job.folder, job.is_main):
        _check_folder(job, stages, order, origin)
        _run_stages(job, stages, perform, origin)


def _as_read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as they are read back: JSON turns the layers of a mapping into text."""
    return json.loads(json.dumps(values))


def _changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Tell what differs between two runs, apart from what may; empty if nothing does."""
    found = differences(there, _as_read(here))
    return "; ".join(
        f"{name} was {old!r}, the recipe has {new!r}"
        for name, (old, new) in found.items()
        if name.rpartition(".")[2] not in HARMLESS
    )


def _recorded(origin: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """Return of an origin what a record holds: an older one has fewer entries."""
    return {name: value for name, value in origin.items() if name in there}


def _run_of(stages: Mapping[str, dict[str, Any]], name: str, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a stage depends on: its settings and those of the stages before it, and its origin."""
    names = list(stages)
    return {**{earlier: stages[earlier] for earlier in names[: names.index(name) + 1]}, **origin}


def _check_folder(
    job: Any,
    stages: Mapping[str, dict[str, Any]],
    order: Sequence[str],
    origin: Callable[[str], dict[str, Any]],
) -> None:
    """Refuse a folder in which something was made by another recipe, before anything is done."""
    records = {name: StageRecord.load(job.folder / name) for name in order}
    before = None
    for name, settings in stages.items():
        record = records[name]
        if record is None:
            _check_interrupted(job.folder / "checkpoints" / name, stages, origin(name), job.folder)
            later = [other for other in order[order.index(name) + 1 :] if records[other] is not None]
            if later:
                raise StageError(
                    f"Stage {name!r} is not done in {job.folder}, but stages that come after it are: they were not "
                    f"made from it. Remove {', '.join(str(job.folder / other) for other in later)} to make them from "
                    f"it, or leave {name!r} out of the recipe, or give another output."
                )
        else:
            changed = _changes(record.metrics.get("settings") or {}, settings)
            if not changed and (run := record.metrics.get("run")):
                changed = _changes(run, _recorded(origin(name), run))
            if changed:
                raise StageError(
                    f"Stage {name!r} in {job.folder} was finished with other settings: {changed}. Remove that folder "
                    "and those of later stages, or give another output."
                )
            parent = (record.parent or {}).get("stage", before)
            if before is not None and parent != before:
                made = [other for other in order[order.index(name) :] if records[other] is not None]
                raise StageError(
                    f"Stage {name!r} in {job.folder} was made from stage {parent!r}, and the recipe has {before!r} "
                    f"before it. Remove {', '.join(str(job.folder / other) for other in made)}, or restore the "
                    "recipe, or give another output."
                )
        before = name


def _check_interrupted(
    checkpoints: Path, stages: Mapping[str, dict[str, Any]], origin: Mapping[str, Any], folder: Path
) -> None:
    """Refuse to go on from checkpoints of another run; those without a `run.json` are older than it, and are taken."""
    file = checkpoints / RUN_FILE
    if not file.is_file() or get_last_checkpoint(str(checkpoints)) is None:
        return
    there = json.loads(file.read_text(encoding="utf-8"))
    changed = _changes(there, _run_of(stages, checkpoints.name, _recorded(origin, there)))
    if changed:
        raise StageError(
            f"Stage {checkpoints.name!r} in {folder} was interrupted, and began with other settings: {changed}. "
            f"Restore them to go on, or remove {checkpoints} to begin the stage anew, or give another output."
        )


def _run_stages(
    job: Any,
    stages: Mapping[str, dict[str, Any]],
    perform: Callable[[str], StageRecord],
    origin: Callable[[str], dict[str, Any]],
) -> None:
    for name in stages:
        record, checkpoints = StageRecord.load(job.folder / name), job.folder / "checkpoints" / name
        # None begins a stage before all have seen what is done.
        job.processes.wait_for_everyone()
        if record is None:
            if job.is_main:
                replace_file(checkpoints / RUN_FILE, json.dumps(_run_of(stages, name, origin(name)), indent=1) + "\n")
            record = perform(name)
        if job.is_main:
            shutil.rmtree(checkpoints, ignore_errors=True)
            job.on_stage(name, record)
