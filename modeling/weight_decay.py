# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Which parameters get weight decay: one rule for all models."""

import torch
from torch import nn


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Say whether a parameter gets weight decay: the matrices of linear maps, convolutions and embeddings do.

    Those are the `weight` of their module and have two dimensions or more. Norms, biases and step sizes have fewer;
    diagonals, preconditioners and residual scales are named otherwise. Decay would pull softplus(d) of a
    preconditioner to ln 2, and the decay rates of a recurrent mixer to 1.

    Args:
        name (`str`): full name of the parameter.
        parameter (`torch.Tensor`): the parameter; only its number of dimensions matters.
    """
    return parameter.ndim > 1 and name.rpartition(".")[2] == "weight"


def no_weight_decay(model: nn.Module) -> set[str]:
    """Return the names of the parameters that get no weight decay, for an optimizer's groups; see [`decays`]."""
    return {name for name, parameter in model.named_parameters() if not decays(name, parameter)}
