# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Gradients of NRGPT's energies as single operations that keep little for the backward pass.

Plain autograd keeps the keys and the score maps of every head and four feed-forward wide tensors for every step; these
keep the normed states and two feed-forward wide tensors, and compute the rest again. Both are exact, in any type.

Shapes: B batch, T tokens, H heads, D hidden size, F feed-forward width.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from loopergy.modeling.kernels.tracing import in_functorch

MOST_HEADS_KEPT = 4
BLOCK = 64  # queries at a time: small enough to leave out most of what causality forbids, large enough for the BLAS


def causal_pull(g: torch.Tensor, weight: torch.Tensor, beta: float = 1.0, exclude_self: bool = False) -> torch.Tensor:
    r"""Return \(\sum_h \sum_B p_{hAB} W_h g_B\), minus the gradient of the attention energy, without padding.

    \(p_{hAB}\) is the softmax over \(B \le A\), or \(B < A\), of \(\beta\,g_A^T W_h g_B\). The keys of all heads lie
    side by side, so that one product gives the scores of all heads and one gives their sum.

    Args:
        g (`torch.Tensor` of shape (B, T, D)): normed states, queries and memory alike.
        weight (`torch.Tensor` of shape (H * D, D)): the matrices \(W_h\), stacked.
        beta (`float`): inverse temperature.
        exclude_self (`bool`): \(B < A\); the first token then gets zero.

    Returns:
        `torch.Tensor` of shape (B, T, D).
    """
    return _CausalPull.apply(g, weight, beta, int(exclude_self))  # pyright: ignore[reportReturnType]


def gelu_and_slope(
    z: torch.Tensor, u: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
) -> torch.Tensor:
    r"""Return \(W_2\sigma(z) + b_2 + W_1^T[u \odot \sigma'(z)]\), keeping z and u only; \(\sigma\) is the exact GELU.

    Args:
        z, u (`torch.Tensor` of shape (..., F)).
        w1 (`torch.Tensor` of shape (F, D)), w2 (`torch.Tensor` of shape (D, F)), b2 (`torch.Tensor` of shape (D,)).

    Returns:
        `torch.Tensor` of shape (..., D).
    """
    return _GeluAndSlope.apply(z, u, w1, w2, b2)  # pyright: ignore[reportReturnType]


def slope_product(u: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    r"""Return \(u \odot \sigma'(z)\) with the slope of the exact GELU, \(\sigma'(z) = \Phi(z) + z\phi(z)\).

    Args:
        u, z (`torch.Tensor` of one shape).
    """
    if not torch.is_grad_enabled() or in_functorch():
        return torch.ops.aten.gelu_backward(u.to(z.dtype), z)
    return _SlopeProduct.apply(u.to(z.dtype), z)  # pyright: ignore[reportReturnType]


def _curvature(z: torch.Tensor) -> torch.Tensor:
    r"""Return \(\sigma''(z) = \phi(z)(2 - z^2)\)."""
    square = z * z
    return torch.exp(-0.5 * square).mul_((2 - square).mul_((2 * math.pi) ** -0.5))


class _SlopeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(u, z)
        return torch.ops.aten.gelu_backward(u, z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u, z = ctx.saved_tensors
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        return torch.ops.aten.gelu_backward(grad, z), (_curvature(wide) * u * grad).to(z.dtype)


class _GeluAndSlope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: torch.Tensor, u: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(z, u, w1, w2)
        return F.linear(F.gelu(z), w2, b2) + torch.ops.aten.gelu_backward(u, z) @ w1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z, u, w1, w2 = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        # One error function and one exponential give the GELU and both its derivatives.
        slope = torch.ops.aten.gelu_backward(torch.ones_like(z), z)
        square = z * z
        density = torch.exp(-0.5 * square).mul_((2 * math.pi) ** -0.5)
        hidden = torch.addcmul(z * slope, square, density, value=-1)
        grad_w2 = rows.t() @ hidden.flatten(0, -2)
        grad_w1 = torch.mul(u, slope, out=hidden).flatten(0, -2).t() @ rows
        into_slope = grad @ w1.t()
        curvature = density.mul_(square.neg_().add_(2))
        grad_z = curvature.mul_(u).mul_(into_slope).addcmul_(grad @ w2, slope)
        return grad_z, into_slope.mul_(slope), grad_w1, grad_w2, rows.sum(dim=0)


class _CausalPull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: torch.Tensor, weight: torch.Tensor, beta: float, shift: int) -> torch.Tensor:
        keys = F.linear(g, weight).unflatten(-1, (-1, g.shape[-1]))
        output = torch.zeros_like(g)
        lse = torch.empty(*keys.shape[:3], dtype=g.dtype, device=g.device)
        for rows, end in _blocks(g.shape[1], shift):
            scores = _scores(g, keys, rows, end, beta)
            top = scores.amax(dim=2, keepdim=True)
            weights = scores.sub_(top).exp_()
            total = weights.sum(dim=2, keepdim=True)
            lse[:, rows] = top.add_(total.log()).squeeze(2)
            weights.div_(total)
            output[:, rows] = weights.flatten(2) @ keys[:, :end].flatten(1, 2)
        # No wider than what the feed-forward keeps, the keys are worth keeping; for many heads they are made again.
        kept = keys if keys.shape[2] <= MOST_HEADS_KEPT else None
        ctx.save_for_backward(g, weight, lse, kept)
        ctx.beta, ctx.shift = beta, shift
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        g, weight, lse, keys = ctx.saved_tensors
        if keys is None:
            keys = F.linear(g, weight).unflatten(-1, (-1, g.shape[-1]))
        grad_keys, grad_g = torch.zeros_like(keys), torch.zeros_like(g)
        for rows, end in _blocks(g.shape[1], ctx.shift):
            weights = _scores(g, keys, rows, end, ctx.beta).sub_(lse[:, rows, None]).exp_()
            side_by_side = keys[:, :end].flatten(1, 2)
            slopes = (grad[:, rows] @ side_by_side.transpose(1, 2)).view_as(weights)
            into_keys = grad_keys[:, :end].flatten(1, 2)
            into_keys.baddbmm_(weights.flatten(2).transpose(1, 2), grad[:, rows])
            slopes = slopes.mul_(weights)
            slopes = slopes.sub_(weights.mul_(slopes.sum(dim=2, keepdim=True))).flatten(2)
            into_keys.baddbmm_(slopes.transpose(1, 2), g[:, rows], alpha=ctx.beta)
            grad_g[:, rows] += (slopes @ side_by_side).mul_(ctx.beta)
        flat = grad_keys.flatten(2)
        grad_g += flat @ weight
        return grad_g, flat.flatten(0, 1).t() @ g.flatten(0, 1), None, None


def _blocks(length: int, shift: int) -> list[tuple[slice, int]]:
    """Return (queries, number of tokens that the last of them sees) for each block of queries that see any."""
    count = -(-(length - shift) // BLOCK)  # a compiled program then serves all lengths of as many blocks
    starts = [shift + index * BLOCK for index in range(count)]
    ends = [*starts[1:], length]
    return [(slice(start, end), end - shift) for start, end in zip(starts, ends, strict=False)]


def _scores(g: torch.Tensor, keys: torch.Tensor, rows: slice, end: int, beta: float) -> torch.Tensor:
    """Return the scores (B, rows, end, H) of a block of queries, -inf where causality forbids."""
    scores = g[:, rows] @ keys[:, :end].flatten(1, 2).transpose(1, 2)
    scores = (scores if beta == 1 else scores.mul_(beta)).unflatten(2, (end, -1))
    count = rows.stop - rows.start
    future = torch.full((count, count), -math.inf, dtype=g.dtype, device=g.device).triu_(1)
    scores[:, :, end - count :].add_(future[..., None])
    return scores
