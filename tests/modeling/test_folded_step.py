# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold decoding with folded weights against the block's own steps."""

import pytest
import torch
from transformers import DynamicCache

from loopergy import NRGPTConfig, NRGPTForCausalLM
from loopergy.modeling.folded_step import FoldedSteps

KINDS = {
    "official": {},
    "strict-ff1": {"ff_energy": "ff1", "exclude_self": True},
    "ff2-gamma": {"ff_energy": "ff2", "exclude_self": True, "eta_type": "gamma", "norm_type": "layernorm"},
    "rms-diag": {"norm_type": "rmsnorm", "eta_type": "diag", "attention_beta": 0.5, "learn_alpha": True},
    "tangent": {"tangent_projection": True, "exclude_self": True, "eta_type": "identity"},
}


def build(**fields) -> NRGPTForCausalLM:
    torch.manual_seed(0)
    model = NRGPTForCausalLM(NRGPTConfig.from_preset("tiny", **{"initializer_range": 0.2, **fields})).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("padding", [0, 3])
def test_folded_steps_are_those_of_the_block_and_nothing_of_them_stays(kind, padding):
    model, ids = build(**KINDS[kind]), draw(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    block, parts = model.model.block, []
    with torch.no_grad(), block.folded_for_decoding():
        cache = DynamicCache(config=model.config)
        for column in range(24):
            seen = mask[:, : column + 1] if padding else None
            parts.append(model(ids[:, [column]], attention_mask=seen, cache=cache).logits)
        assert block.folded.into is not None
    assert block.folded is None
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(torch.cat(parts, dim=1)[:, padding:], wanted[:, padding:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_long_generated_text_is_that_of_a_run_without_cache(kind):
    model, ids = build(**KINDS[kind]), draw(1, 4)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **options).equal(model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("kind", list(KINDS))
def test_beams_take_folded_steps_and_find_the_texts_of_a_run_without_cache(kind, monkeypatch):
    model, ids = build(**KINDS[kind]), draw(2, 4)
    options = {"max_new_tokens": 24, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    plain, taken, descend = model.generate(ids, use_cache=False, **options), [], FoldedSteps.descend
    monkeypatch.setattr(FoldedSteps, "descend", lambda *call: taken.append(1) or descend(*call))
    assert model.generate(ids, **options).equal(plain)
    assert len(taken) >= 12
    assert model.model.block.folded is None


def test_whoever_ends_first_unfolds_nobody_else():
    block = build().model.block
    with block.folded_for_decoding():
        folded = block.folded
        with block.folded_for_decoding():
            assert block.folded is folded
        assert block.folded is folded
    assert block.folded is None


def test_changed_weights_are_seen_by_the_next_call():
    model, ids = build(), draw(1, 4)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **options)
    with torch.no_grad():
        model.model.block.eta.weight.neg_()
    after = model.generate(ids, **options)
    assert not after.equal(before)
    assert after.equal(model.generate(ids, use_cache=False, **options))


def test_types_that_would_round_the_products_are_not_folded():
    model = build().bfloat16()
    with torch.no_grad(), model.model.block.folded_for_decoding():
        cache = DynamicCache(config=model.config)
        for column in range(20):
            model(draw(1, 20)[:, [column]], cache=cache)
        assert model.model.block.folded.into is None


def test_a_hook_on_a_layer_inside_keeps_the_weights_from_being_folded():
    model, calls = build(), []
    model.model.block.ff.fc1.register_forward_hook(lambda *call: calls.append(1))
    model.generate(draw(1, 4), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert len(calls) == 20 * 3


def test_a_rate_that_is_no_plain_matrix_keeps_the_weights_from_being_folded():
    """Guards J5."""
    model = build()
    block = model.model.block
    block.eta.__class__ = type("Packed", (torch.nn.Linear,), {})
    with torch.no_grad(), block.folded_for_decoding():
        for token in draw(1, 12).split(1, dim=1):
            model(token)
        assert block.folded.into is None
