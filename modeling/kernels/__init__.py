# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold the recurrences that mixers call. Folder `modeling/kernels/`, imported as `loopergy.modeling.kernels`."""

from loopergy.modeling.kernels.gated_delta_rule_torch import chunk_gated_delta_rule, recurrent_gated_delta_rule
from loopergy.modeling.kernels.kernel_backends import KernelBackend, gated_delta_rule, kernel_backend
from loopergy.modeling.kernels.short_convolution import short_convolution

__all__ = [
    "KernelBackend",
    "chunk_gated_delta_rule",
    "gated_delta_rule",
    "kernel_backend",
    "recurrent_gated_delta_rule",
    "short_convolution",
]
