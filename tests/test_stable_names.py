# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What other runtimes read stays as it is: keys of `config.json`, names and shapes of tensors, and what they mean.

A change here breaks ports and saved models. If it is meant, raise the version and write the files anew:
`LOOPERGY_WRITE_NAMES=1 pytest tests/test_stable_names.py`.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import loopergy

FOLDER = Path(__file__).resolve().parent / "golden/names"
MIXERS = "full,window,gdn,kda,deltanet,mamba2,hgrn2,retnet,gla,la,nsa,dsa"
MODELS = {
    "ouro": ("Ouro", {}),
    "lt2": (
        "LT2",
        {"layer_mixers": MIXERS, "num_hidden_layers": 12, "sliding_window": 8, "early_exit_gate": True},
    ),
    "cem_llama": ("CEMLlama", {"cem_diag": "per_head", "cem_precond": "dlr", "cem_learn_step_size": True}),
    "nrgpt": ("NRGPT", {}),
    "gpt_baseline": ("GPTBaseline", {}),
}
# Written by transformers, and different with its version, the machine or the moment.
NOT_OURS = ("transformers_version", "dtype", "architectures")


def describe(name: str) -> dict:
    """Return what a saved model of the family shows."""
    prefix, fields = MODELS[name]
    config = getattr(loopergy, f"{prefix}Config").from_preset("tiny", **fields)
    with torch.device("meta"):
        model = getattr(loopergy, f"{prefix}ForCausalLM")(config)
    keys = {key: value for key, value in config.to_dict().items() if key not in NOT_OURS}
    return {
        "version": loopergy.__version__,
        "config": sorted(keys),
        "tensors": {key: list(tensor.shape) for key, tensor in sorted(model.state_dict().items())},
    }


@pytest.mark.parametrize("name", MODELS)
def test_config_keys_and_tensors_are_those_on_file(name):
    """Guards K4."""
    file, now = FOLDER / f"{name}.json", describe(name)
    if os.environ.get("LOOPERGY_WRITE_NAMES"):
        file.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    stored = json.loads(file.read_text("utf-8"))
    for part in ("config", "tensors"):
        assert now[part] == stored[part], (
            f"{part} of {name} changed since version {stored['version']}: see the file's head"
        )


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, base):
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)


def ouro_in_numpy(folder: Path, ids: list[int]) -> np.ndarray:
    """Compute Ouro's logits from a saved folder, with nothing but numpy."""
    config, weights = json.loads((folder / "config.json").read_text("utf-8")), load_file(folder / "model.safetensors")
    eps, size = config["rms_norm_eps"], config["head_dim"]
    heads, shared = config["num_attention_heads"], config["num_attention_heads"] // config["num_key_value_heads"]
    x = weights["model.embed_tokens.weight"][ids]
    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for _ in range(config["total_ut_steps"]):
        for layer in range(config["num_hidden_layers"]):
            w = {key[len(f"model.layers.{layer}.") : -7]: t for key, t in weights.items() if f"layers.{layer}." in key}
            n = rms(x, w["input_layernorm"], eps)
            q, k, v = ((n @ w[f"self_attn.{p}_proj"].T).reshape(len(ids), -1, size) for p in "qkv")
            q, k = (rotate(part, config["rope_parameters"]["rope_theta"]) for part in (q, k))
            k, v = np.repeat(k, shared, 1), np.repeat(v, shared, 1)
            scores = np.einsum("ihd,jhd->hij", q, k) / size**0.5 + future
            share = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("hij,jhd->ihd", share / share.sum(-1, keepdims=True), v).reshape(len(ids), heads * size)
            x = x + rms(mixed @ w["self_attn.o_proj"].T, w["input_layernorm_2"], eps)
            n = rms(x, w["post_attention_layernorm"], eps)
            gate = n @ w["mlp.gate_proj"].T
            inner = gate / (1 + np.exp(-gate)) * (n @ w["mlp.up_proj"].T)
            x = x + rms(inner @ w["mlp.down_proj"].T, w["post_attention_layernorm_2"], eps)
        x = rms(x, weights["model.norm.weight"], eps)
    return x @ weights["lm_head.weight"].T


def test_thirty_lines_of_numpy_read_a_saved_ouro(tmp_path):
    """Guards K4."""
    config = loopergy.OuroConfig.from_preset("tiny", num_loops=3, initializer_range=0.2)
    model = loopergy.OuroForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ids = [5, 9, 33, 17, 64, 2, 71]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(torch.from_numpy(ouro_in_numpy(tmp_path, ids)).float(), expected, rtol=1e-4, atol=1e-4)
