# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Text with some tasks in it, row by row, for a model that shall read and also remember.

Which rows are tasks is drawn from the seed and the number of the row alone, so a run goes on at any row.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from loopergy.tasks.catalog import TASKS, make_task, takes_vocabulary, task_options
from loopergy.tasks.task import ExampleTask
from loopergy.training.data import IGNORE, PackedDataset
from loopergy.training.fields import check_keys, field_names, read_part, read_value


@dataclass
class TaskShare:
    """A task in a mixture.

    Args:
        task (`ExampleTask`): With the vocabulary of the text's tokenizer.
        share (`float`): Share of all rows, between 0 and 1.
        whole_rows (`bool`, defaults to `False`): Ask every token of an example and not its answers alone: right where
            the rest of an example is text.
    """

    task: ExampleTask
    share: float
    whole_rows: bool = False


_OF_THE_SHARE = tuple(field_names(TaskShare))


def check_entries(entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ValueError` for entries of a recipe's `tasks` that `task_shares` would not take."""
    for entry in read_value("`tasks`", entries, list[dict[str, Any]]):
        if "task" not in entry or "share" not in entry:
            raise ValueError(f"tasks: every entry needs `task` and `share`, got {sorted(entry)}.")
        name = read_value("tasks: `task`", entry["task"], str)
        where = f"tasks, {name}"
        check_keys(where, entry, [*_OF_THE_SHARE, *task_options(name)])
        if not takes_vocabulary(name):
            others = ", ".join(filter(takes_vocabulary, TASKS))
            raise ValueError(f"tasks: {name!r} has a vocabulary of its own, not the text's; give {others}.")
        read_part(where, entry, TASKS[name], _OF_THE_SHARE)
        read_part(where, {key: entry[key] for key in ("share", "whole_rows") if key in entry}, TaskShare)
        if not entry["share"] > 0:
            raise ValueError(f"{where}: `share` must be above 0, got {entry['share']}.")


def task_shares(entries: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[TaskShare]:
    """Make the tasks that a recipe names.

    Args:
        entries (sequence of mappings): `task`, `share`, optionally `whole_rows`, and options of the task.
        tokenizer (`PreTrainedTokenizerBase`): The model's; the tasks are written with it.

    Raises:
        ValueError: An unknown key, a value of another type, or a task that has its own vocabulary alone.
    """
    check_entries(entries)
    found = []
    for entry in entries:
        options = {name: value for name, value in entry.items() if name not in _OF_THE_SHARE}
        task: Any = make_task(entry["task"], vocabulary=tokenizer, **options)
        found.append(TaskShare(task, entry["share"], entry.get("whole_rows", False)))
    return found


def check_shares(tasks: Sequence[TaskShare], length: int) -> None:
    """Raise `ValueError` for shares that leave no text, or examples longer than a row of `length` tokens."""
    shares = [entry.share for entry in tasks]
    if any(share <= 0 for share in shares) or sum(shares) >= 1:
        raise ValueError(f"Shares must be above 0 and sum to less than 1, got {shares}: the rest is text.")
    check_lengths(tasks, length)


def check_lengths(tasks: Sequence[TaskShare], length: int) -> None:
    """Raise `ValueError` for examples longer than a row of `length` tokens, or of which there are too few."""
    for entry in tasks:
        if entry.task.row_length > length:
            raise ValueError(
                f"An example of {entry.task.name!r} has {entry.task.row_length} tokens, a row {length}: give the task "
                "a shorter `length`, or longer rows."
            )
        entry.task.check_splits()


def accuracies(model: PreTrainedModel, tasks: Sequence[TaskShare], count: int = 200) -> dict[str, float]:
    """Return the accuracy on `count` unseen examples of each task, by its name; several of one are numbered from 1."""
    names = [entry.task.name for entry in tasks]
    labels = [
        f"{name} {names[:place].count(name) + 1}" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]
    return {
        label: entry.task.evaluate(model, "test", count, 16).accuracy
        for label, entry in zip(labels, tasks, strict=True)
    }


def task_row(entry: TaskShare, length: int, row: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a row of as many examples as fit, each a document of its own, and pads that ask nothing.

    Args:
        entry (`TaskShare`): The task.
        length (`int`): Tokens of the row.
        row, seed (`int`): Which examples of its training side.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids`, `labels` and `position_ids`, all `[length]`.
    """
    size = entry.task.row_length
    count = length // size
    examples = [entry.task.draw("train", row * count + index, seed).row() for index in range(count)]
    parts: dict[str, list[torch.Tensor]] = {
        "input_ids": [example["input_ids"] for example in examples],
        "labels": [example["input_ids" if entry.whole_rows else "labels"] for example in examples],
        "position_ids": [torch.arange(size)] * count,
    }
    item = {name: torch.cat(values) for name, values in parts.items()}
    pads = torch.arange(length - size * count)
    fill = {"input_ids": torch.zeros_like(pads), "labels": torch.full_like(pads, IGNORE), "position_ids": pads}
    item = {name: torch.cat([value, fill[name]]) for name, value in item.items()}
    # The first token of a document is no target.
    item["labels"] = item["labels"].masked_fill(item["position_ids"] == 0, IGNORE)
    return item


def task_batches(
    tasks: Sequence[TaskShare], *, length: int, num_tokens: int, batch_size: int = 1, seed: int = 0
) -> list[dict[str, torch.Tensor]]:
    """Return fixed batches of tasks and no text, for layer selection; rows are shared out by the tasks' shares.

    Args:
        tasks (sequence of `TaskShare`): What to draw from.
        length (`int`): Tokens a row.
        num_tokens (`int`): Tokens wanted, rounded up to whole rows and to one row a task.
        batch_size (`int`, defaults to 1): Rows a batch.
        seed (`int`, defaults to 0): Which examples.

    Returns:
        `list[dict[str, torch.Tensor]]`: The same list for the same arguments.
    """
    wanted = -(-num_tokens // length)
    total = sum(entry.share for entry in tasks)
    rows: list[dict[str, torch.Tensor]] = []
    for entry in tasks:
        count = max(1, round(wanted * entry.share / total))
        rows += [task_row(entry, length, row, seed) for row in range(count)]
    cuts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    return [{name: torch.stack([row[name] for row in cut]) for name in cut[0]} for cut in cuts]


class TextAndTasks(IterableDataset):
    """Interleave packed text with rows of tasks; the same rows for the same arguments, from any row on.

    Rows of tasks are those of [`task_row`]. Items have `input_ids`, `labels` and `position_ids`, all `[length]`.

    Args:
        text (`PackedDataset`): Its documents must be kept separate.
        tasks (sequence of `TaskShare`): Their shares sum to less than 1.
        seed (`int`, defaults to 0): Which rows are tasks, and which examples.

    Raises:
        ValueError: Shares outside 0 to 1, examples longer than a row, or contiguous documents.
    """

    def __init__(self, text: PackedDataset, tasks: Sequence[TaskShare], seed: int = 0):
        check_shares(tasks, text.length)
        if not text.separate:
            raise ValueError("The text must keep documents separate (`documents='separate'`), as the examples are.")
        self.text, self.tasks, self.seed = text, list(tasks), seed
        # The row to begin at; and a row with the number of text rows before it, so that they are counted once.
        self._rows, self._counted = 0, (0, 0)

    @property
    def texts_hash(self) -> str:
        """SHA-256 of the text's documents."""
        return self.text.texts_hash

    def _choice(self, row: int) -> TaskShare | None:
        drawn = random.Random(f"{self.seed} {row}").random()
        for entry in self.tasks:
            if drawn < entry.share:
                return entry
            drawn -= entry.share
        return None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        text, worker = iter(self.text), get_worker_info()
        # Workers of a data loader take turns at the rows; each has its own documents.
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for row in itertools.count(self._rows + first, step):
            entry = self._choice(row)
            if entry is not None:
                yield task_row(entry, self.text.length, row, self.seed)
                continue
            item = next(text, None)
            if item is None:
                return
            yield item

    def state_dict(self, rows: int | None = None) -> dict[str, Any]:
        """Return where the row after the first `rows` rows begins, as [`PackedDataset`] does.

        Args:
            rows (`int`): Rows used so far, those before a resumed start included.
        """
        if rows is None:
            raise ValueError("`rows` is needed: how many rows of the mixture were used.")
        before, of_text = self._counted if self._counted[0] <= rows else (0, 0)
        of_text += sum(self._choice(row) is None for row in range(before, rows))
        self._counted = rows, of_text
        return {"rows": rows, "text": self.text.state_dict(of_text)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration begin at the row that `state_dict` named."""
        self.text.load_state_dict(state["text"])
        self._rows = int(state["rows"])
        self._counted = self._rows, int(state["text"]["rows"])
