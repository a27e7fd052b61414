# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Generation with one cache slot per (loop, layer), for Ouro and every kind of LT2."""

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from loopergy import LT2Config
from loopergy.configuration.looped_config import INDEXED, POOLED, RECURRENT
from loopergy.modeling.looped_cache import GrowingLayer, RecurrentLayer, make_cache

EXACT = {"rtol": 0, "atol": 1e-10}


def greedy(model, ids, tokens, **kwargs):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **kwargs)


def tensors_of(cache) -> list[torch.Tensor]:
    found = []
    for layer in cache.layers:
        if isinstance(layer, RecurrentLayer):
            states = (*layer.conv_states.values(), *layer.recurrent_states.values())
        else:
            states = (
                layer.keys,
                layer.values,
                *(getattr(layer, f"block_{name}", None) for name in ("keys", "values")),
            )
        found += [state for state in states if state is not None]
    return found


@pytest.mark.parametrize("sizes", [[22], [17, 5], [1] * 22, [3] * 7 + [1], [5, 1, 1, 15]])
@torch.no_grad()
def test_any_split_of_the_tokens_gives_the_logits_of_one_pass(any_model, make_ids, sizes, run_in_chunks):
    """Guards A1, A15."""
    ids = make_ids(2, 22)
    whole = any_model(ids, use_cache=False).logits
    torch.testing.assert_close(run_in_chunks(any_model, ids, sizes)[0], whole, **EXACT)


@pytest.mark.parametrize("kind", ["config", "static"])
@torch.no_grad()
def test_a_cache_built_by_the_user_serves_as_well(any_model, make_ids, kind, run_in_chunks):
    """Guards A5, G7."""
    ids = make_ids(2, 14)
    config = any_model.config
    cache = DynamicCache(config=config) if kind == "config" else StaticCache(config=config, max_cache_len=16)
    logits, _ = run_in_chunks(any_model, ids, [5, 1, 8], cache=cache)
    torch.testing.assert_close(logits, any_model(ids, use_cache=False).logits, **EXACT)


@torch.no_grad()
def test_every_slot_counts_the_tokens_once(any_model, make_ids, run_in_chunks):
    """Guards A3, A4."""
    _, cache = run_in_chunks(any_model, make_ids(2, 11), [10, 1])
    config = any_model.config
    assert len(cache) == config.num_loops * config.num_hidden_layers
    counted = [slot for slot, kind in enumerate(config.slot_plan().layer_types) if kind != RECURRENT]
    assert [cache.get_seq_length(slot) for slot in counted] == [11] * len(counted)
    if counted:
        assert cache.get_seq_length() == 11


@torch.no_grad()
def test_loops_forced_into_one_slot_do_not_agree_with_a_full_pass(make_ouro, make_ids, monkeypatch, run_in_chunks):
    """Guards A4: the test that slots are apart can fail."""
    model, ids = make_ouro(), make_ids(1, 8)
    whole = model(ids, use_cache=False).logits
    plan = model.config.slot_plan()
    squeezed = type(plan)([plan.table[0]] * 3, plan.layer_types, plan.windows)
    monkeypatch.setattr(type(model.config), "slot_plan", lambda self, num_loops=None: squeezed)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.testing.assert_close(run_in_chunks(model, ids, [4, 4])[0], whole, **EXACT)


@torch.no_grad()
def test_greedy_generation_needs_no_cache_to_be_the_same(any_model, make_ids):
    """Guards A5, D9: one token per step after the prompt, same ids without a cache."""
    ids = make_ids(2, 7)
    lengths = []
    hook = any_model.model.embed_tokens.register_forward_hook(lambda *call: lengths.append(call[-1].shape[1]))
    cached = greedy(any_model, ids, 8)
    hook.remove()
    assert lengths == [7] + [1] * 7
    assert torch.equal(cached, greedy(any_model, ids, 8, use_cache=False))
    by_hand = ids
    for _ in range(8):
        by_hand = torch.cat((by_hand, any_model(by_hand).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(cached, by_hand)


@torch.no_grad()
def test_a_prompt_does_not_feel_its_neighbours_in_the_batch(any_model, make_ids):
    """Guards A6, B4, B7: rows of 5, 9 and 12 tokens, left-padded, generate what they generate alone."""
    prompts = [make_ids(1, length, seed=length) for length in (5, 9, 12)]
    ids = torch.cat([torch.nn.functional.pad(prompt, (12 - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (12 - p.shape[1], 0)) for p in prompts])
    alone = [greedy(any_model, prompt, 10)[0, prompt.shape[1] :] for prompt in prompts]
    for kind in ({}, {"cache_implementation": "static"}):
        together = greedy(any_model, ids, 10, attention_mask=mask, **kind)[:, 12:]
        assert torch.equal(together, torch.stack(alone))


@torch.no_grad()
def test_mask_sizes_count_the_past(make_ouro, make_ids, run_in_chunks):
    """Guards A6."""
    _, cache = run_in_chunks(make_ouro(), make_ids(1, 12), [12])
    assert cache.get_mask_sizes(1, 0) == (13, 0)


@torch.no_grad()
def test_left_padding_changes_nothing_even_for_one_row(any_model, make_ids):
    """Guards B1, B2, B7."""
    ids = make_ids(1, 7)
    alone = any_model(ids, use_cache=False).logits
    for pads in (1, 5):
        for filling in (0, 9, 100):
            padded = torch.nn.functional.pad(ids, (pads, 0), value=filling)
            mask = (torch.arange(7 + pads) >= pads)[None].long()
            outputs = any_model(padded, attention_mask=mask, use_cache=False).logits[:, pads:]
            torch.testing.assert_close(outputs, alone, **EXACT)


@pytest.mark.parametrize("mask", [[1, 1, 1, 0, 0, 0, 1, 1, 1, 1], [1] * 6 + [0] * 4, [0, 0, 1, 1, 0, 1, 1, 1, 0, 0]])
@torch.no_grad()
def test_padding_anywhere_is_as_if_it_were_not_there(make_lt2, make_ids, mask):
    """Guards B1: also in the state that decoding continues from, convolution history included."""
    model = make_lt2(layer_mixers="gdn,full", attention_bias=True)
    mask = torch.tensor([mask])
    real = mask[0].bool()
    ids, more = make_ids(1, 10), make_ids(1, 3, seed=2)
    outputs = model(ids, attention_mask=mask, use_cache=True)
    continued = model(more, attention_mask=torch.cat((mask, torch.ones_like(more)), dim=1), cache=outputs.cache)
    alone = model(torch.cat((ids[:, real], more), dim=1), use_cache=False).logits
    torch.testing.assert_close(torch.cat((outputs.logits[:, real], continued.logits), dim=1), alone, **EXACT)


@torch.no_grad()
def test_a_chunk_of_padding_leaves_the_state_alone(make_lt2, make_ids, run_in_chunks):
    """Guards B1."""
    model = make_lt2(layer_mixers="gdn")
    _, cache = run_in_chunks(model, make_ids(1, 6), [6])
    before = [tensor.clone() for tensor in tensors_of(cache)]
    mask = torch.tensor([[1] * 6 + [0] * 4])
    model(make_ids(1, 4, seed=3), attention_mask=mask, cache=cache)
    for old, new in zip(before, tensors_of(cache), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)


@torch.no_grad()
def test_masks_longer_than_the_new_tokens_are_understood(any_model, make_ids):
    """Guards B3."""
    ids = make_ids(2, 16)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :4] = 0
    whole = any_model(ids, attention_mask=mask, use_cache=False).logits
    cache, pieces = None, []
    for start, end in ((0, 12), (12, 13), (13, 16)):
        outputs = any_model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
        cache = outputs.cache
        pieces.append(outputs.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[real], whole[real], **EXACT)


@torch.no_grad()
def test_beams_carry_every_state_with_them(any_model, make_ids):
    """Guards A7."""
    ids = make_ids(2, 6)
    settings = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
    cached = greedy(any_model, ids, 9, **settings)
    plain = greedy(any_model, ids, 9, use_cache=False, **settings)
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores, rtol=0, atol=1e-4)


@torch.no_grad()
def test_reordering_repeating_and_selecting_reach_every_tensor(any_model, make_ids):
    """Guards A7."""
    ids = make_ids(2, 6)
    changes = {
        "reorder_cache": (torch.tensor([1, 0]), [1, 0]),
        "batch_repeat_interleave": (3, [0, 0, 0, 1, 1, 1]),
        "batch_select_indices": (torch.tensor([1]), [1]),
    }
    for name, (argument, rows) in changes.items():
        cache = any_model(ids, use_cache=True).cache
        before = [tensor.clone() for tensor in tensors_of(cache)]
        getattr(cache, name)(argument)
        for old, new in zip(before, tensors_of(cache), strict=True):
            assert torch.equal(old[rows], new), name
        more = make_ids(len(rows), 2, seed=4)
        whole = any_model(torch.cat((ids[rows], more), dim=1), use_cache=False).logits[:, 6:]
        torch.testing.assert_close(any_model(more, cache=cache).logits, whole, **EXACT)


@torch.no_grad()
def test_a_reset_cache_starts_anew(any_model, make_ids, run_in_chunks):
    ids = make_ids(2, 8)
    first, cache = run_in_chunks(any_model, ids, [5, 3])
    cache.reset()
    torch.testing.assert_close(run_in_chunks(any_model, ids, [5, 3], cache=cache)[0], first, **EXACT)


@torch.no_grad()
def test_a_prefix_serves_several_continuations(any_model, make_ids):
    """Guards A10."""
    prefix = make_ids(1, 20)
    stored = any_model(prefix, use_cache=True).cache
    before = [tensor.clone() for tensor in tensors_of(stored)]
    for seed in (5, 6):
        ids = torch.cat((prefix, make_ids(1, 4, seed=seed)), dim=1)
        assert torch.equal(greedy(any_model, ids, 8, cache=copy.deepcopy(stored)), greedy(any_model, ids, 8))
    for old, new in zip(before, tensors_of(stored), strict=True):
        assert torch.equal(old, new)


@torch.no_grad()
def test_old_name_of_the_cache_argument_still_works(any_model, make_ids):
    ids = make_ids(1, 8)
    cache = any_model(ids[:, :5], use_cache=True).cache
    with pytest.warns(FutureWarning, match="past_key_values"):
        continued = any_model(ids[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(continued, any_model(ids, use_cache=False).logits[:, 5:], **EXACT)


@torch.no_grad()
def test_nothing_of_one_call_is_left_on_the_model_for_the_next(any_model, make_ids):
    """Guards A18, A21, D6."""
    probe, other = make_ids(2, 9), make_ids(2, 7, seed=8)
    first = any_model(probe, use_cache=False).logits
    outputs = any_model.generate(other, max_new_tokens=4, return_dict_in_generate=True, pad_token_id=0)
    held = [weakref.ref(tensor) for tensor in tensors_of(outputs.cache)]
    del outputs
    gc.collect()
    assert not any(reference() is not None for reference in held)
    assert torch.equal(any_model(probe, use_cache=False).logits, first)
    for module in any_model.modules():
        assert not any(isinstance(value, torch.Tensor) for value in vars(module).values())


@torch.no_grad()
def test_a_cache_with_too_few_slots_is_refused_by_number(make_ouro, make_lt2, make_ids):
    ids = make_ids(1, 4)
    model = make_ouro()
    with pytest.raises(ValueError, match=r"6 slots, but 10 .*decoder_view"):
        model(ids, cache=DynamicCache(config=model.config), num_loops=5)
    with pytest.raises(ValueError, match=r"0 slots, but 12"):
        make_lt2()(ids, cache=DynamicCache())


@pytest.mark.parametrize("loops", [1, 2, 5])
@torch.no_grad()
def test_generate_takes_another_number_of_loops(any_model, make_ids, loops, caplog):
    ids = make_ids(2, 6)
    expected = greedy(any_model, ids, 6, num_loops=loops, use_cache=False)
    for kind in ({}, {"cache_implementation": "static"}):
        assert torch.equal(greedy(any_model, ids, 6, num_loops=loops, **kind), expected)
    assert any_model.config.num_loops == 3


@torch.no_grad()
def test_shared_slots_leave_the_prompt_exact_and_one_loop_unchanged(make_ouro, make_lt2, make_ids):
    """Property G27."""
    ids = make_ids(2, 9)
    for make, fields in ((make_ouro, {}), (make_lt2, {"layer_mixers": "gdn,full"})):
        exact, shared = make(**fields), make(kv_sharing="last", **fields)
        torch.testing.assert_close(shared(ids, use_cache=True).logits, exact(ids).logits, **EXACT)
        assert torch.equal(greedy(shared, ids, 6, num_loops=1), greedy(exact, ids, 6, num_loops=1))
        assert torch.equal(greedy(shared, ids, 6, cache_implementation="static"), greedy(shared, ids, 6))
    cache = make_ouro(kv_sharing="last")(ids, use_cache=True).cache
    assert len(cache) == 2
    assert cache.get_seq_length() == 9


@torch.no_grad()
def test_shared_slots_hold_last_loop_keys_for_the_past_and_own_loops_for_the_new_token(
    make_ouro, make_ids, run_in_chunks
):
    """The rule of `kv_sharing="last"`, from a cache of the exact model with all slots set to the last loop's."""
    ids = make_ids(2, 9)
    shared, exact = make_ouro(kv_sharing="last"), make_ouro()
    cache = exact(ids[:, :8], use_cache=True).cache
    for layer in range(2):
        for loop in range(2):
            last = cache.layers[4 + layer]
            cache.layers[2 * loop + layer].keys = last.keys.clone()
            cache.layers[2 * loop + layer].values = last.values.clone()
    logits, _ = run_in_chunks(shared, ids, [8, 1])
    torch.testing.assert_close(logits[:, 8:], exact(ids[:, 8:], cache=cache).logits, **EXACT)


def recurrent_bytes(config, mixer: str, element: int) -> int:
    """Return what a recurrent visit keeps: its state in float32, and the columns of its convolution."""
    if mixer == "mamba2":
        inner, state = config.mamba2_expand * config.hidden_size, config.mamba2_state_size
        return inner * state * 4 + config.mamba2_conv_size * (inner + 2 * state) * element
    heads, key = getattr(config, f"{mixer}_num_heads"), getattr(config, f"{mixer}_head_dim")
    value = int(key * getattr(config, f"{mixer}_expand_v"))
    conv = getattr(config, f"{mixer}_conv_size") if getattr(config, f"{mixer}_use_short_conv", False) else 0
    return heads * key * value * 4 + conv * heads * (2 * key + value) * element


@pytest.mark.parametrize(
    ("mixer", "fields", "count"),
    [
        ("gdn", {}, 1_179_648 + 49_152),
        ("gdn", {"gdn_num_heads": 8}, 2_359_296 + 49_152),
        ("kda", {}, 1_048_576 + 49_152),
        ("mamba2", {}, 1_048_576 + 33_792),
        ("hgrn2", {}, 2048 * 128 * 4),
        ("retnet", {}, 16 * 128 * 256 * 4),
    ],
)
def test_a_slot_at_the_paper_s_size_has_the_bytes_worked_out_by_hand(mixer, fields, count):
    config = LT2Config(hidden_size=2048, num_attention_heads=16, layer_mixers=mixer, **fields)
    assert recurrent_bytes(config, mixer, 2) == count


def slot_bytes(config, length: int, element: int) -> int:
    """Add up what each visit keeps, by the formulas of the mixers' docstrings (recurrent states in float32)."""
    total = 0
    for loop in range(config.num_loops):
        for layer in range(config.num_hidden_layers):
            kind, window = config.visit(loop, layer)
            if kind == RECURRENT:
                total += recurrent_bytes(config, config.layer_mixers[layer], element)
            elif kind == INDEXED:
                width = config.dsa_latent_dim + config.dsa_tail_dim + config.dsa_index_head_dim
                total += width * length * element
            elif kind == POOLED:
                averages = (length - config.nsa_pool_size) // config.nsa_pool_stride + 1
                total += 2 * config.nsa_num_key_value_heads * config.head_dim * (length + averages) * element
            else:
                kept = length if window is None else min(length, window - 1)
                total += 2 * config.num_key_value_heads * config.head_dim * kept * element
    return total


@torch.no_grad()
def test_cache_bytes_follow_the_formula(any_model, make_ids):
    """Guards A16, K5; property G22: attention grows linearly, windows and recurrent states do not."""
    model = any_model.float()
    for length in (6, 46):
        cache = model(make_ids(1, length), use_cache=True).cache
        measured = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(cache))
        assert measured == slot_bytes(model.config, length, 4)


@torch.no_grad()
def test_recurrent_states_stay_in_float32(make_lt2, make_ids):
    model = make_lt2(dtype=torch.bfloat16, layer_mixers="gdn")
    cache = model(make_ids(1, 6), use_cache=True).cache
    assert {state.dtype for layer in cache.layers for state in layer.recurrent_states.values()} == {torch.float32}


def test_a_growing_layer_writes_new_tokens_in_place(make_ids):
    layer, token = GrowingLayer(), torch.randn(1, 2, 1, 4)
    layer.update(torch.randn(1, 2, 100, 4), torch.randn(1, 2, 100, 4))
    layer.update(token, token)
    held = layer.keys.data_ptr()
    for _ in range(50):
        keys, values = layer.update(token, token)
    assert layer.keys.data_ptr() == held
    assert keys.shape == values.shape == (1, 2, 151, 4)


OPERATIONS = ("append", "many", "crop", "reorder", "repeat", "select", "copy", "reset", "grad", "offload")


@given(st.lists(st.sampled_from(OPERATIONS), max_size=12), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_growing_layer_holds_what_a_concatenating_layer_holds(operations, seed):
    generator = torch.Generator().manual_seed(seed)
    mine, theirs, batch = GrowingLayer(), DynamicLayer(), 2
    for operation in ("append", *operations, "append"):
        if operation in ("append", "many", "grad"):
            new = torch.randn(batch, 3, 70 if operation == "many" else 1, 4, generator=generator)
            for layer in (mine, theirs):
                layer.update(new.clone().requires_grad_(operation == "grad"), -new)
        elif operation == "crop":
            removed = min(2, theirs.get_seq_length())
            for layer in (mine, theirs):
                layer.crop(-removed)
        elif operation == "copy":
            mine = copy.deepcopy(mine) if mine.keys is None or not mine.keys.requires_grad else mine
        elif operation == "reset":
            for layer in (mine, theirs):
                layer.reset()
        elif operation == "offload":
            mine.offload()
            mine.prefetch()
        elif theirs.get_seq_length():
            rows = {"reorder": torch.arange(batch).flip(0), "repeat": 2, "select": torch.tensor([0])}[operation]
            name = {"reorder": "reorder_cache", "repeat": "batch_repeat_interleave", "select": "batch_select_indices"}
            for layer in (mine, theirs):
                getattr(layer, name[operation])(rows)
            batch = theirs.keys.shape[0]
        assert mine.get_seq_length() == theirs.get_seq_length()
        if theirs.get_seq_length():
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
        batch = batch if theirs.is_initialized else 2


@pytest.mark.parametrize("kind", ["ouro", "lt2", "lt2-without-conv"])
def test_a_cache_filled_in_inference_mode_can_be_continued_outside_it(make_ouro, make_lt2, make_ids, kind):
    ids = make_ids(1, 9)
    model = make_ouro() if kind == "ouro" else make_lt2(layer_mixers="gdn,full", gdn_use_short_conv=kind == "lt2")
    with torch.inference_mode():
        # The second forward leaves room in the buffers, which then are inference tensors.
        cache = model(ids[:, :6], use_cache=True).cache
        model(ids[:, 6:8], cache=cache)
    with torch.no_grad():
        continued = model(ids[:, 8:], cache=cache).logits
    torch.testing.assert_close(continued, model(ids, use_cache=False).logits[:, 8:], **EXACT)


def test_the_caches_we_make_are_of_growing_layers(make_ouro, make_ids):
    model = make_ouro()
    generated = greedy(model, make_ids(1, 4), 2, return_dict_in_generate=True).cache
    for cache in (generated, make_cache(model.config)):
        assert {type(layer) for layer in cache.layers} == {GrowingLayer}


@pytest.mark.parametrize("kind", ["growing", "static", "plain"])
@torch.no_grad()
def test_a_cache_that_fewer_loops_filled_is_refused_by_more(any_model, make_ids, kind):
    ids, config = make_ids(1, 12), any_model.config
    recurrent = set(config.slot_plan().layer_types) != {"full_attention"}
    if kind == "plain" and recurrent:
        pytest.skip("a cache without a config makes slots of full attention alone")
    cache = {
        "growing": make_cache,
        "static": lambda c: StaticCache(c, max_cache_len=32),
        "plain": lambda c: DynamicCache(),
    }
    cache = cache[kind](config)
    any_model(ids[:, :7], cache=cache, num_loops=1)
    with pytest.raises(ValueError, match=r"smaller num_loops.*7 tokens"):
        any_model(ids[:, 7:], cache=cache)
    one = any_model(ids, num_loops=1).logits[:, 7:]
    torch.testing.assert_close(any_model(ids[:, 7:], cache=cache, num_loops=1).logits, one, **EXACT)


@torch.no_grad()
def test_pads_read_one_by_one_change_nothing(any_model, make_ids):
    if "sliding_attention" in any_model.config.slot_plan().layer_types:
        pytest.skip("a window counts columns, pads too")
    ids, mask = make_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = mask[1, 4] = 0
    whole = any_model(ids, attention_mask=mask, use_cache=False).logits
    cache, steps = None, []
    for token in range(12):
        outputs = any_model(
            ids[:, token : token + 1], attention_mask=mask[:, : token + 1], cache=cache, use_cache=True
        )
        cache = outputs.cache
        steps.append(outputs.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(steps, dim=1)[real], whole[real], **EXACT)


def test_gradients_through_a_continued_cache_are_those_of_one_pass(any_model, make_ids, run_in_chunks):
    """A prefix with or without gradients, and the rest."""
    ids, parameters = make_ids(1, 14), [p for p in any_model.parameters() if p.requires_grad]

    def gradients(logits):
        loss = logits.sin().sum()
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)

    expected = gradients(any_model(ids, use_cache=False).logits)
    for found, wanted in zip(gradients(run_in_chunks(any_model, ids, [6, 5, 3])[0]), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)
    with torch.no_grad():
        cache = any_model(ids[:, :6], use_cache=True).cache
    gradients(any_model(ids[:, 6:], cache=cache, use_cache=True).logits)
