# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Stage 2, distillation: the student, on its own stream, learns the teacher's distribution over next tokens.

    loss = sum_t w_t(progress) * mean over tokens of KL(teacher_t || student_t)

Teacher loop t teaches student loop t. The weights `w` start uniform over the loops and end on the last
(`loop_weights` in `losses.py`); loops with weight 0 are skipped. Logits are never held whole.

The kept layers have the teacher's attention; everything else comes from stage 1. All parameters train but those of
exit gate and indexers: the mixers (kept ones included) with `learning_rate`, the rest with `body_learning_rate`. The
teacher's final pre-training rate is a good body rate; for Ouro that is about 1e-5.

Source: second stage of LT2's conversion (arXiv 2605.20670); rates and full-vocabulary KL from arXiv 2512.20569.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from loopergy.conversion import restore_layers
from loopergy.distill.losses import IGNORE, linear_kl, loop_weights
from loopergy.distill.stage import (
    StageConfig,
    StageError,
    StageModule,
    StageRecord,
    StageTrainer,
    batch_targets,
    check_previous,
    indexer_parameters,
    kept_layers,
)
from loopergy.distill.teacher import head_weight, loop_states, num_loops
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM


@dataclass
class DistillConfig(StageConfig):
    """Settings of stage 2; the defaults are those of LT2's conversion (600M tokens, rows of 4096)."""

    length: int = field(default=4096, metadata={"help": "Tokens in a row of the packed data."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Learning rate of the mixers, kept ones included."})
    body_learning_rate: float | None = field(
        default=7e-6, metadata={"help": "Learning rate of everything else. None: that of the mixers."}
    )
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Schedule of the learning rates."})
    kept_layers: list[int] | None = field(
        default=None, metadata={"help": "The student must keep full attention in exactly these layers. None: any."}
    )
    direction: str = field(default="forward", metadata={"help": "Divergence: forward, reverse or js."})
    temperature: float = field(default=1.0, metadata={"help": "Divides both logits; the loss is times its square."})
    top_k: int | None = field(
        default=None, metadata={"help": "Compare the teacher's k likeliest tokens only. None: the full vocabulary."}
    )
    tail_bucket: bool = field(default=True, metadata={"help": "With top_k, one more outcome for all other tokens."})
    truncate_vocabulary: bool = field(
        default=False, metadata={"help": "Cut a larger teacher vocabulary to the student's and renormalise."}
    )
    uniform_frac: float = field(default=0.3, metadata={"help": "Share of the steps with all loops alike."})
    anneal_frac: float = field(default=0.1, metadata={"help": "Share of the steps that move to the last loop."})
    final_mass: float = field(default=1.0, metadata={"help": "Weight of the last loop at the end."})
    ramp_frac: float = field(default=0.0, metadata={"help": "Share of the steps that grow from loop 1 to all loops."})

    def schedule(self, progress: float, loops: int) -> list[float]:
        """Return the weight of each loop at this share of the steps."""
        return loop_weights(
            progress,
            loops,
            uniform_frac=self.uniform_frac,
            anneal_frac=self.anneal_frac,
            final_mass=self.final_mass,
            ramp_frac=self.ramp_frac,
        )

    def kl_options(self) -> dict[str, Any]:
        """Return the options of `linear_kl`."""
        return {
            "direction": self.direction,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "tail_bucket": self.tail_bucket,
            "truncate_vocabulary": self.truncate_vocabulary,
            "chunk_size": self.loss_chunk_size,
        }


class DistillModule(StageModule):
    """Compute the per-loop KL of a batch; see the head of this file.

    Args:
        student (`LT2ForCausalLM`): All of it trains but exit gate and indexers.
        teacher (`PreTrainedModel`): Same number of loops.
        args (`DistillConfig`): Schedule and options of the KL.
    """

    def __init__(self, student: LT2ForCausalLM, teacher: PreTrainedModel, args: DistillConfig):
        super().__init__(student, teacher)
        loops = num_loops(teacher)
        if student.config.num_loops != loops:
            raise ValueError(f"The student has {student.config.num_loops} loops, the teacher {loops}; use the same.")
        self.args = args
        args.schedule(0.0, loops)
        freeze_unreached(student)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        progress: float = 1.0,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Return the loss.

        Args:
            input_ids (`torch.Tensor` of shape `[batch, length]`): Tokens.
            attention_mask (`torch.Tensor` of shape `[batch, length]`, *optional*): 0 at pads.
            labels (`torch.Tensor` of shape `[batch, length]`, *optional*): Say which positions count.
            progress (`float`, defaults to 1.0): Share of the steps done; sets the weights of the loops.
            num_items_in_batch (`int`, *optional*): Positions that count in the whole step. Default: in this batch.
            **kwargs: `position_ids` and packing arguments, for teacher and student.

        Returns:
            `dict`: `loss`, a scalar.
        """
        self.check_length(input_ids)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        mask = batch_targets({**batch, "labels": labels}) != IGNORE
        with torch.no_grad():
            teacher_states = loop_states(self.teacher, batch)
        student_states = loop_states(self.student, batch)
        weights = self.args.schedule(progress, len(teacher_states))
        heads = head_weight(self.student), head_weight(self.teacher)
        terms = [
            weight * linear_kl(s, heads[0], t, heads[1], mask, num_items=num_items_in_batch, **self.args.kl_options())
            for weight, s, t in zip(weights, student_states, teacher_states, strict=True)
            if weight > 0
        ]
        return {"loss": torch.stack(terms).sum()}


def freeze_unreached(student: LT2ForCausalLM) -> None:
    """Make all parameters trainable but those of exit gate and indexers: no loss of stages 2 and 3 reaches them."""
    student.requires_grad_(True)
    gate: nn.Module | None = student.model.early_exit_gate
    for parameter in (*(() if gate is None else gate.parameters()), *indexer_parameters(student)):
        parameter.requires_grad_(False)


class DistillTrainer(StageTrainer):
    """Train stage 2; arguments as in `StageTrainer`.

    The student is that of stage 1 with the selected layers restored: `prepare_student` makes it.

    Example:
        ```python
        student, record = prepare_student("student-aligned", teacher, selection.kept_layers)
        args = DistillConfig("runs/distill", target_tokens=10_000_000, length=1024)
        trainer = DistillTrainer(student, teacher, args, data, previous=record)
        trainer.train()
        trainer.save_stage("student-distilled")
        ```
    """

    stage = "distill"
    allowed_previous = ("align", "select", "distill")

    def build_module(  # type: ignore[override]
        self, student: LT2ForCausalLM, teacher: PreTrainedModel | None, args: DistillConfig
    ) -> DistillModule:
        """Build the `DistillModule`, after checking the kept layers."""
        if teacher is None:
            raise ValueError("Stage 2 needs a teacher.")
        now = kept_layers(student.config)
        if args.kept_layers is not None and sorted(args.kept_layers) != now:
            missing, extra = sorted(set(args.kept_layers) - set(now)), sorted(set(now) - set(args.kept_layers))
            raise StageError(
                f"`kept_layers` names layers that the student does not keep: {missing}; the student keeps layers that "
                f"it does not name: {extra}. Make the student with `prepare_student(folder, teacher, kept_layers)`."
            )
        return DistillModule(student, teacher, args)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Tell the module how far training is; evaluation weighs the loops as at the end."""
        progress = self.state.global_step / max(self.state.max_steps, 1) if model.training else 1.0
        return super().compute_loss(model, {**inputs, "progress": progress}, *args, **kwargs)


def prepare_student(
    aligned: LT2ForCausalLM | str | Path,
    teacher: PreTrainedModel,
    layers: list[int],
    previous: StageRecord | None = None,
) -> tuple[LT2ForCausalLM, StageRecord]:
    """Make the student of stage 2: the selected layers get the teacher's attention back, all else is from stage 1.

    Args:
        aligned (`LT2ForCausalLM` or `str`): The student of stage 1, or its folder.
        teacher (`PreTrainedModel`): Gives the attention.
        layers (`list[int]`): Physical layers to keep, those that the student has kept already included.
        previous (`StageRecord`, *optional*): Record of stage 1, for a student in memory. Default: from its folder.

    Returns:
        `tuple`: The student, and a record of the stage `"select"` to pass on as `previous`.

    Raises:
        StageError: The student does not come from stage 1.
    """
    student = aligned if isinstance(aligned, nn.Module) else LT2ForCausalLM.from_pretrained(str(aligned))
    if previous is None and student.name_or_path:
        previous = StageRecord.load(student.name_or_path)
    record = check_previous(previous, student.config, ("align",), "distill")
    wanted = [layer for layer in layers if layer not in kept_layers(student.config)]
    if wanted:
        student = restore_layers(student, teacher, wanted)
    return student, StageRecord.of("select", student.config, record)
