# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""HGRN2 as a mixer of a looped model: a gated linear RNN whose forget gate also is the key.

State per head \(S \in R^{K \times V}\), zero at the start of every loop, with a forget gate \(f_t \in (0, 1)^K\):
\(S \leftarrow \mathrm{diag}(f_t) S + (1 - f_t)\,v_t^T,\; o_t = S^T q_t / \sqrt{K}\).

Letters: H heads, K key width (`hgrn2_head_dim`), V value width (K * `hgrn2_expand_v`).
Source: Qin et al., HGRN2, arXiv 2404.07904; LT2 (arXiv 2605.20670) for the sizes. LT2 uses no lower bound on f.
"""

from typing import Any

import torch
from torch import nn

from loopergy.modeling.building_blocks import ExactLinear, RMSNorm, at_least_float32
from loopergy.modeling.kernels.kernel_backends import gla
from loopergy.modeling.mixers.linear_mixer import Arguments, heads
from loopergy.modeling.mixers.unconvolved_mixer import UnconvolvedMixer


class HGRN2(UnconvolvedMixer):
    r"""Mix tokens by a recurrent memory that writes what it forgets.

    With x the normed input: \(q = \mathrm{SiLU}(W_q x)\); \(f = \sigma(W_f x)\); \(k = 1 - f\); \(v = W_i x\);
    \(y = W_o\,\mathrm{RMSNorm}(o)\), the norm over all heads together.

    Parameters: q_proj, f_proj [HK, d], i_proj [HV, d], o_proj [d, HV], g_norm [HV]; about 4 d^2 at LT2's sizes. With
    `attention_bias` the projections have biases.
    Costs about 4 H K V products per token. Keeps H * K * V numbers in float32 per visit, whatever the length.

    Args:
        config: reads `hidden_size`, `attention_bias` and the `hgrn2_*` fields.
        layer_idx (`int`, *optional*): physical layer.
    """

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.hgrn2_num_heads
        width, bias = config.hidden_size, config.attention_bias
        key_width = self.num_heads * config.hgrn2_head_dim
        value_width = self.num_heads * int(config.hgrn2_head_dim * config.hgrn2_expand_v)
        self.q_proj = nn.Linear(width, key_width, bias=bias)
        self.f_proj = ExactLinear(width, key_width, bias=bias)
        self.i_proj = nn.Linear(width, value_width, bias=bias)
        self.g_norm = RMSNorm(value_width, eps=config.hgrn2_norm_eps, cast="after_weight")
        self.o_proj = nn.Linear(value_width, width, bias=bias)

    def streams(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the values; there is no convolution."""
        return self.i_proj(x), None

    def arguments(
        self, streams: torch.Tensor, rest: Any, x: torch.Tensor, position_ids: torch.Tensor | None
    ) -> Arguments:
        """Return q, k, v, and the log forget gate (..., H, K) in float32 at least."""
        forget = at_least_float32(self.f_proj(x))
        # 1 - sigmoid(f), without the digits that the subtraction would cost.
        k = (-forget).sigmoid().to(x.dtype)
        by_name = {
            "q": nn.functional.silu(self.q_proj(x)),
            "k": k,
            "v": streams,
            "g": nn.functional.logsigmoid(forget),
        }
        return {name: heads(part, self.num_heads) for name, part in by_name.items()}

    def run(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply linear attention with a decay per channel."""
        return gla(**arguments)

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Norm the outputs of all heads together and project them."""
        return self.o_proj(self.g_norm(output.flatten(-2)))
