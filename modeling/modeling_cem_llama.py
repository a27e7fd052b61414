# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""CEM-Llama, a Llama whose layers are steps down causal energies.

Paper: Revisiting Transformer Layer Parameterization Through Causal Energy Minimization, arXiv 2605.07588.

A Llama, except that
- attention is T steps down the interaction energy of a token with those before it, so that the value is the rotated
  key, and the output matrix the query matrix transposed: no v_proj, no o_proj, one cached tensor instead of two;
- the MLP is T steps down an energy of the token alone, so that the way down is the way up transposed: no down_proj;
- scores may have a diagonal part in model space, and gradients may be preconditioned;
- attention and MLP can each be Llama's own instead (`cem_attention`, `cem_mlp`).

The paper's letters: h `stream` or `hidden_states`, u = N(h) `features`, x^(t) `point`, c_j = u_j `context`, k~_j = R_j
W_K c_j `keys`, W_Q `q_proj`, W_K `k_proj`, d_k `diagonal`, W `up_proj`, W_G `gate_proj`, P `precond`, eta `step_size`,
tau `temperature`, -grad eps `force`.

Shapes: B batch, S new tokens, L cached + new tokens, D hidden size, H query heads, G key heads, d head size, F width
of the MLP, K = 1 or H diagonals, T steps.
"""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from loopergy.configuration.configuration_cem_llama import CEMLlamaConfig, check_num_steps
from loopergy.modeling.building_blocks import GatedMLP, RMSNorm, RotaryEmbedding, rotate
from loopergy.modeling.causal_energies import (
    DiagonalPart,
    EnergyDescent,
    NormedStream,
    Preconditioner,
    elementwise_energy,
    interaction_energy,
    interaction_force,
)
from loopergy.modeling.causal_inputs import causal_mask, read_causal_inputs
from loopergy.modeling.energy_outputs import EnergyCausalLMOutputWithPast, EnergyModelOutputWithPast, stack_layers
from loopergy.modeling.mixers.attention import Attention, eager_attention_forward
from loopergy.modeling.sequence_classification import LastTokenClassification
from loopergy.modeling.tied_projection import read_out
from loopergy.modeling.uneven_caches import UnevenGenerationMixin

WEIGHT_FORMING = ("sdpa", "eager")  # attention implementations whose mask is a tensor, or None for causal


class CEMAttention(nn.Module):
    r"""Descend the interaction energy of each token with itself and those before it.

    \(\varepsilon(x_i) = -\tau \sum_k \log \sum_{j \le i} \exp(x_i^T A_k^{(i,j)} c_j / \tau)\) with \(A_k^{(i,j)} =
    \mathrm{diag}(d_k) + W_Q^{kT} R_i^T R_j W_K^{g(k)}\), and, with alpha the softmax of those scores,

    \(-\nabla\varepsilon = \sum_k W_Q^{kT} R_i^T \sum_j \alpha_{ij}^k \tilde k_j + \sum_k d_k \odot \sum_j
    \alpha_{ij}^k c_j\).

    Keys and context are those of the layer's input in all steps. Parameters: q_proj [H d, D], k_proj [G d, D],
    diagonal [K, D], and those of the descent. Keeps G d numbers per token, and with a diagonal D more, whatever T is.

    Args:
        config ([`CEMLlamaConfig`]).
        layer_idx (`int`): layer, and slot of the cache.

    Source: arXiv 2605.07588.
    """

    def __init__(self, config: CEMLlamaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim: int = config.head_dim or 0
        self.num_key_value_heads: int = config.num_key_value_heads or 0
        self.num_key_value_groups = config.num_attention_heads // self.num_key_value_heads
        self.temperature = float(config.cem_temperature or self.head_dim**0.5)
        self.is_causal = True
        self.exact = config.cem_rope_values == "exact"
        self.has_energy = self.exact and config.cem_tie_kv and config.cem_tie_qo
        size, bias = config.hidden_size, config.attention_bias
        width, kv_width = config.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(size, width, bias=bias)
        self.k_proj = nn.Linear(size, kv_width, bias=bias)
        self.v_proj = None if config.cem_tie_kv else nn.Linear(size, kv_width, bias=bias)
        self.o_proj = None if config.cem_tie_qo else nn.Linear(width, size, bias=False)
        diagonals = {"none": 0, "shared": 1, "per_head": config.num_attention_heads}[config.cem_diag]
        self.diagonal = nn.Parameter(torch.empty(diagonals, size)) if diagonals else None
        self.descent = EnergyDescent(config, "cem_attn_steps")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the diagonals at `cem_diag_init`."""
        if self.diagonal is not None:
            init.constant_(self.diagonal, float(self.config.cem_diag_init))

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        origin: NormedStream,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        num_steps: int | None = None,
        causal: bool = False,
        output_energies: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Descend from the new tokens' features, given those of the cached ones.

        Args:
            hidden_states (`torch.Tensor` of shape (B, S, D)): features u, the norm of the stream.
            origin ([`NormedStream`]): where the features come from.
            position_embeddings: cos and sin of shape (B or 1, S, d).
            attention_mask: as the attention implementation wants it; `None` means causal.
            cache (`Cache`, *optional*): where keys, and with a diagonal u, are kept.
            num_steps (`int`, *optional*): T, the config's by default.
            causal (`bool`): the mask is known to hide all later keys from each query.
            output_energies (`bool`): return energies, if the update is the gradient of one.

        Returns:
            move (B, S, D) to add to the stream; weights of the last step where the implementation gives them; and
            energies (T + 1, B, S) if wanted.
        """
        implementation: Any = self.config._attn_implementation
        cos, sin = (table[:, None, :, : self.head_dim // 2] for table in position_embeddings)
        keys, values = self._keys_and_values(hidden_states, cos, sin)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx, kwargs=kwargs)
        context = hidden_states[:, None] if keys.shape[2] == hidden_states.shape[1] else values
        if self.diagonal is None and self.exact and self.v_proj is None:
            values = keys
        dropout = float(self.config.attention_dropout) if self.training else 0.0
        weights = None

        def query_at(point: torch.Tensor) -> tuple[torch.Tensor, DiagonalPart | None]:
            query = rotate(self._heads(self.q_proj(point)), cos, sin)
            return query, None if self.diagonal is None else DiagonalPart(self.diagonal, point, context)

        def force(point: torch.Tensor) -> torch.Tensor:
            nonlocal weights
            query, diagonal = query_at(point)
            diagonal_part = None
            if diagonal is None:
                attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
                options = {"dropout": dropout, "scaling": 1 / self.temperature, **kwargs}
                output, weights = attend(self, query, keys, values, attention_mask, **options)
            else:
                output, diagonal_part, weights = interaction_force(
                    query, keys, diagonal, attention_mask, self.temperature, causal, dropout, implementation == "eager"
                )
            if self.exact:
                output = rotate(output, cos.transpose(1, 2), -sin.transpose(1, 2))
            output = output.flatten(2)
            output = read_out(self.q_proj, output) if self.o_proj is None else self.o_proj(output)
            return output if diagonal_part is None else output + diagonal_part

        def energy(point: torch.Tensor) -> torch.Tensor:
            query, diagonal = query_at(point)
            return interaction_energy(query, keys, diagonal, attention_mask, self.temperature, causal)

        recorded = energy if output_energies and self.has_energy else None
        move, energies = self.descent(force, hidden_states, origin, num_steps, recorded)
        return move, weights, energies

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _keys_and_values(
        self, features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the two halves of a cache slot hold: rotated keys, and what cannot be derived from them."""
        plain = self._heads(self.k_proj(features))
        keys = rotate(plain, cos, sin)
        if self.diagonal is not None:  # u, split into as many heads as the keys, which static caches require
            return keys, features.unflatten(-1, (self.num_key_value_heads, -1)).transpose(1, 2)
        if self.v_proj is not None:
            values = self._heads(self.v_proj(features))
            return keys, rotate(values, cos, sin) if self.exact else values
        return keys, keys[..., :0] if self.exact else plain


class CEMMLP(nn.Module):
    r"""Descend an energy of each token alone, whose gate is fixed by the layer's input.

    \(\varepsilon(x) = -\sum_m \psi(W_G u)_m \Phi(W x)_m\) and \(-\nabla\varepsilon = W^T(\psi(W_G u) \odot \phi(W
    x))\), where \(\phi = \Phi'\) is the activation and psi the identity (`cem_mlp_act_on="tied"`), or the reverse
    (`"gate"`). One step is Llama's MLP with down = gate^T, or with down = up^T.

    Steps up to 2 / L lower the energy for sure, \(L = |W|_2^2 \max_m |\psi(g_m)| \max|\phi'|\), max|silu'| = 1.1.

    Args:
        config ([`CEMLlamaConfig`]).

    Source: arXiv 2605.07588, equations 10 and 11.
    """

    def __init__(self, config: CEMLlamaConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        tied = config.cem_tie_mlp
        self.down_proj = None if tied else nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]
        self.act_on_gate = config.cem_mlp_act_on == "gate"
        self.descent = EnergyDescent(config, "cem_mlp_steps")

    def forward(
        self,
        hidden_states: torch.Tensor,
        origin: NormedStream,
        num_steps: int | None = None,
        output_energies: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Descend from the features (B, S, D) of the stream; see [`CEMAttention`] for arguments and results."""
        gate = self.gate_proj(hidden_states)
        if self.act_on_gate:
            gate = self.act_fn(gate)

        def force(point: torch.Tensor) -> torch.Tensor:
            up = self.up_proj(point)
            inner = gate * (up if self.act_on_gate else self.act_fn(up))
            return read_out(self.up_proj, inner) if self.down_proj is None else self.down_proj(inner)

        def energy(point: torch.Tensor) -> torch.Tensor:
            return elementwise_energy(self.up_proj(point), gate, None if self.act_on_gate else self.act_fn)

        recorded = energy if output_energies and self.down_proj is None else None
        return self.descent(force, hidden_states, origin, num_steps, recorded)


class CEMLlamaDecoderLayer(GradientCheckpointingLayer):
    """Descend the interaction energy, then the energy of each token alone; either can be Llama's own sub-layer."""

    def __init__(self, config: CEMLlamaConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.cem_attention, self.cem_mlp = config.cem_attention, config.cem_mlp
        if config.cem_attention:
            self.self_attn = CEMAttention(config, layer_idx)
        else:
            self.self_attn = Attention(config, layer_idx, bias=config.attention_bias)
        self.mlp = CEMMLP(config) if config.cem_mlp else GatedMLP(config, bias=config.mlp_bias)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        num_steps: int | None = None,
        causal: bool = False,
        output_energies: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Map the stream (B, S, D) to (B, S, D); with `output_energies`, also return the energies of both sub-layers.

        The other arguments are those of [`CEMAttention`].
        """
        steps = {"num_steps": num_steps, "output_energies": output_energies}
        attention_energies = mlp_energies = None
        features = self.input_layernorm(hidden_states)
        if self.cem_attention:
            origin = NormedStream(hidden_states, self.input_layernorm)
            move, _, attention_energies = self.self_attn(
                features, origin, cache=cache, causal=causal, **steps, **kwargs
            )
        else:
            move, _ = self.self_attn(features, cache=cache, slot=self.layer_idx, **kwargs)
        hidden_states = hidden_states + move
        features = self.post_attention_layernorm(hidden_states)
        if self.cem_mlp:
            origin = NormedStream(hidden_states, self.post_attention_layernorm)
            move, mlp_energies = self.mlp(features, origin, **steps)
        else:
            move = self.mlp(features)
        hidden_states = hidden_states + move
        return (hidden_states, attention_energies, mlp_energies) if output_energies else hidden_states


class CEMLlamaPreTrainedModel(PreTrainedModel):
    """Hold what all CEM-Llama models share: config class, initialisation, what is supported."""

    config: CEMLlamaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CEMLlamaDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": CEMLlamaDecoderLayer,
        "attentions": [OutputRecorder(CEMAttention, index=1), OutputRecorder(Attention, index=1)],
    }

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Choose the attention implementation; a diagonal needs attention weights, which fused kernels do not form.

        Raises:
            ValueError: for a model with diagonal and an implementation other than sdpa and eager.
        """
        chosen = super().get_correct_attn_implementation(requested_attention, is_init_check)
        if self.config.has_diagonal and chosen not in WEIGHT_FORMING:
            raise ValueError(
                f"attn_implementation={chosen!r} does not form attention weights, which cem_diag="
                f"{self.config.cem_diag!r} needs. Use 'sdpa' or 'eager', or a model with cem_diag='none'."
            )
        return chosen

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CEMAttention | EnergyDescent | Preconditioner):
            module.reset_parameters()


class CEMLlamaModel(CEMLlamaPreTrainedModel):
    """Apply the layers to token embeddings and return the normed state."""

    def __init__(self, config: CEMLlamaConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(CEMLlamaDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
        num_steps: int | None = None,
        output_energies: bool = False,
        **kwargs: Any,
    ) -> EnergyModelOutputWithPast:
        """Run the layers.

        Args:
            input_ids (`torch.LongTensor` of shape (B, S)) or inputs_embeds (`torch.Tensor` of shape (B, S, D)): the
                new tokens, exactly one of the two.
            attention_mask (*optional*): 0 at padding, over cached and new tokens; or a complete mask.
            position_ids (`torch.LongTensor` of shape (B, S), *optional*): by default counted from the mask and cache.
                Positions that restart inside a row mark packed documents, which are then kept apart; so do
                `cu_seq_lens_q` and `seq_idx`.
            cache (`Cache`, *optional*): as `DynamicCache(config=model.config)` or `StaticCache`. It does not depend on
                the number of steps, but what upper layers keep comes from the steps that ran below them: changing
                `num_steps` between prompt and continuation gives neither of the two models.
            use_cache (`bool`, *optional*): return a cache.
            num_steps (`int`, *optional*): energy steps of both sub-layers, the config's by default.
            output_energies (`bool`): return energies. They take one more evaluation of the scores per step.

        Returns:
            [`EnergyModelOutputWithPast`]. `energies.attention` and `energies.feed_forward` are of shape (layers,
            T + 1, B, S), each `None` where the sub-layer is Llama's own, or its update is the gradient of no energy
            (plain RoPE values, untied controls). Attention's is 0 for a token that sees nothing, as padding at the
            left does. Weights that are recorded are those of the last step.

        Raises:
            ValueError: for both or neither of `input_ids` and `inputs_embeds`, a step count below 1, energies with an
                attention implementation other than sdpa and eager, and as [`read_causal_inputs`].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        num_steps = check_num_steps(num_steps)
        if output_energies and self.config._attn_implementation not in WEIGHT_FORMING:
            raise ValueError(
                f"output_energies=True reads the mask, which attn_implementation="
                f"{self.config._attn_implementation!r} does not give. Use 'sdpa' or 'eager'."
            )
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        inputs = read_causal_inputs(self.config, embeds, attention_mask, position_ids, cache, use_cache, **kwargs)
        hidden_states, energies = embeds, []
        mask = causal_mask(self.config, embeds, inputs)
        position_embeddings = self.rotary_emb(embeds, position_ids=inputs.position_ids)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                causal=not inputs.ready,
                position_embeddings=position_embeddings,
                position_ids=inputs.position_ids,
                cache=inputs.cache,
                num_steps=num_steps,
                output_energies=output_energies,
                **kwargs,
            )
            if output_energies:
                hidden_states, *of_layer = hidden_states
                energies.append(of_layer)
        return EnergyModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states),
            cache=inputs.cache,
            energies=stack_layers(energies) if output_energies else None,
        )


class CEMLlamaForCausalLM(CEMLlamaPreTrainedModel, UnevenGenerationMixin, GenerationMixin):
    """Predict the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: CEMLlamaConfig):
        super().__init__(config)
        self.model = CEMLlamaModel(config)
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
        num_steps: int | None = None,
        output_energies: bool = False,
        **kwargs: Any,
    ) -> EnergyCausalLMOutputWithPast:
        r"""Run the layers and the head.

        Args:
            labels (`torch.LongTensor` of shape (B, S), *optional*): targets, shifted inside; -100 is ignored.
            logits_to_keep (`int` or `torch.Tensor`, *optional*): positions to compute logits for; 0 means all.
            num_steps (`int`, *optional*): energy steps of both sub-layers, the config's by default.
            output_energies (`bool`): return energies; see [`CEMLlamaModel`].

        Returns:
            [`EnergyCausalLMOutputWithPast`].
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_steps=num_steps,
            output_energies=output_energies,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return EnergyCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            energies=outputs.energies,
        )

    def cache_config(self, model_kwargs: dict) -> Any:
        """Return the config, which describes the cache for any number of steps of at least 1."""
        check_num_steps(model_kwargs.get("num_steps"))
        return self.config

    def paged_obstacle(self) -> str | None:
        """Name the second tensor beside the keys if it is of another width."""
        heads, width, other = self.config.cache_widths
        if other in (0, width):
            return None
        return (
            "its paged cache holds two tensors of one width, and with a diagonal this model keeps keys of width "
            f"{heads * width} and features of width {heads * other}."
        )


class CEMLlamaForSequenceClassification(LastTokenClassification, CEMLlamaPreTrainedModel):
    """Classify sequences by the state at the last real token."""

    base_model_class = CEMLlamaModel


__all__ = ["CEMLlamaForCausalLM", "CEMLlamaForSequenceClassification", "CEMLlamaModel", "CEMLlamaPreTrainedModel"]
