# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import random

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from loopergy import LT2Config
from loopergy.configuration.configuration_lt2 import LT2_PRESETS
from loopergy.configuration.looped_config import FULL, RECURRENT, SLIDING

CONFIG_ERRORS = (ValueError, TypeError, StrictDataclassError)


@pytest.mark.parametrize("name", LT2_PRESETS)
def test_presets_round_trip_through_json(name, tmp_path):
    config = LT2Config.from_preset(name)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is LT2Config
    assert again.to_diff_dict() == config.to_diff_dict()


def test_random_patterns_round_trip_and_size_their_caches(tmp_path):
    """Guards A13."""
    choose = random.Random(0)
    for case in range(20):
        mixers = [choose.choice(("full", "window", "gdn")) for _ in range(5)]
        config = LT2Config.from_preset("tiny", layer_mixers=mixers, sliding_window=8, num_loops=choose.randint(1, 4))
        config.save_pretrained(tmp_path / str(case))
        again = AutoConfig.from_pretrained(tmp_path / str(case))
        assert again.layer_mixers == mixers
        kinds = {"full": FULL, "window": SLIDING, "gdn": RECURRENT}
        assert again.slot_plan().layer_types == [kinds[name] for name in mixers] * config.num_loops
        assert len(DynamicCache(config=again)) == 5 * config.num_loops


def test_windows_per_loop_reach_the_cache():
    config = LT2Config.from_preset("tiny", layer_mixers="full", num_loops=3, loop_windows="full->8->4")
    layers = DynamicCache(config=config).layers
    windows = [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]
    assert windows == [None] * 5 + [8] * 5 + [4] * 5


def test_fewer_loops_keep_the_trained_windows_and_more_reuse_the_last(tmp_path):
    LT2Config.from_preset("tiny", layer_mixers="full", num_loops=2, loop_windows="full->8").save_pretrained(tmp_path)
    one = LT2Config.from_pretrained(tmp_path, num_loops=1)
    assert one.slot_plan().windows == [None] * 5
    three = LT2Config.from_pretrained(tmp_path, num_loops=3)
    assert three.slot_plan().windows == [None] * 5 + [8] * 10
    three.save_pretrained(tmp_path / "three")
    assert LT2Config.from_pretrained(tmp_path / "three").num_trained_loops == 2


def test_shared_slots_leave_recurrent_states_one_per_loop():
    plan = LT2Config.from_preset("tiny", kv_sharing="last", num_loops=3).slot_plan()
    assert plan.table[0] == [0, 1, 2, 3, 4]
    assert [row[4] for row in plan.table] == [4, 4, 4]
    assert plan.layer_types.count(RECURRENT) == 12
    assert plan.layer_types.count(FULL) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_loops": 0}, "num_loops"),
        ({"num_loops": 2.5}, "num_loops"),
        ({"layer_mixers": "gdn*4,ful"}, "unknown mixer 'ful'"),
        ({"block_style": "post"}, "block_style='post'"),
        ({"norm_cast": "never"}, "norm_cast='never'"),
        ({"kv_sharing": "all"}, "kv_sharing='all'"),
        ({"kv_sharing": "last", "layer_mixers": "4:1"}, "kv_sharing='last' needs attention layers without windows"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide"),
        ({"gdn_expand_v": 0.3}, "gdn_expand_v=0.3"),
        ({"gdn_num_heads": 5}, "gdn_head_dim is not given"),
        ({"layer_mixers": "nsa", "nsa_num_key_value_heads": 3}, "nsa_num_key_value_heads=3 must divide"),
        ({"layer_mixers": "nsa", "head_dim": 7}, "head_dim=7 must be even"),
        ({"layer_mixers": "nsa", "nsa_block_count": 2}, "nsa_block_count"),
        ({"layer_mixers": "nsa", "nsa_pool_stride": 48}, "nsa_pool_size=64 must be a positive multiple"),
        ({"layer_mixers": "nsa", "nsa_pool_size": 128}, "nsa_block_size=64 must be a positive multiple"),
        ({"layer_mixers": "dsa", "dsa_indexer": "lightning"}, "dsa_indexer='lightning'"),
        ({"layer_mixers": "dsa", "dsa_index_heads": 0}, "dsa_index_heads=0"),
        ({"layer_mixers": "dsa", "dsa_topk": 0}, "dsa_topk"),
        ({"layer_mixers": "dsa", "dsa_rope": True, "dsa_tail_dim": 3}, "dsa_tail_dim=3 must be even"),
        ({"layer_mixers": "dsa", "dsa_indexer": "deepseek", "dsa_index_head_dim": 5}, "dsa_index_head_dim=5"),
        ({"layer_mixers": "dsa", "dsa_indexer_loss_weight": -1}, "dsa_indexer_loss_weight=-1"),
        ({"layer_mixers": "dsa", "dsa_dense_warmup": True}, "dsa_dense_warmup=True"),
        ({"gdn_head_dim": 0}, "gdn_head_dim=0"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"loop_windows": "8"}, "1 entries but num_loops=2"),
    ],
)
def test_wrong_fields_are_named_with_what_is_allowed(fields, said):
    with pytest.raises(CONFIG_ERRORS, match=said):
        LT2Config.from_preset("tiny", **fields)


def test_wrong_loop_windows_of_a_loaded_model_are_counted_by_the_loops_it_was_trained_with(tmp_path):
    LT2Config.from_preset("tiny", layer_mixers="full", num_loops=2).save_pretrained(tmp_path)
    with pytest.raises(CONFIG_ERRORS, match="3 entries but num_trained_loops=2: give one for each of the 2 loops"):
        LT2Config.from_pretrained(tmp_path, num_loops=3, loop_windows="4->4->4")


@pytest.mark.parametrize("field", ["block_style", "norm_cast", "kv_sharing", "dsa_indexer"])
def test_an_unknown_choice_is_answered_in_the_words_of_all_configs(field):
    with pytest.raises(CONFIG_ERRORS, match=f"{field}='odd' must be one of '[a-z0-9_]+', '[a-z0-9_]+'"):
        LT2Config.from_preset("tiny", **{"layer_mixers": "dsa", field: "odd"})


def test_a_field_of_an_absent_mixer_is_not_checked():
    assert LT2Config.from_preset("tiny", layer_mixers="full", gdn_num_heads=5).num_hidden_layers == 5


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"lt2-0\.6b-full"):
        LT2Config.from_preset("lt2-7b")
