# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""DeepSeek Sparse Attention as a mixer of a looped model.

Letters: B batch, S new tokens, L cached + new tokens, H heads, K key width (`dsa_latent_dim + dsa_tail_dim`), V value
width (`dsa_latent_dim`), J index heads, I index width.
Source: LT2 (arXiv 2605.20670) for the released block; DeepSeek-V3.2-Exp (arXiv 2512.02556), section 2, for the
lightning indexer and its loss.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import rotate_half
from transformers.utils.deprecation import deprecate_kwarg

from loopergy.modeling.building_blocks import ExactLinear, RotaryEmbedding
from loopergy.modeling.kernels.indexed_attention import Indexer, indexed_attention
from loopergy.modeling.kernels.sparse_attention import document_slices, real_among_new, real_tokens
from loopergy.modeling.looped_cache import tokens_before


class DeepseekSparseAttention(nn.Module):
    r"""Mix tokens by attention to the `dsa_topk` tokens that an indexer ranks highest.

    All heads share one latent c = W_kv x per token: the key is c, the value its first `dsa_latent_dim` numbers.
    Head h gives \(\sum_{j \in \mathrm{top}_k(I_t)} \mathrm{softmax}_j(q_{th} \cdot c_j / \sqrt K)\,v_j\), and W_o
    joins them.

    The scores, with q^I = W_q^I x (J heads) and k^I = W_k^I x (one head), are

    - `dsa_indexer="lt2"`: \(I_{tj} = \frac1J \sum_h q^I_{th} \cdot k^I_j\), as released;
    - `dsa_indexer="deepseek"`: \(I_{tj} = \sum_h w_{th}\,\mathrm{ReLU}(q^I_{th} \cdot k^I_j)\,/ \sqrt{I J}\) with
      w = W_w x, a LayerNorm on k^I, and rotary positions on the first 64 numbers of q^I and k^I (on all if there
      are fewer).

    With no more than `dsa_topk` visible tokens this is full attention. Selection has no gradient. The indexer learns
    from `output_divergence` alone, KL(attention averaged over heads || softmax of I), and its input is detached, so
    that this loss moves nothing else; without the loss its weights stay as they are (as in the release).

    Parameters: q_proj [H * K, d], kv_proj [K, d], o_proj [d, H * V], q_score_proj [J * I, d], k_score_proj [I, d];
    for the lightning indexer also w_score_proj [J, d] and k_score_norm [2 * I]. No biases.
    Keeps K + I numbers per token and visit.

    Args:
        config: reads `hidden_size`, `num_attention_heads` and the `dsa_*` fields.
        layer_idx (`int`, *optional*): physical layer.
    """

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.num_index_heads = config.num_attention_heads, config.dsa_index_heads
        self.value_dim, self.tail_dim = config.dsa_latent_dim, config.dsa_tail_dim
        key_dim = self.value_dim + self.tail_dim
        self.index_scaling = (config.dsa_index_heads * config.dsa_index_head_dim) ** -0.5
        width, index_dim = config.hidden_size, config.dsa_index_head_dim
        self.q_proj = nn.Linear(width, self.num_heads * key_dim, bias=False)
        self.kv_proj = nn.Linear(width, key_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.value_dim, width, bias=False)
        self.q_score_proj = ExactLinear(width, self.num_index_heads * index_dim, bias=False)
        self.k_score_proj = ExactLinear(width, index_dim, bias=False)
        lightning = config.dsa_indexer == "deepseek"
        self.w_score_proj = ExactLinear(width, self.num_index_heads, bias=False) if lightning else None
        self.k_score_norm = nn.LayerNorm(index_dim, eps=1e-6) if lightning else None
        self.rotary_emb = _rotary(config, self.tail_dim) if config.dsa_rope else None
        self.index_rotary_emb = _rotary(config, min(64, index_dim)) if lightning else None

    @property
    def scaling(self) -> float:
        """Factor of the attention scores, K ** -0.5."""
        # Of whole numbers: a compiler for all lengths takes a float kept on the module for a symbol, and cannot hand
        # that to what is computed again for the backward pass.
        return (self.value_dim + self.tail_dim) ** -0.5

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        slot: int = 0,
        rewrite_slot: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        output_divergence: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the new tokens with each other and with the cached ones.

        Args:
            hidden_states (`torch.Tensor` of shape (B, S, hidden_size)).
            attention_mask (`torch.Tensor` of shape (B, L), *optional*): 0 at padding, wherever it lies.
            position_ids (`torch.LongTensor` of shape (B or 1, S), *optional*): for the rotary parts; counted from the
                cache by default.
            cache, slot: where latents (as keys) and index keys (as values) of this visit are kept.
            rewrite_slot (`bool`): the slot holds this forward's tokens from an earlier loop; put these in their place.
            cu_seqlens (`torch.LongTensor` of shape (documents + 1,), *optional*): document boundaries in the
                flattened batch; documents do not see each other.
            output_divergence (`bool`): return the indexer's divergence.

        Returns:
            output of shape (B, S, hidden_size); and, if asked for, the divergence per token, (B, S), 0 at padding.

        Raises:
            ValueError: for a mask per query and key, or one that does not cover cached and new tokens.
        """
        batch, length, _ = hidden_states.shape
        real, new_real = real_tokens(attention_mask), None
        past = tokens_before(cache, slot, length if rewrite_slot else 0)
        columns = past + torch.arange(length, device=hidden_states.device)
        if real is not None:
            new_real = real_among_new(real, past, length)
            hidden_states = hidden_states.masked_fill(~new_real[..., None], 0)
        positions = columns[None] if position_ids is None else position_ids
        query, latent = self._latents(hidden_states, positions)
        if output_divergence:
            indexer = self._indexer(hidden_states.detach(), positions)
        else:
            with torch.no_grad():
                indexer = self._indexer(hidden_states, positions)

        if cu_seqlens is not None:
            output, divergence = self._documents(query, latent, indexer, cu_seqlens, output_divergence)
        else:
            if cache is not None:
                kept = cache.update(latent[:, None], indexer.keys[:, None], slot, kwargs=kwargs)
                latent, indexer = kept[0][:, 0], indexer._replace(keys=kept[1][:, 0])
            output, divergence = self._attend(query, latent, indexer, output_divergence, past, real)
        if divergence is not None:
            divergence = divergence.view(batch, length)
            divergence = divergence if new_real is None else divergence.masked_fill(~new_real, 0)
        return self.o_proj(output.reshape(batch, length, -1)), divergence

    def _latents(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries (B, S, H, K) and latents (B, S, K), their tails rotated with `dsa_rope`."""
        query = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1))
        latent = self.kv_proj(hidden_states)
        if self.rotary_emb is None:
            return query, latent
        cos, sin = self.rotary_emb(hidden_states, positions)
        fixed = (self.value_dim, self.tail_dim)
        (query, query_tail), (latent, tail) = query.split(fixed, dim=-1), latent.split(fixed, dim=-1)
        query_tail = _rotated(query_tail, cos[:, :, None], sin[:, :, None])
        return torch.cat((query, query_tail), dim=-1), torch.cat((latent, _rotated(tail, cos, sin)), dim=-1)

    def _indexer(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> Indexer:
        """Return what the scores of the new tokens are made of."""
        query = self.q_score_proj(hidden_states).unflatten(-1, (self.num_index_heads, -1))
        keys = self.k_score_proj(hidden_states)
        if self.w_score_proj is None or self.k_score_norm is None or self.index_rotary_emb is None:
            return Indexer(query, keys)
        keys = self.k_score_norm(keys)
        cos, sin = self.index_rotary_emb(hidden_states, positions)
        width = cos.shape[-1]
        query = torch.cat((_rotated(query[..., :width], cos[:, :, None], sin[:, :, None]), query[..., width:]), dim=-1)
        keys = torch.cat((_rotated(keys[..., :width], cos, sin), keys[..., width:]), dim=-1)
        return Indexer(query, keys, self.w_score_proj(hidden_states) * self.index_scaling)

    def _attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        indexer: Indexer,
        output_divergence: bool,
        past: int | torch.Tensor = 0,
        real: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return indexed_attention(
            query,
            latent,
            self.value_dim,
            indexer,
            top_k=self.config.dsa_topk,
            scale=self.scaling,
            past=past,
            real=real,
            keep_current=self.config.dsa_keep_current,
            dense=self.config.dsa_dense_warmup,
            output_divergence=output_divergence,
        )

    def _documents(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        indexer: Indexer,
        cu_seqlens: torch.Tensor,
        output_divergence: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend within each document of the flattened batch."""
        query, latent = query.flatten(0, 1)[None], latent.flatten(0, 1)[None]
        indexer = indexer.flattened()
        outputs, divergences = [], []
        for cut in document_slices(cu_seqlens):
            output, divergence = self._attend(query[:, cut], latent[:, cut], indexer.part(cut, cut), output_divergence)
            outputs.append(output)
            divergences.append(divergence)
        return torch.cat(outputs, dim=1), torch.cat(divergences, dim=1) if output_divergence else None


def _rotary(config: Any, width: int) -> RotaryEmbedding:
    """Build a rotary table of another width than the attention layers'."""
    own = copy.copy(config)
    own.__dict__["head_dim"] = width
    return RotaryEmbedding(config=own)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last dimension of `x` by its position."""
    return x * cos + rotate_half(x) * sin
