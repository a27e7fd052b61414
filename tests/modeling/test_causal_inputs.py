# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Caches, padding and packing of CEM-Llama, over the corners of its design space."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

EXACT = {"rtol": 0, "atol": 1e-10}


def greedy(model, ids, tokens, **kwargs):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **kwargs)


@pytest.mark.parametrize("sizes", [[14], [9, 5], [1] * 14, [3, 1, 7, 3]])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_any_split_of_the_tokens_gives_the_logits_of_one_pass(any_cem, make_ids, sizes, attention, run_in_chunks):
    """Guards A1, A15."""
    ids = make_ids(2, 14)
    whole = any_cem(ids, use_cache=False).logits
    any_cem.set_attn_implementation(attention)
    torch.testing.assert_close(run_in_chunks(any_cem, ids, sizes)[0], whole, **EXACT)


@pytest.mark.parametrize("steps", [1, 2, 3])
@torch.no_grad()
def test_one_cache_serves_any_number_of_steps(any_cem, make_ids, steps, run_in_chunks):
    ids = make_ids(2, 9)
    whole = any_cem(ids, use_cache=False, num_steps=steps).logits
    logits, cache = run_in_chunks(any_cem, ids, [4, 1, 4], num_steps=steps)
    torch.testing.assert_close(logits, whole, **EXACT)
    assert len(cache) == any_cem.config.num_hidden_layers
    assert [cache.get_seq_length(layer) for layer in range(len(cache))] == [9] * len(cache)


@pytest.mark.parametrize("kind", ["config", "bare", "static"])
@torch.no_grad()
def test_a_cache_built_by_the_user_serves_as_well(any_cem, make_ids, kind, run_in_chunks):
    """Guards A5, A12."""
    ids, config = make_ids(2, 14), any_cem.config
    cache = StaticCache(config=config, max_cache_len=16) if kind == "static" else DynamicCache()
    cache = DynamicCache(config=config) if kind == "config" else cache
    logits, _ = run_in_chunks(any_cem, ids, [5, 1, 8], cache=cache)
    torch.testing.assert_close(logits, any_cem(ids, use_cache=False).logits, **EXACT)


@torch.no_grad()
def test_the_cache_holds_as_many_numbers_as_documented(any_cem, make_ids):
    """Guards A16: one tensor without diagonal, half of what Llama keeps."""
    c = any_cem.config
    keys = c.num_key_value_heads * c.head_dim
    one_tensor = c.cem_attention and c.cem_diag == "none" and c.cem_tie_kv and c.cem_rope_values == "exact"
    per_token = keys if one_tensor else keys + c.hidden_size if c.has_diagonal else 2 * keys
    for cache in (None, DynamicCache(config=c), StaticCache(config=c, max_cache_len=12)):
        held = any_cem(make_ids(3, 12), cache=cache, use_cache=True).cache
        for layer in held.layers:
            assert layer.keys.numel() + layer.values.numel() == 3 * 12 * per_token


@torch.no_grad()
def test_growing_writes_in_place_and_leaves_earlier_results_alone(make_cem, make_ids, run_in_chunks):
    for diagonal in ("none", "shared"):
        model, ids = make_cem(cem_diag=diagonal), make_ids(1, 40)
        whole = model(ids, use_cache=False).logits
        logits, cache = run_in_chunks(model, ids[:, :20], [10] + [1] * 10)
        assert cache.layers[0]._buffers[0].shape[-2] > 20
        stored = copy.deepcopy(cache)
        logits = torch.cat((logits, run_in_chunks(model, ids[:, 20:], [1] * 20, cache=cache)[0]), dim=1)
        torch.testing.assert_close(logits, whole, **EXACT)
        torch.testing.assert_close(model(ids[:, 20:], cache=stored).logits, whole[:, 20:], **EXACT)


@torch.no_grad()
def test_greedy_generation_needs_no_cache_to_be_the_same(any_cem, make_ids):
    """Guards A12, D9: default, static and offloaded caches, one token per step after the prompt."""
    ids, lengths = make_ids(2, 7), []
    hook = any_cem.model.embed_tokens.register_forward_hook(lambda *call: lengths.append(call[-1].shape[1]))
    cached = greedy(any_cem, ids, 8)
    hook.remove()
    assert lengths == [7] + [1] * 7
    for settings in ({"use_cache": False}, {"cache_implementation": "static"}, {"cache_implementation": "offloaded"}):
        assert torch.equal(cached, greedy(any_cem, ids, 8, **settings)), settings


@torch.no_grad()
def test_beams_and_drafts_give_what_they_give_without_a_cache(any_cem, make_cem, make_ids):
    """Guards A7, A8."""
    ids = make_ids(1, 6).repeat(1, 3)
    settings = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
    cached, plain = greedy(any_cem, ids, 9, **settings), greedy(any_cem, ids, 9, use_cache=False, **settings)
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores, rtol=0, atol=1e-4)
    expected = greedy(any_cem, ids, 10)
    assert torch.equal(greedy(any_cem, ids, 10, prompt_lookup_num_tokens=3), expected)
    assert torch.equal(greedy(any_cem, ids, 10, assistant_model=make_cem(num_hidden_layers=1)), expected)


@torch.no_grad()
def test_a_cropped_cache_continues_as_if_the_tail_had_not_been(any_cem, make_ids, run_in_chunks):
    """Guards A8, A10."""
    ids, other = make_ids(2, 10), make_ids(2, 4, seed=7)
    _, cache = run_in_chunks(any_cem, ids, [7, 3])
    cache.crop(-3)
    whole = any_cem(torch.cat((ids[:, :7], other), dim=1), use_cache=False).logits
    torch.testing.assert_close(any_cem(other, cache=cache).logits, whole[:, 7:], **EXACT)


@torch.no_grad()
def test_reordering_repeating_and_selecting_keep_both_halves_together(any_cem, make_ids):
    """Guards A7."""
    ids = make_ids(2, 6)
    changes = {
        "reorder_cache": (torch.tensor([1, 0]), [1, 0]),
        "batch_repeat_interleave": (3, [0, 0, 0, 1, 1, 1]),
        "batch_select_indices": (torch.tensor([1]), [1]),
    }
    for name, (argument, rows) in changes.items():
        cache = any_cem(ids, use_cache=True).cache
        getattr(cache, name)(argument)
        more = make_ids(len(rows), 2, seed=4)
        whole = any_cem(torch.cat((ids[rows], more), dim=1), use_cache=False).logits[:, 6:]
        torch.testing.assert_close(any_cem(more, cache=cache).logits, whole, **EXACT)


@torch.no_grad()
def test_a_prompt_does_not_feel_its_neighbours_in_the_batch(any_cem, make_ids):
    """Guards A6, B4, B7: left-padded rows generate what they generate alone."""
    prompts = [make_ids(1, length, seed=length) for length in (5, 9, 12)]
    ids = torch.cat([torch.nn.functional.pad(prompt, (12 - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (12 - p.shape[1], 0)) for p in prompts])
    alone = [greedy(any_cem, prompt, 8)[0, prompt.shape[1] :] for prompt in prompts]
    for kind in ({}, {"cache_implementation": "static"}):
        together = greedy(any_cem, ids, 8, attention_mask=mask, **kind)[:, 12:]
        assert torch.equal(together, torch.stack(alone)), kind


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_padding_on_either_side_changes_nothing_even_for_one_row(any_cem, make_ids, attention):
    """Guards B2, B7, K1: rows that see nothing stay finite, in training length and in a chunked pass."""
    any_cem.set_attn_implementation(attention)
    ids = make_ids(1, 7)
    alone = any_cem(ids, use_cache=False).logits
    for left, right in ((1, 0), (5, 0), (0, 4), (2, 3)):
        padded = torch.nn.functional.pad(ids, (left, right), value=9)
        mask = torch.nn.functional.pad(torch.ones_like(ids), (left, right))
        logits = any_cem(padded, attention_mask=mask, use_cache=False).logits
        assert logits.isfinite().all()
        torch.testing.assert_close(logits[:, left : left + 7], alone, **EXACT)


@torch.no_grad()
def test_masks_longer_than_the_new_tokens_and_ready_masks_are_understood(any_cem, make_ids):
    """Guards B3."""
    ids = make_ids(2, 16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :4] = 0
    real = mask.bool()
    whole = any_cem(ids, attention_mask=mask, use_cache=False).logits
    cache, pieces = None, []
    for start, end in ((0, 12), (12, 13), (13, 16)):
        outputs = any_cem(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
        cache = outputs.cache
        pieces.append(outputs.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1)[real], whole[real], **EXACT)
    ready = torch.ones(16, 16, dtype=torch.bool).tril() & real[:, None, None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for given in (ready, {"full_attention": ready}):
        logits = any_cem(ids, attention_mask=given, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(logits[real], whole[real], **EXACT)


@torch.no_grad()
def test_a_ready_mask_may_show_later_tokens(make_cem, make_ids):
    """Queries see the whole of a prefix: no key is left out before the mask has been read."""
    ids = make_ids(1, 200)
    mask = torch.ones(200, 200, dtype=torch.bool).tril()
    mask[:, :150] = True
    for fields in ({"cem_diag": "shared"}, {"cem_diag": "none"}):
        model = make_cem(**fields, num_hidden_layers=1)
        fast = model(ids, attention_mask=mask[None, None], position_ids=torch.arange(200)[None]).logits
        model.set_attn_implementation("eager")
        added = torch.zeros(200, 200).double().masked_fill(~mask, torch.finfo(torch.float64).min)[None, None]
        slow = model(ids, attention_mask=added, position_ids=torch.arange(200)[None]).logits
        torch.testing.assert_close(fast, slow, **EXACT)
        assert (model(ids).logits[:, 0] - slow[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("marks", ["position_ids", "cu_seq_lens_q", "seq_idx"])
def test_packed_documents_do_not_see_each_other(any_cem, make_ids, marks):
    """Guards C1, C3."""
    lengths = (11, 7, 14)
    documents = [make_ids(1, length, seed=length) for length in lengths]
    row = torch.cat(documents, dim=1)
    given = {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": torch.tensor([0, 11, 18, 32], dtype=torch.int32),
        "seq_idx": torch.tensor([[0] * 11 + [1] * 7 + [2] * 14]),
    }[marks]
    apart = torch.cat([any_cem(document, use_cache=False).logits for document in documents], dim=1)
    embeds = any_cem.model.embed_tokens(row).detach().requires_grad_()
    packed = any_cem(inputs_embeds=embeds, **{marks: given})
    assert packed.cache is None
    torch.testing.assert_close(packed.logits, apart, **EXACT)
    (gradient,) = torch.autograd.grad(packed.logits[:, 18:].sum(), embeds)
    assert gradient[:, :18].abs().max() == 0
    with pytest.raises(ValueError, match="packed documents"):
        any_cem(row, cache=DynamicCache(config=any_cem.config), **{marks: given})


def test_caches_that_want_equal_halves_are_refused_at_once(make_cem, make_ids):
    """Guards A20."""
    for fields in ({"cem_diag": "none"}, {}):
        model = make_cem(**fields)
        with pytest.raises(ValueError, match="Leave cache_implementation out"):
            greedy(model, make_ids(1, 4), 2, cache_implementation="quantized", cache_config={"backend": "fp8"})


@torch.no_grad()
def test_a_static_cache_may_be_filled_by_a_prefill_in_chunks(make_cem, make_ids):
    for fields in ({"cem_diag": "none"}, {"cem_diag": "shared", "num_key_value_heads": 2}):
        model, ids = make_cem(**fields), make_ids(2, 11)
        chunked = greedy(model, ids, 5, cache_implementation="static", prefill_chunk_size=4)
        assert torch.equal(chunked, greedy(model, ids, 5))


@torch.no_grad()
def test_a_static_cache_has_room_behind_the_last_of_many_queries(make_cem, make_ids, run_in_chunks):
    model, ids = make_cem(num_hidden_layers=1), make_ids(1, 300)
    cache = StaticCache(config=model.config, max_cache_len=320)
    logits, _ = run_in_chunks(model, ids, [100, 200], cache=cache)
    torch.testing.assert_close(logits, model(ids, use_cache=False).logits, **EXACT)


@torch.no_grad()
def test_old_name_of_the_cache_argument_still_works(make_cem, make_ids):
    model, ids = make_cem(), make_ids(1, 8)
    cache = model(ids[:, :5], use_cache=True).cache
    with pytest.warns(FutureWarning, match="past_key_values"):
        continued = model(ids[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(continued, model(ids, use_cache=False).logits[:, 5:], **EXACT)
