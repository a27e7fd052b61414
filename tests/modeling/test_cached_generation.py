# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What `generate` of Ouro and LT2 makes of drafts, kinds of caches and windows, and what it refuses."""

import pytest
import torch


def greedy(model, ids, tokens, **kwargs):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **kwargs)


@torch.no_grad()
def test_a_quantised_cache_works_for_full_attention_and_is_refused_elsewhere(make_ouro, make_lt2, make_ids):
    """Guards A20."""
    ids = make_ids(1, 6)
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    # Small weights, so that eight bits are enough to tell the tokens.
    model = make_ouro(dtype=torch.float32, initializer_range=0.02)
    assert greedy(model, ids, 8, **settings).shape == (1, 14)
    with pytest.raises(ValueError, match="Leave cache_implementation out"):
        greedy(make_lt2(dtype=torch.float32), ids, 8, **settings)


@torch.no_grad()
def test_drafts_are_exact_where_a_cache_can_be_rolled_back_and_refused_where_not(make_ouro, make_lt2, make_ids):
    """Guards A8."""
    ids = make_ids(1, 6).repeat(1, 3)
    for model in (make_ouro(), make_lt2(layer_mixers="full"), make_lt2(layer_mixers="window", sliding_window=5)):
        expected = greedy(model, ids, 10)
        assert torch.equal(greedy(model, ids, 10, prompt_lookup_num_tokens=3), expected)
        assistant = make_ouro(num_loops=1)
        assert torch.equal(greedy(model, ids, 10, assistant_model=assistant), expected)
    model = make_lt2(layer_mixers="gdn,full")
    for draft in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": make_ouro(num_loops=1)}):
        with pytest.raises(ValueError, match="stateful"):
            greedy(model, ids, 4, **draft)


def test_generation_refuses_what_would_draft_or_read_wrongly(make_ouro, make_lt2, make_ids):
    """Guards A8."""
    ids, teacher, shared = make_ids(1, 6), make_ouro(), make_ouro(kv_sharing="last")
    for mixers in ("gdn", "retnet,full"):
        with pytest.raises(ValueError, match="cannot draft for another model"):
            greedy(teacher, ids, 4, assistant_model=make_lt2(layer_mixers=mixers))
    with pytest.raises(ValueError, match=r"assistant_early_exit=1 .*num_loops=1"):
        greedy(teacher, ids, 4, assistant_early_exit=1)
    pieces = ({"prompt_lookup_num_tokens": 3}, {"assistant_model": teacher}, {"prefill_chunk_size": 2})
    pieces += ({"use_cache": False},)
    for options in pieces:
        with pytest.raises(ValueError, match="kv_sharing='last'"):
            greedy(shared, ids, 4, **options)
        assert torch.equal(greedy(shared, ids, 4, num_loops=1, **options), greedy(teacher, ids, 4, num_loops=1))
        assert torch.equal(greedy(shared, ids, 4, exit_at_step=0, **options), greedy(teacher, ids, 4, num_loops=1))


@pytest.mark.parametrize("fields", [{"sliding_window": 1}, {"sliding_window": 4, "loop_windows": [None, 1, 3]}])
def test_a_window_of_one_token_generates_as_without_a_cache(make_lt2, make_ids, fields):
    model, ids = make_lt2(layer_mixers="window", **fields), make_ids(2, 9)
    expected = greedy(model, ids, 8, use_cache=False)
    for options in ({}, {"cache_implementation": "static"}):
        assert torch.equal(greedy(model, ids, 8, **options), expected)


@torch.no_grad()
def test_a_static_cache_gives_the_same_tokens_for_every_prompt(any_model, make_ids):
    """Guards A12."""
    for length in (7, 11):
        ids = make_ids(2, length)
        assert torch.equal(greedy(any_model, ids, 6, cache_implementation="static"), greedy(any_model, ids, 6))


@torch.no_grad()
def test_a_static_cache_may_read_the_prompt_in_chunks(any_model, make_ids):
    """Guards A12: also where slots hold something else than keys and values of one width."""
    ids = make_ids(2, 9)
    chunks = {"cache_implementation": "static", "prefill_chunk_size": 4}
    assert torch.equal(greedy(any_model, ids, 6, **chunks), greedy(any_model, ids, 6))


@torch.no_grad()
def test_an_offloaded_cache_gives_the_same_tokens(any_model, make_ids):
    ids = make_ids(2, 7)
    assert torch.equal(greedy(any_model, ids, 6, cache_implementation="offloaded"), greedy(any_model, ids, 6))
