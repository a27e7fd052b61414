# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Read and write checkpoints of the official NRGPT code (github.com/bhoov/nrgpt), its baselines included.

Two kinds of file: the language models' (a dictionary with `model`, `model_args` and more) and ListOps' (the bare state
dict). Both hold mask and position buffers, which tell the mask and are otherwise dropped. Official words: `n_layer` is
steps, `block_size` the length of the position table, `tril_plus_one` is `exclude_self`.

    official                                 here
    token_embedding_table.weight             model.embed_tokens.weight
    position_embedding_table.weight          model.embed_positions.weight
    blocks.attn.heads.{h}.H.weight           model.block.attn.k_proj.weight, row block h
    blocks.ffwd.net.{0,2}.*                  model.block.ff.fc{1,2}.*
    blocks.proj.weight, blocks.scale_ff      model.block.eta.weight, model.block.scale_ff
    blocks.ln.bias (blocks.ln.weight is 1)   model.block.norm.bias
    ln_f.*, lm_head.*                        model.norm.*, lm_head.*
    blocks[.{l}].sa.heads.{h}.key.weight     model.layers.{l}.self_attn.k_proj.weight, row block h; query, value too
    blocks[.{l}].sa.proj.*, ffwd.net.*       model.layers.{l}.self_attn.o_proj.*, mlp.fc{1,2}.*
    blocks[.{l}].ln{1,2}.*                   model.layers.{l}.{input,post_attention}_layernorm.*
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from loopergy.configuration.configuration_gpt_baselines import GPTBaselineConfig
from loopergy.configuration.configuration_nrgpt import NRGPTConfig
from loopergy.conversion.config_fields import check_field_names
from loopergy.conversion.errors import ConversionError
from loopergy.conversion.tensor_files import read_tensor_file
from loopergy.conversion.whole_loading import checked_dtype
from loopergy.modeling.modeling_gpt_baselines import GPTBaselineForCausalLM
from loopergy.modeling.modeling_nrgpt import NRGPTForCausalLM

Source = str | os.PathLike | Mapping[str, Any]
Tensors = dict[str, torch.Tensor]

_FRAME = {
    "token_embedding_table.weight": "model.embed_tokens.weight",
    "position_embedding_table.weight": "model.embed_positions.weight",
    "ln_f.weight": "model.norm.weight",
    "ln_f.bias": "model.norm.bias",
    "lm_head.weight": "lm_head.weight",
    "lm_head.bias": "lm_head.bias",
}
_ENERGY_BLOCK = {
    "blocks.attn.heads.*.H.weight": "model.block.attn.k_proj.weight",
    "blocks.ffwd.net.0.weight": "model.block.ff.fc1.weight",
    "blocks.ffwd.net.0.bias": "model.block.ff.fc1.bias",
    "blocks.ffwd.net.2.weight": "model.block.ff.fc2.weight",
    "blocks.ffwd.net.2.bias": "model.block.ff.fc2.bias",
    "blocks.ln.bias": "model.block.norm.bias",
    "blocks.proj.weight": "model.block.eta.weight",
    "blocks.scale_ff": "model.block.scale_ff",
}
_BASELINE_LAYER = {
    "sa.heads.*.query.weight": "self_attn.q_proj.weight",
    "sa.heads.*.key.weight": "self_attn.k_proj.weight",
    "sa.heads.*.value.weight": "self_attn.v_proj.weight",
    "sa.proj.weight": "self_attn.o_proj.weight",
    "sa.proj.bias": "self_attn.o_proj.bias",
    "ffwd.net.0.weight": "mlp.fc1.weight",
    "ffwd.net.0.bias": "mlp.fc1.bias",
    "ffwd.net.2.weight": "mlp.fc2.weight",
    "ffwd.net.2.bias": "mlp.fc2.bias",
    "ln1.weight": "input_layernorm.weight",
    "ln1.bias": "input_layernorm.bias",
    "ln2.weight": "post_attention_layernorm.weight",
    "ln2.bias": "post_attention_layernorm.bias",
}
_RECURRENCE_OF = {"GPT": "none", "GPT_Rec": "sequential", "GPT_Rec_parallel": "parallel"}
# Buffers, and the norm's scale, which is ones: rebuilt on the way back.
_CONSTANT = re.compile(r"pos_idx|blocks\..*\.tril|blocks\.ln\.weight")


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint as read: its tensors under plain official names, and what was stored beside them."""

    tensors: Tensors
    model_args: dict[str, Any] = field(default_factory=dict)
    model_class: str | None = None

    def shape(self, name: str) -> tuple[int, int]:
        """Return the shape of a matrix that must be there."""
        if name not in self.tensors:
            raise ConversionError(f"the checkpoint has no {name!r}: not a model of the official NRGPT code")
        if self.tensors[name].dim() != 2:
            raise ConversionError(f"{name!r} has shape {list(self.tensors[name].shape)}, but must be a matrix")
        rows, columns = self.tensors[name].shape
        return rows, columns

    def heads(self, pattern: str) -> int:
        """Count the heads whose matrices are named like `pattern`."""
        return sum(1 for name in self.tensors if re.fullmatch(pattern, name))

    def steps(self, num_hidden_layers: int | None) -> int:
        """Return the number of steps: as given, or as written beside the tensors, which do not tell it."""
        steps = self.model_args.get("n_layer") if num_hidden_layers is None else num_hidden_layers
        if steps is None:
            raise ConversionError(
                "the number of steps is neither in the tensors nor beside them: pass num_hidden_layers= (--set "
                "num_hidden_layers=; n_layer of the official config; 5 for the ListOps width sweep, 30 for the deep "
                "ListOps run)"
            )
        return steps


def nrgpt_from_official(
    source: Source,
    num_hidden_layers: int | None = None,
    exclude_self: bool | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    **fields: Any,
) -> NRGPTForCausalLM:
    """Build an NRGPT from a checkpoint of the official code.

    Args:
        source: path of a `.pt` file, which is read with `weights_only=True`; or what is in one: the dictionary of a
            language-model run, or a bare state dict. Prefixes `_orig_mod.` and `module.` are taken off.
        num_hidden_layers (`int`, *optional*): steps. Needed for bare state dicts, whose tensors do not tell it;
            otherwise `n_layer` of `model_args`.
        exclude_self (`bool`, *optional*): `tril_plus_one`. Needed only where neither a mask buffer nor `model_args`
            tells it.
        dtype (`torch.dtype` or `str`, *optional*): type of the weights; that of the checkpoint by default.
        **fields: further fields of [`NRGPTConfig`], such as `dropout` or `eos_token_id`.

    Returns:
        `NRGPTForCausalLM`: in eval mode.

    Raises:
        ConversionError: if the file is damaged; if tensors are missing, left over or of the wrong shape; or if
            something that they do not tell was not given.
        ValueError: for another dtype than a floating-point one, or a field that the config does not have.
    """
    check_field_names(NRGPTConfig, fields)
    dtype = checked_dtype(dtype)
    checkpoint = _read(source)
    if any(".sa." in name for name in checkpoint.tensors):
        raise ConversionError(
            "the checkpoint is a baseline (GPT, GPT_Rec or GPT_Rec_parallel): use gpt_baseline_from_official"
        )
    wide, size = checkpoint.shape("blocks.ffwd.net.0.weight")
    form = fields.pop("ff_energy", None) or _ff_energy(checkpoint)
    if form == "ff2":
        wide = checkpoint.shape("blocks.ffwd.net.2.weight")[0]
    scale = checkpoint.tensors.get("blocks.ln.weight")
    if scale is not None and not bool((scale == 1).all()):
        raise ConversionError("blocks.ln.weight is not all ones, which the official norm never changes")
    known = {
        "num_attention_heads": checkpoint.heads(r"blocks\.attn\.heads\.\d+\.H\.weight"),
        "intermediate_size": wide,
        "ff_energy": form,
        "exclude_self": _exclude_self(checkpoint, exclude_self),
        **_common_fields(checkpoint, size, num_hidden_layers),
    }
    model = NRGPTForCausalLM(NRGPTConfig(**{**known, **fields}))
    return _fill(model, checkpoint, {**_FRAME, **_ENERGY_BLOCK}, dtype)


def nrgpt_to_official(model: NRGPTForCausalLM) -> Tensors:
    """Return the state dict that the official code loads strictly, buffers included.

    Diagonal rates are written as the full matrix that they are. The number of steps is not in it: the official model
    has to be built with `n_layer=model.config.num_hidden_layers`.

    Raises:
        ConversionError: for what the official code cannot express: another norm or epsilon, beta or alpha other than
            1, the tangent projection, an early stop, a head without bias.
    """
    config = model.config
    _check_official(
        config,
        norm_type="bare_layernorm",
        layer_norm_eps=1e-5,
        attention_beta=1.0,
        learn_alpha=False,
        tangent_projection=False,
        stop_tolerance=None,
        lm_head_bias=True,
    )
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if config.eta_type != "full":
        size = config.hidden_size
        rate = state.pop("model.block.eta.weight", torch.ones(1, dtype=model.dtype, device=model.device)).square()
        state["model.block.eta.weight"] = torch.diag(rate.expand(size)).clone()
    tensors = _split(state, {**_FRAME, **_ENERGY_BLOCK}, config.num_attention_heads)
    length = config.max_position_embeddings
    mask = torch.ones(length, length, device=model.device).tril(-int(config.exclude_self))
    tensors["pos_idx"] = torch.arange(length, device=model.device)
    tensors["blocks.ln.weight"] = torch.ones_like(tensors["blocks.ln.bias"])
    for head in range(config.num_attention_heads):
        tensors[f"blocks.attn.heads.{head}.tril"] = mask.clone()
    return tensors


def gpt_baseline_from_official(
    source: Source,
    num_hidden_layers: int | None = None,
    recurrence: str | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    **fields: Any,
) -> GPTBaselineForCausalLM:
    """Build a baseline (`GPT`, `GPT_Rec`, `GPT_Rec_parallel`) from a checkpoint of the official code.

    Args:
        source, num_hidden_layers: as in [`nrgpt_from_official`]; a `GPT` tells its number of layers.
        recurrence (`str`, *optional*): `"sequential"` or `"parallel"`; needed where the file does not name its class,
            since both have the same tensors.
        dtype: as in [`nrgpt_from_official`].
        **fields: further fields of [`GPTBaselineConfig`].

    Raises:
        ConversionError, ValueError: as [`nrgpt_from_official`].
    """
    check_field_names(GPTBaselineConfig, fields)
    dtype = checked_dtype(dtype)
    checkpoint = _read(source)
    if not any(".sa." in name for name in checkpoint.tensors):
        raise ConversionError("the checkpoint has no blocks.*.sa.*: not a baseline of the official NRGPT code")
    layers = {int(found[1]) for name in checkpoint.tensors if (found := re.match(r"blocks\.(\d+)\.", name))}
    told = "none" if layers else _RECURRENCE_OF.get(checkpoint.model_class or "")
    if told is not None and recurrence is not None and told != recurrence:
        raise ConversionError(f"recurrence={recurrence!r} was given, but the checkpoint is {told!r}")
    if (told or recurrence) is None:
        raise ConversionError(
            "GPT_Rec and GPT_Rec_parallel have the same tensors: pass recurrence='sequential' or 'parallel'"
        )
    first = "blocks.0." if layers else "blocks."
    wide, size = checkpoint.shape(f"{first}ffwd.net.0.weight")
    known = {
        "recurrence": told or recurrence,
        "num_attention_heads": checkpoint.heads(re.escape(first) + r"sa\.heads\.\d+\.key\.weight"),
        "intermediate_size": wide,
        **_common_fields(checkpoint, size, len(layers) or num_hidden_layers),
    }
    model = GPTBaselineForCausalLM(GPTBaselineConfig(**{**known, **fields}))
    return _fill(model, checkpoint, _baseline_names(model.config), dtype)


def gpt_baseline_to_official(model: GPTBaselineForCausalLM) -> Tensors:
    """Return the state dict that the official code loads strictly, buffers included.

    Raises:
        ConversionError: for what the official code cannot express: another activation or epsilon, a head without bias.
    """
    config = model.config
    _check_official(config, hidden_act="relu", layer_norm_eps=1e-5, lm_head_bias=True)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    tensors = _split(state, _baseline_names(config), config.num_attention_heads)
    length = config.max_position_embeddings
    tensors["pos_idx"] = torch.arange(length, device=model.device)
    mask = torch.ones(length, length, device=model.device).tril()
    for name in [name for name in tensors if name.endswith("key.weight")]:
        tensors[name.replace("key.weight", "tril")] = mask.clone()
    return tensors


def _check_official(config: GPTBaselineConfig | NRGPTConfig, **wanted: Any) -> None:
    """Refuse a config with other values than those that are fixed in the official code and not stored in its files."""
    foreign = [f"{name}={getattr(config, name)!r}" for name, value in wanted.items() if getattr(config, name) != value]
    if foreign:
        raise ConversionError(f"the official code has no {', '.join(foreign)}")


def _read(source: Source) -> _Checkpoint:
    """Read a file, or take what was in one, and strip the prefixes of compilation and data parallelism."""
    content: Any = read_tensor_file(source) if isinstance(source, str | os.PathLike) else source
    if not isinstance(content, Mapping):
        raise ConversionError(f"source is a {type(content).__name__}: pass the path of a .pt file, or a dictionary")
    args, model_class = {}, None
    if isinstance(content.get("model"), Mapping):
        args = content.get("model_args") or {}
        if not isinstance(args, Mapping):
            raise ConversionError(f"model_args is a {type(args).__name__}, not a dictionary")
        run = content.get("config")
        if isinstance(run, Mapping) and isinstance(run.get("model_path"), str):
            model_class = run["model_path"].rpartition(".")[2]
        content = content["model"]
    tensors = {}
    for name, value in content.items():
        plain = re.sub(r"^(_orig_mod\.|module\.)+", "", str(name))
        if not isinstance(value, torch.Tensor) or plain in tensors:
            raise ConversionError(f"{name!r} is not a tensor, or is there twice: not a state dict")
        tensors[plain] = value
    return _Checkpoint(tensors, dict(args), model_class)


def _common_fields(checkpoint: _Checkpoint, size: int, num_hidden_layers: int | None) -> dict[str, Any]:
    """Return the config fields that all official models share; special tokens are those of the known vocabularies."""
    vocab_size = checkpoint.shape("token_embedding_table.weight")[0]
    end_of_text = {50304: 50256, 20: 0}.get(vocab_size)
    return {
        "vocab_size": vocab_size,
        "hidden_size": size,
        "num_hidden_layers": checkpoint.steps(num_hidden_layers),
        "max_position_embeddings": checkpoint.shape("position_embedding_table.weight")[0],
        "dropout": checkpoint.model_args.get("dropout", 0.0),
        "bos_token_id": end_of_text if vocab_size == 50304 else None,
        "eos_token_id": end_of_text,
    }


def _ff_energy(checkpoint: _Checkpoint) -> str:
    """Tell the feed-forward energy from the shapes, or from the class name where the shapes fit two."""
    if "blocks.ffwd.net.2.weight" not in checkpoint.tensors:
        return "ff1"
    first, second = checkpoint.shape("blocks.ffwd.net.0.weight"), checkpoint.shape("blocks.ffwd.net.2.weight")
    square = first[0] == first[1]
    if not square or second[0] != second[1]:
        return "ff2" if square else "ff2w"
    named = (checkpoint.model_class or "").removeprefix("NRGPT_H_").lower()
    if named not in ("ff2", "ff2w"):
        raise ConversionError(
            "with ff_hid_factor 1 the tensors fit both forms: pass ff_energy='ff2' or 'ff2w' (--set)"
        )
    return named


def _exclude_self(checkpoint: _Checkpoint, given: bool | None) -> bool:
    """Tell the mask from a buffer, or from the arguments beside the tensors, or else from what was given."""
    buffer = checkpoint.tensors.get("blocks.attn.heads.0.tril")
    told = checkpoint.model_args.get("tril_plus_one") if buffer is None else not bool(buffer[0, 0])
    if told is None and given is None:
        raise ConversionError(
            "the checkpoint has no mask buffer: pass exclude_self=True (tril_plus_one, as for ListOps) or False (the "
            "default of the official code, as for Shakespeare and OpenWebText); in a command --set exclude_self=..."
        )
    if told is not None and given is not None and told != given:
        raise ConversionError(f"exclude_self={given} was given, but the checkpoint says {told}")
    return bool(given if told is None else told)


def _baseline_names(config: GPTBaselineConfig) -> dict[str, str]:
    """Return official name -> ours, `*` standing for the head."""
    names = dict(_FRAME)
    for layer in range(config.num_hidden_layers if config.recurrence == "none" else 1):
        official = f"blocks.{layer}." if config.recurrence == "none" else "blocks."
        names |= {official + theirs: f"model.layers.{layer}.{ours}" for theirs, ours in _BASELINE_LAYER.items()}
    return names


def _fill(model: Any, checkpoint: _Checkpoint, names: dict[str, str], dtype: torch.dtype | None) -> Any:
    """Put the checkpoint's tensors into the model, heads stacked; every tensor must find its place."""
    skeleton = model.state_dict()
    left = {name: tensor for name, tensor in checkpoint.tensors.items() if not _CONSTANT.fullmatch(name)}
    state, missing = {}, []
    for theirs, ours in names.items():
        if ours not in skeleton:
            continue
        count = model.config.num_attention_heads if "*" in theirs else 1
        wanted = [theirs.replace("*", str(head)) for head in range(count)]
        missing += [name for name in wanted if name not in left]
        parts = [left.pop(name) for name in wanted if name in left]
        if len(parts) == count:
            state[ours] = torch.cat(parts) if count > 1 else parts[0].clone()
    if missing or left:
        raise ConversionError(f"tensors missing: {missing or 'none'}; tensors left over: {sorted(left) or 'none'}")
    for name, tensor in state.items():
        if tensor.shape != skeleton[name].shape:
            raise ConversionError(
                f"{name} would have shape {list(tensor.shape)} instead of {list(skeleton[name].shape)}"
            )
    model.to(dtype or state["model.embed_tokens.weight"].dtype).load_state_dict(state)
    return model.eval()


def _split(state: Tensors, names: dict[str, str], heads: int) -> Tensors:
    """Give our tensors their official names, stacked heads taken apart."""
    tensors = {}
    for theirs, ours in names.items():
        if ours not in state:
            continue
        if "*" not in theirs:
            tensors[theirs] = state[ours]
            continue
        for head, part in enumerate(state[ours].chunk(heads)):
            tensors[theirs.replace("*", str(head))] = part.clone()
    return tensors
