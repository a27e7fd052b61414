# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What energy-based models return beside the usual: the energy of every token, layer and step."""

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
