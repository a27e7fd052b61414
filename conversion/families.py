# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Say which teachers can be converted, load them, and describe the student each of them becomes.

Two families: Ouro (four norms a layer, T loops, exit gate) and everything that computes what Llama computes (two
norms, one loop). A teacher outside is refused here, by a text that names the feature, before any weight is touched.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.configuration.configuration_ouro import repair_special_tokens
from loopergy.configuration.layer_patterns import parse_layer_mixers
from loopergy.conversion.errors import ConversionError
from loopergy.conversion.whole_loading import existing_source, load_whole, read_config
from loopergy.modeling.modeling_ouro import OuroForCausalLM

# Model types whose computation is known to be ours; other lookalikes are compared with the student when converted.
KNOWN_TYPES = ("ouro", "llama")

# What a mixer lets the caller choose, and what conversion chooses otherwise; `None` leaves the choice to `LT2Config`
# or `_mixer_sizes`. Other head counts and sizes are the teacher's, as its weights are.
MIXER_OPTIONS: dict[str, dict[str, Any]] = {
    "gdn": {
        "gdn_use_short_conv": False,
        "gdn_conv_size": 4,
        "gdn_use_gate": True,
        "gdn_allow_neg_eigval": False,
        "gdn_norm_eps": 1e-5,
    },
    "window": {"sliding_window": None},
    "kda": {
        "kda_use_short_conv": False,
        "kda_conv_size": None,
        "kda_allow_neg_eigval": False,
        "kda_norm_eps": None,
    },
    "deltanet": {
        "deltanet_use_short_conv": False,
        "deltanet_conv_size": None,
        "deltanet_allow_neg_eigval": False,
        "deltanet_norm_eps": None,
    },
    "mamba2": {"mamba2_conv_size": None, "mamba2_norm_eps": None},
    "hgrn2": {"hgrn2_norm_eps": None},
    "retnet": {"retnet_norm_eps": None},
    "gla": {"gla_gate_rank": None, "gla_gate_logit_normalizer": None, "gla_norm_eps": None},
    "la": {"la_norm_eps": None},
    "nsa": {
        "nsa_block_size": None,
        "nsa_block_count": None,
        "nsa_window": None,
        "nsa_pool_size": None,
        "nsa_pool_stride": None,
    },
    "dsa": {
        "dsa_latent_dim": None,
        "dsa_topk": None,
        "dsa_keep_current": None,
        "dsa_indexer": None,
        "dsa_index_heads": None,
        "dsa_index_head_dim": None,
        "dsa_indexer_loss_weight": None,
        "dsa_dense_warmup": None,
    },
}

# Mixers whose projections have no biases, whatever `attention_bias` is.
_WITHOUT_BIAS = ("mamba2", "dsa")

_NOT_CARRIED = {"architectures", "transformers_version", "layer_mixers", "sliding_window", "loop_windows", "dtype"}

# Fields of other families' configs that change the computation: field -> (is it harmless?, what it means).
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, str]] = {
    "no_rope_layers": (lambda v: not v or all(v), "layers without rotary embeddings"),
    "partial_rotary_factor": (lambda v: v in (None, 1), "partial rotary embeddings"),
    "embedding_multiplier": (lambda v: v in (None, 1), "an embedding multiplier"),
    "residual_multiplier": (lambda v: v in (None, 1), "a residual multiplier"),
    "attention_multiplier": (lambda v: v is None, "an attention scale of its own"),
    "query_pre_attn_scalar": (lambda v: v is None, "an attention scale of its own"),
    "logits_scaling": (lambda v: v in (None, 1), "scaled logits"),
    "logit_scale": (lambda v: v in (None, 1), "scaled logits"),
    "attn_logit_softcapping": (lambda v: v is None, "soft-capped attention logits"),
    "final_logit_softcapping": (lambda v: v is None, "soft-capped logits"),
    "use_qk_norm": (lambda v: not v, "q/k-norm"),
    "clip_qkv": (lambda v: v is None, "clipped queries, keys and values"),
    "num_experts": (lambda v: not v, "a mixture of experts"),
    "num_local_experts": (lambda v: not v, "a mixture of experts"),
    "is_encoder_decoder": (lambda v: not v, "an encoder"),
}

# Families that share Llama's tensor names and compute something else.
_UNSUPPORTED_TYPES = {
    r"gemma": "(1 + weight) norms and scaled embeddings",
    r"cohere": "parallel attention and MLP",
    r"(glm|ernie|helium)": "interleaved rotary embeddings",
}

# What an unknown tensor name usually means.
_UNSUPPORTED_TENSORS = {
    r"self_attn\.[qk]_(layer)?norm\.": "q/k-norm",
    r"(experts|router|mlp\.gate\.|block_sparse)": "a mixture of experts",
    r"(qkv_proj|query_key_value|gate_up_proj|c_attn)": "fused projections",
    r"(pre|post)_feedforward_layernorm": "norms around the MLP other than Llama's or Ouro's",
    r"norm\.bias$": "LayerNorm instead of RMSNorm",
    r"sinks?$": "attention sinks",
    r"(lora_|base_layer|modules_to_save)": "unmerged adapters (call `merge_and_unload()` first)",
}

_BIAS = re.compile(r"self_attn\.([qkvo])_proj\.bias$")


def load_teacher(
    teacher: PreTrainedModel | str | Path, *, dtype: torch.dtype | str | None = None, revision: str | None = None
) -> tuple[PreTrainedModel, str]:
    """Return the teacher and a word on where it came from; a model in memory is used as it is.

    Args:
        teacher (`PreTrainedModel`, `str` or `Path`): A model in memory, a folder, a Hub id, or a `.gguf` file (which
            is dequantised).
        dtype (`torch.dtype` or `str`, *optional*): Load in this dtype; the checkpoint's by default. Models in memory
            keep theirs.
        revision (`str`, *optional*): Branch, tag or commit for a Hub id.

    Returns:
        `tuple[PreTrainedModel, str]`: The model, and `"memory"` or the folder, file or Hub id it was loaded from.

    Raises:
        ConversionError: If the object is no transformers model, or as [`load_whole`].
        FileNotFoundError: If there is no such folder or file, nor a model of that name on the Hub.
    """
    if isinstance(teacher, torch.nn.Module):
        inner = getattr(teacher, "_orig_mod", teacher)
        if not isinstance(inner, PreTrainedModel):
            raise ConversionError(
                f"teacher is a {type(teacher).__name__}; pass the transformers model itself (`.module` of a parallel "
                "wrapper, `merge_and_unload()` of an adapter), a folder, or a Hub id"
            )
        return inner, "memory"
    source = existing_source(teacher, revision)
    # Straight to our class: the checkpoint's remote code must not be asked for.
    ouro = read_config(source, revision).get("model_type") == "ouro"
    return load_whole(
        OuroForCausalLM if ouro else AutoModelForCausalLM, source, dtype=dtype, revision=revision
    ), source


def check_teacher(teacher: PreTrainedModel) -> None:
    """Refuse a teacher that cannot be converted.

    Raises:
        ConversionError: With the feature that is not supported.
    """
    config, kind = teacher.config, type(teacher).__name__
    _check_family(config)
    if not is_plain(teacher):
        raise ConversionError(
            f"the teacher ({kind}) has quantised or sharded weights, which cannot be copied; load it whole and "
            "dequantised, e.g. with `quantization_config=GgufConfig(dequantize=True)`, or pass the .gguf file's path"
        )
    if teacher.get_output_embeddings() is None:
        raise ConversionError(f"the teacher ({kind}) has no language-model head: pass its ...ForCausalLM class")
    if not hasattr(teacher, "model"):
        raise ConversionError(f"the teacher ({kind}) is not built like Llama or Ouro; {_supported()}")
    check_teacher_config(config)
    strange = sorted({text for name in teacher.state_dict() for text in _meaning(name)})
    biased = sorted({match.group(1) for name in teacher.state_dict() if (match := _BIAS.search(name))})
    if biased and len(biased) < 4:
        strange.append(f"attention biases on {', '.join(biased)} alone (Llama's attention_bias sets q, k, v and o)")
    if strange:
        raise ConversionError(
            f"the teacher ({kind}, model_type {config.model_type!r}) has {' and '.join(strange)}, "
            f"which is not supported; {_supported()}"
        )
    devices = {tensor.device for tensor in teacher.state_dict().values()}
    if len(devices) > 1:
        raise ConversionError(
            f"the teacher lies on several devices ({', '.join(sorted(map(str, devices)))}); load it on one, without "
            "offloading"
        )


def _check_family(config: PreTrainedConfig) -> None:
    if config.model_type == "lt2":
        raise ConversionError(
            "an LT2 is no teacher: its layers have mixers of their own already; convert the Ouro or Llama that it was "
            "made from, or give layers their attention back with restore_layers"
        )


def check_teacher_config(config: PreTrainedConfig) -> None:
    """Refuse a config that asks for a computation other than Ouro's or Llama's.

    Raises:
        ConversionError: With the field, its value and what it means.
    """
    if config.model_type == "ouro":
        return
    _check_family(config)
    problems = [text for pattern, text in _UNSUPPORTED_TYPES.items() if re.match(pattern, config.model_type)]
    for field, (harmless, text) in _UNSUPPORTED_FIELDS.items():
        value = getattr(config, field, None)
        if not harmless(value):
            problems.append(f"{text} ({field}={value!r})")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        problems.append(f"sliding-window attention (sliding_window={window})")
    other = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"})
    if other and not any("sliding" in text for text in problems):
        problems.append(f"layers of type {', '.join(other)}")
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        problems.append("rotary settings that differ between layers (rope_parameters)")
    if rope.get("llama_4_scaling_beta"):
        problems.append("queries that grow with their position (rope_parameters['llama_4_scaling_beta'])")
    missing = [name for name in ("rms_norm_eps", "num_key_value_heads", "head_dim") if _read(config, name) is None]
    if missing:
        problems.append(f"a config without {', '.join(missing)}")
    if problems:
        raise ConversionError(
            f"the teacher (model_type {config.model_type!r}) has {' and '.join(dict.fromkeys(problems))}, which is "
            f"not supported; {_supported()}"
        )


def is_plain(teacher: PreTrainedModel) -> bool:
    """Say whether all weights are whole floating-point matrices: neither packed, nor scaled 8-bit, nor sharded."""
    return all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_floating_point() and tensor.itemsize > 1
        for tensor in teacher.state_dict().values()
    )


def parse_keep_layers(keep_layers: Sequence[int] | str | int | float, num_layers: int) -> list[int]:
    """Turn any spelling of the kept layers into a sorted list of physical layer indices.

    A number K spreads K layers evenly: layer `floor((i + 1) * N / K) - 1` for i = 0..K-1, so that the last layer is
    always kept (24 layers, K = 6: 3, 7, 11, 15, 19, 23). A looped model uses a kept layer in all its loops.

    Args:
        keep_layers (`list[int]`, `str`, `int` or `float`): Indices; `"all"`; `"3,7,11"`; how many (an `int`, 0..N); or
            which share (a `float`, 0.0..1.0, rounded to a whole number of layers).
        num_layers (`int`): N.

    Returns:
        `list[int]`: Sorted indices.

    Raises:
        ValueError: For duplicates, indices or counts out of range, and anything else; the text gives the allowed
            range.
    """
    allowed = f"allowed: different layers in 0..{num_layers - 1}, a count 0..{num_layers}, a share 0.0..1.0, or 'all'"
    given = keep_layers

    def refusal(reason: str) -> ValueError:
        return ValueError(f"keep_layers={given!r}: {reason}; {allowed}")

    if isinstance(keep_layers, str):
        if keep_layers.strip() == "all":
            return list(range(num_layers))
        try:
            named = [int(part) for part in keep_layers.split(",") if part.strip()]
        except ValueError:
            raise refusal("not understood") from None
        if not named:
            raise refusal("names no layer; [] (--keep-layers none) keeps none")
        keep_layers = named
    if isinstance(keep_layers, bool):
        raise refusal("not understood")
    if isinstance(keep_layers, (int, float)):
        share = isinstance(keep_layers, float)
        if not 0 <= keep_layers <= (1 if share else num_layers):
            raise refusal("out of range")
        count = int(num_layers * keep_layers + 0.5) if share else int(keep_layers)
        return [(i + 1) * num_layers // count - 1 for i in range(count)]
    layers = list(keep_layers)
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in layers):
        raise refusal("layers are whole numbers")
    if outside := sorted(layer for layer in layers if not 0 <= layer < num_layers):
        raise refusal(f"{outside} out of range")
    if twice := sorted({layer for layer in layers if layers.count(layer) > 1}):
        raise refusal(f"{twice} given twice")
    return sorted(layers)


def parse_mixers(
    mixer: str | Sequence[str] | Mapping[int, str], keep_layers: Sequence[int], num_layers: int
) -> list[str]:
    """Say which mixer each physical layer gets, `"full"` for the kept ones.

    Args:
        mixer (`str`, `list[str]` or `dict[int, str]`): For the layers that are not kept, in their order: a name; a
            pattern such as `"gdn*3,dsa"`, repeated until all have one; a list with one name each; or a mapping from
            each of these layers to a name.
        keep_layers (`list[int]`): The layers that are kept.
        num_layers (`int`): N.

    Returns:
        `list[str]`: N names.

    Raises:
        ValueError: For an unknown mixer, or more or fewer of them than layers that are not kept.
    """
    converted = [layer for layer in range(num_layers) if layer not in set(keep_layers)]
    if isinstance(mixer, Mapping):
        if sorted(mixer) != converted:
            raise ValueError(
                f"mixer={mixer!r}: name a mixer for each layer that is not kept, {converted}, and no other"
            )
        names = [mixer[layer] for layer in converted]
    elif isinstance(mixer, str):
        try:
            # At least one layer, so that a pattern is checked even where all are kept.
            names = parse_layer_mixers(mixer, max(1, len(converted)))
        except ValueError as error:
            raise ValueError(f"mixer={mixer!r} is not understood; allowed: {_allowed()} ({error})") from None
    else:
        names = list(mixer)
        if len(names) != len(converted):
            raise ValueError(
                f"mixer has {len(names)} names, but {len(converted)} layers are not kept: {converted}; give one each"
            )
    for name in names:
        if name not in MIXER_OPTIONS:
            raise ValueError(f"mixer={name!r} is unknown for a layer that is not kept; allowed: {_allowed()}")
    by_layer = dict(zip(converted, names, strict=False))
    return [by_layer.get(layer, "full") for layer in range(num_layers)]


def _allowed() -> str:
    return f"{', '.join(MIXER_OPTIONS)}, or a pattern of them such as 'gdn*3,dsa'"


def student_config(
    teacher_config: PreTrainedConfig,
    keep_layers: Sequence[int] | str | int | float,
    mixer: str | Sequence[str] | Mapping[int, str] = "gdn",
    **mixer_options: Any,
) -> LT2Config:
    """Describe the student: the teacher's architecture with other mixers in every layer that is not kept.

    No residual gate and no attention gate are added, so that with all layers kept the student is the teacher.
    Everything the two configs share (rotary settings, loops, exit threshold, token ids, ...) is carried over; Ouro's
    shipped token ids 0/0/0 become 1/2/0.

    Args:
        teacher_config (`PreTrainedConfig`): Config of an Ouro or Llama-shaped model.
        keep_layers (`list[int]`, `str`, `int` or `float`): See `parse_keep_layers`.
        mixer (`str`, `list[str]` or `dict[int, str]`): See `parse_mixers`.
        mixer_options: Fields of the mixers, see `MIXER_OPTIONS`.

    Returns:
        `LT2Config`: For `LT2ForCausalLM`.

    Raises:
        ConversionError: For a teacher that is not supported.
        ValueError: For wrong layers, mixers or options.
    """
    check_teacher_config(teacher_config)
    num_layers = teacher_config.num_hidden_layers
    layer_mixers = parse_mixers(mixer, parse_keep_layers(keep_layers, num_layers), num_layers)
    used = list(dict.fromkeys(name for name in layer_mixers if name != "full"))
    # Where all layers are kept, a single name still says whose fields the config describes.
    described = used or ([mixer] if isinstance(mixer, str) and mixer in MIXER_OPTIONS else [])
    options = _options(described, mixer_options)
    looped = teacher_config.model_type == "ouro"
    values = {
        field.name: copy.deepcopy(value)
        for field in fields(LT2Config)
        if field.name not in _NOT_CARRIED and (value := _read(teacher_config, field.name)) is not None
    }
    for name in described:
        values |= _mixer_sizes(name, values)
    values.update(
        num_loops=_read(teacher_config, "num_loops") if looped else 1,
        layer_mixers=layer_mixers,
        block_style="sandwich" if looped else "pre",
        norm_cast="before_weight",
        norm_between_loops=looped,
        early_exit_gate=looped,
        use_loop_residual=False,
        attn_output_gate=False,
        bos_token_id=teacher_config.bos_token_id,
        eos_token_id=teacher_config.eos_token_id,
        pad_token_id=teacher_config.pad_token_id,
        **{name: value for name, value in options.items() if value is not None},
    )
    _check_fit(used, values)
    config = LT2Config(**values)
    if looped:
        repair_special_tokens(config)
    config._attn_implementation = teacher_config._attn_implementation
    return config


def _options(mixers: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of these mixers, the given ones over the defaults."""
    options = {key: value for name in mixers for key, value in MIXER_OPTIONS[name].items()}
    unknown = sorted(set(given) - set(options))
    if elsewhere := [name for name, own in MIXER_OPTIONS.items() if set(unknown) & set(own)]:
        used = ", ".join(mixers) or "none, as all are kept"
        raise ValueError(f"no layer gets the mixer of {unknown}, {' or '.join(elsewhere)}; they get {used}")
    if unknown:
        raise ValueError(f"unknown option(s) {unknown} for mixer {', '.join(mixers)!r}; allowed: {', '.join(options)}")
    return options | dict(given)


def _check_fit(mixers: Sequence[str], values: Mapping[str, Any]) -> None:
    """Refuse what a mixer cannot take over from the teacher, or lacks."""
    if "window" in mixers and not values.get("sliding_window"):
        raise ValueError(
            'mixer="window" needs sliding_window=<tokens>, e.g. sliding_window=512 (--set sliding_window=512)'
        )
    bare = sorted(set(mixers) & set(_WITHOUT_BIAS))
    if bare and values.get("attention_bias"):
        raise ConversionError(
            f"the teacher has biases on q, k, v and o (attention_bias=True), which {' and '.join(bare)} layers do not "
            f"have; choose other mixers: {', '.join(name for name in MIXER_OPTIONS if name not in _WITHOUT_BIAS)}"
        )
    if "dsa" in mixers and values["dsa_latent_dim"] > values["hidden_size"]:
        raise ValueError(
            f"dsa_latent_dim={values['dsa_latent_dim']} is more than hidden_size={values['hidden_size']}, which holds "
            "all keys and values already"
        )


def _mixer_sizes(mixer: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that give a mixer the sizes of the teacher's attention."""
    heads, key_heads = values["num_attention_heads"], values["num_key_value_heads"]
    head_dim, hidden = values["head_dim"], values["hidden_size"]
    if mixer == "window":
        return {}
    if mixer == "nsa":
        return {"nsa_num_key_value_heads": key_heads}
    if mixer == "dsa":
        # Values, and the keys without positions, need (2 * key_heads - 1) * head_dim; more than 512 is much to cache.
        latent = min((2 * key_heads - 1) * head_dim, hidden, max(512, head_dim))
        return {"dsa_latent_dim": latent, "dsa_tail_dim": head_dim, "dsa_rope": True}
    if mixer == "mamba2":
        expand, rest = divmod(heads * head_dim, hidden)
        expand = heads * head_dim / hidden if rest else expand
        return {"mamba2_num_heads": heads, "mamba2_expand": expand, "mamba2_state_size": head_dim}
    return {f"{mixer}_num_heads": heads, f"{mixer}_head_dim": head_dim, f"{mixer}_expand_v": 1}


def _read(config: PreTrainedConfig, name: str) -> Any:
    value = getattr(config, name, None)
    if name == "head_dim" and value is None:
        return config.hidden_size // config.num_attention_heads
    return value


def _meaning(name: str) -> Iterable[str]:
    return (text for pattern, text in _UNSUPPORTED_TENSORS.items() if re.search(pattern, name))


def _supported() -> str:
    return "supported are Ouro and models that compute what LlamaForCausalLM computes"
