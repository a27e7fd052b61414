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

from loopergy.modeling.building_blocks import ExactLinear, RMSNorm, at_least_float32
from loopergy.modeling.kernels.gated_delta_rule_step import gated_delta_rule_step
from loopergy.modeling.kernels.kernel_backends import gated_delta_rule
from loopergy.modeling.mixers.linear_mixer import (
    Arguments,
    LinearMixer,
    add_convolutions,
    draw_log_rates,
    draw_time_steps,
    heads,
)


class GatedDeltaNet(LinearMixer):
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

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.gdn_num_heads
        self.head_dim = config.gdn_head_dim
        self.value_head_dim = int(config.gdn_head_dim * config.gdn_expand_v)
        self.max_beta = 2.0 if config.gdn_allow_neg_eigval else 1.0
        width, bias = config.hidden_size, config.attention_bias
        self.key_width, self.value_width = self.num_heads * self.head_dim, self.num_heads * self.value_head_dim
        self.q_proj = nn.Linear(width, self.key_width, bias=bias)
        self.k_proj = nn.Linear(width, self.key_width, bias=bias)
        self.v_proj = nn.Linear(width, self.value_width, bias=bias)
        self.a_proj = ExactLinear(width, self.num_heads, bias=False)
        self.b_proj = ExactLinear(width, self.num_heads, bias=False)
        self.g_proj = nn.Linear(width, self.value_width, bias=False) if config.gdn_use_gate else None
        self.o_proj = nn.Linear(self.value_width, width, bias=bias)
        channels = (self.key_width, self.key_width, self.value_width)
        add_convolutions(self, channels, config.gdn_conv_size if config.gdn_use_short_conv else 0)
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.o_norm = RMSNorm(self.value_head_dim, eps=config.gdn_norm_eps, cast="after_weight")
        self.init_bare_parameters()

    def init_bare_parameters(self) -> None:
        """Draw the decay: A_log = log U(0, 16), dt_bias = softplus^-1 of a step log-uniform in [0.001, 0.1].

        Both are computed in float32, so that A_log is finite under any default type. Weight decay belongs on neither.
        """
        draw_log_rates(self.A_log, 0, 16)
        draw_time_steps(self.dt_bias)

    def streams(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return q, k, v side by side."""
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1), None

    def arguments(
        self, streams: torch.Tensor, rest: Any, x: torch.Tensor, position_ids: torch.Tensor | None
    ) -> Arguments:
        """Return q, k, v, and in float32 at least the log decay g <= 0 and the write strength, both (..., H)."""
        q, k, v = streams.split((self.key_width, self.key_width, self.value_width), dim=-1)
        beta = at_least_float32(self.b_proj(x)).sigmoid()
        beta = beta if self.max_beta == 1.0 else self.max_beta * beta
        step = nn.functional.softplus(at_least_float32(self.a_proj(x)) + at_least_float32(self.dt_bias))
        g = -at_least_float32(self.A_log).exp() * step
        count = self.num_heads
        return {"q": heads(q, count), "k": heads(k, count), "v": heads(v, count), "g": g, "beta": beta}

    def run(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the gated delta rule."""
        return gated_delta_rule(**arguments, use_qk_l2norm_in_kernel=True)

    def step(self, state: torch.Tensor, streams: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Apply it to one token."""
        pairs = streams[..., : 2 * self.key_width].unflatten(-1, (2, self.num_heads, -1))
        g, beta = arguments["g"].to(state.dtype), arguments["beta"].to(state.dtype)
        return gated_delta_rule_step(pairs, arguments["v"], g, beta, state)

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Norm and gate the heads' outputs (..., H, V), and project them to (..., hidden_size)."""
        output = self.o_norm(output)
        if self.g_proj is not None:
            output = output * nn.functional.silu(heads(self.g_proj(x), self.num_heads))
        return self.o_proj(output.flatten(-2))
