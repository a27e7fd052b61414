# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Costs from the config alone are those of a real model with a real cache."""

import pytest
import torch

from loopergy import (
    CEMLlamaConfig,
    CEMLlamaForCausalLM,
    GPTBaselineConfig,
    LT2Config,
    LT2ForCausalLM,
    NRGPTConfig,
    NRGPTForCausalLM,
    OuroConfig,
    OuroForCausalLM,
)
from loopergy.describe import describe_cost, find_config, model_cost, slot_table

MODELS = {
    "ouro": (OuroForCausalLM, OuroConfig.from_preset("tiny")),
    "ouro-shared": (OuroForCausalLM, OuroConfig.from_preset("tiny", kv_sharing="last")),
    "hybrid": (LT2ForCausalLM, LT2Config.from_preset("tiny", layer_mixers="gdn,full", num_hidden_layers=4)),
    "cem": (CEMLlamaForCausalLM, CEMLlamaConfig.from_preset("tiny", cem_diag="none")),
    "cem-diagonal": (CEMLlamaForCausalLM, CEMLlamaConfig.from_preset("tiny", cem_diag="shared", num_steps=2)),
    "nrgpt": (NRGPTForCausalLM, NRGPTConfig.from_preset("tiny")),
    "linear": (LT2ForCausalLM, LT2Config.from_preset("tiny", layer_mixers="kda,mamba2,retnet,full")),
    "sparse": (LT2ForCausalLM, LT2Config.from_preset("tiny", layer_mixers="nsa,dsa", nsa_block_size=4, dsa_topk=8)),
    "window": (LT2ForCausalLM, LT2Config.from_preset("tiny", layer_mixers="window,full", sliding_window=9)),
}


def held_bytes(cache) -> int:
    """Add up the bytes of everything in a cache."""
    tensors = []
    for layer in cache.layers:
        tensors += [getattr(layer, name, None) for name in ("keys", "values", "block_keys", "block_values")]
        for kind in ("conv_states", "recurrent_states"):
            tensors += getattr(layer, kind, {}).values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_cache_bytes_are_those_of_the_model(name):
    model_class, config = MODELS[name]
    model = model_class(config).eval()
    with torch.no_grad():
        cache = model(torch.ones(2, 20, dtype=torch.long), use_cache=True).cache
    cost = model_cost(config, context=20, batch=2, dtype=torch.float32)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    # A windowed layer holds one token less between calls, the one that the next token pushes out.
    windows = [slot for slot in cost.slots if slot.window is not None]
    assert cost.cache_bytes - sum(slot.bytes_per_token for slot in windows) == held_bytes(cache)


def test_arithmetic_counts_projections_and_attention_over_the_context():
    config = OuroConfig.from_preset("tiny", num_key_value_heads=4)
    width, inner = config.hidden_size, config.intermediate_size
    near, far = (model_cost(config, context=context).flops for context in (10, 110))
    visits = config.num_hidden_layers * config.num_loops
    assert far - near == visits * 2 * 2 * width * 100
    layer = 2 * (4 * width * width + 3 * width * inner)
    head = 2 * width * config.vocab_size
    assert near == visits * (layer + 4 * width * 11) + head


def test_loops_of_the_run_count():
    config = OuroConfig.from_preset("tiny")
    assert len(model_cost(config, num_loops=2).slots) == 2 * config.num_hidden_layers


def test_description_groups_equal_slots():
    config = MODELS["hybrid"][1]
    cost = model_cost(config, context=100, batch=3)
    lines = slot_table(config, cost)
    assert len(lines) == 2
    assert "layers 0, 2" in lines[0]
    assert "whatever the length" in lines[0]
    assert "layers 1, 3" in lines[1]
    assert dict(describe_cost("x", config, cost))["mixers"] == "gdn, full, gdn, full"


@pytest.mark.parametrize("config", [NRGPTConfig.from_preset("tiny"), GPTBaselineConfig.from_preset("tiny")])
def test_learned_positions_end_the_context(config):
    limit = config.max_position_embeddings
    assert model_cost(config).context == limit - 1
    with pytest.raises(ValueError, match=rf"context={limit}: .* end at max_position_embeddings={limit}"):
        model_cost(config, context=limit)
    assert model_cost(OuroConfig.from_preset("tiny")).context == 4096


def test_a_name_is_a_preset_or_a_folder(tmp_path):
    assert find_config("ouro-2.6b").num_hidden_layers == 48
    LT2Config.from_preset("tiny").save_pretrained(tmp_path)
    assert find_config(str(tmp_path)).model_type == "lt2"
    with pytest.raises(OSError, match="no-such-model"):
        find_config("no-such-model")


def test_bad_values_are_named():
    with pytest.raises(ValueError, match="context=0"):
        model_cost(OuroConfig.from_preset("tiny"), context=0)


def test_packed_weights_are_not_given_the_bytes_of_full_ones():
    config = OuroConfig.from_preset("tiny")
    config.quantization_config = {"quant_method": "torchao"}
    weights = dict(describe_cost("x", config, model_cost(config)))["weights"]
    assert weights.endswith("before packing; on disk they are packed")
