# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""All tasks by name."""

import dataclasses
from typing import Any

from loopergy.tasks.characters import Characters
from loopergy.tasks.listops import ListOps
from loopergy.tasks.needle import Needle
from loopergy.tasks.recall import Recall
from loopergy.tasks.state_tracking import Permutations, SwapRecall
from loopergy.tasks.task import Task
from loopergy.training.fields import field_names

TASKS: dict[str, type[Task]] = {
    kind.name: kind for kind in (ListOps, Characters, Recall, Permutations, SwapRecall, Needle)
}


def task_options(name: str) -> dict[str, Any]:
    """Return the options of a task with their defaults.

    Raises:
        ValueError: An unknown task.
    """
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}; there are {', '.join(TASKS)}.")
    return {f.name: f.default for f in dataclasses.fields(TASKS[name]) if f.repr}  # type: ignore[arg-type]


def takes_vocabulary(name: str) -> bool:
    """Say whether a task can be written with the tokenizer of any model."""
    return "vocabulary" in field_names(TASKS[name])


def make_task(name: str, **options: Any) -> Task:
    """Return a task by its name.

    Args:
        name (`str`): `"listops"`, `"characters"`, `"recall"`, `"permutations"`, `"swap_recall"` or `"needle"`.
        **options: Fields of the task's class.

    Raises:
        ValueError: An unknown task or option, or a value that it does not take.
    """
    known = task_options(name)
    unknown = sorted(set(options) - set(field_names(TASKS[name])))
    if unknown:
        raise ValueError(f"Task {name!r} has no option {', '.join(map(repr, unknown))}; it has {', '.join(known)}.")
    return TASKS[name](**options)
