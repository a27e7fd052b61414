# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Stages before all others: train a looped model from nothing, as Ouro was, so that there is a teacher.

**Pre-training.** With \(L_t\) the cross-entropy of a token after loop t, and p the exit distribution that the gate
makes of the T states:

    loss = mean over tokens of  sum_t p_t L_t  -  beta * H(p)

The entropy term keeps the gate from settling on one loop before the others have learnt anything.

**Exit gate.** Then the model stays as it is and only its gate trains. Another loop is worth its price if it lowers the
loss of this token: with \(I_t = \max(0, L_t - L_{t+1})\) the gate after loop t should say "go on" with probability
\(w_t = \sigma(k (I_t - \gamma))\):

    loss = mean over tokens and t < T of  BCE(1 - lambda_t, w_t)

The paper numbers the gate in this sum from 2 to T. Read literally, the gate after loop t would answer whether loop t
has helped, the first gate would never learn, and the last one, which nothing reads, would. Here the gate after loop t
answers what it is asked when the model runs: whether loop t + 1 will help. It also serves a converted student
(`lt2` with an exit gate), whose loops are worth something else than its teacher's.

Source: Ouro, arXiv 2510.25741: entropy-regularised objective, and adaptive gate training with k = 50, gamma = 0.005.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from loopergy.distill.losses import linear_token_losses
from loopergy.distill.stage import StageConfig, StageModule, StageTrainer, batch_targets
from loopergy.distill.teacher import head_weight, model_inputs
from loopergy.modeling.looped_outputs import exit_distribution
from loopergy.training.checks import check_least
from loopergy.training.data import IGNORE


@dataclass
class PretrainConfig(StageConfig):
    """Settings of pre-training."""

    learning_rate: float = field(default=3e-4, metadata={"help": "Peak learning rate."})
    weight_decay: float = field(
        default=0.1, metadata={"help": "Weight decay of matrices; norms, biases and decay parameters have none."}
    )
    warmup_steps: float = field(default=0.02, metadata={"help": "Steps of warm-up, or a share of all steps."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    entropy_weight: float = field(default=0.05, metadata={"help": "beta, the weight of the exit entropy."})

    def __post_init__(self):
        super().__post_init__()
        check_least("", self, entropy_weight=0)


@dataclass
class GateConfig(StageConfig):
    """Settings of the exit gate's own training."""

    learning_rate: float = field(default=1e-3, metadata={"help": "Learning rate of the gate."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    steepness: float = field(default=50.0, metadata={"help": "k: how sharply a gain counts as worth a loop."})
    worthwhile_gain: float = field(
        default=0.005,
        metadata={"help": "gamma: loss reduction (nats) at which another loop is taken with probability 1/2."},
    )

    def __post_init__(self):
        super().__post_init__()
        check_least("", self, steepness=0)


def check_loops(loops: int) -> None:
    """Raise `ValueError` for a model with too few loops to train a gate."""
    if loops < 2:
        raise ValueError(f"the exit gate's training needs at least two loops, the model's `num_loops` is {loops}.")


@dataclass
class LoopLosses:
    """What a looped model says about a batch, loop by loop.

    Args:
        losses (`torch.Tensor` of shape `[batch, length, loops]`): Cross-entropy in nats, 0 where there is no target.
        gate_logits (`torch.Tensor` of shape `[batch, length, loops]`): z, with exit probability sigmoid(z).
        mask (`torch.Tensor` of shape `[batch, length]`): True where there is a target.
    """

    losses: torch.Tensor
    gate_logits: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, batch: Mapping[str, Any], chunk_size: int | None = None) -> "LoopLosses":
        """Run all loops of an Ouro, or of an LT2 with an exit gate, on a batch.

        Raises:
            ValueError: A model without an exit gate.
        """
        body: Any = model.base_model
        if getattr(body, "early_exit_gate", None) is None:
            raise ValueError(f"This {type(model).__name__} has no exit gate: set `early_exit_gate` in its config.")
        options = {"exit_threshold": 1.0} if hasattr(model.config, "early_exit_threshold") else {}
        states = body(
            **model_inputs(batch), use_cache=False, output_loop_hidden_states=True, **options
        ).loop_hidden_states
        targets, head = batch_targets(batch), head_weight(model)
        losses = [linear_token_losses(state, head, targets, chunk_size=chunk_size) for state in states]
        gates = torch.cat([body.early_exit_gate(state) for state in states], dim=-1)
        return cls(torch.stack(losses, dim=-1), gates, targets != IGNORE)


def _count(mask: torch.Tensor, num_items: int | torch.Tensor | None) -> torch.Tensor:
    count = mask.sum() if num_items is None else torch.as_tensor(num_items, device=mask.device)
    return count.clamp(min=1)


def exit_entropy(exit_pdf: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of exit distributions `[..., loops]`, with a finite gradient where one is 0."""
    return -(exit_pdf * exit_pdf.clamp_min(torch.finfo(exit_pdf.dtype).tiny).log()).sum(-1)


class PretrainModule(StageModule):
    """Compute the pre-training loss of a batch; see the head of this file.

    Args:
        student (`PreTrainedModel`): An Ouro, or an LT2 with an exit gate. All of it trains.
        entropy_weight (`float`, defaults to 0.05): beta.
        chunk_size (`int`, *optional*): Tokens a chunk of logits.
    """

    def __init__(self, student: PreTrainedModel, entropy_weight: float = 0.05, chunk_size: int | None = None):
        super().__init__(student)  # type: ignore[arg-type]
        self.entropy_weight, self.chunk_size = entropy_weight, chunk_size

    def forward(
        self, input_ids: torch.Tensor, num_items_in_batch: int | torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the loss.

        Args:
            input_ids (`torch.Tensor` of shape `[batch, length]`): Tokens.
            num_items_in_batch (`int`, *optional*): Targets of the whole step. Default: of this batch.
            **kwargs: `labels`, `attention_mask`, `position_ids` and packing arguments.

        Returns:
            `dict`: `loss`, a scalar.
        """
        self.check_length(input_ids)
        said = LoopLosses.of(self.student, {"input_ids": input_ids, **kwargs}, self.chunk_size)
        exit_pdf, count = exit_distribution(said.gate_logits), _count(said.mask, num_items_in_batch)
        entropy = exit_entropy(exit_pdf) * said.mask
        expected = (exit_pdf * said.losses).sum(-1)
        return {"loss": (expected - self.entropy_weight * entropy).sum() / count}


class GateModule(StageModule):
    """Compute the exit gate's loss of a batch; see the head of this file.

    Args:
        student (`PreTrainedModel`): An Ouro, or an LT2 with an exit gate. Only the gate trains.
        steepness (`float`, defaults to 50.0): k.
        worthwhile_gain (`float`, defaults to 0.005): gamma, in nats.
        chunk_size (`int`, *optional*): Tokens a chunk of logits.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        steepness: float = 50.0,
        worthwhile_gain: float = 0.005,
        chunk_size: int | None = None,
    ):
        super().__init__(student)  # type: ignore[arg-type]
        self.steepness, self.worthwhile_gain, self.chunk_size = steepness, worthwhile_gain, chunk_size
        gate = getattr(student.base_model, "early_exit_gate", None)
        if gate is None:
            raise ValueError(f"This {type(student).__name__} has no exit gate: set `early_exit_gate` in its config.")
        check_loops(student.config.num_loops)
        student.requires_grad_(False)
        gate.requires_grad_(True)

    def forward(
        self, input_ids: torch.Tensor, num_items_in_batch: int | torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the loss; arguments as in [`PretrainModule`].

        Returns:
            `dict`: `loss`, a scalar.
        """
        self.check_length(input_ids)
        said = LoopLosses.of(self.student, {"input_ids": input_ids, **kwargs}, self.chunk_size)
        gain = (said.losses[..., :-1] - said.losses[..., 1:]).clamp(min=0).detach()
        go_on = (self.steepness * (gain - self.worthwhile_gain)).sigmoid()
        logits = -said.gate_logits[..., :-1].to(go_on.dtype)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, go_on, reduction="none").mean(-1)
        return {"loss": (losses * said.mask).sum() / _count(said.mask, num_items_in_batch)}


class PretrainTrainer(StageTrainer):
    """Train a looped model from nothing; arguments as in `StageTrainer`, the teacher None.

    Example:
        ```python
        data = PackedDataset("offline", tokenizer, length=256)
        trainer = PretrainTrainer(model, None, PretrainConfig("runs/pretrain", target_tokens=2_000_000), data)
        trainer.train_or_resume()
        trainer.save_stage("ouro-small")
        ```
    """

    stage = "pretrain"

    def build_module(self, student: Any, teacher: None, args: PretrainConfig) -> PretrainModule:  # type: ignore[override]
        """Build the `PretrainModule`."""
        return PretrainModule(student, args.entropy_weight, args.loss_chunk_size)


class GateTrainer(StageTrainer):
    """Train the exit gate of a looped model alone; arguments as in `StageTrainer`, the teacher None."""

    stage = "gate"
    allowed_previous = ("pretrain", "distill", "extend")

    def build_module(self, student: Any, teacher: None, args: GateConfig) -> GateModule:  # type: ignore[override]
        """Build the `GateModule`."""
        return GateModule(student, args.steepness, args.worthwhile_gain, args.loss_chunk_size)


@torch.no_grad()
def evaluate_loops(model: PreTrainedModel, batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Measure what each loop knows and what the gate makes of it, on held-out text.

    Args:
        model (`PreTrainedModel`): An Ouro, or an LT2 with an exit gate.
        batches (sequence of mappings): Such as `held_out_batches` returns.

    Returns:
        `dict`: `loop_perplexity`, one a loop; `exit_share`, the mean probability of leaving after each loop;
        `expected_perplexity`, of the losses averaged with it; `mean_exit`, the mean loop left after, counted from 1;
        and `tokens`.
    """
    training = model.training
    model.eval()
    losses, shares, expected, tokens = 0.0, 0.0, 0.0, 0
    for batch in batches:
        said = LoopLosses.of(model, {name: value.to(model.device) for name, value in batch.items()})
        exit_pdf = exit_distribution(said.gate_logits)[said.mask].double()
        token_losses = said.losses[said.mask].double()
        losses, shares = losses + token_losses.sum(0), shares + exit_pdf.sum(0)
        expected += float((exit_pdf * token_losses).sum())
        tokens += len(token_losses)
    model.train(training)
    if tokens == 0:
        raise ValueError("The batches have no position with a target: pass longer rows, or other labels.")
    exit_share = (torch.as_tensor(shares) / tokens).tolist()
    return {
        "loop_perplexity": (torch.as_tensor(losses) / tokens).exp().tolist(),
        "exit_share": exit_share,
        "expected_perplexity": math.exp(expected / tokens),
        "mean_exit": sum((loop + 1) * share for loop, share in enumerate(exit_share)),
        "tokens": tokens,
    }
