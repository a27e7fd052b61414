# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Layer selection: which physical layers keep full attention, judged by the KL that each one saves.

Starting from the aligned student, a candidate set S gives the layers in S the teacher's attention back, in all loops.
Its score is the KL between teacher and candidate on the last loop, averaged over the same tokens for all candidates.
With `KL(S)` that score, the importance of layer l is `I(l) = KL({}) - KL({l})`.

| strategy          | kept layers                                                                              |
|-------------------|------------------------------------------------------------------------------------------|
| `"oneshot"`       | the K layers of largest `I`; each layer is tried once                                     |
| `"greedy_add"`    | from nothing, add the layer that lowers the KL most, K times                               |
| `"greedy_remove"` | from all, remove the layer that raises the KL least, N - K times                           |
| `"leave_one_out"` | the K layers whose absence alone, from all, raises the KL most; each is tried once        |
| `"mse"`           | the K layers whose mixers fit worst in stage 1 (no candidates are run)                     |
| `"uniform"`       | spread evenly, the last layer included                                                     |
| `"given"`         | the list that is passed                                                                    |

What takes two layers together, such as looking something up, no single layer brings back, and `"oneshot"` does not see
it: there `"leave_one_out"` ranks, on batches whose labels ask for nothing else.

With `budget_tokens > 0` (`oneshot` only) each candidate is trained by distillation on that many tokens before it is
scored, as in the paper; with 0 it is scored as it is, which costs N + 1 forward passes. Ties go to the smaller index.
All indices are physical layers.

Source: one-shot ranking by restored layers from arXiv 2512.20569; last-loop KL as in the conversion of LT2.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from loopergy.conversion import parse_keep_layers, restore_layers
from loopergy.distill.align import aligned_layers, alignment_errors
from loopergy.distill.losses import linear_kl
from loopergy.distill.stage import batch_targets, kept_layers
from loopergy.distill.teacher import head_weight, loop_states, num_loops
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.training.data import IGNORE

STRATEGIES = ("oneshot", "greedy_add", "greedy_remove", "leave_one_out", "mse", "uniform", "given")
Batches = Sequence[Mapping[str, torch.Tensor]]


@dataclass
class Selection:
    """Which layers keep full attention, and why.

    Args:
        kept_layers (`list[int]`): Physical layers to keep, sorted; the student's own full layers included.
        strategy (`str`): How they were chosen.
        num_layers (`int`): Physical layers of the model.
        order (`list[int]`): Candidates from most to least important, as far as the strategy ranks them.
        scores (`dict[int, float]`): Importance of each candidate: KL saved, or alignment error for `"mse"`.
        kl (`dict[int, list[float]]`): KL of each loop with that layer alone restored (`"oneshot"`), or with all but
            that one (`"leave_one_out"`).
        baseline_kl (`list[float]`): KL of each loop before anything is restored; with all of them restored
            (`"leave_one_out"`).
        steps (`list[dict]`): What each greedy round chose, with its KL.
        tokens (`int`, defaults to 0): Tokens the candidates were scored on.
        budget_tokens (`int`, defaults to 0): Tokens each candidate was trained on.
        seconds (`float`, defaults to 0.0): Wall time.
        mixers (`list[str]`): Mixer of each physical layer before the selection.
    """

    kept_layers: list[int]
    strategy: str
    num_layers: int
    order: list[int] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    kl: dict[int, list[float]] = field(default_factory=dict)
    baseline_kl: list[float] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    budget_tokens: int = 0
    seconds: float = 0.0
    mixers: list[str] = field(default_factory=list)

    @property
    def meaning(self) -> str:
        """What the scores are, for pictures."""
        return {"mse": "alignment error", "leave_one_out": "KL without it"}.get(self.strategy, "KL saved")

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the selection as JSON, and write it to `path` if one is given."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> "Selection":
        """Read what `to_json` wrote: a path, or the text itself."""
        text = str(source) if str(source).lstrip().startswith("{") else Path(source).read_text(encoding="utf-8")
        values = json.loads(text)
        for name in ("scores", "kl"):
            values[name] = {int(layer): value for layer, value in values[name].items()}
        return cls(**values)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the importance of each layer, kept ones in colour; needs matplotlib (`pip install loopergy[plots]`).

        Args:
            path (`str` or `Path`, *optional*): Save the picture there.

        Returns:
            `matplotlib.figure.Figure`: The picture.
        """
        from loopergy.distill.pictures import draw_selection

        figure = draw_selection(self)
        if path is not None:
            figure.savefig(path, bbox_inches="tight")
        return figure


class Candidates:
    """Put the teacher's attention into chosen layers of a student for a while, without copying either model.

    Args:
        student (`LT2ForCausalLM`): Changed inside `restored` only.
        teacher (`PreTrainedModel`): Its attention weights are shared, not copied.
        own_weights (`bool`, defaults to `False`): Copy the attention weights, so that a candidate may be trained.
    """

    def __init__(self, student: LT2ForCausalLM, teacher: PreTrainedModel, own_weights: bool = False):
        self.student = student
        self.layers = aligned_layers(student)
        if not self.layers:
            raise ValueError("All layers of the student have full attention already: there is nothing to select.")
        full = restore_layers(student, teacher, self.layers, share=not own_weights)
        self.attention = {layer: full.eval().model.layers[layer].self_attn for layer in self.layers}

    @contextmanager
    def restored(self, layers: Iterable[int]) -> Iterator[None]:
        """Give these physical layers full attention, in all loops, while the context is open."""
        model, config, saved = self.student.model, self.student.config, {}
        mixers_before = config.layer_mixers
        try:
            config.layer_mixers = list(mixers_before)
            for index in layers:
                layer = model.layers[index]
                saved[index] = layer.self_attn, layer.mixer_type
                layer.self_attn, layer.mixer_type = self.attention[index], "full"  # type: ignore[assignment]
                config.layer_mixers[index] = "full"
            yield
        finally:
            config.layer_mixers = mixers_before
            for index, (mixer, kind) in saved.items():
                model.layers[index].self_attn, model.layers[index].mixer_type = mixer, kind  # type: ignore[assignment]


@torch.no_grad()
def candidate_kls(
    candidates: Candidates,
    teacher: PreTrainedModel,
    batches: Batches,
    sets: Sequence[Sequence[int]],
    on_forward: Callable[[], Any] = lambda: None,
) -> torch.Tensor:
    """Compute the KL of every candidate set in every loop; the teacher runs once a batch.

    Args:
        candidates (`Candidates`): Student and attention to restore.
        teacher (`PreTrainedModel`): Its teacher.
        batches (sequence of mappings): The same tokens for all.
        sets (sequence of layer lists): What to restore in each.
        on_forward (callable, *optional*): Called after each set and batch.

    Returns:
        `torch.Tensor` of shape `[sets, loops]`, float64: Mean over tokens.
    """
    student, device = candidates.student, candidates.student.device
    heads = head_weight(student), head_weight(teacher)
    total, tokens = torch.zeros(len(sets), num_loops(teacher), dtype=torch.float64), 0
    for batch in batches:
        batch = {name: value.to(device) for name, value in batch.items()}
        mask = batch_targets(batch) != IGNORE
        tokens += int(mask.sum())
        teacher_states = loop_states(teacher, batch)
        for index, layers in enumerate(sets):
            with candidates.restored(layers):
                states = loop_states(student, batch)
            for loop, (s, t) in enumerate(zip(states, teacher_states, strict=True)):
                total[index, loop] += linear_kl(s, heads[0], t, heads[1], mask, num_items=1).double().cpu()
            on_forward()
    return total / max(tokens, 1)


def ranked(scores: Mapping[int, float]) -> list[int]:
    """Order layers by descending score, equal scores by ascending index."""
    return sorted(scores, key=lambda layer: (-scores[layer], layer))


def _trained_kl(
    candidates: Candidates,
    teacher: PreTrainedModel,
    batches: Batches,
    layers: Sequence[int],
    budget_tokens: int,
    learning_rate: float,
) -> torch.Tensor:
    """Distil one candidate on a token budget, score it on the same tokens, and put the student's weights back."""
    student = candidates.student
    modules = [student, *(candidates.attention[layer] for layer in layers)]
    before = [{name: tensor.detach().clone() for name, tensor in m.state_dict().items()} for m in modules]
    try:
        with candidates.restored(layers), torch.enable_grad():
            student.requires_grad_(True)
            optimizer = torch.optim.AdamW(student.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
            seen = 0
            for batch in itertools.cycle(batches):
                if seen >= budget_tokens:
                    break
                batch = {name: value.to(student.device) for name, value in batch.items()}
                mask = batch_targets(batch) != IGNORE
                with torch.no_grad():
                    wanted = loop_states(teacher, batch)[-1]
                state = loop_states(student, batch)[-1]
                linear_kl(state, head_weight(student), wanted, head_weight(teacher), mask).backward()
                torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                seen += batch["input_ids"].numel()
        return candidate_kls(candidates, teacher, batches, [layers])[0]
    finally:
        for module, state in zip(modules, before, strict=True):
            module.load_state_dict(state)


def wanted_layers(
    keep: int | float | Sequence[int] | str, strategy: str, budget_tokens: int, num_layers: int, own: Sequence[int]
) -> list[int]:
    """Return the layers that `keep` names, or as many as it asks for.

    Args:
        keep, strategy, budget_tokens: As in [`select_layers`].
        num_layers (`int`): Physical layers of the student.
        own (sequence of `int`): Its layers that have full attention already.

    Raises:
        ValueError: As in [`select_layers`].
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {STRATEGIES}, got {strategy!r}.")
    if budget_tokens and strategy != "oneshot":
        raise ValueError(f"`budget_tokens`={budget_tokens} needs strategy='oneshot', got {strategy!r}.")
    wanted = parse_keep_layers(keep, num_layers)
    count = isinstance(keep, int | float)
    if count and strategy == "given":
        raise ValueError(f"strategy='given' needs the list of layers as `keep`, got {keep!r}.")
    if not count and keep != "all" and strategy != "given":
        raise ValueError(
            f"`keep`={keep!r} names layers, which strategy={strategy!r} would not keep: set strategy='given' to keep "
            f"them, or give a number or a share, without quotes, of layers to choose."
        )
    if len(wanted) < len(own) or (strategy in ("given", "uniform") and not set(own) <= set(wanted)):
        raise ValueError(f"The student has full attention in layers {own} already; `keep`={keep!r} must include them.")
    return wanted


def select_layers(
    student: LT2ForCausalLM,
    teacher: PreTrainedModel,
    batches: Batches,
    keep: int | float | Sequence[int] | str = 0.25,
    *,
    strategy: str = "oneshot",
    budget_tokens: int = 0,
    learning_rate: float = 1e-4,
    progress: bool = True,
) -> Selection:
    """Choose the physical layers that keep full attention; see the head of this file.

    Args:
        student (`LT2ForCausalLM`): The student of stage 1; unchanged afterwards.
        teacher (`PreTrainedModel`): Its teacher.
        batches (sequence of mappings): `input_ids` and, optionally, `labels`, `attention_mask`, `position_ids`; the
            same for all candidates. Not looked at by `"uniform"` and `"given"`.
        keep (`int`, `float`, list or `str`, defaults to 0.25): How many layers to keep in all, or which share of all
            layers, or `"all"`; with `strategy="given"`, and with no other, the layers themselves: `[3, 7]` or `"3,7"`.
        strategy (`str`, defaults to `"oneshot"`): One of `STRATEGIES`.
        budget_tokens (`int`, defaults to 0): Train each candidate on this many tokens first (`"oneshot"` only).
        learning_rate (`float`, defaults to 1e-4): Of that training.
        progress (`bool`, defaults to `True`): Show a bar.

    Returns:
        `Selection`: The same for the same arguments.

    Raises:
        ValueError: An unknown strategy; more or fewer layers than possible; layers given twice or out of range, or
            with another strategy than `"given"`; a budget with another strategy than `"oneshot"`.
    """
    total, own = student.config.num_hidden_layers, kept_layers(student.config)
    wanted = wanted_layers(keep, strategy, budget_tokens, total, own)
    began, training = time.perf_counter(), student.training
    student.eval()
    mixers = list(student.config.layer_mixers)
    selection = Selection(wanted, strategy, total, budget_tokens=budget_tokens, mixers=mixers)
    if strategy not in ("given", "uniform"):
        if not batches:
            raise ValueError(f"strategy={strategy!r} needs at least one batch.")
        selection.tokens = sum(int((batch_targets(batch) != IGNORE).sum()) for batch in batches)
        search = _Search(student, teacher, batches, selection, len(wanted) - len(own), progress)
        with search.bar:
            if budget_tokens:
                search.trained(budget_tokens, learning_rate)
            else:
                search.run(strategy)
        chosen = selection.order[: len(wanted) - len(own)]
        selection.kept_layers = sorted({*own, *chosen})
    student.train(training)
    selection.seconds = time.perf_counter() - began
    return selection


class _Search:
    """Run one strategy and fill in its `Selection`."""

    def __init__(self, student, teacher, batches: Batches, selection: Selection, number: int, progress: bool):
        self.student, self.teacher, self.batches = student, teacher, batches
        self.selection, self.number = selection, number
        own_weights = selection.budget_tokens > 0
        self.candidates = Candidates(student, teacher, own_weights)
        self.layers = self.candidates.layers
        self.bar = tqdm(desc="select", unit="forward", disable=not progress)

    def run(self, strategy: str) -> None:
        strategies: dict[str, Callable[[], None]] = {
            "oneshot": self.oneshot,
            "greedy_add": self.greedy_add,
            "greedy_remove": self.greedy_remove,
            "leave_one_out": self.leave_one_out,
            "mse": self.mse,
        }
        strategies[strategy]()

    def kls(self, sets: Sequence[Sequence[int]]) -> torch.Tensor:
        return candidate_kls(self.candidates, self.teacher, self.batches, sets, self.bar.update)

    def oneshot(self) -> None:
        kls = self.kls([[], *([layer] for layer in self.layers)])
        self._rank_alone(kls[0], kls[1:])

    def trained(self, budget_tokens: int, learning_rate: float) -> None:
        scores = []
        for layer in self.layers:
            arguments = (self.candidates, self.teacher, self.batches, [layer], budget_tokens, learning_rate)
            scores.append(_trained_kl(*arguments))
            self.bar.update()
        baseline = _trained_kl(self.candidates, self.teacher, self.batches, [], budget_tokens, learning_rate)
        self._rank_alone(baseline, torch.stack(scores))

    def _rank_alone(self, baseline: torch.Tensor, kls: torch.Tensor, sign: int = 1) -> None:
        chosen = self.selection
        chosen.baseline_kl = baseline.tolist()
        chosen.kl = {layer: row.tolist() for layer, row in zip(self.layers, kls, strict=True)}
        saved = sign * (baseline[-1] - kls[:, -1])
        chosen.scores = dict(zip(self.layers, saved.tolist(), strict=True))
        chosen.order = ranked(chosen.scores)

    def greedy_add(self) -> None:
        chosen = self.selection
        last = self.kls([[]])[0]
        chosen.baseline_kl = last.tolist()
        for _ in range(self.number):
            rest = [layer for layer in self.layers if layer not in chosen.order]
            kls = self.kls([[*chosen.order, layer] for layer in rest])
            # `argmin` may return any of equal entries; the first one is the smaller index.
            best = min(range(len(rest)), key=lambda index: (kls[index, -1].item(), rest[index]))
            chosen.scores[rest[best]] = (last[-1] - kls[best, -1]).item()
            last = kls[best]
            chosen.order.append(rest[best])
            chosen.steps.append({"added": rest[best], "kl": last.tolist()})

    def greedy_remove(self) -> None:
        chosen, removed = self.selection, []
        last = self.kls([self.layers])[0]
        while len(removed) < len(self.layers) - self.number:
            rest = [layer for layer in self.layers if layer not in removed]
            kls = self.kls([[layer for layer in rest if layer != out] for out in rest])
            # Of equal layers the larger index goes, so that the smaller one stays.
            worst = min(range(len(rest)), key=lambda index: (kls[index, -1].item(), -rest[index]))
            chosen.scores[rest[worst]] = (kls[worst, -1] - last[-1]).item()
            last = kls[worst]
            removed.append(rest[worst])
            chosen.steps.append({"removed": rest[worst], "kl": last.tolist()})
        chosen.order = [*(layer for layer in self.layers if layer not in removed), *reversed(removed)]

    def leave_one_out(self) -> None:
        kls = self.kls([self.layers, *([layer for layer in self.layers if layer != out] for out in self.layers)])
        self._rank_alone(kls[0], kls[1:], sign=-1)

    def mse(self) -> None:
        errors = alignment_errors(self.student, self.teacher, self.batches).mean(0)
        self.selection.scores = {layer: errors[index].item() for index, layer in enumerate(self.layers)}
        self.selection.order = ranked(self.selection.scores)
