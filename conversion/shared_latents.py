# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Rewrite attention with keys and values per head as the attention of a `dsa` mixer to one latent per token.

The mixer reads one latent \(c\) per token: its first r numbers without positions, which are also the value, and a tail
as wide as a head, turned by its position. Three steps lead there:

1. All key heads turn alike: mixing the heads of one frequency by an orthogonal matrix commutes with the rotation. The
   eigenvectors of their Gram matrix move as much of the keys as possible into one head, which becomes the tail.
2. What remains of the keys loses its rotation, and shares the r numbers with the values: those span the best subspace
   of rank r for both, each weighed by its norm.
3. Queries and the output projection absorb the matrices, and queries the other width in the softmax's scale.

With one key-value head (multi-query attention) nothing remains in step 2, and r = the head's width loses nothing: the
result computes what the teacher does. Otherwise positions in the remaining keys are lost, and ranks beyond r.

Letters: d hidden size, H heads, G key-value heads, D head width, r latent width.
Source: own derivation; the rotation of heads is also used by TransMLA (arXiv 2502.07864).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SharedLatents:
    """The latent of one layer, in float64.

    Args:
        mixing (`torch.Tensor` of shape (D / 2, G, G)): per frequency, from key heads to mixed heads.
        tail (`torch.Tensor` of shape (D, d)): the mixed head that keeps its rotation.
        basis (`torch.Tensor` of shape (d, r)): orthonormal columns: the latent is basis^T x.
        keys (`torch.Tensor` of shape (G - 1, D, r)): from the latent to the remaining mixed heads.
        values (`torch.Tensor` of shape (G, D, r)): from the latent to the values of each head.
    """

    mixing: torch.Tensor
    tail: torch.Tensor
    basis: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def find_latents(k: torch.Tensor, v: torch.Tensor, head_dim: int, latent_dim: int) -> SharedLatents:
    """Find the latent of keys and values, which the three projections of a layer are made from.

    Args:
        k, v (`torch.Tensor` of shape (G * D, d)): weights of the projections.
        head_dim (`int`): D.
        latent_dim (`int`): r, at most d.

    Returns:
        [`SharedLatents`].
    """
    keys, values = _exact(k).unflatten(0, (-1, 2, head_dim // 2)), _exact(v).unflatten(0, (-1, head_dim))
    grams = torch.einsum("gcjd,hcjd->jgh", keys, keys)
    mixing = torch.linalg.eigh(grams).eigenvectors.flip(-1).transpose(1, 2)
    mixed = torch.einsum("jmg,gcjd->mcjd", mixing, keys).flatten(1, 2)
    tail, rest = mixed[0], mixed[1:]
    gram = torch.zeros(k.shape[1], k.shape[1], dtype=torch.float64, device=keys.device)
    for part in (rest, values):
        rows = part.flatten(0, 1)
        gram = gram + rows.T @ rows / rows.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    basis = torch.linalg.eigh(gram).eigenvectors.flip(-1)[:, :latent_dim]
    return SharedLatents(mixing, tail, basis, rest @ basis, values @ basis)


def latent_projection(latents: SharedLatents) -> torch.Tensor:
    """Return the weight (r + D, d) that makes latent and tail."""
    return torch.cat((latents.basis.T, latents.tail))


def query_projection(q: torch.Tensor, latents: SharedLatents) -> torch.Tensor:
    """Return the weight (H * (r + D), d) of the queries; q is (H * D, d)."""
    head_dim, latent_dim = latents.tail.shape[0], latents.basis.shape[1]
    queries, key_heads = _exact(q).unflatten(0, (-1, 2, head_dim // 2)), latents.mixing.shape[-1]
    group = queries.shape[0] // key_heads
    out = []
    for head, query in enumerate(queries):
        mixed = torch.einsum("jm,cjd->mcjd", latents.mixing[:, :, head // group], query).flatten(1, 2)
        out += [torch.einsum("mir,mid->rd", latents.keys, mixed[1:]), mixed[0]]
    return torch.cat(out) * ((latent_dim + head_dim) / head_dim) ** 0.5


def output_projection(o: torch.Tensor, latents: SharedLatents) -> torch.Tensor:
    """Return the weight (d, H * r) of the output; o is (d, H * D)."""
    outputs = _exact(o).unflatten(1, (-1, latents.tail.shape[0]))
    values = latents.values.repeat_interleave(outputs.shape[1] // latents.values.shape[0], dim=0)
    return torch.einsum("dhi,hir->dhr", outputs, values).flatten(1)


def _exact(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in float64, on the CPU since not all devices have it."""
    return (weight if weight.is_meta else weight.detach().cpu()).to(torch.float64)
