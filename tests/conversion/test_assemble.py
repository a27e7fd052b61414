# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.conversion.assemble import lt2_of_tensors, renamed
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM


@pytest.mark.parametrize(("tied", "stored"), [(True, True), (True, False), (False, True)])
def test_a_model_is_built_from_its_tensors_in_any_order_and_a_tied_head_need_not_be_stored(ids, tied, stored):
    config = LT2Config.from_preset("tiny", layer_mixers="gdn,full", tie_word_embeddings=tied)
    model = LT2ForCausalLM(config).eval()
    state = dict(sorted(model.state_dict().items()))
    assert next(iter(state)) == "lm_head.weight"
    if not stored:
        state.pop("lm_head.weight")
    built = lt2_of_tensors(config, state, torch.float64)
    assert (built.lm_head.weight is built.model.embed_tokens.weight) == tied
    with torch.no_grad():
        torch.testing.assert_close(built(ids).logits, model.double()(ids).logits)


def test_a_name_follows_the_first_pattern_that_matches_all_of_it():
    names = {r"a\.(\d+)": r"layers.\1", r"a\.(.+)": r"other.\1"}
    assert renamed("a.3", names) == "layers.3"
    assert renamed("a.x", names) == "other.x"
    assert renamed("b.a.3", names) is None
