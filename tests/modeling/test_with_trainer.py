# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The models inside transformers' Trainer and under accelerate's device maps."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments


@pytest.fixture(params=["ouro", "lt2"])
def small(request, make_ouro, make_lt2):
    if request.param == "ouro":
        return make_ouro(dtype=torch.float32, use_cache=True)
    return make_lt2(dtype=torch.float32, layer_mixers="gdn,full")


def arguments(folder, **settings) -> TrainingArguments:
    return TrainingArguments(folder, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", **settings)


def test_evaluation_gathers_logits_and_nothing_else(small, make_ids, tmp_path):
    """Guards I3, I4."""
    data = [{"input_ids": row, "labels": row} for row in make_ids(6, 8)]
    shapes = []

    def metrics(prediction):
        assert isinstance(prediction.predictions, np.ndarray)
        shapes.append(prediction.predictions.shape)
        return {}

    trainer = Trainer(small, arguments(tmp_path), eval_dataset=data, compute_metrics=metrics)
    assert trainer.evaluate()["eval_loss"] > 0
    assert shapes == [(6, 8, 128)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_document_borders_reach_every_mixer_of_every_loop(small, make_ids, tmp_path, checkpointing):
    """Guards C4: from the collator through the Trainer to the mixers, and the loss is that of the documents apart."""
    documents = [{"input_ids": make_ids(length, seed=length).tolist()} for length in (11, 7, 14)]
    collator = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
    seen = []
    for layer in small.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append({"cu_seq_lens_q", "seq_idx"} <= set(kwargs)), with_kwargs=True
        )
    settings = {"per_device_train_batch_size": 3, "max_steps": 1, "learning_rate": 0.0, "logging_steps": 1}
    settings |= {"gradient_checkpointing": checkpointing}
    trainer = Trainer(small, arguments(tmp_path, **settings), train_dataset=documents, data_collator=collator)
    trainer.train()
    visits = small.config.num_loops * small.config.num_hidden_layers
    assert len(seen) == visits * (2 if checkpointing else 1)
    assert all(seen)

    small.eval()
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        total += small(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total / count, abs=1e-4)


def test_an_offloaded_layer_comes_back_in_every_loop(any_model, make_ids, tmp_path):
    """Guards E15."""
    model, ids = any_model.float(), make_ids(1, 6)
    model.save_pretrained(tmp_path / "model")
    device_map = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    device_map |= {f"model.{name}": "cpu" for name, _ in model.model.named_parameters(recurse=False)}
    device_map |= {f"model.layers.{layer}": "cpu" for layer in range(model.config.num_hidden_layers)}
    device_map |= {"lm_head": "cpu", "model.layers.1": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert set(model._no_split_modules) == {type(model.model.layers[0]).__name__}


def test_two_models_share_no_module_and_no_parameter(each_family, build_kind):
    """Guards I6: what traces modules by identity, as ZeRO-3 does, would mix up teacher and student."""
    one, two = build_kind(each_family), build_kind(each_family)
    assert {id(module) for module in one.modules()}.isdisjoint(id(module) for module in two.modules())
    assert {id(part) for part in one.parameters()}.isdisjoint(id(part) for part in two.parameters())
    assert len({id(module) for module in one.modules()}) == len(list(one.named_modules(remove_duplicate=False)))
