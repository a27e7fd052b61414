# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure a student and tell the story of its making: `report.json` for programs, `report.html` for people.

The HTML file stands alone: pictures are inline SVG, there is no script and nothing to fetch.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from loopergy.conversion.folders import replace_file
from loopergy.distill.losses import linear_cross_entropy, linear_kl
from loopergy.distill.select import Selection
from loopergy.distill.stage import batch_targets
from loopergy.distill.teacher import head_weight, loop_states
from loopergy.training.data import IGNORE

Batches = Sequence[Mapping[str, torch.Tensor]]


@dataclass
class HeldOut:
    """Held-out batches with the teacher's side of the comparison computed once.

    Args:
        batches (sequence of mappings): `input_ids` and, optionally, `labels`, `attention_mask`, `position_ids`.
        teacher_states (`list[torch.Tensor]`): Last normed state of every batch, on the CPU.
        teacher_perplexity (`float`): Of the last loop.
        tokens (`int`): Positions that have a target.
    """

    batches: Batches
    teacher_states: list[torch.Tensor]
    teacher_perplexity: float
    tokens: int

    @classmethod
    @torch.no_grad()
    def of(cls, teacher: PreTrainedModel, batches: Batches) -> "HeldOut":
        """Run the teacher over the batches.

        Raises:
            ValueError: No position has a target.
        """
        states, loss, tokens = [], 0.0, 0
        for batch in batches:
            batch = {name: value.to(teacher.device) for name, value in batch.items()}
            targets = batch_targets(batch)
            state = loop_states(teacher, batch)[-1]
            loss += float(linear_cross_entropy(state, head_weight(teacher), targets, num_items=1))
            tokens += int((targets != IGNORE).sum())
            states.append(state.cpu())
        if tokens == 0:
            raise ValueError("The held-out batches have no position with a target: pass longer rows, or other labels.")
        return cls(batches, states, math.exp(loss / tokens), tokens)


@torch.no_grad()
def evaluate_heldout(
    student: PreTrainedModel, teacher: PreTrainedModel, batches: Batches | HeldOut
) -> dict[str, float]:
    """Measure a student against its teacher on text that neither was trained on here.

    Both on the last loop, averaged over all positions that have a target, in chunks: no full logits exist.

    Args:
        student (`PreTrainedModel`): The student.
        teacher (`PreTrainedModel`): Its teacher.
        batches (`HeldOut`, or sequence of mappings): What to measure on; `HeldOut` saves the teacher's passes.

    Returns:
        `dict`: `kl` (nats a token, teacher to student), `perplexity` of the student, `teacher_perplexity`, `tokens`.
    """
    held_out = batches if isinstance(batches, HeldOut) else HeldOut.of(teacher, batches)
    training = student.training
    student.eval()
    kl, loss, head = 0.0, 0.0, head_weight(student)
    for batch, teacher_state in zip(held_out.batches, held_out.teacher_states, strict=True):
        batch = {name: value.to(student.device) for name, value in batch.items()}
        targets = batch_targets(batch)
        state = loop_states(student, batch)[-1]
        wanted = teacher_state.to(student.device)
        kl += float(linear_kl(state, head, wanted, head_weight(teacher), targets != IGNORE, num_items=1))
        loss += float(linear_cross_entropy(state, head, targets, num_items=1))
    student.train(training)
    return {
        "kl": kl / held_out.tokens,
        "perplexity": math.exp(loss / held_out.tokens),
        "teacher_perplexity": held_out.teacher_perplexity,
        "tokens": held_out.tokens,
    }


def gap_closed(before: float, after: float, teacher: float) -> float:
    r"""Return how much of the way to the teacher is made: \(1 - \ln(after / teacher) / \ln(before / teacher)\).

    Args:
        before, after, teacher (`float`): Perplexities on the same text.

    Returns:
        `float`: 0 at `before`, 1 at the teacher's, negative if it got worse; not a number where there was no gap: a
        windowed student of a teacher for short texts may read better than it from the start.
    """
    return 1 - math.log(after / teacher) / math.log(before / teacher) if before > teacher else math.nan


def cache_bytes(cache: Any) -> int:
    """Return how many bytes of keys, values and states a cache holds; spare capacity is not counted."""

    def tensors(value: Any):
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, Mapping):
            for entry in value.values():
                yield from tensors(entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                yield from tensors(entry)

    names = ("keys", "values", "block_keys", "block_values", "conv_states", "recurrent_states")
    held = (getattr(layer, name, None) for layer in cache.layers for name in names)
    return sum(tensor.numel() * tensor.element_size() for value in held for tensor in tensors(value))


@torch.no_grad()
def measure_decoding(
    model: PreTrainedModel, name: str, contexts: Sequence[int], *, steps: int = 8
) -> list[dict[str, Any]]:
    """Measure cache size and decoding speed of one sequence at growing contexts.

    The context is random tokens, fed in blocks of 512 into one cache; then `steps` tokens are decoded one by one.

    Args:
        model (`PreTrainedModel`): The model.
        name (`str`): Its name in the rows.
        contexts (sequence of `int`): Context lengths, rising.
        steps (`int`, defaults to 8): Tokens to time at each; the median counts.

    Returns:
        `list[dict]`: Rows with `model`, `context`, `cache_bytes`, `tokens_per_second`.
    """
    training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(0)
    cache, length, rows = None, 0, []

    def feed(count: int) -> None:
        nonlocal cache, length
        ids = torch.randint(0, model.config.vocab_size, (1, count), generator=generator).to(model.device)
        cache = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).cache
        length += count

    for context in sorted(contexts):
        while length < context:
            feed(min(512, context - length))
        held = cache_bytes(cache)
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            feed(1)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        speed = 1.0 / sorted(seconds)[len(seconds) // 2]
        rows.append({"model": name, "context": context, "cache_bytes": held, "tokens_per_second": round(speed, 2)})
    model.train(training)
    return rows


def loss_curve(log_history: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return (tokens, loss) of a trainer's `state.log_history`."""
    return [
        (float(entry.get("num_input_tokens_seen", entry.get("step", 0))), float(entry["loss"]))
        for entry in log_history
        if "loss" in entry
    ]


@dataclass
class Report:
    """What is known about one student; fields stay empty until measured.

    Args:
        title (`str`): Headline.
        teacher (`dict`): Name, parameters, loops, layers.
        student (`dict`): Parameters, kept layers, and `mixers`, the mixer of each layer.
        heldout_kl (`dict`): Stage to KL in nats a token.
        heldout_perplexity (`dict`): Stage, or `"teacher"`, to perplexity.
        heldout_tokens (`int`, defaults to 0): Tokens both were measured on.
        data (`str`): Source of the text, trained on and held out, as a recipe names it.
        selection (`Selection`, *optional*): Scores and kept layers.
        losses (`dict`): Stage to (tokens, loss) points.
        stages (`list[dict]`): Rows of name, tokens, seconds, note.
        decoding (`list[dict]`): Rows of `measure_decoding`.
        samples (`list[dict]`): Rows of a prompt and the text of each model.
        notes (`list[str]`): What a reader should know.
        seconds (`float`, defaults to 0.0): Wall time of all stages, what an interrupted run did of them included.
        peak_memory_bytes (`int`, defaults to 0): Largest resident memory of the process.
        environment (`dict`): Versions, threads, device.
    """

    title: str
    teacher: dict[str, Any] = field(default_factory=dict)
    student: dict[str, Any] = field(default_factory=dict)
    heldout_kl: dict[str, float] = field(default_factory=dict)
    heldout_perplexity: dict[str, float] = field(default_factory=dict)
    heldout_tokens: int = 0
    data: str = ""
    selection: Selection | None = None
    losses: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    decoding: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    environment: dict[str, Any] = field(default_factory=dict)

    def add_heldout(self, stage: str, result: Mapping[str, float]) -> None:
        """Take in what `evaluate_heldout` returned for the student after a stage."""
        self.heldout_perplexity.setdefault("teacher", result["teacher_perplexity"])
        self.heldout_kl[stage] = result["kl"]
        self.heldout_perplexity[stage] = result["perplexity"]
        self.heldout_tokens = int(result["tokens"])

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def to_html(self) -> str:
        """Return a page that stands alone; needs matplotlib (`pip install loopergy[plots]`)."""
        from loopergy.distill.page import render

        return render(self)

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write `report.json` and `report.html`, each replaced in one step.

        Returns:
            `tuple[Path, Path]`: The two files.
        """
        texts = {"report.json": self.to_json(), "report.html": self.to_html()}
        report, page = (replace_file(Path(folder) / name, text) for name, text in texts.items())
        return report, page
