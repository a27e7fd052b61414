# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What flash-linear-attention offers for each family of kernels, and whether what is installed can be trusted with it.

It is imported on first use only. Its functions are used where they name every argument that is passed and, tried once
on a small input, return the state as documented here: several of them take `**kwargs`, which would swallow an argument
that they do not know, and versions differ in the orientation of the state.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import is_flash_linear_attention_available

from loopergy.modeling.kernels.decayed_linear_attention import (
    chunk_gla,
    chunk_simple_gla,
    recurrent_gla,
    recurrent_simple_gla,
)
from loopergy.modeling.kernels.gated_delta_rule_torch import chunk_gated_delta_rule, recurrent_gated_delta_rule
from loopergy.modeling.kernels.kimi_delta_rule import chunk_kda, recurrent_kda

INSTALL = 'pip install "flash-linear-attention[cuda]>=0.6"'
_OPTIONS = ("scale", "initial_state", "output_final_state", "cu_seqlens")
# The argument with which versions since 0.5 choose between [K, V] and [V, K] states.
_LAYOUT_ARGUMENTS = ("state_v_first", "transpose_state_layout")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


class Family(NamedTuple):
    """Name the kernels of one recurrence.

    Args:
        title: what messages call it.
        chunk, recurrent: our sequence form and step form.
        module, fla_chunk, fla_recurrent: flash-linear-attention's module and functions.
        arguments: what both take besides q, k, v and the options of every kernel.
        channel_decay: whether `g` has a number per key channel.
        step_names: arguments that its step form calls otherwise.
        widest_key: widest key its kernels hold, None for any.
        grouped: whether its kernels take fewer heads of queries and keys than of values.
    """

    title: str
    chunk: Kernel
    recurrent: Kernel
    module: str
    fla_chunk: str
    fla_recurrent: str
    arguments: tuple[str, ...]
    channel_decay: bool = False
    step_names: tuple[tuple[str, str], ...] = ()
    widest_key: int | None = None
    grouped: bool = False


GATED_DELTA_RULE = Family(
    "The gated delta rule",
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
    "fla.ops.gated_delta_rule",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    ("g", "beta", "use_qk_l2norm_in_kernel"),
    widest_key=256,
    grouped=True,
)
KDA = Family(
    "The delta rule with a decay per channel",
    chunk_kda,
    recurrent_kda,
    "fla.ops.kda",
    "chunk_kda",
    "fused_recurrent_kda",
    ("g", "beta", "use_qk_l2norm_in_kernel"),
    channel_decay=True,
    widest_key=256,
    grouped=True,
)
SIMPLE_GLA = Family(
    "Linear attention with a decay per head",
    chunk_simple_gla,
    recurrent_simple_gla,
    "fla.ops.simple_gla",
    "chunk_simple_gla",
    "fused_recurrent_simple_gla",
    ("g",),
)
GLA = Family(
    "Linear attention with a decay per channel",
    chunk_gla,
    recurrent_gla,
    "fla.ops.gla",
    "chunk_gla",
    "fused_recurrent_gla",
    ("g",),
    channel_decay=True,
    step_names=(("g", "gk"),),
)


class FlaKernels(NamedTuple):
    """The two functions of a family as installed, and the argument that asks for [K, V] states."""

    chunk: Kernel
    recurrent: Kernel
    layout: dict[str, bool]


def fla_kernels_for(family: Family, q: Tensor, k: Tensor, v: Tensor) -> tuple[FlaKernels | None, str]:
    """Return flash-linear-attention's kernels if they can take these tensors, and what stands in the way if not."""
    kernels, reason = installed_kernels(family)
    if kernels is None:
        return None, reason
    if v.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        got = f"{q.dtype}, {k.dtype}, {v.dtype}"
        return None, f"flash-linear-attention takes q, k, v of one type, float16, bfloat16 or float32, got {got}"
    if family.widest_key is not None and k.shape[3] > family.widest_key:
        return None, (
            f"flash-linear-attention takes keys up to {family.widest_key} wide, got {k.shape[3]}; "
            "use more, narrower heads"
        )
    heads = k.shape[2] if family.grouped else v.shape[2]
    for step in (False, True):
        if not keeps_layout(family, step, (heads, v.shape[2], k.shape[3], v.shape[3]), v.dtype, v.device):
            return None, f"the installed flash-linear-attention does not return the state as [K, V]; {INSTALL}"
    return kernels, reason


def named(family: Family, step: bool, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments under the names that flash-linear-attention's sequence or step form has for them."""
    names = dict(family.step_names) if step else {}
    return {names.get(name, name): value for name, value in tensors.items()}


@lru_cache
def installed_kernels(family: Family) -> tuple[FlaKernels | None, str]:
    """Import a family's kernels and check that they name what we pass; return them and the reason."""
    if not is_flash_linear_attention_available():
        return None, f"flash-linear-attention is not installed, or this torch sees no GPU; {INSTALL}"
    try:
        module = importlib.import_module(family.module)
        chunk, recurrent = getattr(module, family.fla_chunk), getattr(module, family.fla_recurrent)
    except (ImportError, RuntimeError, AttributeError) as error:
        return None, f"flash-linear-attention cannot be imported ({error}); {INSTALL}"
    layout: dict[str, bool] = {}
    for step, kernel in enumerate((chunk, recurrent)):
        known = inspect.signature(kernel).parameters
        wanted = named(family, bool(step), dict.fromkeys(("q", "k", "v", *family.arguments, *_OPTIONS)))
        missing = [name for name in wanted if name not in known]
        layout = {name: False for name in _LAYOUT_ARGUMENTS if name in known}
        if missing or not layout:
            lacking = ", ".join(missing or _LAYOUT_ARGUMENTS[:1])
            return (
                None,
                f"the installed flash-linear-attention has no argument {lacking} in {kernel.__name__}; {INSTALL}",
            )
    return FlaKernels(chunk, recurrent, layout), "CUDA, and flash-linear-attention is installed"


@lru_cache
def keeps_layout(
    family: Family, step: bool, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Tell whether a kernel takes and returns the state as [K, V], by its answer to two tokens.

    An argument may be accepted and ignored, and with K = V a transposed state has the right shape.
    """
    kernels, _ = installed_kernels(family)
    if kernels is None:
        return False
    heads, value_heads, width, values = sizes
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float32).to(like)

    with torch.no_grad():
        channels = (width,) if family.channel_decay else ()
        arguments = {
            "q": draw(1, 2, heads, width),
            "k": draw(1, 2, heads, width),
            "v": draw(1, 2, value_heads, values),
            "g": -draw(1, 2, value_heads, *channels, like=torch.float32),
            "beta": draw(1, 2, value_heads),
            "use_qk_l2norm_in_kernel": True,
        }
        arguments = {name: x for name, x in arguments.items() if name in ("q", "k", "v", *family.arguments)}
        arguments |= {
            "initial_state": draw(1, value_heads, width, values, like=torch.float32),
            "output_final_state": True,
        }
        _, expected = family.recurrent(**arguments)
        kernel = kernels.recurrent if step else kernels.chunk
        _, state = kernel(**named(family, step, arguments), **kernels.layout)
    return (
        state is not None
        and expected is not None
        and state.shape == expected.shape
        and torch.allclose(state.to(expected.dtype), expected, rtol=0.05, atol=0.05)
    )
