# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Watch a model descend: the energy of every token over the steps, as data and as a picture."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loopergy.conversion.folders import replace_file
from loopergy.modeling.descent_guarantee import Condition, DescentConditions, descent_conditions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("attention", "feed_forward", "total")


@dataclass
class EnergyTrace:
    """Energies of one sequence.

    Args:
        energies (`dict[str, torch.Tensor]`): part (`"attention"`, `"feed_forward"`, `"total"`) to energies of shape
            (layers, steps + 1, tokens): before each step and after the last.
        tokens (`list[str]`): what each token reads as, or its id.
        state_change (`torch.Tensor` of shape (steps, tokens), *optional*): how far each step moves the normed state of
            a token (root mean square over the width), in a model of one repeated block: 0 is a fixed point.
        conditions ([`DescentConditions`], *optional*): which conditions of the model's descent guarantee hold for the
            weights, and which do not.
    """

    energies: dict[str, torch.Tensor]
    tokens: list[str]
    state_change: torch.Tensor | None = None
    conditions: DescentConditions | None = None

    def mean(self, part: str) -> torch.Tensor:
        """Return the mean over tokens, (layers, steps + 1)."""
        return self.energies[part].mean(-1)

    def share_rising(self, part: str) -> torch.Tensor:
        """Return the share of tokens whose energy rises in each step, (layers, steps), between 0 and 1.

        A rise within rounding, below 1e-6 of the layer's largest energy, does not count.
        """
        energies = self.energies[part]
        tolerance = 1e-6 * energies.abs().amax(dim=(1, 2), keepdim=True)
        return (energies.diff(dim=1) > tolerance).to(energies.dtype).mean(-1)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, lists and strings."""
        values: dict[str, Any] = {"tokens": self.tokens}
        values["conditions"] = None if self.conditions is None else asdict(self.conditions)
        values["state_change"] = None if self.state_change is None else self.state_change.tolist()
        for part, energies in self.energies.items():
            values[part] = {
                "mean": self.mean(part).tolist(),
                "share_rising": self.share_rising(part).tolist(),
                "energies": energies.tolist(),
            }
        return values

    def to_json(self, path: str | Path) -> None:
        """Write [`to_dict`] to a file, replacing an old one in one step; folders above it are made."""
        replace_file(path, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> "EnergyTrace":
        """Read what [`to_json`] wrote."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        change, known = values["state_change"], values["conditions"]
        conditions = known and DescentConditions([Condition(**one) for one in known["conditions"]], known["notes"])
        return cls(
            {part: torch.tensor(values[part]["energies"]) for part in PARTS if part in values},
            values["tokens"],
            None if change is None else torch.tensor(change),
            conditions,
        )

    def __str__(self) -> str:
        """Tabulate mean energy before the first and after the last step, and the share of tokens that rise."""
        lines = [f"{'part':<13}{'layer':>6}{'steps':>7}{'before':>14}{'after':>14}{'tokens rising':>15}"]
        for part, energies in self.energies.items():
            rising = self.share_rising(part)
            for layer, mean in enumerate(self.mean(part)):
                lines.append(
                    f"{part:<13}{layer:>6}{energies.shape[1] - 1:>7}{mean[0]:>14.6g}{mean[-1]:>14.6g}"
                    f"{rising[layer].mean():>14.1%} "
                )
        if self.state_change is not None:
            change = self.state_change.mean(-1)
            lines.append(
                f"the normed state moves by {change[0]:.3g} in the first step, by {change[-1]:.3g} in the last"
            )
        if self.conditions is not None:
            lines.append(str(self.conditions))
        return "\n".join(lines)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draw one row per part: mean energy over steps, the change of each token, the share that rises.

        Args:
            path (*optional*): where to write the picture; its ending gives the format. Folders above it are made.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        picture_endings()
        figure = _draw(self)
        if path is not None:
            path = Path(path).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, bbox_inches="tight")
        return figure


def picture_endings() -> set[str]:
    """Return the endings of the pictures that can be written, without the dot.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError('Pictures need matplotlib: pip install "loopergy[plots]"') from error
    return set(FigureCanvasBase.get_supported_filetypes())


def trace(
    model: Any, input_ids: torch.Tensor | list[int], num_steps: int | None = None, tokenizer: Any = None
) -> EnergyTrace:
    """Run an energy-based model on one sequence and return its energies.

    Args:
        model: a CEM-Llama or NRGPT model, with a head or without, or one with adapters of `peft`, which count.
        input_ids (`torch.LongTensor` of shape (tokens,) or (1, tokens), or a list): the sequence.
        num_steps (`int`, *optional*): steps to run; the config's by default.
        tokenizer (*optional*): names the tokens.

    Returns:
        [`EnergyTrace`], on the CPU.

    Raises:
        ValueError: for a model without energies, or more than one sequence.
    """
    ids = torch.as_tensor(input_ids, dtype=torch.long)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise ValueError(f"input_ids of shape {tuple(ids.shape)}: trace takes one sequence, (tokens,) or (1, tokens).")
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    model_type = model.config.model_type
    if model_type not in ("cem_llama", "nrgpt"):
        raise ValueError(f"model_type={model_type!r} has no energies. Models that have: cem_llama, nrgpt.")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _step_states(base) as states:
            outputs = base(
                ids.to(model.device), num_steps=num_steps, output_energies=True, use_cache=False, return_dict=True
            )
    finally:
        model.train(was_training)
    parts = [part for part in PARTS if outputs.energies.get(part) is not None]
    if not parts:
        raise ValueError(
            "No sub-layer of this model descends an energy: see cem_attention, cem_mlp and the cem_tie_* fields."
        )
    names = [str(token) for token in ids[0].tolist()]
    if tokenizer is not None:
        names = tokenizer.convert_ids_to_tokens(ids[0].tolist())
    result = EnergyTrace({part: outputs.energies[part][:, :, 0].cpu() for part in parts}, names)
    if states:
        normed = torch.stack([base.block.norm(state)[0] for state in states]).detach()
        result.state_change = normed.diff(dim=0).square().mean(dim=-1).sqrt().cpu()
    result.conditions = descent_conditions(base)
    return result


@contextmanager
def _step_states(base: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the state before the first and after each application of a repeated block, if the model has one."""
    states: list[torch.Tensor] = []
    block = getattr(base, "block", None)
    if block is None:
        yield states
        return

    def collect(module: Any, inputs: tuple, output: torch.Tensor) -> None:
        if not states:
            states.append(inputs[0])
        states.append(output)

    hook = block.register_forward_hook(collect)
    try:
        yield states
    finally:
        hook.remove()


def _draw(trace: EnergyTrace) -> "Figure":
    from loopergy.distill.pictures import new_figure, styled

    @styled
    def draw() -> "Figure":
        rows = len(trace.energies)
        figure, axes = new_figure(rows, 3, figsize=(11.5, 2.7 * rows), squeeze=False)
        for row, part in zip(axes, trace.energies, strict=True):
            _draw_part(figure, row, trace, part)
        figure.subplots_adjust(wspace=0.32, hspace=0.55)
        return figure

    return draw()


def _draw_part(figure: "Figure", row: Any, trace: EnergyTrace, part: str) -> None:
    """Draw one part's three panels: mean over steps, change per token, share of tokens that rise."""
    import matplotlib

    energies = trace.energies[part]
    layers, points, _ = energies.shape
    colours = matplotlib.colormaps["viridis"](torch.linspace(0, 0.9, layers).tolist())
    title = part.replace("_", " ")
    mean = trace.mean(part)
    rising = trace.share_rising(part)
    for layer in range(layers):
        row[0].plot(range(points), (mean[layer] - mean[layer, 0]).tolist(), color=colours[layer], marker="o", ms=3)
        row[2].plot(range(1, points), rising[layer].tolist(), color=colours[layer], marker="o", ms=3)
    row[0].axhline(0, color="#8a94a3", linewidth=0.8)
    row[0].set_title(f"{title} energy")
    row[0].set_ylabel("mean change")
    row[2].set_title("share of tokens that rise")
    row[2].set_ylim(-0.03, 1.03)
    change = (energies[:, -1] - energies[:, 0]) if layers > 1 else energies[0, 1:] - energies[0, :1]
    limit = float(change.abs().max().clamp(min=1e-12))
    image = row[1].imshow(
        change.numpy(), aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest"
    )
    row[1].set_title("each token (blue: down)")
    row[1].set_ylabel("layer" if layers > 1 else "step")
    row[1].set_xlabel("token")
    if layers == 1:
        row[1].set_yticks(range(points - 1), range(1, points))
    figure.colorbar(image, ax=row[1], fraction=0.05)
    for axis in (row[0], row[2]):
        axis.set_xlabel("step")
        axis.set_xticks(range(points) if points <= 12 else range(0, points, points // 6))
        axis.grid(True, axis="y")
