# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Low-rank adapters on a student while it trains, and a plain model in all that is written.

An adapter of `peft` replaces a linear layer W by \(W + (\alpha / r)\, B A\), with A `[r, in]` random and B `[out, r]`
zero at first; W is frozen. It is put on in place: the student stays the object it was, with more parameters.

Writing merges a copy and leaves the student as it is, so that saving never moves a weight. A checkpoint has W, A and B
as they are in a file of their own beside the merged weights: W + BA does not give W back bit for bit.

Source: LoRA (arXiv 2106.09685).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from loopergy.modeling.building_blocks import at_least_float32

ADAPTER_FILE = "adapters.safetensors"
_NAME = "default"


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that carry a low-rank adapter, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def add_adapters(model: PreTrainedModel, layers: Iterable[str], rank: int, alpha: float, seed: int = 0) -> None:
    """Put an adapter on each of the named linear layers; all parameters but those of the adapters are frozen.

    Args:
        model (`PreTrainedModel`): Changed in place. It computes what it did until B is trained.
        layers (iterable of `str`): Full names of linear layers.
        rank (`int`): r, the rows of A.
        alpha (`float`): The product of the two matrices is multiplied by `alpha / rank`.
        seed (`int`, defaults to 0): Of A; the random state outside is left as it is.

    Raises:
        ImportError: `peft` is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError(
            "`body='lora'` trains adapters of peft, which is not installed. Run `pip install peft`, or set `body` to "
            "'full' or 'frozen'."
        ) from error
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(layers))  # type: ignore[arg-type]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, _NAME)


def merge_adapters(model: PreTrainedModel) -> None:
    """Take all adapters off again, in place; the linear layers keep what the adapters learned."""
    for name, layer in adapted_layers(model).items():
        base = layer.get_base_layer()
        base.weight.data.copy_(_merged(layer))
        model.set_submodule(name, base)
    if hasattr(model, "peft_config"):
        del model.peft_config


@torch.no_grad()
def _merged(layer: Any) -> torch.Tensor:
    """Return W + (alpha / r) B A in W's dtype, summed in at least float32."""
    # peft's own `get_delta_weight` rounds the product to the adapters' type before it is added.
    weight, a, b = (part.weight for part in (layer.get_base_layer(), layer.lora_A[_NAME], layer.lora_B[_NAME]))
    product = at_least_float32(b) @ at_least_float32(a)
    return (at_least_float32(weight) + product * layer.scaling[_NAME]).to(weight.dtype)


def plain_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the state dict of the model without adapters that computes the same; the model stays as it is."""
    layers = adapted_layers(model)
    weights = {}
    for key, tensor in model.state_dict().items():
        name, _, rest = key.rpartition(".base_layer.")
        if name in layers:
            weights[f"{name}.{rest}"] = _merged(layers[name]) if rest == "weight" else tensor
        elif not key.startswith(tuple(f"{layer}." for layer in layers)):
            weights[key] = tensor
    return weights


def adapter_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return W, A and B of all adapters, by the names they have in the model."""
    inside = tuple(f"{name}." for name in adapted_layers(model))
    return {key: tensor for key, tensor in model.state_dict().items() if key.startswith(inside)}


def save_adapters(model: PreTrainedModel, folder: str | Path) -> None:
    """Write the adapters' file into a checkpoint, if the model has adapters."""
    weights = adapter_weights(model)
    if weights:
        save_file({key: tensor.contiguous() for key, tensor in weights.items()}, Path(folder) / ADAPTER_FILE)


def load_weights(model: PreTrainedModel, plain: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    """Load a checkpoint into a model, bit for bit as it was.

    Args:
        model (`PreTrainedModel`): With adapters, or without.
        plain (mapping): The checkpoint's merged weights.
        folder (`str` or `Path`): The checkpoint, which has the adapters' file if the model has adapters.

    Raises:
        ValueError: The checkpoint's adapters are of other layers or of another rank.
    """
    wanted, found = adapter_weights(model), {}
    if wanted:
        found = load_file(Path(folder) / ADAPTER_FILE)
        shapes = [{key: tuple(tensor.shape) for key, tensor in side.items()} for side in (wanted, found)]
        if shapes[0] != shapes[1]:
            differing = sorted(key for key in {*wanted, *found} if shapes[0].get(key) != shapes[1].get(key))
            raise ValueError(
                f"The adapters in {str(folder)!r} are not those of this run, for instance {differing[0]!r}: here "
                f"{shapes[0].get(differing[0])}, there {shapes[1].get(differing[0])}. Resume with the `lora_rank` and "
                f"the kept layers that it was begun with."
            )
    inside = tuple(f"{name}." for name in adapted_layers(model))
    rest = {key: tensor for key, tensor in plain.items() if not key.startswith(inside)}
    model.load_state_dict({**rest, **found})
