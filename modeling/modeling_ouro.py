# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Ouro, the pretrained looped transformer.

Paper: Scaling Latent Reasoning via Looped Language Models, arXiv 2510.25741.

A Llama, except that
- the whole stack of N layers is applied T times with the same weights, the final norm after every loop included;
- each layer has four norms, one before and one after attention and MLP each ("sandwich");
- an exit gate on the state after each loop gives the probability of stopping there;
- the cache has one slot per (loop, layer): slot = loop * N + layer.

Shapes: B batch, S new tokens, D hidden size, V vocabulary, T loops, N layers.
The checkpoint's words: `total_ut_steps` is `num_loops`, `ut step` is loop.
"""

import operator
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from loopergy.configuration.configuration_ouro import OuroConfig, repair_special_tokens
from loopergy.configuration.looped_config import FULL, SlotPlan, resolve_num_loops
from loopergy.modeling.building_blocks import ExactLinear, GatedMLP, RMSNorm, RotaryEmbedding, at_least_float32
from loopergy.modeling.cached_generation import LoopedGenerationMixin
from loopergy.modeling.looped_inputs import looped_masks, read_inputs
from loopergy.modeling.looped_outputs import (
    LoopedCausalLMOutputWithPast,
    LoopedModelOutputWithPast,
    exit_distribution,
    mix_loops,
)
from loopergy.modeling.mixers.attention import ActiveTokens, Attention
from loopergy.modeling.sequence_classification import LastTokenClassification


class OuroDecoderLayer(GradientCheckpointingLayer):
    """Apply attention and MLP, each between two norms, and add both to the stream."""

    def __init__(self, config: OuroConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm_2 = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm_2 = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(self, hidden_states: torch.Tensor, cache: Cache | None = None, **kwargs: Any) -> torch.Tensor:
        """Map the stream (B, S, D) to (B, S, D); the other arguments are those of [`Attention`]."""
        mixed, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **kwargs)
        hidden_states = hidden_states + self.input_layernorm_2(mixed)
        mixed = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.post_attention_layernorm_2(mixed)


class OuroPreTrainedModel(PreTrainedModel):
    """Hold what all Ouro models share: config class, initialisation, what is supported."""

    config: OuroConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OuroDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": OutputRecorder(OuroDecoderLayer, num_hidden_layers_key="total_num_hidden_layers"),
        "attentions": OutputRecorder(Attention, index=1, num_hidden_layers_key="total_num_hidden_layers"),
    }

    def __init__(self, config: OuroConfig, *args: Any, **kwargs: Any):
        # Again, as fields may have been set since: `from_pretrained(name, training_loss=...)` does.
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ExactLinear):
            module.init_normal(self.config.initializer_range)


def resolve_exit(
    config: OuroConfig, num_loops: Any, exit_at_step: Any, exit_threshold: Any
) -> tuple[int, float, bool]:
    """Return how many loops run, the threshold q at which tokens leave earlier, and whether an exit step says so.

    Args:
        config: gives what the call does not: `num_loops`, `early_exit_step` and `early_exit_threshold`.
        num_loops, exit_at_step, exit_threshold: arguments of a call, each *optional*. A step outranks the threshold,
            which is then 1.

    Raises:
        ValueError: for a loop count below 1, a step that is no loop, or a threshold that is no number.
    """
    loops, q = resolve_num_loops(config, num_loops), config.early_exit_threshold
    if exit_threshold is not None:
        try:
            q = float("nan") if isinstance(exit_threshold, (bool, str)) else float(exit_threshold)
        except (TypeError, ValueError, RuntimeError):  # lists, objects, tensors of several numbers
            q = float("nan")
        if q != q:
            raise ValueError(
                f"exit_threshold={exit_threshold!r} must be a number: tokens leave once their cumulated exit "
                "probability reaches it, and from 1 on never. Leave it out to use the config's."
            )
    name, step = "exit_at_step", exit_at_step
    if step is None:
        name, step = "early_exit_step", config.early_exit_step
    if step is None:
        return loops, q, False
    try:
        index = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        index = -1
    if not 0 <= index < loops:
        raise ValueError(
            f"{name}={step!r} must be between 0 and {loops - 1}, a whole number: it counts the {loops} loops from 0."
        )
    return index + 1, 1.0, True


class OuroModel(OuroPreTrainedModel):
    """Apply the stack T times to token embeddings and return the normed state."""

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        # No padding row: the published padding id is `<|endoftext|>`, which has to be trained.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.early_exit_gate = ExactLinear(config.hidden_size, 1)
        self.rotary_emb = RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_loops: int | None = None,
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        output_loop_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> LoopedModelOutputWithPast:
        """Run the loops.

        Args:
            input_ids (`torch.LongTensor` of shape (B, S)) or inputs_embeds (`torch.Tensor` of shape (B, S, D)): the
                new tokens, exactly one of the two.
            attention_mask (*optional*): 0 at padding, over cached and new tokens; or masks ready for use.
            position_ids (`torch.LongTensor` of shape (B, S), *optional*): by default counted from the mask and cache.
                Positions that restart inside a row mark packed documents, which are then kept apart; so do
                `cu_seq_lens_q` and `seq_idx`.
            cache (`Cache`, *optional*): one slot per (loop, layer), as `DynamicCache(config=model.config)` has.
            use_cache (`bool`, *optional*): return a cache.
            num_loops (`int`, *optional*): loops to run, the config's by default.
            exit_at_step (`int`, *optional*): stop after this loop, counted from 0, whatever the threshold;
                `config.early_exit_step` by default.
            exit_threshold (`float`, *optional*): q below 1 lets tokens leave early; see [`OuroForCausalLM`].
                `config.early_exit_threshold` by default.
            output_loop_hidden_states (`bool`, *optional*): return the states after each loop and the exit
                distribution. With early exit the state of a token that left is repeated.

        Returns:
            [`LoopedModelOutputWithPast`]. With `output_hidden_states=True` there are T * N + 1 hidden states: the
            input of every visit in order, and the last normed state.

        Raises:
            ValueError: for both or neither of `input_ids` and `inputs_embeds`, a loop count below 1, an exit step
                outside the loops, a threshold that is no number, a cache with too few slots or filled by fewer loops,
                packed documents together with a cache, or early exit together with an attention implementation other
                than sdpa and eager, gradient checkpointing, or recorded hidden states or attentions.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        num_loops, q, _ = resolve_exit(self.config, num_loops, exit_at_step, exit_threshold)
        if q < 1:
            self._check_early_exit(q, kwargs)
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        inputs = read_inputs(self.config, embeds, attention_mask, position_ids, cache, use_cache, num_loops, kwargs)
        masks = attention_mask
        if not isinstance(masks, dict) or (q < 1 and masks[FULL] is None):
            mask = None if isinstance(masks, dict) else masks
            masks = looped_masks(self.config, inputs, embeds, mask, materialise=q < 1)
        visit = {
            "attention_mask": masks[FULL],
            "position_embeddings": self.rotary_emb(embeds, position_ids=inputs.position_ids),
            "position_ids": inputs.position_ids,
            "cache": inputs.cache,
            **kwargs,
        }
        if q < 1:
            states, gates = self._loop_until_exit(embeds, inputs.plan, visit, q, inputs.real)
        else:
            states, gates = self._loop(embeds, inputs.plan, visit, bool(output_loop_hidden_states))
        return LoopedModelOutputWithPast(
            last_hidden_state=states[-1],
            cache=inputs.cache,
            loop_hidden_states=tuple(states) if output_loop_hidden_states else None,
            exit_pdf=exit_distribution(torch.cat(gates, dim=-1)) if output_loop_hidden_states else None,
        )

    def _check_early_exit(self, q: float, options: dict) -> None:
        """Refuse what cannot be while the tokens of a batch run different numbers of loops."""
        obstacle = None
        if self.config._attn_implementation not in ("eager", "sdpa", "paged|eager"):
            obstacle = f"attn_implementation={self.config._attn_implementation!r}; take 'sdpa' or 'eager'"
        elif self.training and self.gradient_checkpointing and torch.is_grad_enabled():
            obstacle = "gradient checkpointing, which computes a loop a second time"
        for name in ("output_hidden_states", "output_attentions"):
            asked = options.get(name)
            if getattr(self.config, name) if asked is None else asked:
                obstacle = f"{name}=True, as layers see some tokens only; ask for output_loop_hidden_states"
        if obstacle is not None:
            raise ValueError(
                f"Early exit (threshold {q} < 1) does not go with {obstacle}. Or set exit_threshold (in the config "
                "early_exit_threshold) to 1.0, which runs all loops."
            )

    def _stack(self, hidden_states: torch.Tensor, loop: int, plan: SlotPlan, visit: dict) -> torch.Tensor:
        """Apply all layers and the final norm once."""
        rewrite = loop > 0 and self.config.kv_sharing == "last"
        for layer, slot in zip(self.layers, plan.table[loop], strict=True):
            hidden_states = layer(hidden_states, slot=slot, rewrite_slot=rewrite, **visit)
        return self.norm(hidden_states)

    def _loop(
        self, hidden_states: torch.Tensor, plan: SlotPlan, visit: dict, keep_all: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run every loop; return the states after each (or the last alone) and the gate logits (B, S, 1) of each."""
        states, gates = [], []
        for loop in range(len(plan.table)):
            hidden_states = self._stack(hidden_states, loop, plan, visit)
            if keep_all:
                states.append(hidden_states)
                gates.append(self.early_exit_gate(hidden_states))
        return states or [hidden_states], gates

    def _loop_until_exit(
        self, hidden_states: torch.Tensor, plan: SlotPlan, visit: dict, q: float, real: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run the loops on those tokens only that have not left; see [`OuroForCausalLM`] for the rule.

        Returns the states after each loop (B, S, D) and their gate logits; what a token left with is repeated.
        """
        batch, length, _ = hidden_states.shape
        everyone = torch.ones(batch, length, dtype=torch.bool, device=hidden_states.device)
        stay = everyone if real is None else real.to(everyone)
        keys_values: dict = {}
        hidden_states = self._stack(hidden_states, 0, plan, {**visit, "active": _select(everyone, keys_values)})
        states, gates = [hidden_states], [self.early_exit_gate(hidden_states)]
        remain = 1 - at_least_float32(gates[0]).sigmoid()
        for loop in range(1, len(plan.table)):
            stay = stay & (1 - remain.squeeze(-1) < q)
            if not bool(stay.any()):
                self._fill_slots(loop, plan, visit, keys_values)
                missing = len(plan.table) - loop
                return states + states[-1:] * missing, gates + gates[-1:] * missing
            active = _select(stay, keys_values)
            new = self._stack(_gather(hidden_states, active), loop, plan, _visit_of(active, visit))
            row, column = active.rows[:, None].expand_as(active.columns)[active.valid], active.columns[active.valid]
            hidden_states = hidden_states.index_put((row, column), new[active.valid])
            states.append(hidden_states)
            gates.append(self.early_exit_gate(hidden_states))
            remain = remain * (1 - at_least_float32(gates[-1]).sigmoid())
        return states, gates

    def _fill_slots(self, first_loop: int, plan: SlotPlan, visit: dict, keys_values: dict) -> None:
        """Give the loops that nobody runs the keys and values of the last loop that each token ran."""
        cache = visit["cache"]
        if cache is None or self.config.kv_sharing == "last":
            return
        for row in plan.table[first_loop:]:
            for layer, slot in enumerate(row):
                cache.update(*keys_values[layer], slot, kwargs=dict(visit))  # a paged cache writes into it


def _select(stay: torch.Tensor, keys_values: dict) -> ActiveTokens:
    """Pack the tokens that loop on into rows as short as the fullest one."""
    counts = stay.sum(dim=1)
    rows = counts.nonzero().flatten()
    width = int(counts.max())
    # Stable, so that the tokens that loop on come first and in order; the rest of the width is filling.
    columns = stay[rows].to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
    valid = torch.arange(width, device=stay.device) < counts[rows, None]
    return ActiveTokens(rows, columns, valid, keys_values)


def _gather(tensor: torch.Tensor, active: ActiveTokens) -> torch.Tensor:
    """Take the active tokens of (batch or 1, length, ...)."""
    rows = active.rows if tensor.shape[0] > 1 else torch.zeros_like(active.rows)
    return tensor[rows[:, None], active.columns]


def _visit_of(active: ActiveTokens, visit: dict) -> dict:
    """Cut positions and mask down to the active tokens."""
    return {
        **visit,
        "attention_mask": _gather(visit["attention_mask"].transpose(1, 2), active).transpose(1, 2),
        "position_embeddings": tuple(_gather(part, active) for part in visit["position_embeddings"]),
        "position_ids": _gather(visit["position_ids"], active),
        "active": active,
    }


class OuroForCausalLM(OuroPreTrainedModel, LoopedGenerationMixin, GenerationMixin):
    """Predict the next token after some number of loops.

    Which loop speaks, first match wins: `exit_at_step`; an exit threshold q < 1; `use_weighted_exit`, the logits
    averaged with the exit probabilities; the last loop. With labels it is always what `config.training_loss` says.

    **Early exit.** With q < 1 a token leaves after the first loop at which the cumulated exit probability reaches q,
    and the later loops are not computed for it. Its state stays what it was, and in the later loops other tokens
    attend to the keys and values that it wrote, layer by layer, in its last loop. The rule looks at the past only, so
    a cached run, a run in chunks and a full forward agree. (The published code runs all loops and picks a state
    afterwards; the first token of a text is treated alike by both.) q >= 1 is exactly the last loop.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        self.model = OuroModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """Load the generation config; the published token ids 0/0/0 are repaired as in the config."""
        super().adjust_generation_fn(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if self.generation_config is not None:
            repair_special_tokens(self.generation_config)

    def loops_to_run(self, model_kwargs: dict) -> int:
        """Return how many loops a call of `generate` with these arguments runs at most; an exit step counts."""
        given = (model_kwargs.get(name) for name in ("num_loops", "exit_at_step", "exit_threshold"))
        return resolve_exit(self.config, *given)[0]

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_loops: int | None = None,
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        use_weighted_exit: bool = False,
        output_loop_hidden_states: bool | None = None,
        output_loop_logits: bool | None = None,
        **kwargs: Any,
    ) -> LoopedCausalLMOutputWithPast:
        r"""Run the loops and the head.

        Args:
            labels (`torch.LongTensor` of shape (B, S), *optional*): targets, shifted inside; -100 is ignored. The
                loss is the cross-entropy of \(\sum_t p_t z_t\), p the exit distribution and z the logits of the
                loops, or of the last loop's logits (`config.training_loss`).
            logits_to_keep (`int` or `torch.Tensor`, *optional*): positions to compute logits for; 0 means all.
            num_loops (`int`, *optional*): loops to run, the config's by default.
            exit_at_step (`int`, *optional*): stop after this loop, counted from 0; `config.early_exit_step` by
                default.
            exit_threshold (`float`, *optional*): q, `config.early_exit_threshold` by default.
            use_weighted_exit (`bool`): average the loops' logits by exit probability.
            output_loop_hidden_states, output_loop_logits (`bool`, *optional*): return the states, and the logits,
                after each loop, with the exit distribution. T logit tensors are large.

        Returns:
            [`LoopedCausalLMOutputWithPast`].

        Raises:
            ValueError: for an exit step outside the loops, and as [`OuroModel`].
        """
        if labels is None:
            loops, q, fixed = resolve_exit(self.config, num_loops, exit_at_step, exit_threshold)
            mixture = use_weighted_exit and not fixed and q >= 1
        else:
            loops, q, fixed = resolve_num_loops(self.config, num_loops), 1.0, True
            mixture = self.config.training_loss == "mixture"
        output_loops = bool(output_loop_hidden_states or output_loop_logits)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_loops=loops,
            exit_at_step=loops - 1 if fixed else None,
            exit_threshold=q,
            output_loop_hidden_states=output_loops or mixture,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if mixture:
            hidden_states = mix_loops(outputs.loop_hidden_states, outputs.exit_pdf)
        logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        loop_logits = None
        if output_loop_logits:
            loop_logits = tuple(
                self.lm_head(slice_logits_to_keep(states, logits_to_keep)) for states in outputs.loop_hidden_states
            )
        return LoopedCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            loop_hidden_states=outputs.loop_hidden_states if output_loops else None,
            loop_logits=loop_logits,
            exit_pdf=outputs.exit_pdf if output_loops else None,
        )


class OuroForSequenceClassification(LastTokenClassification, OuroPreTrainedModel):
    """Classify sequences by the last loop's state at the last real token."""

    base_model_class = OuroModel


__all__ = ["OuroForCausalLM", "OuroForSequenceClassification", "OuroModel", "OuroPreTrainedModel"]
