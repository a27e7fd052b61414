# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What the mixers of linear attention without a short convolution share."""

from typing import Any, ClassVar

import torch
from torch import nn

from loopergy.modeling.kernels.linear_attention_step import linear_attention_step
from loopergy.modeling.mixers.linear_mixer import LinearMixer


class UnconvolvedMixer(LinearMixer):
    """Mix tokens by linear attention, with queries, keys and values that are projections of the input alone."""

    convolutions: ClassVar[tuple[str, ...]] = ()
    silu_streams: ClassVar[bool] = False
    v_proj: nn.Linear

    def streams(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the values; there is no convolution."""
        return self.v_proj(x), None

    def step(self, state: torch.Tensor, streams: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Apply the recurrence to one token."""
        return linear_attention_step(**arguments, state=state)
