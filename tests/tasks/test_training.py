# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Training on a task: it learns, it resumes exactly, and it decays what should decay."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from loopergy.tasks import training
from loopergy.tasks.catalog import make_task
from loopergy.tasks.new_model import new_model
from loopergy.tasks.state_tracking import SwapRecall
from loopergy.tasks.training import (
    History,
    TaskConfig,
    TaskTrainer,
    learning_rate_share,
    task_of_run,
    train_curriculum,
    train_on_task,
)


@pytest.fixture(scope="module")
def task():
    return make_task("permutations", length=5)


def settings(folder, **options):
    sizes = {"per_device_train_batch_size": 8, "eval_rows": 8, "test_rows": 8, "use_cpu": True}
    return TaskConfig(str(folder), **{**sizes, "max_steps": 6, "eval_steps": 2, "save_steps": 2, **options})


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_small_model_learns_to_compose_permutations(task, tmp_path):
    model = new_model("llama", task)
    sizes = {"max_steps": 120, "per_device_train_batch_size": 64, "eval_rows": 64, "test_rows": 200}
    args = settings(tmp_path, **sizes, learning_rate=3e-3, eval_steps=60, save_strategy="no", logging_steps=20)
    history = train_on_task(model, task, args)
    score = task.evaluate(model, count=200)
    assert history.test["accuracy"] == score.accuracy > 2 * task.chance
    assert score.groups["up to    1 moves"] == (200, 200)
    losses = [loss for _, loss in history.curve("loss")]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3
    assert history.curve("eval_loss")[-1][1] < math.log(6)


def test_the_history_and_the_model_are_in_the_folder(task, tmp_path):
    model = new_model("ouro", task)
    history = train_on_task(model, task, settings(tmp_path, logging_steps=1))
    assert History.load(tmp_path) == history
    assert (history.steps, history.model_type) == (6, "ouro")
    assert history.parameters == sum(p.numel() for p in model.parameters())
    assert history.settings["max_steps"] == 6
    assert [point["tokens"] for point in history.points] == [8 * 6 * step for step in range(1, 7)]
    assert [step for step, _ in history.curve("eval_accuracy")] == [2, 4, 6]
    assert task_of_run(tmp_path) == json.loads(json.dumps(task.options()))
    assert task_of_run(tmp_path / "other") is None
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(weights(loaded), weights(model))
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == task.tokenizer.get_vocab()


class Crash(TrainerCallback):
    """Stop as a killed process does, after the checkpoint of a step."""

    def __init__(self, step):
        self.step, self.begun = step, 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun += 1
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(task, tmp_path):
    """Weights, curve and learning rates of a run cut in two are those of a whole one; dropout included."""

    def fresh():
        return new_model("gpt2", task)

    whole = fresh()
    expected = train_on_task(whole, task, settings(tmp_path / "whole", logging_steps=1))
    with pytest.raises(KeyboardInterrupt):
        train_on_task(fresh(), task, settings(tmp_path / "cut", logging_steps=1), [Crash(5)])
    assert not (tmp_path / "cut" / "history.json").exists()
    second, counter = fresh(), Crash(None)
    history = train_on_task(second, task, settings(tmp_path / "cut", logging_steps=1), [counter])
    assert counter.begun == 2
    assert torch.equal(weights(second), weights(whole))
    assert history.curve("loss") == expected.curve("loss")
    assert history.curve("learning_rate") == expected.curve("learning_rate")
    assert history.curve("eval_accuracy") == expected.curve("eval_accuracy")
    assert history.test == expected.test


def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(task, tmp_path, monkeypatch):
    def fresh():
        return new_model("llama", task)

    whole = fresh()
    train_on_task(whole, task, settings(tmp_path / "whole"))
    write, written = TaskTrainer._save_rng_state, []

    def killed(trainer, folder):
        written.append(folder)
        if len(written) == 2:
            raise KeyboardInterrupt
        write(trainer, folder)

    monkeypatch.setattr(TaskTrainer, "_save_rng_state", killed)
    with pytest.raises(KeyboardInterrupt):
        train_on_task(fresh(), task, settings(tmp_path / "cut"))
    monkeypatch.setattr(TaskTrainer, "_save_rng_state", write)
    assert [folder.name for folder in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-2"]
    second, counter = fresh(), Crash(None)
    train_on_task(second, task, settings(tmp_path / "cut"), [counter])
    assert counter.begun == 4
    assert torch.equal(weights(second), weights(whole))
    assert [folder.name for folder in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-6"]
    assert not (tmp_path / "cut" / ".unfinished").exists()


def test_the_best_checkpoint_is_found_where_it_is(task, tmp_path):
    args = settings(tmp_path, load_best_model_at_end=True, metric_for_best_model="eval_loss", save_total_limit=2)
    trainer = TaskTrainer(new_model("llama", task), task, args)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{trainer.state.best_global_step}")
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == trainer.state.best_model_checkpoint


def test_shares_of_all_steps_become_steps(task, tmp_path):
    args = settings(tmp_path, max_steps=30, logging_steps=0.1, eval_steps=0.5, save_steps=7)
    TaskTrainer(new_model("llama", task), task, args)
    assert (args.logging_steps, args.eval_steps, args.save_steps) == (3, 15, 7)


def test_a_finished_run_is_not_trained_again(task, tmp_path):
    model = new_model("llama", task)
    history = train_on_task(model, task, settings(tmp_path))
    again = new_model("llama", task, seed=9)
    assert train_on_task(again, task, settings(tmp_path), [Crash(0)]) == history
    assert torch.equal(weights(again), weights(model))


def test_seeds_fix_a_run(task, tmp_path):
    ends = []
    for number, seed in enumerate((3, 3, 4)):
        model = new_model("llama", task)
        train_on_task(model, task, settings(tmp_path / str(number), seed=seed))
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
    first = [TaskTrainer(model, task, settings(tmp_path, seed=seed)).train_dataset[0] for seed in (3, 4)]
    assert not torch.equal(first[0]["input_ids"], first[1]["input_ids"])


@pytest.mark.parametrize("model_type", ["lt2", "llama"])
def test_matrices_decay_and_norms_biases_and_decay_parameters_do_not(task, tmp_path, model_type):
    """Guards F15."""
    fields = {"layer_mixers": "gdn"} if model_type == "lt2" else {}
    model = new_model(model_type, task, **fields)
    trainer = TaskTrainer(model, task, settings(tmp_path, weight_decay=0.3, adam_beta2=0.9))
    groups = trainer.create_optimizer().param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert {group["betas"] for group in groups} == {(0.9, 0.9)}
    side = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(side) == len(list(model.parameters()))
    free = {name for name, p in model.named_parameters() if side[id(p)] == 0.0}
    assert all(p.ndim < 2 or "loop_residual" in name for name, p in model.named_parameters() if name in free)
    assert all(name in free for name, _ in model.named_parameters() if "norm" in name or name.endswith("bias"))
    if model_type == "lt2":
        assert any("A_log" in name for name in free)
        assert any("loop_residual" in name for name in free)


def test_frozen_parameters_are_in_no_group(task, tmp_path):
    model = new_model("llama", task)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" in name
    groups = TaskTrainer(model, task, settings(tmp_path, weight_decay=0.1)).create_optimizer().param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 0), (0.0, 5)]


def test_the_learning_rate_follows_its_formula():
    geometric = [learning_rate_share(step, 10, 2, "geometric", 0.01) for step in range(11)]
    assert geometric[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert geometric[6] == pytest.approx(0.1)
    assert geometric[10] == pytest.approx(0.01)
    cosine = [learning_rate_share(step, 8, 0, "cosine", 0.2) for step in (0, 4, 8, 9)]
    assert cosine == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert learning_rate_share(7, 8, 0, "constant", 0.2) == 1.0


def test_the_logged_rates_are_those_of_the_schedule(task, tmp_path):
    args = settings(tmp_path, learning_rate=0.5e-3, final_learning_rate_share=0.25, warmup_steps=2, logging_steps=1)
    history = train_on_task(new_model("llama", task), task, args)
    rates = [rate for _, rate in history.curve("learning_rate")]
    assert rates == pytest.approx([0.5e-3 * learning_rate_share(s, 6, 2, "geometric", 0.25) for s in range(6)])


def test_training_stops_when_accuracy_is_reached(task, tmp_path):
    history = train_on_task(new_model("llama", task), task, settings(tmp_path / "a", stop_at=0.0))
    assert history.steps == 2
    history = train_on_task(new_model("llama", task), task, settings(tmp_path / "b", stop_at=1.1))
    assert history.steps == 6


@pytest.mark.parametrize(("target", "stages"), [(0.0, 3), (1.1, 1)])
def test_a_curriculum_goes_on_only_when_the_target_is_reached(tmp_path, target, stages):
    tasks = SwapRecall(max_items=8).stages((2, 4, 8))
    model = new_model("llama", tasks[-1])
    histories = train_curriculum(model, tasks, settings(tmp_path), target)
    assert [history.task["num_items"] for history in histories] == [2, 4, 8][:stages]
    assert [history.steps for history in histories] == ([2] * 3 if target == 0 else [6])
    assert (tmp_path / f"stage-{stages}" / "history.json").is_file()


def test_an_interrupted_curriculum_goes_on_with_the_weights_of_the_stages_that_are_done(tmp_path):
    tasks = SwapRecall(max_items=8).stages((2, 4))

    def fresh():
        return new_model("llama", tasks[-1])

    whole, cut = fresh(), fresh()
    train_curriculum(whole, tasks, settings(tmp_path / "whole"), 0.0)
    train_curriculum(fresh(), tasks[:1], settings(tmp_path / "cut"), 0.0)
    train_curriculum(cut, tasks, settings(tmp_path / "cut"), 0.0)
    assert torch.equal(weights(cut), weights(whole))


def test_a_folder_with_another_run_is_refused(task, tmp_path):
    train_on_task(new_model("llama", task), task, settings(tmp_path))
    with pytest.raises(ValueError, match="different settings"):
        train_on_task(new_model("llama", task), task, settings(tmp_path, learning_rate=1.0))
    with pytest.raises(ValueError, match="different task"):
        train_on_task(new_model("llama", task), make_task("permutations", length=4), settings(tmp_path))
    with pytest.raises(ValueError, match="different model"):
        train_on_task(new_model("llama", task, hidden_size=32), task, settings(tmp_path))
    train_on_task(new_model("llama", task), task, settings(tmp_path, logging_steps=3))


def test_a_model_that_is_too_small_for_a_task_is_refused(task, tmp_path):
    big = make_task("recall", length=200)
    with pytest.raises(ValueError, match="vocab_size=129"):
        train_on_task(new_model("llama", task), big, settings(tmp_path))
    with pytest.raises(ValueError, match=r"200 tokens.*64"):
        train_on_task(new_model("llama", big, max_position_embeddings=64), big, settings(tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": "linear"}, "geometric, cosine"),
        ({"final_learning_rate_share": 0.0}, "above 0"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": None}, "`max_steps` must be a whole number, got None"),
        ({"max_steps": "abc"}, "`max_steps` must be a whole number, got 'abc'"),
        ({"max_steps": 3.5}, "`max_steps` must be a whole number, got 3.5"),
        ({"learning_rate": "abc"}, "`learning_rate` must be a number, got 'abc'"),
        ({"learning_rate": math.inf}, "`learning_rate` must be a finite number, got inf"),
        ({"weight_decay": None}, "`weight_decay` must be a number, got None"),
        ({"stop_at": "abc"}, "`stop_at` must be a number, got 'abc'"),
        ({"test_rows": "abc"}, "`test_rows` must be a whole number, got 'abc'"),
        ({"test_rows": 0}, "`test_rows` must be at least 1, got 0"),
        ({"bf16": "maybe"}, "`bf16` must be true or false, got 'maybe'"),
        ({"lr_scheduler_type": "cosine"}, "`lr_scheduler_type` changes nothing here, got 'cosine': set `decay`"),
        ({"num_train_epochs": 7}, "`num_train_epochs` changes nothing here, got 7: set `max_steps`"),
        ({"remove_unused_columns": True}, "`remove_unused_columns` must be false"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **options)


def test_a_folder_that_holds_something_else_is_left_alone(task, tmp_path):
    new_model("llama", task).save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"holds something and no task_run\.json.*Give another folder"):
        train_on_task(new_model("llama", task), task, settings(tmp_path))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_history_without_weights_is_no_finished_run(task, tmp_path):
    model = new_model("llama", task)
    train_on_task(model, task, settings(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    again = new_model("llama", task, seed=9)
    train_on_task(again, task, settings(tmp_path))
    assert (tmp_path / "model.safetensors").is_file()
    assert torch.equal(weights(again), weights(model))


def test_a_folder_that_another_run_writes_to_is_refused(task, tmp_path):
    second = settings(tmp_path)

    class Second(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            with pytest.raises(ValueError, match="in use by another run"):
                train_on_task(new_model("llama", task), task, second)

    train_on_task(new_model("llama", task), task, settings(tmp_path), [Second()])


def test_a_run_that_diverged_is_not_stored_as_finished(task, tmp_path):
    args = settings(tmp_path, learning_rate=1e10, max_grad_norm=0.0, save_strategy="no")
    with pytest.raises(ValueError, match=r"not finite.*diverged"):
        train_on_task(new_model("llama", task), task, args)
    assert not (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "history.json").exists()


def test_a_history_is_json_that_everyone_reads(tmp_path):
    log = [{"step": 1, "loss": 2.0, "grad_norm": math.inf, "learning_rate": 0.1}]
    assert training._points(log) == [{"step": 1, "loss": 2.0, "learning_rate": 0.1}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        History({}, "llama", 1, {}, test={"loss": math.nan}).save(tmp_path)


def test_too_few_sequences_come_up_before_training(tmp_path):
    task = make_task("permutations", length=1)
    with pytest.raises(ValueError, match="too few sequences for 'test'"):
        train_on_task(new_model("llama", task), task, settings(tmp_path / "run"), [Crash(0)])
    assert not (tmp_path / "run").exists()


def test_a_run_killed_after_its_last_evaluation_does_not_train_on(task, tmp_path, monkeypatch):
    whole, cut = new_model("llama", task), new_model("llama", task)
    expected = train_on_task(whole, task, settings(tmp_path / "whole", stop_at=0.0))
    measure = training.measure

    def killed(model, task, split, *where, **named):
        if split == "test":
            raise KeyboardInterrupt
        return measure(model, task, split, *where, **named)

    monkeypatch.setattr(training, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        train_on_task(new_model("llama", task), task, settings(tmp_path / "cut", stop_at=0.0))
    monkeypatch.undo()
    counter = Crash(None)
    history = train_on_task(cut, task, settings(tmp_path / "cut", stop_at=0.0), [counter])
    assert (counter.begun, history.steps) == (0, 2)
    assert (history.test, history.points) == (expected.test, expected.points)
    assert torch.equal(weights(cut), weights(whole))


def test_a_model_that_reads_later_tokens_is_refused(task, tmp_path):
    with pytest.raises(ValueError, match="BertLMHeadModel is not causal"):
        train_on_task(new_model("bert", task), task, settings(tmp_path))
    train_on_task(new_model("bert", task, is_decoder=True), task, settings(tmp_path, max_steps=1))
