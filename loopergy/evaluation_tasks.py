# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Find the tasks that `evaluate` is asked for: lm-eval's own by name, its YAML files, and ours from JSONL files."""

import difflib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loopergy.training.data import jsonl_records

_ACCURACY = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
_KINDS: dict[tuple[str, ...], dict[str, Any]] = {
    ("context", "choices", "answer"): {
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [*_ACCURACY, {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}],
    },
    ("context", "continuation"): {
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": lambda row: f" {row['continuation']}",
        "metric_list": [*_ACCURACY, {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
    },
    ("text",): {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
            {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
        ],
    },
}


def load_tasks(names: Sequence[str], include_path: str | Path | None = None) -> tuple[list[Any], dict[str, Any], Any]:
    """Load tasks with their data.

    Returns:
        `tuple`: lm-eval's tasks and groups; for each task from a JSONL file its `file` and `sha256`; the task manager.

    Raises:
        ValueError: For no or an unknown name, or a file that is no task.
        OSError: For data that cannot be fetched.
    """
    from lm_eval.tasks import TaskManager

    specs, files, registered = [], {}, []
    for name in names:
        path = Path(name)
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.suffix == ".jsonl" else ():
            config = task_of_file(file)
            specs.append(config)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            files[config["task"]] = {"file": file.name, "sha256": digest}
        if path.suffix == ".yaml":
            if not path.is_file():
                raise ValueError(f"there is no task file {name}")
            specs.append(name)
        elif not path.is_dir() and path.suffix != ".jsonl":
            registered.append(name)
    manager = TaskManager(include_path=include_path, include_defaults=bool(registered))  # type: ignore[arg-type]
    for name in registered:
        found = manager.match_tasks([name])
        if not found:
            near = difflib.get_close_matches(name, manager.all_tasks, n=4, cutoff=0.7)
            hint = f"did you mean {', '.join(near)}?" if near else "`lm-eval ls tasks` lists all names"
            raise ValueError(f"lm-eval knows no task {name!r}, and it is no file: {hint}")
        specs += found
    if not specs:
        raise ValueError("no tasks: give names of lm-eval, .yaml or .jsonl files, or a folder of .jsonl files")
    built: list[Any] = []
    for spec in specs:
        try:
            with _quiet("lm_eval.api.task"):
                loaded: Any = manager.load([spec])
        except OSError as error:
            name = spec if isinstance(spec, str) else spec["task"]
            raise OSError(
                f"the data of task {name!r} cannot be had ({error}). lm-eval fetches it from the Hub: go online once, "
                "or measure on a local file"
            ) from error
        inside = {task.task_name for group in loaded["groups"].values() for task in group.get_all_tasks()}
        nested = {name for members in loaded["group_map"].values() for name in members}
        built += [group for name, group in loaded["groups"].items() if name not in nested]
        built += [task for name, task in loaded["tasks"].items() if name not in inside]
    return built, files, manager


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Hold back the warnings of one logger: lm-eval explains an option of its own whenever data come from memory."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def task_of_file(file: Path) -> dict[str, Any]:
    """Return lm-eval's config of a JSONL file; its name is the file's without ending.

    Raises:
        ValueError: For a file that is missing or empty, is no JSONL, or has rows of no known kind; with the line.
    """
    import datasets

    if not file.is_file():
        raise ValueError(f"there is no task file {file}")
    rows, kind = [], None
    for where, row in jsonl_records(file):
        kind = kind or next((fields for fields in _KINDS if isinstance(row, dict) and set(fields) <= set(row)), None)
        if kind is None or not isinstance(row, dict) or not set(kind) <= set(row):
            known = "; ".join(", ".join(fields) for fields in _KINDS)
            raise ValueError(f"{where}: a row has the fields {known}; all rows of a file the same")
        _check_row(row, kind, where)
        rows.append({name: row[name] for name in kind})
    if kind is None:
        raise ValueError(f"{file} has no rows")
    data = datasets.Dataset.from_list(rows)
    return {
        "task": file.stem,
        "custom_dataset": lambda **kwargs: {"test": data},
        "test_split": "test",
        "metadata": {"version": 1.0},
        **_KINDS[kind],
    }


def _check_row(row: dict[str, Any], kind: tuple[str, ...], where: str) -> None:
    """Raise `ValueError` for a field that cannot be measured."""
    for name in ("text", "context", "continuation"):
        if name in kind and not isinstance(row[name], str):
            raise ValueError(f"{where}: `{name}` must be a text, got {row[name]!r}")
        if name in kind and name != "context" and not row[name]:
            raise ValueError(f"{where}: `{name}` is empty, so there is nothing to measure: leave the row out")
    if "choices" not in kind:
        return
    choices, answer = row["choices"], row["answer"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"{where}: `choices` must be a list of at least two texts, got {choices!r}")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError(
            f"{where}: `answer` is the index of the right choice, a whole number from 0 to {len(choices) - 1}; got "
            f"{answer!r}"
        )
