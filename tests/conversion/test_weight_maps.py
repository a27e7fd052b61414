# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from transformers.models.llama.modeling_llama import repeat_kv

from loopergy.conversion.errors import ConversionError, list_names
from loopergy.conversion.families import student_config
from loopergy.conversion.mixer_starts import repeat_heads
from loopergy.conversion.weight_maps import weight_map


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_repeated_in_the_weight_equal_heads_repeated_in_the_activation(make_llama, kv_heads):
    """Guards H1: rows repeated inside a head would scramble the heads."""
    teacher = make_llama(num_key_value_heads=kv_heads, attention_bias=True)
    facts = weight_map(student_config(teacher.config, "all")).facts
    projection = teacher.model.layers[0].self_attn.k_proj
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    want = repeat_kv(projection(x).view(2, 5, kv_heads, 16).transpose(1, 2), 4 // kv_heads)
    wide = torch.nn.functional.linear(x, repeat_heads(projection.weight, facts), repeat_heads(projection.bias, facts))
    torch.testing.assert_close(wide.view(2, 5, 4, 16).transpose(1, 2), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_the_map_of_softmax_students_goes_back_to_the_teacher_unchanged(make_llama, fields):
    teacher = make_llama(**fields)
    weights = weight_map(student_config(teacher.config, "all"))
    state = teacher.state_dict()
    student = {rule.target: weights.forward(rule, state) for rule in weights.rules}
    back = weights.backward(student)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_map_with_linear_layers_has_no_way_back_and_says_which_tensors(make_llama):
    teacher = make_llama()
    weights = weight_map(student_config(teacher.config, [0, 1, 2]))
    with pytest.raises(ConversionError, match=r"layers\.3\.self_attn\.A_log"):
        weights.backward(teacher.state_dict())


def test_a_teacher_tensor_without_a_rule_is_named(make_llama):
    teacher = make_llama()
    weights = weight_map(student_config(teacher.config, []))
    with pytest.raises(ConversionError, match=r"1 tensor\(s\) without a rule: model\.extra\.weight"):
        weights.check_teacher([*teacher.state_dict(), "model.extra.weight"])


def test_a_missing_teacher_tensor_is_named(make_ouro):
    teacher = make_ouro()
    weights = weight_map(student_config(teacher.config, []))
    names = [name for name in teacher.state_dict() if name != "model.layers.1.input_layernorm_2.weight"]
    with pytest.raises(ConversionError, match=r"1 tensor\(s\) missing: model\.layers\.1\.input_layernorm_2\.weight"):
        weights.check_teacher(names)


def test_student_tensors_that_no_rule_fills_are_named(make_ouro):
    weights = weight_map(student_config(make_ouro().config, []))
    names = [rule.target for rule in weights.rules]
    with pytest.raises(ConversionError, match=r"that no rule fills: model\.rho"):
        weights.check_student([*names, "model.rho"])
    with pytest.raises(ConversionError, match=r"it does not have: lm_head\.weight"):
        weights.check_student([name for name in names if name != "lm_head.weight"])


def test_each_student_tensor_has_exactly_one_rule(make_ouro):
    rules = weight_map(student_config(make_ouro().config, [1], gdn_use_short_conv=True)).rules
    targets = [rule.target for rule in rules]
    assert len(targets) == len(set(targets))


def test_long_lists_of_names_are_cut_with_a_count():
    assert list_names(f"t{i:02d}" for i in range(20)).endswith("t11 and 8 more")
