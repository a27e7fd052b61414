# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""How much of the student trains in stages 2 and 3 beside the mixers that replaced attention.

| `body`     | mixers that replaced attention | kept attention, MLPs | embeddings, norms, head |
|------------|--------------------------------|----------------------|-------------------------|
| `"full"`   | train                          | train                | train                   |
| `"lora"`   | train                          | low-rank adapters    | frozen                  |
| `"frozen"` | train                          | frozen               | frozen                  |

Exit gate and indexers are frozen in any case: no loss of these stages reaches them. The optimizer keeps two moments of
what trains and nothing of the rest. What belongs to attention and mixers has `learning_rate`, adapters of kept
attention included; all else has `body_learning_rate`. A finished stage is a plain model: see `adapters.py`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loopergy.distill.adapters import ADAPTER_FILE, adapted_layers, add_adapters, merge_adapters, plain_weights
from loopergy.distill.adapters import save_adapters as write_adapters
from loopergy.distill.align import aligned_layers
from loopergy.distill.stage import StageConfig, StageError, StageTrainer, indexer_parameters
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM

BODIES = ("full", "lora", "frozen")


@dataclass
class BodyConfig(StageConfig):
    """Settings of the stages that can train the whole student."""

    body: str = field(
        default="full",
        metadata={
            "help": "What trains beside the new mixers: full (all), lora (adapters of peft) or frozen (nothing)."
        },
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapters of body lora."})
    lora_alpha: float = field(
        default=32.0, metadata={"help": "Adapters of body lora add lora_alpha / lora_rank times their product."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.body not in BODIES:
            raise ValueError(f"`body` must be one of {BODIES}, got {self.body!r}.")
        if self.lora_rank < 1:
            raise ValueError(f"`lora_rank` must be at least 1, got {self.lora_rank}.")
        if self.lora_alpha <= 0:
            raise ValueError(f"`lora_alpha` must be above 0, got {self.lora_alpha}.")

    def body_options(self) -> dict[str, Any]:
        """Return the options of `prepare_body`."""
        return {"body": self.body, "rank": self.lora_rank, "alpha": self.lora_alpha, "seed": self.seed}


def prepare_body(
    student: LT2ForCausalLM, body: str = "full", rank: int = 16, alpha: float = 32.0, seed: int = 0
) -> None:
    """Make trainable what the table of this file says, and freeze the rest.

    Adapters of a stage before, on a student that is still in memory, are merged first.

    Args:
        student (`LT2ForCausalLM`): Changed in place.
        body (`str`, defaults to `"full"`): `"full"`, `"lora"` or `"frozen"`.
        rank, alpha (`int`, `float`): Of the adapters.
        seed (`int`, defaults to 0): Of the adapters' random matrices.

    Raises:
        ValueError: A quantised student, or a frozen body without a mixer to train.
        ImportError: Adapters without `peft`.
    """
    if getattr(student, "is_quantized", False):
        raise ValueError(
            "The student is quantised, and what a stage leaves is a plain model: the weights that training adds to "
            "are gone. Load it without `quantization_config`, and quantise the finished student."
        )
    merge_adapters(student)
    student.requires_grad_(True)
    gate: nn.Module | None = student.model.early_exit_gate
    for parameter in (*(() if gate is None else gate.parameters()), *indexer_parameters(student)):
        parameter.requires_grad_(False)
    if body == "full":
        return
    mixers = {f"model.layers.{layer}.self_attn" for layer in aligned_layers(student)}
    if body == "frozen" and not mixers:
        raise ValueError("`body='frozen'` trains the mixers that replaced attention, and this student has none.")
    trained = [p for name in mixers for p in student.get_submodule(name).parameters() if p.requires_grad]
    student.requires_grad_(False)
    if body == "lora":
        inside = tuple(f"{name}." for name in mixers)
        linear = [name for name, module in student.model.layers.named_modules() if isinstance(module, nn.Linear)]
        names = [f"model.layers.{name}" for name in linear]
        outside = [name for name in names if not name.startswith(inside)]
        add_adapters(student, outside, rank, alpha, seed)
    for parameter in trained:
        parameter.requires_grad_(True)


class BodyTrainer(StageTrainer):
    """Train a stage whose student may carry adapters; arguments as in `StageTrainer`.

    Raises:
        ValueError: Adapters together with FSDP or DeepSpeed.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if adapted_layers(self.student) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError(
                "`body='lora'` trains whole on every process: adapters are not merged from shards. Launch with plain "
                "data parallelism (recipes/accelerate/ddp.yaml), or set `body` to 'full' or 'frozen'."
            )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        if state_dict is None and self.args.should_save and adapted_layers(self.student):
            state_dict = plain_weights(self.student)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write what a checkpoint has beside the student itself."""
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            write_adapters(self.student, output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        has_adapters = (Path(resume_from_checkpoint) / ADAPTER_FILE).is_file()
        if has_adapters != bool(adapted_layers(self.student)):
            before = "with `body='lora'`" if has_adapters else "without adapters"
            raise StageError(
                f"Checkpoint {resume_from_checkpoint!r} is of a run {before}; resume with the same `body`."
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)
