# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Gated DeltaNet as a mixer of a looped model.

State per head \(S \in R^{K \times V}\), zero at the start of every loop:
\(S \leftarrow e^{g_t} S,\; S \leftarrow S + k_t\,\beta_t (v_t - S^T k_t)^T,\; o_t = S^T q_t / \sqrt{K}\).

Letters: B batch, S tokens, H heads, K key width (`gdn_head_dim`), V value width (K * `gdn_expand_v`).
Source: Yang et al., Gated Delta Networks, arXiv 2412.06464; LT2 (arXiv 2605.20670) for the sizes.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks

from loopergy.modeling.building_blocks import RMSNorm, at_least_float32
from loopergy.modeling.kernels.gated_delta_rule_step import gated_delta_rule_step
from loopergy.modeling.kernels.kernel_backends import gated_delta_rule
from loopergy.modeling.kernels.short_convolution import short_convolution


class GatedDeltaNet(nn.Module):
    r"""Mix tokens by a recurrent memory with decay and delta rule, in time linear in the length.

    With x the normed input: q, k, v from x through a short causal convolution and SiLU (SiLU alone without
        convolution),
    q and k of unit length per head; \(\beta = \sigma(W_b x)\) (times 2 with `gdn_allow_neg_eigval`);
    \(g = -e^{A} \mathrm{softplus}(W_a x + b)\); \(y = W_o\,[\mathrm{RMSNorm}(o) \odot \mathrm{SiLU}(W_g x)]\).

    Parameters: q_proj, k_proj [HK, d], v_proj, g_proj [HV, d], a_proj, b_proj [H, d], o_proj [d, HV], A_log [H],
    dt_bias [H], o_norm [V], and q/k/v_conv1d [C, 1, width]; about 6 d^2 at LT2's sizes. With `attention_bias` (for
    converted models) q, k, v and o have biases.
    Keeps H * K * V numbers in float32 per visit, plus `gdn_conv_size` columns of q, k, v, whatever the length.

    Args:
        config: reads `hidden_size`, `attention_bias` and the `gdn_*` fields.
        layer_idx (`int`, *optional*): physical layer.
    """

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.gdn_num_heads
        self.head_dim = config.gdn_head_dim
        self.value_head_dim = int(config.gdn_head_dim * config.gdn_expand_v)
        self.conv_size = config.gdn_conv_size if config.gdn_use_short_conv else 0
        self.max_beta = 2.0 if config.gdn_allow_neg_eigval else 1.0
        width, key_width = config.hidden_size, self.num_heads * self.head_dim
        value_width = self.num_heads * self.value_head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, key_width, bias=bias)
        self.k_proj = nn.Linear(width, key_width, bias=bias)
        self.v_proj = nn.Linear(width, value_width, bias=bias)
        self.a_proj = nn.Linear(width, self.num_heads, bias=False)
        self.b_proj = nn.Linear(width, self.num_heads, bias=False)
        self.g_proj = nn.Linear(width, value_width, bias=False) if config.gdn_use_gate else None
        self.o_proj = nn.Linear(value_width, width, bias=bias)
        if self.conv_size:
            self.q_conv1d = _depthwise(key_width, self.conv_size)
            self.k_conv1d = _depthwise(key_width, self.conv_size)
            self.v_conv1d = _depthwise(value_width, self.conv_size)
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.o_norm = RMSNorm(self.value_head_dim, eps=config.gdn_norm_eps, cast="after_weight")
        self.init_decay()

    @torch.no_grad()
    def init_decay(self) -> None:
        """Draw the decay: A_log = log U(0, 16), dt_bias = softplus^-1 of a step log-uniform in [0.001, 0.1].

        Both are computed in float32, so that A_log is finite under any default type. Weight decay belongs on neither.
        """
        like = {"device": self.A_log.device, "dtype": torch.float32}
        init.copy_(self.A_log, torch.empty(self.num_heads, **like).uniform_(1e-4, 16).log())
        low, high = math.log(1e-3), math.log(1e-1)
        step = torch.empty(self.num_heads, **like).uniform_(low, high).exp().clamp(min=1e-4)
        init.copy_(self.dt_bias, step + torch.log(-torch.expm1(-step)))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        slot: int = 0,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Mix the new tokens with each other and with the cached state.

        Args:
            hidden_states (`torch.Tensor` of shape (B, S, hidden_size)).
            attention_mask (`torch.Tensor` of shape (B, S), *optional*): 0 at padding, wherever it lies. Real tokens
                then see, and the state then holds, what they would without the padding.
            cache, slot: where the state of this visit is kept.
            cu_seqlens (`torch.LongTensor` of shape (documents + 1,), *optional*): document borders in the flattened
                batch; each document starts from a zero state.

        Returns:
            output of shape (B, S, hidden_size), and `None` in the place of attention weights.
        """
        batch, length, _ = hidden_states.shape
        state = None if cache is None else cache.get_recurrent_state(slot)
        if cache is not None and state is not None and length == 1 and attention_mask is None and _in_place(state):
            return self._step(hidden_states, cache, slot, state), None
        real = order = None
        if attention_mask is not None:
            real = attention_mask.to(torch.bool)
            hidden_states = hidden_states.masked_fill(~real[..., None], 0)
        if cu_seqlens is not None:
            hidden_states = hidden_states.reshape(1, batch * length, -1)
            real = None if real is None else real.reshape(1, -1)
        elif real is not None:
            hidden_states, real, order = _real_tokens_first(hidden_states, real)

        qkv = torch.cat((self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)), dim=-1)
        qkv = self._convolve(qkv, real, cache, slot, cu_seqlens) if self.conv_size else nn.functional.silu(qkv)
        key_width = self.num_heads * self.head_dim
        q, k, v = qkv.split((key_width, key_width, self.num_heads * self.value_head_dim), dim=-1)
        g, beta = self._gates(hidden_states, real)

        output, state = gated_delta_rule(
            q.unflatten(-1, (self.num_heads, -1)),
            k.unflatten(-1, (self.num_heads, -1)),
            v.unflatten(-1, (self.num_heads, -1)),
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
        )
        if cache is not None and state is not None:
            cache.update_recurrent_state(state, slot, num_tokens=length)

        output = self._project(output, hidden_states)
        if order is not None:
            output = torch.empty_like(output).scatter_(1, order[..., None].expand_as(output), output)
        return output.reshape(batch, length, -1), None

    def _step(self, hidden_states: torch.Tensor, cache: Cache, slot: int, state: torch.Tensor) -> torch.Tensor:
        """Do what `forward` does, for one token (B, 1, hidden_size) on a filled cache, in few operations."""
        x = hidden_states[:, 0]
        qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)
        qkv = self._convolve_step(qkv, cache, slot) if self.conv_size else qkv
        qkv = nn.functional.silu(qkv)
        key_width = self.num_heads * self.head_dim
        q, k, v = qkv.split((key_width, key_width, self.num_heads * self.value_head_dim), dim=-1)
        g, beta = self._gates(x, None)
        output = gated_delta_rule_step(
            q.unflatten(-1, (self.num_heads, -1)),
            k.unflatten(-1, (self.num_heads, -1)),
            v.unflatten(-1, (self.num_heads, -1)),
            g.to(state.dtype),
            beta.to(state.dtype),
            state,
        )
        cache.update_recurrent_state(state, slot, num_tokens=1)
        return self._project(output.to(v.dtype), x)[:, None]

    @force_accelerate_hooks(["q_conv1d", "k_conv1d", "v_conv1d"])
    def _convolve_step(self, qkv: torch.Tensor, cache: Cache, slot: int) -> torch.Tensor:
        """Convolve one token (B, channels) with the cached columns, and update them."""
        weight = torch.cat((self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)).squeeze(1)
        past = cache.get_conv_state(slot)
        past = qkv.new_zeros(*qkv.shape, self.conv_size) if past is None else past
        columns = torch.cat((past[..., 1:], qkv[..., None]), dim=-1)
        cache.update_conv_state(columns, slot)
        return (columns * weight).sum(-1)

    def _project(self, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm and gate the heads' outputs (..., H, V), and project them to (..., hidden_size)."""
        output = self.o_norm(output)
        if self.g_proj is not None:
            gate = self.g_proj(hidden_states).unflatten(-1, (self.num_heads, -1))
            output = output * nn.functional.silu(gate)
        return self.o_proj(output.flatten(-2))

    def _gates(self, hidden_states: torch.Tensor, real: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log decay g <= 0 and write strength beta, both (..., H) in float32 at least; both 0 at padding."""
        beta = self.max_beta * at_least_float32(self.b_proj(hidden_states)).sigmoid()
        step = nn.functional.softplus(at_least_float32(self.a_proj(hidden_states)) + at_least_float32(self.dt_bias))
        g = -at_least_float32(self.A_log).exp() * step
        if real is not None:
            g, beta = g.masked_fill(~real[..., None], 0), beta.masked_fill(~real[..., None], 0)
        return g, beta

    @force_accelerate_hooks(["q_conv1d", "k_conv1d", "v_conv1d"])
    def _convolve(
        self,
        qkv: torch.Tensor,
        real: torch.Tensor | None,
        cache: Cache | None,
        slot: int,
        cu_seqlens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Convolve (B, S, channels) and apply SiLU, continuing from the cached columns and updating them."""
        weight = torch.cat((self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight)).squeeze(1)
        past = None if cache is None else cache.get_conv_state(slot)
        if cache is not None:
            columns = qkv.transpose(1, 2)
            left = columns.new_zeros(*columns.shape[:2], self.conv_size) if past is None else past
            columns = torch.cat((left, columns), dim=-1)
            if real is None:
                columns = columns[..., -self.conv_size :]
            else:
                last = real.sum(dim=1)[:, None] + torch.arange(self.conv_size, device=qkv.device)
                columns = columns.gather(-1, last[:, None].expand(-1, columns.shape[1], -1))
        output = short_convolution(qkv, weight, state=past, activation="silu", cu_seqlens=cu_seqlens)
        if cache is not None:
            cache.update_conv_state(columns, slot)
        return output


def _in_place(state: torch.Tensor) -> bool:
    """Whether the state may be written in place: not tracked, not locked, and no better kernel on the device."""
    tracked = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return not tracked and state.device.type != "cuda" and state.is_inference() == torch.is_inference_mode_enabled()


def _depthwise(channels: int, size: int) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, size, groups=channels, bias=False)


def _real_tokens_first(
    hidden_states: torch.Tensor, real: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Move padding behind the real tokens of each row, so that nothing lies between them or before the state.

    Returns the reordered states, the mask in the new order, and the old index of each new place.
    """
    order = real.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    hidden_states = hidden_states.gather(1, order[..., None].expand_as(hidden_states))
    return hidden_states, real.gather(1, order), order
