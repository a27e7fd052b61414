# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Read students of the hybrid-distillation code (github.com/fla-org/hybrid-distillation, arXiv 2512.20569).

Their class is `StudentForCausalLM`, with `model_type` "student"; chili-lab/Ouro-hybrid-1.4B is named so too. Layers in
`keep_full_attention_layers` have the teacher's attention, the others the mixer that `student_name` says.

    student                                         here
    model.embeddings                                model.embed_tokens
    model.layers.{l}.attn.*                         model.layers.{l}.self_attn.*
    model.layers.{l}.attn_norm, mlp_norm            model.layers.{l}.input_layernorm, post_attention_layernorm
    model.norm, model.layers.{l}.mlp.*, lm_head     the same

A looped student has more than that code describes: how often the stack runs (`num_loops` or `total_ut_steps` of its
config), a second norm behind each sub-layer and an exit gate. These are looked for under the names that Ouro gives
them; a tensor that has another name is an error that says so.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.conversion.assemble import check_tensors, lt2_of_tensors, renamed
from loopergy.conversion.config_fields import check_field_names
from loopergy.conversion.errors import ConversionError
from loopergy.conversion.tensor_files import check_whole_numbers
from loopergy.conversion.whole_loading import checked_dtype, existing_source, read_config
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM

MODEL_TYPE = "student"

# From `student_name` to the mixer, and the fields that say which optional parts it has.
STUDENTS: dict[str, tuple[str, dict[str, bool]]] = {
    "gdn_v1": ("gdn", {"gdn_use_gate": False, "gdn_use_short_conv": True}),
    "gdn_v2": ("gdn", {"gdn_use_gate": False, "gdn_use_short_conv": False}),
    "gdn_v3": ("gdn", {"gdn_use_gate": True, "gdn_use_short_conv": True}),
    "gdn_v4": ("gdn", {"gdn_use_gate": True, "gdn_use_short_conv": False}),
    "gla_v1": ("gla", {}),
    "swa_v1": ("window", {}),
}

_NAMES = {
    r"model\.embeddings\.weight": "model.embed_tokens.weight",
    r"model\.layers\.(\d+)\.attn\.attn\.(.+)": r"model.layers.\1.self_attn.\2",
    r"model\.layers\.(\d+)\.attn\.(.+)": r"model.layers.\1.self_attn.\2",
    r"model\.layers\.(\d+)\.attn_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"model\.layers\.(\d+)\.mlp_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
}
# Tables that are computed rather than loaded.
_DROPPED = re.compile(r".*\.rotary\.inv_freq")
_SECOND_NORM = "model.layers.0.input_layernorm_2.weight"
_GATE = "model.early_exit_gate.weight"


def is_hybrid_student(source: str | Path, revision: str | None = None) -> bool:
    """Say whether a folder or Hub id holds a student of the hybrid-distillation code.

    Raises:
        FileNotFoundError: If it is neither here nor on the Hub, as [`read_config`].
    """
    place = Path(source).expanduser()
    possible = (place / "config.json").is_file() if place.exists() else "/" in str(source)
    if not possible:
        return False
    return read_config(source, revision).get("model_type") == MODEL_TYPE


def lt2_from_student(
    source: str | Path, *, dtype: torch.dtype | str | None = None, revision: str | None = None, **fields: Any
) -> LT2ForCausalLM:
    """Load a student of the hybrid-distillation code.

    Args:
        source (`str` or `Path`): Folder or Hub id, with `config.json` and safetensors.
        dtype (`torch.dtype` or `str`, *optional*): dtype of the model; the checkpoint's by default.
        revision (`str`, *optional*): Of a Hub id.
        fields: Fields of `LT2Config` that replace those read, such as `num_loops` if the config does not say it.

    Returns:
        `LT2ForCausalLM`: In eval mode.

    Raises:
        ConversionError: For a student that LT2 cannot be, or tensors that it does not have; the text names them.
        ValueError: For another dtype than a floating-point one, or a field that the config does not have.
        OSError: If a file is missing.
    """
    check_field_names(LT2Config, fields)
    dtype = checked_dtype(dtype)
    found = read_config(source, revision)
    if found.get("model_type") != MODEL_TYPE:
        raise ConversionError(
            f"{source} is of type {found.get('model_type')!r}, not {MODEL_TYPE!r}: no student of hybrid-distillation"
        )
    state = _rename(_read_tensors(existing_source(source), revision))
    config = student_lt2_config(found, state, **fields)
    return lt2_of_tensors(config, state | _zero_biases(state, config), dtype)


def student_lt2_config(found: Mapping[str, Any], state: Mapping[str, torch.Tensor], **fields: Any) -> LT2Config:
    """Describe a student as LT2.

    Args:
        found (`Mapping[str, Any]`): Content of its `config.json`.
        state (`Mapping[str, torch.Tensor]`): Its tensors by our names; they tell sizes, second norms and exit gate.
        fields: Fields of `LT2Config` that replace those read.

    Returns:
        `LT2Config`: Of the same model.

    Raises:
        ConversionError: For a mixer or a setting that LT2 does not have.
    """
    if found.get("qk_norm"):
        raise ConversionError("qk_norm=True: norms of queries and keys are not supported")
    optional = ("num_kv_heads", "window_size", "num_loops", "total_ut_steps")
    check_whole_numbers(found, ("num_hidden_layers", "num_heads"), optional)
    try:
        layers, heads = found["num_hidden_layers"], found["num_heads"]
        vocabulary, width = state["model.embed_tokens.weight"].shape
        intermediate = len(state["model.layers.0.mlp.gate_proj.weight"])
    except KeyError as error:
        raise ConversionError(f"{error} is missing: not a student of the hybrid-distillation code") from None
    mixers = _mixers(found, layers)
    head_dim = width // heads
    window = found.get("window_size")
    if "window" in mixers and not window:
        raise ConversionError("window_size is missing, but there are layers with a window")
    name = found.get("student_name")
    values: dict[str, Any] = dict(STUDENTS[name][1]) if name in STUDENTS else {}
    for mixer in {"gdn", "gla"} & set(mixers):
        values |= {f"{mixer}_num_heads": heads, f"{mixer}_head_dim": head_dim, f"{mixer}_expand_v": 1}
    loops = found.get("num_loops") or found.get("total_ut_steps")
    rotary = found.get("rope_parameters") or {"rope_theta": found.get("rope_theta") or 10_000.0}
    values |= {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_loops": loops or 1,
        "num_trained_loops": loops,
        "num_attention_heads": heads,
        "num_key_value_heads": found.get("num_kv_heads") or heads,
        "head_dim": head_dim,
        "layer_mixers": mixers,
        "attention_bias": bool(found.get("qkv_bias", False)),
        "rms_norm_eps": found.get("norm_eps", 1e-6),
        "max_position_embeddings": found.get("max_position_embeddings", 2048),
        "rope_parameters": {"rope_type": "default", **rotary},
        "initializer_range": found.get("initializer_range", 0.02),
        "block_style": "sandwich" if _SECOND_NORM in state else "pre",
        "norm_cast": "after_weight",
        "norm_between_loops": True,
        "early_exit_gate": _GATE in state,
        "use_loop_residual": False,
        "attn_output_gate": False,
        "tie_word_embeddings": bool(found.get("tie_word_embeddings", False)),
        **{token: found.get(token) for token in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if window:
        values["sliding_window"] = window
    return LT2Config(**{**values, **fields})


def _mixers(found: Mapping[str, Any], layers: int) -> list[str]:
    """Return the mixer of each layer. The kept layers have a window too where the config has one."""
    kept = "window" if found.get("window_size") else "full"
    if found.get("force_window_on_all_layers"):
        return [kept] * layers
    full = set(found.get("keep_full_attention_layers") or ())
    if full == set(range(layers)):
        return [kept] * layers
    name = found.get("student_name")
    if name not in STUDENTS:
        raise ConversionError(f"student_name={name!r} is not supported; supported are {', '.join(STUDENTS)}")
    return [kept if layer in full else STUDENTS[name][0] for layer in range(layers)]


def _read_tensors(source: str, revision: str | None) -> dict[str, torch.Tensor]:
    """Load the safetensors files of a folder or Hub id."""
    one = cached_file(source, "model.safetensors", revision=revision, _raise_exceptions_for_missing_entries=False)
    if one is not None:
        return load_file(one)
    index = cached_file(source, "model.safetensors.index.json", revision=revision)
    files, _ = get_checkpoint_shard_files(source, index, revision=revision)
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _rename(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors by our names; one without a rule keeps its own."""
    kept = {name: tensor for name, tensor in state.items() if not _DROPPED.fullmatch(name)}
    return {renamed(name, _NAMES) or name: tensor for name, tensor in kept.items()}


def _zero_biases(state: Mapping[str, torch.Tensor], config: LT2Config) -> dict[str, torch.Tensor]:
    """Return zeros for the biases that our layers have with `attention_bias` and a student's do not.

    Raises:
        ConversionError: If the student's tensors are not those that its config describes.
    """
    biases = check_tensors(state, config, r".*\.self_attn\.[qkvo]_proj\.bias")
    return {name: torch.zeros(len(state[name.removesuffix("bias") + "weight"])) for name in biases}
