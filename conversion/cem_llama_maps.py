# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""Turn a CEM-Llama into a stock Llama that computes the same, and a Llama whose weights are tied into a CEM-Llama.

One step without diagonal, with plain RoPE values, is a Llama layer with

    v = W_K,   o = eta P W_Q^T,   q = W_Q sqrt(d) / tau,
    form A:  gate = W,    up = W_G,  down = eta P W^T
    form B:  gate = W_G,  up = W,    down = eta P W^T

P and eta fold into the output matrices. Rotated values, a diagonal and further steps have no place in a Llama.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from loopergy.configuration.configuration_cem_llama import CEMLlamaConfig
from loopergy.conversion.errors import ConversionError
from loopergy.modeling.causal_energies import EnergyDescent
from loopergy.modeling.modeling_cem_llama import CEMMLP, CEMAttention, CEMLlamaForCausalLM

# Fields that mean the same in both configs.
_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range"),
    *("rms_norm_eps", "use_cache", "rope_parameters", "attention_bias", "attention_dropout", "mlp_bias"),
    *("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
)


def cem_to_llama(model: CEMLlamaForCausalLM) -> LlamaForCausalLM:
    """Export a CEM-Llama as a stock Llama with equal outputs, where there is one.

    Args:
        model ([`CEMLlamaForCausalLM`]): CEM sub-layers take one step, not through the norm's Jacobian; CEM attention
            has no diagonal, and plain RoPE values. Preconditioners, step sizes, temperatures, untied matrices and
            biases may be any.

    Returns:
        `LlamaForCausalLM`: of the same type and device, in eval mode. It has v_proj, o_proj and down_proj of its own:
        more parameters, and a cache of two tensors, for the same function.

    Raises:
        ConversionError: if no Llama computes the same; the text names each field that stands in the way and what would
            have to change. Also for a model with adapters.
    """
    _check_merged(model)
    config = model.config
    obstacles = list(_obstacles(config))
    if obstacles:
        raise ConversionError("no stock Llama computes what this CEM-Llama does:\n- " + "\n- ".join(obstacles))
    llama = _empty(LlamaForCausalLM, LlamaConfig(**_shared_fields(config)), model)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".layers." not in name}
    layers: list[Any] = list(model.model.layers)
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}{name}.weight"] = getattr(layer, name).weight
        attention, mlp = layer.self_attn, layer.mlp
        parts = {
            "self_attn": _fold_attention(attention) if isinstance(attention, CEMAttention) else attention.state_dict(),
            "mlp": _fold_mlp(mlp) if isinstance(mlp, CEMMLP) else mlp.state_dict(),
        }
        for part, tensors in parts.items():
            state |= {f"{prefix}{part}.{name}": tensor for name, tensor in tensors.items()}
    return _loaded(llama, state, model)


def llama_to_cem(
    model: LlamaForCausalLM, cem_attention: bool = True, cem_mlp: bool = True, tolerance: float = 1e-6
) -> CEMLlamaForCausalLM:
    """Import a Llama as a CEM-Llama with equal outputs: its weights are tied already, or the sub-layer stays Llama's.

    The energy of an ordinary Llama does not exist, and copying half of its weights would give noise; such a sub-layer
    is kept as it is with `cem_attention=False` or `cem_mlp=False`, which any Llama allows.

    Args:
        model (`LlamaForCausalLM`): with `v_proj = k_proj` and `o_proj = q_proj^T` in all layers for CEM attention, and
            `down_proj = gate_proj^T` (form A) or `up_proj^T` (form B) in all layers for the CEM MLP.
        cem_attention, cem_mlp (`bool`): which sub-layers become energy steps.
        tolerance (`float`): largest difference of tied matrices, relative to the largest entry, that counts as equal.

    Returns:
        [`CEMLlamaForCausalLM`]: one step, plain RoPE values, no diagonal; of the same type and device, in eval mode.

    Raises:
        ConversionError: if the weights are not tied, with the first layer and matrix that differ and by how much. Also
            for a model with adapters.
    """
    _check_merged(model)
    layers: list[Any] = list(model.model.layers)
    form = _mlp_form(layers, tolerance) if cem_mlp else "tied"
    config = CEMLlamaConfig(
        **_shared_fields(model.config),
        cem_attention=cem_attention,
        cem_mlp=cem_mlp,
        cem_diag="none",
        cem_rope_values="plain",
        cem_mlp_act_on=form,
    )
    state = dict(model.state_dict())
    for index, layer in enumerate(layers):
        attention, prefix = layer.self_attn, f"model.layers.{index}."
        if cem_attention:
            where = f"layer {index}: v_proj and k_proj"
            _check_tie(attention.v_proj.weight, attention.k_proj.weight, where, "cem_attention", tolerance)
            where = f"layer {index}: o_proj and the transpose of q_proj"
            _check_tie(attention.o_proj.weight, attention.q_proj.weight.T, where, "cem_attention", tolerance)
            if attention.o_proj.bias is not None:
                where = f"layer {index}: the bias of o_proj and zero"
                _check_tie(attention.o_proj.bias, 0 * attention.o_proj.bias, where, "cem_attention", tolerance)
                where = f"layer {index}: the biases of v_proj and k_proj"
                _check_tie(attention.v_proj.bias, attention.k_proj.bias, where, "cem_attention", tolerance)
        for part, chosen in (("self_attn", cem_attention), ("mlp", cem_mlp)):
            for name in ("v_proj", "o_proj", "down_proj") if chosen else ():
                state.pop(f"{prefix}{part}.{name}.weight", None)
                state.pop(f"{prefix}{part}.{name}.bias", None)
        if cem_mlp and form == "tied":  # the two papers swap these names: our up_proj has the activation
            for kind in ("weight", "bias") if model.config.mlp_bias else ("weight",):
                up, gate = f"{prefix}mlp.up_proj.{kind}", f"{prefix}mlp.gate_proj.{kind}"
                state[up], state[gate] = state[gate], state[up]
    return _loaded(_empty(CEMLlamaForCausalLM, config, model), state, model)


def _shared_fields(config: Any) -> dict[str, Any]:
    return {name: copy.deepcopy(getattr(config, name)) for name in _SHARED}


def _check_merged(model: Any) -> None:
    """Refuse a model with adapters, whose layers are not the ones whose weights are copied."""
    if hasattr(model, "peft_config"):
        raise ConversionError(
            f"{type(model).__name__} has adapters: merge them first, with model.merge_and_unload() of a peft model."
        )


def _obstacles(config: CEMLlamaConfig) -> Iterator[str]:
    """Say what a Llama cannot do, and what to change."""
    if config.cem_norm_mode == "exact_jacobian" and (config.cem_attention or config.cem_mlp):
        yield (
            "cem_norm_mode='exact_jacobian': a Llama does not pull its update back through the norm. Train with "
            "cem_norm_mode='once'."
        )
    if config.cem_attention:
        if config.cem_attn_steps != 1:
            yield f"cem_attn_steps={config.cem_attn_steps}: a Llama layer takes one step. Load with num_steps=1."
        if config.cem_diag != "none":
            yield (
                f"cem_diag={config.cem_diag!r}: a Llama's scores have no diagonal part. Train with cem_diag='none', "
                "or drop small diagonals by loading with cem_diag='none', which changes the outputs."
            )
        if config.cem_rope_values != "plain":
            yield (
                f"cem_rope_values={config.cem_rope_values!r}: a Llama's values are not rotated. Train with "
                "cem_rope_values='plain'."
            )
    if config.cem_mlp and config.cem_mlp_steps != 1:
        yield f"cem_mlp_steps={config.cem_mlp_steps}: a Llama layer takes one step. Load with num_steps=1."


@torch.no_grad()
def _folded(descent: EnergyDescent, matrix: torch.Tensor) -> torch.Tensor:
    """Return eta P M for an output matrix M (D, *)."""
    size = descent.initial_step_size if descent.step_size is None else descent.step_size
    return size * (matrix if descent.precond is None else descent.precond(matrix.T).T)


@torch.no_grad()
def _fold_attention(attention: CEMAttention) -> dict[str, torch.Tensor]:
    value = attention.k_proj if attention.v_proj is None else attention.v_proj
    output = attention.q_proj.weight.T if attention.o_proj is None else attention.o_proj.weight
    sharpness = attention.head_dim**0.5 / attention.temperature
    tensors = {
        "q_proj.weight": attention.q_proj.weight * sharpness,
        "k_proj.weight": attention.k_proj.weight,
        "v_proj.weight": value.weight,
        "o_proj.weight": _folded(attention.descent, output),
    }
    if attention.q_proj.bias is not None:
        tensors |= {"q_proj.bias": attention.q_proj.bias * sharpness, "k_proj.bias": attention.k_proj.bias}
        tensors |= {"v_proj.bias": value.bias, "o_proj.bias": torch.zeros_like(output[:, 0])}
    return tensors


@torch.no_grad()
def _fold_mlp(mlp: CEMMLP) -> dict[str, torch.Tensor]:
    activated, other = (mlp.gate_proj, mlp.up_proj) if mlp.act_on_gate else (mlp.up_proj, mlp.gate_proj)
    down = mlp.up_proj.weight.T if mlp.down_proj is None else mlp.down_proj.weight
    tensors = {"gate_proj.weight": activated.weight, "up_proj.weight": other.weight}
    tensors["down_proj.weight"] = _folded(mlp.descent, down)
    if activated.bias is not None:
        tensors |= {"gate_proj.bias": activated.bias, "up_proj.bias": other.bias}
        tensors["down_proj.bias"] = torch.zeros_like(down[:, 0])
    return tensors


def _mlp_form(layers: list[Any], tolerance: float) -> str:
    """Return where the activation of a tied MLP is: `"tied"` if down = gate^T, `"gate"` if down = up^T."""
    first = layers[0].mlp
    form = "tied" if _difference(first.down_proj.weight, first.gate_proj.weight.T) <= tolerance else "gate"
    for index, layer in enumerate(layers):
        mlp = layer.mlp
        tied, name = (mlp.gate_proj, "gate_proj") if form == "tied" else (mlp.up_proj, "up_proj")
        where = f"layer {index}: down_proj and the transpose of {name}"
        _check_tie(mlp.down_proj.weight, tied.weight.T, where, "cem_mlp", tolerance)
        if mlp.down_proj.bias is not None:
            where = f"layer {index}: the bias of down_proj and zero"
            _check_tie(mlp.down_proj.bias, 0 * mlp.down_proj.bias, where, "cem_mlp", tolerance)
    return form


def _difference(first: torch.Tensor, second: torch.Tensor) -> float:
    largest = first.detach().abs().max().clamp(min=torch.finfo(first.dtype).tiny)
    return float((first - second).detach().abs().max() / largest)


def _check_tie(first: torch.Tensor, second: torch.Tensor, where: str, switch: str, tolerance: float) -> None:
    difference = _difference(first, second)
    if not difference <= tolerance:
        raise ConversionError(
            f"{where} differ by {difference:.2g} of the largest entry (allowed: {tolerance:g}). This sub-layer "
            f"descends no energy; keep it as Llama's own with {switch}=False."
        )


def _empty(kind: type[nn.Module], config: LlamaConfig | CEMLlamaConfig, like: Any) -> Any:
    parameter = next(like.parameters())
    config._attn_implementation = like.config._attn_implementation
    return kind(config).to(device=parameter.device, dtype=parameter.dtype)


def _loaded(model: Any, state: dict[str, torch.Tensor], like: Any) -> Any:
    """Fill all tensors, by copy; take over the generation config."""
    model.load_state_dict(state)
    model.generation_config = copy.deepcopy(like.generation_config)
    return model.eval()
