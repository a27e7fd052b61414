# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Energies of a token given those before it, their gradients in closed form, and the descent that follows them.

Paper: Revisiting Transformer Layer Parameterization Through Causal Energy Minimization, arXiv 2605.07588.

Shapes: B batch, S new tokens, L cached + new tokens, D hidden size, H query heads, G key heads, d head size, F width
of the MLP, K = 1 or H diagonals.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import SiLUActivation

from loopergy.modeling.building_blocks import RMSNorm, at_least_float32
from loopergy.modeling.kernels.interaction_attention import Chunk, attend_head_by_head, fits
from loopergy.modeling.kernels.tracing import is_traced
from loopergy.modeling.tied_projection import at_hand

# Queries per chunk where attention weights are formed: later keys are skipped, and the weights fit the CPU cache.
QUERY_CHUNK = 128


class Preconditioner(nn.Module):
    r"""Rescale a gradient by \(P = \mathrm{diag}(\mathrm{softplus}(d)) + U V^T + V U^T\), the identity at the start.

    P is symmetric. It is positive definite if min softplus(d) > 2 |U| |V| (spectral norms), which is not enforced.

    Args:
        size (`int`): width D.
        rank (`int`): columns r of U and V; 0 leaves them out.

    Source: arXiv 2605.07588.
    """

    def __init__(self, size: int, rank: int):
        super().__init__()
        self.d = nn.Parameter(torch.empty(size))
        self.U = nn.Parameter(torch.empty(size, rank)) if rank else None
        self.V = nn.Parameter(torch.empty(size, rank)) if rank else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the identity: softplus(d) = 1 and V = 0; U is drawn with variance 1 / D, so that V can learn."""
        init.constant_(self.d, math.log(math.e - 1))
        if self.U is not None and self.V is not None:
            init.normal_(self.U, std=len(self.d) ** -0.5)
            init.zeros_(self.V)

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return P g for g of shape (..., D)."""
        output = nn.functional.softplus(at_least_float32(self.d)).to(gradient.dtype) * gradient
        if self.U is not None and self.V is not None:
            output = output + (gradient @ self.V) @ self.U.T + (gradient @ self.U) @ self.V.T
        return output

    def dense(self) -> torch.Tensor:
        """Return P as a matrix (D, D)."""
        return self(torch.eye(len(self.d), dtype=self.d.dtype, device=self.d.device))


@dataclass(frozen=True)
class NormedStream:
    """Hold the stream that features come from, and the norm between the two.

    One object instead of two arguments, since accelerate moves each module that it finds among a call's arguments.

    Attributes:
        stream (`torch.Tensor` of shape (B, S, D)): h.
        norm ([`RMSNorm`]): N.
    """

    stream: torch.Tensor
    norm: RMSNorm


class EnergyDescent(nn.Module):
    r"""Take T steps \(x \leftarrow x - \eta P \nabla\varepsilon(x)\) from a norm's output.

    Parameters: step_size (a number, where it is learned), and those of [`Preconditioner`] as `precond`.

    Args:
        config: reads `hidden_size` and the fields `cem_step_size`, `cem_learn_step_size`, `cem_step_size_div_steps`,
            `cem_norm_mode`, `cem_precond` and `cem_precond_rank`.
        steps_field (`str`): the config's field that says T unless the call does.
    """

    def __init__(self, config: Any, steps_field: str):
        super().__init__()
        self.config, self.steps_field = config, steps_field
        self.initial_step_size = float(config.cem_step_size)
        self.divide_by_steps = config.cem_step_size_div_steps
        self.norm_mode = config.cem_norm_mode
        self.step_size = nn.Parameter(torch.empty(())) if config.cem_learn_step_size else None
        rank = config.cem_precond_rank if config.cem_precond == "dlr" else 0
        self.precond = None if config.cem_precond == "none" else Preconditioner(config.hidden_size, rank)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start a learned step size at `cem_step_size`."""
        if self.step_size is not None:
            init.constant_(self.step_size, self.initial_step_size)

    def forward(
        self,
        force: Callable[[torch.Tensor], torch.Tensor],
        features: torch.Tensor,
        origin: NormedStream,
        num_steps: int | None = None,
        energy: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Descend, and return how far.

        Args:
            force: minus the gradient of the energy at a point (B, S, D), which is a norm's output or near one.
            features (`torch.Tensor` of shape (B, S, D)): u, the norm of the stream.
            origin ([`NormedStream`]): where the features come from.
            num_steps (`int`, *optional*): T.
            energy (*optional*): energy (B, S) at a point, to be recorded.

        Returns:
            the sum of all moves (B, S, D), to be added to the stream; and the energies (T + 1, B, S) before each step
            and after the last, if asked for.
        """
        stream, norm = origin.stream, origin.norm
        steps = getattr(self.config, self.steps_field) if num_steps is None else num_steps
        size = self.initial_step_size if self.step_size is None else self.step_size
        size = size / steps if self.divide_by_steps else size
        # Summed without the starting point, which would cost precision.
        moved: Any = None
        point, energies = features, []
        for step in range(steps):
            if energy is not None:
                energies.append(energy(point))
            move = force(point)
            if self.norm_mode == "exact_jacobian":
                move = pull_back(norm, stream if moved is None else stream + moved, move)
            if self.precond is not None:
                move = self.precond(move)
            if not isinstance(size, float) or size != 1.0:
                move = size * move
            moved = move if moved is None else moved + move
            if step + 1 < steps or energy is not None:
                point = features + moved if self.norm_mode == "once" else norm(stream + moved)
        if energy is not None:
            energies.append(energy(point))
        return moved, torch.stack(energies) if energies else None


def pull_back(norm: RMSNorm, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    r"""Turn a gradient in a norm's output into one in its input: \(J^T g\) with \(J = \partial N / \partial x\).

    \(J^T g = (\gamma g - \hat x\, \mathrm{mean}(\hat x\,\gamma g)) / \mathrm{rms}(x)\) with \(\hat x = x /
    \mathrm{rms}(x)\).

    Args:
        norm ([`RMSNorm`]): gives gamma and epsilon.
        x, gradient (`torch.Tensor` of shape (..., D)).
    """
    with at_hand(norm):
        wide, scaled = at_least_float32(x), at_least_float32(gradient * norm.weight)
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    hat = wide * inverse
    return (inverse * (scaled - hat * (hat * scaled).mean(-1, keepdim=True))).to(x.dtype)


@dataclass(frozen=True)
class DiagonalPart:
    r"""Hold what the diagonal part \((d_k \odot x_i) \cdot c_j\) of a score is made of.

    Attributes:
        diagonal (`torch.Tensor` of shape (K, D)): d_k, one for all heads (K = 1) or each its own (K = H).
        point (`torch.Tensor` of shape (B, S, D)): x.
        context (`torch.Tensor` of shape (B, N, L, D / N)): c, split into N pieces where it comes from a cache.
    """

    diagonal: torch.Tensor
    point: torch.Tensor
    context: torch.Tensor

    def scores(self, rows: slice, reach: int, temperature: float) -> torch.Tensor:
        """Return the scores / tau, (B, K, rows, reach), of some queries with the first keys."""
        context = self.context[:, :, :reach]
        batch, pieces, _, width = context.shape
        query = self.point[:, None, rows] * (self.diagonal / temperature)[:, None]
        size, length = query.shape[1:3]
        query = query.reshape(batch, size * length, pieces, width).transpose(1, 2)
        products = query @ context.transpose(2, 3)
        products = products[:, 0] if pieces == 1 else products.sum(dim=1)
        return products.view(batch, size, length, reach)

    def gather(self, weights: torch.Tensor) -> torch.Tensor:
        r"""Return \(\sum_k d_k \odot \sum_j \alpha_{ij}^k c_j\), (B, rows, D), for weights (B, H, rows, reach)."""
        batch, _, length, reach = weights.shape
        size, width = self.diagonal.shape
        weights = weights.sum(dim=1) if size == 1 else weights
        gathered = weights.reshape(batch, 1, size * length, reach) @ self.context[:, :, :reach]
        gathered = gathered.transpose(1, 2).reshape(batch, size, length, width)
        return (self.diagonal[:, None] * gathered).sum(dim=1)


def interaction_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    diagonal: DiagonalPart | None,
    temperature: float,
    rows: slice,
    reach: int,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    r"""Return the scores \((q_i \cdot k_j + (d_k \odot x_i) \cdot c_j) / \tau\) of some queries with the first keys.

    Args:
        query (`torch.Tensor` of shape (B, H, S, d)), keys (`torch.Tensor` of shape (B, G, L, d)): rotated.
        diagonal ([`DiagonalPart`], *optional*).
        temperature (`float`): tau.
        rows (`slice`), reach (`int`): which queries, and how many keys.
        mask (*optional*): see [`visible_scores`].

    Returns:
        `torch.Tensor` of shape (B, H, rows, reach), which nothing else refers to.
    """
    query, keys = query[:, :, rows] / temperature, keys[:, :, :reach]
    (batch, heads, length, width), groups = query.shape, keys.shape[1]
    rows_of_group = query.reshape(batch, groups, heads // groups * length, width)
    scores = (rows_of_group @ keys.transpose(2, 3)).view(batch, heads, length, reach)
    if diagonal is None:
        return visible_scores(scores, mask)
    shared = diagonal.scores(rows, reach, temperature)
    if mask is None:
        # Masked before it is added to every head; each query sees itself, so no row is masked entirely.
        return scores.add_(visible_scores(shared, None))
    return visible_scores(scores.add_(shared), mask)


def visible_scores(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mask scores with the lowest finite number, so that a row that sees nothing stays finite.

    Args:
        scores (`torch.Tensor` of shape (B, H, S, L)), overwritten where nothing needs it.
        mask (`torch.Tensor`, broadcastable to it, *optional*): True where visible, or a number to be added. `None`
            hides the later keys of each query; the last key is that of the last query.
    """
    if mask is not None and mask.dtype != torch.bool:
        return at_least_float32(scores) + mask
    lowest = torch.finfo(scores.dtype).min
    if mask is not None:
        return scores.masked_fill(~mask, lowest)
    length = scores.shape[-2]
    if length > 1:
        later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores[..., -length:].masked_fill_(later, lowest)
    return scores


def query_chunks(
    length: int, total: int, mask: torch.Tensor | None, causal: bool, chunk: int = QUERY_CHUNK
) -> Iterator[Chunk]:
    """Cut the queries of a causal sum into chunks; yield each, how many keys it reaches, and its mask.

    Args:
        length (`int`): queries S.
        total (`int`): keys L.
        mask (`torch.Tensor` of shape (B, 1 or H, S, L), *optional*): see [`visible_scores`]. Without one query i sees
            keys 0 to i, the rest of L being room in a static cache, and a lone query sees all.
        causal (`bool`): the mask hides all later keys from each query. The last key is then taken to be that of the
            last query; in a static cache, whose end is empty, this keeps too many keys, and the mask hides these.
        chunk (`int`): queries in a chunk.
    """
    # A compiled program then serves all lengths with this many chunks, and an exported one all lengths.
    count = 1 if torch.compiler.is_exporting() else -(-length // chunk)
    for index in range(count):
        start, end = index * chunk, length if index + 1 == count else (index + 1) * chunk
        reach = total
        if length > 1 and (mask is None or causal):
            reach = end if mask is None else total - length + end
        yield slice(start, end), reach, None if mask is None else mask[..., start:end, :reach]


def interaction_force(
    query: torch.Tensor,
    keys: torch.Tensor,
    diagonal: DiagonalPart,
    mask: torch.Tensor | None,
    temperature: float,
    causal: bool = False,
    dropout: float = 0.0,
    keep_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    r"""Average rotated keys, and context features, by the attention weights of scores that have a diagonal part.

    Weights are formed, a chunk of queries at a time, and a head at a time on a CPU with a shared diagonal: a fused
    attention call on concatenated features needs the D-wide context once per head (on a CPU, 8 times slower at 512
    tokens and 12 heads).

    Args:
        query, keys, diagonal, temperature: see [`interaction_scores`].
        mask, causal: see [`query_chunks`].
        dropout (`float`): probability of dropping a weight.
        keep_weights (`bool`): return the weights.

    Returns:
        \(\sum_j \alpha_{ij}^k \tilde k_j\) of shape (B, S, H, d), \(\sum_k d_k \odot \sum_j \alpha_{ij}^k c_j\) of
        shape (B, S, D), and the weights (B, H, S, L) if kept.
    """
    length = query.shape[2]
    size = length if keep_weights else QUERY_CHUNK
    chunks = list(query_chunks(length, keys.shape[2], mask, causal, size))
    if keep_weights or dropout or not fits(query, diagonal.context, diagonal.diagonal, mask):
        averages, moves, weights = _heads_together(query, keys, diagonal, temperature, chunks, dropout)
        return averages, moves, weights if keep_weights else None

    def expression(query: Any, keys: Any, point: Any, context: Any, d: Any) -> tuple[torch.Tensor, torch.Tensor]:
        part = DiagonalPart(d[None], point, context[:, None])
        return _heads_together(query, keys, part, temperature, chunks)[:2]

    tensors = query, keys, diagonal.point, diagonal.context[:, 0], diagonal.diagonal[0]
    return *attend_head_by_head(tensors, temperature, chunks, expression), None


def _heads_together(
    query: torch.Tensor,
    keys: torch.Tensor,
    diagonal: DiagonalPart,
    temperature: float,
    chunks: list[Chunk],
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return what [`interaction_force`] does, with the weights of the last chunk."""
    (batch, heads, _, width), groups = query.shape, keys.shape[1]
    averages, moves, weights = [], [], None
    for rows, reach, mask in chunks:
        scores = interaction_scores(query, keys, diagonal, temperature, rows, reach, mask)
        weights = _weights(scores).to(query.dtype)
        weights = nn.functional.dropout(weights, p=dropout, training=dropout > 0)
        length = weights.shape[2]
        average = weights.view(batch, groups, heads // groups * length, reach) @ keys[:, :, :reach]
        averages.append(average.view(batch, heads, length, width).transpose(1, 2))
        moves.append(diagonal.gather(weights))
    return torch.cat(averages, dim=1), torch.cat(moves, dim=1), weights


def _weights(scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dimension, in float32 at least; overwrites the scores where possible."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if scores.dtype == dtype and scores.device.type == "cpu" and not scores.requires_grad and not is_traced():
        return torch.softmax(scores, dim=-1, out=scores)
    return scores.softmax(dim=-1, dtype=dtype)


def interaction_energy(
    query: torch.Tensor,
    keys: torch.Tensor,
    diagonal: DiagonalPart | None,
    mask: torch.Tensor | None,
    temperature: float,
    causal: bool = False,
) -> torch.Tensor:
    r"""Return \(-\tau \sum_k \log \sum_{j \le i} \exp s_{ij}^k\) for each query, of shape (B, S).

    It is 0 for a query that sees nothing, as padding at the left does.

    Args:
        query, keys, diagonal, temperature: see [`interaction_scores`], which gives the scores s.
        mask, causal: see [`query_chunks`].
    """
    energies = []
    for rows, reach, part in query_chunks(query.shape[2], keys.shape[2], mask, causal):
        scores = interaction_scores(query, keys, diagonal, temperature, rows, reach, part)
        energy = -temperature * at_least_float32(scores).logsumexp(dim=-1)
        if part is not None:
            hiding = scores.dtype if part.dtype == torch.bool else part.dtype
            energy = energy.masked_fill(scores.amax(dim=-1) <= torch.finfo(hiding).min / 2, 0)
        energies.append(energy.sum(dim=1))
    return torch.cat(energies, dim=1)


def elementwise_energy(
    preactivation: torch.Tensor, gate: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor] | None
) -> torch.Tensor:
    r"""Return \(-\sum_m g_m \Phi(z_m)\) of each token, \(\Phi' = \phi\), of shape (...).

    Args:
        preactivation (`torch.Tensor` of shape (..., F)): z = W x.
        gate (`torch.Tensor` of shape (..., F)): g.
        activation (*optional*): phi; the identity by default.
    """
    z, gate = at_least_float32(preactivation), at_least_float32(gate)
    return -(gate * (z * z / 2 if activation is None else potential(activation, z))).sum(dim=-1)


def potential(activation: Callable[[torch.Tensor], torch.Tensor], z: torch.Tensor) -> torch.Tensor:
    r"""Return \(\Phi(z) = \int_0^z \phi(s)\,ds\) of an activation, elementwise, by Gauss-Legendre quadrature.

    SiLU is split into relu and a remainder that vanishes beyond |z| = 40, so that the result is exact to 1e-9 for all
    z, and to 1e-14 for |z| < 10. For the other activations of transformers it is exact to 1e-9 for |z| < 30, except
    for those with a kink away from 0 (hardswish: 1e-4 at |z| = 5, 1e-3 from 10 on).
    """
    if isinstance(activation, nn.SiLU | SiLUActivation) or activation is nn.functional.silu:
        fading = _integral(lambda s: s * torch.sigmoid(-s), z.abs().clamp(max=40.0))
        return z.relu().square() / 2 - z.sign() * fading
    return _integral(activation, z)


def _integral(function: Callable[[torch.Tensor], torch.Tensor], end: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(end)
    for node, weight in _NODES:
        total = total + weight * function(node * end)
    return total * end


def _gauss_legendre(count: int = 80) -> list[tuple[float, float]]:
    """Return nodes and weights on [0, 1], from the eigenvalues and eigenvectors of the Jacobi matrix."""
    index = torch.arange(1, count, dtype=torch.float64, device="cpu")
    beside = index / (4 * index * index - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return list(zip(((nodes + 1) / 2).tolist(), vectors[0].square().tolist(), strict=True))


_NODES = _gauss_legendre()  # computed at import: torch.compile cannot trace it
