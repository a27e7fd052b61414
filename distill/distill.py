# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Stage 2, distillation: the student, on its own stream, learns the teacher's distribution over next tokens.

    loss = sum_t w_t(progress) * mean over tokens of KL(teacher_t || student_t)

Teacher loop t teaches student loop t. The weights `w` start uniform over the loops and end on the last
(`loop_weights` in `losses.py`); loops with weight 0 are skipped. Logits are never held whole.

The kept layers have the teacher's attention; everything else comes from stage 1. All parameters train but those of
exit gate and indexers: the mixers (kept ones included) with `learning_rate`, the rest with `body_learning_rate`. The
teacher's final pre-training rate is a good body rate; for Ouro that is about 1e-5. Less trains with the option `body`:
see `body.py`.

Source: second stage of LT2's conversion (arXiv 2605.20670); rates and full-vocabulary KL from arXiv 2512.20569.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from loopergy.conversion import restore_layers
from loopergy.distill.body import BodyConfig, BodyTrainer, prepare_body
from loopergy.distill.losses import check_kl_options, linear_kl, loop_weights
from loopergy.distill.stage import (
    StageError,
    StageModule,
    StageRecord,
    batch_targets,
    check_previous,
    kept_layers,
)
from loopergy.distill.teacher import check_same_loops, head_weight, loop_states, num_loops
from loopergy.distill.teacher_states import TeacherStates, write_teacher_states
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.training.data import IGNORE


@dataclass
class DistillConfig(BodyConfig):
    """Settings of stage 2; rates and rows of 4096 as in LT2's conversion.

    `target_tokens` (there 600M) or `max_steps` must be given.
    """

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
    kl_backend: str = field(
        default="torch", metadata={"help": "torch, or liger: liger-kernel's fused form, of the full vocabulary."}
    )
    uniform_frac: float = field(default=0.3, metadata={"help": "Share of the steps with all loops alike."})
    anneal_frac: float = field(default=0.1, metadata={"help": "Share of the steps that move to the last loop."})
    final_mass: float = field(default=1.0, metadata={"help": "Weight of the last loop at the end."})
    ramp_frac: float = field(default=0.0, metadata={"help": "Share of the steps that grow from loop 1 to all loops."})
    teacher_states: str | None = field(
        default=None,
        metadata={"help": "Folder with the teacher's states of this run's rows; what is missing is written first."},
    )
    teacher_states_dtype: str | None = field(
        default=None, metadata={"help": "Write them in this dtype, such as bfloat16. None: the teacher's."}
    )

    def __post_init__(self):
        super().__post_init__()
        check_kl_options(self.direction, self.temperature, self.top_k, self.kl_backend)
        if self.teacher_states_dtype not in (None, "bfloat16", "float16", "float32", "float64"):
            raise ValueError(
                f"`teacher_states_dtype` must be bfloat16, float16, float32, float64 or None for the teacher's, got "
                f"{self.teacher_states_dtype!r}."
            )

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
            "backend": self.kl_backend,
        }


class DistillModule(StageModule):
    """Compute the per-loop KL of a batch; see the head of this file.

    Args:
        student (`LT2ForCausalLM`): Trains as far as `args.body` says, see `prepare_body`.
        teacher (`PreTrainedModel`, *optional*): Same number of loops. None: `states` stand for it.
        args (`DistillConfig`): Schedule and options of the KL.
        states (`TeacherStates`, *optional*): The teacher's states of the rows to train on.
    """

    def __init__(
        self,
        student: LT2ForCausalLM,
        teacher: PreTrainedModel | None,
        args: DistillConfig,
        states: TeacherStates | None = None,
    ):
        super().__init__(student, teacher)
        self.states = states
        loops = num_loops(self.teacher) if states is None else states.num_loops
        check_same_loops(student, loops)
        self.args = args
        args.schedule(0.0, loops)
        prepare_body(student, **args.body_options())

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
        weights = self.args.schedule(progress, self.student.config.num_loops)
        wanted, teacher_head = self._teacher_side(batch, [loop for loop, weight in enumerate(weights) if weight > 0])
        student_states, head = loop_states(self.student, batch), head_weight(self.student)
        options = {"mask": mask, "num_items": num_items_in_batch, **self.args.kl_options()}
        terms = [
            weights[loop] * linear_kl(student_states[loop], head, state, teacher_head, **options)
            for loop, state in wanted.items()
        ]
        return {"loss": torch.stack(terms).sum()}

    @property
    def has_teacher(self) -> bool:
        """Whether the teacher itself is there."""
        return self._outside[0] is not None

    @torch.no_grad()
    def _teacher_side(self, batch: dict[str, Any], loops: list[int]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Return the teacher's states of some loops, and its head; from disk for the rows trained on alone."""
        if self.states is not None and (self.training or not self.has_teacher):
            self.states.to(batch["input_ids"].device)
            return self.states.read(batch, loops), self.states.head
        states = loop_states(self.teacher, batch)
        return {loop: states[loop] for loop in loops}, head_weight(self.teacher)


class DistillTrainer(BodyTrainer):
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

    args: DistillConfig
    stage = "distill"
    allowed_previous = ("align", "select", "distill")

    def build_module(  # type: ignore[override]
        self, student: LT2ForCausalLM, teacher: PreTrainedModel | None, args: DistillConfig
    ) -> DistillModule:
        """Build the `DistillModule`, after checking the kept layers."""
        if teacher is None and args.teacher_states is None:
            raise ValueError("Stage 2 needs a teacher, or `teacher_states` of one.")
        now = kept_layers(student.config)
        if args.kept_layers is not None and sorted(args.kept_layers) != now:
            missing, extra = sorted(set(args.kept_layers) - set(now)), sorted(set(now) - set(args.kept_layers))
            raise StageError(
                f"`kept_layers` names layers that the student does not keep: {missing}; the student keeps layers that "
                f"it does not name: {extra}. Make the student with `prepare_student(folder, teacher, kept_layers)`."
            )
        states = TeacherStates(args.teacher_states) if teacher is None and args.teacher_states else None
        return DistillModule(student, teacher, args, states)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Write the teacher's states that are missing, if `teacher_states` asks for them; then train as all stages do.

        The main process writes, and the others wait for it, at most `ddp_timeout` seconds.
        """
        module: Any = self.model
        data: Any = self.train_dataset
        settings: Any = self.args
        if settings.teacher_states is not None:
            if module.has_teacher and settings.process_index == 0:
                write_teacher_states(module.teacher, data, settings.teacher_states, settings)
            self.accelerator.wait_for_everyone()
            module.states = TeacherStates(settings.teacher_states)
            module.states.check(data)
        return super().train(*args, **kwargs)

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
