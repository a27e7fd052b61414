# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Needle in a haystack: one sentence with a number, somewhere in a long text, and the question at its end.

    ... of the class.
    The secret number of harbour is 48213.
    If an operand ... The secret number of harbour is 48213

The haystack is any text, cut at a random place and repeated if it is short. Depth 0 puts the needle at the beginning,
1 right before the question. Lengths are counted in tokens of the given tokenizer, question and answer included; with
a tokenizer of characters, in characters. An answer is right when every token of the number is.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn
from transformers import PreTrainedTokenizerBase

from loopergy.tasks.task import Accuracy, Answer, Example, ExampleTask, Split, answer_accuracy
from loopergy.tasks.text import read_text
from loopergy.tasks.vocabulary import character_tokenizer, encode
from loopergy.training.checks import check_least
from loopergy.training.data import Split as TextSplit

NEEDLE = "\nThe secret number of {word} is {number}.\n"
QUESTION = "\nThe secret number of {word} is"
ANSWER = " {number}"
_WORDS = (
    "anchor basket bridge candle canyon carpet castle cherry cotton desert falcon forest garden harbour helmet island "
    "jacket kettle ladder lantern marble meadow mirror needle orchard palace pepper pillow rabbit saddle summit tunnel"
)
WORDS = tuple(_WORDS.split())


@dataclass
class Needle(ExampleTask):
    """Find one sentence in a long text, by depth and length.

    Args:
        length (`int`, defaults to 1024): Tokens in a row to train on; its depth is drawn.
        lengths (sequence of `int`, *optional*): Lengths to evaluate at; `length` alone by default.
        depths (sequence of `float`): Depths to evaluate at.
        source (`str`, defaults to `"offline:prose"`): The haystack, what `loopergy.tasks.text.read_text` reads.
        split (`str`, defaults to `"all"`): `"train"` or `"held_out"` for the haystack's documents of that side alone.
        digits (`int`, defaults to 5): Digits of the number.
        vocabulary (`PreTrainedTokenizerBase`, *optional*): The model's tokenizer; one token a character by default.

    Raises:
        ValueError: A depth outside 0 to 1, a length that does not hold needle and question, a tokenizer that does not
            know their characters, or a haystack without text.
    """

    length: int = 1024
    lengths: Sequence[int] | None = None
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    source: str = "offline:prose"
    split: TextSplit = "all"
    digits: int = 5
    vocabulary: PreTrainedTokenizerBase | None = field(default=None, repr=False)

    name = "needle"

    def __post_init__(self):
        super().__post_init__()
        if not self.depths or any(not 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"`depths` must be numbers from 0 to 1, got {list(self.depths)}.")
        check_least("", self, digits=1)
        unknown = [word for word in ("The secret number of is", *WORDS, "0123456789") if not self._can_write(word)]
        if unknown:
            raise ValueError(f"The tokenizer cannot write the needle: its vocabulary lacks characters of {unknown}.")
        longest = max(sum(map(len, self._parts(word, "9" * self.digits))) for word in WORDS)
        shortest = min(self.length, *(self.lengths or (self.length,)))
        if shortest <= longest:
            raise ValueError(
                f"Lengths must be above {longest}, the tokens of needle, question and answer; got {shortest}."
            )

    @property
    def chance(self) -> float:
        """A guess among all numbers of so many digits."""
        return 1 / (9 * 10 ** (self.digits - 1))

    @cached_property
    def _text(self) -> str:
        return read_text(self.source, 2_000_000, self.split)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, or one token a character of the haystack and the needle."""
        if self.vocabulary is not None:
            return self.vocabulary
        return character_tokenizer(self._text + NEEDLE + QUESTION + "".join(WORDS) + "0123456789")

    @cached_property
    def _haystack(self) -> list[int]:
        return self._encode(self._text)

    @property
    def row_length(self) -> int:
        """Tokens in a row to train on."""
        return self.length

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _can_write(self, text: str) -> bool:
        tokenizer = self.tokenizer  # outside the `try`: its own one reads the source, whose errors must surface
        try:
            ids = encode(tokenizer, f" {text} ", add_special_tokens=False, verbose=False)["input_ids"]
        except ValueError:  # a tokenizer without an unknown token
            return False
        return text in tokenizer.decode(ids)

    def _parts(self, word: str, number: str) -> tuple[list[int], list[int], list[int]]:
        """Return the tokens of needle, question and answer."""
        needle, question, answer = (text.format(word=word, number=number) for text in (NEEDLE, QUESTION, ANSWER))
        return self._encode(needle), self._encode(question), self._encode(answer)

    def example(self, rng: random.Random) -> Example:
        """Draw a row to train on, with a uniform depth."""
        return self.hide(rng, self.length, rng.random())

    def hide(self, rng: random.Random, length: int, depth: float) -> Example:
        """Draw a text of `length` tokens with the needle at a depth; its answer is grouped by both."""
        number = str(rng.randrange(10 ** (self.digits - 1), 10**self.digits))
        needle, question, answer = self._parts(rng.choice(WORDS), number)
        around = length - len(needle) - len(question) - len(answer)
        start, place = rng.randrange(len(self._haystack)), round(depth * around)
        hay = [self._haystack[(start + i) % len(self._haystack)] for i in range(around)]
        ids = [*hay[:place], *needle, *hay[place:], *question, *answer]
        group = f"{length:>7} tokens, depth {depth:4.0%}"
        return Example(ids, [Answer(length - len(answer), tuple(answer), (group,))])

    def evaluate(
        self, model: nn.Module, split: Split = "test", count: int = 1000, batch_size: int = 64, seed: int = 0
    ) -> Accuracy:
        """Measure the share of numbers found; `count` texts, spread evenly over all lengths and depths.

        Where `count` is no multiple of their number, some have one text more; with fewer texts, some have none.
        """
        grid = list(itertools.product(self.lengths or (self.length,), self.depths))
        shares = [(place + 1) * count // len(grid) - place * count // len(grid) for place in range(len(grid))]
        examples = [
            self._drawn_from(lambda rng: self.hide(rng, length, depth), split, f"{seed} {length} {depth} {index}")  # noqa: B023
            for (length, depth), share in zip(grid, shares, strict=True)
            for index in range(share)
        ]
        return answer_accuracy(model, examples, batch_size, self.chance)
