# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Linear attention (`la`) with a learned feature map as a mixer of a looped model: no decay, no delta rule, no gate.

State per head \(S \in R^{K \times V}\), zero at the start of every loop:
\(S \leftarrow S + \phi(k_t) v_t^T,\; o_t = S^T \phi(q_t) / \sqrt{K}\).

Letters: H heads, K key width (`la_head_dim`), V value width (K * `la_expand_v`).
Source: Katharopoulos et al., Transformers are RNNs, arXiv 2006.16236, with the product feature map and the head norm
of flash-linear-attention in the place of elu + 1 and the normaliser.
"""

from typing import Any

import torch
from torch import nn

from loopergy.modeling.building_blocks import RMSNorm
from loopergy.modeling.kernels.kernel_backends import simple_gla
from loopergy.modeling.mixers.linear_mixer import Arguments, heads
from loopergy.modeling.mixers.unconvolved_mixer import UnconvolvedMixer


class ProductFeatureMap(nn.Module):
    r"""Map each head's vector to \((A z + a) \odot (C z + c)\), both [K, K]."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.layer1 = nn.Linear(head_dim, head_dim)
        self.layer2 = nn.Linear(head_dim, head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., K) to (..., K)."""
        return self.layer1(x) * self.layer2(x)


class LinearAttention(UnconvolvedMixer):
    r"""Mix tokens by a recurrent memory that adds up all it is told.

    With x the normed input: q, k, v are projections of x; \(\phi\) a [`ProductFeatureMap`], one for q and one for k;
    \(y = W_o\,\mathrm{RMSNorm}(o)\).

    Parameters: q_proj, k_proj [HK, d], v_proj [HV, d], feature_map_q, feature_map_k (2 [K, K] with bias each), o_proj
    [d, HV], norm [V]; about 4 d^2 by default. With `attention_bias` q, k, v and o have biases.
    Costs about 4 H K V products per token. Keeps H * K * V numbers in float32 per visit, whatever the length.

    Args:
        config: reads `hidden_size`, `attention_bias` and the `la_*` fields.
        layer_idx (`int`, *optional*): physical layer.
    """

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.la_num_heads
        self.value_head_dim = int(config.la_head_dim * config.la_expand_v)
        width, bias = config.hidden_size, config.attention_bias
        key_width, value_width = self.num_heads * config.la_head_dim, self.num_heads * self.value_head_dim
        self.q_proj = nn.Linear(width, key_width, bias=bias)
        self.k_proj = nn.Linear(width, key_width, bias=bias)
        self.v_proj = nn.Linear(width, value_width, bias=bias)
        self.feature_map_q = ProductFeatureMap(config.la_head_dim)
        self.feature_map_k = ProductFeatureMap(config.la_head_dim)
        self.norm = RMSNorm(self.value_head_dim, eps=config.la_norm_eps, cast="after_weight")
        self.o_proj = nn.Linear(value_width, width, bias=bias)

    def arguments(
        self, streams: torch.Tensor, rest: Any, x: torch.Tensor, position_ids: torch.Tensor | None
    ) -> Arguments:
        """Return mapped q and k, and v; there is no decay."""
        q = self.feature_map_q(heads(self.q_proj(x), self.num_heads))
        k = self.feature_map_k(heads(self.k_proj(x), self.num_heads))
        return {"q": q, "k": k, "v": heads(streams, self.num_heads)}

    def run(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply linear attention without decay."""
        return simple_gla(**arguments)

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Norm the heads' outputs and project them."""
        return self.o_proj(self.norm(output).flatten(-2))
