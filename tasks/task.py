# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What every task is: rows to train on, an evaluation, a tokenizer, and numbers that a seed fixes.

A row has `input_ids` and `labels` as transformers reads them: the label at position t is what the model should
predict from the positions before t, -100 where nothing is asked. A label may differ from the token that stands in
its place; then the model is asked and not told the answer.
"""

import dataclasses
import inspect
import math
import random
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from loopergy.modeling.building_blocks import at_least_float32
from loopergy.training.data import IGNORE
from loopergy.training.fields import read_fields

Split = Literal["train", "validation", "test"]
SPLITS = ("train", "validation", "test")


def check_split(split: str) -> None:
    """Raise `ValueError` for a split that does not exist."""
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(map(repr, SPLITS))}, got {split!r}.")


def side_of(tokens: Sequence[int]) -> Split:
    """Return the split that a sequence belongs to: CRC-32 of its ids modulo 16; 0 is test, 1 validation, else train.

    The ids are taken as 32-bit integers, lowest byte first.

    The rule needs no list, so splits are disjoint whatever is drawn, in any order, from any seed.
    """
    remainder = zlib.crc32(struct.pack(f"<{len(tokens)}i", *tokens)) % 16
    return "test" if remainder == 0 else "validation" if remainder == 1 else "train"


@dataclass
class Accuracy:
    """Count right answers, in all and by group.

    Args:
        correct (`int`): Right answers.
        total (`int`): Answers.
        groups (`dict`): Group to (right, all); an answer may be in several groups.
        chance (`float`, defaults to 0.0): Expected accuracy of a uniform guess among the possible answers.
    """

    correct: int = 0
    total: int = 0
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    chance: float = 0.0

    def add(self, right: bool, groups: Iterable[str] = ()) -> None:
        """Count one answer."""
        self.correct += right
        self.total += 1
        for name in groups:
            before = self.groups.get(name, (0, 0))
            self.groups[name] = (before[0] + right, before[1] + 1)

    @property
    def accuracy(self) -> float:
        """Share of right answers; not a number if there was none."""
        return self.correct / self.total if self.total else math.nan

    @property
    def standard_error(self) -> float:
        r"""Binomial standard error \(\sqrt{p(1-p)/n}\), as if all answers were independent."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.total) if self.total else math.nan

    def metrics(self) -> dict[str, float]:
        """Return `accuracy`, as a trainer logs it."""
        return {"accuracy": self.accuracy}

    def lines(self) -> list[str]:
        """Return what to print: one line for all answers, one for each group."""
        all_answers = f"accuracy {self.accuracy:.4f} ± {self.standard_error:.4f}"
        rows = [f"{all_answers}   {self.correct} of {self.total}, chance {self.chance:.4f}"]
        width = max(map(len, self.groups), default=0)
        return rows + [f"  {name:<{width}}  {c / n:.4f}   {c} of {n}" for name, (c, n) in sorted(self.groups.items())]


@dataclass
class TokenLoss:
    """Mean cross-entropy over all asked tokens.

    Args:
        nats (`float`): Mean loss in nats a token.
        tokens (`int`): Tokens it is the mean of.
        floor (`float`, *optional*): Entropy of the source in nats a token: no model gets below it in the long run.
    """

    nats: float
    tokens: int
    floor: float | None = None

    @property
    def bits(self) -> float:
        """Loss in bits a token; bits a character for text by characters."""
        return self.nats / math.log(2)

    def metrics(self) -> dict[str, float]:
        """Return `loss`, as a trainer logs it."""
        return {"loss": self.nats}

    def lines(self) -> list[str]:
        """Return what to print."""
        floor = "" if self.floor is None else f", floor {self.floor:.4f}"
        return [f"loss {self.nats:.4f} nats, {self.bits:.4f} bits a token{floor}   {self.tokens} tokens"]


@dataclass
class Answer:
    """One thing that is asked: the tokens expected from position `start` on, and the groups it is counted in."""

    start: int
    tokens: tuple[int, ...]
    groups: tuple[str, ...] = ()


@dataclass
class Example:
    """A sequence with the answers that are asked in it."""

    input_ids: list[int]
    answers: list[Answer]

    def row(self) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `labels`, both of shape (length,), with labels at the answers alone."""
        labels = torch.full((len(self.input_ids),), IGNORE)
        for answer in self.answers:
            labels[answer.start : answer.start + len(answer.tokens)] = torch.tensor(answer.tokens)
        return {"input_ids": torch.tensor(self.input_ids), "labels": labels}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode without gradients, and back into its old mode."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def device_of(model: nn.Module) -> torch.device:
    """Return where the first parameter of a model is."""
    return next(model.parameters()).device


def token_loss(model: nn.Module, rows: Dataset, batch_size: int = 64, floor: float | None = None) -> TokenLoss:
    """Measure the mean loss of a model over the labels of rows of one length.

    Args:
        model (`nn.Module`): Returns `.logits` of shape (batch, length, vocabulary) for `input_ids`.
        rows (`Dataset`): Items with `input_ids` and `labels`.
        batch_size (`int`, defaults to 64): Rows a batch.
        floor (`float`, *optional*): Passed on.

    Returns:
        `TokenLoss`: The same value for every batch size, up to rounding.
    """
    loss, tokens, device = 0.0, 0, device_of(model)
    with evaluating(model):
        for batch in DataLoader(rows, batch_size):
            logits = at_least_float32(model(input_ids=batch["input_ids"].to(device)).logits)
            targets = batch["labels"][:, 1:].to(device)
            loss += float(nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="sum"))
            tokens += int((targets != IGNORE).sum())
    return TokenLoss(loss / max(tokens, 1), tokens, floor)


def answer_accuracy(
    model: nn.Module, examples: Sequence[Example], batch_size: int = 64, chance: float = 0.0
) -> Accuracy:
    """Ask a model all answers, one forward pass a batch, and count those whose every token is its first choice.

    For an answer that stands in its own input this is the same as greedy decoding giving exactly these tokens: up to
    the first wrong token, both see the same text.

    Args:
        model (`nn.Module`): Returns `.logits` for `input_ids`. Only the last logits are asked for if its `forward`
            has `logits_to_keep`.
        examples (sequence of `Example`): Of any lengths; those of one length share batches.
        batch_size (`int`, defaults to 64): Sequences a batch.
        chance (`float`, defaults to 0.0): Passed on.
    """
    score, device = Accuracy(chance=chance), device_of(model)
    can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
    with evaluating(model):
        for length, same in groupby(examples, key=lambda example: len(example.input_ids)):
            for batch in batched(list(same), batch_size):
                first = min(answer.start for example in batch for answer in example.answers) - 1
                ids = torch.tensor([example.input_ids for example in batch], device=device)
                options = {"logits_to_keep": length - first} if can_keep else {}
                choices = model(input_ids=ids, **options).logits[:, -(length - first) :].argmax(-1).tolist()
                for example, chosen in zip(batch, choices, strict=True):
                    for answer in example.answers:
                        place = answer.start - 1 - first
                        right = chosen[place : place + len(answer.tokens)] == list(answer.tokens)
                        score.add(right, answer.groups)
    return score


def batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield consecutive parts of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


class Task(ABC):
    """A task: a dataclass whose fields are its options.

    `rows` and `evaluate` give the same for the same options and seed, on every machine. Options of another type than
    the field's are refused.
    """

    name: ClassVar[str]

    def __post_init__(self):
        read_fields(self)

    @property
    def chance(self) -> float | None:
        """Accuracy of a uniform guess; None where accuracy is not measured."""
        return None

    @property
    def floor(self) -> float | None:
        """Entropy of the source in nats a token; None where it is not known."""
        return None

    @property
    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The vocabulary, to be saved beside a model."""

    @property
    @abstractmethod
    def row_length(self) -> int:
        """Tokens in a row."""

    @abstractmethod
    def rows(self, split: Split = "train", count: int = 1000, seed: int = 0) -> Dataset:
        """Return `count` rows with `input_ids` and `labels` of shape (row_length,)."""

    @abstractmethod
    def evaluate(
        self, model: nn.Module, split: Split = "test", count: int = 1000, batch_size: int = 64, seed: int = 0
    ) -> Accuracy | TokenLoss:
        """Measure a model on at most `count` examples of a split."""

    def loss(
        self, model: nn.Module, split: Split = "test", count: int = 1000, batch_size: int = 64, seed: int = 0
    ) -> TokenLoss:
        """Measure the mean loss over the labels of `count` rows."""
        return token_loss(model, self.rows(split, count, seed), batch_size, self.floor)

    def check_splits(self, seed: int = 0) -> None:
        """Raise `ValueError` for options with which no example of a split can be drawn, before hours are spent."""
        for split in ("train", "validation", "test"):
            self.rows(split, 1, seed)[0]

    def options(self) -> dict[str, Any]:
        """Return the options, as JSON can hold them."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.repr}  # type: ignore[arg-type]
        return {"task": self.name, **{k: list(v) if isinstance(v, tuple) else v for k, v in named.items()}}


class ExampleTask(Task):
    """A task whose examples are drawn one by one; subclasses say how one is drawn."""

    @abstractmethod
    def example(self, rng: random.Random) -> Example:
        """Draw one example."""

    def draw(self, split: Split, index: int, seed: int = 0) -> Example:
        """Return example number `index` of a split: the same for the same options, on every machine."""
        return self._drawn_from(self.example, split, f"{seed} {index}")

    def _drawn_from(self, make: Callable[[random.Random], Example], split: Split, key: str) -> Example:
        """Draw with `make` until an example belongs to the split; `key` names the stream of random numbers."""
        check_split(split)
        rng = random.Random(f"{self.name} {split} {key}")
        for _ in range(10_000):
            example = make(rng)
            if side_of(example.input_ids) == split:
                return example
        raise ValueError(
            f"Task {self.name!r} with options {self.options()} has too few sequences for {split!r}. Give longer ones, "
            "or more symbols."
        )

    def rows(self, split: Split = "train", count: int = 1000, seed: int = 0) -> Dataset:
        """Return `count` rows, drawn when they are asked for."""
        check_split(split)
        return _DrawnRows(self, split, count, seed)

    def evaluate(
        self, model: nn.Module, split: Split = "test", count: int = 1000, batch_size: int = 64, seed: int = 0
    ) -> Accuracy:
        """Measure the share of right answers in `count` examples, see `answer_accuracy`."""
        examples = [self.draw(split, index, seed) for index in range(count)]
        return answer_accuracy(model, examples, batch_size, self.chance or 0.0)


class _DrawnRows(Dataset):
    def __init__(self, task: ExampleTask, split: Split, count: int, seed: int):
        self.task, self.count, self.seed = task, count, seed
        self.split: Split = split

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.task.draw(self.split, index, self.seed).row()
