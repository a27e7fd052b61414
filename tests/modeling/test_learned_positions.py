# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Check what happens at the end of a learned position table."""

import pytest
import torch

from loopergy import NRGPTConfig, NRGPTForCausalLM


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


def test_a_text_beyond_the_position_table_is_refused_with_the_way_out():
    """Guards H16, B7."""
    model = build(max_position_embeddings=16)
    with pytest.raises(ValueError, match="max_position_embeddings=16"):
        model(draw(1, 17))
    with pytest.raises(ValueError, match="recompute_window=True"):
        model.generate(draw(1, 10), max_new_tokens=8)
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[:, :6] = 0
    assert model(draw(1, 20), attention_mask=mask).logits.isfinite().all()
    assert model.generate(draw(1, 20), attention_mask=mask, max_new_tokens=2, pad_token_id=0).shape[1] == 22
    with pytest.raises(ValueError, match="assisted"):
        model.generate(draw(1, 4), max_new_tokens=20, prompt_lookup_num_tokens=2, recompute_window=True)


def test_a_text_is_continued_from_embeddings():
    model, ids = build(), draw(2, 6)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), model.generate(ids, **options)[:, 6:])
