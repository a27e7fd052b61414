# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Mamba2 as a mixer of a looped model.

State per head \(S \in R^{n \times P}\), zero at the start of every loop, with a step \(\Delta_t\) per head:
\(S \leftarrow e^{-\Delta_t e^{A}} S + B_t\,(\Delta_t x_t)^T,\; y_t = S^T C_t + D x_t\).
In the words of linear attention C is the query, B the key and \(\Delta x\) the value; all heads share C and B.

Letters: H heads, D inner width (`mamba2_expand` * d), P = D / H, n state size (`mamba2_state_size`).
Source: Dao and Gu, Transformers are SSMs, arXiv 2405.21060; LT2 (arXiv 2605.20670) for the sizes.
"""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from loopergy.modeling.building_blocks import RMSNorm, at_least_float32
from loopergy.modeling.kernels.kernel_backends import simple_gla
from loopergy.modeling.kernels.linear_attention_step import linear_attention_step
from loopergy.modeling.mixers.linear_mixer import (
    Arguments,
    LinearMixer,
    depthwise,
    draw_log_rates,
    draw_time_steps,
    heads,
)


class Mamba2(LinearMixer):
    r"""Mix tokens by a state space with a decay per head.

    With u the normed input: z, xBC and \(\delta\) from one projection of u; x, B, C from xBC through a short causal
    convolution with bias and SiLU; \(\Delta = \mathrm{softplus}(\delta + b)\);
    \(out = W_o\,\mathrm{RMSNorm}(y \odot \mathrm{SiLU}(z))\), the norm over the whole inner width.

    Parameters: in_proj [2D + 2n + H, d], conv1d [D + 2n, 1, width] with bias, A_log, dt_bias, D [H], norm [D],
    out_proj [d, D]; about 6 d^2 at LT2's sizes.
    Costs about 4 D n products per token. Keeps D * n numbers in float32 per visit, plus `mamba2_conv_size` columns of
    xBC, whatever the length.

    Args:
        config: reads `hidden_size` and the `mamba2_*` fields.
        layer_idx (`int`, *optional*): physical layer.
    """

    convolutions = ("conv1d",)

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.state_size = config.mamba2_num_heads, config.mamba2_state_size
        self.inner_width = int(config.mamba2_expand * config.hidden_size)
        self.conv_size = config.mamba2_conv_size
        channels = self.inner_width + 2 * self.state_size
        self.in_proj = nn.Linear(config.hidden_size, self.inner_width + channels + self.num_heads, bias=False)
        self.conv1d = depthwise(channels, self.conv_size, bias=True)
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.norm = RMSNorm(self.inner_width, eps=config.mamba2_norm_eps, cast="after_weight")
        self.out_proj = nn.Linear(self.inner_width, config.hidden_size, bias=False)
        self.init_bare_parameters()

    def init_bare_parameters(self) -> None:
        """Draw the decay, A_log = log U(0, 16), dt_bias = softplus^-1 of a step log-uniform in [0.001, 0.1]; D = 1."""
        draw_log_rates(self.A_log, 0, 16)
        draw_time_steps(self.dt_bias)
        init.ones_(self.D)

    def streams(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return xBC, and z with the raw step."""
        sizes = (self.inner_width, self.inner_width + 2 * self.state_size, self.num_heads)
        z, streams, step = self.in_proj(x).split(sizes, dim=-1)
        return streams, (z, step)

    def arguments(
        self, streams: torch.Tensor, rest: Any, x: torch.Tensor, position_ids: torch.Tensor | None
    ) -> Arguments:
        """Return C, B and the steps times x as q, k, v, and the log decay (..., H) in float32 at least."""
        values, k, q = streams.split((self.inner_width, self.state_size, self.state_size), dim=-1)
        step = nn.functional.softplus(at_least_float32(rest[1]) + at_least_float32(self.dt_bias))
        v = (heads(values, self.num_heads) * step[..., None]).to(streams.dtype)
        return {"q": q.unsqueeze(-2), "k": k.unsqueeze(-2), "v": v, "g": -at_least_float32(self.A_log).exp() * step}

    def run(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply linear attention with a decay per head."""
        return simple_gla(**arguments, scale=1.0)

    def step(self, state: torch.Tensor, streams: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Apply it to one token."""
        return linear_attention_step(**arguments, state=state, scale=1.0)

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Add D x, gate, norm and project."""
        values = heads(streams[..., : self.inner_width], self.num_heads)
        output = (output + (self.D[:, None] * values).to(output.dtype)).flatten(-2)
        return self.out_proj(self.norm(output * nn.functional.silu(rest[0])))
