# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""The energies of a token in NRGPT and their gradients in closed form.

With g the normed state of token A and \(M(A)\) the tokens that it attends to:

    attention     E_AT = -sum_h (alpha_h / beta) log sum_{B in M(A)} exp(beta g_A^T W_h g_B)
    its gradient       -sum_h alpha_h sum_B p_hAB W_h g_B, p the softmax; through the query role of A alone
    feed-forward  E_FF, three forms, of the token alone
    total         E_AT + s E_FF

The attention gradient is \(\partial E_A / \partial g_A\) only if A is not in M(A) (`exclude_self`). With the token
itself in M(A) the part through its own key, \(-\sum_h \alpha_h p_{hAA} W_h^T g_A\), is left out.

Shapes: B batch, S new tokens, L cached + new tokens, H heads, D hidden size, F feed-forward width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from loopergy.modeling.building_blocks import at_least_float32
from loopergy.modeling.kernels.energy_gradients import causal_pull, gelu_and_slope, slope_product
from loopergy.modeling.kernels.tracing import in_functorch
from loopergy.modeling.tied_projection import plain_weight, read_out


@dataclass(frozen=True)
class Neighbours:
    """Say which tokens each new token attends to.

    Attributes:
        visible (`torch.BoolTensor` of shape (B or 1, 1, S, L), *optional*): True where a token attends. `None` is the
            plain causal case: no padding, and either no past or a single new token.
        lonely (`torch.BoolTensor` of shape (B or 1, 1, S, 1), *optional*): tokens that attend to none. Their rows of
            `visible` are all True, so that no softmax is empty, and their result is set to zero.
        exclude_self (`bool`): the plain causal case leaves out the token itself.
    """

    visible: torch.Tensor | None = None
    lonely: torch.Tensor | None = None
    exclude_self: bool = False

    @classmethod
    def of(cls, visible: torch.Tensor, exclude_self: bool) -> "Neighbours":
        """Find the tokens that attend to none in a mask (B or 1, 1, S, L)."""
        lonely = ~visible.any(dim=-1, keepdim=True)
        return cls(visible | lonely, lonely, exclude_self)


class FeedForwardEnergy(nn.Module):
    r"""Energy of a token alone, in one of three forms, with \(\sigma\) the exact GELU.

    - `ff1`: \(E = -|\sigma(z)|^2\), \(z = W_1 g + b_1\);
    - `ff2`: \(E = -|\sigma(z_2)|^2\), \(z_2 = W_2 \sigma(z) + b_2\), with a D wide z;
    - `ff2w`: \(E = -g^T (W_2 \sigma(z) + b_2)\).

    Parameters: `fc1` and, but for `ff1`, `fc2`, with biases.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.form = config.ff_energy
        size, wide = config.hidden_size, config.intermediate_size
        self.fc1 = nn.Linear(size, size if self.form == "ff2" else wide)
        if self.form != "ff1":
            self.fc2 = nn.Linear(size, wide) if self.form == "ff2" else nn.Linear(wide, size)

    def energy(self, g: torch.Tensor) -> torch.Tensor:
        """Return the energy (B, S), in float32 at least, of normed states (B, S, D)."""
        hidden = F.gelu(self.fc1(g))
        if self.form == "ff2":
            hidden = F.gelu(self.fc2(hidden))
        if self.form == "ff2w":
            return -(at_least_float32(g) * at_least_float32(self.fc2(hidden))).sum(dim=-1)
        return -at_least_float32(hidden).pow(2).sum(dim=-1)

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        r"""Return the gradient of the energy (B, S, D).

        `ff1`: \(-2 W_1^T[\sigma(z) \odot \sigma'(z)]\);
        `ff2`: \(-2 W_1^T[\sigma'(z) \odot W_2^T(\sigma(z_2) \odot \sigma'(z_2))]\);
        `ff2w`: \(-(W_2\sigma(z) + b_2) - W_1^T[\sigma'(z) \odot W_2^T g]\).
        """
        z = self.fc1(g)
        if self.form == "ff1":
            return -2 * read_out(self.fc1, slope_product(F.gelu(z), z))
        if self.form == "ff2":
            z2 = self.fc2(F.gelu(z))
            inner = read_out(self.fc2, slope_product(F.gelu(z2), z2))
            return -2 * read_out(self.fc1, slope_product(inner, z))
        inner = read_out(self.fc2, g)
        if _trains_plainly(g, self.fc1, self.fc2):
            return -gelu_and_slope(z, inner, self.fc1.weight, self.fc2.weight, self.fc2.bias)
        return -self.fc2(F.gelu(z)) - read_out(self.fc1, slope_product(inner, z))

    def folded(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return matrix and bias before [`hidden`], and matrix and constant after it: together, the gradient.

        The matrices are (width, D) both; g is multiplied by the first, and what `hidden` gives by the second from the
        right.
        """
        first, bias = self.fc1.weight, self.fc1.bias
        if self.form != "ff2w":
            return first, bias, -2 * first, torch.zeros_like(first[0])
        second = self.fc2.weight.t()
        into, bias = torch.cat((first, second)), torch.cat((bias, torch.zeros_like(bias)))
        return into, bias, -torch.cat((second, first)), -self.fc2.bias

    def hidden(self, mapped: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what lies between the two matrices of [`folded`], side by side."""
        if self.form == "ff2w":
            z, u = mapped.chunk(2, dim=-1)
            return F.gelu(z), slope_product(u, z)
        if self.form == "ff1":
            return (slope_product(F.gelu(mapped), mapped),)
        z2 = self.fc2(F.gelu(mapped))
        return (slope_product(read_out(self.fc2, slope_product(F.gelu(z2), z2)), mapped),)


class EnergyAttention(nn.Module):
    r"""Energy of a token's interaction with the tokens that it attends to.

    Key and value of a token are one vector per head, \(W_h g\); the query is g itself; the heads are summed.

    Parameters: `k_proj`, the H matrices \(W_h\) stacked, and `alpha` (H) with `learn_alpha`. Keeps g alone, D numbers
    per token and step, whatever H.

    Args:
        config: reads `hidden_size`, `num_attention_heads`, `attention_beta`, `learn_alpha`, `dropout`.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.beta = float(config.attention_beta)
        self.dropout = config.dropout
        self.k_proj = nn.Linear(config.hidden_size, self.num_heads * config.hidden_size, bias=False)
        self.alpha = nn.Parameter(torch.ones(self.num_heads)) if config.learn_alpha else None

    def forward(
        self, g: torch.Tensor, memory: torch.Tensor, neighbours: Neighbours
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        r"""Return the gradient of the energy with respect to g in its query role, and the weights in eager mode.

        The heads' keys \(W_h g_B\) are formed for all L tokens, 2HD² operations each, or else the H queries
        \(W_h^T g_A\) and outputs of the S new tokens are mapped, 4HD² each: the cheaper is taken, which is the
        latter once more than half of the tokens come from the cache. The numbers are the same.

        Args:
            g (`torch.Tensor` of shape (B, S, D)): normed states of the new tokens.
            memory (`torch.Tensor` of shape (B, L, D)): normed states of all tokens at this step, the new ones last.
            neighbours ([`Neighbours`]): who attends to whom.

        Returns:
            gradient of shape (B, S, D), and with `attn_implementation="eager"` the weights (B, H, S, L).
        """
        if self.config._attn_implementation == "eager":
            pulled, weights = self._attend_eagerly(g, memory, neighbours)
        elif 2 * g.shape[1] < memory.shape[1] and is_plain(self.k_proj):
            pulled, weights = self._attend_absorbed(g, memory, neighbours), None
        else:
            pulled, weights = self._attend(g, memory, neighbours), None
        return F.dropout(-pulled, p=self.dropout, training=self.training), weights

    def energy(self, g: torch.Tensor, memory: torch.Tensor, neighbours: Neighbours) -> torch.Tensor:
        """Return the energy (B, S), in float32 at least; 0 for a token that attends to none."""
        visible, lonely = _materialised(neighbours, g.shape[1], memory.shape[1], g.device)
        visible = visible[..., : memory.shape[1]]  # a static cache is longer than its content
        scores = at_least_float32(g[:, None] @ self.keys(memory).transpose(2, 3)) * self.beta
        free_energy = scores.masked_fill(~visible, -torch.inf).logsumexp(dim=-1).masked_fill(lonely.squeeze(-1), 0)
        if self.alpha is not None:
            free_energy = free_energy * self.alpha[:, None]
        return -free_energy.sum(dim=1) / self.beta

    def keys(self, memory: torch.Tensor) -> torch.Tensor:
        r"""Return \(W_h g_B\) of every head, (B, H, L, D)."""
        return self.k_proj(memory).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _sum_heads(self, outputs: torch.Tensor, neighbours: Neighbours) -> torch.Tensor:
        """Sum (B, H, S, D) over heads with their weights; zero where there are no neighbours."""
        if self.alpha is not None:
            outputs = outputs * self.alpha[:, None, None].to(outputs.dtype)
        outputs = outputs.sum(dim=1)
        return outputs if neighbours.lonely is None else outputs.masked_fill(neighbours.lonely[:, 0], 0)

    def _attend(self, g: torch.Tensor, memory: torch.Tensor, neighbours: Neighbours) -> torch.Tensor:
        """Attend with the keys of all tokens; see `forward`."""
        plain_case = neighbours.visible is None and g.shape == memory.shape and self.alpha is None
        if plain_case and self._pays_to_recompute(g):
            return causal_pull(g, self.k_proj.weight, self.beta, neighbours.exclude_self)
        shift = 0
        if neighbours.visible is None and neighbours.exclude_self:
            # Token A without itself sees the same as token A - 1 with itself.
            if memory.shape[1] == 1:
                return torch.zeros_like(g)
            shift = int(g.shape[1] > 1)
            g, memory = g[:, shift:], memory[:, :-1]
        keys = self.keys(memory)
        queries = g[:, None].expand(-1, self.num_heads, -1, -1)
        causal = False
        if neighbours.visible is None and g.shape[1] > 1:  # a branch: a symbolic length would not give a bool
            causal = True
        outputs = F.scaled_dot_product_attention(
            queries,
            keys,
            keys,
            attn_mask=neighbours.visible,
            is_causal=causal,
            scale=self.beta,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return F.pad(self._sum_heads(outputs, neighbours), (0, 0, shift, 0))

    def _pays_to_recompute(self, g: torch.Tensor) -> bool:
        """Whether to train with [`causal_pull`]: on a CPU, with several heads, it keeps less at equal speed."""
        if self.num_heads == 1 or g.device.type != "cpu" or (self.training and self.dropout > 0):
            return False
        return _trains_plainly(g, self.k_proj)

    def _attend_absorbed(self, g: torch.Tensor, memory: torch.Tensor, neighbours: Neighbours) -> torch.Tensor:
        """Attend with one shared key and value, the memory itself; the rows are the heads' queries."""
        (batch, length, size), heads = g.shape, self.num_heads
        if neighbours.visible is None and neighbours.exclude_self:
            memory = memory[:, :-1]
        matrices = self.k_proj.weight.unflatten(0, (heads, size))
        queries = (g[:, None] @ matrices).flatten(1, 2)
        visible = neighbours.visible
        if visible is not None:
            visible = visible.expand(-1, heads, -1, -1).flatten(1, 2)[:, None]
        pulled = F.scaled_dot_product_attention(
            queries[:, None],
            memory[:, None],
            memory[:, None],
            attn_mask=visible,
            scale=self.beta,
            dropout_p=self.dropout if self.training else 0.0,
        )
        outputs = pulled.view(batch, heads, length, size) @ matrices.transpose(1, 2)
        return self._sum_heads(outputs, neighbours)

    def _attend_eagerly(
        self, g: torch.Tensor, memory: torch.Tensor, neighbours: Neighbours
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with plain matrix products, softmax in float32 at least; return the weights (B, H, S, L) too."""
        visible, lonely = _materialised(neighbours, g.shape[1], memory.shape[1], g.device)
        keys = self.keys(memory)
        scores = (at_least_float32(g[:, None] @ keys.transpose(2, 3)) * self.beta).masked_fill(~visible, -torch.inf)
        weights = scores.softmax(dim=-1).masked_fill(lonely, 0).to(keys.dtype)
        dropped = F.dropout(weights, p=self.dropout, training=self.training)
        return self._sum_heads(dropped @ keys, neighbours), weights


def is_plain(linear: nn.Module) -> bool:
    """Whether a layer is no more than its weight: no adapter, no packed or offloaded weight, and no hook."""
    hooked = hasattr(linear, "_hf_hook") or linear._forward_hooks or linear._forward_pre_hooks
    return type(linear) is nn.Linear and plain_weight(linear) is not None and not hooked


def _trains_plainly(g: torch.Tensor, *linears: nn.Module) -> bool:
    """Whether gradients are needed, the weights are plain, and the dtype is float32 or float64."""
    wide = g.dtype in (torch.float32, torch.float64) and g.device.type != "meta"
    wide = wide and not torch.is_autocast_enabled(g.device.type)
    wide = wide and not in_functorch()
    return wide and torch.is_grad_enabled() and all(is_plain(linear) for linear in linears)


def _materialised(
    neighbours: Neighbours, length: int, total: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the masks `visible` and `lonely`, made where the plain causal case left them out."""
    if neighbours.visible is None or neighbours.lonely is None:
        everything = torch.ones(1, 1, length, total, dtype=torch.bool, device=device)
        diagonal = total - length - int(neighbours.exclude_self)
        neighbours = Neighbours.of(everything.tril(diagonal), neighbours.exclude_self)
    assert neighbours.visible is not None
    assert neighbours.lonely is not None
    return neighbours.visible, neighbours.lonely
