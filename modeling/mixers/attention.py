# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Softmax attention as a mixer of a looped model: full or windowed, with an optional output gate.

Llama's attention, except that
- it is visited once per loop and told which cache slot the visit uses;
- loops may share the slot (`kv_sharing="last"`);
- some tokens of the batch may have left the loops already (early exit).

Shapes: B batch, S new tokens, H heads, D head dimension, L cached + new tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv
from transformers.utils.deprecation import deprecate_kwarg


@dataclass
class ActiveTokens:
    """Say which of the new tokens still loop, and keep what those that left wrote.

    Attributes:
        rows (`torch.LongTensor` of shape (R,)): batch rows with at least one token that loops on.
        columns (`torch.LongTensor` of shape (R, A)): per such row the new tokens that loop on, filled up with tokens
            that left; what is computed for those is dropped.
        valid (`torch.BoolTensor` of shape (R, A)): False at the filling.
        past_keys_values (`dict[int, tuple]`): per physical layer the keys and values of all new tokens, each from the
            last loop that it took part in.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    valid: torch.Tensor
    past_keys_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def complete(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new keys and values [R, H, A, D] in the place of those of the previous loop; return [B, H, S, D]."""
        if layer not in self.past_keys_values:  # the first loop, which every token takes part in
            self.past_keys_values[layer] = (keys, values)
            return keys, values
        full = []
        row, token = self.rows[:, None].expand_as(self.columns)[self.valid], self.columns[self.valid]
        for old, new in zip(self.past_keys_values[layer], (keys, values), strict=True):
            completed = old.transpose(1, 2).index_put((row, token), new.transpose(1, 2)[self.valid])
            full.append(completed.transpose(1, 2))
        self.past_keys_values[layer] = tuple(full)
        return self.past_keys_values[layer]


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with plain matrix products, softmax in float32 at least.

    Args:
        query (`torch.Tensor` of shape (B, H, S, D)), key, value (`torch.Tensor` of shape (B, H_kv, L, D)).
        attention_mask (`torch.Tensor`, *optional*): True where visible, or added to the scores; broadcastable to
            (B, H, S, L).

    Returns:
        output of shape (B, S, H, D) and weights of shape (B, H, S, L).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    weights = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attention_mask, torch.finfo(weights.dtype).min)
    elif attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class Attention(nn.Module):
    r"""Mix tokens by softmax attention with rotary positions.

    \(y = W_o\,[\mathrm{softmax}(q k^T / \sqrt{D}) v]\), and with the gate \(y = W_o\,([\cdot] \odot \sigma(W_g x))\).

    Parameters: q_proj, k_proj, v_proj, o_proj, and gate_proj with the gate; d^2 each for as many key as query heads.
    Keeps 2 * H_kv * D numbers per token and visit, of the last `window` tokens if windowed.

    Args:
        config: reads `hidden_size`, `num_attention_heads`, `num_key_value_heads`, `head_dim`, `attention_dropout`.
        layer_idx (`int`): physical layer.
        bias (`bool`): biases on all projections.
        output_gate (`bool`): the SDPA output gate (Qiu et al., arXiv 2505.06708, position G1; LT2 section 3).
    """

    def __init__(self, config: Any, layer_idx: int, bias: bool = False, output_gate: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False) if output_gate else None

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        slot: int = 0,
        window: int | None = None,
        rewrite_slot: bool = False,
        active: ActiveTokens | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the new tokens with each other and with the cached ones.

        Args:
            hidden_states (`torch.Tensor` of shape (B, S, hidden_size)).
            position_embeddings: cos and sin of shape (B, S, D).
            attention_mask: as the attention implementation wants it; `None` means causal.
            cache, slot: where keys and values of this visit are kept.
            window (`int`, *optional*): window in tokens, for implementations that take it beside the mask.
            rewrite_slot (`bool`): the slot holds this forward's tokens from an earlier loop; put these in their place.
            active ([`ActiveTokens`], *optional*): `hidden_states`, `position_embeddings` and `attention_mask` then
                hold the tokens that loop on.

        Returns:
            output of shape (B, S, hidden_size), and the weights where the implementation gives them.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)

        if active is not None:
            key, value = active.complete(self.layer_idx, key, value)
        if cache is not None:
            if rewrite_slot:
                cache.layers[slot].crop(-key.shape[-2])  # pyright: ignore[reportAttributeAccessIssue]
            key, value = cache.update(key, value, slot, kwargs=kwargs)
        if active is not None and len(active.rows) < key.shape[0]:
            key, value = key[active.rows], value[active.rows]

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        if window is not None:
            kwargs["sliding_window"] = window
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        output = output.reshape(*hidden_states.shape[:-1], -1).contiguous()
        if self.gate_proj is not None:
            output = output * self.gate_proj(hidden_states).sigmoid()
        return self.o_proj(output), weights
