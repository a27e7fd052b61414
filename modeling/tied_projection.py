# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Apply the transpose of a linear layer, with its adapters, quantisation and offloading.

The gradient of an energy needs W^T beside W. `projection(x)` is the first use; [`read_out`] the second. Reading
`projection.weight` instead would miss an adapter, a quantised storage or an offloaded weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

PLAIN_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# FakeTensor takes the place of a plain tensor while a program is exported.
WEIGHT_TYPES = (torch.Tensor, nn.Parameter, FakeTensor)


def read_out(projection: nn.Module, y: torch.Tensor) -> torch.Tensor:
    r"""Apply the transpose of a linear layer, \(W^T y\), without its bias.

    W is read from a plain linear layer, dequantised where the weight itself can tell what it stands for (torchao,
    optimum-quanto), and is \(W + \sum_a s_a B_a A_a\) over the active adapters a with LoRA of `peft`, whose dropout,
    which draws inputs of A, acts on the first use only. Merged and disabled adapters are followed. Any other layer
    (DoRA, AdaLoRA, weights of bitsandbytes, a batch that mixes adapters) is differentiated: the gradient of
    \(y \cdot W x\) with respect to x is what is wanted, whatever the layer keeps W in. Its dropout draws anew.

    Args:
        projection: the layer, in_features -> out_features; affine in its input.
        y (`torch.Tensor` of shape (..., out_features)).

    Returns:
        `torch.Tensor` of shape (..., in_features).

    Raises:
        NotImplementedError: for a layer that neither shows its matrix nor can be differentiated.
    """
    base = getattr(projection, "base_layer", None)
    if base is None:
        with at_hand(projection):
            weight = plain_weight(projection)
            if weight is None:
                weight = _dequantised_weight(projection, y.dtype)
            return _differentiated(projection, y) if weight is None else y @ weight
    adapter: Any = projection
    if adapter.disable_adapters or adapter.merged:
        return read_out(base, y)
    if not _is_plain_lora(adapter):
        return _differentiated(adapter, y)
    output = read_out(base, y)
    for name in adapter.active_adapters:
        if name in adapter.lora_A:
            first, second = adapter.lora_A[name], adapter.lora_B[name]
            with at_hand(first), at_hand(second):
                narrow = y.to(second.weight.dtype) @ second.weight
                output = output + (narrow @ first.weight * adapter.scaling[name]).to(output.dtype)
    return output


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """Let accelerate fetch a module's weights if it has offloaded them, as it does when the module is called."""
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, ())


def plain_weight(projection: nn.Module) -> torch.Tensor | None:
    """Return the matrix of a layer that holds it as it is, or `None`."""
    weight: Any = getattr(projection, "weight", None)
    plain = type(weight) in WEIGHT_TYPES and weight.dtype in PLAIN_TYPES
    return weight if plain and weight.shape == _shape(projection) else None


def _dequantised_weight(projection: nn.Module, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the dequantised matrix of a packed weight, or `None` if there is none or it is only part of the map."""
    weight: Any = getattr(projection, "weight", None)
    can_tell = isinstance(weight, torch.Tensor) and type(weight).dequantize is not torch.Tensor.dequantize
    if not can_tell or weight.shape != _shape(projection) or getattr(weight, "act_pre_scale", None) is not None:
        return None
    return weight.dequantize().to(dtype)


def _shape(projection: nn.Module) -> tuple[int | None, int | None]:
    return getattr(projection, "out_features", None), getattr(projection, "in_features", None)


def _is_plain_lora(adapter: Any) -> bool:
    """Whether an adapted layer is W + B A for the whole batch."""
    return (
        isinstance(getattr(adapter, "lora_A", None), nn.ModuleDict)
        and not any(name in getattr(adapter, "lora_variant", ()) for name in adapter.active_adapters)
        and not any("adapter_names" in getattr(hook, "keywords", ()) for hook in adapter._forward_pre_hooks.values())
    )


def _differentiated(projection: Any, y: torch.Tensor) -> torch.Tensor:
    """Return W^T y as the derivative of a layer."""
    tracked = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        shape = (*y.shape[:-1], projection.in_features)
        probe = torch.zeros(shape, dtype=y.dtype, device=y.device, requires_grad=True)
        output = projection(probe)
        slope = None
        if output.requires_grad:
            weights = y.clone().to(output.dtype)
            (slope,) = torch.autograd.grad(output, probe, weights, create_graph=tracked, allow_unused=True)
        if slope is None:
            raise NotImplementedError(
                "A projection of this model is used twice, the second time transposed, but its "
                f"{type(projection).__name__} neither shows its matrix nor can be differentiated. Keep these layers "
                "out of quantisation (modules_to_not_convert, llm_int8_skip_modules): q_proj and up_proj of "
                "CEM-Llama, fc1 and fc2 of NRGPT."
            )
        return slope
