# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What recipes of every kind share: reading them, refusing what no part takes, running stages that are not done yet.

A folder holds one recipe's work. Each finished stage records its settings and what it was made from; a stage that is
running has the same beside its checkpoints, in `run.json`. A recipe that says otherwise is refused before it starts.
"""

import dataclasses
import json
import re
import shutil
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from transformers.trainer_utils import get_last_checkpoint

from loopergy.conversion.folders import replace_file
from loopergy.distill.calibrate import PARTS
from loopergy.distill.checks import check_least
from loopergy.distill.stage import StageError, StageRecord

LOCK_FILE, RUN_FILE = ".running", "run.json"
# Fields that may change between two starts of one run: what is logged, kept and shown, and how rows are fetched.
HARMLESS = ("logging_steps", "logging_strategy", "logging_first_step", "logging_nan_inf_filter", "report_to")
HARMLESS += ("log_level", "log_level_replica", "log_on_each_node", "include_num_input_tokens_seen", "disable_tqdm")
HARMLESS += ("save_steps", "save_strategy", "save_total_limit", "skip_memory_metrics", "ddp_timeout", "run_name")
HARMLESS += ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor")
HARMLESS += ("dataloader_persistent_workers",)


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
        if not isinstance(self.parts, list) or set(self.parts) - set(PARTS):
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


def field_names(kind: type) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [entry.name for entry in dataclasses.fields(kind)]


def check_keys(where: str, values: Mapping[str, Any], known: list[str]) -> None:
    """Raise `ValueError` for what is no mapping, or keys that are not known; the text lists those that are."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: this must be a mapping of fields, such as {{{known[0]}: ...}}, got {values!r}.")
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown keys {unknown}. Known are: {', '.join(sorted(known))}.")


def read_part(where: str, values: Any, kind: type, more: Sequence[str] = ()) -> dict[str, Any]:
    """Return a part of a recipe with `100.0` as 100 where its dataclass wants a whole number.

    Args:
        where (`str`): Name of the part, for messages.
        values (mapping): Fields and their values.
        kind (`type`): The dataclass that they are for.
        more (sequence of `str`): Other keys that the part may have.

    Raises:
        ValueError: No mapping, an unknown key, or no number where one has to be.
    """
    check_keys(where, values, [*field_names(kind), *more])
    hints = typing.get_type_hints(kind)
    return {name: _number(f"{where}: `{name}`", value, hints.get(name)) for name, value in values.items()}


def _number(name: str, value: Any, hint: Any) -> Any:
    allowed = set(typing.get_args(hint) or (hint,))
    if not allowed <= {int, float, type(None)} or (value is None and type(None) in allowed):
        return value
    kind = "number" if float in allowed else "whole number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a {kind}, got {value!r}.")
    if float in allowed or isinstance(value, int):
        return value
    if not value.is_integer():
        raise ValueError(f"{name} must be a {kind}, got {value}.")
    return int(value)


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Put the name of a recipe's part in front of a `ValueError` that does not tell it."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{part}:"):
            raise
        raise ValueError(f"{part}: {error}") from error


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
            `run`; records without it were written before there was one, and are taken.

    Raises:
        StageError: A stage that was finished or interrupted with other settings, or whose successor was made without
            it, or a folder that another run is writing to.
    """
    with _alone(job):
        _check_folder(job, stages, order, origin)
        _run_stages(job, stages, perform, origin)


@contextmanager
def _alone(job: Any) -> Iterator[None]:
    """Keep a second command from writing to the same folder; where files can be locked, the lock dies with its run."""
    if not job.is_main:
        yield
        return
    lock = FileLock(job.folder / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise StageError(f"{job.folder} is in use by another run. Wait for it, or give another output.") from None
    except NotImplementedError:
        pass  # what older versions of filelock raise on a file system without flock; newer ones leave a marker
    try:
        yield
    finally:
        lock.release()


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


def _run_of(
    stages: Mapping[str, dict[str, Any]], name: str, origin: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Return all that a stage depends on: its settings and those of the stages before it, and its origin."""
    names = list(stages)
    return {**{earlier: stages[earlier] for earlier in names[: names.index(name) + 1]}, **origin(name)}


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
            _check_interrupted(job.folder / "checkpoints" / name, _run_of(stages, name, origin), job.folder)
            later = [other for other in order[order.index(name) + 1 :] if records[other] is not None]
            if later:
                raise StageError(
                    f"Stage {name!r} is not done in {job.folder}, but stages that come after it are: they were not "
                    f"made from it. Remove {', '.join(str(job.folder / other) for other in later)} to make them from "
                    f"it, or leave {name!r} out of the recipe, or give another output."
                )
        else:
            changed = _changes(record.metrics.get("settings") or {}, settings)
            if not changed and record.metrics.get("run"):
                changed = _changes(record.metrics["run"], origin(name))
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


def _check_interrupted(checkpoints: Path, run: dict[str, Any], folder: Path) -> None:
    """Refuse to go on from checkpoints of another run; those without a `run.json` are older than it, and are taken."""
    file = checkpoints / RUN_FILE
    if not file.is_file() or get_last_checkpoint(str(checkpoints)) is None:
        return
    changed = _changes(json.loads(file.read_text(encoding="utf-8")), run)
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
                replace_file(checkpoints / RUN_FILE, json.dumps(_run_of(stages, name, origin), indent=1) + "\n")
            record = perform(name)
        if job.is_main:
            shutil.rmtree(checkpoints, ignore_errors=True)
            job.on_stage(name, record)
