# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What recipes of every kind share: reading them, refusing unknown keys, running stages that are not done yet."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from loopergy.distill.stage import StageError, StageRecord

LOCK_FILE = ".running"


@dataclass
class EvaluateSettings:
    """The `evaluate` part of a recipe: the held-out text after every stage."""

    num_tokens: int = field(default=32768, metadata={"help": "Held-out tokens; 0 skips the evaluation."})
    length: int = field(default=512, metadata={"help": "Tokens in a row of them."})
    batch_size: int = field(default=1, metadata={"help": "Rows in a batch of them."})


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
    """Raise `ValueError` for keys that are not known; the text lists those that are."""
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown keys {unknown}. Known are: {', '.join(sorted(known))}.")


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


def run_stages(job: Any, stages: Mapping[str, dict[str, Any]], perform: Callable[[str], StageRecord]) -> None:
    """Run the stages of a job that its folder does not have yet, and tell of each.

    Args:
        job ([`RecipeRun`] or alike): With `folder`, `processes`, `is_main` and `on_stage`.
        stages (mapping): Name of a stage, in order, to the settings that its record holds.
        perform (callable): Runs a stage.

    Raises:
        StageError: A stage that was finished with other settings, or a folder that another run is writing to.
    """
    with _alone(job):
        _run_stages(job, stages, perform)


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


def _run_stages(job: Any, stages: Mapping[str, dict[str, Any]], perform: Callable[[str], StageRecord]) -> None:
    for name, settings in stages.items():
        record = StageRecord.load(job.folder / name)
        # As they are read back: JSON turns the layers of a mapping into text.
        asked = json.loads(json.dumps(settings))
        changed = {} if record is None else differences(record.metrics.get("settings") or {}, asked)
        if changed:
            texts = [f"{key} was {there!r}, the recipe has {here!r}" for key, (there, here) in changed.items()]
            raise StageError(
                f"Stage {name!r} in {job.folder} was finished with other settings: {'; '.join(texts)}. Remove that "
                "folder and those of later stages, or give another output."
            )
        # None begins a stage before all have seen what is done.
        job.processes.wait_for_everyone()
        if record is None:
            record = perform(name)
        if job.is_main:
            shutil.rmtree(job.folder / "checkpoints" / name, ignore_errors=True)
            job.on_stage(name, record)
