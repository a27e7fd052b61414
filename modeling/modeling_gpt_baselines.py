# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The transformers that NRGPT is compared with: `GPT`, `GPT_Rec` and `GPT_Rec_parallel` of its code.

Paper: NRGPT, arXiv 2512.16762; equal to its code (github.com/bhoov/nrgpt) number for number.

A GPT with learned positions, ReLU MLP, biases, and an untied head with bias. With a recurrence there is one layer,
which is applied T times, with one cache slot for each time.

Shapes: B batch, S new tokens, H heads, d head dimension, D hidden size.
"""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from loopergy.configuration.configuration_gpt_baselines import GPTBaselineConfig
from loopergy.modeling.causal_inputs import causal_mask, read_causal_inputs
from loopergy.modeling.learned_positions import WindowedGenerationMixin, check_positions
from loopergy.modeling.mixers.attention import eager_attention_forward
from loopergy.modeling.sequence_classification import LastTokenClassification


class GPTBaselineAttention(nn.Module):
    """Mix tokens by causal softmax attention, with dropout on the probabilities and on the output."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = 1
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        width = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        slot: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the new tokens (B, S, D) with each other and with the cached ones of this slot."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, slot, kwargs=kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout.p if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.dropout(self.o_proj(output.flatten(2).contiguous())), weights


class GPTBaselineMLP(nn.Module):
    r"""Feed forward: \(W_2\,\phi(W_1 x + b_1) + b_2\), then dropout."""

    def __init__(self, config: GPTBaselineConfig):
        super().__init__()
        wide = config.intermediate_size or 4 * config.hidden_size
        self.fc1 = nn.Linear(config.hidden_size, wide)
        self.fc2 = nn.Linear(wide, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., D) to (..., D)."""
        return self.dropout(self.fc2(self.act_fn(self.fc1(x))))


class GPTBaselineLayer(GradientCheckpointingLayer):
    """Add attention and MLP to the stream, one after the other or (`"parallel"`) both of the same state."""

    def __init__(self, config: GPTBaselineConfig):
        super().__init__()
        self.parallel = config.recurrence == "parallel"
        self.self_attn = GPTBaselineAttention(config)
        self.mlp = GPTBaselineMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(self, hidden_states: torch.Tensor, cache: Cache | None = None, **kwargs: Any) -> torch.Tensor:
        """Map the stream (B, S, D) to (B, S, D); the other arguments are those of [`GPTBaselineAttention`]."""
        mixed, _ = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **kwargs)
        if self.parallel:
            return hidden_states + mixed + self.mlp(self.post_attention_layernorm(hidden_states))
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class GPTBaselinePreTrainedModel(PreTrainedModel):
    """Hold what the baseline models share: config class, initialisation, what is supported."""

    config: GPTBaselineConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GPTBaselineLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": GPTBaselineLayer,
        "attentions": OutputRecorder(GPTBaselineAttention, index=1),
    }


class GPTBaselineModel(GPTBaselinePreTrainedModel):
    """Apply the layers, or the one layer T times, and the last norm."""

    def __init__(self, config: GPTBaselineConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        own = config.num_hidden_layers if config.recurrence == "none" else 1
        self.layers = nn.ModuleList(GPTBaselineLayer(config) for _ in range(own))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
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
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the layers.

        Args:
            input_ids (`torch.LongTensor` of shape (B, S)) or inputs_embeds (`torch.Tensor` of shape (B, S, D)): the
                new tokens, exactly one of the two. Positions are added to either.
            attention_mask (*optional*): 0 at padding, over cached and new tokens; or a complete mask.
            position_ids (`torch.LongTensor` of shape (B, S), *optional*): by default counted from the mask and cache.
                Positions that restart inside a row mark packed documents, which are then kept apart; so do
                `cu_seq_lens_q` and `seq_idx`.
            cache (`Cache`, *optional*): one slot for each application of a layer.
            use_cache (`bool`, *optional*): return a cache.

        Raises:
            ValueError: for both or neither of `input_ids` and `inputs_embeds`, a text longer than the position table,
                and as [`read_causal_inputs`].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        inputs = read_causal_inputs(self.config, embeds, attention_mask, position_ids, cache, use_cache, **kwargs)
        positions, cache = inputs.position_ids, inputs.cache
        check_positions(positions, inputs.past + embeds.shape[1], self.config.max_position_embeddings)
        mask = causal_mask(self.config, embeds, inputs)
        hidden_states = embeds + self.embed_positions(positions)
        for visit in range(self.config.num_hidden_layers):
            layer = self.layers[visit % len(self.layers)]
            hidden_states = layer(
                hidden_states, attention_mask=mask, position_ids=positions, cache=cache, slot=visit, **kwargs
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)


class GPTBaselineForCausalLM(GPTBaselinePreTrainedModel, WindowedGenerationMixin, GenerationMixin):
    """Predict the next token from the last state.

    `generate(..., recompute_window=True)` goes on beyond the position table ([`WindowedGenerationMixin`]).
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GPTBaselineConfig):
        super().__init__(config)
        self.model = GPTBaselineModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run the layers and the head.

        Args:
            labels (`torch.LongTensor` of shape (B, S), *optional*): targets, shifted inside; -100 is ignored.
            logits_to_keep (`int` or `torch.Tensor`, *optional*): positions to compute logits for; 0 means all.

        Raises:
            ValueError: as [`GPTBaselineModel`].
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class GPTBaselineForSequenceClassification(LastTokenClassification, GPTBaselinePreTrainedModel):
    """Classify sequences by the last state at the last real token."""

    base_model_class = GPTBaselineModel


__all__ = [
    "GPTBaselineForCausalLM",
    "GPTBaselineForSequenceClassification",
    "GPTBaselineModel",
    "GPTBaselinePreTrainedModel",
]
