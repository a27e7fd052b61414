# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The models inside trl's trainers: supervised on packed rows, with LoRA, by preferences and by rewards."""

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import loopergy

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.slow

FAMILIES = {
    "ouro": (loopergy.OuroForCausalLM, {"training_loss": "last_loop"}),  # what trl takes its own loss of
    "lt2": (loopergy.LT2ForCausalLM, {"layer_mixers": "gdn,full"}),
    "cem_llama": (loopergy.CEMLlamaForCausalLM, {"num_steps": 2}),
    "nrgpt": (loopergy.NRGPTForCausalLM, {"max_position_embeddings": 128}),
}
TEXTS = [
    "A class is a recipe.",
    "The assert statement stops a program that is wrong.",
    "Names are bound to objects.",
    "An import finds a module, runs it once and binds a name to it.",
]


@pytest.fixture(params=FAMILIES)
def model(request, topics_tokenizer):
    kind, fields = FAMILIES[request.param]
    sizes = {"vocab_size": len(topics_tokenizer), "initializer_range": 0.2}
    special = {name: getattr(topics_tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return kind(kind.config_class.from_preset("tiny", **sizes, **special, **fields))


@pytest.fixture
def settings(tmp_path):
    """Return what all trainers are told: one step on a CPU."""
    return {
        "output_dir": str(tmp_path / "run"),
        "max_steps": 1,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }


def test_packed_rows_cost_what_their_texts_cost_alone(model, topics_tokenizer, settings):
    data = Dataset.from_dict({"text": TEXTS})
    options = trl.SFTConfig(**settings, learning_rate=0.0, packing=True, max_length=64)
    trainer = trl.SFTTrainer(model, args=options, train_dataset=data, processing_class=topics_tokenizer)
    trainer.train()

    model.eval()
    total, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([[*topics_tokenizer(text)["input_ids"], topics_tokenizer.eos_token_id]])
        total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total / count, abs=1e-3)


def test_lora_learns_and_the_rest_stays(model, topics_tokenizer, settings):
    before = copy.deepcopy(model.state_dict())
    options = trl.SFTConfig(**settings | {"max_steps": 4}, learning_rate=1e-2, max_length=64)
    trainer = trl.SFTTrainer(
        model,
        args=options,
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=topics_tokenizer,
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    after = trainer.model.unload().state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_preferences_are_learnt_from_pairs(model, topics_tokenizer, settings, tmp_path):
    model.save_pretrained(tmp_path / "start")  # where the trainer finds the reference
    topics_tokenizer.save_pretrained(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    pairs = {"prompt": ["Say it: "] * 4, "chosen": ["yes, it is"] * 4, "rejected": ["no"] * 4}
    options = trl.DPOConfig(**settings | {"max_steps": 4}, learning_rate=1e-3)
    data = Dataset.from_dict(pairs)
    trainer = trl.DPOTrainer(model, args=options, train_dataset=data, processing_class=topics_tokenizer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < losses[0]


def test_rewards_are_learnt_from_generated_texts(model, topics_tokenizer, settings):
    options = trl.GRPOConfig(
        **settings | {"max_steps": 2}, learning_rate=1e-3, num_generations=4, max_completion_length=8
    )
    trainer = trl.GRPOTrainer(
        model,
        args=options,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": ["Say it: ", "A name is", "The module"]}),
        processing_class=topics_tokenizer,
    )
    before = copy.deepcopy(model.state_dict())
    trainer.train()
    assert all(math.isfinite(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry)
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
