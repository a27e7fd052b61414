# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Classify sequences: a linear score of the last real token."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from loopergy.modeling.energy_outputs import EnergyClassifierOutputWithPast
from loopergy.modeling.looped_outputs import mean_divergence


class LastTokenClassification(PreTrainedModel if TYPE_CHECKING else object):
    """Add the classification head to a base model, which the subclass names in `base_model_class`.

    transformers' generic head builds its base model through the Auto classes, which asks for trust when the code is
    loaded from the Hub; this one does not.
    """

    base_model_class: type[nn.Module]

    def __init__(self, config: Any):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = self.base_model_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
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
        **kwargs: Any,
    ) -> EnergyClassifierOutputWithPast:
        """Score each sequence at its last real token.

        The last real token is the rightmost one that `attention_mask` keeps; without a mask the rightmost that is not
        `config.pad_token_id`.

        Args:
            labels (`torch.Tensor` of shape (batch,), *optional*): classes, or values if `config.num_labels` is 1. A
                divergence of indexers that the model returns (LT2 in training, with `dsa_indexer_loss_weight`) is
                averaged over each sequence's real tokens, then over the sequences, weighted and added to the loss.

        Returns:
            `logits` of shape (batch, num_labels), `loss` with labels, and `energies` of a model that has them.

        Raises:
            ValueError: for several sequences without mask or padding token: their ends cannot be told.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        states = outputs.last_hidden_state
        real = self._real_tokens(input_ids, attention_mask, states)
        last = (torch.arange(states.shape[1], device=states.device) * real).argmax(dim=-1)
        logits = self.score(states[torch.arange(states.shape[0], device=states.device), last])
        loss, divergence = None, outputs.get("indexer_divergence")
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config, **kwargs)
            if divergence is not None:
                mean = mean_divergence(divergence, real, kwargs.get("num_items_in_batch"), per_row=True)
                loss = loss + self.config.dsa_indexer_loss_weight * mean.to(loss.device)
        return EnergyClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            energies=outputs.get("energies"),
        )

    def _real_tokens(
        self, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, states: torch.Tensor
    ) -> torch.Tensor:
        """Return which of the new tokens are no padding, (batch, length)."""
        batch, length = states.shape[:2]
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            return attention_mask[:, -length:].to(states.device) != 0
        if self.config.pad_token_id is not None and input_ids is not None:
            return input_ids.to(states.device) != self.config.pad_token_id
        if batch > 1 and input_ids is not None:
            raise ValueError(
                f"{batch} sequences, but neither attention_mask nor config.pad_token_id tells where they end. Pass "
                "attention_mask, or set model.config.pad_token_id."
            )
        return torch.ones(batch, length, dtype=torch.bool, device=states.device)
