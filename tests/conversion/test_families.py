# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaModel

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.configuration.configuration_ouro import OuroConfig
from loopergy.conversion import ConversionError, convert, parse_keep_layers, student_config

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(model_type: str, **fields):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**TINY, **fields})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("keep", "want"),
    [
        ("all", list(range(24))),
        ([], []),
        ([5, 1], [1, 5]),
        ("3, 7", [3, 7]),
        (6, [3, 7, 11, 15, 19, 23]),
        (0.25, [3, 7, 11, 15, 19, 23]),
        (0, []),
        (0.0, []),
        (1, [23]),
        (1.0, list(range(24))),
        (24, list(range(24))),
        (5, [3, 8, 13, 18, 23]),
    ],
)
def test_kept_layers_can_be_spelt_in_many_ways(keep, want):
    assert parse_keep_layers(keep, 24) == want


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        ([1, 1], r"\[1\] given twice"),
        ([-1], r"\[-1\] out of range"),
        ([24], r"\[24\] out of range"),
        ([1.5], "whole numbers"),
        ([True], "whole numbers"),
        (25, "out of range"),
        (-1, "out of range"),
        (1.5, "out of range"),
        (float("nan"), "out of range"),
        ("some", "not understood"),
        ("{0}", "not understood"),
        ("", "names no layer"),
        (" , ", "names no layer"),
        (True, "not understood"),
    ],
)
def test_wrong_layers_are_refused_with_the_allowed_range(keep, says):
    """Guards H9: duplicates, negative and out-of-range layers."""
    with pytest.raises(ValueError, match=rf"{says}.*allowed: different layers in 0\.\.23"):
        parse_keep_layers(keep, 24)


@pytest.mark.parametrize(
    ("model_type", "fields", "says"),
    [
        ("mistral", {"sliding_window": 32}, r"sliding-window attention \(sliding_window=32\)"),
        ("qwen3", {}, "q/k-norm"),
        ("qwen2", {}, "attention biases on k, q, v alone"),
        ("gemma", {}, r"\(1 \+ weight\) norms"),
        ("gemma2", {}, r"soft-capped logits"),
        ("granite", {}, r"attention_multiplier=1\.0"),
        ("cohere", {}, "parallel attention and MLP"),
        ("mixtral", {"num_local_experts": 2}, "a mixture of experts"),
        ("phi3", {}, "fused projections"),
        ("olmo2", {}, "q/k-norm"),
        ("smollm3", {"no_rope_layer_interval": 2}, r"layers without rotary embeddings \(no_rope_layers"),
        ("helium", {}, "interleaved rotary embeddings"),
        ("stablelm", {}, "a config without rms_norm_eps"),
        ("gpt_neox", {}, r"\(GPTNeoXForCausalLM\) is not built like"),
        ("ministral3", {"sliding_window": None}, r"rope_parameters\['llama_4_scaling_beta'\]"),
    ],
)
def test_a_teacher_outside_the_families_is_refused_by_the_name_of_what_it_has(model_type, fields, says):
    with pytest.raises(ConversionError, match=says):
        convert(make(model_type, **fields), [0])


def test_an_lt2_is_no_teacher():
    teacher = AutoModelForCausalLM.from_config(LT2Config.from_preset("tiny"))
    with pytest.raises(ConversionError, match="an LT2 is no teacher: its layers have mixers of their own already"):
        convert(teacher, [0])
    with pytest.raises(ConversionError, match="an LT2 is no teacher"):
        student_config(teacher.config, [0])


def test_a_lookalike_that_computes_the_same_is_converted_and_compared():
    teacher = make("mistral", sliding_window=None)
    report = convert(teacher, [0]).report
    assert report.verified is not None
    assert report.verified["max_abs_difference"] == 0
    assert "logits differ from the teacher's by at most 0" in report.summary()


def test_a_lookalike_that_computes_something_else_is_found_by_its_logits(make_llama):
    """The names fit and no field tells: only running both shows it."""
    teacher = make_llama()
    teacher.config.model_type = "llama_in_disguise"
    convert(teacher, [0])
    attention = teacher.model.layers[1].self_attn
    attention.scaling *= 2
    with pytest.raises(ConversionError, match="computes something else"):
        convert(teacher, [0])
    assert convert(teacher, [0], verify=False).report.verified is None


def test_a_lookalike_that_treats_far_positions_otherwise_is_found_too(make_llama):
    teacher = make_llama()
    teacher.config.model_type = "llama_in_disguise"
    limit = teacher.config.max_position_embeddings
    assert convert(teacher, "all").report.verified["max_abs_difference"] < 1e-6
    far = teacher.model.rotary_emb.forward
    teacher.model.rotary_emb.forward = lambda x, position_ids: far(x, position_ids * (1 + (position_ids > limit // 2)))
    with pytest.raises(ConversionError, match="computes something else"):
        convert(teacher, "all")


def test_a_model_without_a_head_is_refused(make_llama):
    with pytest.raises(ConversionError, match=r"LlamaModel\) has no language-model head"):
        convert(LlamaModel(make_llama().config), [0])


def test_a_wrapped_or_foreign_module_is_refused(make_llama):
    with pytest.raises(ConversionError, match="pass the transformers model itself"):
        convert(torch.nn.Sequential(make_llama()), [0])


def test_unmerged_adapters_are_refused(make_llama):
    from peft import LoraConfig, get_peft_model

    teacher = make_llama()
    wrapped = get_peft_model(teacher, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(ConversionError, match="merge_and_unload"):
        convert(wrapped, [0])
    with pytest.raises(ConversionError, match="merge_and_unload"):
        convert(teacher, [0])


def test_packed_weights_are_refused(make_llama):
    teacher = make_llama()
    projection = teacher.model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(torch.zeros(64, 32, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ConversionError, match=r"quantised or sharded weights.*GgufConfig\(dequantize=True\)"):
        convert(teacher, [0])


def test_unknown_mixers_and_options_list_the_allowed_ones(make_llama):
    teacher = make_llama()
    with pytest.raises(ValueError, match=r"mixer='mamba' is not understood; allowed: gdn, window, kda"):
        convert(teacher, [0], mixer="mamba")
    with pytest.raises(ValueError, match=r"gdn_head_dim.*allowed: gdn_use_short_conv"):
        convert(teacher, [0], gdn_head_dim=8)
    with pytest.raises(ValueError, match="needs sliding_window"):
        convert(teacher, [0], mixer="window")


def test_biases_come_along_into_gdn_layers(make_llama):
    """Guards H1: dropping them quietly would lose part of the teacher."""
    teacher = make_llama(attention_bias=True)
    student, kv_groups = convert(teacher, [0]).model, 2
    for name in "qkvo":
        mine = student.model.layers[1].self_attn.get_parameter(f"{name}_proj.bias")
        theirs = teacher.model.layers[1].self_attn.get_parameter(f"{name}_proj.bias")
        if name in "kv":
            theirs = theirs.unflatten(0, (2, -1)).repeat_interleave(kv_groups, dim=0).flatten()
        assert torch.equal(mine, theirs)


def test_the_students_config_is_the_teachers_with_other_mixers():
    teacher = OuroConfig.from_preset("ouro-1.4b")
    config = student_config(teacher, 6)
    assert config.layer_mixers == (["gdn"] * 3 + ["full"]) * 6
    assert (config.num_loops, config.block_style, config.norm_between_loops) == (4, "sandwich", True)
    assert (config.gdn_num_heads, config.gdn_head_dim, config.gdn_expand_v) == (16, 128, 1)
    assert not config.gdn_use_short_conv
    assert not config.use_loop_residual
    assert not config.attn_output_gate
    assert config.early_exit_gate
    assert config.rope_parameters == teacher.rope_parameters
    assert config.rope_parameters is not teacher.rope_parameters
    assert config.max_position_embeddings == 65536
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
