# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Every family survives every usual way of saving, with a tied and with a free head."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import loopergy

FAMILIES = {
    "ouro": loopergy.OuroForCausalLM,
    "lt2": loopergy.LT2ForCausalLM,
    "cem_llama": loopergy.CEMLlamaForCausalLM,
    "nrgpt": loopergy.NRGPTForCausalLM,
    "gpt": loopergy.GPTBaselineForCausalLM,
}
IDS = torch.arange(3, 20)[None]


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


one_each = pytest.mark.parametrize("model", [f"{name}-tied" for name in FAMILIES], indirect=True)


@pytest.fixture(params=[f"{name}-{kind}" for name in FAMILIES for kind in ("free", "tied")])
def model(request):
    """Build a model of each family in turn, its head free or tied to its embeddings."""
    name, _, kind = request.param.rpartition("-")
    fields = {"layer_mixers": "gdn,full"} if name == "lt2" else {}
    config = FAMILIES[name].config_class.from_preset("tiny", tie_word_embeddings=kind == "tied", **fields)
    return FAMILIES[name](config)


def check_same(loaded, model):
    """Fail unless the loaded model has the values, the ties, the buffers and the output of the model."""
    assert torch.equal(logits_of(loaded), logits_of(model))
    tied = model.config.tie_word_embeddings
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) is tied
    assert loaded.all_tied_weights_keys == model.all_tied_weights_keys
    assert loaded.num_parameters() == model.num_parameters()
    for (name, buffer), (_, expected) in zip(loaded.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name


def test_a_model_survives_saving_loading_copying_and_pickling(model, tmp_path):
    """Guards E2, E3, E5, E6."""
    model.save_pretrained(tmp_path)
    check_same(type(model).from_pretrained(tmp_path), model)
    check_same(AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu"), model)
    check_same(copy.deepcopy(model), model)
    check_same(pickle.loads(pickle.dumps(model)), model)


def test_a_file_holds_every_parameter_once(model, tmp_path):
    """Guards E5: saved by us, by safetensors, and inside a wrapper; loops and steps add nothing."""
    unique = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    save_model(model, str(tmp_path / "plain.safetensors"))
    save_model(torch.nn.ModuleDict({"policy": model}), str(tmp_path / "wrapped.safetensors"))
    for name in ("model", "plain", "wrapped"):
        tensors = load_file(tmp_path / f"{name}.safetensors")
        buffers = sum(tensor.nbytes for key, tensor in tensors.items() if key.endswith("_buffer"))
        assert sum(tensor.nbytes for tensor in tensors.values()) - buffers == unique, name


@one_each
def test_what_a_trainer_saves_is_what_it_trained(model, tmp_path):
    """Guards E3, E6: the tie holds while training, and the folder of the Trainer is a whole model."""
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(3, 35).view(4, 8)]
    arguments = TrainingArguments(
        tmp_path, max_steps=2, save_strategy="no", report_to="none", use_cpu=True, learning_rate=0.01
    )
    before = logits_of(model)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    assert not torch.equal(logits_of(model), before)
    check_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


@one_each
def test_the_tables_of_a_model_are_those_of_a_new_one_in_another_type_too(model, tmp_path):
    """Guards E2: what is computed and not saved is right after loading in bfloat16 and after casting."""
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = type(model).from_pretrained(tmp_path).to(torch.bfloat16)
    for one in (loaded, cast):
        assert all(torch.isfinite(buffer).all() for buffer in one.buffers())
        assert torch.isfinite(logits_of(one)).all()
    for (name, buffer), (_, expected) in zip(loaded.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(buffer.to(expected.dtype), expected, rtol=0.01, atol=0.01, msg=name)


@one_each
def test_values_are_never_drawn_again_while_loading(model, tmp_path):
    """Guards E1: every parameter is what was saved, whatever the initialisation would write."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    for loaded in (type(model).from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert all((parameter == 0.5).all() for parameter in loaded.parameters())


@one_each
def test_a_config_is_itself_after_saving(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {**loaded, "_name_or_path": ""} == model.config.to_dict()
