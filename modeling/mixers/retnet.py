# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""RetNet's multi-scale retention as a mixer of a looped model.

State per head \(S \in R^{K \times V}\), zero at the start of every loop, with a fixed decay per head h = 0 .. H - 1:
\(S \leftarrow \gamma_h S + k_t v_t^T,\; o_t = S^T q_t / \sqrt{K},\; \gamma_h = 1 - 2^{-5-h}\).

Letters: H heads, K key width (`retnet_head_dim`), V value width (K * `retnet_expand_v`).
Source: Sun et al., Retentive Network, arXiv 2307.08621; LT2 (arXiv 2605.20670) for the sizes. LT2 reports that this
mixer, which has neither gate nor delta rule, diverges in training at 0.6B when looped.
"""

from typing import Any, cast

import torch
from torch import nn

from loopergy.modeling.building_blocks import RMSNorm, rotate
from loopergy.modeling.kernels.kernel_backends import simple_gla
from loopergy.modeling.mixers.linear_mixer import Arguments, gated_output, heads
from loopergy.modeling.mixers.unconvolved_mixer import UnconvolvedMixer

ROTARY_BASE = 10_000.0


class RetNet(UnconvolvedMixer):
    r"""Mix tokens by a recurrent memory that fades at a fixed rate per head, with rotary positions.

    With x the normed input: q, k rotated by their positions, v = W_v x; \(y = W_o\,[\mathrm{RMSNorm}(o) \odot
    \mathrm{SiLU}(W_g x)]\).

    Parameters: q_proj, k_proj [HK, d], v_proj, g_proj [HV, d], o_proj [d, HV], g_norm_swish_gate [V]; 8 d^2 at LT2's
    sizes. With `attention_bias` q, k, v and o have biases.
    Costs about 4 H K V products per token. Keeps H * K * V numbers in float32 per visit, whatever the length.

    Args:
        config: reads `hidden_size`, `attention_bias` and the `retnet_*` fields.
        layer_idx (`int`, *optional*): physical layer.
    """

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = config.retnet_num_heads, config.retnet_head_dim
        self.value_head_dim = int(config.retnet_head_dim * config.retnet_expand_v)
        width, bias = config.hidden_size, config.attention_bias
        key_width, value_width = self.num_heads * self.head_dim, self.num_heads * self.value_head_dim
        self.q_proj = nn.Linear(width, key_width, bias=bias)
        self.k_proj = nn.Linear(width, key_width, bias=bias)
        self.v_proj = nn.Linear(width, value_width, bias=bias)
        self.g_proj = nn.Linear(width, value_width, bias=False)
        self.g_norm_swish_gate = RMSNorm(self.value_head_dim, eps=config.retnet_norm_eps, cast="after_weight")
        self.o_proj = nn.Linear(value_width, width, bias=bias)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Mix tokens as [`LinearMixer.forward`] does; with a cache, `position_ids` are needed.

        Raises:
            ValueError: a cache is given without `position_ids`: where its state ends is not written in it.
        """
        if kwargs.get("position_ids") is None:
            if kwargs.get("cache") is not None:
                raise ValueError("RetNet rotates queries and keys by position: with a cache, pass position_ids.")
            length = hidden_states.shape[1]
            kwargs["position_ids"] = torch.arange(length, device=hidden_states.device)[None]
            if kwargs.get("attention_mask") is not None:
                kwargs["position_ids"] = (kwargs["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
        return super().forward(hidden_states, *args, **kwargs)

    def arguments(
        self, streams: torch.Tensor, rest: Any, x: torch.Tensor, position_ids: torch.Tensor | None
    ) -> Arguments:
        """Return rotated q and k, v, and the log decay (..., H), the same for every token."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        half = torch.arange(0, self.head_dim, 2, device=x.device, dtype=dtype)
        angles = cast(torch.Tensor, position_ids)[..., None].to(dtype) * ROTARY_BASE ** (-half / self.head_dim)
        cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
        q, k = (heads(projection(x), self.num_heads).to(dtype) for projection in (self.q_proj, self.k_proj))
        q, k = rotate(q, cos, sin).to(x.dtype), rotate(k, cos, sin).to(x.dtype)
        rate = torch.log1p(-(2.0 ** (-5 - torch.arange(self.num_heads, device=x.device, dtype=dtype))))
        return {"q": q, "k": k, "v": heads(streams, self.num_heads), "g": rate.expand(*x.shape[:-1], -1)}

    def run(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply linear attention with a decay per head."""
        return simple_gla(**arguments)

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Norm and gate the heads' outputs and project them."""
        return self.o_proj(gated_output(self.g_norm_swish_gate(output), self.g_proj(x)))
