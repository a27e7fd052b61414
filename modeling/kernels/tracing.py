# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Who else reads the operations that run: compilers, exporters and function transforms."""

import torch


def in_functorch() -> bool:
    """Tell whether a transform of torch.func is active.

    Under one there are no saved tensor hooks, and a custom autograd function needs a `setup_context` of its own.
    """
    return torch._C._are_functorch_transforms_active()


def is_traced() -> bool:
    """Tell whether torch.compile, torch.export or torch.func need operations they can look into."""
    return torch.compiler.is_compiling() or in_functorch()
