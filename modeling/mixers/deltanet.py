# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""DeltaNet as a mixer of a looped model: the delta rule without decay.

State per head \(S \in R^{K \times V}\), zero at the start of every loop:
\(S \leftarrow S + k_t\,\beta_t (v_t - S^T k_t)^T,\; o_t = S^T q_t / \sqrt{K}\).

Letters: B batch, S tokens, H heads, K key width (`deltanet_head_dim`), V value width (K * `deltanet_expand_v`).
Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule, arXiv 2406.06484; LT2 (arXiv 2605.20670)
for the sizes.
"""

from typing import Any

import torch
from torch import nn

from loopergy.modeling.building_blocks import ExactLinear, RMSNorm, at_least_float32
from loopergy.modeling.kernels.gated_delta_rule_step import gated_delta_rule_step
from loopergy.modeling.kernels.kernel_backends import gated_delta_rule
from loopergy.modeling.mixers.linear_mixer import Arguments, LinearMixer, add_convolutions, heads


class DeltaNet(LinearMixer):
    r"""Mix tokens by a recurrent memory that is corrected towards each new value and never decays.

    With x the normed input: q, k, v from x through a short causal convolution and SiLU (SiLU alone without
    convolution), q and k of unit length per head; \(\beta = \sigma(W_b x)\) (times 2 with
    `deltanet_allow_neg_eigval`); \(y = W_o\,\mathrm{RMSNorm}(o)\).

    Parameters: q_proj, k_proj [HK, d], v_proj [HV, d], b_proj [H, d], o_proj [d, HV], o_norm [V], and q/k/v_conv1d
    [C, 1, width]; about 4 d^2 at LT2's sizes. With `attention_bias` q, k, v and o have biases.
    Costs about 6 H K V products per token. Keeps H * K * V numbers in float32 per visit, plus `deltanet_conv_size`
    columns of q, k, v, whatever the length.

    Args:
        config: reads `hidden_size`, `attention_bias` and the `deltanet_*` fields.
        layer_idx (`int`, *optional*): physical layer.
    """

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = config.deltanet_num_heads, config.deltanet_head_dim
        self.value_head_dim = int(config.deltanet_head_dim * config.deltanet_expand_v)
        self.max_beta = 2.0 if config.deltanet_allow_neg_eigval else 1.0
        width, bias = config.hidden_size, config.attention_bias
        self.key_width, self.value_width = self.num_heads * self.head_dim, self.num_heads * self.value_head_dim
        self.q_proj = nn.Linear(width, self.key_width, bias=bias)
        self.k_proj = nn.Linear(width, self.key_width, bias=bias)
        self.v_proj = nn.Linear(width, self.value_width, bias=bias)
        self.b_proj = ExactLinear(width, self.num_heads, bias=False)
        self.o_proj = nn.Linear(self.value_width, width, bias=bias)
        channels = (self.key_width, self.key_width, self.value_width)
        add_convolutions(self, channels, config.deltanet_conv_size if config.deltanet_use_short_conv else 0)
        self.o_norm = RMSNorm(self.value_head_dim, eps=config.deltanet_norm_eps, cast="after_weight")

    def streams(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return q, k, v side by side."""
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1), None

    def arguments(
        self, streams: torch.Tensor, rest: Any, x: torch.Tensor, position_ids: torch.Tensor | None
    ) -> Arguments:
        """Return q, k, v, and in float32 at least a log decay of 0 and the write strength, both (..., H)."""
        parts = streams.split((self.key_width, self.key_width, self.value_width), dim=-1)
        beta = self.max_beta * at_least_float32(self.b_proj(x)).sigmoid()
        by_name = {name: heads(part, self.num_heads) for name, part in zip("qkv", parts, strict=True)}
        return {**by_name, "g": torch.zeros_like(beta), "beta": beta}

    def run(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the delta rule."""
        return gated_delta_rule(**arguments, use_qk_l2norm_in_kernel=True)

    def step(self, state: torch.Tensor, streams: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Apply it to one token."""
        pairs = streams[..., : 2 * self.key_width].unflatten(-1, (2, self.num_heads, -1))
        g, beta = arguments["g"].to(state.dtype), arguments["beta"].to(state.dtype)
        return gated_delta_rule_step(pairs, arguments["v"], g, beta, state)

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Norm the heads' outputs and project them."""
        return self.o_proj(self.o_norm(output).flatten(-2))
