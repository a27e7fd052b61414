# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""LT2, the looped language model in linear time.

Paper: LT2, arXiv 2605.20670.

A Llama, except that
- the whole stack of N layers is applied T times with the same weights;
- each layer has its own mixer: full, windowed or sparse attention, or one of eight with a recurrent state
  (`config.layer_mixers`);
- recurrent mixers start from a zero state in every loop: one carried over would tell early tokens about later ones;
- after loop t the loop's input comes back, h + rho[t] * input, rho zero at the start (eq. 2);
- attention may be gated before its output projection;
- the indexer of sparse attention may have a loss of its own, added to that of the head;
- with `block_style="sandwich"` and `norm_between_loops` it is Ouro with other mixers, which is what conversion makes.

Shapes: B batch, S new tokens, D hidden size, V vocabulary, T loops, N layers.
Config fields read here: sizes, `num_loops`, `layer_mixers`, `block_style`, `norm_cast`, `norm_between_loops`,
`use_loop_residual`, `attn_output_gate`, `early_exit_gate`, `kv_sharing`, `dsa_indexer_loss_weight`; the mixers read
their own.
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
from loopergy.configuration.linear_fields import LINEAR_MIXERS
from loopergy.configuration.looped_config import INDEXED, POOLED, RECURRENT, SlotPlan
from loopergy.modeling.building_blocks import ExactLinear, GatedMLP, RMSNorm, RotaryEmbedding
from loopergy.modeling.cached_generation import LoopedGenerationMixin
from loopergy.modeling.looped_inputs import LoopedInputs, looped_masks, mask_key, read_inputs
from loopergy.modeling.looped_outputs import (
    LT2CausalLMOutputWithPast,
    LT2ModelOutputWithPast,
    exit_distribution,
    mean_divergence,
)
from loopergy.modeling.mixers.attention import Attention
from loopergy.modeling.mixers.deepseek_sparse_attention import DeepseekSparseAttention
from loopergy.modeling.mixers.deltanet import DeltaNet
from loopergy.modeling.mixers.gated_deltanet import GatedDeltaNet
from loopergy.modeling.mixers.gated_linear_attention import GatedLinearAttention
from loopergy.modeling.mixers.hgrn2 import HGRN2
from loopergy.modeling.mixers.kimi_delta_attention import KimiDeltaAttention
from loopergy.modeling.mixers.linear_attention import LinearAttention
from loopergy.modeling.mixers.linear_mixer import LinearMixer
from loopergy.modeling.mixers.mamba2 import Mamba2
from loopergy.modeling.mixers.native_sparse_attention import NativeSparseAttention
from loopergy.modeling.mixers.retnet import RetNet
from loopergy.modeling.sequence_classification import LastTokenClassification

# "full" and "window" are [`Attention`], which the config tells which of the two a visit is.
MIXER_CLASSES: dict[str, type[nn.Module]] = {
    "gdn": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "deltanet": DeltaNet,
    "mamba2": Mamba2,
    "hgrn2": HGRN2,
    "retnet": RetNet,
    "gla": GatedLinearAttention,
    "la": LinearAttention,
    "nsa": NativeSparseAttention,
    "dsa": DeepseekSparseAttention,
}


def build_mixer(config: LT2Config, layer_idx: int) -> nn.Module:
    """Build the mixer that `config.layer_mixers` names for a physical layer."""
    name = config.layer_mixers[layer_idx]
    if name in MIXER_CLASSES:
        return MIXER_CLASSES[name](config, layer_idx)
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
    def forward(
        self, hidden_states: torch.Tensor, cache: Cache | None = None, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Map the stream (B, S, D) to (B, S, D); the other arguments are those of the mixer.

        With `output_divergence=True`, which sparse attention with an indexer takes, its divergence comes second.
        """
        mixed, extra = self.self_attn(self.input_layernorm(hidden_states), cache=cache, **kwargs)
        hidden_states = hidden_states + (self.input_layernorm_2(mixed) if self.input_layernorm_2 else mixed)
        mixed = self.mlp(self.post_attention_layernorm(hidden_states))
        mixed = self.post_attention_layernorm_2(mixed) if self.post_attention_layernorm_2 else mixed
        hidden_states = hidden_states + mixed
        return (hidden_states, extra) if kwargs.get("output_divergence") else hidden_states


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
        # Again, as fields may have been set since: `from_pretrained(name, layer_mixers=...)` does.
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)
        # Read by `generate`: a recurrent state cannot be rolled back, so drafts are refused up front.
        self._is_stateful = not set(LINEAR_MIXERS).isdisjoint(config.layer_mixers)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """Initialise one module.

        | module | distribution |
        |---|---|
        | linear, exact linear, embedding, convolution | normal(0, `initializer_range`), biases 0 |
        | norms | 1 |
        | decay of recurrent mixers | [`LinearMixer.init_bare_parameters`] of each |
        | output gate of attention, loop residual | 0 |

        The presets set `initializer_range` to D^-0.5 as LT2 does, without its cut at three standard deviations.
        """
        super()._init_weights(module)
        if isinstance(module, ExactLinear):
            module.init_normal(self.config.initializer_range)
        elif isinstance(module, LinearMixer):
            module.init_bare_parameters()
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
        self.early_exit_gate = ExactLinear(config.hidden_size, 1) if config.early_exit_gate else None
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
        output_indexer_divergence: bool | None = None,
        **kwargs: Any,
    ) -> LT2ModelOutputWithPast:
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
            output_indexer_divergence (`bool`, *optional*): return the divergence of the `dsa` layers' indexers; by
                default in training with a `dsa_indexer_loss_weight`.

        Returns:
            [`LT2ModelOutputWithPast`]. With `output_hidden_states=True` there are T * N + 1 hidden states: the
            input of every visit in order, and the last normed state.

        Raises:
            ValueError: for both or neither of `input_ids` and `inputs_embeds`, a loop count below 1, a cache with too
                few slots or filled by fewer loops, packed documents together with a cache, or a mask per query and key
                for mixers that take none.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        inputs = read_inputs(self.config, embeds, attention_mask, position_ids, cache, use_cache, num_loops, kwargs)
        masks = attention_mask
        if not isinstance(masks, dict):
            masks = looped_masks(self.config, inputs, embeds, attention_mask)
        if output_indexer_divergence is None:
            output_indexer_divergence = self.training and self.config.dsa_indexer_loss_weight > 0
        kwargs["output_divergence"] = bool(output_indexer_divergence)
        visits = self._visit_inputs(inputs, embeds, masks, kwargs)

        states, divergences = [], []
        hidden_states = embeds
        for loop, slots in enumerate(inputs.plan.table):
            loop_input = hidden_states
            rewrite_slot = loop > 0 and self.config.kv_sharing == "last"
            for layer, slot in zip(self.layers, slots, strict=True):
                visit = visits[mask_key(inputs.plan.layer_types[slot], inputs.plan.windows[slot])]
                hidden_states = layer(hidden_states, cache=inputs.cache, slot=slot, rewrite_slot=rewrite_slot, **visit)
                if isinstance(hidden_states, tuple):
                    hidden_states, divergence = hidden_states
                    divergences.append(divergence)
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
        return LT2ModelOutputWithPast(
            last_hidden_state=hidden_states,
            cache=inputs.cache,
            loop_hidden_states=tuple(states) or None,
            exit_pdf=exit_pdf,
            indexer_divergence=_mean(divergences) if divergences else None,
        )

    def _visit_inputs(self, inputs: LoopedInputs, embeds: torch.Tensor, masks: dict, others: dict) -> dict[str, dict]:
        """Return the arguments of each kind of visit, the same in all loops, by the name of its mask."""
        positions = {
            "position_embeddings": self.rotary_emb(embeds, position_ids=inputs.position_ids),
            "position_ids": inputs.position_ids,
        }
        boundaries = {"cu_seqlens": None if inputs.documents is None else inputs.documents.cu_seqlens}
        visits = {}
        for layer_type, window in zip(inputs.plan.layer_types, inputs.plan.windows, strict=True):
            key = mask_key(layer_type, window)
            # Continuous batching names its masks by the type alone: it knows one window.
            mask = masks.get(key) if layer_type == RECURRENT else masks[key if key in masks else layer_type]
            visits[key] = {**others, "attention_mask": mask}
            if layer_type != INDEXED:
                visits[key].pop("output_divergence")
            if layer_type == RECURRENT:
                visits[key]["position_ids"] = inputs.position_ids
            else:
                visits[key] |= {**positions, "window": window}
            if layer_type in (RECURRENT, INDEXED, POOLED):
                visits[key] |= boundaries
        return visits


def _mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.to(tensors[0].device) for tensor in tensors]).mean(dim=0)


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
    ) -> LT2CausalLMOutputWithPast:
        """Run the loops and the head.

        Args:
            labels (`torch.LongTensor` of shape (B, S), *optional*): targets, shifted inside; -100 is ignored. In
                training with a `dsa_indexer_loss_weight` the indexers' divergence, averaged over the same tokens as
                the cross-entropy, is part of the loss.
            logits_to_keep (`int` or `torch.Tensor`, *optional*): positions to compute logits for; 0 means all.
            num_loops (`int`, *optional*): loops to run, the config's by default.
            output_loop_hidden_states, output_loop_logits (`bool`, *optional*): return the states, and the logits,
                after each loop, with the exit distribution if there is a gate. T logit tensors are large.

        Returns:
            [`LT2CausalLMOutputWithPast`]; the other arguments and errors are those of [`LT2Model`].
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
        loss, divergence = None, outputs.indexer_divergence
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if divergence is not None:
                shifted = kwargs.get("shift_labels")
                targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shifted is None else shifted
                mean = mean_divergence(divergence, targets != -100, kwargs.get("num_items_in_batch"))
                loss = loss + self.config.dsa_indexer_loss_weight * mean.to(loss.device)
        loop_logits = None
        if output_loop_logits:
            loop_logits = tuple(
                self.lm_head(slice_logits_to_keep(states, logits_to_keep)) for states in outputs.loop_hidden_states
            )
        return LT2CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            loop_hidden_states=outputs.loop_hidden_states,
            loop_logits=loop_logits,
            exit_pdf=outputs.exit_pdf,
            indexer_divergence=divergence,
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
