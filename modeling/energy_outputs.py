# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Outputs of energy-based models, which add the energy of every token, layer and step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils.generic import ModelOutput


@dataclass
class TokenEnergies(ModelOutput):
    """Energies of each token before every step and after the last, in float32 at least.

    Each tensor is of shape (layers, steps + 1, batch, length) for the new tokens of the call. Only the sub-layers that
    descend an energy are there.

    Args:
        attention (`torch.Tensor`, *optional*): energy of the interaction with earlier tokens, 0 for a token that sees
            none.
        feed_forward (`torch.Tensor`, *optional*): energy of the token alone.
        total (`torch.Tensor`, *optional*): the sum that is descended, where one step descends both at once.
    """

    attention: torch.Tensor | None = None
    feed_forward: torch.Tensor | None = None
    total: torch.Tensor | None = None


def stack_layers(energies: Sequence[Sequence[torch.Tensor | None]]) -> TokenEnergies:
    """Stack the energies of all layers, for each kind of sub-layer that has them in every layer.

    Args:
        energies: energies of attention and feed-forward of each layer, (steps + 1, batch, length) or `None`.
    """
    attention, feed_forward = (
        None if any(layer is None for layer in part) else torch.stack(part)  # pyright: ignore[reportArgumentType]
        for part in zip(*energies, strict=True)
    )
    return TokenEnergies(attention=attention, feed_forward=feed_forward)


@dataclass
class EnergyModelOutputWithPast(BaseModelOutputWithPast):
    """Outputs of an energy-based base model.

    Args:
        energies ([`TokenEnergies`], with `output_energies=True`): energy per layer, step and token.
    """

    energies: TokenEnergies | None = None


@dataclass
class EnergyCausalLMOutputWithPast(CausalLMOutputWithPast):
    """Outputs of an energy-based language model.

    Args:
        energies ([`TokenEnergies`], with `output_energies=True`): energy per layer, step and token.
    """

    energies: TokenEnergies | None = None


@dataclass
class EnergyClassifierOutputWithPast(SequenceClassifierOutputWithPast):
    """Outputs of an energy-based classifier.

    Args:
        energies ([`TokenEnergies`], with `output_energies=True`): energy per layer, step and token.
    """

    energies: TokenEnergies | None = None
