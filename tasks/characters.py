# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Text by characters: the vocabulary is the text's own, the first 90 % train and the rest is held out.

With tiny Shakespeare (1,115,394 characters, 65 different) this is the split of nanoGPT and of NRGPT's experiments:
1,003,854 characters to train on and 111,540 held out. Nothing is fetched: name a text file, a data set, or take the
reference manual that every Python carries.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from loopergy.tasks.task import Split, Task, TokenLoss, check_split, token_loss
from loopergy.tasks.text import Windows, read_text
from loopergy.tasks.vocabulary import character_tokenizer
from loopergy.training.checks import check_least


@dataclass
class Characters(Task):
    """Next character of a text: Shakespeare from a file, any data set, or Python's own manual.

    Args:
        source (`str`, defaults to `"offline:prose"`): What `loopergy.tasks.text.read_text` reads.
        length (`int`, defaults to 256): Characters in a row.
        max_characters (`int`, defaults to 10,000,000): Read no more than that.

    Raises:
        ValueError: A number that is too small.
    """

    source: str = "offline:prose"
    length: int = 256
    max_characters: int = 10_000_000

    name = "characters"

    def __post_init__(self):
        super().__post_init__()
        check_least("", self, length=2, max_characters=1)

    @cached_property
    def text(self) -> str:
        """The whole text."""
        return read_text(self.source, self.max_characters)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a character that occurs, in the order of code points."""
        return character_tokenizer(self.text)

    @property
    def row_length(self) -> int:
        """Characters in a row."""
        return self.length

    @cached_property
    def _ids(self) -> torch.Tensor:
        number = {character: i for i, character in enumerate(sorted(set(self.text)))}
        return torch.tensor([number[character] for character in self.text])

    def stream(self, split: Split) -> torch.Tensor:
        """Return the ids of a split; `"validation"` and `"test"` are the same last tenth."""
        check_split(split)
        boundary = int(0.9 * len(self._ids))
        return self._ids[:boundary] if split == "train" else self._ids[boundary:]

    def rows(self, split: Split = "train", count: int = 1000, seed: int = 0) -> Windows:
        """Return `count` windows at random places."""
        return Windows.drawn(self.stream(split), self.length, count, seed)

    def evaluate(
        self, model: nn.Module, split: Split = "test", count: int = 1000, batch_size: int = 64, seed: int = 0
    ) -> TokenLoss:
        """Measure the loss on at most `count` windows that follow each other; the seed changes nothing."""
        return token_loss(model, Windows.in_order(self.stream(split), self.length, count), batch_size)
