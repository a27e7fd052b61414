# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Say for given weights whether each step is guaranteed to lower a token's energy, and if not, why not.

NRGPT. With a norm of scale \(\gamma\), Jacobian \(\mathrm{diag}(\gamma) P / s\), and v the gradient with respect to
g, a small step changes the energy of a token, the others frozen, by \(-v^T \mathrm{diag}(\gamma) P \eta v / s\).
Whatever v and x, that is never positive only if \(\eta = c\,\mathrm{diag}(\gamma)\), c >= 0, plus, for layer norms,
\(1 w^T\), which the norm does not see. Without a norm it is \(-v^T \eta v\): the symmetric part of \(\eta\) has to be
positive semi-definite.

CEM-Llama. A step changes the energy by \(-\eta g^T P g\) to first order, g the gradient in the coordinates that move:
P has to be positive definite, and eta positive. Norming before each step without going through its Jacobian
(`cem_norm_mode="every_step"`) moves other coordinates than the gradient is of.

Source: NRGPT, arXiv 2512.16762, propositions 2.1 and 2.2; CEM, arXiv 2605.07588; that the condition on eta is also
necessary is our derivation.
"""

from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE = 1e-5  # relative; error that float32 training leaves in an exact equality


@dataclass(frozen=True)
class Condition:
    """One condition of the guarantee.

    Attributes:
        name (`str`): a short name.
        holds (`bool`): whether it does.
        reason (`str`): one sentence, with the numbers.
    """

    name: str
    holds: bool
    reason: str

    def __str__(self) -> str:
        """Return one line: holds or not, name, reason."""
        return f"[{'yes' if self.holds else 'NO'}] {self.name}: {self.reason}"


@dataclass(frozen=True)
class DescentConditions:
    """What the weights of a model promise about its energy.

    Attributes:
        conditions (`list[Condition]`): those of the guarantee.
        notes (`list[str]`): what the guarantee does not cover, whatever the weights.
    """

    conditions: list[Condition]
    notes: list[str]

    @property
    def guaranteed(self) -> bool:
        """Whether a small enough step of one token, the others frozen, never raises its energy in a sub-layer."""
        return all(condition.holds for condition in self.conditions)

    def __str__(self) -> str:
        """Return the verdict and one line for each condition and note."""
        verdict = "guaranteed" if self.guaranteed else "not guaranteed"
        return "\n".join(
            [f"descent: {verdict}", *map(str, self.conditions), *(f"note: {note}" for note in self.notes)]
        )


def descent_conditions(model: Any) -> DescentConditions:
    """Check the descent guarantee for the weights of an NRGPT or a CEM-Llama.

    Args:
        model: an `NRGPTModel` or `CEMLlamaModel`, or a model with a head around one.

    Returns:
        [`DescentConditions`].
    """
    base = getattr(model, "model", model)
    if not hasattr(base, "block"):
        return _cem_conditions(base)
    block = base.block
    with torch.no_grad():
        conditions = [_exact_gradient(block), _rate(block), _no_dropout(block)]
    notes = [
        "the guarantee is for small steps: a long one can overshoot the valley, and how long is too long depends on "
        "the text",
        "in a forward pass all tokens move at once, so only the first token descends for certain; a later one does "
        "once the tokens before it have settled",
    ]
    if block.config.norm_type == "none":
        notes.append("without a norm nothing bounds the energy from below, so descent need not end in a fixed point")
    return DescentConditions(conditions, notes)


def _cem_conditions(base: Any) -> DescentConditions:
    """Check all descents of a CEM-Llama."""
    config = base.config
    descents = {name: module.descent for name, module in base.named_modules() if hasattr(module, "descent")}
    with torch.no_grad():
        indefinite = [name for name, descent in descents.items() if not _is_definite(descent.precond)]
        sizes = [float(d.initial_step_size if d.step_size is None else d.step_size) for d in descents.values()]
    conditions = [
        Condition(
            "preconditioner",
            not indefinite,
            f"cem_precond={config.cem_precond!r} must be positive definite: {', '.join(indefinite) or 'all'} "
            f"{'are not' if indefinite else 'are'}",
        ),
        Condition("step size", min(sizes, default=1.0) > 0, f"lowest {min(sizes, default=1.0):.3g}"),
        Condition("norm", config.cem_norm_mode != "every_step", f"cem_norm_mode={config.cem_norm_mode!r}"),
    ]
    notes = ["the guarantee is for small steps: a long one can overshoot"]
    if config.cem_norm_mode == "once":
        notes = ["attention energy is concave and falls in steps of any size; the MLP's in small ones"]
    return DescentConditions(conditions, notes)


def _is_definite(precond: Any) -> bool:
    if precond is None:
        return True
    dense = precond.dense().double().cpu()
    return int(torch.linalg.cholesky_ex(dense).info) == 0


def _exact_gradient(block: Any) -> Condition:
    if block.config.exclude_self:
        return Condition("exact gradient", True, "a token does not attend to itself, so a step follows its gradient")
    return Condition(
        "exact gradient",
        False,
        "exclude_self=False: a step leaves out how a token's energy changes through its own key",
    )


def _no_dropout(block: Any) -> Condition:
    active = block.training and block.config.dropout > 0
    reason = f"dropout={block.config.dropout}, {'training' if block.training else 'evaluation'} mode"
    return Condition("no dropout", not active, reason)


def _rate(block: Any) -> Condition:
    """Compare the inference rate with what the norm asks for."""
    size = block.config.hidden_size
    like = block.scale_ff
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    eta = block.scaled(eye).t().double().cpu()
    if block.config.norm_type == "none":
        lowest = float(torch.linalg.eigvalsh((eta + eta.t()) / 2).min())
        holds = lowest >= -TOLERANCE * float(eta.abs().max())
        return Condition(
            "inference rate",
            holds,
            f"without a norm the symmetric part of eta must not be negative: lowest {lowest:.3g}",
        )
    gamma = getattr(block.norm, "weight", None)
    target = torch.eye(size, dtype=torch.float64)
    target = target if gamma is None else torch.diag(gamma.detach().double().cpu())
    if block.config.norm_type != "rmsnorm":
        eta, target = eta - eta.mean(dim=0), target - target.mean(dim=0)
    factor = float((eta * target).sum() / (target * target).sum().clamp(min=1e-300))
    distance = float((eta - factor * target).norm() / eta.norm().clamp(min=1e-300))
    holds = factor >= 0 and (distance <= TOLERANCE or float(eta.norm()) == 0)
    shape = "c diag(gamma)" if block.config.norm_type == "rmsnorm" else "c diag(gamma) + 1 w^T"
    return Condition(
        "inference rate",
        holds,
        f"eta must be {shape} with c >= 0: nearest c {factor:.3g}, relative distance {distance:.2g}",
    )


__all__ = ["Condition", "DescentConditions", "descent_conditions"]
