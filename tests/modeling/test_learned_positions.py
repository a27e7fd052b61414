# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Check what happens at the end of a learned position table."""

import pytest
import torch


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


def test_a_text_beyond_the_position_table_is_refused_with_the_way_out(shifted_nrgpt):
    """Guards H16, B7."""
    model = shifted_nrgpt(max_position_embeddings=16)
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


def test_a_text_is_continued_from_embeddings(shifted_nrgpt):
    model, ids = shifted_nrgpt(), draw(2, 6)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), model.generate(ids, **options)[:, 6:])
