# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Masks, positions, caches and counts as callers give them: understood in every form, or refused by name."""

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import DynamicCache, StaticCache

import loopergy

EXACT = {"rtol": 0, "atol": 1e-10}
FAMILIES = ("ouro", "lt2-gdn-dsa", "cem-shared", "cem-no-diagonal", "nrgpt-ff2w", "nrgpt-ff1", "gpt-parallel")
ENERGY = ("cem-shared", "cem-no-diagonal", "nrgpt-ff2w", "nrgpt-ff1")


def greedy(model, ids, tokens, **kwargs):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None, **kwargs)


@pytest.fixture(params=FAMILIES)
def model(request, build_kind):
    return build_kind(request.param)


@pytest.mark.parametrize("kind", ["gpt-none", "gpt-sequential", "nrgpt-ff2w", "nrgpt-ff1"])
@pytest.mark.parametrize("marks", ["position_ids", "masked position_ids", "cu_seq_lens_q", "seq_idx"])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(build_kind, make_ids, kind, marks):
    """Guards C1, C3."""
    model, lengths = build_kind(kind), (4, 3, 6)
    documents = [make_ids(1, length, seed=length) for length in lengths]
    row = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    given = {
        "position_ids": {"position_ids": positions},
        "masked position_ids": {"position_ids": positions, "attention_mask": torch.ones_like(row)},
        "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 4, 7, 13], dtype=torch.int32)},
        "seq_idx": {"seq_idx": torch.tensor([[0] * 4 + [1] * 3 + [2] * 6])},
    }[marks]
    apart = torch.cat([model(document).logits for document in documents], dim=1)
    packed = model(row, **given)
    assert packed.cache is None
    torch.testing.assert_close(packed.logits, apart, **EXACT)
    with pytest.raises(ValueError, match="packed documents"):
        model(row, cache=DynamicCache(config=model.config), **given)


@torch.no_grad()
def test_a_padding_mask_of_another_width_is_refused(model, make_ids):
    ids = make_ids(2, 9)
    with pytest.raises(ValueError, match="for 0 cached and 9 new tokens"):
        model(ids, attention_mask=torch.ones(2, 12, dtype=torch.long))
    for width in (4, 5, 10):
        cache = model(ids[:, :5], use_cache=True).cache
        with pytest.raises(ValueError, match="for 5 cached and 4 new tokens"):
            model(ids[:, 5:], cache=cache, attention_mask=torch.ones(2, width, dtype=torch.long))
    if "lt2" in model.config.model_type:
        return
    cache = StaticCache(config=model.config, max_cache_len=12)
    model(ids[:, :5], cache=cache)
    with pytest.raises(ValueError, match="for 5 cached and 4 new tokens"):
        model(ids[:, 5:], cache=cache, attention_mask=torch.ones(2, 4, dtype=torch.long))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["ouro", "cem-shared", "cem-no-diagonal", "nrgpt-ff2w", "nrgpt-ff1", "gpt-none"])
@torch.no_grad()
def test_a_mask_per_query_and_key_means_the_same_in_all_types(build_kind, make_ids, kind, attention):
    """Guards B3."""
    model, ids = build_kind(kind), make_ids(1, 7)
    model.set_attn_implementation(attention)
    visible = torch.ones(7, 7, dtype=torch.bool).tril(-1 if kind == "nrgpt-ff1" else 0)
    given = {"position_ids": torch.arange(7)[None]}
    plain = model(ids).logits
    torch.testing.assert_close(model(ids, attention_mask=visible[None, None], **given).logits, plain, **EXACT)
    visible[3:, 2] = False
    expected = model(ids, attention_mask=visible[None, None], **given).logits
    assert (expected - plain).abs().max() > 1e-3
    for hidden in (torch.finfo(torch.float64).min, -1e9, -1e4):
        added = torch.zeros(7, 7).double().masked_fill(~visible, hidden)[None, None]
        torch.testing.assert_close(model(ids, attention_mask=added, **given).logits, expected, **EXACT)
    with pytest.raises(ValueError, match=r"torch.int64.*attention_mask.bool\(\)"):
        model(ids, attention_mask=visible[None, None].long(), **given)
    with pytest.raises(ValueError, match="cached \\+ new tokens"):
        model(ids, attention_mask=visible[None], **given)


@torch.no_grad()
def test_nrgpt_refuses_a_bias_on_its_scores(build_kind, make_ids):
    bias = -torch.arange(7.0).double().expand(1, 1, 7, 7)
    with pytest.raises(ValueError, match="attention_mask holds -1: this model adds nothing to its scores"):
        build_kind("nrgpt-ff2w")(make_ids(1, 7), attention_mask=bias)


@pytest.mark.parametrize("kind", ["cem-shared", "nrgpt-ff2w", "nrgpt-ff1", "gpt-none"])
@torch.no_grad()
def test_a_dictionary_of_masks_may_hold_none(build_kind, make_ids, kind):
    model, ids = build_kind(kind), make_ids(2, 6)
    given = model(ids, attention_mask={"full_attention": None}).logits
    torch.testing.assert_close(given, model(ids).logits, **EXACT)


@torch.no_grad()
def test_positions_without_rows_are_those_of_every_row(model, make_ids):
    ids = make_ids(2, 6)
    torch.testing.assert_close(model(ids, position_ids=torch.arange(6)).logits, model(ids).logits, **EXACT)


@pytest.mark.parametrize("kind", ["nrgpt-ff2w", "gpt-none"])
def test_learned_positions_below_zero_are_refused(build_kind, make_ids, kind):
    with pytest.raises(ValueError, match="position_ids go down to -2"):
        build_kind(kind)(make_ids(1, 5), position_ids=torch.arange(5)[None] - 2)


@torch.no_grad()
def test_no_tokens_are_refused(model):
    with pytest.raises(ValueError, match=r"shape \(1, 0\): give at least one token"):
        model(torch.zeros(1, 0, dtype=torch.long))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["cem-shared", "cem-per-head", "nrgpt-ff2w"])
@torch.no_grad()
def test_no_rows_give_no_logits(build_kind, kind, attention):
    model = build_kind(kind)
    model.set_attn_implementation(attention)
    assert model(torch.zeros(0, 5, dtype=torch.long)).logits.shape == (0, 5, 128)


@torch.no_grad()
def test_a_growing_cache_says_how_many_sequences_it_holds(build_kind, make_ids):
    for kind in ("ouro", *ENERGY, "gpt-none"):
        model = build_kind(kind)
        for cached, new in ((2, 1), (1, 2)):
            cache = model(make_ids(cached, 5), use_cache=True).cache
            model(make_ids(cached, 1), cache=cache)  # there is room now
            with pytest.raises(ValueError, match=f"holds {cached} sequences and the new tokens are of {new}"):
                model(make_ids(new, 3), cache=cache)


@pytest.mark.parametrize("kind", ["cem-no-diagonal", "cem-per-head", "nrgpt-ff2w"])
def test_a_prefix_of_keys_and_values_is_refused(build_kind, make_ids, kind):
    model = get_peft_model(build_kind(kind), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="use prompt tuning or LoRA"):
        model(make_ids(1, 5))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ENERGY)
@torch.no_grad()
def test_energies_of_padding_are_finite_and_the_others_do_not_feel_it(build_kind, make_ids, kind, attention):
    model, ids = build_kind(kind), make_ids(1, 7)
    model.set_attn_implementation(attention)
    mask = torch.tensor([[0] * 3 + [1] * 7])
    alone = model(ids, output_energies=True).energies
    padded = model(torch.nn.functional.pad(ids, (3, 0)), attention_mask=mask, output_energies=True).energies
    for part, energies in alone.items():
        assert padded[part].isfinite().all()
        torch.testing.assert_close(padded[part][..., 3:], energies, **EXACT)
    assert padded.attention[..., :3].eq(0).all()


@pytest.mark.parametrize("kind", ENERGY)
@torch.no_grad()
def test_energies_of_a_text_that_fills_a_static_cache_are_those_without(build_kind, make_ids, kind):
    model, ids = build_kind(kind), make_ids(2, 7)
    cache = StaticCache(config=model.config, max_cache_len=20)
    filled = model(ids, cache=cache, output_energies=True).energies
    for part, energies in model(ids, output_energies=True).energies.items():
        torch.testing.assert_close(filled[part], energies, rtol=1e-12, atol=1e-10)


@torch.no_grad()
def test_classifiers_return_energies_too(make_ids):
    config = loopergy.CEMLlamaConfig.from_preset("tiny", num_labels=3)
    for kind, own in (
        (loopergy.CEMLlamaForSequenceClassification, config),
        (loopergy.NRGPTForSequenceClassification, loopergy.NRGPTConfig.from_preset("tiny", num_labels=3)),
    ):
        model, ids = kind(own).eval(), make_ids(1, 5)
        expected = model.model(ids, output_energies=True).energies
        torch.testing.assert_close(model(ids, output_energies=True).energies.attention, expected.attention)
        assert model(ids).energies is None


@torch.no_grad()
def test_steps_and_loops_may_be_whole_numbers_of_numpy_and_torch(model, make_ids):
    name = "num_loops" if hasattr(model.config, "num_loops") else "num_steps"
    if "gpt" in model.config.model_type and "nr" not in model.config.model_type:
        return
    ids = make_ids(1, 5)
    expected = model(ids, **{name: 2}).logits
    for count in (np.int64(2), torch.tensor(2)):
        torch.testing.assert_close(model(ids, **{name: count}).logits, expected, **EXACT)
    for wrong in (np.float64(2), torch.tensor(2.0), "2"):
        with pytest.raises(ValueError, match=f"{name}=.* must be a whole number of at least 1"):
            model(ids, **{name: wrong})


@pytest.mark.parametrize(
    ("kind", "name"), [("cem-shared", "num_steps"), ("nrgpt-ff2w", "num_steps"), ("ouro", "num_loops")]
)
@torch.no_grad()
def test_a_generation_config_may_hold_the_depth_and_a_call_has_the_last_word(build_kind, make_ids, kind, name):
    model, ids = build_kind(kind), make_ids(1, 5)
    texts = {count: greedy(model, ids, 12, **{name: count}) for count in (1, 2, 3)}
    assert not any(torch.equal(texts[1], texts[count]) for count in (2, 3))
    setattr(model.generation_config, name, 1)
    assert torch.equal(greedy(model, ids, 12), texts[1])
    assert torch.equal(greedy(model, ids, 12, **{name: 3}), texts[3])
    with pytest.raises(ValueError, match=f"{name}=0 must be a whole number"):
        greedy(model, ids, 12, **{name: 0})


@pytest.mark.parametrize("tolerance", [-1, float("nan"), float("inf"), "a"])
def test_a_tolerance_that_is_none_is_refused(build_kind, make_ids, tolerance):
    with pytest.raises(ValueError, match=r"stop_tolerance=.* must be a finite number of at least 0"):
        build_kind("nrgpt-ff2w")(make_ids(1, 4), stop_tolerance=tolerance)


@pytest.mark.parametrize("kind", [*ENERGY, "nrgpt-ff2"])
def test_gradients_per_sample_are_those_of_the_samples(build_kind, make_ids, kind):
    model, ids = build_kind(kind), make_ids(3, 6)
    parameters = dict(model.named_parameters())

    def loss(weights, row):
        return torch.func.functional_call(model, weights, (row[None],), {"use_cache": False}).logits.square().mean()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids)
    for row in range(3):
        model.zero_grad()
        loss(parameters, ids[row]).backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(found[name][row], parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


def test_a_trace_counts_adapters(build_kind, make_ids):
    for kind in ("nrgpt-ff2w", "cem-shared"):
        base = build_kind(kind)
        plain = loopergy.trace(base, make_ids(1, 6))
        model = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM"))
        traced = loopergy.trace(model, make_ids(1, 6))
        assert (traced.state_change is None) == (plain.state_change is None)
        assert traced.conditions is not None
        expected = loopergy.trace(model.merge_and_unload(), make_ids(1, 6))
        for part, energies in expected.energies.items():
            torch.testing.assert_close(traced.energies[part], energies, rtol=0, atol=1e-9)
            assert not torch.allclose(plain.energies[part], energies, atol=1e-3)
