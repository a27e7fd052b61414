# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""How deep a call computes: what `generate`, `generate_batch`, drafts and base models make of what says it."""

import numpy as np
import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from loopergy import OuroForCausalLM, OuroForSequenceClassification

EXACT = {"rtol": 0, "atol": 1e-10}


def greedy(model, ids, tokens=8, **kwargs):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **kwargs)


def served(model, ids, **kwargs) -> list[int]:
    settings = ContinuousBatchingConfig(page_size=4, num_blocks=24, max_batch_tokens=16)
    kwargs.setdefault("max_new_tokens", 8)
    (result,) = model.generate_batch([ids[0].tolist()], continuous_batching_config=settings, **kwargs).values()
    assert result.error is None
    return result.generated_tokens


@pytest.fixture
def ouro(make_ouro):
    model = make_ouro()
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def test_an_exit_step_generates_one_text_however_it_is_given(ouro, make_ids):
    ids = make_ids(1, 6)
    texts = [greedy(ouro, ids, num_loops=loops) for loops in (1, 2, 3)]
    assert not torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[1], texts[2])
    for step, text in enumerate(texts):
        expected = text[0, 6:].tolist()
        assert torch.equal(greedy(ouro, ids, exit_at_step=step), text)
        assert served(ouro, ids, exit_at_step=step) == expected
        given = GenerationConfig(exit_at_step=step, max_new_tokens=8, do_sample=False)
        assert torch.equal(ouro.generate(ids, given, pad_token_id=0), text)
        assert served(ouro, ids, generation_config=given) == expected
    ouro.generation_config.exit_at_step = 0
    assert torch.equal(greedy(ouro, ids), texts[0])
    assert torch.equal(greedy(ouro, ids, exit_at_step=1), texts[1])
    assert served(ouro, ids, exit_at_step=1) == texts[1][0, 6:].tolist()


@torch.no_grad()
def test_a_cache_holds_the_loops_up_to_the_exit_step(ouro, make_ids):
    cache = greedy(ouro, make_ids(1, 4), 3, exit_at_step=1, return_dict_in_generate=True).cache
    assert len(cache) == 2 * ouro.config.num_hidden_layers


def test_an_exit_step_outside_the_loops_is_refused_before_the_work_starts(ouro, make_ids):
    for call in (greedy, served):
        with pytest.raises(ValueError, match="exit_at_step=3 must be between 0 and 2"):
            call(ouro, make_ids(1, 4), exit_at_step=3)


@pytest.mark.parametrize("step", [1.5, True, "1", -1, 3, float("nan"), torch.tensor(1.0)])
def test_an_exit_step_that_is_none_is_named_as_such(ouro, make_ids, step):
    with pytest.raises(ValueError, match=r"exit_at_step=.* must be between 0 and 2"):
        ouro(make_ids(1, 4), exit_at_step=step)


@torch.no_grad()
def test_an_exit_step_may_be_a_whole_number_of_numpy_and_torch(ouro, make_ids):
    ids = make_ids(1, 4)
    for step in (np.int64(1), torch.tensor(1)):
        torch.testing.assert_close(ouro(ids, exit_at_step=step).logits, ouro(ids, num_loops=2).logits, **EXACT)


@pytest.mark.parametrize("threshold", [float("nan"), "0.5", True, [0.5], torch.ones(2), torch.tensor(float("nan"))])
def test_an_exit_threshold_that_is_no_number_is_refused(ouro, make_ids, threshold):
    for model in (ouro, ouro.model):
        with pytest.raises(ValueError, match=r"exit_threshold=.* must be a number"):
            model(make_ids(1, 4), exit_threshold=threshold)


@torch.no_grad()
def test_an_exit_threshold_may_be_a_number_of_numpy_and_torch(ouro, make_ids):
    ids = make_ids(2, 9)
    expected = ouro(ids, exit_threshold=0.5).logits
    assert not torch.equal(expected, ouro(ids).logits)
    for threshold in (np.float64(0.5), np.float32(0.5), torch.tensor(0.5)):
        torch.testing.assert_close(ouro(ids, exit_threshold=threshold).logits, expected, **EXACT)
    assert torch.equal(ouro(ids, exit_threshold=float("inf")).logits, ouro(ids).logits)


def test_keywords_that_continuous_batching_would_drop_are_refused(ouro, make_lt2, make_ids):
    ids = make_ids(1, 4)
    for model in (ouro, make_lt2(layer_mixers="full")):
        for junk in ({"junk": 3}, {"output_loop_logits": True}, {"do_sample": False}):
            with pytest.raises(ValueError, match=rf"generate_batch takes no {next(iter(junk))}.*generation_config"):
                served(model, ids, **junk)


@torch.no_grad()
def test_a_depth_that_a_model_does_not_have_is_refused_in_a_call_and_left_in_a_config(make_lt2, make_cem, make_ids):
    ids = make_ids(1, 6)
    for model, foreign in ((make_lt2(), "exit_at_step"), (make_lt2(), "num_steps"), (make_cem(), "num_loops")):
        with pytest.raises(ValueError, match=rf"takes \['num_.*not \['{foreign}'\]"):
            greedy(model, ids, **{foreign: 1})
        expected = greedy(model, ids)
        setattr(model.generation_config, foreign, 1)
        assert torch.equal(greedy(model, ids), expected)


def test_the_exit_step_of_the_config_holds_in_every_model(make_ouro, make_ids):
    ids, plain, early = make_ids(2, 6), make_ouro(), make_ouro(early_exit_step=0)
    one = plain.model(ids, num_loops=1).last_hidden_state
    assert torch.equal(early.model(ids).last_hidden_state, one)
    assert torch.equal(early.model(ids, exit_threshold=0.9).last_hidden_state, one)
    assert torch.equal(early.model(ids, exit_at_step=2).last_hidden_state, plain.model(ids).last_hidden_state)
    assert torch.equal(early(ids, exit_at_step=1).logits, plain(ids, num_loops=2).logits)
    assert len(early.model(ids, output_loop_hidden_states=True).loop_hidden_states) == 1
    # The loss is of all loops, as `training_loss` says.
    assert torch.equal(early(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    early.config.num_labels = 3
    classifier = OuroForSequenceClassification(early.config).double().eval()
    passed = []
    classifier.model.norm.register_forward_hook(lambda *call: passed.append(1))
    classifier(ids[:1])
    assert len(passed) == 1


def test_an_exit_step_of_the_config_beyond_the_loops_is_named(make_ouro, make_ids):
    with pytest.raises(ValueError, match="early_exit_step=5 must be between 0 and 2"):
        make_ouro(early_exit_step=5)(make_ids(1, 4))


@torch.no_grad()
def test_a_draft_computes_as_deep_as_itself_says(ouro, make_ids, tmp_path):
    """Guards A8."""
    ids = make_ids(1, 6)
    ouro.save_pretrained(tmp_path)
    draft = OuroForCausalLM.from_pretrained(tmp_path, num_loops=1, dtype=torch.float64).eval()
    draft.generation_config.eos_token_id = None
    passed = []
    draft.model.norm.register_forward_hook(lambda *call: passed.append(1))
    calls = []
    draft.register_forward_hook(lambda *call: calls.append(1))
    for depth in ({"num_loops": 3}, {"exit_at_step": 1}, {"exit_threshold": 0.7}, {"use_weighted_exit": True}):
        expected = greedy(ouro, ids, 10, **depth)
        assert torch.equal(greedy(ouro, ids, 10, assistant_model=draft, **depth), expected)
        assert len(passed) == len(calls) > 0
        given = GenerationConfig(max_new_tokens=10, do_sample=False, pad_token_id=0, **depth)
        assert torch.equal(ouro.generate(ids, given, assistant_model=draft), expected)
        assert len(passed) == len(calls)


@torch.no_grad()
def test_a_draft_of_another_family_is_not_told_the_depth(ouro, make_ids):
    """Guards A8."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    draft, ids = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes, eos_token_id=None)).eval(), make_ids(1, 6)
    for depth in ({"num_loops": 2}, {"exit_at_step": 1}):
        assert torch.equal(greedy(ouro, ids, assistant_model=draft, **depth), greedy(ouro, ids, **depth))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("training_loss", "last", "training_loss='last'"),
        ("kv_sharing", "Last", "kv_sharing='Last'"),
        ("early_exit_step", -1, "early_exit_step=-1"),
    ],
)
def test_fields_that_loading_overrides_are_checked_again(make_ouro, tmp_path, field, value, message):
    make_ouro(dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        OuroForCausalLM.from_pretrained(tmp_path, **{field: value})
