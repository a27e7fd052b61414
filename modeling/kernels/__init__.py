# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold the recurrences that mixers call. Folder `modeling/kernels/`, imported as `loopergy.modeling.kernels`."""

from loopergy.modeling.kernels.decayed_linear_attention import (
    chunk_gla,
    chunk_simple_gla,
    recurrent_gla,
    recurrent_simple_gla,
)
from loopergy.modeling.kernels.gated_delta_rule_torch import chunk_gated_delta_rule, recurrent_gated_delta_rule
from loopergy.modeling.kernels.kernel_backends import (
    KernelBackend,
    gated_delta_rule,
    gla,
    kda,
    kernel_backend,
    simple_gla,
)
from loopergy.modeling.kernels.kimi_delta_rule import chunk_kda, recurrent_kda
from loopergy.modeling.kernels.short_convolution import short_convolution

__all__ = [
    "KernelBackend",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "gated_delta_rule",
    "gla",
    "kda",
    "kernel_backend",
    "recurrent_gated_delta_rule",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_simple_gla",
    "short_convolution",
    "simple_gla",
]
