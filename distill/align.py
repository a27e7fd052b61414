# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Stage 1, alignment: every new mixer learns to answer like the attention it replaces, in every loop.

On the teacher's own trajectory let `x` be the normed input of layer l in loop t, and `a = attention_l(x)`. The
student's mixer sees the same `x`, starts each loop from a zero state, and gives `s = mixer_l(x)`. With N layers to
learn, T loops and loop weights `w` (uniform by default):

    loss = sum_t w_t / N * sum_l mean over tokens of distance(a, s)

| target       | compared                                                             |
|--------------|----------------------------------------------------------------------|
| `"residual"` | both after the norm that follows the mixer; the default               |
| `"mixer"`    | both as the mixers return them                                       |
| `"block"`    | the whole layer's output, the teacher's MLP included                  |

In layers with two norms nothing follows the mixer, so `residual` and `mixer` are the same. The distance is the mean
squared error, or `||a - s|| / sqrt(d)` with `form="l2norm"`.

An indexer, which picks the tokens that a `dsa` mixer reads, gets no gradient from this. With a
`dsa_indexer_loss_weight` in the student's config its own loss is added to the terms of its layer, times that weight;
without one the indexer stays as it is.

All layers train at once and independently, since the stream is the teacher's. Only the mixers that replaced attention
train. The teacher runs once a batch; the gradient of each of the T x N terms is taken as soon as the teacher has
passed it and only summed up, so that no more than one mixer's activations are alive at a time.

Source: first stage of LT2's conversion (arXiv 2605.20670); teacher-forced layers and `l2norm` from arXiv 2512.20569.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from loopergy.configuration.looped_config import FULL, INDEXED, RECURRENT, SLIDING
from loopergy.distill.losses import alignment_loss
from loopergy.distill.stage import StageConfig, StageModule, StageTrainer, batch_targets, indexer_parameters
from loopergy.distill.teacher import (
    MixerCall,
    check_same_loops,
    finish_block,
    loop_states,
    num_loops,
    post_mixer_norm,
    watch_mixers,
)
from loopergy.modeling.looped_inputs import looped_masks, mask_key, read_inputs
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.training.data import IGNORE

TARGETS = ("residual", "mixer", "block")


@dataclass
class AlignConfig(StageConfig):
    """Settings of stage 1; rates and rows of 512 as in LT2's conversion.

    `target_tokens` (there 100M) or `max_steps` must be given.
    """

    learning_rate: float = field(default=1e-3, metadata={"help": "Learning rate of the mixers."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    target: str = field(default="residual", metadata={"help": "What is compared: residual, mixer or block."})
    form: str = field(default="mse", metadata={"help": "Distance: mse (squared) or l2norm (not squared)."})
    loop_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each loop, made to sum to 1. None: all alike."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.target not in TARGETS:
            raise ValueError(f"`target` must be one of {TARGETS}, got {self.target!r}.")
        if self.form not in ("mse", "l2norm"):
            raise ValueError(f"`form` must be 'mse' or 'l2norm', got {self.form!r}.")
        if self.activation_checkpointing:
            raise ValueError("Stage 1 keeps one mixer's activations at a time: leave activation_checkpointing off.")


def aligned_layers(student: LT2ForCausalLM) -> list[int]:
    """Return the physical layers whose mixer replaced the teacher's attention."""
    return [layer for layer, mixer in enumerate(student.config.layer_mixers) if mixer != "full"]


class _GivenGradients(torch.autograd.Function):
    """Return a loss whose gradients with respect to some parameters are known already."""

    @staticmethod
    def forward(ctx, loss, gradients, *parameters):  # type: ignore[override]
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        # In place: they are this node's own, and as large as all mixers.
        return (None, None, *(g if g is None else g.mul_(grad_output.to(g.dtype)) for g in gradients))


class MixerInputs:
    """Make, once a batch, what the student's mixers take beside the hidden state: masks, positions, boundaries."""

    def __init__(self, student: LT2ForCausalLM, batch: Mapping[str, Any]):
        self.config, self.batch = student.config, batch
        self._made: tuple[dict, dict[str, Any]] | None = None

    def __call__(self, call: MixerCall) -> dict[str, Any]:
        """Return the arguments for one visit, besides the state."""
        layer_type, window = self.config.visit(call.loop, call.layer)
        if self._made is None:
            mask, positions = self.batch.get("attention_mask"), self.batch.get("position_ids")
            shared = read_inputs(self.config, call.inputs, mask, positions, None, False, None, dict(self.batch))
            boundaries = None if shared.documents is None else shared.documents.cu_seqlens
            masks = looped_masks(self.config, shared, call.inputs, mask)
            self._made = masks, {"position_ids": shared.position_ids, "cu_seqlens": boundaries}
        masks, others = self._made
        inputs = {"attention_mask": masks[mask_key(layer_type, window)], **others}
        if layer_type != RECURRENT:
            inputs |= {"window": window, "position_embeddings": call.arguments["position_embeddings"]}
        if layer_type in (FULL, SLIDING):
            # The mask keeps documents apart; attention kernels take boundaries under other names.
            del inputs["cu_seqlens"]
        return inputs


class AlignModule(StageModule):
    """Compute the alignment loss of a batch; see the head of this file.

    Args:
        student (`LT2ForCausalLM`): Only the mixers of its `aligned_layers` get a gradient.
        teacher (`PreTrainedModel`): Runs once a batch.
        target (`str`, defaults to `"residual"`): What is compared.
        form (`str`, defaults to `"mse"`): The distance.
        loop_weights (`list[float]`, *optional*): One weight a loop. Default: all alike.

    Raises:
        ValueError: A student without a layer to align, or a number of weights other than the loops.
    """

    def __init__(
        self,
        student: LT2ForCausalLM,
        teacher: PreTrainedModel,
        *,
        target: str = "residual",
        form: str = "mse",
        loop_weights: list[float] | None = None,
    ):
        super().__init__(student, teacher)
        loops = num_loops(teacher)
        check_same_loops(student, loops)
        if loop_weights is not None and (len(loop_weights) != loops or not sum(loop_weights) > 0):
            raise ValueError(f"`loop_weights` needs {loops} weights with a positive sum, got {loop_weights}.")
        self.layers = aligned_layers(student)
        if not self.layers:
            raise ValueError("All layers of the student have full attention already: there is nothing to align.")
        weights = loop_weights or [1.0] * loops
        self.loop_weights = [weight / sum(weights) for weight in weights]
        self.target, self.form = target, form
        student.requires_grad_(False)
        for layer in self.layers:
            student.model.layers[layer].self_attn.requires_grad_(True)
        if not student.config.dsa_indexer_loss_weight:
            for parameter in indexer_parameters(student):
                parameter.requires_grad_(False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """Return the loss, and the terms it is made of.

        Args:
            input_ids (`torch.Tensor` of shape `[batch, length]`): Tokens.
            attention_mask (`torch.Tensor` of shape `[batch, length]`, *optional*): 0 at pads.
            labels (`torch.Tensor` of shape `[batch, length]`, *optional*): Say which positions count.
            num_items_in_batch (`int`, *optional*): Positions that count in the whole step. Default: in this batch.
            **kwargs: `position_ids` and packing arguments, for teacher and student.

        Returns:
            `dict`: `loss`, a scalar, and `terms` `[loops, aligned layers]`, unweighted and without gradient.
        """
        self.check_length(input_ids)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        mask = batch_targets({**batch, "labels": labels}) != IGNORE
        count = mask.sum() if num_items_in_batch is None else num_items_in_batch
        mixer_inputs = MixerInputs(self.student, batch)
        trained = {layer: self._trained(layer) for layer in self.layers}
        with_gradient = torch.is_grad_enabled()
        gradients: dict[int, list[torch.Tensor | None]] = {}
        terms: list[torch.Tensor] = []

        def on_call(call: MixerCall) -> None:
            if call.layer not in trained:
                return
            with torch.set_grad_enabled(with_gradient):
                term = self._term(call, mixer_inputs(call), mask, count)
            terms.append(term.detach())
            weight = self.loop_weights[call.loop] / len(self.layers)
            if not with_gradient or weight == 0:
                return
            parameters, scale = trained[call.layer], torch.full_like(term, weight)
            new = torch.autograd.grad(term, parameters, scale, allow_unused=True)
            old = gradients.setdefault(call.layer, [None] * len(new))
            gradients[call.layer] = [_add(a, b) for a, b in zip(old, new, strict=True)]

        with torch.no_grad(), watch_mixers(self.teacher, on_call):
            loop_states(self.teacher, batch)
        table = torch.stack(terms).view(len(self.loop_weights), len(self.layers))
        loss = (table * table.new_tensor(self.loop_weights)[:, None]).sum() / len(self.layers)
        if with_gradient:
            parameters = [p for layer in self.layers for p in trained[layer]]
            flat = [g for layer in self.layers for g in gradients.get(layer, [None] * len(trained[layer]))]
            flat = [torch.zeros_like(p) if g is None else g for g, p in zip(flat, parameters, strict=True)]
            loss = _GivenGradients.apply(loss, flat, *parameters)
        return {"loss": loss, "terms": table}

    def _mixer(self, layer: int) -> nn.Module:
        return self.student.model.layers[layer].self_attn  # type: ignore[return-value]

    def _trained(self, layer: int) -> list[nn.Parameter]:
        return [parameter for parameter in self._mixer(layer).parameters() if parameter.requires_grad]

    def _term(self, call: MixerCall, inputs: dict[str, Any], mask: torch.Tensor, count: Any) -> torch.Tensor:
        """Return the distance between teacher and student at one visit."""
        mixer = self._mixer(call.layer)
        layer: nn.Module = self.teacher.base_model.layers[call.layer]  # type: ignore[index, assignment]
        rate = self.student.config.dsa_indexer_loss_weight
        if rate and self.student.config.visit(call.loop, call.layer)[0] == INDEXED:
            inputs["output_divergence"] = True
        mixed, divergence = mixer(call.inputs.to(self.student.dtype), cache=None, **inputs)
        pair = [mixed.to(call.output.dtype), call.output]
        if self.target == "residual":
            pair = [post_mixer_norm(layer, value) for value in pair]
        elif self.target == "block":
            pair = [finish_block(layer, call.residual, value) for value in pair]
        term = alignment_loss(pair[0], pair[1], mask, self.form, num_items=count)  # type: ignore[arg-type]
        if "output_divergence" in inputs:
            term = term + rate * (divergence * mask).sum() / torch.as_tensor(count).clamp(min=1)
        return term


def _add(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    return new if old is None else old if new is None else old.add_(new)


class AlignTrainer(StageTrainer):
    """Train stage 1; arguments as in `StageTrainer`.

    Example:
        ```python
        student = loopergy.convert(teacher, keep_layers=[]).model
        data = PackedDataset("offline", tokenizer, length=512)
        trainer = AlignTrainer(student, teacher, AlignConfig("runs/align", target_tokens=1_000_000), data)
        trainer.train()
        trainer.save_stage("student-aligned")
        ```
    """

    stage = "align"

    def build_module(self, student: LT2ForCausalLM, teacher: PreTrainedModel | None, args: AlignConfig) -> AlignModule:  # type: ignore[override]
        """Build the `AlignModule`."""
        if teacher is None:
            raise ValueError("Stage 1 needs a teacher.")
        if args.fsdp:
            raise ValueError(
                "Stage 1 takes gradients mixer by mixer, which sharded parameters do not allow, and needs little "
                "memory: leave `fsdp` out. (Launched with FSDP it trains whole of its own accord.)"
            )
        weights = args.loop_weights
        return AlignModule(student, teacher, target=args.target, form=args.form, loop_weights=weights)

    def create_accelerator_and_postprocess(self) -> None:
        """Train unsharded even if the launcher asks for FSDP: gradients are taken mixer by mixer."""
        with patch_environment(accelerate_use_fsdp="false"):
            super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            raise ValueError(
                "Stage 1 takes gradients mixer by mixer, which DeepSpeed does not allow. Run `loopergy align` with "
                "plain data parallelism (recipes/accelerate/ddp.yaml) first; `loopergy run` goes on from there."
            )


@torch.no_grad()
def alignment_errors(
    student: LT2ForCausalLM,
    teacher: PreTrainedModel,
    batches: Iterable[Mapping[str, torch.Tensor]],
    *,
    target: str = "residual",
) -> torch.Tensor:
    """Measure how far each new mixer is from the attention it replaces.

    Args:
        student (`LT2ForCausalLM`): The student.
        teacher (`PreTrainedModel`): Its teacher.
        batches (iterable of mappings): What to measure on.
        target (`str`, defaults to `"residual"`): What is compared.

    Returns:
        `torch.Tensor` of shape `[loops, aligned layers]`: Mean squared error over tokens.
    """
    frozen = {name: parameter.requires_grad for name, parameter in student.named_parameters()}
    module = AlignModule(student, teacher, target=target).eval()
    total, tokens = torch.zeros(()), 0
    for batch in batches:
        total = total + module(**{**batch, "num_items_in_batch": 1})["terms"].cpu()
        tokens += int((batch_targets(batch) != IGNORE).sum())
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(frozen[name])
    return total / max(tokens, 1)
