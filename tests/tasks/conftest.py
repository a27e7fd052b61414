# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Models that know the answers, and models that guess."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn


class Knows(nn.Module):
    """Choose the next token at every position by a function of the ids so far.

    Args:
        size: entries of the vocabulary.
        choose: maps a sequence of ids to the next id.
    """

    def __init__(self, size: int, choose: Callable[[list[int]], int]):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.size, self.choose = size, choose
        self.kept: set[int] = set()

    def forward(self, input_ids, logits_to_keep=0):
        self.kept.add(logits_to_keep)
        length = input_ids.shape[1]
        first = length - logits_to_keep if logits_to_keep else 0
        chosen = [[self.choose(row[: t + 1]) for t in range(first, length)] for row in input_ids.tolist()]
        return SimpleNamespace(logits=nn.functional.one_hot(torch.tensor(chosen), self.size) * 30.0)

    def generate(self, input_ids, attention_mask, max_new_tokens, eos_token_id, **options):
        rows = []
        for row in input_ids.tolist():
            new: list[int] = []
            while len(new) < max_new_tokens and eos_token_id not in new:
                new.append(self.choose(row + new))
            rows.append(row + new + [eos_token_id] * (max_new_tokens - len(new)))
        return torch.tensor(rows)


class Guesses(nn.Module):
    """Choose among the ids of a range at random."""

    def __init__(self, size: int, first: int, last: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.size, self.first, self.last = size, first, last

    def forward(self, input_ids):
        logits = torch.rand(*input_ids.shape, self.size)
        logits[..., self.first : self.last] += 2
        return SimpleNamespace(logits=logits)


@pytest.fixture(scope="session")
def knows():
    return Knows


@pytest.fixture(scope="session")
def guesses():
    return Guesses
