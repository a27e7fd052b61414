# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Random window layouts: what is drawn, and what the vote is."""

import pytest
import torch

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.modeling.random_windows import RandomWindows


def tiny(**fields):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LT2Config(**{**sizes, "num_hidden_layers": 4, "num_loops": 3, "layer_mixers": "full", **fields})


def model_of(config, seed=0):
    torch.manual_seed(seed)
    return LT2ForCausalLM(config).double().eval()


def full_visits(windows):
    return [(loop, layer) for loop, row in enumerate(windows) for layer, window in enumerate(row) if window is None]


def test_the_share_is_rounded_down_to_visits_and_the_rest_has_the_window():
    windows = RandomWindows(share_full=0.3, window=7).draw(tiny(), seed=0)
    assert len(full_visits(windows)) == int(12 * 0.3)
    assert {window for row in windows for window in row} == {7, None}
    assert windows == RandomWindows(share_full=0.3, window=7).draw(tiny(), seed=0)
    assert windows != RandomWindows(share_full=0.3, window=7).draw(tiny(), seed=1)


def test_a_share_that_rounding_cuts_short_is_whole():
    windows = RandomWindows.from_pattern("random:48:1").draw(tiny(num_hidden_layers=7, num_loops=7), seed=0)
    assert len(full_visits(windows)) == 1


def test_every_visit_is_drawn_in_the_end():
    drawn = [full_visits(RandomWindows(0.25).draw(tiny(), seed)) for seed in range(60)]
    assert {visit for visits in drawn for visit in visits} == {
        (loop, layer) for loop in range(3) for layer in range(4)
    }


def test_ends_that_are_kept_count_in_the_share():
    drawn = [full_visits(RandomWindows(0.75, keep_ends=True).draw(tiny(), seed)) for seed in range(20)]
    ends = {(loop, layer) for loop in range(3) for layer in (0, 3)}
    assert all(ends <= set(visits) and len(visits) == 9 for visits in drawn)
    assert len(full_visits(RandomWindows(0.0, keep_ends=True).draw(tiny(), 0))) == 6


def test_recurrent_layers_are_no_visits():
    config = tiny(layer_mixers="gdn,full", num_hidden_layers=4)
    windows = RandomWindows(share_full=0.5, window=5).draw(config, seed=0)
    assert all(row[0] is row[2] is None for row in windows)
    assert sum(row[layer] is None for row in windows for layer in (1, 3)) == 3
    with pytest.raises(ValueError, match="layer_mixers has no 'full' or 'window' layer"):
        RandomWindows().draw(tiny(layer_mixers="gdn"), 0)


def test_a_vote_is_the_mean_over_models_made_with_each_layout():
    windows, ids = RandomWindows(share_full=0.25, window=3), torch.randint(32, (2, 12))
    model = model_of(tiny())
    singles = []
    for seed in (4, 5, 6):
        single = model_of(tiny(loop_windows=windows.draw(tiny(), seed)))
        single.load_state_dict(model.state_dict())
        singles.append(single(ids).logits)
    assert not torch.allclose(singles[0], singles[1])
    torch.testing.assert_close(windows.vote(model, ids, votes=3, seed=4), sum(singles) / 3, rtol=0, atol=1e-12)
    assert model.config.loop_windows is None


def test_a_model_keeps_its_layout_when_a_vote_fails():
    model = model_of(tiny(loop_windows="full->4->2"))
    with pytest.raises(ValueError, match="num_loops"):
        RandomWindows().vote(model, torch.zeros(1, 4, dtype=torch.long), num_loops=0)
    assert model.config.loop_windows == [None, 4, 2]


@pytest.mark.parametrize(("fields", "text"), [({"share_full": 1.5}, "share_full"), ({"window": 0}, "window")])
def test_bad_settings_are_named(fields, text):
    with pytest.raises(ValueError, match=text):
        RandomWindows(**fields)
    with pytest.raises(ValueError, match="votes"):
        RandomWindows().vote(model_of(tiny()), torch.zeros(1, 4, dtype=torch.long), votes=0)


def test_the_official_spellings_are_read():
    assert RandomWindows.from_pattern("random:3:1", 64) == RandomWindows(0.25, 64)
    assert RandomWindows.from_pattern("bookend_random:4:1") == RandomWindows(0.2, 2048, keep_ends=True)
    for text in ("random:3", "random:0:0", "bookend:2"):
        with pytest.raises(ValueError, match="is not a random layout"):
            RandomWindows.from_pattern(text)
