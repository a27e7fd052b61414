# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold decoding with folded weights against the block's own steps."""

import threading

import pytest
import torch
from transformers import DynamicCache

from loopergy.modeling.folded_step import FOLD_AFTER, FoldedSteps

KINDS = {
    "official": {},
    "strict-ff1": {"ff_energy": "ff1", "exclude_self": True},
    "ff2-gamma": {"ff_energy": "ff2", "exclude_self": True, "eta_type": "gamma", "norm_type": "layernorm"},
    "rms-diag": {"norm_type": "rmsnorm", "eta_type": "diag", "attention_beta": 0.5, "learn_alpha": True},
    "tangent": {"tangent_projection": True, "exclude_self": True, "eta_type": "identity"},
}


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("padding", [0, 3])
def test_folded_steps_are_those_of_the_block(kind, padding, shifted_nrgpt):
    model, ids = shifted_nrgpt(**KINDS[kind]), draw(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    folded, parts, cache = FoldedSteps(model.model.block), [], DynamicCache(config=model.config)
    with torch.no_grad():
        for column in range(24):
            seen = mask[:, : column + 1] if padding else None
            parts.append(model(ids[:, [column]], attention_mask=seen, cache=cache, folded_steps=folded).logits)
        wanted = model(ids, attention_mask=mask).logits
    assert folded.into is not None
    torch.testing.assert_close(torch.cat(parts, dim=1)[:, padding:], wanted[:, padding:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_long_generated_text_is_that_of_a_run_without_cache(kind, shifted_nrgpt):
    model, ids = shifted_nrgpt(**KINDS[kind]), draw(1, 4)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **options).equal(model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("kind", list(KINDS))
def test_beams_take_folded_steps_and_find_the_texts_of_a_run_without_cache(kind, monkeypatch, shifted_nrgpt):
    model, ids = shifted_nrgpt(**KINDS[kind]), draw(2, 4)
    options = {"max_new_tokens": 24, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    plain, taken, descend = model.generate(ids, use_cache=False, **options), [], FoldedSteps.descend
    monkeypatch.setattr(FoldedSteps, "descend", lambda *call: taken.append(1) or descend(*call))
    assert model.generate(ids, **options).equal(plain)
    assert len(taken) >= 12


def test_a_forward_in_the_middle_of_a_generation_takes_the_block_s_own_steps(monkeypatch, shifted_nrgpt):
    """What is folded belongs to one call of generate, not to the model."""
    model, ids, taken, descend = shifted_nrgpt(), draw(1, 4), [], FoldedSteps.descend
    monkeypatch.setattr(FoldedSteps, "descend", lambda *call: taken.append(1) or descend(*call))
    counts = []

    def ask_meanwhile(input_ids, scores):
        before = len(taken)
        model(input_ids[:, -1:])
        counts.append(len(taken) - before)
        return scores

    model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0, logits_processor=[ask_meanwhile])
    assert counts == [0] * 20
    assert len(taken) == 20 - FOLD_AFTER
    assert not any(isinstance(value, FoldedSteps) for module in model.modules() for value in vars(module).values())


def test_generations_in_two_threads_fold_the_weights_each_for_itself(monkeypatch, shifted_nrgpt):
    model, prompts, lengths, made, found = shifted_nrgpt(), (draw(1, 5), draw(1, 5, seed=2)), (30, 14), set(), {}
    descend, options = FoldedSteps.descend, {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = [
        model.generate(ids, max_new_tokens=length, use_cache=False, **options)
        for ids, length in zip(prompts, lengths, strict=True)
    ]
    monkeypatch.setattr(FoldedSteps, "descend", lambda self, *call: made.add(id(self)) or descend(self, *call))
    together = threading.Barrier(2)

    def in_step(input_ids, scores):
        if input_ids.shape[1] < 17:
            together.wait(timeout=60)
        return scores

    def run(index):
        found[index] = model.generate(
            prompts[index], max_new_tokens=lengths[index], logits_processor=[in_step], **options
        )

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0].equal(wanted[0])
    assert found[1].equal(wanted[1])
    assert len(made) == 2


@pytest.mark.parametrize("draft", ["gpt", "nrgpt", "early exit", "lookup"])
def test_drafts_of_any_kind_need_not_know_folded_steps(build_kind, draft, shifted_nrgpt):
    model, ids = shifted_nrgpt(), draw(1, 4)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    drafting = {
        "gpt": lambda: {"assistant_model": build_kind("gpt-none")},
        "nrgpt": lambda: {"assistant_model": shifted_nrgpt(num_steps=1)},
        "early exit": lambda: {"assistant_early_exit": 1},
        "lookup": lambda: {"prompt_lookup_num_tokens": 3},
    }[draft]()
    assert model.generate(ids, **options, **drafting).equal(model.generate(ids, use_cache=False, **options))


def test_a_cache_of_fixed_size_is_decoded_with_folded_steps_from_the_first_token_on(shifted_nrgpt):
    model, ids, folded = shifted_nrgpt(), draw(1, 4), []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: folded.append(kwargs["folded_steps"].into is not None), with_kwargs=True
    )
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, cache_implementation="static", **options)
    assert folded == [True] * 5
    hook.remove()
    assert found.equal(model.generate(ids, use_cache=False, **options))


def test_changed_weights_are_seen_by_the_next_call(shifted_nrgpt):
    model, ids = shifted_nrgpt(), draw(1, 4)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **options)
    with torch.no_grad():
        model.model.block.eta.weight.neg_()
    after = model.generate(ids, **options)
    assert not after.equal(before)
    assert after.equal(model.generate(ids, use_cache=False, **options))


def test_types_that_would_round_the_products_are_not_folded(shifted_nrgpt):
    model = shifted_nrgpt().bfloat16()
    folded, cache = FoldedSteps(model.model.block), DynamicCache(config=model.config)
    with torch.no_grad():
        for column in range(20):
            model(draw(1, 20)[:, [column]], cache=cache, folded_steps=folded)
    assert folded.into is None


def test_a_hook_on_a_layer_inside_keeps_the_weights_from_being_folded(shifted_nrgpt):
    model, calls = shifted_nrgpt(), []
    model.model.block.ff.fc1.register_forward_hook(lambda *call: calls.append(1))
    model.generate(draw(1, 4), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert len(calls) == 20 * 3


def test_a_rate_that_is_no_plain_matrix_keeps_the_weights_from_being_folded(shifted_nrgpt):
    """Guards J5."""
    model = shifted_nrgpt()
    block = model.model.block
    block.eta.__class__ = type("Packed", (torch.nn.Linear,), {})
    folded = FoldedSteps(block)
    with torch.no_grad():
        for token in draw(1, 12).split(1, dim=1):
            model(token, folded_steps=folded)
    assert folded.into is None
