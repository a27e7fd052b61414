# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What all tasks share: rows, splits, counting, evaluation."""

import json
import math
import zlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loopergy.tasks.catalog import TASKS, make_task
from loopergy.tasks.new_model import new_model
from loopergy.tasks.task import Accuracy, Answer, Example, answer_accuracy, side_of, token_loss

SMALL = {
    "listops": {"train_samples": 300, "test_samples": 20, "length": 32},
    "characters": {"length": 32},
    "recall": {},
    "permutations": {"length": 5},
    "swap_recall": {"num_items": 4, "max_items": 8},
    "needle": {"length": 200, "depths": (0.0, 1.0)},
}
DRAWN = ("recall", "permutations", "swap_recall", "needle")


@pytest.fixture(scope="module")
def tasks():
    return {name: make_task(name, **SMALL[name]) for name in TASKS}


@pytest.mark.parametrize("name", TASKS)
def test_rows_have_one_length_and_labels_within_the_vocabulary(tasks, name):
    task = tasks[name]
    rows = task.rows("train", 5)
    assert len(rows) == 5
    for row in rows:
        assert row["input_ids"].shape == row["labels"].shape == (task.row_length,)
        assert row["input_ids"].min() >= 0
        assert row["input_ids"].max() < len(task.tokenizer)
        assert (row["labels"][1:] != -100).any()
        assert row["labels"].max() < len(task.tokenizer)


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_fixed_by_the_seed(tasks, name):
    task, again = tasks[name], make_task(name, **SMALL[name])

    def ids(rows):
        return torch.stack([row["input_ids"] for row in rows])

    assert torch.equal(ids(task.rows("train", 4, seed=1)), ids(again.rows("train", 4, seed=1)))
    assert torch.equal(ids(task.rows("train", 4, seed=1)), ids(task.rows("train", 9, seed=1))[:4])
    assert not torch.equal(ids(task.rows("train", 4, seed=1)), ids(task.rows("train", 4, seed=2)))
    assert not torch.equal(ids(task.rows("train", 4, seed=1)), ids(task.rows("validation", 4, seed=1)))


@pytest.mark.parametrize("name", DRAWN)
def test_every_sequence_is_on_the_side_that_its_ids_say(tasks, name):
    for split in ("train", "validation", "test"):
        for row in tasks[name].rows(split, 6, seed=3):
            assert side_of(row["input_ids"].tolist()) == split


def test_splits_of_a_small_space_are_disjoint_and_cover_it():
    task = make_task("permutations", length=2)
    seen = {split: {tuple(r["input_ids"].tolist()) for r in task.rows(split, 600)} for split in ("train", "test")}
    assert not seen["train"] & seen["test"]
    sides = [side_of((a, b, 6)) for a in range(6) for b in range(6)]
    assert len(seen["train"]) == sides.count("train")


def test_the_sides_never_change():
    """A model trained yesterday must not be tested on what it has seen: the rule is fixed for good."""
    assert [i for i in range(40) if side_of([i]) == "test"] == [6, 30, 37]
    assert [i for i in range(40) if side_of([i]) == "validation"] == [13, 21]
    assert zlib.crc32(b"\x06\x00\x00\x00") % 16 == 0


def test_one_sixteenth_is_test_and_one_sixteenth_validation():
    sides = [side_of((i, i + 1)) for i in range(8000)]
    assert sides.count("test") / 8000 == pytest.approx(1 / 16, abs=0.01)
    assert sides.count("validation") / 8000 == pytest.approx(1 / 16, abs=0.01)


@pytest.mark.parametrize("name", TASKS)
def test_options_make_the_same_task_again_and_fit_into_json(tasks, name):
    options = json.loads(json.dumps(tasks[name].options()))
    again = make_task(options.pop("task"), **options)
    rows = zip(again.rows("test", 3), tasks[name].rows("test", 3), strict=True)
    assert all(torch.equal(ours["input_ids"], theirs["input_ids"]) for ours, theirs in rows)


@pytest.mark.parametrize("name", TASKS)
def test_the_tokenizer_reads_what_it_writes(tasks, name, tmp_path):
    from transformers import AutoTokenizer

    task = tasks[name]
    tokenizer = task.tokenizer
    ids = task.rows("train", 1)[0]["input_ids"].tolist()
    assert tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.decode(ids) == tokenizer.decode(ids)


def test_a_split_that_does_not_exist_is_refused(tasks):
    for task in tasks.values():
        with pytest.raises(ValueError, match="'train', 'validation', 'test'"):
            task.rows("dev", 1)


def test_a_space_too_small_for_a_split_is_named():
    lonely = make_task("permutations", length=1)
    sides = {side_of((a, 6)) for a in range(6)}
    missing = next(split for split in ("test", "validation", "train") if split not in sides)
    with pytest.raises(ValueError, match="too few sequences"):
        lonely.draw(missing, 0)


def test_accuracy_counts_and_groups():
    score = Accuracy(chance=0.5)
    for right, groups in ((True, ("a", "b")), (False, ("a",)), (True, ())):
        score.add(right, groups)
    assert (score.correct, score.total, score.groups) == (2, 3, {"a": (1, 2), "b": (1, 1)})
    assert score.standard_error == pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 3))
    assert score.lines()[0].startswith("accuracy 0.6667 ± 0.2722   2 of 3, chance 0.5")
    assert math.isnan(Accuracy().accuracy)


class Table(nn.Module):
    """Logits by the token seen: a bigram model in float64."""

    def __init__(self, keep: bool):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 7, dtype=torch.float64))
        if keep:
            self.forward = self.cut  # type: ignore[method-assign]

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.table[input_ids])

    def cut(self, input_ids, logits_to_keep=0):
        return SimpleNamespace(logits=self.table[input_ids][:, -logits_to_keep:])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_an_answer_is_right_when_greedy_decoding_gives_it(keep, batch_size):
    model = Table(keep)
    examples, expected = [], 0
    for number in range(40):
        length = 6 if number < 20 else 9
        ids = torch.randint(7, (length,)).tolist()
        start, size = (number % 4) + 1, 1 + number % 2
        if number % 3:  # what the model would write itself
            for place in range(start, start + size):
                ids[place] = int(model.table[ids[place - 1]].argmax())
        written = ids[:start]
        while len(written) < start + size:
            written.append(int(model.table[written[-1]].argmax()))
        expected += written[start:] == ids[start : start + size]
        examples.append(Example(ids, [Answer(start, tuple(ids[start : start + size]))]))
    score = answer_accuracy(model, examples, batch_size)
    assert (score.correct, score.total) == (expected, 40)
    assert 0 < expected < 40


def test_token_loss_is_the_mean_over_labels_whatever_the_batch_and_keeps_the_mode():
    model = Table(False).train()
    ids = torch.randint(7, (10, 6))
    labels = torch.where(torch.rand(10, 6) < 0.5, torch.randint(7, (10, 6)), -100)
    rows = [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]
    log_p = model.table.detach().log_softmax(-1)
    terms = [-log_p[ids[n, t - 1], labels[n, t]] for n in range(10) for t in range(1, 6) if labels[n, t] != -100]
    for batch_size in (1, 4, 64):
        result = token_loss(model, rows, batch_size)
        assert result.nats == pytest.approx(float(sum(terms)) / len(terms), abs=1e-12)
        assert result.tokens == len(terms)
    assert result.bits == pytest.approx(result.nats / math.log(2))
    assert model.training


@pytest.mark.parametrize("name", DRAWN)
def test_the_labels_are_what_a_causal_model_is_trained_on(tasks, name):
    """The loss that a transformers model computes from a row is the loss of the task."""
    task = tasks[name]
    model = new_model("llama", task).eval()
    row = {key: value[None] for key, value in task.rows("train", 1)[0].items()}
    with torch.no_grad():
        theirs = float(model(**row).loss)
    assert task.loss(model, "train", 1).nats == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("recall", {"num_pairs": "abc"}, "`num_pairs` must be a whole number, got 'abc'"),
        ("recall", {"length": 32.5}, "`length` must be a whole number, got 32.5"),
        ("recall", {"vocabulary": 5}, "`vocabulary` must be a PreTrainedTokenizerBase, got 5"),
        ("needle", {"lengths": 256}, "`lengths` must be a list of whole numbers, got 256"),
        ("needle", {"depths": 0.5}, "`depths` must be a list of numbers, got 0.5"),
        ("needle", {"digits": 1.5}, "`digits` must be a whole number, got 1.5"),
        ("needle", {"split": "held"}, "`split` must be 'train' or 'held_out' or 'all', got 'held'"),
        ("needle", {"depths": [0.5, float("nan")]}, "`depths` must be a list of numbers"),
        ("swap_recall", {"num_items": "abc"}, "`num_items` must be a whole number, got 'abc'"),
        ("permutations", {"group": 3}, "`group` must be a text, got 3"),
        ("listops", {"train_samples": "abc"}, "`train_samples` must be a whole number, got 'abc'"),
        ("listops", {"seed": "abc"}, "`seed` must be a whole number, got 'abc'"),
        ("listops", {"operators": "max_10"}, "`operators` must be a list of texts, got 'max_10'"),
        ("characters", {"source": 5}, "`source` must be a text, got 5"),
        ("characters", {"max_characters": -1}, "`max_characters` must be at least 1, got -1"),
    ],
)
def test_options_of_another_type_are_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_task(name, **options)


def test_a_whole_number_may_be_written_with_a_point():
    assert make_task("recall", length=64.0).row_length == 64
    assert isinstance(make_task("recall", length=64.0).length, int)
