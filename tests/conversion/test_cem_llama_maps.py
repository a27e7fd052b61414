# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from loopergy import CEMLlamaConfig, CEMLlamaForCausalLM
from loopergy.conversion import ConversionError
from loopergy.conversion.cem_llama_maps import cem_to_llama, llama_to_cem

PLAIN = {"cem_diag": "none", "cem_rope_values": "plain", "initializer_range": 0.2}
# Transformers' Llama takes norms and softmax in float32.
CLOSE = {"rtol": 0, "atol": 3e-5}


def build(**fields) -> CEMLlamaForCausalLM:
    torch.manual_seed(0)
    model = CEMLlamaForCausalLM(CEMLlamaConfig.from_preset("tiny", **(PLAIN | fields))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2 or (parameter == 0).all():
                parameter += 0.2 * torch.randn(parameter.shape)
    return model


def ids() -> torch.Tensor:
    return torch.randint(3, 128, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 2, "cem_mlp_act_on": "gate"},
        {"cem_precond": "dlr", "cem_step_size": 0.6},
        {"cem_precond": "diag", "cem_learn_step_size": True, "cem_mlp_act_on": "gate"},
        {"attention_bias": True, "mlp_bias": True, "cem_temperature": 2.5},
        {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 3e4, "rope_type": "linear", "factor": 2.0}},
        {"cem_tie_kv": False, "cem_tie_qo": False, "cem_tie_mlp": False, "cem_precond": "dlr"},
        {"cem_mlp": False, "mlp_bias": True},
        {"cem_attention": False, "cem_diag": "shared", "attention_bias": True},
        {"cem_norm_mode": "every_step", "hidden_act": "gelu"},
    ],
)
@torch.no_grad()
def test_a_plain_step_is_a_llama(fields, tmp_path):
    model = build(**fields)
    llama = cem_to_llama(model)
    assert type(llama) is LlamaForCausalLM
    torch.testing.assert_close(llama(ids()).logits, model(ids()).logits, **CLOSE)
    generate = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(llama.generate(ids(), **generate), model.generate(ids(), **generate))
    llama.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids()).logits, model(ids()).logits, **CLOSE)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cem_attn_steps": 2}, "cem_attn_steps=2: a Llama layer takes one step. Load with num_steps=1"),
        ({"cem_mlp_steps": 3}, "cem_mlp_steps=3"),
        ({"cem_diag": "shared", "cem_rope_values": "exact"}, "cem_diag='shared'"),
        ({"cem_rope_values": "exact"}, "cem_rope_values='exact': a Llama's values are not rotated"),
        ({"cem_norm_mode": "exact_jacobian"}, "cem_norm_mode='exact_jacobian': a Llama does not pull"),
        ({"cem_norm_mode": "exact_jacobian", "cem_attention": False}, "cem_norm_mode='exact_jacobian'"),
    ],
)
def test_what_a_llama_cannot_do_is_named_with_its_remedy(fields, said):
    with pytest.raises(ConversionError, match=said):
        cem_to_llama(build(**fields))
    both = {"cem_attn_steps": 2, "cem_mlp_steps": 2, "cem_rope_values": "exact"}
    with pytest.raises(ConversionError, match=r"(?s)cem_attn_steps.*cem_rope_values.*cem_mlp_steps"):
        cem_to_llama(build(**both))


@pytest.mark.parametrize("form", ["tied", "gate"])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_tied_llama_becomes_the_cem_llama_it_came_from(form, bias):
    model = build(cem_mlp_act_on=form, attention_bias=bias, mlp_bias=bias, num_key_value_heads=2)
    back = llama_to_cem(cem_to_llama(model))
    assert {name: value for name, value in vars(back.config).items() if name.startswith("cem_")} == {
        name: value for name, value in vars(model.config).items() if name.startswith("cem_")
    }
    assert set(back.state_dict()) == set(model.state_dict())
    for name, value in back.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert torch.equal(back(ids()).logits, model(ids()).logits)


@torch.no_grad()
def test_an_ordinary_llama_keeps_its_own_sublayers_and_is_refused_others():
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.2)).eval()
    same = llama_to_cem(llama, cem_attention=False, cem_mlp=False)
    torch.testing.assert_close(same(ids()).logits, llama(ids()).logits, **CLOSE)
    with pytest.raises(ConversionError, match=r"layer 0: v_proj and k_proj differ by .* cem_attention=False"):
        llama_to_cem(llama, cem_mlp=False)
    with pytest.raises(ConversionError, match=r"layer 0: down_proj .* cem_mlp=False"):
        llama_to_cem(llama, cem_attention=False)
    for layer in llama.model.layers:
        layer.mlp.down_proj.weight.copy_(layer.mlp.up_proj.weight.T)
    mixed = llama_to_cem(llama, cem_attention=False)
    assert mixed.config.cem_mlp_act_on == "gate"
    torch.testing.assert_close(mixed(ids()).logits, llama(ids()).logits, **CLOSE)
    llama.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    with pytest.raises(ConversionError, match="layer 1: down_proj and the transpose of up_proj"):
        llama_to_cem(llama, cem_attention=False)


def test_adapters_are_to_be_merged_first():
    model = get_peft_model(build(), LoraConfig(r=2))
    for convert in (cem_to_llama, llama_to_cem):
        with pytest.raises(ConversionError, match="merge them first"):
            convert(model)
    cem_to_llama(model.merge_and_unload())
    stock = build(cem_norm_mode="exact_jacobian", cem_attention=False, cem_mlp=False)
    assert torch.allclose(cem_to_llama(stock)(ids()).logits, stock(ids()).logits, atol=3e-5)


@torch.no_grad()
def test_copies_share_no_memory_and_keep_type_and_generation_config():
    model = build().to(torch.bfloat16)
    model.generation_config.max_new_tokens = 7
    llama = cem_to_llama(model)
    assert llama.dtype == torch.bfloat16
    assert llama.generation_config.max_new_tokens == 7
    for kept, made in ((model, llama), (llama, llama_to_cem(llama))):
        assert made.generation_config is not kept.generation_config
        assert made.config.rope_parameters is not kept.config.rope_parameters
    before = model(ids()).logits
    for parameter in llama.parameters():
        parameter.zero_()
    assert torch.equal(model(ids()).logits, before)
