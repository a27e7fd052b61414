# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Build an LT2 model from given tensors, without initialising first what is overwritten after.

The model is laid out on the meta device (no memory), its fresh tensors are filled by its own `_init_weights`, all
others are assigned.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.configuration.looped_config import warn_beyond_trained
from loopergy.conversion.errors import ConversionError, list_names
from loopergy.conversion.mixer_starts import FIXED_STARTS
from loopergy.conversion.weight_maps import WeightMap, layer_of
from loopergy.conversion.weight_rules import MapFacts, Rule
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM


def empty_student(config: LT2Config, dtype: torch.dtype) -> LT2ForCausalLM:
    """Lay out an `LT2ForCausalLM` on the meta device.

    Args:
        config (`LT2Config`): Its config; `config.dtype` is set.
        dtype (`torch.dtype`): dtype of its parameters, save those that the model itself keeps in float32.

    Returns:
        `LT2ForCausalLM`: Without memory; `fill` gives it some.
    """
    with torch.device("meta"):
        return LT2ForCausalLM._from_config(config, dtype=dtype, attn_implementation=config._attn_implementation)


def check_tensors(have: Iterable[str], config: LT2Config, optional: str = "") -> set[str]:
    """Check that a checkpoint has the tensors of the LT2 that its config describes, and no others.

    Args:
        have (`Iterable[str]`): Names of its tensors, as LT2 has them.
        config (`LT2Config`): Read off the checkpoint.
        optional (`str`): A pattern of names that may be missing.

    Returns:
        `set[str]`: The optional ones that are.

    Raises:
        ConversionError: With the names that are missing or too many.
    """
    names, want = set(have), set(empty_student(config, torch.float32).state_dict())
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing, strange = want - names - tied, names - want
    left_out = {name for name in missing if re.fullmatch(optional, name)}
    problems = {"it lacks": missing - left_out, "it has, and LT2 has not,": strange}
    text = "; ".join(f"{what} {list_names(found)}" for what, found in problems.items() if found)
    if text:
        raise ConversionError(f"the checkpoint's tensors are not those of its config: {text}")
    return left_out


def fresh_tensors(model: LT2ForCausalLM, rules: list[Rule], seed: int) -> dict[str, torch.Tensor]:
    """Fill the tensors that no teacher provides.

    They are drawn in float32 on the CPU, each module from a seed of its own: with the same `seed` a tensor gets the
    same numbers whatever the dtype, the device, the other layers and the other tensors of its layer are.

    Args:
        model (`LT2ForCausalLM`): An empty student; its mixers are given memory on the way.
        rules (`list[Rule]`): The rules whose tensors are fresh, in whole or in part.
        seed (`int`): Seed.

    Returns:
        `dict[str, torch.Tensor]`: Student names to float32 tensors on the CPU.

    Raises:
        ConversionError: If an initialisation leaves a tensor all zero or not finite.
    """
    out: dict[str, torch.Tensor] = {}
    by_layer: dict[int, list[Rule]] = {}
    for rule in rules:
        layer = layer_of(rule.target)
        if layer is None:
            raise ConversionError(f"{rule.target}: fresh tensors outside the layers are not supported")
        by_layer.setdefault(layer, []).append(rule)
    for layer, layer_rules in by_layer.items():
        name = f"model.layers.{layer}.self_attn"
        mixer = model.get_submodule(name).to(dtype=torch.float32).to_empty(device="cpu")
        prefix = f"{name}."
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            # Children before parents, as transformers initialises: a parent may refine what its children got.
            for part, module in reversed(list(mixer.named_modules())):
                torch.manual_seed(_derived_seed(seed, prefix + part))
                model._init_weights(module)
        state = {prefix + part: tensor for part, tensor in mixer.state_dict().items()}
        for rule in layer_rules:
            value = state[rule.target]
            if rule.transform in FIXED_STARTS:
                value = FIXED_STARTS[rule.transform](value)
            empty = rule.transform != "zeros" and not torch.any(value)
            if empty or not torch.isfinite(value).all():
                raise ConversionError(f"{rule.target}: the fresh tensor is not finite or all zero")
            out[rule.target] = value
    return out


def _derived_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2s(f"{seed}/{name}".encode(), digest_size=7).digest(), "big")


def fill(
    model: LT2ForCausalLM,
    weights: WeightMap,
    sources: Mapping[str, torch.Tensor],
    *,
    seed: int,
    device: torch.device,
    share: bool = False,
) -> LT2ForCausalLM:
    """Give an empty student its tensors.

    Args:
        model (`LT2ForCausalLM`): From `empty_student`; changed in place.
        weights (`WeightMap`): Its rules.
        sources (`Mapping[str, torch.Tensor]`): The teacher's state dict.
        seed (`int`): Seed of fresh tensors.
        device (`torch.device`): Where the student goes.
        share (`bool`): Let the student use the teacher's memory where a tensor is copied unchanged.

    Returns:
        `LT2ForCausalLM`: The model, in eval mode, all parameters trainable.

    Raises:
        ConversionError: If names or shapes do not fit.
    """
    skeleton: dict[str, torch.Tensor] = dict(model.state_dict())
    weights.check_student(skeleton)
    drawn = {rule.target: rule for rule in weights.rules if weights.is_drawn(rule)}
    fresh = skeleton if device.type == "meta" else fresh_tensors(model, list(drawn.values()), seed)
    state: dict[str, torch.Tensor] = {}
    made: dict[tuple[str, ...], Any] = {}
    for rule in weights.rules:
        like = skeleton[rule.target]
        if rule.transform == "tie":
            state[rule.target] = state["model.embed_tokens.weight"]
            continue
        if rule.fresh:
            value = fresh[rule.target]
        else:
            value = weights.forward(rule, sources, fresh[rule.target] if rule.target in drawn else None, made).detach()
        if value.shape != like.shape:
            raise ConversionError(
                f"{rule.target}: shape {list(value.shape)} made from {rule.source} does not fit {list(like.shape)}"
            )
        owned = rule.fresh or share or weights.is_new(rule)
        state[rule.target] = value.to(device=device, dtype=like.dtype, copy=not owned).contiguous()
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    fill_buffers(model, device)
    return model.eval()


def lt2_of_tensors(
    config: LT2Config, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
) -> LT2ForCausalLM:
    """Build an LT2 from tensors that have its names already.

    Args:
        config (`LT2Config`): What the tensors are of; a warning says so if it runs more loops than were trained.
        tensors (`Mapping[str, torch.Tensor]`): All of its state dict; a tied head may be missing.
        dtype (`torch.dtype`, *optional*): dtype of the model; that of the embedding by default.

    Returns:
        `LT2ForCausalLM`: On the CPU, in eval mode; it may use the memory of `tensors`.

    Raises:
        ConversionError: If names or shapes do not fit.
    """
    warn_beyond_trained(config.num_loops, config.num_trained_loops or config.num_loops)
    head = "lm_head.weight"
    names = [name for name in tensors if name != head]
    if config.tie_word_embeddings or head in tensors:
        names.append(head)  # behind the embedding, which it may be
    weights = WeightMap.identity(names, MapFacts.from_config(config))
    student = empty_student(config, dtype or tensors["model.embed_tokens.weight"].dtype)
    return fill(student, weights, tensors, seed=0, device=torch.device("cpu"), share=True)


def renamed(name: str, names: Mapping[str, str]) -> str | None:
    """Return a tensor's name by the first pattern that matches all of it; None if no pattern does.

    Args:
        name (`str`): As a checkpoint has it.
        names (`Mapping[str, str]`): Regular expressions, and what each is replaced by.
    """
    return next((re.sub(f"^{old}$", new, name) for old, new in names.items() if re.fullmatch(old, name)), None)


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary tables) on `device`."""
    if device.type == "meta":
        return
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                model._init_weights(module)
    torch.nn.Module.to(model, device)


def compare_with_teacher(teacher: PreTrainedModel, config: LT2Config, weights: WeightMap) -> dict[str, float | int]:
    """Run the teacher's own weights through LT2 with all layers kept, and compare the logits.

    Random tokens are read at the first positions and at the last that the teacher knows, as what a family does with
    far positions is seen only there. Takes no memory for weights: they are shared with the teacher.

    Args:
        teacher (`PreTrainedModel`): The teacher; its mode is left as it was.
        config (`LT2Config`): Config of the student with all layers kept.
        weights (`WeightMap`): Its rules.

    Returns:
        `dict`: `max_abs_difference` of the logits, `tokens` compared and `max_abs_logit`.
    """
    device, training = next(teacher.parameters()).device, teacher.training
    twin = fill(empty_student(config, teacher.dtype), weights, teacher.state_dict(), seed=0, device=device, share=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (2, 24), generator=generator).to(device)
    first = torch.arange(ids.shape[1], device=device)
    position_ids = torch.stack((first, first + max(0, config.max_position_embeddings - ids.shape[1])))
    teacher.eval()
    with torch.no_grad():
        want = teacher(input_ids=ids, position_ids=position_ids, use_cache=False).logits
        got = twin(input_ids=ids, position_ids=position_ids, use_cache=False).logits
    teacher.train(training)
    if want.shape != got.shape:
        raise ConversionError(f"the teacher's logits have shape {list(want.shape)} instead of {list(got.shape)}")
    return {
        "max_abs_difference": (want - got).abs().max().item(),
        "max_abs_logit": want.abs().max().item(),
        "tokens": ids.numel(),
    }
