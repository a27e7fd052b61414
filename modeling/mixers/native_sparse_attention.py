# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Native Sparse Attention as a mixer of a looped model.

Letters: B batch, S new tokens, L cached + new tokens, H heads, E key-value heads, D head dimension.
Source: Native Sparse Attention, arXiv 2502.11089; LT2 (arXiv 2605.20670) for the sizes.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils.deprecation import deprecate_kwarg

from loopergy.modeling.building_blocks import ExactLinear
from loopergy.modeling.kernels.block_sparse_attention import (
    Branches,
    Pooling,
    native_sparse_attention,
    pool_blocks,
)
from loopergy.modeling.kernels.sparse_attention import document_slices, real_among_new, real_tokens
from loopergy.modeling.looped_cache import tokens_before


class NativeSparseAttention(nn.Module):
    r"""Mix tokens by attention to averages of blocks, to selected blocks and to a window.

    \(y = W_o\,\sum_i g_i \odot o_i\) with \(g = \sigma(W_g x)\), three numbers per head, and the same rotary q, k, v
    in all branches:

    - averages: keys and values are averaged over `nsa_pool_size` tokens every `nsa_pool_stride`; a query sees
      the averages that end at it or before;
    - selection: the weights on averages, summed over the query heads of a key-value head, score blocks of
      `nsa_block_size` tokens. The first block, the query's own and the one before it are always read, and the best
      others up to `nsa_block_count`;
    - window: the last `nsa_window` tokens, the query's own included.

    A query thus reads `nsa_block_count * nsa_block_size + nsa_window` tokens and L / `nsa_pool_stride` averages.

    Parameters: q_proj, o_proj [d^2 each for H * D = d], k_proj, v_proj [E * D, d], g_proj [3 * H, d].
    Keeps 2 * E * D numbers per token and visit, and as many per average.

    Args:
        config: reads `hidden_size`, `num_attention_heads`, `head_dim`, `attention_bias` and the `nsa_*` fields.
        layer_idx (`int`, *optional*): physical layer.
    """

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.branches = Branches(
            Pooling(config.nsa_pool_size, config.nsa_pool_stride),
            config.nsa_block_size,
            config.nsa_block_count,
            config.nsa_window,
        )
        width, bias = config.hidden_size, config.attention_bias
        kv_width = config.nsa_num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width, bias=bias)
        self.g_proj = ExactLinear(width, 3 * self.num_heads, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, width, bias=bias)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        slot: int = 0,
        rewrite_slot: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Mix the new tokens with each other and with the cached ones.

        Args:
            hidden_states (`torch.Tensor` of shape (B, S, hidden_size)).
            position_embeddings: cos and sin of shape (B or 1, S, D).
            attention_mask (`torch.Tensor` of shape (B, L), *optional*): 0 at padding, wherever it lies. Real tokens
                then see what they would without the padding: blocks are counted in real tokens.
            cache, slot: where keys, values and averages of this visit are kept.
            rewrite_slot (`bool`): the slot holds this forward's tokens from an earlier loop; put these in their place.
            cu_seqlens (`torch.LongTensor` of shape (documents + 1,), *optional*): document boundaries in the
                flattened batch; documents do not see each other, and each counts its blocks from its own beginning.

        Returns:
            output of shape (B, S, hidden_size), and `None` in the place of attention weights.

        Raises:
            ValueError: for a mask per query and key, or one that does not cover cached and new tokens.
        """
        batch, length, _ = hidden_states.shape
        real = real_tokens(attention_mask)
        past = tokens_before(cache, slot, length if rewrite_slot else 0)
        if real is not None:
            hidden_states = hidden_states.masked_fill(~real_among_new(real, past, length)[..., None], 0)
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        gates = self.g_proj(hidden_states).sigmoid().unflatten(-1, (self.num_heads, 3))

        if cu_seqlens is not None:
            output = self._documents(query.transpose(1, 2), key, value, gates, cu_seqlens)
        else:
            output = self._attend(query.transpose(1, 2), key, value, gates, cache, slot, past, real)
        return self.o_proj(output.reshape(batch, length, -1)), None

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gates: torch.Tensor,
        cache: Cache | None = None,
        slot: int = 0,
        past: int | torch.Tensor = 0,
        real: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pooling = self.branches.pooling
        if cache is None:
            new = key.shape[2]
            pooled_key, pooled_value = (pool_blocks(part, None, pooling, 0, new, real) for part in (key, value))
        else:
            both = cache.update(key, value, slot, pooling=pooling, real=real)
            (key, pooled_key), (value, pooled_value) = both
        return native_sparse_attention(
            query, key, value, pooled_key, pooled_value, gates, self.branches, self.scaling, past, real
        )

    def _documents(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gates: torch.Tensor,
        cu_seqlens: torch.Tensor,
    ) -> torch.Tensor:
        """Attend within each document of the flattened batch."""
        query, gates = query.flatten(0, 1)[None], gates.flatten(0, 1)[None]
        key, value = (part.transpose(0, 1).flatten(1, 2)[None] for part in (key, value))
        outputs = [
            self._attend(query[:, cut], key[:, :, cut], value[:, :, cut], gates[:, cut])
            for cut in document_slices(cu_seqlens)
        ]
        return torch.cat(outputs, dim=1)
