# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Kimi Delta Attention (`kda`) as a mixer of a looped model.

State per head \(S \in R^{K \times V}\), zero at the start of every loop, with a log decay \(g_t \in R^K\) per channel:
\(S \leftarrow \mathrm{diag}(e^{g_t}) S,\; S \leftarrow S + k_t\,\beta_t (v_t - S^T k_t)^T,\;
o_t = S^T q_t / \sqrt{K}\).

Letters: B batch, S tokens, H heads, K key width (`kda_head_dim`), V value width (K * `kda_expand_v`).
Source: Kimi Linear, arXiv 2510.26692; LT2 (arXiv 2605.20670) for the sizes. Equation 4 of LT2 writes the decay after
the delta step; its code and table 1, like Kimi Linear, before.
"""

from typing import Any

import torch
from torch import nn

from loopergy.modeling.building_blocks import ExactLinear, at_least_float32
from loopergy.modeling.kernels.kernel_backends import kda
from loopergy.modeling.kernels.linear_attention_step import kda_step
from loopergy.modeling.mixers.delta_rule_mixer import DeltaRuleMixer
from loopergy.modeling.mixers.linear_mixer import draw_log_rates, draw_time_steps, heads


class KimiDeltaAttention(DeltaRuleMixer):
    r"""Mix tokens by a recurrent memory with a decay per channel and the delta rule.

    With x the normed input: q, k, v from x through a short causal convolution and SiLU (SiLU alone without
    convolution), q and k of unit length per head; \(\beta = \sigma(W_b x)\) (times 2 with `kda_allow_neg_eigval`);
    \(g = -e^{A} \mathrm{softplus}(F_2 F_1 x + b)\); \(y = W_o\,[\mathrm{RMSNorm}(o) \odot \sigma(G_2 G_1 x)]\).

    Parameters: q_proj, k_proj [HK, d], v_proj [HV, d], f_proj (F_1 [V, d], F_2 [HK, V]), b_proj [H, d], g_proj (G_1
    [V, d], G_2 [HV, V] with bias), o_proj [d, HV], A_log [H], dt_bias [HK], o_norm [V], and q/k/v_conv1d [C, 1,
    width]; about 4 d^2 at LT2's sizes. With `attention_bias` q, k, v and o have biases.
    Costs about 6 H K V products per token. Keeps H * K * V numbers in float32 per visit, plus `kda_conv_size` columns
    of q, k, v, whatever the length.

    Args:
        config: reads `hidden_size`, `attention_bias` and the `kda_*` fields.
        layer_idx (`int`, *optional*): physical layer.
    """

    prefix = "kda"

    def add_gates(self, config: Any) -> None:
        """Add the parameters of decay, write strength and output gate."""
        width = config.hidden_size
        self.f_proj = nn.Sequential(
            ExactLinear(width, self.value_head_dim, bias=False),
            ExactLinear(self.value_head_dim, self.key_width, bias=False),
        )
        super().add_gates(config)
        self.g_proj = nn.Sequential(
            nn.Linear(width, self.value_head_dim, bias=False),
            nn.Linear(self.value_head_dim, self.value_width, bias=True),
        )
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.key_width, dtype=torch.float32))

    def init_bare_parameters(self) -> None:
        """Draw the decay: A_log = log U(1, 16), dt_bias = softplus^-1 of a step log-uniform in [0.001, 0.1]."""
        draw_log_rates(self.A_log, 1, 16)
        draw_time_steps(self.dt_bias)

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log decay g <= 0, (..., H, K), and the write strength, (..., H)."""
        step = nn.functional.softplus(at_least_float32(self.f_proj(x)) + at_least_float32(self.dt_bias))
        g = -at_least_float32(self.A_log).exp()[:, None] * heads(step, self.num_heads)
        return g, self.write_strength(x)

    def run(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the delta rule with a decay per channel."""
        return kda(**arguments, use_qk_l2norm_in_kernel=True)

    def step(self, state: torch.Tensor, streams: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Apply it to one token."""
        return kda_step(**arguments, state=state)

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Norm and gate the heads' outputs and project them."""
        gate = heads(self.g_proj(x), self.num_heads).sigmoid()
        return self.o_proj((self.o_norm(output) * gate).flatten(-2))
