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

from loopergy.modeling.mixers.delta_rule_mixer import DeltaRuleMixer


class DeltaNet(DeltaRuleMixer):
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

    prefix = "deltanet"

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a log decay of 0 and the write strength, both (..., H)."""
        beta = self.write_strength(x)
        return torch.zeros_like(beta), beta

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Norm the heads' outputs and project them."""
        return self.o_proj(self.o_norm(output).flatten(-2))
