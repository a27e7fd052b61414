# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Compare models on long texts: perplexity by position in held-out documents, and needles by length.

    python benchmarks/study_long_context.py teacher=runs/ouro-10m/gate student=runs/hybrid/extend --length 2048

Positions are grouped in octaves. Only documents that no stage is trained on and that fill the length count, each read
from its beginning; every position group has the same documents, so the columns can be compared. Needles are hidden in
held-out text too, one question a text, at depths from the beginning to right before the question.
"""

import argparse
import math
import warnings
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from loopergy.distill.losses import linear_token_losses, shift_targets
from loopergy.distill.teacher import head_weight, loop_states, resolve_teacher, resolve_tokenizer
from loopergy.tasks.needle import Needle
from loopergy.training.data import in_split, load_documents


def octaves(length: int, first: int) -> list[tuple[int, int]]:
    """Cut the positions 1 to length into [0, first), [first, 2 first), ..., the last one ending at length."""
    edges = [0, first]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1], length))
    return list(pairwise(edges))


@torch.no_grad()
def loss_by_position(model: PreTrainedModel, texts: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of each position over the texts, `[length]`; the last one, which asks nothing, is 0."""
    total = torch.zeros(len(texts[0]), dtype=torch.float64)
    for ids in texts:
        state = loop_states(model, {"input_ids": ids[None]})[-1]
        total += linear_token_losses(state, head_weight(model), shift_targets(ids[None]))[0].double()
    return total / len(texts)


def long_documents(source: str, tokenizer: PreTrainedTokenizerBase, length: int, count: int) -> list[torch.Tensor]:
    """Return the beginnings of held-out documents that have at least `length` tokens."""
    documents: Any = load_documents(source, tokenizer)
    found = []
    for text in documents if isinstance(documents, list) else documents.iterate_from(0):
        if not in_split(text, "held_out"):
            continue
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= length:
            found.append(torch.tensor(ids[:length]))
        if len(found) == count:
            break
    if not found:
        raise SystemExit(f"{source} has no held-out document of {length} tokens")
    return found


def needle_accuracy(model: PreTrainedModel, task: Needle, length: int, count: int) -> float:
    task.lengths = [length]
    return task.evaluate(model, "test", count, 1).accuracy


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL", help="folders or `smollm2`; one tokenizer for all")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text")
    parser.add_argument("--first", type=int, default=256, help="end of the first group of positions")
    parser.add_argument("--texts", type=int, default=16, help="documents at most")
    parser.add_argument("--needles", type=int, default=40, help="texts with a needle at each length; 0 for none")
    parser.add_argument("--data", default="offline")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    named = dict(entry.split("=", 1) for entry in options.models)
    tokenizer = resolve_tokenizer(next(iter(named.values())))
    texts = long_documents(options.data, tokenizer, options.length, options.texts)
    spans = octaves(options.length, options.first)
    task = Needle(length=options.first, source=options.data, split="held_out", vocabulary=tokenizer)
    head = [f"{low + 1} to {high}" for low, high in spans]
    needles = [f"needle {high}" for _, high in spans] if options.needles else []
    print(f"perplexity by position, {len(texts)} texts of {options.length} tokens; share of needles found by length\n")
    print("| model | " + " | ".join([*head, *needles]) + " |\n|---|" + "---|" * (len(head) + len(needles)))
    for name, folder in named.items():
        model: Any = resolve_teacher(folder, dtype=torch.float32)
        losses = loss_by_position(model, texts)
        # The last position of a text asks nothing.
        cells = [f"{math.exp(losses[low : min(high, options.length - 1)].mean()):.2f}" for low, high in spans]
        cells += [f"{needle_accuracy(model, task, high, options.needles):.2f}" for _, high in spans if needles]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
