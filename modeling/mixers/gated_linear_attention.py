# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Gated Linear Attention (`gla`) as a mixer of a looped model.

State per head \(S \in R^{K \times V}\), zero at the start of every loop, with a log decay \(g_t \in R^K\) per channel:
\(S \leftarrow \mathrm{diag}(e^{g_t}) S + k_t v_t^T,\; o_t = S^T q_t / \sqrt{K}\).

Letters: H heads, K key width (`gla_head_dim`), V value width (K * `gla_expand_v`).
Source: Yang et al., Gated Linear Attention Transformers, arXiv 2312.06635, whose sizes are the defaults.
"""

from typing import Any

import torch
from torch import nn

from loopergy.modeling.building_blocks import ExactLinear, RMSNorm, at_least_float32
from loopergy.modeling.kernels.kernel_backends import gla
from loopergy.modeling.mixers.linear_mixer import Arguments, gated_output, heads
from loopergy.modeling.mixers.unconvolved_mixer import UnconvolvedMixer


class GatedLinearAttention(UnconvolvedMixer):
    r"""Mix tokens by a recurrent memory with a decay per channel.

    With x the normed input: q, k, v are projections of x; \(g = \log \sigma(G_2 G_1 x + b) / \tau\), \(\tau\) being
    `gla_gate_logit_normalizer`; \(y = W_o\,[\mathrm{RMSNorm}(o) \odot \mathrm{SiLU}(W_g x)]\).

    Parameters: q_proj, k_proj [HK, d], v_proj, g_proj [HV, d], gk_proj (G_1 [rank, d], G_2 [HK, rank] with bias),
    o_proj [d, HV], g_norm_swish_gate [V]; about 4 d^2 by default. With `attention_bias` q, k, v and o have biases.
    Costs about 4 H K V products per token. Keeps H * K * V numbers in float32 per visit, whatever the length.

    Args:
        config: reads `hidden_size`, `attention_bias` and the `gla_*` fields.
        layer_idx (`int`, *optional*): physical layer.
    """

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.gla_num_heads
        self.gate_logit_normalizer = config.gla_gate_logit_normalizer
        self.value_head_dim = int(config.gla_head_dim * config.gla_expand_v)
        width, bias = config.hidden_size, config.attention_bias
        key_width, value_width = self.num_heads * config.gla_head_dim, self.num_heads * self.value_head_dim
        self.q_proj = nn.Linear(width, key_width, bias=bias)
        self.k_proj = nn.Linear(width, key_width, bias=bias)
        self.v_proj = nn.Linear(width, value_width, bias=bias)
        self.g_proj = nn.Linear(width, value_width, bias=False)
        self.gk_proj = nn.Sequential(
            ExactLinear(width, config.gla_gate_rank, bias=False),
            ExactLinear(config.gla_gate_rank, key_width, bias=True),
        )
        self.g_norm_swish_gate = RMSNorm(self.value_head_dim, eps=config.gla_norm_eps, cast="after_weight")
        self.o_proj = nn.Linear(value_width, width, bias=bias)

    def arguments(
        self, streams: torch.Tensor, rest: Any, x: torch.Tensor, position_ids: torch.Tensor | None
    ) -> Arguments:
        """Return q, k, v, and the log decay (..., H, K) in float32 at least."""
        g = nn.functional.logsigmoid(at_least_float32(self.gk_proj(x))) / self.gate_logit_normalizer
        by_name = {"q": self.q_proj(x), "k": self.k_proj(x), "v": streams, "g": g}
        return {name: heads(part, self.num_heads) for name, part in by_name.items()}

    def run(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply linear attention with a decay per channel."""
        return gla(**arguments)

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Norm and gate the heads' outputs and project them."""
        return self.o_proj(gated_output(self.g_norm_swish_gate(output), self.g_proj(x)))
