# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, DynamicCache, StaticCache

import loopergy
from loopergy import OuroConfig
from loopergy.modeling.building_blocks import RotaryEmbedding

CONFIG_ERRORS = (ValueError, TypeError, StrictDataclassError)
# What ByteDance/Ouro-1.4B ships, in the old spelling of the rotary fields.
OFFICIAL = {
    "architectures": ["OuroForCausalLM"],
    "model_type": "ouro",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 24,
    "layer_types": ["full_attention"] * 24,
    "attention_dropout": 0.0,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}


def written(config, folder) -> dict:
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def test_the_official_file_loads_and_saves_with_its_own_keys(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is OuroConfig
    saved = written(config, tmp_path / "saved")
    repaired = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    for key, value in {**OFFICIAL, **repaired}.items():
        if key not in ("architectures", "torch_dtype"):
            assert saved[key] == value, key
    assert saved["dtype"] == "bfloat16"
    assert written(AutoConfig.from_pretrained(tmp_path / "saved"), tmp_path / "again") == saved


def test_the_rotary_base_survives_both_spellings(tmp_path):
    """Guards E11."""
    old = OuroConfig.from_dict({**OFFICIAL})
    new = OuroConfig.from_dict(
        {**{key: value for key, value in OFFICIAL.items() if not key.startswith("rope")},
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    )  # fmt: skip
    tables = [RotaryEmbedding(config).inv_freq for config in (old, new, OuroConfig.from_dict(old.to_dict()))]
    assert all((table == tables[0]).all() for table in tables)
    assert tables[0][1].item() == pytest.approx(1e6 ** (-2 / 128), rel=1e-6)


def test_scaled_rotary_entries_survive_a_round_trip(tmp_path):
    """Guards E11."""
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 1024}
    config = OuroConfig.from_preset("tiny", rope_parameters=yarn)
    saved = written(config, tmp_path)
    assert saved["rope_theta"] == 5e5
    assert saved["rope_scaling"]["factor"] == 4.0
    again = OuroConfig.from_pretrained(tmp_path).rope_parameters
    assert {key: again[key] for key in yarn} == yarn


def test_the_shipped_special_tokens_are_repaired_at_load_and_only_there(caplog):
    """Guards D1."""
    assert OuroConfig.from_dict(dict(OFFICIAL)).eos_token_id == 2
    other = {**OFFICIAL, "eos_token_id": 7}
    assert OuroConfig.from_dict(other).bos_token_id == 0
    assert OuroConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0).eos_token_id == 0


def test_num_loops_is_the_checkpoints_total_ut_steps():
    config = OuroConfig.from_preset("tiny", num_loops=2)
    assert config.total_ut_steps == config.num_loops == 2
    config.num_loops = 3
    assert config.total_ut_steps == 3
    assert "num_loops" not in config.to_dict()


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_caches_have_one_slot_per_loop_and_layer(loops):
    """Guards A4."""
    config = OuroConfig.from_preset("tiny", num_loops=loops)
    assert len(DynamicCache(config=config)) == loops * 2
    assert len(StaticCache(config=config, max_cache_len=4)) == loops * 2
    assert config.num_hidden_layers == 2


def test_shared_slots_are_one_per_layer():
    plan = OuroConfig.from_preset("tiny", kv_sharing="last").slot_plan()
    assert plan.table == [[0, 1]] * 3
    assert len(plan.layer_types) == 2


def test_loading_with_another_loop_count_changes_the_cache_and_is_kept(tmp_path):
    """Guards D4."""
    OuroConfig.from_preset("tiny").save_pretrained(tmp_path)
    config = OuroConfig.from_pretrained(tmp_path, num_loops=2)
    assert len(DynamicCache(config=config)) == 4
    config.save_pretrained(tmp_path / "two")
    assert OuroConfig.from_pretrained(tmp_path / "two").num_loops == 2


@pytest.mark.parametrize("loops", [0, -1, 2.5])
def test_a_loop_count_that_is_none_is_refused(loops):
    """Guards D4."""
    with pytest.raises(CONFIG_ERRORS, match=r"total_ut_steps|num_loops"):
        OuroConfig.from_preset("tiny", num_loops=loops)
    config = OuroConfig.from_preset("tiny")
    with pytest.raises(CONFIG_ERRORS, match=r"total_ut_steps|num_loops"):
        config.num_loops = loops


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"use_sliding_window": True, "sliding_window": 4}, "LT2Config"),
        ({"training_loss": "first"}, "training_loss='first'"),
        ({"kv_sharing": "all"}, "kv_sharing='all'"),
        ({"early_exit_step": -1}, "early_exit_step=-1"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_fields_that_disagree_are_named(fields, said):
    with pytest.raises(CONFIG_ERRORS, match=said):
        OuroConfig.from_preset("tiny", **fields)


@pytest.mark.parametrize("threshold", [0, 0.5, 1.0, float("inf")])
def test_every_exit_threshold_of_at_least_zero_is_allowed(threshold):
    assert OuroConfig.from_preset("tiny", early_exit_threshold=threshold).early_exit_threshold == threshold


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"ouro-1.4b, ouro-2.6b, tiny"):
        OuroConfig.from_preset("ouro-7b")


def test_the_package_says_its_version():
    assert loopergy.__version__
