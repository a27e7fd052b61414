# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Multi-query associative recall: pairs of key and value first, later each key again, and its value is asked.

    k7 v3 k2 v9 . . k2 v9 . k7 v3 .

All keys of a sequence differ; values are drawn freely. After the pairs come the queries, in random order and with
fillers at random places, so that a model must keep every pair for a while. Only the values of the queries are asked.
A fixed-size state has to hold `num_pairs` associations, which is where mixers differ.

Source: Zoology, arXiv 2312.04927, section 4, with each answer written after its query.
"""

import random
from dataclasses import dataclass, field
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from loopergy.tasks.task import Answer, Example, ExampleTask
from loopergy.tasks.vocabulary import word_tokenizer
from loopergy.training.checks import check_least


@dataclass
class Recall(ExampleTask):
    """Multi-query associative recall: give the value that was paired with a key.

    Args:
        num_pairs (`int`, defaults to 8): Pairs to remember.
        num_queries (`int`, *optional*): Questions, each about another pair until all were asked; as many as pairs by
            default.
        length (`int`, defaults to 64): Tokens in a sequence, fillers included.
        num_keys, num_values (`int`, default to 64): Keys and values in the vocabulary.
        vocabulary (`PreTrainedTokenizerBase`, *optional*): The model's tokenizer: keys and values are then words of
            its own, each one token. Its own small vocabulary by default.

    Raises:
        ValueError: More pairs than keys, no query, a sequence too short for both, or a tokenizer with too few words.
    """

    num_pairs: int = 8
    num_queries: int | None = None
    length: int = 64
    num_keys: int = 64
    num_values: int = 64
    vocabulary: PreTrainedTokenizerBase | None = field(default=None, repr=False)

    name = "recall"

    def __post_init__(self):
        super().__post_init__()
        self.num_queries = self.num_pairs if self.num_queries is None else self.num_queries
        if not 1 <= self.num_pairs <= self.num_keys:
            raise ValueError(f"`num_pairs` must be from 1 to `num_keys` = {self.num_keys}, got {self.num_pairs}.")
        check_least("", self, num_queries=1, num_values=2)
        needed = 2 * (self.num_pairs + self.num_queries)
        if self.length < needed:
            raise ValueError(f"`length` must be at least {needed} for these pairs and queries, got {self.length}.")
        if self.vocabulary is not None and len(self._words) < self.num_keys + self.num_values:
            raise ValueError(
                f"The tokenizer has {len(self._words)} words of three letters and more that are one token, but "
                f"{self.num_keys} keys and {self.num_values} values are asked for."
            )

    @cached_property
    def _words(self) -> list[int]:
        """The tokens of the model's tokenizer that are a word with a space before it, in the order of their ids."""
        vocabulary = self.vocabulary.get_vocab() if self.vocabulary is not None else {}
        return sorted(
            index
            for word, index in vocabulary.items()
            if word[:1] in "Ġ▁" and len(word) > 3 and word[1:].isascii() and word[1:].isalpha()
        )

    @cached_property
    def _ids(self) -> list[int]:
        """Token ids of the filler, the keys, then the values."""
        names = self.num_keys + self.num_values
        if self.vocabulary is None:
            return list(range(1 + names))
        return [self.vocabulary.convert_tokens_to_ids("."), *self._words[:names]]  # type: ignore[list-item]

    @property
    def chance(self) -> float:
        """A guess among all values."""
        return 1 / self.num_values

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, or the filler `.`, then the keys `k0`, `k1`, ..., then the values `v0`, `v1`, ..."""
        if self.vocabulary is not None:
            return self.vocabulary
        keys, values = (f"k{i}" for i in range(self.num_keys)), (f"v{i}" for i in range(self.num_values))
        return word_tokenizer([".", *keys, *values])

    @property
    def row_length(self) -> int:
        """Tokens in a sequence."""
        return self.length

    def example(self, rng: random.Random) -> Example:
        """Draw one sequence; its answers are grouped by how many tokens ago the pair last was, in powers of two."""
        keys = [self._ids[1 + key] for key in rng.sample(range(self.num_keys), self.num_pairs)]
        values = [self._ids[1 + self.num_keys + rng.randrange(self.num_values)] for _ in keys]
        ids = [token for pair in zip(keys, values, strict=True) for token in pair]
        rounds, rest = divmod(self.num_queries or self.num_pairs, self.num_pairs)
        sizes = [self.num_pairs] * rounds + [rest]
        asked = [pair for size in sizes for pair in rng.sample(range(self.num_pairs), size)]
        fillers = self.length - len(ids) - 2 * len(asked)
        # One of all ways to put the queries among the fillers, each equally likely.
        places = set(rng.sample(range(fillers + len(asked)), len(asked)))
        answers, queue, last = [], iter(asked), [2 * pair for pair in range(self.num_pairs)]
        for place in range(fillers + len(asked)):
            if place not in places:
                ids.append(self._ids[0])
                continue
            pair = next(queue)
            ago, last[pair] = (len(ids) - last[pair] - 1).bit_length(), len(ids)
            ids += [keys[pair], values[pair]]
            answers.append(Answer(len(ids) - 1, (values[pair],), (f"up to {2**ago:>5} tokens ago",)))
        return Example(ids, answers)
