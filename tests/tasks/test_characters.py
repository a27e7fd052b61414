# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Text by characters."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loopergy.tasks.characters import Characters


@pytest.fixture
def play(tmp_path):
    file = tmp_path / "play.txt"
    file.write_text("".join(f"{n}: to be, or not\n\nto bé\t{n * n}\n" for n in range(60)), encoding="utf-8")
    return file


def test_the_first_nine_tenths_train_and_the_rest_is_held_out(play):
    task, text = Characters(str(play)), play.read_text("utf-8")
    border = int(0.9 * len(text))
    alphabet = sorted(set(text))
    assert task.stream("train").tolist() == [alphabet.index(c) for c in text[:border]]
    assert task.stream("test").tolist() == [alphabet.index(c) for c in text[border:]]
    assert torch.equal(task.stream("validation"), task.stream("test"))


def test_the_ids_are_those_of_the_tokenizer(play):
    task = Characters(str(play))
    text = play.read_text("utf-8")
    assert task.tokenizer(text)["input_ids"] == torch.cat([task.stream("train"), task.stream("test")]).tolist()
    assert task.tokenizer.decode(task.stream("train")) == text[: int(0.9 * len(text))]


def test_pythons_own_manual_needs_no_file(topics):
    task = Characters()
    assert task.text == "\n".join(topics)
    assert len(task.rows("train", 3)[0]["input_ids"]) == 256


class Bigrams(nn.Module):
    """Predict a character from the one before."""

    def __init__(self, size):
        super().__init__()
        self.table = nn.Parameter(torch.randn(size, size, dtype=torch.float64))

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.table[input_ids])


def test_the_loss_is_the_mean_over_the_held_out_text(play):
    task = Characters(str(play), length=16)
    model = Bigrams(len(task.tokenizer))
    ids = task.stream("test")
    covered = (len(ids) - 1) // 15 * 15
    log_p = model.table.detach().log_softmax(-1)
    expected = -log_p[ids[:covered], ids[1 : covered + 1]].mean()
    loss = task.evaluate(model)
    assert loss.nats == pytest.approx(float(expected), abs=1e-12)
    assert (loss.tokens, loss.floor) == (covered, None)
    assert task.evaluate(model, count=3).tokens == 45


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        _ = Characters("nothing.txt").text
