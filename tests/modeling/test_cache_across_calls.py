# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""One cache over calls that differ: in the number of loops, in type, and in batch size after a reset."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

from loopergy.modeling.looped_cache import GrowingLayer, RecurrentLayer, make_cache

EXACT = {"rtol": 0, "atol": 1e-10}
CACHES = {"growing": make_cache, "static": lambda config: StaticCache(config, max_cache_len=32)}
MIXERS = ("gdn,full", "full,gdn", "gdn", "gdn*3,window", "retnet,nsa", "la,dsa", "mamba2", "full")


def build(make_lt2, mixers: str, **fields):
    sparse = {"nsa_block_size": 4, "nsa_block_count": 4, "nsa_window": 3, "dsa_latent_dim": 12, "dsa_tail_dim": 4}
    return make_lt2(layer_mixers=mixers, sliding_window=4, **sparse, **fields)


@pytest.mark.parametrize("kind", list(CACHES))
@pytest.mark.parametrize("mixers", MIXERS)
@torch.no_grad()
def test_a_call_of_fewer_loops_in_between_is_noticed(make_lt2, make_ids, mixers, kind):
    """Also where no first layer counts its tokens, and where no layer is attention."""
    model, ids = build(make_lt2, mixers), make_ids(1, 12)
    cache = CACHES[kind](model.config)
    model(ids[:, :4], cache=cache)
    untouched = copy.deepcopy(cache)
    model(ids[:, 4:8], cache=cache, num_loops=1)
    with pytest.raises(ValueError, match=r"smaller num_loops.*8 tokens"):
        model(ids[:, 8:], cache=cache)
    whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids[:, 4:], cache=untouched).logits, whole[:, 4:], **EXACT)
    # Fewer loops may go on, and so may all loops after a reset.
    assert model(ids[:, 8:], cache=cache, num_loops=1).logits.isfinite().all()
    cache.reset()
    torch.testing.assert_close(model(ids, cache=cache).logits, whole, **EXACT)


@pytest.mark.parametrize("mixers", ["gdn,full", "full,gdn", "gdn"])
@torch.no_grad()
def test_shared_slots_do_not_hide_recurrent_ones_that_lack_tokens(make_lt2, make_ids, mixers):
    model, ids = build(make_lt2, mixers, kv_sharing="last"), make_ids(1, 12)
    for first in (1, 3):
        cache = make_cache(model.config)
        model(ids[:, :4], cache=cache, num_loops=first)
        model(ids[:, 4:8], cache=cache, num_loops=1)
        with pytest.raises(ValueError, match=r"smaller num_loops.*8 tokens"):
            model(ids[:, 8:], cache=cache)


@torch.no_grad()
def test_counting_tokens_leaves_the_kinds_of_slots_alone(make_lt2, make_ids):
    """A slot that says how long it is would pass for attention where layers are moved to the host and back."""
    model = make_lt2(layer_mixers="gdn,full", kv_sharing="last")
    cache = model(make_ids(1, 5), use_cache=True).cache
    assert cache.is_linear == [isinstance(layer, RecurrentLayer) for layer in cache.layers]


@torch.no_grad()
def test_a_cache_filled_in_a_narrower_type_goes_on_in_the_wider(make_ouro, make_lt2, make_ids):
    for model in (make_ouro(dtype=torch.float32), make_lt2(dtype=torch.float32, layer_mixers="full")):
        ids = make_ids(1, 9)
        for make in (make_cache, lambda config: DynamicCache()):
            cache = make(model.config)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(ids[:, :5], cache=cache)
                model(ids[:, 5:6], cache=cache)  # there is room now
            logits = model(ids[:, 6:7], cache=cache).logits
            assert cache.layers[0].keys.dtype == torch.float32
            assert torch.cat((logits, model(ids[:, 7:], cache=cache).logits), dim=1).dtype == torch.float32


def test_a_growing_layer_promotes_as_a_concatenating_one_does():
    wide, narrow = torch.randn(1, 2, 3, 4, dtype=torch.float64), torch.randn(1, 2, 1, 4).bfloat16()
    for pieces in ((narrow, wide, narrow), (wide, narrow, wide), (narrow, narrow, wide), (narrow.float(), narrow)):
        layer = GrowingLayer()
        for piece in pieces:
            keys, values = layer.update(piece, -piece)
        assert torch.equal(keys, torch.cat(pieces, dim=-2))
        assert torch.equal(values, -keys)


@torch.no_grad()
def test_a_reset_cache_takes_another_batch(any_model, make_ids):
    cache = any_model(make_ids(2, 7), use_cache=True).cache
    cache.reset()
    ids = make_ids(3, 6, seed=2)
    torch.testing.assert_close(any_model(ids, cache=cache).logits, any_model(ids, use_cache=False).logits, **EXACT)
    torch.testing.assert_close(
        any_model(ids[:, :1], cache=cache).logits,
        any_model(torch.cat((ids, ids[:, :1]), dim=1), use_cache=False).logits[:, -1:],
        **EXACT,
    )


@torch.no_grad()
def test_a_reset_static_cache_keeps_its_tensors(make_lt2, make_ids):
    model = make_lt2(layer_mixers="gdn,full")
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(make_ids(2, 7), cache=cache)
    before = cache.layers[0].recurrent_states[0].data_ptr()
    cache.reset()
    ids = make_ids(2, 6, seed=2)
    torch.testing.assert_close(model(ids, cache=cache).logits, model(ids, use_cache=False).logits, **EXACT)
    assert cache.layers[0].recurrent_states[0].data_ptr() == before


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"layer_mixers": "gdn"}, {"layer_mixers": "full,gdn", "kv_sharing": "last"}])
@torch.no_grad()
def test_counting_makes_no_step_of_a_compiled_model_a_new_program(make_lt2, make_ids, fields):
    model, ids = make_lt2(dtype=torch.float32, num_hidden_layers=2, num_loops=2, **fields), make_ids(2, 7)
    compiling = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiling._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(ids, cache_implementation="static", compile_config=compiling, **settings)
    assert torch.equal(found, model.generate(ids, **settings))
    assert counters["stats"]["unique_graphs"] == 1
