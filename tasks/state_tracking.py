# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""State tracking: follow things that are moved about, which a single pass of a plain attention layer cannot do.

**Permutations.** Moves of the symmetric group on n things, one a token; after each move the arrangement is asked:

    input    213 132 213 =          asked after each move    213 231 321

The arrangement starts as 123. A move m puts into place i what was in place m(i). The model is never told an
arrangement, only asked: the labels are not in the input. S3 is solvable, S5 is not, so that composing S5 is complete
for the parallel class NC1; a linear recurrence needs negative eigenvalues for it (`allow_neg_eigval`).

**Swaps.** n places hold values, m swaps follow, then each place is asked:

    a1 v5 a2 v0 a3 v9 swap a1 a3 swap a3 a2 a2 v5 a1 v9 a3 v0

With m = n growing as 8, 16, ..., 256 this is a curriculum of state tracking and recall together.

Sources: Liu et al., arXiv 2210.10749; Merrill et al., arXiv 2404.08819; Grazzi et al., arXiv 2411.12537; the
curriculum follows LT2, arXiv 2605.20670.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from transformers import PreTrainedTokenizerFast

from loopergy.tasks.task import Answer, Example, ExampleTask
from loopergy.tasks.vocabulary import word_tokenizer
from loopergy.training.checks import check_least

GROUPS = {"S3": 3, "S4": 4, "S5": 5}
STAGES = (8, 16, 32, 64, 128, 256)


def rearrange(arrangement: Sequence[int], move: Sequence[int]) -> tuple[int, ...]:
    """Return the arrangement after a move: place i gets what was in place `move[i]`."""
    return tuple(arrangement[place] for place in move)


@dataclass
class Permutations(ExampleTask):
    """Compose permutations of three, four or five things, and name the result after every move.

    Args:
        group (`str`, defaults to `"S3"`): `"S3"`, `"S4"` or `"S5"`.
        moves (`str`, defaults to `"all"`): `"all"` permutations as moves, or `"swaps"`, which exchange two things.
        length (`int`, defaults to 16): Moves in a sequence; a row has one token more.

    Raises:
        ValueError: An unknown group or kind of moves, or no move.
    """

    group: str = "S3"
    moves: Literal["all", "swaps"] = "all"
    length: int = 16

    name = "permutations"

    def __post_init__(self):
        super().__post_init__()
        if self.group not in GROUPS:
            raise ValueError(f"`group` must be one of {', '.join(GROUPS)}, got {self.group!r}.")
        check_least("", self, length=1)

    @cached_property
    def elements(self) -> list[tuple[int, ...]]:
        """All permutations, counted from 0, in the order of their token ids."""
        return list(itertools.permutations(range(GROUPS[self.group])))

    @cached_property
    def _number(self) -> dict[tuple[int, ...], int]:
        return {element: number for number, element in enumerate(self.elements)}

    @cached_property
    def _moves(self) -> list[int]:
        """Ids of the moves: those that leave all but two things in place, or all."""
        n = GROUPS[self.group]
        swaps = [i for i, e in enumerate(self.elements) if sum(e[k] == k for k in range(n)) == n - 2]
        return swaps if self.moves == "swaps" else list(range(len(self.elements)))

    @property
    def chance(self) -> float:
        """A guess among all permutations."""
        return 1 / len(self.elements)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a permutation, written with digits from 1, and `=` at the end."""
        names = ["".join(str(1 + place) for place in element) for element in self.elements]
        return word_tokenizer([*names, "="])

    @property
    def row_length(self) -> int:
        """Moves and the `=`."""
        return self.length + 1

    def example(self, rng: random.Random) -> Example:
        """Draw one sequence; its answers are grouped by the number of moves before them, in powers of two."""
        moves = rng.choices(self._moves, k=self.length)
        state, answers = self.elements[0], []
        for place, move in enumerate(moves, start=1):
            state = rearrange(state, self.elements[move])
            group = f"up to {2 ** (place - 1).bit_length():>4} moves"
            answers.append(Answer(place, (self._number[state],), (group,)))
        return Example([*moves, len(self.elements)], answers)


@dataclass
class SwapRecall(ExampleTask):
    """Values in places, swaps of two places, then: what is where? The curriculum doubles both numbers.

    Args:
        num_items (`int`, defaults to 8): Places and, unless given, swaps.
        num_swaps (`int`, *optional*): Swaps; as many as places by default.
        max_items (`int`, defaults to 256): Places and values in the vocabulary, so that all stages share a model.

    Raises:
        ValueError: Fewer than two places, more than the vocabulary has, or a negative number of swaps.
    """

    num_items: int = 8
    num_swaps: int | None = None
    max_items: int = 256

    name = "swap_recall"

    def __post_init__(self):
        super().__post_init__()
        if not 2 <= self.num_items <= self.max_items:
            raise ValueError(f"`num_items` must be from 2 to `max_items` = {self.max_items}, got {self.num_items}.")
        check_least("", self, num_swaps=0)

    @property
    def chance(self) -> float:
        """A guess among the values that are there."""
        return 1 / self.num_items

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """`swap`, then the places `a0`, `a1`, ..., then the values `v0`, `v1`, ..."""
        places, values = (f"a{i}" for i in range(self.max_items)), (f"v{i}" for i in range(self.max_items))
        return word_tokenizer(["swap", *places, *values])

    @property
    def row_length(self) -> int:
        """Places with values, swaps, and places with values again."""
        return 4 * self.num_items + 3 * self._swaps

    @property
    def _swaps(self) -> int:
        return self.num_items if self.num_swaps is None else self.num_swaps

    def stages(self, sizes: Sequence[int] = STAGES) -> list["SwapRecall"]:
        """Return this task with as many places and swaps as each size says; sizes beyond `max_items` are left out."""
        return [replace(self, num_items=size, num_swaps=None) for size in sizes if size <= self.max_items]

    def example(self, rng: random.Random) -> Example:
        """Draw one sequence; its answers are grouped by how often the place was part of a swap."""
        places = rng.sample(range(self.max_items), self.num_items)
        held = dict(zip(places, rng.sample(range(self.max_items), self.num_items), strict=True))
        touched = dict.fromkeys(places, 0)
        place_id, value_id = 1, 1 + self.max_items
        ids = [token for place, value in held.items() for token in (place_id + place, value_id + value)]
        for _ in range(self._swaps):
            one, other = rng.sample(places, 2)
            held[one], held[other] = held[other], held[one]
            touched[one] += 1
            touched[other] += 1
            ids += [0, place_id + one, place_id + other]
        answers = []
        for place in rng.sample(places, self.num_items):
            ids += [place_id + place, value_id + held[place]]
            group = f"in {min(touched[place], 4)}{' or more' if touched[place] > 3 else ''} swaps"
            answers.append(Answer(len(ids) - 1, (ids[-1],), (group,)))
        return Example(ids, answers)
