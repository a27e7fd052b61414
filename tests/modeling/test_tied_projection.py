# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Adapters, offloading and quantisation on projections that are used twice."""

import copy

import pytest
import torch
from torch import nn

from loopergy.modeling.tied_projection import read_out

peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "k_proj", "up_proj", "gate_proj"]
EXACT = {"rtol": 0, "atol": 1e-10}


def adapted(model, name=None, seed=11, **settings):
    """Put a LoRA adapter of rank 2 with random matrices on the model; return the peft model."""
    config = peft.LoraConfig(**({"r": 2, "lora_alpha": 8, "target_modules": TARGETS} | settings))
    if name is None:
        model = peft.get_peft_model(model, config)
    else:
        model.add_adapter(name, config)
        model.set_adapter(name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key and (name or "default") in key:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def with_dense_weights(model, adapted_model, names=("default",)):
    """Return a copy of the model whose matrices are W + sum of scaling B A."""
    dense = copy.deepcopy(model)
    layers = dict(adapted_model.base_model.model.named_modules())
    with torch.no_grad():
        for key, module in dense.named_modules():
            layer = layers[key]
            for name in names if hasattr(layer, "lora_A") else ():
                module.weight += layer.scaling[name] * layer.lora_B[name].weight @ layer.lora_A[name].weight
    return dense


@torch.no_grad()
def test_an_adapter_counts_in_both_uses_merged_or_not(any_cem, make_ids):
    """Guards J1, J2, J7."""
    plain, ids = copy.deepcopy(any_cem), make_ids(2, 9)
    model = adapted(any_cem)
    expected = with_dense_weights(plain, model)(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, **EXACT)
    assert (expected - plain(ids).logits).abs().max() > 0.01
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    model.merge_adapter()
    torch.testing.assert_close(model(ids).logits, expected, **EXACT)
    model.unmerge_adapter()
    torch.testing.assert_close(model(ids).logits, expected, **EXACT)
    generated = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, expected, **EXACT)
    assert torch.equal(merged.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0), generated)


@torch.no_grad()
def test_several_adapters_are_chosen_or_added(make_cem, make_ids):
    """Guards J2."""
    plain, ids = make_cem(num_steps=2), make_ids(2, 7)
    model = adapted(adapted(copy.deepcopy(plain)), name="second", seed=12)
    for names in (["default"], ["second"], ["default", "second"]):
        model.base_model.set_adapter(names)
        torch.testing.assert_close(model(ids).logits, with_dense_weights(plain, model, names)(ids).logits, **EXACT)


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"lora_bias": True}, {"lora_dropout": 0.5}])
def test_adapters_train_through_both_uses(make_cem, make_ids, settings):
    """Guards J1: gradients of both uses add up, as in a dense W + B A."""
    ids = make_ids(2, 9)
    model = adapted(make_cem(num_steps=2), **settings)
    if "lora_dropout" in settings:
        model.train()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad.abs().max() > 0, name
    if settings:
        return
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    weight = layer.lora_B["default"].weight
    probe = torch.sin(torch.arange(128, dtype=torch.float64))
    (slope,) = torch.autograd.grad((model(ids).logits @ probe).sum(), weight)
    values = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            weight[3, 1] += step
            values.append((model(ids).logits @ probe).sum())
            weight[3, 1] -= step
    assert slope[3, 1].item() == pytest.approx(((values[0] - values[1]) / 2e-6).item(), rel=1e-5)


def test_all_linear_leaves_no_adapter_without_effect(make_cem, make_ids):
    """Guards J1, J4."""
    ids, model = make_ids(2, 7), make_cem(cem_precond="dlr")
    model = adapted(model, target_modules="all-linear")
    model(ids, labels=ids).loss.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sum("lora_B" in name for name in trained) == 2 * 4
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in trained)


@pytest.mark.parametrize("kind", ["dora", "ia3"])
def test_adapters_whose_matrix_is_no_sum_act_in_both_uses(make_cem, make_ids, kind):
    """Guards J1, J3: merged, the adapter is a plain matrix, which is the oracle."""
    ids, plain = make_ids(2, 7), make_cem(num_steps=2)
    if kind == "dora":
        model = adapted(copy.deepcopy(plain), use_dora=True)
    else:
        config = peft.IA3Config(target_modules=["q_proj", "up_proj"], feedforward_modules=[], init_ia3_weights=False)
        model = peft.get_peft_model(copy.deepcopy(plain), config).double().eval()
    logits = model(ids).logits
    assert (logits - plain(ids).logits).abs().max() > 0.01
    logits.square().sum().backward()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all(parameter.grad.abs().max() > 0 for _, parameter in trained)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, logits, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(model.merge_and_unload()(ids).logits, logits, **EXACT)


@torch.no_grad()
def test_a_batch_may_mix_adapters(make_cem, make_ids):
    ids = make_ids(2, 6)
    model = adapted(adapted(make_cem()), name="second", seed=12)
    mixed = model(ids, adapter_names=["default", "second"]).logits
    for row, name in enumerate(("default", "second")):
        model.set_adapter(name)
        torch.testing.assert_close(mixed[row], model(ids[row : row + 1]).logits[0], **EXACT)


class Packed(nn.Linear):
    """Hold the weight as bytes of another shape, as quantised layers do."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.full = linear.weight.data
        self.weight = nn.Parameter(torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return x @ self.full.T


class Rounded(Packed):
    """Compute in whole numbers, through which no gradient comes."""

    def forward(self, x):
        return (x.detach() * 127).round() @ self.full.T


@torch.no_grad()
def test_packed_weights_are_used_twice_and_layers_without_a_derivative_are_refused(make_cem, make_ids):
    """Guards J5."""
    ids = make_ids(1, 5)
    model = make_cem()
    expected = model(ids).logits
    for layer in model.model.layers:
        for module, names in ((layer.self_attn, ("q_proj", "k_proj")), (layer.mlp, ("up_proj", "gate_proj"))):
            for name in names:
                setattr(module, name, Packed(getattr(module, name)))
    torch.testing.assert_close(model(ids).logits, expected, **EXACT)
    with pytest.raises(NotImplementedError, match=r"Rounded neither shows its matrix.*q_proj and up_proj"):
        read_out(Rounded(nn.Linear(4, 5)), torch.ones(1, 5))


@torch.no_grad()
def test_offloaded_weights_come_back_for_both_uses(make_cem, make_ids):
    """Guards E15."""
    from accelerate import cpu_offload

    ids, model = make_ids(2, 7), make_cem(num_steps=2, cem_precond="dlr", cem_norm_mode="exact_jacobian")
    expected = model(ids).logits
    torch.testing.assert_close(cpu_offload(model, execution_device="cpu")(ids).logits, expected, **EXACT)
    assert model.model.layers[0].self_attn.q_proj.weight.device.type == "meta"


@torch.no_grad()
def test_the_second_use_is_the_transpose_without_bias():
    linear, y = nn.Linear(5, 7).double(), torch.randn(2, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(read_out(linear, y), torch.einsum("...f,fd->...d", y, linear.weight), **EXACT)
