# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Stage 3, extension: the student continues as a language model on long rows.

    loss = mean over tokens of -log softmax(student)[next token]  +  kl_weight * KL(teacher || student)

Both on the last loop alone. With `kl_weight=0`, the default, no teacher is in memory.

Rows longer than the student's `max_position_embeddings` are refused unless `extend_to` says so; then the config is
changed, and the rotary base too if `rope_theta` is given. Ouro was trained to 65,536 positions and needs neither.

Source: third stage of LT2's conversion (arXiv 2605.20670); cross-entropy and rate from RADLADS (arXiv 2505.03005).
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from loopergy.distill.body import BodyConfig, BodyTrainer, prepare_body
from loopergy.distill.losses import linear_cross_entropy, linear_kl
from loopergy.distill.stage import StageModule, batch_targets
from loopergy.distill.teacher import head_weight, loop_states
from loopergy.modeling.building_blocks import RotaryEmbedding
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.training.checks import check_extension
from loopergy.training.data import IGNORE


@dataclass
class ExtendConfig(BodyConfig):
    """Settings of stage 3; rates and rows of 32,768 as in LT2's conversion.

    `target_tokens` (there 600M) or `max_steps` must be given.
    """

    length: int = field(default=32768, metadata={"help": "Tokens in a row of the packed data."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate of all parameters."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Schedule of the learning rate."})
    kl_weight: float = field(default=0.0, metadata={"help": "Weight of the last loop's KL; above 0 needs a teacher."})
    extend_to: int | None = field(
        default=None, metadata={"help": "Raise the student's max_position_embeddings to this. None: leave it."}
    )
    rope_theta: float | None = field(
        default=None, metadata={"help": "New base of the rotary embeddings. None: leave it."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.kl_weight < 0:
            raise ValueError(f"`kl_weight` must be at least 0, got {self.kl_weight}.")
        if self.rope_theta is not None and not self.rope_theta > 0:
            raise ValueError(f"`rope_theta` must be above 0, got {self.rope_theta}.")


class ExtendModule(StageModule):
    """Compute cross-entropy and KL of a batch; see the head of this file.

    Args:
        student (`LT2ForCausalLM`): Trains as far as the options of `prepare_body` say.
        teacher (`PreTrainedModel`, *optional*): Needed for `kl_weight` above 0.
        kl_weight (`float`, defaults to 0.0): Weight of the KL.
        chunk_size (`int`, *optional*): Tokens a chunk of logits.
        **body: Options of `prepare_body`.
    """

    def __init__(
        self,
        student: LT2ForCausalLM,
        teacher: PreTrainedModel | None = None,
        *,
        kl_weight: float = 0.0,
        chunk_size: int | None = None,
        **body: Any,
    ):
        super().__init__(student, teacher)
        if kl_weight > 0 and teacher is None:
            raise ValueError(f"kl_weight={kl_weight} needs a teacher; pass one, or kl_weight=0.")
        self.kl_weight, self.chunk_size = kl_weight, chunk_size
        prepare_body(student, **body)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Return the loss; arguments as in `DistillModule.forward`."""
        self.check_length(input_ids)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        targets = batch_targets({**batch, "labels": labels})
        hidden, head = loop_states(self.student, batch)[-1], head_weight(self.student)
        options = {"num_items": num_items_in_batch, "chunk_size": self.chunk_size}
        loss = linear_cross_entropy(hidden, head, targets, **options)
        if self.kl_weight > 0:
            with torch.no_grad():
                teacher_hidden = loop_states(self.teacher, batch)[-1]
            teacher_head, mask = head_weight(self.teacher), targets != IGNORE
            loss = loss + self.kl_weight * linear_kl(hidden, head, teacher_hidden, teacher_head, mask, **options)
        return {"loss": loss}


def extend_positions(student: LT2ForCausalLM, length: int, rope_theta: float | None = None) -> None:
    """Declare that a student works up to `length` tokens, and change its rotary base if one is given.

    Args:
        student (`LT2ForCausalLM`): Changed in place, config and rotary table.
        length (`int`): New `max_position_embeddings`, at least the old one.
        rope_theta (`float`, *optional*): New base of the rotary angles.
    """
    config = student.config
    check_extension(length, config.max_position_embeddings)
    config.max_position_embeddings = length
    if rope_theta is not None:
        config.rope_parameters = {**(config.rope_parameters or {}), "rope_theta": rope_theta}
    mixers: list[Any] = [layer.self_attn for layer in student.model.layers]
    for module in (student.model, *mixers):
        for name, old in list(module.named_children()):
            if isinstance(old, RotaryEmbedding):
                own = copy.copy(config)
                own.__dict__["head_dim"] = old.config.head_dim
                setattr(module, name, RotaryEmbedding(config=own).to(old.inv_freq.device))


class ExtendTrainer(BodyTrainer):
    """Train stage 3; arguments as in `StageTrainer`, `teacher` may be None.

    Example:
        ```python
        args = ExtendConfig("runs/extend", target_tokens=10_000_000, length=32768)
        trainer = ExtendTrainer("student-distilled", None, args, data)
        trainer.train()
        trainer.save_stage("student")
        ```
    """

    stage = "extend"
    allowed_previous = ("distill", "extend")

    def build_module(  # type: ignore[override]
        self, student: LT2ForCausalLM, teacher: PreTrainedModel | None, args: ExtendConfig
    ) -> ExtendModule:
        """Build the `ExtendModule`, with the positions declared."""
        if args.extend_to is not None or args.rope_theta is not None:
            extend_positions(student, args.extend_to or student.config.max_position_embeddings, args.rope_theta)
        options = {"kl_weight": args.kl_weight, "chunk_size": args.loss_chunk_size, **args.body_options()}
        return ExtendModule(student, teacher, **options)
