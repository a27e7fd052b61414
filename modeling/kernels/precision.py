# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The types that arithmetic is done in, whatever those of the tensors and whatever autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def own_precision(like: Tensor) -> AbstractContextManager:
    """Return a context in which autocast, where the device of `like` has it, changes no type."""
    kind = like.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()  # entering autocast takes as long as a small operation
    return torch.autocast(kind, enabled=False)
