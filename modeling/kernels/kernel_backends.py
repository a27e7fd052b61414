# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The one place that chooses kernels: flash-linear-attention's on CUDA, our own everywhere else.

flash-linear-attention is imported on first use only. It is used where its functions name every argument that is passed
and, tried once on a small input, return the state as documented here; otherwise our torch kernels run and one warning
says why and what to install.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.utils import is_flash_linear_attention_available, logging

from loopergy.modeling.kernels.gated_delta_rule_torch import chunk_gated_delta_rule, recurrent_gated_delta_rule

logger = logging.get_logger(__name__)

TORCH = "torch"
FLASH_LINEAR_ATTENTION = "flash-linear-attention"
_INSTALL = 'pip install "flash-linear-attention[cuda]>=0.6"'
_ARGUMENTS = ("q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state")
_ARGUMENTS += ("use_qk_l2norm_in_kernel", "cu_seqlens")
# The argument with which versions since 0.5 choose between [K, V] and [V, K] states.
_LAYOUT_ARGUMENTS = ("state_v_first", "transpose_state_layout")
_WIDEST_KEY = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# exp(-50) is nothing next to 1 in float32, while -inf would make its kernels compute -inf - -inf.
_LOWEST_LOG_DECAY = -50.0
_LONGEST_STEPS = 64

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


class KernelBackend(NamedTuple):
    """Which kernels run, and why.

    Args:
        name: "torch" or "flash-linear-attention".
        reason: one sentence.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


class _Kernels(NamedTuple):
    chunk: Kernel
    recurrent: Kernel
    layout: dict[str, bool]


def kernel_backend(device: torch.device | str | None = None) -> KernelBackend:
    """Tell which kernels `gated_delta_rule` uses for tensors on a device.

    Args:
        device: the device; CUDA if there is one, else the CPU, if None.

    Returns:
        The backend's name and the reason.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.device(device).type
    if kind != "cuda":
        return KernelBackend(TORCH, f"flash-linear-attention needs CUDA, the device is {kind}")
    kernels, reason = _flash_linear_attention()
    return KernelBackend(TORCH if kernels is None else FLASH_LINEAR_ATTENTION, reason)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule with the fastest kernel for the device, the length and the need for gradients.

    Single tokens without gradients take the step form, everything else the sequence form. On CUDA
    flash-linear-attention's Triton kernels are used for float16, bfloat16 and float32 with K <= 256.

    Args:
        q: [B, T, H, K], queries. H may divide the number of value heads.
        k: [B, T, H, K], keys.
        v: [B, T, H, V], values.
        g: [B, T, H], natural logarithm of the decay, at most 0.
        beta: [B, T, H], write strength.
        scale: factor of the queries; K ** -0.5 if None.
        initial_state: [B, H, K, V] (with `cu_seqlens`: [D, H, K, V]), the state to continue from; zeros if None.
        output_final_state: whether to return the state after the last token.
        use_qk_l2norm_in_kernel: whether to divide queries and keys by sqrt(|x|^2 + 1e-6) first.
        cu_seqlens: [D + 1], edges of the documents packed into the single row, rising from 0 to T; None for one
            document per row.

    Returns:
        Output [B, T, H, V] in the dtype of `v`, and the final state ([B or D, H, K, V], float32, or float64 if any
        input is float64) or None.

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    arguments = (q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    if v.device.type == "cuda" and v.shape[1] > 0 and not torch.compiler.is_exporting():
        return _on_cuda(*arguments)
    return _on_torch(*arguments)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _on_torch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None, state: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    one_step = v.shape[1] == 1 and not _needs_gradient(q, k, v, g, beta, state)
    return (recurrent_gated_delta_rule if one_step else chunk_gated_delta_rule)(q, k, v, g, beta, scale, state, *rest)


def _run_on_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    state: Tensor | None,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run flash-linear-attention's kernels if they can take these tensors, else our own with one warning."""
    kernels, obstacle = _kernels_for(q, k, v)
    if kernels is None:
        logger.warning_once(f"The gated delta rule runs on the slower torch kernels on this GPU: {obstacle}.")
        return _on_torch(q, k, v, g, beta, scale, state, output_final_state, normalize, cu_seqlens)
    step_by_step = v.shape[1] <= _LONGEST_STEPS and not _needs_gradient(q, k, v, g, beta, state)
    return (kernels.recurrent if step_by_step else kernels.chunk)(
        q=q,
        k=k,
        v=v,
        g=_at_least_float32(g).clamp(min=_LOWEST_LOG_DECAY),
        beta=beta,
        scale=scale,
        initial_state=None if state is None else _at_least_float32(state),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=normalize,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(v.device, torch.long),
        **kernels.layout,
    )


# Compilers cannot look into Triton launches; they step out here and come back after.
_on_cuda = cast(Kernel, torch.compiler.disable(_run_on_cuda))


def _kernels_for(q: Tensor, k: Tensor, v: Tensor) -> tuple[_Kernels | None, str]:
    """Return flash-linear-attention's kernels if they can take these tensors, and what stands in the way if not."""
    kernels, reason = _flash_linear_attention()
    if kernels is None:
        return None, reason
    if v.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        got = f"{q.dtype}, {k.dtype}, {v.dtype}"
        return None, f"flash-linear-attention takes q, k, v of one type, float16, bfloat16 or float32, got {got}"
    if k.shape[3] > _WIDEST_KEY:
        return None, (
            f"flash-linear-attention takes keys up to {_WIDEST_KEY} wide, got {k.shape[3]}; use more, narrower heads"
        )
    for kernel in (kernels.chunk, kernels.recurrent):
        if not _keeps_layout(
            kernel, tuple(kernels.layout), (k.shape[2], v.shape[2], k.shape[3], v.shape[3]), v.dtype, v.device
        ):
            return None, f"the installed flash-linear-attention does not return the state as [K, V]; {_INSTALL}"
    return kernels, reason


@lru_cache
def _flash_linear_attention() -> tuple[_Kernels | None, str]:
    """Import flash-linear-attention's kernels and check that they name what we pass; return them and the reason."""
    if not is_flash_linear_attention_available():
        return None, f"flash-linear-attention is not installed, or this torch sees no GPU; {_INSTALL}"
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunk
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as recurrent
    except (ImportError, RuntimeError) as error:
        return None, f"flash-linear-attention cannot be imported ({error}); {_INSTALL}"
    kernels: tuple[Any, Any] = (chunk, recurrent)
    layout: dict[str, bool] = {}
    for kernel in kernels:
        named = inspect.signature(kernel).parameters
        missing = [name for name in _ARGUMENTS if name not in named]
        layout = {name: False for name in _LAYOUT_ARGUMENTS if name in named}
        if missing or not layout:
            lacking = ", ".join(missing or _LAYOUT_ARGUMENTS[:1])
            return (
                None,
                f"the installed flash-linear-attention has no argument {lacking} in {kernel.__name__}; {_INSTALL}",
            )
    return _Kernels(*kernels, layout), "CUDA, and flash-linear-attention is installed"


@lru_cache
def _keeps_layout(
    kernel: Kernel, layout: tuple[str, ...], sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> bool:
    """Tell whether a kernel takes and returns the state as [K, V], by its answer to two tokens.

    An argument may be accepted and ignored, and with K = V a transposed state has the right shape.
    """
    heads, value_heads, width, values = sizes
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float32).to(like)

    with torch.no_grad():
        arguments = {
            "q": draw(1, 2, heads, width),
            "k": draw(1, 2, heads, width),
            "v": draw(1, 2, value_heads, values),
            "g": -draw(1, 2, value_heads, like=torch.float32),
            "beta": draw(1, 2, value_heads),
            "initial_state": draw(1, value_heads, width, values, like=torch.float32),
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }
        _, expected = recurrent_gated_delta_rule(**arguments)
        _, state = kernel(**arguments, **dict.fromkeys(layout, False))
    return (
        state is not None
        and expected is not None
        and state.shape == expected.shape
        and torch.allclose(state.to(expected.dtype), expected, rtol=0.05, atol=0.05)
    )
