# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The one place that chooses kernels: flash-linear-attention's on CUDA, our own everywhere else.

Where flash-linear-attention cannot be used on a GPU (see `fla_kernels.py`), our torch kernels run, and one warning
says why and what to install.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.utils import logging

from loopergy.modeling.kernels.fla_kernels import (
    GATED_DELTA_RULE,
    GLA,
    KDA,
    SIMPLE_GLA,
    Family,
    Kernel,
    fla_kernels_for,
    installed_kernels,
    named,
)
from loopergy.modeling.kernels.precision import at_least_float32

logger = logging.get_logger(__name__)

TORCH = "torch"
FLASH_LINEAR_ATTENTION = "flash-linear-attention"
# exp(-50) is nothing next to 1 in float32, while -inf would make its kernels compute -inf - -inf.
_LOWEST_LOG_DECAY = -50.0
_LONGEST_STEPS = 64


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


def kernel_backend(device: torch.device | str | None = None) -> KernelBackend:
    """Tell which kernels the recurrent mixers use for tensors on a device.

    Args:
        device: the device; CUDA if there is one, else the CPU, if None.

    Returns:
        The backend's name and the reason. A family that flash-linear-attention lacks is named, and runs on torch.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.device(device).type
    if kind != "cuda":
        return KernelBackend(TORCH, f"flash-linear-attention needs CUDA, the device is {kind}")
    kernels, reason = installed_kernels(GATED_DELTA_RULE)
    if kernels is None:
        return KernelBackend(TORCH, reason)
    for family in (KDA, SIMPLE_GLA, GLA):
        other, obstacle = installed_kernels(family)
        if other is None:
            reason += f"; but {family.title[0].lower()}{family.title[1:]} runs on torch: {obstacle}"
    return KernelBackend(FLASH_LINEAR_ATTENTION, reason)


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
        cu_seqlens: [D + 1], boundaries of the documents packed into the single row, rising from 0 to T; None for
            one document per row.

    Returns:
        Output [B, T, H, V] in the dtype of `v`, and the final state ([B or D, H, K, V], float32, or float64 if any
        input is float64) or None.

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = _options(scale, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    return _dispatch(GATED_DELTA_RULE, tensors, initial_state, options)


def kda(
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
    """Run the delta rule with a decay per channel with the fastest kernel, as [`gated_delta_rule`] chooses it.

    Args:
        g: [B, T, H, K], natural logarithm of the decay per key channel, at most 0.
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as in
            [`gated_delta_rule`].

    Returns:
        As [`gated_delta_rule`].

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = _options(scale, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    return _dispatch(KDA, tensors, initial_state, options)


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run linear attention with no decay or one per head with the fastest kernel, as [`gated_delta_rule`] chooses it.

    Args:
        q, k: [B, T, G, K], queries and keys; G may divide the number of value heads.
        v: [B, T, H, V], values.
        g: [B, T, H], natural logarithm of the decay, at most 0; None for no decay.
        scale, initial_state, output_final_state, cu_seqlens: as in [`gated_delta_rule`].

    Returns:
        As [`gated_delta_rule`].

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g}
    return _dispatch(SIMPLE_GLA, tensors, initial_state, _options(scale, output_final_state, cu_seqlens))


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run linear attention with a decay per channel with the fastest kernel, as [`gated_delta_rule`] chooses it.

    Args:
        q, k: [B, T, H, K], queries and keys.
        v: [B, T, H, V], values.
        g: [B, T, H, K], natural logarithm of the decay per key channel, at most 0.
        scale, initial_state, output_final_state, cu_seqlens: as in [`gated_delta_rule`].

    Returns:
        As [`gated_delta_rule`].

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g}
    return _dispatch(GLA, tensors, initial_state, _options(scale, output_final_state, cu_seqlens))


def _options(
    scale: float | None, output_final_state: bool, cu_seqlens: Tensor | None, **others: bool
) -> dict[str, Any]:
    return {"scale": scale, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens, **others}


def _dispatch(
    family: Family, tensors: Mapping[str, Tensor | None], state: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    v = cast(Tensor, tensors["v"])
    if v.device.type == "cuda" and v.shape[1] > 0 and not torch.compiler.is_exporting():
        return _on_cuda(family, tensors, state, options)
    return _on_torch(family, tensors, state, options)


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _on_torch(
    family: Family, tensors: Mapping[str, Tensor | None], state: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    one_step = cast(Tensor, tensors["v"]).shape[1] == 1 and not _needs_gradient(*tensors.values(), state)
    return (family.recurrent if one_step else family.chunk)(**tensors, initial_state=state, **options)


def _run_on_cuda(
    family: Family, tensors: Mapping[str, Tensor | None], state: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Run flash-linear-attention's kernels if they can take these tensors, else our own with one warning."""
    q, k, v = (cast(Tensor, tensors[name]) for name in ("q", "k", "v"))
    kernels, obstacle = fla_kernels_for(family, q, k, v)
    if kernels is None:
        logger.warning_once(f"{family.title} runs on the slower torch kernels on this GPU: {obstacle}.")
        return _on_torch(family, tensors, state, options)
    step = v.shape[1] <= _LONGEST_STEPS and not _needs_gradient(*tensors.values(), state)
    tensors = dict(tensors)
    if not family.grouped and k.shape[2] != v.shape[2]:
        ratio = v.shape[2] // k.shape[2]
        tensors |= {"q": q.repeat_interleave(ratio, dim=2), "k": k.repeat_interleave(ratio, dim=2)}
    if tensors["g"] is not None:
        tensors["g"] = at_least_float32(tensors["g"]).clamp(min=_LOWEST_LOG_DECAY)
    cu_seqlens = options["cu_seqlens"]
    arguments = {
        **named(family, step, tensors),
        **options,
        "initial_state": None if state is None else at_least_float32(state),
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.to(v.device, torch.long),
        **kernels.layout,
    }
    return (kernels.recurrent if step else kernels.chunk)(**arguments)


# Compilers cannot look into Triton launches; they step out here and come back after.
_on_cuda = cast(Kernel, torch.compiler.disable(_run_on_cuda))
