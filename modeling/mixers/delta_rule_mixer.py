# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What the mixers with the delta rule share: queries, keys, values, write strength and output.

Letters: H heads, K key width (`<prefix>_head_dim`), V value width (K * `<prefix>_expand_v`), d hidden size.
"""

from typing import Any, ClassVar

import torch
from torch import nn

from loopergy.modeling.building_blocks import ExactLinear, RMSNorm, at_least_float32
from loopergy.modeling.kernels.gated_delta_rule_step import gated_delta_rule_step
from loopergy.modeling.kernels.kernel_backends import gated_delta_rule
from loopergy.modeling.mixers.linear_mixer import Arguments, LinearMixer, depthwise, heads


class DeltaRuleMixer(LinearMixer):
    """Mix tokens by the delta rule; subclasses say how the memory decays and how the heads' outputs are gated.

    Args:
        config: reads `hidden_size`, `attention_bias` and the fields `<prefix>_num_heads`, `_head_dim`, `_expand_v`,
            `_allow_neg_eigval`, `_use_short_conv`, `_conv_size` and `_norm_eps`.
        layer_idx (`int`, *optional*): physical layer.

    Attributes:
        prefix (`str`): of the config's fields.
    """

    prefix: ClassVar[str]

    def __init__(self, config: Any, layer_idx: int | None = None):
        super().__init__()

        def field(name: str) -> Any:
            return getattr(config, f"{self.prefix}_{name}")

        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = field("num_heads"), field("head_dim")
        self.value_head_dim = int(self.head_dim * field("expand_v"))
        self.max_beta = 2.0 if field("allow_neg_eigval") else 1.0
        width, bias = config.hidden_size, config.attention_bias
        self.key_width, self.value_width = self.num_heads * self.head_dim, self.num_heads * self.value_head_dim
        self.q_proj = nn.Linear(width, self.key_width, bias=bias)
        self.k_proj = nn.Linear(width, self.key_width, bias=bias)
        self.v_proj = nn.Linear(width, self.value_width, bias=bias)
        self.add_gates(config)
        self.o_proj = nn.Linear(self.value_width, width, bias=bias)
        self.conv_size = field("conv_size") if field("use_short_conv") else 0
        if self.conv_size:
            for name, channels in zip(self.convolutions, self.stream_widths, strict=True):
                setattr(self, name, depthwise(channels, self.conv_size))
        self.o_norm = RMSNorm(self.value_head_dim, eps=field("norm_eps"), cast="after_weight")
        self.init_bare_parameters()

    def add_gates(self, config: Any) -> None:
        """Add the parameters of write strength, decay and output gate: here that of the write strength alone."""
        self.b_proj = ExactLinear(config.hidden_size, self.num_heads, bias=False)

    @property
    def stream_widths(self) -> tuple[int, int, int]:
        """Widths of q, k and v, all heads together."""
        return self.key_width, self.key_width, self.value_width

    def streams(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return q, k, v side by side."""
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1), None

    def arguments(
        self, streams: torch.Tensor, rest: Any, x: torch.Tensor, position_ids: torch.Tensor | None
    ) -> Arguments:
        """Return q, k, v, and in float32 at least the log decay g <= 0 and the write strength (..., H)."""
        q, k, v = (heads(part, self.num_heads) for part in streams.split(self.stream_widths, dim=-1))
        g, beta = self.gates(x)
        return {"q": q, "k": k, "v": v, "g": g, "beta": beta}

    def gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log decay of tokens (..., d), (..., H) or per key channel (..., H, K), and the write strength."""
        raise NotImplementedError

    def write_strength(self, x: torch.Tensor) -> torch.Tensor:
        """Return how much of the difference to its value each token (..., d) writes, (..., H)."""
        beta = at_least_float32(self.b_proj(x)).sigmoid()
        return beta if self.max_beta == 1.0 else self.max_beta * beta

    def run(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the delta rule with a decay per head."""
        return gated_delta_rule(**arguments, use_qk_l2norm_in_kernel=True)

    def step(self, state: torch.Tensor, streams: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Apply it to one token."""
        pairs = streams[..., : 2 * self.key_width].unflatten(-1, (2, self.num_heads, -1))
        g, beta = arguments["g"].to(state.dtype), arguments["beta"].to(state.dtype)
        return gated_delta_rule_step(pairs, arguments["v"], g, beta, state)
