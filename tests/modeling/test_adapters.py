# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Adapters of PEFT on every model: they go where they should, each of them counts, and they come off again."""

import copy

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from loopergy.modeling.building_blocks import ExactLinear

peft = pytest.importorskip("peft")

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def adapted(model, seed=11, name="default", **settings):
    """Put an adapter with random matrices on a model, in its own type."""
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM", **settings})
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, config)
        model.set_adapter(name)
    else:
        model = peft.get_peft_model(model, config)
    generator, dtype = torch.Generator().manual_seed(seed), next(model.parameters()).dtype
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key and name in key and "magnitude" not in key:
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model.eval()


def without_gradient(model):
    return [name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]


# Where they go.


def test_a_config_without_targets_finds_the_layers_of_every_model(every_model, make_ids):
    """Guards J4: as a Llama's, and whatever was imported first."""
    model, ids = peft.get_peft_model(every_model, peft.LoraConfig(r=2, init_lora_weights=False)), make_ids(2, 9)
    layers = getattr(every_model.model, "layers", [every_model.model])
    assert len(model.targeted_module_names) >= len(layers)
    model.double()(ids, labels=ids).loss.backward()
    assert without_gradient(model) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig", "OFTConfig", "IA3Config", "AdaLoraConfig", "VeraConfig"])
def test_other_methods_find_their_layers_and_merge(each_family, build_kind, make_ids, kind):
    """Guards J4, J7."""
    settings = {"AdaLoraConfig": {"total_step": 10}, "OFTConfig": {"oft_block_size": 4}, "VeraConfig": {"r": 4}}
    model, ids = build_kind(each_family), make_ids(1, 7)
    plain = copy.deepcopy(model)
    model = peft.get_peft_model(model, getattr(peft, kind)(**settings.get(kind, {}))).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
        logits = model(ids).logits
        assert (logits - plain(ids).logits).abs().max() > 1e-6
        with model.disable_adapter():
            torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-9)
        torch.testing.assert_close(model.merge_and_unload()(ids).logits, logits, rtol=0, atol=1e-4)


def test_all_linear_means_no_gate_no_convolution_and_no_head(every_model, make_ids):
    """Guards J1, J4."""
    ids, plain = make_ids(2, 9), copy.deepcopy(every_model)
    head = every_model.get_output_embeddings()
    linear = {n for n, module in every_model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    model = adapted(every_model, target_modules="all-linear")
    assert set(model.targeted_module_names) == linear
    model(ids, labels=ids).loss.backward()
    assert without_gradient(model) == []
    with torch.no_grad():
        logits = model(ids).logits
        assert (logits - plain(ids).logits).abs().max() > 1e-3
        torch.testing.assert_close(model.merge_and_unload()(ids).logits, logits, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("kind", "gate"), [("ouro", "early_exit_gate"), ("lt2-gdn", "a_proj"), ("lt2-kda", "f_proj.0")]
)
def test_a_gate_is_trained_whole_beside_the_adapter(build_kind, make_ids, kind, gate):
    model, ids = build_kind(kind), make_ids(2, 8)
    with pytest.raises(ValueError, match="ExactLinear"):
        peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=[gate]))
    settings = peft.LoraConfig(r=2, modules_to_save=[gate.partition(".")[0]], init_lora_weights=False)
    model = peft.get_peft_model(model, settings).double()
    outputs = model(ids, labels=ids, output_loop_hidden_states=True)
    loss = outputs.loss if outputs.exit_pdf is None else outputs.loss + outputs.exit_pdf[..., 0].mean()
    loss.backward()
    assert sum("modules_to_save" in name for name, p in model.named_parameters() if p.requires_grad) > 0
    assert without_gradient(model) == []


def test_exact_linear_is_a_linear_map():
    torch.manual_seed(0)
    exact = ExactLinear(5, 3)
    torch.manual_seed(0)
    linear, x = nn.Linear(5, 3), torch.randn(2, 5)
    torch.testing.assert_close(exact(x), linear(x))
    assert not isinstance(exact, nn.Linear)
    assert set(exact.state_dict()) == set(linear.state_dict())


def test_exact_layers_start_as_linear_layers_do(make_ouro, make_lt2):
    for gate in (make_ouro(initializer_range=0.5).model.early_exit_gate, make_lt2(initializer_range=0.5).model):
        gate = gate if isinstance(gate, ExactLinear) else gate.layers[0].self_attn.a_proj
        assert 0.35 < gate.weight.std() < 0.65


# On and off.


@torch.no_grad()
def test_merging_changes_nothing_and_can_be_taken_back(each_family, build_kind, make_ids):
    """Guards J1, J2, J3, J7."""
    model, ids = build_kind(each_family), make_ids(2, 8)
    plain = model(ids).logits
    model = adapted(model, target_modules="all-linear")
    logits, text = model(ids).logits, model.generate(input_ids=ids, **GREEDY)
    with model.disable_adapter():
        torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=1e-12)
    model.merge_adapter()
    torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=1e-9)
    assert model.generate(input_ids=ids, **GREEDY).equal(text)
    model.unmerge_adapter()
    torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=1e-9)
    torch.testing.assert_close(model.unload()(ids).logits, plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"use_rslora": True}], ids=["dora", "rslora"])
def test_variants_of_lora_train_and_merge(each_family, build_kind, make_ids, settings):
    """Guards J1, J2."""
    ids = make_ids(2, 8)
    model = adapted(build_kind(each_family), target_modules="all-linear", **settings)
    model(ids, labels=ids).loss.backward()
    assert without_gradient(model) == []
    with torch.no_grad():
        logits = model(ids).logits
        torch.testing.assert_close(model.merge_and_unload()(ids).logits, logits, rtol=0, atol=1e-8)


@torch.no_grad()
def test_several_adapters_are_switched_added_up_and_dropped(each_family, build_kind, make_ids):
    """Guards J2."""
    ids = make_ids(1, 8)
    model = adapted(adapted(build_kind(each_family)), seed=12, name="second")
    second = model(ids).logits
    model.set_adapter("default")
    first = model(ids).logits
    assert (first - second).abs().max() > 1e-3
    model.add_weighted_adapter(["default", "second"], [1.0, 0.5], "both", combination_type="cat")
    model.set_adapter("both")
    mixed = model(ids).logits
    model.base_model.set_adapter(["default", "second"])
    assert (mixed - model(ids).logits).abs().max() > 1e-4
    model.set_adapter("second")
    model.delete_adapter("both")
    assert torch.equal(model(ids).logits, second)


def test_an_adapter_of_a_looped_model_is_as_large_as_one_loop_s_and_gets_the_gradients_of_all(make_ouro, make_ids):
    """Guards J3."""
    ids, sizes, values = make_ids(2, 7), [], []
    for loops in (1, 3):
        model = adapted(make_ouro(total_ut_steps=loops))
        sizes.append(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight
    probe = torch.sin(torch.arange(128, dtype=torch.float64))
    (slope,) = torch.autograd.grad((model(ids).logits @ probe).sum(), weight)
    with torch.no_grad():
        for step in (1e-5, -1e-5):
            weight[3, 1] += step
            values.append((model(ids).logits @ probe).sum())
            weight[3, 1] -= step
    assert sizes[0] == sizes[1]
    assert slope[3, 1].item() == pytest.approx(((values[0] - values[1]) / 2e-5).item(), rel=1e-5)


# In the Trainer.


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_trainer_reaches_every_adapter_through_checkpoints(each_family, build_kind, make_ids, tmp_path, reentrant):
    """Guards I2, J1: as the embeddings are frozen, their outputs have to be asked for gradients."""
    data = [{"input_ids": row, "labels": row} for row in make_ids(4, 8)]
    model = build_kind(each_family, torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    settings |= {"max_steps": 1, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    Trainer(model, TrainingArguments(tmp_path, save_strategy="no", **settings), train_dataset=data).train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if "lora_" in name}
