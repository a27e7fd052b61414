# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""ListOps with written-out steps: nested operations on digits, solved one operation at a time.

A sample is an expression, then `=` and the expression with its left-most solvable operation replaced by the value,
until one digit is left, then `<eos>`:

    median_10 ( 8 7 median_10 ( 9 0 ) ) = median_10 ( 8 7 9 ) = 8 <eos>

Operations take two or three arguments and return their result modulo 10. `median_10` is the upper median, `nadd_10`
the alternating sum a - b + c. The vocabulary of 20 words has ids in the order of `VOCABULARY`.

**Drawing.** The root is a uniform operation. An operation draws its number of arguments, uniform in {2, 3}, and then
each argument in turn: with probability 1/4, above the deepest level, another operation, else a uniform digit.

**Held out.** 50 ordered triples of different digits are drawn first. A sample whose chain holds one of them as three
neighbouring tokens is a test sample; all others are training samples. So no test sample can be solved by memory of
its innermost lists alone.

With its default options this reproduces the published data of NRGPT token by token: 50,000 training samples of
791,016 tokens, 2,000 test samples. The training stream is split 90/10 into training and validation.

Source: ListOps, arXiv 1804.06028; this variant: NRGPT, arXiv 2512.16762, experiments on nested operations.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from loopergy.tasks.task import Accuracy, Split, Task, batched, check_split, device_of, evaluating
from loopergy.tasks.text import Windows
from loopergy.tasks.vocabulary import word_tokenizer
from loopergy.training.checks import check_least

OPERATIONS: dict[str, Callable[[Sequence[int]], int]] = {
    "min_10": min,
    "max_10": max,
    "median_10": lambda values: sorted(values)[len(values) // 2],
    "add_10": lambda values: sum(values) % 10,
    "prod_10": lambda values: math.prod(values) % 10,
    "nadd_10": lambda values: (sum(values[::2]) - sum(values[1::2])) % 10,
}
VOCABULARY = ("<eos>", "(", ")", "=", *OPERATIONS, *"0123456789")
_ID = {word: number for number, word in enumerate(VOCABULARY)}
EOS, EQUALS = _ID["<eos>"], _ID["="]
NEST_PROBABILITY = 0.25

Node = int | tuple[str, list["Node"]]


def words(node: Node) -> list[str]:
    """Write an expression as words."""
    if isinstance(node, int):
        return [str(node)]
    return [node[0], "(", *(word for child in node[1] for word in words(child)), ")"]


def solve_one(node: tuple[str, list[Node]]) -> Node:
    """Replace the left-most operation whose arguments are all digits by its value."""
    name, children = node
    for place, child in enumerate(children):
        if not isinstance(child, int):
            return (name, [*children[:place], solve_one(child), *children[place + 1 :]])
    return OPERATIONS[name]([child for child in children if isinstance(child, int)])


def written_out(node: Node) -> list[str]:
    """Write an expression, all steps of its solution, and `<eos>`."""
    text = words(node)
    while not isinstance(node, int):
        node = solve_one(node)
        text += ["=", *words(node)]
    return [*text, "<eos>"]


class Sampler:
    """Draw samples; one stream of random numbers from the seed on, held-out triples first.

    Args:
        operators (sequence of `str`): Operations in use, in this order.
        seed (`int`): Seed.
        max_depth (`int`): Levels of operations.
        held_out (`int`): Triples to draw; fewer if some are drawn twice.
    """

    def __init__(self, operators: Sequence[str], seed: int, max_depth: int, held_out: int):
        self.operators, self.max_depth = list(operators), max_depth
        self.rng = random.Random(seed)
        self.triples = {tuple(str(digit) for digit in self.rng.sample(range(10), 3)) for _ in range(held_out)}

    def expression(self, depth: int = 1, operators: Sequence[str] | None = None) -> Node:
        """Draw an expression whose root is at level `depth`."""
        name, count = self.rng.choice(operators or self.operators), self.rng.randint(2, 3)
        children: list[Node] = []
        for _ in range(count):
            # The number is drawn on the deepest level too: the published stream has it.
            nested = self.rng.random() < NEST_PROBABILITY and depth < self.max_depth
            children.append(self.expression(depth + 1, operators) if nested else self.rng.randint(0, 9))
        return (name, children)

    def is_held_out(self, text: Sequence[str]) -> bool:
        """Say whether a chain holds a held-out triple."""
        return any(triple in self.triples for triple in zip(text, text[1:], text[2:], strict=False))

    def samples(self, train: int, test: int, operators: Sequence[str] | None = None) -> tuple[list, list]:
        """Draw until there are `train` training chains and `test` test chains, as ids; return both lists."""
        found: dict[bool, list[list[int]]] = {False: [], True: []}
        wanted = {False: train, True: test}
        while any(len(found[side]) < wanted[side] for side in wanted):
            text = written_out(self.expression(operators=operators))
            side = self.is_held_out(text)
            if len(found[side]) < wanted[side]:
                found[side].append([_ID[word] for word in text])
        return found[False], found[True]


@dataclass
class ListOps(Task):
    """Nested operations on digits with written-out steps, the data of NRGPT.

    Args:
        length (`int`, defaults to 128): Tokens in a training window of the stream of samples.
        operators (sequence of `str`): Operations in use; the published three by default.
        seed (`int`, defaults to 42): Seed of the samples; 42 gives the published ones.
        train_samples, test_samples (`int`): Samples to draw.
        max_depth (`int`, defaults to 2): Levels of operations.
        held_out_triples (`int`, defaults to 50): Triples drawn for the test side.

    Raises:
        ValueError: An unknown operation, or a number that is too small.
    """

    length: int = 128
    operators: Sequence[str] = ("max_10", "median_10", "add_10")
    seed: int = 42
    train_samples: int = 50_000
    test_samples: int = 2_000
    max_depth: int = 2
    held_out_triples: int = 50

    name = "listops"

    def __post_init__(self):
        super().__post_init__()
        unknown = [name for name in self.operators if name not in OPERATIONS]
        if unknown or not self.operators:
            raise ValueError(f"`operators` must be some of {', '.join(OPERATIONS)}; got {list(self.operators)}.")
        check_least("", self, length=2, train_samples=1, test_samples=1, max_depth=1, held_out_triples=1)

    @property
    def chance(self) -> float:
        """A guess among the digits."""
        return 0.1

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One token a word, the 20 of `VOCABULARY`; `<eos>` ends a sample and pads."""
        return word_tokenizer(VOCABULARY, eos_token="<eos>")

    @property
    def row_length(self) -> int:
        """Tokens in a window."""
        return self.length

    @cached_property
    def _drawn(self) -> dict[str, Any]:
        sampler = Sampler(self.operators, self.seed, self.max_depth, self.held_out_triples)
        train, test = sampler.samples(self.train_samples, self.test_samples)
        return {"sampler": sampler, "train": train, "test": test}

    @property
    def held_out(self) -> set[tuple[str, str, str]]:
        """The held-out triples of digits."""
        return self._drawn["sampler"].triples

    @property
    def train_chains(self) -> list[list[int]]:
        """The training samples as ids, each closed by `<eos>`."""
        return self._drawn["train"]

    @property
    def test_chains(self) -> list[list[int]]:
        """The test samples, all operations mixed."""
        return self._drawn["test"]

    @cached_property
    def single_test_chains(self) -> dict[str, list[list[int]]]:
        """Operation to test samples that use no other, drawn after the mixed ones."""
        return {name: self._drawn["sampler"].samples(0, self.test_samples, [name])[1] for name in self.operators}

    @cached_property
    def floor(self) -> float:
        """Entropy of the source in nats a token: entropy of a drawn expression over the mean length of a sample.

        All that follows the first `=` is fixed by what is before it, so it adds no entropy. That held-out samples do
        not occur is left out of account. With the default options 0.773.
        """
        choices = math.log(len(self.operators)) + math.log(2)
        nest, entropy = NEST_PROBABILITY, choices + 2.5 * math.log(10)  # of an operation on the deepest level
        coin = -nest * math.log(nest) - (1 - nest) * math.log(1 - nest)
        for _ in range(self.max_depth - 1):
            entropy = choices + 2.5 * (coin + nest * entropy + (1 - nest) * math.log(10))
        return entropy * len(self.train_chains) / sum(map(len, self.train_chains))

    def stream(self, split: Split) -> torch.Tensor:
        """Return the samples of a split, one after the other, of shape (tokens,)."""
        check_split(split)
        return self._streams[split]

    @cached_property
    def _streams(self) -> dict[str, torch.Tensor]:
        train, test = (torch.tensor(list(chain.from_iterable(part))) for part in (self.train_chains, self.test_chains))
        boundary = int(0.9 * len(train))
        return {"train": train[:boundary], "validation": train[boundary:], "test": test}

    @cached_property
    def _chains(self) -> dict[str, list[list[int]]]:
        """Whole samples by split: a training sample counts where its first token is."""
        starts = accumulate((len(sample) for sample in self.train_chains), initial=0)
        boundary = len(self._streams["train"])
        seen = sum(start < boundary for start in starts)
        return {"train": self.train_chains[:seen], "validation": self.train_chains[seen:], "test": self.test_chains}

    def rows(self, split: Split = "train", count: int = 1000, seed: int = 0) -> Windows:
        """Return `count` windows at random places of the stream; a window may begin within a sample."""
        return Windows.drawn(self.stream(split), self.length, count, seed)

    def evaluate(
        self,
        model: nn.Module,
        split: Split = "test",
        count: int = 1000,
        batch_size: int = 64,
        seed: int = 0,
        *,
        operator: str | None = None,
        sample: bool = False,
        max_new_tokens: int | None = None,
    ) -> Accuracy:
        """Let a model continue expressions from their first `=`, and compare the last digit.

        The answer is the token before the first `<eos>`, or the last token if there is none. The steps in between may
        be any. Prompts of one length share batches, so nothing is padded.

        Args:
            model (`nn.Module`): Has `generate`.
            split (`str`, defaults to `"test"`): Whose samples.
            count (`int`, defaults to 1000): The first so many samples; there are 2,000 by default.
            batch_size (`int`, defaults to 64): Prompts at once.
            seed (`int`, defaults to 0): Seed of the sampling.
            operator (`str`, *optional*): Take the test samples that use this operation alone.
            sample (`bool`, defaults to `False`): Sample at temperature 1 instead of taking the best token.
            max_new_tokens (`int`, *optional*): Budget; that of the longest solution by default. The published
                evaluation has 22, too few for 2.5 % of the samples.

        Returns:
            `Accuracy`: Grouped by the operation at the root and by the number of operations.

        Raises:
            ValueError: An operation without test samples.
        """
        samples = self._samples(split, operator)[:count]
        solutions = [len(sample) - sample.index(EQUALS) - 1 for sample in samples]
        options = {"max_new_tokens": max_new_tokens or max(solutions), "eos_token_id": EOS, "pad_token_id": EOS}
        options |= {"do_sample": sample, **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {})}
        score, device = Accuracy(chance=self.chance), device_of(model)
        by_length: dict[int, list[list[int]]] = {}
        for chain_ids in samples:
            by_length.setdefault(chain_ids.index(EQUALS) + 1, []).append(chain_ids)
        with evaluating(model), torch.random.fork_rng(enabled=sample):
            if sample:
                torch.manual_seed(seed)
            for length, same in sorted(by_length.items()):
                for batch in batched(same, batch_size):
                    prompts = torch.tensor([chain_ids[:length] for chain_ids in batch], device=device)
                    mask = torch.ones_like(prompts)
                    written = model.generate(prompts, attention_mask=mask, **options)  # type: ignore[operator]
                    for chain_ids, ids in zip(batch, written.tolist(), strict=True):
                        score.add(answer_of(ids) == chain_ids[-2], _groups(chain_ids))
        return score

    def _samples(self, split: Split, operator: str | None) -> list[list[int]]:
        check_split(split)
        if operator is None:
            return self._chains[split]
        if split != "test" or operator not in self.single_test_chains:
            raise ValueError(
                f"`operator` must be one of {', '.join(self.single_test_chains)}, with split 'test'; "
                f"got {operator!r} with {split!r}."
            )
        return self.single_test_chains[operator]


def answer_of(ids: Sequence[int]) -> int:
    """Return the token before the first `<eos>`, or the last one if there is none."""
    end = ids.index(EOS) if EOS in ids else len(ids)
    return ids[end - 1]


def _groups(sample: list[int]) -> tuple[str, str]:
    return VOCABULARY[sample[0]], f"operations: {sample.count(EQUALS)}"
