# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Calibration: give the new mixers a start from the teacher's statistics, in closed form, before any training.

Conversion copies the projections and draws the rest, so that a fresh mixer forgets at random and answers at the wrong
scale. Calibration runs the teacher over a few batches, as alignment does, and sets for every replaced layer, from all
loops together (they share the weights):

| part       | what it sets                                                               | for                      |
|------------|----------------------------------------------------------------------------|--------------------------|
| `"memory"` | decay and write strength of each head: constants, the best of a small grid | `gdn`, `kda`, `deltanet` |
| `"output"` | the last projection, by ridge regression                                   | all                      |

**Memory.** With `f_h` the normed output of head h under a candidate and `a_h` what the teacher's head returns before
its o projection, a candidate is judged by the error of the best linear map, `min_M sum |a_h - f_h M|^2`. A constant
write strength needs a bias that the mixers do not have: the regression of the constant 1 on the mixer's input stands
in for it. Both learn to depend on the input in training.

**Output.** With features F (what enters the last projection), targets Y (what the teacher's attention returns) and W_0
the weight so far: `min_W sum_t c_t |y_t - W f_t|^2 + strength |W - W_0|^2`. The strength is a multiple of the mean
diagonal of F^T F, chosen by two-fold cross-validation (even against odd batches). On the tokens it was fitted on the
error cannot be higher than with W_0. `c_t` is 1, and `1 / mean(y_t^2)` in blocks with a norm after the mixer: what
counts there is the distance between normed vectors, as in alignment.

This is a start for little training or none. SmolLM2-135M, aligned on 64,512 tokens after it, is closer to its teacher
than from the copied weights; after 256,000 tokens it is farther away, although each layer alone fits better
(docs/distillation.md).

Sums over tokens are kept in float64, so that memory does not depend on how many batches there are. Pads and positions
without a target do not count.

Source: closed-form starts from teacher statistics in the spirit of Taylor-Calibrate (arXiv 2606.16429); the
regressions are our own.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from loopergy.distill.align import MixerInputs, aligned_layers
from loopergy.distill.regressions import RIDGE, Sums, choose_ridge, solve, squared_error
from loopergy.distill.stage import batch_targets
from loopergy.distill.teacher import MixerCall, check_same_loops, loop_states, num_loops, watch_mixers
from loopergy.modeling.building_blocks import at_least_float32
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.training.data import IGNORE

PARTS = ("memory", "output")
WITH_MEMORY = ("gdn", "kda", "deltanet")
DECAYS = (0.003, 0.03, 0.2, 1.0)
STRENGTHS = (0.05, 0.4)
# Batches that the candidates for "memory" are tried on, at most.
SEARCH_BATCHES = 4
# SiLU(OPEN) is 1.
OPEN = 1.2784645427610738
Batches = Sequence[Mapping[str, torch.Tensor]]


@dataclass
class Calibration:
    """What a calibration did.

    Args:
        parts (`list[str]`): Parts that were fitted.
        layers (`list[int]`): Physical layers that were.
        tokens (`int`): Tokens they were fitted on.
        seconds (`float`, defaults to 0.0): Wall time.
        decay (`dict[int, list[float]]`): Layer to the decay rate (minus the log of what a step keeps) of each head.
        strength (`dict[int, list[float]]`): Layer to the write strength of each head.
        ridge (`dict[int, float]`): Layer to the strength of its ridge regression.
        error (`dict[int, list[float]]`): Layer to the error of its output on these tokens, before and after the last
            projection was fitted, as a share of the target's square.
    """

    parts: list[str]
    layers: list[int]
    tokens: int = 0
    seconds: float = 0.0
    decay: dict[int, list[float]] = field(default_factory=dict)
    strength: dict[int, list[float]] = field(default_factory=dict)
    ridge: dict[int, float] = field(default_factory=dict)
    error: dict[int, list[float]] = field(default_factory=dict)


@torch.no_grad()
def calibrate(
    student: LT2ForCausalLM,
    teacher: PreTrainedModel,
    batches: Batches,
    *,
    parts: Sequence[str] = PARTS,
    ridge: float | None = None,
) -> Calibration:
    """Set memory and last projection of the new mixers from the teacher's statistics; see the head of this file.

    Args:
        student (`LT2ForCausalLM`): Fresh from `convert`; changed in place.
        teacher (`PreTrainedModel`): What it was converted from. Runs over the batches once a part.
        batches (sequence of mappings): `input_ids` and, optionally, `labels`, `attention_mask`, `position_ids`. A few
            thousand tokens: several times the hidden size.
        parts (sequence of `str`, defaults to `PARTS`): What to fit; those that a mixer does not have are passed over.
        ridge (`float`, *optional*): Strength of the ridge regression, as a multiple of the mean square of a feature.
            0 is plain least squares. Default: chosen for each layer by cross-validation.

    Returns:
        `Calibration`: What was found.

    Raises:
        ValueError: Unknown parts, no batches, no positions that count, a student without new mixers or with another
            number of loops than the teacher, or a negative ridge.

    Example:
        ```python
        student = loopergy.convert(teacher, keep_layers=[]).model
        batches = held_out_batches("offline", tokenizer, length=512, num_tokens=8192, split="train")
        loopergy.calibrate(student, teacher, batches)
        ```
    """
    _check(student, teacher, batches, parts, ridge)
    began, training = time.perf_counter(), student.training
    student.eval()
    layers = aligned_layers(student)
    result = Calibration([part for part in PARTS if part in parts], layers)
    result.tokens = sum(int((batch_targets(batch) != IGNORE).sum()) for batch in batches)
    if result.tokens == 0:
        raise ValueError("The batches have no position with a target: pass longer rows, or other labels.")
    run = _Visits(student, teacher)
    if "memory" in parts:
        _fit_memory(run, batches[:SEARCH_BATCHES], result)
    if "output" in parts:
        _fit_outputs(run, batches, ridge, result)
    student.train(training)
    result.seconds = time.perf_counter() - began
    return result


def _check(student, teacher, batches, parts, ridge) -> None:
    unknown = sorted(set(parts) - set(PARTS))
    if unknown or not parts:
        raise ValueError(f"`parts` must be some of {PARTS}, got {tuple(parts)}.")
    if not batches:
        raise ValueError("`batches` is empty: calibration needs at least one batch.")
    if ridge is not None and not ridge >= 0:
        raise ValueError(f"`ridge` must be at least 0, got {ridge}.")
    if not aligned_layers(student):
        raise ValueError("All layers of the student have full attention already: there is nothing to calibrate.")
    check_same_loops(student, num_loops(teacher))


@dataclass
class _Visit:
    """What one mixer meets in one visit, where positions count.

    Args:
        fold (`int`): 0 or 1, by the number of the batch.
        inputs (`torch.Tensor` of shape `[tokens, hidden]`): What the mixer gets.
        heads (`torch.Tensor` of shape `[tokens, heads * width]`): What enters the teacher's o projection.
        target (`torch.Tensor` of shape `[tokens, hidden]`): What the teacher's attention returns.
        features (callable): Runs the student's mixer and returns what enters its last projection, `[tokens, width]`.
    """

    fold: int
    inputs: torch.Tensor
    heads: torch.Tensor
    target: torch.Tensor
    features: Callable[[], torch.Tensor]


class _Visits:
    """Run the teacher over batches and show every visit of the layers asked for."""

    def __init__(self, student: LT2ForCausalLM, teacher: PreTrainedModel):
        self.student, self.teacher = student, teacher

    def mixer(self, layer: int) -> nn.Module:
        return self.student.model.layers[layer].self_attn  # type: ignore[return-value]

    def __call__(self, batches: Batches, layers: Sequence[int], on_visit: Callable[[int, _Visit], None]) -> None:
        layers_of_teacher: Any = self.teacher.base_model.layers
        heads: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Callable:
            return lambda module, arguments: heads.update({layer: arguments[0]})

        attentions = {layer: layers_of_teacher[layer].self_attn for layer in layers}
        handles = [_last(attention).register_forward_pre_hook(keep(n)) for n, attention in attentions.items()]
        try:
            for number, batch in enumerate(batches):
                batch = {name: value.to(self.student.device) for name, value in batch.items()}
                mask = batch_targets(batch) != IGNORE
                others = MixerInputs(self.student, batch)

                def on_call(call: MixerCall, mask=mask, others=others, fold=number % 2) -> None:
                    if call.layer in layers:
                        on_visit(call.layer, self._visit(call, others, mask, heads.pop(call.layer), fold))

                with watch_mixers(self.teacher, on_call):
                    loop_states(self.teacher, batch)
        finally:
            for handle in handles:
                handle.remove()

    def _visit(self, call: MixerCall, others: Any, mask: torch.Tensor, heads: torch.Tensor, fold: int) -> _Visit:
        mixer, x = self.mixer(call.layer), call.inputs.to(self.student.dtype)
        arguments = others(call)

        def features() -> torch.Tensor:
            # The mixer puts its outputs back into the order of its inputs, whatever their width.
            with _replaced(mixer, {_last_name(mixer): nn.Identity()}):
                return mixer(x, cache=None, **arguments)[0][mask]

        return _Visit(fold, x[mask], heads.reshape(*mask.shape, -1)[mask], call.output[mask], features)


class _Constant(nn.Module):
    """Return the same numbers for every token."""

    def __init__(self, values: torch.Tensor):
        super().__init__()
        self.values = values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values.to(x.dtype).expand(*x.shape[:-1], -1)


class _Remembered(nn.Module):
    """Return what a module returned at the first call, without running it again."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.output = module, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.output = self.module(x) if self.output is None else self.output
        return self.output


@contextmanager
def _replaced(module: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put other submodules into a module while the context is open."""
    before = {name: getattr(module, name) for name in others}
    try:
        for name, other in others.items():
            setattr(module, name, other)
        yield
    finally:
        for name, own in before.items():
            setattr(module, name, own)


def _last_name(mixer: nn.Module) -> str:
    return "out_proj" if hasattr(mixer, "out_proj") else "o_proj"


def _last(mixer: nn.Module) -> nn.Linear:
    return getattr(mixer, _last_name(mixer))


def _by_heads(student: LT2ForCausalLM, teacher: PreTrainedModel, layer: int) -> bool:
    """Whether the heads of the mixer correspond to those of the attention, one by one."""
    attention: Any = teacher.base_model.layers[layer].self_attn  # type: ignore[index]
    mixer: Any = student.model.layers[layer].self_attn
    same = _last(mixer).in_features == getattr(attention, _last_name(attention)).in_features
    return same and mixer.num_heads == student.config.num_attention_heads


def _open(mixer: Any) -> dict[str, nn.Module]:
    """Return what holds the output gate of a mixer at 1, nothing for one without."""
    gate = getattr(mixer, "g_proj", None)
    if gate is None:
        return {}
    last: Any = gate[-1] if isinstance(gate, nn.Sequential) else gate
    # KDA's gate is a sigmoid: half open.
    level = 0.0 if isinstance(gate, nn.Sequential) else OPEN
    return {"g_proj": _Constant(last.weight.new_full((last.out_features,), level))}


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return `[tokens, heads * width]` as `[heads, tokens, width]`."""
    return x.unflatten(-1, (count, -1)).transpose(0, 1)


def _fit_memory(run: _Visits, batches: Batches, result: Calibration) -> None:
    """Set decay and write strength of the heads."""
    mixers = run.student.config.layer_mixers
    layers = [n for n in result.layers if mixers[n] in WITH_MEMORY and _by_heads(run.student, run.teacher, n)]
    scores: dict[int, list[Sums]] = {}
    ones = {layer: Sums() for layer in layers}

    def on_visit(layer: int, visit: _Visit) -> None:
        mixer: Any = run.mixer(layer)
        candidates = _candidates(mixer)
        sums = scores.setdefault(layer, [Sums() for _ in candidates])
        ones[layer].add(visit.inputs, torch.ones_like(visit.inputs[:, :1]))
        # The candidates differ in decay and strength alone.
        shared = {name: _Remembered(getattr(mixer, name)) for name in ("q_proj", "k_proj", "v_proj")}
        for candidate, total in zip(candidates, sums, strict=True):
            with _replaced(mixer, {**shared, **candidate, **_open(mixer)}):
                total.add(_heads(visit.features(), mixer.num_heads), _heads(visit.heads, mixer.num_heads))

    if layers:
        run(batches, layers, on_visit)
    for layer in layers:
        totals = [sums.total() for sums in scores[layer]]
        errors = [squared_error(total, solve(*total[:2], RIDGE)) for total in totals]
        best = torch.stack(errors).argmin(0)
        constant = solve(*ones[layer].total()[:2], RIDGE)[:, 0]
        result.decay[layer], result.strength[layer] = _set_memory(run.mixer(layer), best.tolist(), constant)


def _grid(mixer: Any) -> list[tuple[float, float]]:
    """Return the candidates, decay rate and write strength; a mixer without decay has rate 0 alone."""
    return [(decay, beta) for decay in (DECAYS if hasattr(mixer, "A_log") else (0.0,)) for beta in STRENGTHS]


def _inverse_softplus(value: torch.Tensor) -> torch.Tensor:
    return value + torch.log(-torch.expm1(-value))


def _decay_projection(mixer: Any) -> tuple[str, Any]:
    """Return the name of the projection that decays depend on, and its last matrix."""
    name = "a_proj" if hasattr(mixer, "a_proj") else "f_proj"
    projection: Any = getattr(mixer, name)
    return name, projection[-1] if isinstance(projection, nn.Sequential) else projection


def _candidates(mixer: Any) -> list[dict[str, nn.Module]]:
    """Return, for each candidate, what to put into the mixer to hold decay and write strength constant."""
    found = []
    like = mixer.b_proj.weight.new_ones(mixer.num_heads).double()
    for decay, beta in _grid(mixer):
        held: dict[str, nn.Module] = {"b_proj": _Constant(torch.logit(like * beta / mixer.max_beta))}
        if decay:
            name, last = _decay_projection(mixer)
            # softplus(c + dt_bias) e^A is the decay: c makes up for the bias and rate as they were drawn.
            rate = mixer.A_log.double().exp().repeat_interleave(last.out_features // mixer.num_heads)
            held[name] = _Constant(_inverse_softplus(decay / rate) - mixer.dt_bias.double())
        found.append(held)
    return found


def _set_memory(mixer: Any, best: Sequence[int], constant: torch.Tensor) -> tuple[list[float], list[float]]:
    """Write the chosen decays and strengths of the heads into the mixer; return them."""
    grid = _grid(mixer)
    decay, beta = (torch.tensor([grid[index][k] for index in best], dtype=torch.float64) for k in (0, 1))
    device = constant.device
    mixer.b_proj.weight.copy_(torch.logit(beta / mixer.max_beta).to(device)[:, None] * constant)
    if hasattr(mixer, "A_log"):
        _, last = _decay_projection(mixer)
        last.weight.zero_()
        mixer.A_log.zero_()
        per_channel = decay.to(device).repeat_interleave(last.out_features // mixer.num_heads)
        mixer.dt_bias.copy_(_inverse_softplus(per_channel))
    return decay.tolist(), beta.tolist()


def _fit_outputs(run: _Visits, batches: Batches, ridge: float | None, result: Calibration) -> None:
    """Fit the last projection of every layer."""
    layers = result.layers
    sums = {layer: Sums() for layer in layers}
    blocks: Any = run.teacher.base_model.layers

    def on_visit(layer: int, visit: _Visit) -> None:
        bias, target = _last(run.mixer(layer)).bias, visit.target
        features = visit.features()
        size = at_least_float32(target).square().mean(-1, keepdim=True)
        if hasattr(blocks[layer], "input_layernorm_2"):
            weight = (size + blocks[layer].input_layernorm_2.variance_epsilon).rsqrt()
        else:
            weight = torch.ones_like(size)
        target = target if bias is None else target - bias
        sums[layer].add(features * weight, target * weight, visit.fold)

    run(batches, layers, on_visit)
    for layer in layers:
        weight = _last(run.mixer(layer)).weight
        start = weight.double().T
        strength = choose_ridge(sums[layer], start) if ridge is None else ridge
        total = sums[layer].total()
        solution = solve(total[0], total[1], strength, start)
        errors = [squared_error(total, each) / total[2] for each in (start, solution)]
        weight.copy_(solution.T)
        result.ridge[layer], result.error[layer] = strength, [float(error) for error in errors]
