# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""LT2, the looped language model in linear time.

Paper: LT2, arXiv 2605.20670.

A Llama, except that
- the whole stack of N layers is applied T times with the same weights;
- each layer has its own mixer: full or windowed attention, or Gated DeltaNet (`config.layer_mixers`);
- recurrent mixers start from a zero state in every loop: a state carried over would tell early tokens about later
ones;
- after loop t the loop's input comes back, h + rho[t] * input, rho zero at the start (eq. 2);
- attention may be gated before its output projection;
- with `block_style="sandwich"` and `norm_between_loops` it is Ouro with other mixers, which is what conversion makes.

Shapes: B batch, S new tokens, D hidden size, V vocabulary, T loops, N layers.
Config fields read here: sizes, `num_loops`, `layer_mixers`, `block_style`, `norm_cast`, `norm_between_loops`,
`use_loop_residual`, `attn_output_gate`, `early_exit_gate`, `kv_sharing`; the mixers read their own.
"""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.configuration.looped_config import RECURRENT, SlotPlan
from loopergy.modeling.building_blocks import GatedMLP, RMSNorm, RotaryEmbedding
from loopergy.modeling.looped_cache import LoopedGenerationMixin
from loopergy.modeling.looped_inputs import LoopedInputs, looped_masks, mask_key, read_inputs
from loopergy.modeling.looped_outputs import (
    LoopedCausalLMOutputWithPast,
    LoopedModelOutputWithPast,
    exit_distribution,
)
from loopergy.modeling.mixers.attention import Attention
from loopergy.modeling.mixers.gated_deltanet import GatedDeltaNet
from loopergy.modeling.sequence_classification import LastTokenClassification


def build_mixer(config: LT2Config, layer_idx: int) -> nn.Module:
    """Build the mixer that `config.layer_mixers` names for a physical layer."""
    if config.layer_mixers[layer_idx] == "gdn":
        return GatedDeltaNet(config, layer_idx)
    return Attention(config, layer_idx, bias=config.attention_bias, output_gate=config.attn_output_gate)


class LT2DecoderLayer(GradientCheckpointingLayer):
    """Apply a mixer and an MLP, each after a norm ("pre") or between two ("sandwich"), and add both to the stream."""

    def __init__(self, config: LT2Config, layer_idx: int):
        super().__init__()
        self.mixer_type = config.layer_mixers[layer_idx]
        self.self_attn = build_mixer(config, layer_idx)
        self.mlp = GatedMLP(config, bias=config.mlp_bias)
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)
        sandwich = config.block_style == "sandwich"
        self.input_layernorm_2 = _norm(config) if sandwich else None
        self.post_attention_layernorm_2 = _norm(config) if sandwich else None

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(self, hidden_states: torch.Tensor, cache: Cache | None = None, **kwargs: Any) -> torch.Tensor:
        """Map the stream (B, S, D) to (B, S, D); the other arguments are those of the mixer."""
        mixed, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **kwargs)
        hidden_states = hidden_states + (self.input_layernorm_2(mixed) if self.input_layernorm_2 else mixed)
        mixed = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + (self.post_attention_layernorm_2(mixed) if self.post_attention_layernorm_2 else mixed)


def _norm(config: LT2Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, cast=str(config.norm_cast))


class LT2PreTrainedModel(PreTrainedModel):
    """Hold what all LT2 models share: config class, initialisation, what is supported."""

    config: LT2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LT2DecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": OutputRecorder(LT2DecoderLayer, num_hidden_layers_key="total_num_hidden_layers"),
        "attentions": OutputRecorder(Attention, index=1, num_hidden_layers_key="total_num_hidden_layers"),
    }

    def __init__(self, config: LT2Config, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # Read by `generate`: a recurrent state cannot be rolled back, so drafts are refused up front.
        self._is_stateful = "gdn" in config.layer_mixers

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Initialise one module.

        | module | distribution |
        |---|---|
        | linear, embedding, convolution | normal(0, `initializer_range`), biases 0 |
        | norms | 1 |
        | decay of Gated DeltaNet | [`GatedDeltaNet.init_decay`] |
        | output gate of attention, loop residual | 0 |

        The presets set `initializer_range` to D^-0.5 as LT2 does, without its cut at three standard deviations.
        """
        super()._init_weights(module)
        if isinstance(module, GatedDeltaNet):
            module.init_decay()
        elif isinstance(module, Attention) and module.gate_proj is not None:
            init.zeros_(module.gate_proj.weight)
        elif isinstance(module, LT2Model) and module.loop_residual is not None:
            init.zeros_(module.loop_residual)


class LT2Model(LT2PreTrainedModel):
    """Apply the stack T times to token embeddings and return the normed state."""

    def __init__(self, config: LT2Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LT2DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = _norm(config)
        self.loop_residual = None
        if config.use_loop_residual:
            rows = config.num_trained_loops or config.num_loops
            self.loop_residual = nn.Parameter(torch.zeros(rows, config.hidden_size))
        self.early_exit_gate = nn.Linear(config.hidden_size, 1) if config.early_exit_gate else None
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
        output_loop_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> LoopedModelOutputWithPast:
        """Run the loops.

        Args:
            input_ids (`torch.LongTensor` of shape (B, S)) or inputs_embeds (`torch.Tensor` of shape (B, S, D)): the
                new tokens, exactly one of the two.
            attention_mask (*optional*): 0 at padding, over cached and new tokens; or masks ready for use.
            position_ids (`torch.LongTensor` of shape (B, S), *optional*): by default counted from the mask and cache.
                Positions that restart inside a row mark packed documents, which are then kept apart in every mixer and
                loop; so do `cu_seq_lens_q` and `seq_idx`.
            cache (`Cache`, *optional*): one slot per (loop, layer), as `DynamicCache(config=model.config)` has.
            use_cache (`bool`, *optional*): return a cache.
            num_loops (`int`, *optional*): loops to run, the config's by default.
            output_loop_hidden_states (`bool`, *optional*): return the normed state after each loop and, with an exit
                gate, the exit distribution.

        Returns:
            [`LoopedModelOutputWithPast`]. With `output_hidden_states=True` there are T * N + 1 hidden states: the
            input of every visit in order, and the last normed state.

        Raises:
            ValueError: for both or neither of `input_ids` and `inputs_embeds`, a loop count below 1, a cache with too
                few slots, or packed documents together with a cache.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        inputs = read_inputs(self.config, embeds, attention_mask, position_ids, cache, use_cache, num_loops, kwargs)
        masks = attention_mask
        if not isinstance(masks, dict):
            masks = looped_masks(self.config, inputs, embeds, attention_mask)
        attention_inputs = {
            "position_embeddings": self.rotary_emb(embeds, position_ids=inputs.position_ids),
            "position_ids": inputs.position_ids,
            **kwargs,
        }
        recurrent_inputs = {
            "attention_mask": masks.get(RECURRENT),
            "cu_seqlens": None if inputs.documents is None else inputs.documents.cu_seqlens,
            **kwargs,
        }

        states = []
        hidden_states = embeds
        for loop, slots in enumerate(inputs.plan.table):
            loop_input = hidden_states
            for layer, slot in zip(self.layers, slots, strict=True):
                layer_type, window = inputs.plan.layer_types[slot], inputs.plan.windows[slot]
                visit = recurrent_inputs
                if layer_type != RECURRENT:
                    visit = {
                        **attention_inputs,
                        "attention_mask": masks[mask_key(layer_type, window)],
                        "window": window,
                        "rewrite_slot": loop > 0 and self.config.kv_sharing == "last",
                    }
                hidden_states = layer(hidden_states, cache=inputs.cache, slot=slot, **visit)
            if self.loop_residual is not None:
                row = min(loop, len(self.loop_residual) - 1)
                # The loop began on the first layer's device; a device map may end it on another.
                back = self.loop_residual[row] * loop_input
                hidden_states = hidden_states + back.to(hidden_states.device)
            if self.config.norm_between_loops:
                hidden_states = self.norm(hidden_states)
            if output_loop_hidden_states:
                states.append(hidden_states if self.config.norm_between_loops else self.norm(hidden_states))
        if states:
            hidden_states = states[-1]
        elif not self.config.norm_between_loops:
            hidden_states = self.norm(hidden_states)

        exit_pdf = None
        if states and self.early_exit_gate is not None:
            exit_pdf = exit_distribution(torch.cat([self.early_exit_gate(state) for state in states], dim=-1))
        return LoopedModelOutputWithPast(
            last_hidden_state=hidden_states,
            cache=inputs.cache,
            loop_hidden_states=tuple(states) or None,
            exit_pdf=exit_pdf,
        )


class LT2ForCausalLM(LT2PreTrainedModel, LoopedGenerationMixin, GenerationMixin):
    """Predict the next token from the state after the last loop; the loss is taken there alone."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: LT2Config):
        super().__init__(config)
        self.model = LT2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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
        output_loop_hidden_states: bool | None = None,
        output_loop_logits: bool | None = None,
        **kwargs: Any,
    ) -> LoopedCausalLMOutputWithPast:
        """Run the loops and the head.

        Args:
            labels (`torch.LongTensor` of shape (B, S), *optional*): targets, shifted inside; -100 is ignored.
            logits_to_keep (`int` or `torch.Tensor`, *optional*): positions to compute logits for; 0 means all.
            num_loops (`int`, *optional*): loops to run, the config's by default.
            output_loop_hidden_states, output_loop_logits (`bool`, *optional*): return the states, and the logits,
                after each loop, with the exit distribution if there is a gate. T logit tensors are large.

        Returns:
            [`LoopedCausalLMOutputWithPast`]; the other arguments and errors are those of [`LT2Model`].
        """
        output_loops = bool(output_loop_hidden_states or output_loop_logits)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_loops=num_loops,
            output_loop_hidden_states=output_loops,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
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
            loop_hidden_states=outputs.loop_hidden_states,
            loop_logits=loop_logits,
            exit_pdf=outputs.exit_pdf,
        )

    @staticmethod
    def create_masks_for_generate(
        config: LT2Config, inputs_embeds: torch.Tensor, attention_mask: Any, cache: Cache, **kwargs: Any
    ) -> dict:
        """Make the masks of all mixers ahead of a compiled forward; `generate` calls it for static caches."""
        plan = config.slot_plan()
        # A cache for fewer loops has fewer slots; one for more loops has more of the same kinds.
        plan = SlotPlan(plan.table, plan.layer_types[: len(cache)], plan.windows[: len(cache)])
        inputs = LoopedInputs(plan, cache, documents=None, position_ids=None, real=None)
        return looped_masks(config, inputs, inputs_embeds, attention_mask)


class LT2ForSequenceClassification(LastTokenClassification, LT2PreTrainedModel):
    """Classify sequences by the last loop's state at the last real token."""

    base_model_class = LT2Model


__all__ = ["LT2ForCausalLM", "LT2ForSequenceClassification", "LT2Model", "LT2PreTrainedModel"]
