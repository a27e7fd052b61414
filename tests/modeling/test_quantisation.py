# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Quantised models compute what their dequantised weights compute, wherever a weight is used, cached or not."""

import copy
import json
import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from loopergy import LT2Config, LT2ForSequenceClassification
from loopergy.modeling.tied_projection import read_out
from loopergy.tasks.catalog import make_task
from loopergy.tasks.new_model import new_model
from loopergy.tasks.training import TaskConfig, train_on_task

pytest.importorskip("torchao")
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    PerRow,
    quantize_,
)

WAYS = {"weights": Int8WeightOnlyConfig, "activations-too": Int8DynamicActivationInt8WeightConfig}
GREEDY = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture
def load_quantised(tmp_path):
    """Save a model and load it quantised, as a user does, with no word on what to leave out."""

    def load(model, way="weights", **options):
        model.save_pretrained(tmp_path / "plain")
        config = TorchAoConfig(WAYS[way](), **options)
        return AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config).eval()

    return load


def linear_layers(model):
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}


def quantised(model, way="weights"):
    """Quantise a copy with torchao itself, which packs float32; compute in float64 where inputs are not rounded."""
    small, names = copy.deepcopy(model).float(), linear_layers(model)
    quantize_(small, WAYS[way](), filter_fn=lambda module, name: name in names)
    for tensor in [*small.parameters(), *small.buffers()] if way == "weights" else ():
        if tensor.is_floating_point() and not isinstance(tensor, Int8Tensor):
            tensor.data = tensor.double()
    return small


class RoundedInputs(nn.Linear):
    """Multiply inputs, rounded to 8 bits a row at a time, with plain weights."""

    def forward(self, x):
        return nn.functional.linear(Int8Tensor.from_hp(x, PerRow()).dequantize(), self.weight, self.bias)


def dequantised(model, small, way="weights"):
    """Return a copy of the plain model with the weights that the quantised one stands for."""
    twin = copy.deepcopy(model)
    for name in linear_layers(model):
        packed, layer = small.get_submodule(name).weight, twin.get_submodule(name)
        layer.weight.data = packed.qdata * packed.scale.to(layer.weight.dtype)
        if way != "weights":
            layer.__class__ = RoundedInputs
    return twin


# The numbers.


@pytest.mark.slow
@torch.no_grad()
def test_packed_weights_are_used_as_what_they_stand_for(every_model, make_ids):
    """Guards J5."""
    ids, small = make_ids(2, 9), quantised(every_model)
    expected = dequantised(every_model, small)(ids).logits
    torch.testing.assert_close(small(ids).logits, expected, rtol=0, atol=1e-5)
    assert (expected - every_model(ids).logits).abs().max() > 1e-4


def likeness(found, expected):
    """Correlate logits: where inputs are rounded, the last digit of one decides about the rounding of many."""
    return torch.corrcoef(torch.stack((found.flatten(), expected.flatten())))[0, 1]


@torch.no_grad()
def test_rounded_inputs_are_those_of_the_first_use_of_a_matrix_alone(each_family, build_kind, make_ids):
    """A tied projection used the second time multiplies with what the packed weight stands for."""
    model, ids = build_kind(each_family, torch.float32), make_ids(2, 9)
    small = quantised(model, "activations-too")
    twin = dequantised(model, small, "activations-too")
    assert likeness(small(ids).logits, twin(ids).logits) > 0.99
    for name in linear_layers(model) if each_family.startswith(("cem", "nrgpt")) else ():
        layer, exact = small.get_submodule(name), twin.get_submodule(name)
        y = torch.randn(3, layer.out_features)
        torch.testing.assert_close(read_out(layer, y), y @ exact.weight)


@torch.no_grad()
def test_a_cache_gives_the_quantised_model_s_own_numbers(each_family, build_kind, make_ids):
    """Guards A1: also after as many tokens as NRGPT takes before it would fold its weights."""
    ids = make_ids(2, 5)
    small = quantised(build_kind(each_family))
    text = small.generate(ids, max_new_tokens=12, **GREEDY)
    assert text.equal(small.generate(ids, max_new_tokens=12, use_cache=False, **GREEDY))
    cache = small(ids, use_cache=True).cache
    parts = [small(part, cache=cache).logits for part in text[:, 5:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), small(text).logits[:, 5:], rtol=0, atol=1e-8)


@torch.no_grad()
def test_a_cache_gives_much_the_same_numbers_where_inputs_are_rounded(each_family, build_kind, make_ids):
    ids, small = make_ids(2, 12), quantised(build_kind(each_family, torch.float32), "activations-too")
    cache = small(ids[:, :8], use_cache=True).cache
    parts = [small(part, cache=cache).logits for part in ids[:, 8:].split([3, 1], dim=1)]
    assert likeness(torch.cat(parts, dim=1), small(ids).logits[:, 8:]) > 0.99


# What is left as it is.


@pytest.mark.parametrize("way", ["weights", pytest.param("activations-too", marks=pytest.mark.slow)])
@torch.no_grad()
def test_loading_packs_the_linear_layers_alone_and_saving_keeps_them_so(
    each_family, build_kind, make_ids, way, load_quantised, tmp_path
):
    """Guards J5, J8: gates, decays, convolutions, norms, embeddings and the head stay exact without being named."""
    model, ids = build_kind(each_family, torch.float32), make_ids(2, 9)
    small = load_quantised(model, way)
    packed = {name for name, parameter in small.named_parameters() if isinstance(parameter, Int8Tensor)}
    assert packed == {f"{name}.weight" for name in linear_layers(model)}
    for name, parameter in model.named_parameters():
        assert name in packed or torch.equal(small.get_parameter(name), parameter), name
    small.save_pretrained(tmp_path / "small")
    assert list(tmp_path.glob("small/*.safetensors"))
    assert json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]["quant_type"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    assert isinstance(again.get_parameter(next(iter(packed))), Int8Tensor)
    assert torch.equal(again(ids).logits, small(ids).logits)
    assert again.generate(ids, max_new_tokens=4, **GREEDY).equal(small.generate(ids, max_new_tokens=4, **GREEDY))


@pytest.mark.parametrize("name", ["ouro", "lt2-mixed", "cem-shared", "nrgpt-ff2w", "gpt-none"])
def test_a_tied_head_stays_tied(name, build_kind, load_quantised, tmp_path):
    """Guards J8."""
    model = build_kind(name, torch.float32, tie_word_embeddings=True)
    small = load_quantised(model)
    small.save_pretrained(tmp_path / "small")
    for loaded in (small, AutoModelForCausalLM.from_pretrained(tmp_path / "small")):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_every_quantiser_of_transformers_finds_the_same_layers(every_model):
    """The layers are found by type, and the head by transformers' own rule, as bitsandbytes and others use both."""
    skipped = HfQuantizer.get_modules_to_not_convert(every_model, BitsAndBytesConfig().llm_int8_skip_modules)
    converted = {
        name
        for name, module in every_model.named_modules()
        if isinstance(module, nn.Linear) and should_convert_module(name, skipped)
    }
    assert converted == linear_layers(every_model)
    exact = ("early_exit_gate", "a_proj", "b_proj", "f_proj", "gk_proj", "score_proj", "lm_head")
    assert not any(part in name for name in converted for part in exact)
    assert not any(type(every_model.get_submodule(name)) is nn.Conv1d for name in converted)


def test_the_head_of_a_classifier_stays_exact(tmp_path):
    torch.manual_seed(0)
    model = LT2ForSequenceClassification(LT2Config.from_preset("tiny", num_labels=3))
    model.save_pretrained(tmp_path)
    small = LT2ForSequenceClassification.from_pretrained(
        tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig())
    )
    assert torch.equal(small.score.weight, model.score.weight)
    assert isinstance(small.model.layers[0].mlp.up_proj.weight, Int8Tensor)


# Layers of other libraries.


class Packed(nn.Linear):
    """Hold the weight as bytes of another shape, as most quantised layers do."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.full, self.shift = linear.weight.data, linear.bias
        self.weight = nn.Parameter(torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.full, self.shift)


@torch.no_grad()
def test_no_model_looks_into_the_weight_of_a_packed_layer(every_model, make_ids):
    """Guards J5."""
    ids = make_ids(1, 5)
    expected = every_model(ids).logits
    for name in linear_layers(every_model):
        every_model.set_submodule(name, Packed(every_model.get_submodule(name)))
    torch.testing.assert_close(every_model(ids).logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("bits", "device"),
    [(8, "cpu"), pytest.param(8, "cuda", marks=pytest.mark.gpu), pytest.param(4, "cuda", marks=pytest.mark.gpu)],
)
@torch.no_grad()
def test_bitsandbytes_weights_are_used_as_what_they_stand_for(
    each_family, build_kind, make_ids, tmp_path, bits, device
):
    """Guards J5: through the derivative of the layer, which is how its matrix is read where it is tied."""
    bnb = pytest.importorskip("bitsandbytes")
    model, ids = build_kind(each_family, torch.float32), make_ids(2, 9)
    model.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4, bnb_4bit_quant_type="nf4")
    small = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map=device).eval()
    kind = bnb.nn.Linear4bit if bits == 4 else bnb.nn.Linear8bitLt
    assert {name for name, module in small.named_modules() if isinstance(module, kind)} == linear_layers(model)
    twin = copy.deepcopy(model)
    for name in linear_layers(model):
        weight = small.get_submodule(name).weight
        if bits == 4:
            full = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        else:
            full = weight.data * weight.SCB[:, None] / 127
        twin.get_submodule(name).weight.data = full.to("cpu", torch.float32)
    ids = ids.to(device)
    assert likeness(small(ids).logits.float().cpu(), twin(ids.cpu()).logits) > 0.98
    assert small.generate(ids, max_new_tokens=10, **GREEDY).shape == (2, 19)


@torch.no_grad()
def test_quanto_weights_are_used_as_what_they_stand_for(each_family, build_kind, make_ids, tmp_path):
    """Guards J5."""
    pytest.importorskip("optimum.quanto")
    model, ids = build_kind(each_family, torch.float32), make_ids(2, 9)
    model.save_pretrained(tmp_path)
    small = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QuantoConfig(weights="int8")).eval()
    twin = copy.deepcopy(model)
    for name in linear_layers(model):
        twin.get_submodule(name).weight.data = small.get_submodule(name).weight.dequantize()
    torch.testing.assert_close(small(ids).logits, twin(ids).logits, rtol=0, atol=1e-2)


# Training on top, and what it costs in quality.


def test_adapters_train_on_quantised_weights_and_merge_into_them(each_family, build_kind, make_ids, load_quantised):
    """Guards J1, J5: 8-bit weights below LoRA, in every layer and in both uses of a tied one."""
    peft = pytest.importorskip("peft")
    small, ids = load_quantised(build_kind(each_family, torch.float32)), make_ids(4, 12)
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(peft.prepare_model_for_kbit_training(small), settings)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.Adam(adapters, lr=1e-2), []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(parameter.grad.any() for parameter in adapters)
    with torch.no_grad():
        logits = model.eval()(ids).logits
        merged = model.merge_and_unload()
        assert likeness(merged(ids).logits, logits) > 0.98
    assert all(isinstance(merged.get_submodule(name).weight, Int8Tensor) for name in linear_layers(merged))


TRAINED = {
    "ouro": {"total_ut_steps": 2},
    "lt2": {"layer_mixers": "gdn,full", "num_loops": 2},
    "cem_llama": {"cem_attn_steps": 2, "cem_mlp_steps": 2},
    "nrgpt": {"num_hidden_layers": 4},
    "gpt_baseline": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TRAINED)
def test_a_trained_model_predicts_as_well_in_8_bits(model_type, tmp_path):
    task = make_task("characters", length=64, max_characters=200_000)
    model = new_model(model_type, task, **TRAINED[model_type])
    sizes = {"max_steps": 60, "per_device_train_batch_size": 16, "eval_rows": 16, "test_rows": 16, "use_cpu": True}
    args = TaskConfig(str(tmp_path / "run"), learning_rate=3e-3, save_strategy="no", **sizes)
    train_on_task(model, task, args)
    model.save_pretrained(tmp_path / "plain")
    plain = task.evaluate(model, count=64).nats
    assert plain < 3.6  # 4.6 at the start
    for way, worse in (("weights", 0.01), ("activations-too", 0.03)):
        config = TorchAoConfig(WAYS[way]())
        small = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
        perplexity = math.exp(task.evaluate(small, count=64).nats - plain)
        assert abs(perplexity - 1) < worse, (way, perplexity)
