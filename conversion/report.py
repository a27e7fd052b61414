# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Record where every tensor of a converted model came from."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loopergy.conversion.weight_maps import layer_of

if TYPE_CHECKING:
    from rich.table import Table

Action = Literal["copied", "transformed", "fresh"]
REPORT_FILE = "conversion_report.json"


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of the student.

    Args:
        name (`str`): Its name in the student's state dict.
        source (`str | None`): The teacher's tensor it was made of, or several joined by `" + "`; `None` if fresh.
        action (`str`): `"copied"`, `"transformed"` or `"fresh"`.
        how (`str`): The transform or the initialisation in words.
        shape (`list[int]`): Its shape.
        dtype (`str`): Its dtype, such as `"bfloat16"`.
    """

    name: str
    source: str | None
    action: Action
    how: str
    shape: list[int]
    dtype: str

    @property
    def num_parameters(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass
class ConversionReport:
    """What a conversion did, tensor by tensor.

    `convert` checks it against the teacher and the student before returning it.

    Args:
        teacher (`dict`): `source` (its [`public_name`], or `"memory"`), `model_type`, `class`, `parameters`.
        kept_layers (`list[int]`): Physical layers that keep full attention, in all loops.
        num_layers (`int`): Physical layers.
        num_loops (`int`): Loops.
        mixer (`str`): Mixers of the other layers, joined by commas.
        mixer_options (`dict`): Its options.
        seed (`int`): Seed of the fresh tensors.
        dtype (`str`): dtype of the student.
        tensors (`list[TensorRecord]`): One record per tensor of the student's state dict.
        layer_mixers (`list[str]`): Mixer of each physical layer; empty in reports of earlier versions.
        all_zero (`list[str]`): Teacher tensors that hold nothing but zeros (biases often do).
        verified (`dict | None`): `max_abs_difference` between the logits of the teacher and of the student with all
            layers kept, on random tokens; `None` if they were not compared.
        notes (`list[str]`): Anything else the user should know.
        versions (`dict`): Versions of the libraries.
    """

    teacher: dict[str, Any]
    kept_layers: list[int]
    num_layers: int
    num_loops: int
    mixer: str
    mixer_options: dict[str, Any]
    seed: int
    dtype: str
    tensors: list[TensorRecord]
    layer_mixers: list[str] = field(default_factory=list)
    all_zero: list[str] = field(default_factory=list)
    verified: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """Parameters of the student; a tied head counts once."""
        return sum(record.num_parameters for record in self.tensors if not record.how.startswith("tied to "))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return `{action: {"tensors": ..., "parameters": ...}}` for the three actions; a tied head has none."""
        out = {action: {"tensors": 0, "parameters": 0} for action in ("copied", "transformed", "fresh")}
        for record in self.tensors:
            out[record.action]["tensors"] += 1
            if not record.how.startswith("tied to "):
                out[record.action]["parameters"] += record.num_parameters
        return out

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the report as JSON text, and write it to `path` if one is given."""
        text = json.dumps({"format": 1, **asdict(self)}, indent=1) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, path: str | Path) -> "ConversionReport":
        """Read a report from a file, or from the `conversion_report.json` of a folder.

        Raises:
            ValueError: If the file was written by an unknown format of this report.
        """
        file = Path(path) / REPORT_FILE if Path(path).is_dir() else Path(path)
        data = json.loads(file.read_text(encoding="utf-8"))
        version = data.pop("format", None)
        if version != 1:
            raise ValueError(
                f"{file}: format {version!r} of a conversion report is unknown; this version reads format 1"
            )
        data["tensors"] = [TensorRecord(**record) for record in data["tensors"]]
        return cls(**data)

    def summary(self) -> str:
        """Say in a few lines what was done."""
        counts = self.counts()
        loops = f" x {self.num_loops} loops" if self.num_loops > 1 else ""
        kept = number_ranges(self.kept_layers) or "none"
        lines = [
            f"{self.teacher['class']} ({self.teacher['source']}) -> LT2ForCausalLM, {self.num_layers} layers{loops}, "
            f"{self.num_parameters:,} parameters ({self.teacher['parameters']:,} in the teacher), {self.dtype}",
            f"full attention kept in {len(self.kept_layers)}: {kept}; {self._others()}",
            "; ".join(f"{n['tensors']} tensors {action} ({n['parameters']:,})" for action, n in counts.items()),
            "no teacher tensor left over, no student tensor missing or zero-filled",
        ]
        if self.all_zero:
            lines.append(f"all zero in the teacher already: {', '.join(self.all_zero)}")
        if self.verified is not None:
            lines.append(
                "with all layers kept the logits differ from the teacher's by at most "
                f"{self.verified['max_abs_difference']:.3g} on {self.verified['tokens']} random tokens"
            )
        return "\n".join(lines + self.notes)

    def _others(self) -> str:
        """Say which mixers the layers have that are not kept."""
        where: dict[str, list[int]] = {}
        for layer, name in enumerate(self.layer_mixers):
            where.setdefault(name, []).append(layer)
        where.pop("full", None)
        if len(where) > 1:
            return ", ".join(f"{name} in {len(layers)}: {number_ranges(layers)}" for name, layers in where.items())
        return f"{self.mixer or 'no mixer'} in the other {self.num_layers - len(self.kept_layers)}"

    def table(self) -> "Table":
        """Return a `rich.table.Table`: tensors of the same layers with the same origin share a row."""
        from rich.table import Table

        layers: dict[tuple[str, str, str], list[int]] = {}
        parameters: Counter[tuple[str, str, str]] = Counter()
        for record in self.tensors:
            layer = layer_of(record.name)
            short = record.name.removeprefix("model.").removesuffix(".weight")
            key = (short if layer is None else short.split(".", 2)[2], record.action, record.how)
            layers.setdefault(key, []).extend([] if layer is None else [layer])
            parameters[key] += 0 if record.how.startswith("tied to ") else record.num_parameters
        rows: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
        for (name, action, how), where in layers.items():
            rows.setdefault((number_ranges(where), action, how), []).append((name, parameters[name, action, how]))
        table = Table(title="Where each tensor came from", show_lines=True)
        table.add_column("layers", overflow="fold", max_width=16)
        table.add_column("tensors", overflow="fold", ratio=3)
        table.add_column("action")
        table.add_column("how", overflow="fold", ratio=2)
        table.add_column("parameters", justify="right")
        colour = {"copied": "green", "transformed": "yellow", "fresh": "magenta"}
        for (where, action, how), names in rows.items():
            listed = ", ".join(name.removeprefix("self_attn.") for name, _ in names)
            total = sum(count for _, count in names)
            table.add_row(where or "-", listed, f"[{colour[action]}]{action}[/]", how, f"{total:,}")
        return table

    def print(self) -> None:
        """Show the table and the summary on the screen."""
        from rich.console import Console

        console = Console()
        console.print(self.table())
        console.print(self.summary(), highlight=False, markup=False, soft_wrap=True)

    def check(self, state: Any) -> None:
        """Check that there is exactly one record for each tensor of `state`, with its shape and dtype.

        Args:
            state (`Mapping[str, torch.Tensor]`): The student's state dict.

        Raises:
            ValueError: With the names that do not agree.
        """
        twice = [name for name, times in Counter(record.name for record in self.tensors).items() if times > 1]
        recorded = {record.name: (record.shape, record.dtype) for record in self.tensors}
        actual = {name: (list(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in state.items()}
        names = recorded.keys() | actual.keys()
        wrong = sorted(twice + [name for name in names if recorded.get(name) != actual.get(name)])
        if wrong:
            raise ValueError(f"the report does not describe these tensors of the student: {', '.join(wrong)}")


def dtype_name(dtype: Any) -> str:
    """Return `"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def number_ranges(numbers: Iterable[int]) -> str:
    """Write whole numbers, of layers or loops, in order: `[5, 0, 1, 2]` as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
