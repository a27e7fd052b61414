# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What recipes are made of: the parts that are no trainer's, and how a file or a mapping is read."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from loopergy.distill.calibrate import PARTS
from loopergy.training.checks import check_least
from loopergy.training.fields import check_keys, field_names, read_part
from loopergy.training.yaml_values import yaml_value

# What a part of a recipe may not set, as the recipe as a whole, or the command, does.
_NOT_IN_A_PART = {
    "output_dir": "the folder of the run holds every stage; give it to the command (-o)",
    "data_seed": "the order of the data comes from the recipe's own `seed`; set that",
    "resume_from_checkpoint": "a stage that was interrupted goes on from its own last checkpoint",
    "eval_strategy": "the stages are measured on the recipe's `evaluate` text; no other is read",
    "push_to_hub": "a stage is no finished model; `loopergy push` sends one",
    "label_smoothing_factor": "the losses of the stages have no smoothing",
    "neftune_noise_alpha": "the stages add no noise to the embeddings",
    "use_liger_kernel": "it replaces layers of stock models; `kl_backend: liger` takes its fused KL",
}


@dataclass
class EvaluateSettings:
    """The `evaluate` part of a recipe: the held-out text after every stage."""

    num_tokens: int = field(default=32768, metadata={"help": "Held-out tokens; 0 skips the evaluation."})
    length: int = field(default=512, metadata={"help": "Tokens in a row of them."})
    batch_size: int = field(default=1, metadata={"help": "Rows in a batch of them."})

    def __post_init__(self):
        check_least("evaluate", self, num_tokens=0, length=2, batch_size=1)


@dataclass
class CalibrateSettings:
    """The `calibrate` part of a recipe: a closed-form start of the new mixers, before any training."""

    num_tokens: int = field(default=8192, metadata={"help": "Tokens to fit on, of the training documents."})
    length: int = field(default=512, metadata={"help": "Tokens in a row of them."})
    batch_size: int = field(default=1, metadata={"help": "Rows in a batch of them."})
    parts: list[str] = field(
        default_factory=lambda: list(PARTS), metadata={"help": "What to fit: memory, output, or both."}
    )

    def __post_init__(self):
        check_least("calibrate", self, num_tokens=1, length=2, batch_size=1)
        if set(self.parts) - set(PARTS):
            raise ValueError(f"calibrate: `parts` must be a list of some of {PARTS}, got {self.parts!r}.")


@dataclass
class SelectSettings:
    """The `select` part of a recipe."""

    keep: int | float | list[int] | str = field(
        default=0.25, metadata={"help": "Layers to keep: a number, a share, or the layers (strategy given)."}
    )
    strategy: str = field(
        default="oneshot",
        metadata={"help": "One of oneshot, greedy_add, greedy_remove, leave_one_out, mse, uniform, given."},
    )
    num_tokens: int = field(
        default=65536, metadata={"help": "Tokens to score the candidates on, of the training documents."}
    )
    length: int = field(default=512, metadata={"help": "Tokens in a row of them."})
    batch_size: int = field(default=1, metadata={"help": "Rows in a batch of them."})
    budget_tokens: int = field(default=0, metadata={"help": "Tokens to train each candidate on first (oneshot only)."})
    tasks: list[dict[str, Any]] = field(
        default_factory=list, metadata={"help": "Score the candidates on these tasks instead of text."}
    )

    def __post_init__(self):
        unseen = self.strategy in ("given", "uniform")
        check_least("select", self, num_tokens=0 if unseen else 1, length=2, batch_size=1, budget_tokens=0)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read the keys and values of a YAML file; `1e-4` is a number.

    Raises:
        ValueError: The file is not a mapping.
    """
    values = yaml_value(Path(path).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a recipe is a mapping of keys, got {type(values).__name__}.")
    return values


class RecipeFile:
    """Read a recipe, a dataclass whose fields are its keys, from a mapping or a YAML file."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "recipe") -> Self:
        """Build a recipe from a mapping; unknown keys are an error that lists the known ones."""
        check_keys(source, values, field_names(cls))
        for entry in dataclasses.fields(cls):  # type: ignore[arg-type]
            needed = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
            if needed and entry.name not in values:
                raise ValueError(f"{source}: the key `{entry.name}` is missing.")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a recipe from a YAML file."""
        return cls.from_dict(read_recipe(path), str(path))


def read_stage(
    name: str, values: Any, kind: type, more: Sequence[str] = (), barred: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the part of a recipe for a stage that trains, as [`read_part`] does.

    Args:
        name (`str`): The stage.
        values (mapping): Fields of its config class.
        kind (`type`): The config class.
        more (sequence of `str`): Other keys that the part may have.
        barred (mapping, *optional*): Fields that it may not have, and why, beside those of every stage.

    Raises:
        ValueError: As `read_part`, or a field that it may not have.
    """
    part = read_part(name, values, kind, more)
    usual = {entry.name: entry.default for entry in dataclasses.fields(kind)}
    for key, reason in {**_NOT_IN_A_PART, **(barred or {})}.items():
        if key in part and part[key] != usual.get(key):
            raise ValueError(f"{name}: `{key}` cannot be set here, got {part[key]!r}: {reason}.")
    return part


@contextmanager
def naming(part: str) -> Iterator[None]:
    """Put the name of a recipe's part in front of a `ValueError` that does not name it."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{part}:"):
            raise
        raise ValueError(f"{part}: {error}") from error
