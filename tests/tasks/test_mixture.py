# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Text with tasks in it: the shares, what is asked, and rows that go on where a run stopped."""

import itertools

import pytest
import torch

from loopergy.tasks.mixture import TaskShare, TextAndTasks, accuracies, task_batches, task_row
from loopergy.tasks.needle import Needle
from loopergy.tasks.recall import Recall
from loopergy.training.data import PackedDataset, is_held_out

LENGTH = 200


@pytest.fixture
def mixture(topics, topics_tokenizer):
    def make(seed=0, recall=0.3, needle=0.2):
        tasks = [
            TaskShare(Recall(num_pairs=2, length=48, num_keys=9, num_values=9, vocabulary=topics_tokenizer), recall),
            TaskShare(Needle(length=180, split="train", vocabulary=topics_tokenizer), needle, whole_rows=True),
        ]
        return TextAndTasks(PackedDataset(topics, topics_tokenizer, LENGTH, seed=seed), tasks, seed)

    return make


def take(data, count):
    return list(itertools.islice(iter(data), count))


def kind(item, tokenizer):
    """Tell what a row holds, by what it asks."""
    asked = (item["labels"] != -100).sum().item()
    if asked == 8:  # four examples with two queries each
        return "recall"
    return "needle" if "The secret number of" in tokenizer.decode(item["input_ids"][:180]) else "text"


def test_rows_have_their_shares_and_ask_what_they_should(mixture, topics_tokenizer):
    rows = take(mixture(), 300)
    kinds = [kind(row, topics_tokenizer) for row in rows]
    assert kinds.count("recall") / 300 == pytest.approx(0.3, abs=0.06)
    assert kinds.count("needle") / 300 == pytest.approx(0.2, abs=0.06)
    for row, which in zip(rows, kinds, strict=True):
        assert {name: value.shape for name, value in row.items()} == dict.fromkeys(
            ("input_ids", "labels", "position_ids"), (LENGTH,)
        )
        asked = row["labels"] != -100
        assert torch.equal(row["labels"][asked], row["input_ids"][asked])
        assert not asked[row["position_ids"] == 0].any()
        if which == "recall":
            starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
            assert starts == [0, 48, 96, 144, 192]
            assert not asked[192:].any()
        if which == "needle":
            assert asked.nonzero().flatten().tolist() == list(range(1, 180))


def test_examples_differ_between_rows_and_seeds_and_stay_on_the_training_side(mixture, topics_tokenizer):
    first, again, other = take(mixture(), 60), take(mixture(), 60), take(mixture(seed=1), 60)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))
    texts = [tuple(row["input_ids"].tolist()) for row in first]
    assert len(set(texts)) == 60
    assert not set(texts) & {tuple(row["input_ids"].tolist()) for row in other}
    assert [kind(row, topics_tokenizer) for row in first] != [kind(row, topics_tokenizer) for row in other]
    recalls = [
        row["input_ids"][i : i + 48] for row in first if kind(row, topics_tokenizer) == "recall" for i in (0, 48)
    ]
    assert len({tuple(ids.tolist()) for ids in recalls}) == len(recalls)


@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_a_resumed_mixture_gives_the_very_next_rows(mixture, rows):
    data = mixture()
    whole = take(data, 60)
    state = data.state_dict(rows)
    resumed = mixture()
    resumed.load_state_dict(state)
    assert state["rows"] == rows
    for a, b in zip(take(resumed, 20), whole[rows : rows + 20], strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    # Before the first row, as when all rows so far were tasks.
    resumed.load_state_dict(mixture().state_dict(0))
    assert torch.equal(take(resumed, 1)[0]["input_ids"], whole[0]["input_ids"])


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_share_the_rows_of_tasks_and_of_text(mixture, topics_tokenizer, workers):
    """The rows of tasks, and which rows are tasks, are those of one process."""
    loader = torch.utils.data.DataLoader(mixture(), batch_size=None, num_workers=workers)
    rows, alone = list(itertools.islice(loader, 48)), take(mixture(), 48)
    assert len({tuple(row["input_ids"].tolist()) for row in rows}) == 48
    for row, expected in zip(rows, alone, strict=True):
        which = kind(expected, topics_tokenizer)
        assert kind(row, topics_tokenizer) == which
        assert which == "text" or torch.equal(row["input_ids"], expected["input_ids"])


def test_mixtures_that_cannot_be_are_refused(mixture, topics, topics_tokenizer):
    with pytest.raises(ValueError, match="sum to less than 1"):
        mixture(recall=0.8)
    with pytest.raises(ValueError, match="above 0"):
        mixture(recall=0.0)
    task = Recall(length=LENGTH + 1, num_keys=9, num_values=9, vocabulary=topics_tokenizer)
    with pytest.raises(ValueError, match=r"'recall' has 201 tokens, a row 200"):
        TextAndTasks(PackedDataset(topics, topics_tokenizer, LENGTH), [TaskShare(task, 0.1)])
    text = PackedDataset(topics, topics_tokenizer, LENGTH, documents="contiguous")
    with pytest.raises(ValueError, match="separate"):
        TextAndTasks(text, [])
    with pytest.raises(ValueError, match="`rows` is needed"):
        mixture().state_dict()


def test_a_haystack_of_the_training_side_holds_no_held_out_text(topics, topics_tokenizer):
    held_out = [text for text in topics if is_held_out(text)]
    hay = Needle(split="train", vocabulary=topics_tokenizer)._text
    everything = Needle(vocabulary=topics_tokenizer)._text
    assert all(text[:200] in everything for text in held_out)
    assert not any(text[:200] in hay for text in held_out)


def test_batches_of_tasks_share_their_rows_out_and_hold_no_text(mixture):
    tasks = mixture(recall=0.6, needle=0.2).tasks
    batches = task_batches(tasks, length=LENGTH, num_tokens=8 * LENGTH, batch_size=3, seed=5)
    assert [len(batch["input_ids"]) for batch in batches] == [3, 3, 2]
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    expected = [
        *(task_row(tasks[0], LENGTH, row, 5) for row in range(6)),
        *(task_row(tasks[1], LENGTH, row, 5) for row in range(2)),
    ]
    for index, row in enumerate(expected):
        assert all(torch.equal(rows[name][index], value) for name, value in row.items())
    few = task_batches(tasks, length=LENGTH, num_tokens=1)
    assert len(few) == 2, "every task is asked"


def test_several_entries_of_one_task_are_measured_each(mixture, knows, topics_tokenizer):
    recall, needle = mixture().tasks
    measured = accuracies(knows(len(topics_tokenizer), lambda ids: 0), [recall, needle, recall], count=3)
    assert list(measured) == ["recall 1", "needle", "recall 2"]


def test_a_checkpoint_counts_only_the_rows_since_the_last_one(mixture, monkeypatch):
    data = mixture()
    take(data, 30)
    wanted = [data.state_dict(row) for row in (10, 25, 12)]
    fresh, counted, choice = mixture(), [], TextAndTasks._choice
    take(fresh, 30)
    monkeypatch.setattr(TextAndTasks, "_choice", lambda self, row: counted.append(row) or choice(self, row))
    assert [fresh.state_dict(row) for row in (10, 25)] == wanted[:2]
    assert counted == list(range(25))
    assert fresh.state_dict(12) == wanted[2], "an earlier row is counted anew"
    counted.clear()
    resumed = mixture()
    resumed.load_state_dict(wanted[0])
    take(resumed, 15)
    counted.clear()
    assert resumed.state_dict(25) == wanted[1]
    assert counted == list(range(10, 25))
