# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Small sub-layers in float64, and the interaction energy as a literal sum over tokens, heads and keys."""

from unittest.mock import patch

import torch

from loopergy import CEMLlamaConfig
from loopergy.modeling.building_blocks import RMSNorm
from loopergy.modeling.causal_energies import EnergyDescent
from loopergy.modeling.modeling_cem_llama import CEMAttention

torch64 = {"dtype": torch.float64}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "head_dim": 4, "vocab_size": 8}
LENGTH = 6


def config(**fields) -> CEMLlamaConfig:
    made = CEMLlamaConfig(**(SIZES | {"cem_diag": "none"} | fields))
    made._attn_implementation = "sdpa"
    return made


def filled(module: torch.nn.Module, seed: int = 3) -> torch.nn.Module:
    """Draw every parameter, in float64; norms stay near one."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, **torch64))
    return module


def norm_of(size: int) -> RMSNorm:
    norm = RMSNorm(size).double()
    with torch.no_grad():
        norm.weight += 0.3 * torch.sin(torch.arange(size, **torch64))
    return norm


def tables(width: int, length: int = LENGTH, scale: float = 1.0, turn: bool = True, first: int = 0):
    """Return cos and sin (1, length, width) of positions first, first + 1, ...; of no rotation if not `turn`."""
    position = torch.arange(first, first + length, **torch64) * turn
    angle = position[:, None] * 10000.0 ** (-torch.arange(0, width, 2, **torch64) / width)
    angle = torch.cat((angle, angle), dim=-1)[None]
    return scale * angle.cos(), scale * angle.sin()


def turned(vector, cos, sin):
    half = len(vector) // 2
    return vector * cos + torch.cat((-vector[half:], vector[:half])) * sin


def energy_by_hand(attention: CEMAttention, point, features, cos, sin):
    """Sum the interaction energy of one row token by token, head by head, key by key; return one number a token."""
    part, c = dict(attention.named_parameters()), attention.config
    width, tau = c.head_dim, attention.temperature
    biases = [part.get(f"{name}_proj.bias", torch.zeros(1, **torch64)) for name in "qk"]
    query = (point @ part["q_proj.weight"].T + biases[0]).unflatten(-1, (-1, width))
    key = (features @ part["k_proj.weight"].T + biases[1]).unflatten(-1, (-1, width))
    energies = []
    for i in range(len(point)):
        total = 0.0
        for head in range(c.num_attention_heads):
            group = head // (c.num_attention_heads // c.num_key_value_heads)
            scores = []
            for j in range(i + 1):
                score = turned(query[i, head], cos[i], sin[i]) @ turned(key[j, group], cos[j], sin[j])
                if attention.diagonal is not None:
                    diagonal = attention.diagonal[head if len(attention.diagonal) > 1 else 0]
                    score = score + (diagonal * point[i]) @ features[j]
                scores.append(score / tau)
            total = total - tau * torch.stack(scores).logsumexp(0)
        energies.append(total)
    return torch.stack(energies)


def closures(module: torch.nn.Module, features: torch.Tensor, *args):
    """Return force and energy of a sub-layer as functions of the point, with the context frozen at `features`."""
    caught = {}

    def catch(self, force, features, origin, num_steps=None, energy=None):
        caught.update(force=force, energy=energy)
        return torch.zeros_like(features), None

    with patch.object(EnergyDescent, "forward", catch):
        module(features, None, *args, output_energies=True)
    return caught["force"], caught["energy"]


def randn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), **torch64)


def close(mine, numbers):
    torch.testing.assert_close(mine, torch.tensor(numbers, **torch64), rtol=0, atol=1e-11)
