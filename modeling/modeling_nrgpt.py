# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""NRGPT: one block, applied T times, each time a step down the energy of every token.

Paper: NRGPT, arXiv 2512.16762; equal to its code (github.com/bhoov/nrgpt) number for number.

    x = E_tok[ids] + E_pos[0, 1, ...]
    T times:  g = norm(x);  x = x - eta (grad E_AT(g) + s grad E_FF(g))
    logits = LayerNorm(x) W^T + b

- The block is held once. The gradients are closed forms ([`loopergy.modeling.token_energies`]).
- The cache has one slot per step, which holds the vector g of each token: what later tokens attend to at that step.
- With `exclude_self` each step is the gradient of the token's energy with all other tokens frozen. Without it (the
  default, as in the published language models) the part through the token's own key is left out of the step.

Shapes: B batch, S new tokens, D hidden size, V vocabulary, T steps.
"""

import copy
import inspect
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.masking_utils import and_masks, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from loopergy.configuration.checked_fields import check_not_negative
from loopergy.configuration.configuration_nrgpt import NRGPTConfig, resolve_num_steps
from loopergy.modeling.building_blocks import RMSNorm, at_least_float32
from loopergy.modeling.causal_inputs import CausalInputs, read_causal_inputs
from loopergy.modeling.energy_outputs import EnergyCausalLMOutputWithPast, EnergyModelOutputWithPast, TokenEnergies
from loopergy.modeling.folded_step import FoldedSteps
from loopergy.modeling.learned_positions import WindowedGenerationMixin, check_positions
from loopergy.modeling.looped_cache import check_filled
from loopergy.modeling.looped_inputs import same_document
from loopergy.modeling.sequence_classification import LastTokenClassification
from loopergy.modeling.token_energies import EnergyAttention, FeedForwardEnergy, Neighbours
from loopergy.modeling.uneven_caches import UnevenGenerationMixin

HIDDEN = -1e3  # additive masks hide by this or less: the attention weight is then 0 in every dtype


class BareLayerNorm(nn.Module):
    r"""Normalise to mean 0 and variance 1, and add a bias: \(g = (x - \mu)/\sqrt{\sigma^2 + \epsilon} + \delta\)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` of shape (..., size)."""
        return F.layer_norm(x, self.bias.shape, None, self.bias, self.eps)


class DiagonalRate(nn.Module):
    r"""Scale by squares, \(v \odot w^2\): one learned number for all dimensions or one for each, started at 1."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        """Scale `v` of shape (..., D)."""
        return v * self.weight.square()


def _make_norm(config: NRGPTConfig) -> nn.Module:
    size, eps = config.hidden_size, config.layer_norm_eps
    if config.norm_type == "bare_layernorm":
        return BareLayerNorm(size, eps)
    if config.norm_type == "layernorm":
        return nn.LayerNorm(size, eps)
    return RMSNorm(size, eps, cast="after_weight") if config.norm_type == "rmsnorm" else nn.Identity()


def _make_rate(config: NRGPTConfig) -> nn.Module:
    if config.eta_type == "full":
        return nn.Linear(config.hidden_size, config.hidden_size, bias=False)
    if config.eta_type == "identity":
        return nn.Identity()
    return DiagonalRate(config.hidden_size if config.eta_type == "diag" else 1)


class NRGPTBlock(GradientCheckpointingLayer):
    """Take one step down the energy. The same block serves every step."""

    def __init__(self, config: NRGPTConfig):
        super().__init__()
        self.config = config
        self.tangent_projection = config.tangent_projection
        self.norm = _make_norm(config)
        self.attn = EnergyAttention(config)
        self.ff = FeedForwardEnergy(config)
        self.eta = _make_rate(config)
        self.scale_ff = nn.Parameter(torch.ones(1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        neighbours: Neighbours,
        cache: Cache | None = None,
        step: int = 0,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map states (B, S, D) to those after the step; slot `step` of the cache gets the vectors g."""
        g = self.norm(hidden_states)
        memory = g
        if cache is not None:
            memory = cache.update(g[:, None], g[:, None, :, :0], step)[0].squeeze(1)
        gradient, _ = self.attn(g, memory, neighbours)
        update = self.scaled(gradient + self.scale_ff * self.ff(g))
        return hidden_states - (self.tangent(update, hidden_states) if self.tangent_projection else update)

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        r"""Multiply a gradient (..., D) by the inference rate \(\eta\)."""
        update = self.eta(gradient)
        scale = getattr(self.norm, "weight", None)
        return update * scale if self.config.eta_type == "gamma" and scale is not None else update

    def tangent(self, update: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Take from the update its part along the state and, for layer norms, along the ones: both leave g alone.

        It is the update that is projected and not the gradient: then the energy falls as fast as without, to first
        order, for every rate. For a multiple of the identity the two are the same.
        """
        state, update = at_least_float32(hidden_states), at_least_float32(update)
        if self.config.norm_type != "rmsnorm":
            state, update = state - state.mean(dim=-1, keepdim=True), update - update.mean(dim=-1, keepdim=True)
        unit = F.normalize(state, dim=-1)
        return (update - unit * (unit * update).sum(dim=-1, keepdim=True)).to(hidden_states.dtype)

    def energies(self, hidden_states: torch.Tensor, neighbours: Neighbours) -> tuple[torch.Tensor, ...]:
        """Return attention, feed-forward and total energy, each (B, S), of a whole text's states (B, S, D)."""
        g = self.norm(hidden_states)
        attention, feed_forward = self.attn.energy(g, g, neighbours), self.ff.energy(g)
        return attention, feed_forward, attention + self.scale_ff * feed_forward


class NRGPTPreTrainedModel(PreTrainedModel):
    """Hold what all NRGPT models share: config class, initialisation, what is supported."""

    config: NRGPTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NRGPTBlock"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": NRGPTBlock, "attentions": OutputRecorder(EnergyAttention, index=1)}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DiagonalRate):
            init.ones_(module.weight)
        if isinstance(module, NRGPTBlock):
            init.ones_(module.scale_ff)
        if isinstance(module, EnergyAttention) and module.alpha is not None:
            init.ones_(module.alpha)


class NRGPTModel(NRGPTPreTrainedModel):
    """Take T energy steps from token and position embeddings and return the normed state.

    **Resting tokens.** With a `stop_tolerance` a token rests once a step changes its g by at most that much (root mean
    square over D). Its state then stays what it is, and at all later steps other tokens attend to that last g. The
    rule looks at the past only, so a cached run, a run in chunks and a full forward agree. The loop ends when all
    tokens of the call rest.
    """

    def __init__(self, config: NRGPTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.block = NRGPTBlock(config)
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_steps: int | None = None,
        stop_tolerance: float | None = None,
        output_energies: bool | None = None,
        folded_steps: FoldedSteps | None = None,
        **kwargs: Any,
    ) -> EnergyModelOutputWithPast:
        """Run the steps.

        Args:
            input_ids (`torch.LongTensor` of shape (B, S)) or inputs_embeds (`torch.Tensor` of shape (B, S, D)): the
                new tokens, exactly one of the two. Positions are added to either.
            attention_mask (*optional*): 0 at padding, over cached and new tokens; or a mask (B, 1, S, L), which then
                decides alone who attends to whom: True where a token attends, or 0 there and -1000 or less elsewhere.
            position_ids (`torch.LongTensor` of shape (B, S), *optional*): by default counted from the mask and cache.
                Positions that restart inside a row mark packed documents, which are then kept apart; so do
                `cu_seq_lens_q` and `seq_idx`.
            cache (`Cache`, *optional*): one slot per step, as `DynamicCache(config=model.config)` has.
            use_cache (`bool`, *optional*): return a cache.
            num_steps (`int`, *optional*): steps to take, the config's by default.
            stop_tolerance (`float`, *optional*): let tokens rest, `config.stop_tolerance` by default; see
                [`NRGPTModel`].
            output_energies (`bool`, *optional*): return the energies of each token before every step and after the
                last, for a text that is given whole. `feed_forward` is without the factor `scale_ff`, and `total` is
                `attention + scale_ff * feed_forward`. A token's own key counts unless `exclude_self`.
            folded_steps ([`FoldedSteps`], *optional*): steps with the weights multiplied together, for single tokens;
                `generate` makes it. It is left unused with a `stop_tolerance` or energies.

        Returns:
            [`EnergyModelOutputWithPast`]. With `output_hidden_states=True` there are T + 1 hidden states: the state
            before every step, and the last normed state; fewer when all tokens rest early.

        Raises:
            ValueError: for both or neither of `input_ids` and `inputs_embeds`, a step count below 1, a tolerance below
                0, a text longer than the position table, a cache that does not fit the number of steps, energies with
                a filled cache, other numbers in a mask, and as [`read_causal_inputs`].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        steps = resolve_num_steps(self.config, num_steps)
        tolerance = self.config.stop_tolerance if stop_tolerance is None else stop_tolerance
        if tolerance is not None:
            check_not_negative("stop_tolerance", tolerance)
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        inputs = read_causal_inputs(
            _view(self.config, steps), embeds, attention_mask, position_ids, cache, use_cache, **kwargs
        )
        cache, past, positions = inputs.cache, inputs.past, inputs.position_ids
        _check_slots(cache, steps)
        check_positions(positions, past + embeds.shape[1], self.config.max_position_embeddings)
        if output_energies and past:
            raise ValueError(
                "output_energies=True needs the text whole: the energy after the last step depends on earlier tokens' "
                "last states, which the cache does not hold. Call the model on all tokens without a filled cache."
            )
        neighbours = self._neighbours(embeds, inputs)
        hidden_states = embeds + self.embed_positions(positions)
        trace: list | None = [] if output_energies else None
        if folded_steps is not None and trace is None and tolerance is None and folded_steps.apply_to(hidden_states):
            hidden_states = folded_steps.descend(hidden_states, neighbours, cache, steps)
        else:
            hidden_states = self._descend(hidden_states, neighbours, cache, steps, tolerance, inputs.real, trace)
        energies = None
        if trace is not None:
            attention, feed_forward, total = (torch.stack(part)[None] for part in zip(*trace, strict=True))
            energies = TokenEnergies(attention=attention, feed_forward=feed_forward, total=total)
        return EnergyModelOutputWithPast(self.norm(hidden_states), cache=cache, energies=energies)

    def _descend(
        self,
        hidden_states: torch.Tensor,
        neighbours: Neighbours,
        cache: Cache | None,
        steps: int,
        tolerance: float | None,
        real: torch.Tensor | None,
        trace: list | None,
    ) -> torch.Tensor:
        """Take the steps, put the energies before each and after the last into `trace`, return the last states."""
        resting = None
        for step in range(steps):
            if trace is not None:
                trace.append(self.block.energies(hidden_states, neighbours))
            before = hidden_states
            hidden_states = self.block(before, neighbours=neighbours, cache=cache, step=step)
            if tolerance is None:
                continue
            if resting is not None:
                hidden_states = torch.where(resting[..., None], before, hidden_states)
            g = self.block.norm(hidden_states)
            change = at_least_float32(g - self.block.norm(before)).square().mean(dim=-1).sqrt()
            resting = change <= tolerance
            if bool(resting.all() if real is None else (resting | (real == 0)).all()):
                if cache is not None:
                    for later in range(step + 1, steps):
                        cache.update(g[:, None], g[:, None, :, :0], later)
                if trace is not None:
                    trace.extend([self.block.energies(hidden_states, neighbours)] * (steps - step - 1))
                break
        if trace is not None:
            trace.append(self.block.energies(hidden_states, neighbours))
        return hidden_states

    def _neighbours(self, embeds: torch.Tensor, inputs: CausalInputs) -> Neighbours:
        """Return which tokens each new token attends to, once for all steps."""
        given, cache, exclude_self = inputs.attention_mask, inputs.cache, self.config.exclude_self
        if inputs.ready and given is not None:
            return Neighbours.of(_read_mask(given), exclude_self)
        visible = [] if inputs.documents is None else [same_document(inputs.documents.ids)]
        create: Any = partial(create_causal_mask, self.config, embeds, given, cache)
        static = cache is not None and cache.is_compileable
        if given is None and not visible and embeds.shape[1] == 1 and not static:
            return Neighbours(exclude_self=exclude_self)
        if not visible:
            mask: Any = create(allow_is_causal_skip=not static)
            if mask is None:
                return Neighbours(exclude_self=exclude_self)
            if not exclude_self:
                return Neighbours.of(_visible(mask), exclude_self)
        allowed = and_masks(*visible, *([_earlier] if exclude_self else []))
        return Neighbours.of(_visible(create(and_mask_function=allowed, allow_is_causal_skip=False)), exclude_self)


def _earlier(batch: int, head: int, query: int, key: int) -> bool:
    """Whether a key comes before its query; a mask function in the form of transformers'."""
    return key < query


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """Return where a token attends, for a boolean mask, or one of 0 there and `HIDDEN` or less elsewhere."""
    return mask if mask.dtype == torch.bool else mask > HIDDEN


def _read_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return [`_visible`] of a mask that the caller made.

    Raises:
        ValueError: for numbers in between, which would have to be added to the scores.
    """
    if mask.dtype != torch.bool and not torch.compiler.is_compiling():
        plain = (mask == 0) | (mask <= HIDDEN)
        if not bool(plain.all()):
            raise ValueError(
                f"attention_mask holds {float(mask[~plain][0]):g}: this model adds nothing to its scores. Pass a "
                f"boolean mask, True where visible, or 0 there and {HIDDEN:g} or less elsewhere."
            )
    return _visible(mask)


def _check_slots(cache: Cache | None, steps: int) -> None:
    """Refuse a cache that has too few slots or was filled by fewer steps.

    Raises:
        ValueError: as said.
    """
    if cache is None:
        return
    slots, lazy = len(cache.layers), getattr(cache, "layer_class_to_replicate", None) is not None
    if slots < steps and not lazy:
        raise ValueError(
            f"The cache has {slots} slots, but each of the {steps} steps needs its own. Build it with "
            "DynamicCache(config=model.config), or let the first call make it with use_cache=True."
        )
    check_filled(cache, 0, steps - 1, "num_steps")


def _view(config: NRGPTConfig, steps: int) -> NRGPTConfig:
    """Return the config that describes a cache for another number of steps."""
    if steps == config.num_hidden_layers:
        return config
    view = copy.copy(config)
    view.__dict__["num_hidden_layers"] = steps
    return view


class NRGPTForCausalLM(NRGPTPreTrainedModel, UnevenGenerationMixin, WindowedGenerationMixin, GenerationMixin):
    """Predict the next token from the state after the last step.

    `generate` takes `num_steps=`, `stop_tolerance=`, and `recompute_window=True` to go on beyond the position table
    ([`WindowedGenerationMixin`]).
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NRGPTConfig):
        super().__init__(config)
        self.model = NRGPTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_steps: int | None = None,
        stop_tolerance: float | None = None,
        output_energies: bool | None = None,
        folded_steps: FoldedSteps | None = None,
        **kwargs: Any,
    ) -> EnergyCausalLMOutputWithPast:
        """Run the steps and the head.

        Args:
            labels (`torch.LongTensor` of shape (B, S), *optional*): targets, shifted inside; -100 is ignored.
            logits_to_keep (`int` or `torch.Tensor`, *optional*): positions to compute logits for; 0 means all.
            num_steps, stop_tolerance, output_energies, folded_steps: as in [`NRGPTModel`].

        Returns:
            [`EnergyCausalLMOutputWithPast`].

        Raises:
            ValueError: as [`NRGPTModel`].
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_steps=num_steps,
            stop_tolerance=stop_tolerance,
            output_energies=output_energies,
            folded_steps=folded_steps,
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
        """Return the config that describes a cache with one slot for each step that will be taken."""
        return _view(self.config, resolve_num_steps(self.config, model_kwargs.get("num_steps")))

    def paged_obstacle(self) -> str:
        """Say that there are no keys and values."""
        return "its paged cache holds keys and values, and this model keeps one vector per token and step."

    @wraps(GenerationMixin.generate)  # pyright: ignore[reportAttributeAccessIssue]
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does; single tokens take [`FoldedSteps`], which are faster."""
        parent: Any = super()
        given = inspect.signature(parent.generate).bind_partial(*args, **kwargs).arguments
        # The arguments of a call are also passed to a draft model or a recipe from the Hub, which may not accept this.
        if given.get("assistant_model") is None and not isinstance(given.get("custom_generate"), str):
            kwargs["folded_steps"] = FoldedSteps(self.model.block)
        return parent.generate(*args, **kwargs)

    @wraps(WindowedGenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict:
        """Prepare one forward of `generate`; weights are folded before a compiled forward."""
        if kwargs.get("folded_steps") is not None:
            kwargs["folded_steps"].fold_for(kwargs.get("cache"))
        return super().prepare_inputs_for_generation(*args, **kwargs)

    @staticmethod
    def create_masks_for_generate(
        config: NRGPTConfig, inputs_embeds: torch.Tensor, attention_mask: Any, cache: Cache, **kwargs: Any
    ) -> torch.Tensor:
        """Make the mask ahead of a compiled forward: a padding mask has another size for each token."""
        others = _earlier if config.exclude_self else None
        create: Any = create_causal_mask
        return create(
            config, inputs_embeds, attention_mask, cache, and_mask_function=others, allow_is_causal_skip=False
        )


class NRGPTForSequenceClassification(LastTokenClassification, NRGPTPreTrainedModel):
    """Classify sequences by the state after the last step at the last real token."""

    base_model_class = NRGPTModel


__all__ = ["NRGPTForCausalLM", "NRGPTForSequenceClassification", "NRGPTModel", "NRGPTPreTrainedModel"]
