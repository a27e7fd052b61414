# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The parts that all looped models share: norm, rotary table, gated MLP, and linear maps that stay exact.

They compute in float32 at least and in float64 when the model is float64, which transformers' Llama parts do not.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from loopergy.modeling.kernels.precision import at_least_float32

__all__ = ["ExactLinear", "GatedMLP", "RMSNorm", "RotaryEmbedding", "at_least_float32", "rotate"]


class RMSNorm(nn.Module):
    r"""Normalise by the root mean square: \(y = w \odot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}\).

    Args:
        size (`int`): width of the last dimension.
        eps (`float`): epsilon under the root.
        cast (`str`): `"before_weight"` rounds to the input's type and then multiplies by the weight (Llama, Ouro);
            `"after_weight"` multiplies in float32 and then rounds (Lingua, LT2). Equal but for rounding.
    """

    def __init__(self, size: int, eps: float = 1e-6, cast: str = "before_weight"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps
        self.cast = cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` of shape (..., size); the output has its type."""
        wide = nn.functional.rms_norm(at_least_float32(x), self.weight.shape, eps=self.variance_epsilon)
        if self.cast == "before_weight":
            return self.weight * wide.to(x.dtype)
        return (at_least_float32(self.weight) * wide).to(x.dtype)

    def extra_repr(self) -> str:
        """Show size, epsilon and cast order when the module is printed."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}, cast={self.cast}"


class RotaryEmbedding(LlamaRotaryEmbedding):
    """Tabulate cos and sin of the rotary angles, for all RoPE types of transformers.

    Args:
        config: reads `rope_parameters`, `head_dim` and `max_position_embeddings`.
    """

    def __init__(self, config: Any):  # of any family, which the parent does not declare
        super().__init__(config)

    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each of shape (batch, length, head_dim) in the type of `x`.

        Args:
            x (`torch.Tensor`): gives the type and device.
            position_ids (`torch.LongTensor` of shape (batch, length)): positions from 0.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        angles = position_ids[..., None].to(dtype) * self.inv_freq.to(device=x.device, dtype=dtype)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (m, m + d / 2) of the last dimension; with -sin, apply the transpose.

    Args:
        x (`torch.Tensor` of shape (..., d)).
        cos, sin (`torch.Tensor`, broadcastable to (..., d / 2)): scaled tables of the first half.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class GatedMLP(nn.Module):
    r"""Feed forward: \(W_\mathrm{down}(\phi(W_\mathrm{gate} x) \odot W_\mathrm{up} x)\)."""

    def __init__(self, config: Any, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., hidden_size) to (..., hidden_size)."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ExactLinear(nn.Module):
    r"""Map linearly as `nn.Linear` does, without being one: what looks for linear layers to change leaves it alone.

    For maps to a few gates, and for choices. An error in a decay is repeated at every later token, a choice of tokens
    has no gradient, and a low-rank change of a map to one number is larger than the map. So quantisation keeps these
    weights as they are, whatever library does it, and `target_modules="all-linear"` puts no adapter on them; with
    `modules_to_save` they are trained whole beside an adapter.

    Args:
        in_features, out_features (`int`): widths.
        bias (`bool`): whether to add a bias.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias uniformly within 1 / sqrt(in_features), as `nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features)
        init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.uniform_(self.bias, -bound, bound)

    def init_normal(self, std: float) -> None:
        """Draw the weight as transformers draws those of linear layers, with standard deviation `std`; bias 0."""
        init.normal_(self.weight, mean=0.0, std=std)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Show the widths when the module is printed."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
