# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Gated DeltaNet as a mixer of a looped model.

State per head \(S \in R^{K \times V}\), zero at the start of every loop:
\(S \leftarrow e^{g_t} S,\; S \leftarrow S + k_t\,\beta_t (v_t - S^T k_t)^T,\; o_t = S^T q_t / \sqrt{K}\).

Letters: B batch, S tokens, H heads, K key width (`gdn_head_dim`), V value width (K * `gdn_expand_v`).
Source: Yang et al., Gated Delta Networks, arXiv 2412.06464; LT2 (arXiv 2605.20670) for the sizes.
"""

from typing import Any

import torch
from torch import nn

from loopergy.modeling.building_blocks import ExactLinear, at_least_float32
from loopergy.modeling.mixers.delta_rule_mixer import DeltaRuleMixer
from loopergy.modeling.mixers.linear_mixer import draw_log_rates, draw_time_steps, gated_output


class GatedDeltaNet(DeltaRuleMixer):
    r"""Mix tokens by a recurrent memory with decay and delta rule, in time linear in the length.

    With x the normed input: q, k, v from x through a short causal convolution and SiLU (without it SiLU alone),
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

    prefix = "gdn"

    def add_gates(self, config: Any) -> None:
        """Add the parameters of decay, write strength and output gate."""
        width = config.hidden_size
        self.a_proj = ExactLinear(width, self.num_heads, bias=False)
        super().add_gates(config)
        self.g_proj = nn.Linear(width, self.value_width, bias=False) if config.gdn_use_gate else None
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))

    def init_bare_parameters(self) -> None:
        """Draw the decay: A_log = log U(0, 16), dt_bias = softplus^-1 of a step log-uniform in [0.001, 0.1].

        Both are computed in float32, so that A_log is finite under any default type. Weight decay belongs on neither.
        """
        draw_log_rates(self.A_log, 0, 16)
        draw_time_steps(self.dt_bias)

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log decay g <= 0 and the write strength, both (..., H)."""
        beta = self.write_strength(x)
        step = nn.functional.softplus(at_least_float32(self.a_proj(x)) + at_least_float32(self.dt_bias))
        return -at_least_float32(self.A_log).exp() * step, beta

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Norm and gate the heads' outputs (..., H, V), and project them to (..., hidden_size)."""
        output = self.o_norm(output)
        return self.o_proj(output.flatten(-2) if self.g_proj is None else gated_output(output, self.g_proj(x)))
