# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Read checkpoints of the official LT2 code (github.com/chili-lab/LT2), which is built on Meta Lingua.

A consolidated checkpoint is a folder with `consolidated.pth` (a dictionary with `model`) and `params.json` (with the
arguments of the model under `model`).

    official                                        here
    tok_embeddings.weight, norm.weight              model.embed_tokens.weight, model.norm.weight
    output.weight, or tied                          lm_head.weight
    residual_weight [T, d]                          model.loop_residual
    layers.{l}.attention.w{q,k,v,o}.weight, w_gate  model.layers.{l}.self_attn.{q,k,v,o}_proj.weight, gate_proj
    layers.{l}.attention.* (other mixers)           model.layers.{l}.self_attn.*
    layers.{l}.{q,kv,o,q_score,k_score}_proj (dsa)  model.layers.{l}.self_attn.*
    layers.{l}.feed_forward.w{1,3,2}.weight         model.layers.{l}.mlp.{gate,up,down}_proj.weight
    layers.{l}.{attention,ffn}_norm.weight          model.layers.{l}.{input,post_attention}_layernorm.weight

Lingua turns neighbouring numbers of a head by its rotary angles, we turn those half a head apart: the rows of wq and
wk are put in that order.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.configuration.layer_patterns import MIXERS, parse_layer_mixers
from loopergy.conversion.assemble import check_tensors, lt2_of_tensors, renamed
from loopergy.conversion.config_fields import check_field_names
from loopergy.conversion.errors import ConversionError, list_names
from loopergy.conversion.tensor_files import check_whole_numbers, read_json_file, read_tensor_file
from loopergy.conversion.whole_loading import checked_dtype
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.modeling.random_windows import RandomWindows

logger = logging.get_logger(__name__)

WEIGHTS_FILE, ARGUMENTS_FILE = "consolidated.pth", "params.json"

_NAMES = {
    r"tok_embeddings\.weight": "model.embed_tokens.weight",
    r"norm\.weight": "model.norm.weight",
    r"output\.weight": "lm_head.weight",
    r"residual_weight": "model.loop_residual",
    r"layers\.(\d+)\.attention\.w([qkvo])\.weight": r"model.layers.\1.self_attn.\2_proj.weight",
    r"layers\.(\d+)\.attention\.w_gate\.weight": r"model.layers.\1.self_attn.gate_proj.weight",
    r"layers\.(\d+)\.attention\.(.+)": r"model.layers.\1.self_attn.\2",
    r"layers\.(\d+)\.((?:q|kv|o|q_score|k_score)_proj\.weight)": r"model.layers.\1.self_attn.\2",
    r"layers\.(\d+)\.feed_forward\.w1\.weight": r"model.layers.\1.mlp.gate_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w3\.weight": r"model.layers.\1.mlp.up_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w2\.weight": r"model.layers.\1.mlp.down_proj.weight",
    r"layers\.(\d+)\.attention_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"layers\.(\d+)\.ffn_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
}
# Tables that are computed rather than loaded, and the embedding seen once more through a tied head.
_DROPPED = re.compile(r"rope_embeddings\..*|.*\.rotary\.inv_freq|output\.tied_module\.weight")

# From an argument of the official code to our field, and its default there.
_FIELDS: dict[str, tuple[str, Any]] = {
    "loop_count": ("num_loops", 1),
    "norm_eps": ("rms_norm_eps", 1e-5),
    "max_seqlen": ("max_position_embeddings", 1024),
    "use_attn_gate": ("attn_output_gate", False),
    "gdn_allow_neg_eigval": ("gdn_allow_neg_eigval", False),
    "kda_expand_v": ("kda_expand_v", 1.0),
    "mamba2_expand": ("mamba2_expand", 2),
    "mamba2_d_state": ("mamba2_state_size", 64),
    "mamba2_d_conv": ("mamba2_conv_size", 4),
    "nsa_block_size": ("nsa_block_size", 64),
    "nsa_block_counts": ("nsa_block_count", 16),
    "nsa_window_size": ("nsa_window", 512),
    "dsa_dim": ("dsa_latent_dim", 512),
    "dsa_tail_dim": ("dsa_tail_dim", 64),
    "dsa_topk": ("dsa_topk", 2048),
    "dsa_score_dim": ("dsa_index_head_dim", 64),
}

# Arguments for something that LT2 does not have: (the only value allowed, what any other one means).
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "legacy_iteration_weights": (False, "a weighted sum over loops"),
    "nsa_qkv_bias": (False, "biases in NSA layers"),
    "dsa_sm_scale": (None, "a softmax scale of its own in DSA layers"),
    "hgrn2_use_short_conv": (False, "convolutions in HGRN2 layers"),
}


def is_official_lt2(source: str | Path) -> bool:
    """Say whether a folder, or a `.pth` file, is a consolidated checkpoint of the official LT2 code."""
    place = Path(source).expanduser()
    folder = place.parent if place.suffix == ".pth" else place
    return (folder / ARGUMENTS_FILE).is_file() and (place.suffix == ".pth" or (folder / WEIGHTS_FILE).is_file())


def lt2_from_official(source: str | Path, *, dtype: torch.dtype | str | None = None, **fields: Any) -> LT2ForCausalLM:
    """Load a checkpoint of the official LT2 code.

    Args:
        source (`str` or `Path`): A folder with `consolidated.pth` and `params.json`, or such a `.pth` file with
            `params.json` beside it.
        dtype (`torch.dtype` or `str`, *optional*): dtype of the model; the checkpoint's by default.
        fields: Fields of `LT2Config` that replace those read from the checkpoint, such as the token ids, which it does
            not hold.

    Returns:
        `LT2ForCausalLM`: In eval mode.

    Raises:
        ConversionError: If a file is missing or not such a checkpoint, asks for something that LT2 does not have here,
            or holds other tensors than its arguments say.
        ValueError: For another dtype than a floating-point one, or a field that the config does not have.
    """
    check_field_names(LT2Config, fields)
    dtype = checked_dtype(dtype)
    place = Path(source).expanduser()
    weights_file = place / WEIGHTS_FILE if place.is_dir() else place
    arguments_file = weights_file.parent / ARGUMENTS_FILE
    for file in (weights_file, arguments_file):
        if not file.is_file():
            raise ConversionError(
                f"{file} is missing: an official LT2 checkpoint is a folder with {WEIGHTS_FILE} and {ARGUMENTS_FILE}"
            )
    arguments = _model_entry(arguments_file, read_json_file(arguments_file))
    state = _model_entry(weights_file, read_tensor_file(weights_file))
    if others := [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise ConversionError(f"{weights_file} has entries that are no tensors: {list_names(others)}")
    config = official_config(arguments, state, **fields)
    tensors = _rename(state, config)
    check_tensors(tensors, config)
    return lt2_of_tensors(config, tensors, dtype)


def _model_entry(file: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a file holds under `model`."""
    entry = content.get("model")
    if not isinstance(entry, Mapping):
        raise ConversionError(f"{file} has no entry 'model' with fields: not a Lingua checkpoint")
    return entry


def official_config(arguments: Mapping[str, Any], state: Mapping[str, torch.Tensor], **fields: Any) -> LT2Config:
    """Read the config from the arguments of the official code, and what they leave open from the tensors.

    Args:
        arguments (`Mapping[str, Any]`): The entry `model` of `params.json`.
        state (`Mapping[str, torch.Tensor]`): The checkpoint's tensors.
        fields: Fields of `LT2Config` that replace those read.

    Returns:
        `LT2Config`: Of the same model.

    Raises:
        ConversionError: For a mixer or an argument that LT2 does not have here; the text names it.
    """
    for name, (allowed, meaning) in _UNSUPPORTED.items():
        if arguments.get(name, allowed) != allowed:
            raise ConversionError(f"{name}={arguments[name]!r}: {meaning} is not supported")
    if "block_residual_weight" in state and torch.any(state["block_residual_weight"]):
        raise ConversionError("block_residual_weight is not zero: residuals across blocks are not supported")
    _check_arguments(arguments)
    try:
        embedding, first = state["tok_embeddings.weight"], state["layers.0.feed_forward.w1.weight"]
        width, layers = arguments["dim"], arguments["n_layers"]
    except KeyError as error:
        raise ConversionError(f"{error} is missing: not a checkpoint of the official LT2 code") from None
    heads = arguments.get("n_heads") or width // (arguments.get("head_dim") or 64)
    key_heads = arguments.get("n_kv_heads") or heads
    values = {ours: arguments.get(name, default) for name, (ours, default) in _FIELDS.items()}
    if values["nsa_window"] is None:
        values["nsa_window"] = 512
    try:
        mixers = parse_layer_mixers(arguments.get("layer_pattern", "full"), layers)
    except ValueError as error:
        raise ConversionError(f"layer_pattern: {error} Known mixers: {', '.join(MIXERS)}") from None
    values["num_trained_loops"] = values["num_loops"]
    values |= _windows(arguments, mixers, values["num_loops"])
    tied = bool(arguments.get("weight_tying", False))
    values |= {
        "vocab_size": len(embedding),
        "hidden_size": width,
        "intermediate_size": len(first),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": arguments.get("head_dim") or width // heads,
        "nsa_num_key_value_heads": key_heads,
        "use_loop_residual": "residual_weight" in state,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(arguments.get("rope_theta", 10_000.0))},
        "tie_word_embeddings": tied,
        "initializer_range": width**-0.5,
    }
    return LT2Config(**{**values, **fields})


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a type that cannot be calculated with here; `LT2Config` checks the others."""
    optional = ("n_heads", "n_kv_heads", "head_dim", "default_sliding_window")
    check_whole_numbers(arguments, ("dim", "n_layers", "loop_count"), optional)
    theta, pattern = arguments.get("rope_theta", 1.0), arguments.get("layer_pattern", "full")
    if type(theta) not in (int, float):
        raise ConversionError(f"rope_theta={theta!r} must be a number")
    if not isinstance(pattern, str | list):
        raise ConversionError(f"layer_pattern={pattern!r} must be a pattern such as 'gdn*4,full'")


def _windows(arguments: Mapping[str, Any], mixers: list[str], loops: int) -> dict[str, Any]:
    """Return mixers and windows: `attention_pattern` says which attention layers are windowed, in which loops."""
    default = arguments.get("default_sliding_window", 2048)
    pattern = str(arguments.get("attention_pattern", "1:0"))
    if "full" not in mixers:
        return {"layer_mixers": mixers}
    if "random" in pattern:
        try:
            windows = RandomWindows.from_pattern(pattern, default or 2048)
        except ValueError as error:
            raise ConversionError(f"attention_pattern: {error}") from None
        logger.warning(
            f"attention_pattern={pattern!r}: this model was trained with windows drawn anew in every pass, and loads "
            f"without any. To ask it as published, let several layouts vote: {windows}.vote(model, input_ids), from "
            "loopergy.modeling.random_windows."
        )
        return {"layer_mixers": mixers}
    parts = [part.strip() for part in pattern.split("->")]
    table = [_loop_windows(part, len(mixers), default) for part in (parts if len(parts) > 1 else parts * loops)]
    if len(table) != loops:
        raise ConversionError(f"attention_pattern={pattern!r} has {len(table)} loops, but loop_count={loops}")
    seen = {row[layer] for row in table for layer, name in enumerate(mixers) if name == "full"}
    if seen == {None}:
        return {"layer_mixers": mixers}
    same = all(row == table[0] for row in table)
    if same and len(seen - {None}) == 1:
        windowed = [name == "full" and table[0][layer] is not None for layer, name in enumerate(mixers)]
        names = ["window" if cut else name for cut, name in zip(windowed, mixers, strict=True)]
        return {"layer_mixers": names, "sliding_window": (seen - {None}).pop()}
    return {"layer_mixers": mixers, "loop_windows": table}


def _loop_windows(pattern: str, layers: int, default: int | None) -> list[int | None]:
    """Return the window of each layer in one loop."""
    text = pattern.lower()
    try:
        if text == "full":
            return [None] * layers
        if text.startswith("swa="):
            return [int(text.removeprefix("swa="))] * layers
        if ":" in text:
            return [default if name == "window" else None for name in parse_layer_mixers(text, layers)]
        windows = [None if part.strip() in ("none", "null") else int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConversionError(f"attention_pattern={pattern!r} is not understood: {error}") from None
    if len(windows) != layers:
        raise ConversionError(f"attention_pattern={pattern!r} has {len(windows)} entries, but n_layers={layers}")
    return windows


def _rename(state: Mapping[str, torch.Tensor], config: LT2Config) -> dict[str, torch.Tensor]:
    """Return the tensors under our names, with our order of rows and our shapes."""
    out: dict[str, torch.Tensor] = {}
    strange = []
    for name, tensor in state.items():
        if _DROPPED.fullmatch(name) or name == "block_residual_weight":
            continue
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        target = renamed(name, _NAMES)
        if target is None:
            strange.append(name)
            continue
        if re.fullmatch(r"layers\.\d+\.attention\.w[qk]\.weight", name):
            head = config.head_dim or 0
            if head % 2 or len(tensor) % head:
                raise ConversionError(
                    f"{name} has {len(tensor)} rows, which are no heads of an even head_dim={head} (dim / n_heads)"
                )
            tensor = half_apart(tensor, head)
        out[target] = tensor.flatten() if target.endswith(".A_log") else tensor
    if strange:
        raise ConversionError(f"the checkpoint has tensors that LT2 does not have: {', '.join(sorted(strange))}")
    return out


def half_apart(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of each head so that pairs of neighbours come to lie half a head apart.

    Args:
        weight (`torch.Tensor` of shape `[heads * head_dim, ...]`): Of a projection to queries or keys.
        head_dim (`int`): Size of a head, even.

    Returns:
        `torch.Tensor`: Rows 0, 2, 4, ... of each head, then rows 1, 3, 5, ...
    """
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
