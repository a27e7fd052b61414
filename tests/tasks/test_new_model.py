# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Fresh models sized for a task."""

import pytest
import torch

import loopergy
from loopergy.tasks.catalog import TASKS, make_task, task_options
from loopergy.tasks.new_model import new_model


@pytest.fixture(scope="module")
def task():
    return make_task("recall", length=80)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", *(family[0].model_type for family in loopergy.FAMILIES)])
def test_every_causal_model_type_fits_the_task(task, model_type):
    model = new_model(model_type, task)
    row = task.rows("train", 1)[0]
    loss = model(**{key: value[None] for key, value in row.items()}).loss
    assert torch.isfinite(loss)
    assert model.config.vocab_size == len(task.tokenizer)
    assert model.config.max_position_embeddings >= 80
    assert (model.config.hidden_size, model.config.num_attention_heads) == (64, 2)


def test_special_tokens_are_the_tasks():
    listops = make_task("listops", train_samples=10, test_samples=1)
    config = new_model("ouro", listops).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 0, 0)


def test_fields_are_taken_under_any_of_their_names(task):
    assert new_model("gpt2", task, n_embd=32).config.hidden_size == 32
    assert new_model("gpt2", task, hidden_size=32).config.n_embd == 32
    assert new_model("ouro", task, num_loops=2).config.total_ut_steps == 2
    assert new_model("ouro", task, rope_theta=100.0).config.rope_parameters["rope_theta"] == 100.0


def test_weights_are_fixed_by_the_seed(task):
    one, same, other = (new_model("llama", task, seed=seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_unknown_names_are_refused(task):
    with pytest.raises(ValueError, match="'lama'"):
        new_model("lama", task)
    with pytest.raises(ValueError, match=r"no field num_lopps.* num_loops"):
        new_model("ouro", task, num_lopps=2)
    with pytest.raises(ValueError, match=r"no task 'listop'.* listops"):
        make_task("listop")
    with pytest.raises(ValueError, match=r"no option 'pairs'.* num_pairs"):
        make_task("recall", pairs=3)


def test_the_listed_options_are_the_fields_with_their_defaults():
    for name in TASKS:
        listed = task_options(name)
        assert "vocabulary" not in listed
        assert make_task(name, **listed).options().keys() - {"task"} == listed.keys()
