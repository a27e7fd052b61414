# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""A looped teacher from one file: what is written, what goes on, what is refused."""

import dataclasses
import json
import shutil

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import loopergy
from loopergy.cli import app
from loopergy.distill import pretrain_recipe
from loopergy.distill.pretrain_recipe import PretrainRecipe, PretrainRun, Start, pretrain
from loopergy.distill.stage import StageError, StageRecord
from loopergy.recipes import recipe_files

SMALL = {
    "data": "offline:prose",
    "tokenizer": {"vocab_size": 700},
    "model": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "num_loops": 3, "max_position_embeddings": 256,
    },
    "start": {"embedding_std": 0.5, "branch_scale": 0.25},
    "tasks": [{"task": "recall", "share": 0.3, "length": 24, "num_pairs": 2, "num_keys": 8, "num_values": 8}],
    "pretrain": {
        "max_steps": 4, "length": 64, "per_device_train_batch_size": 2, "logging_steps": 4, "save_steps": 2,
        "use_cpu": True, "disable_tqdm": True,
    },
    "gate": {
        "max_steps": 2, "length": 64, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no",
        "use_cpu": True, "disable_tqdm": True,
    },
    "evaluate": {"num_tokens": 256, "length": 64, "batch_size": 2},
}  # fmt: skip


def recipe(**changes):
    return PretrainRecipe.from_dict(json.loads(json.dumps({**SMALL, **changes})))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretraining")
    return folder, PretrainRun(recipe(), folder).run()


def test_a_run_leaves_a_model_with_its_tokenizer_a_report_and_a_curve(finished):
    folder, report = finished
    assert [stage["stage"] for stage in report["stages"]] == ["pretrain", "gate"]
    for stage in report["stages"]:
        assert len(stage["loops"]["loop_perplexity"]) == 3
        assert set(stage["tasks"]) == {"recall"}
        assert stage["tokens"] > 0
    # The gate's stage changes what the gate says, and nothing that the loops know.
    before, after = (stage["loops"] for stage in report["stages"])
    assert after["loop_perplexity"] == before["loop_perplexity"]
    assert after["exit_share"] != before["exit_share"]
    assert json.loads((folder / "pretraining.json").read_text()) == json.loads(json.dumps(report))
    assert (folder / "pretraining.svg").read_text().startswith("<svg")
    assert not list((folder / "checkpoints").glob("*"))
    model = AutoModelForCausalLM.from_pretrained(folder / "gate")
    tokenizer = AutoTokenizer.from_pretrained(folder / "gate")
    assert (model.config.model_type, model.config.vocab_size) == ("ouro", len(tokenizer)) == ("ouro", 700)
    out = model.generate(**tokenizer("The class", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert out.shape[1] > 3
    record = StageRecord.load(folder / "gate")
    assert (record.stage, record.parent["stage"]) == ("gate", "pretrain")


def test_an_exported_teacher_has_a_card_that_tells_each_loop(finished, tmp_path):
    folder, report = finished
    loopergy.export(folder / "gate", tmp_path / "small-ouro")
    assert json.loads((tmp_path / "small-ouro" / "pretraining.json").read_text()) == json.loads(json.dumps(report))
    card = (tmp_path / "small-ouro" / "README.md").read_text()
    section = card.partition("## Loop by loop")[2].partition("\n## ")[0]
    last = report["stages"][-1]["loops"]
    row = next(line for line in section.splitlines() if line.startswith("| perplexity"))
    assert [float(cell) for cell in row.split("|")[2:-1]] == pytest.approx(last["loop_perplexity"], rel=1e-3)
    assert "leave, after pretrain" in section
    assert "leave, after gate" in section
    assert "Source: `offline:prose`" in section
    assert "| recall |" in section
    assert "pictures/losses.png" in card
    assert "## Held-out text" not in card


def test_a_finished_run_is_not_run_again_and_other_settings_are_refused(finished, monkeypatch):
    folder, report = finished
    monkeypatch.setattr(PretrainRun, "_perform", lambda *args: pytest.fail("trained again"))
    assert PretrainRun(recipe(), folder).run() == report
    assert pretrain(recipe(), folder) == folder / "gate"
    gate = SMALL["gate"]
    for changes, named in (
        ({"model": {**SMALL["model"], "num_loops": 2}}, "settings: model.num_loops was 3, the recipe has 2. Remove"),
        ({"seed": 1}, "settings: seed was 0, the recipe has 1. Remove"),
        ({"gate": {**gate, "max_steps": 3}}, f"settings: max_steps was {gate['max_steps']}, the recipe has 3. Remove"),
        ({"gate": {**gate, "steepness": 9}}, "settings: steepness was None, the recipe has 9. Remove"),
    ):
        with pytest.raises(StageError, match=named):
            PretrainRun(recipe(**changes), folder).run()


def test_an_interrupted_run_ends_as_one_that_was_not(finished, tmp_path, monkeypatch):
    _, report = finished
    steps = []
    original = pretrain_recipe.PretrainTrainer._save_checkpoint

    def stop_after_the_first(self, *args):
        original(self, *args)
        steps.append(self.state.global_step)
        if len(steps) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(pretrain_recipe.PretrainTrainer, "_save_checkpoint", stop_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        PretrainRun(recipe(), tmp_path).run()
    assert not (tmp_path / "pretrain").exists()
    progress = tmp_path / "checkpoints" / "pretrain" / "checkpoint-2" / "progress.json"
    progress.write_text(json.dumps({**json.loads(progress.read_text()), "seconds": 1000.0}))
    again = PretrainRun(recipe(), tmp_path).run()
    assert steps == [2, 4]
    assert again["losses"] == report["losses"], "though no loss was logged before the interruption"
    assert again["stages"][0]["seconds"] > 1000 > again["stages"][1]["seconds"]
    assert again["stages"][1]["loops"] == report["stages"][1]["loops"]


@pytest.mark.parametrize("checkpoint", [True, False])
def test_an_interrupted_run_is_refused_another_tokenizer_or_rate(tmp_path, monkeypatch, checkpoint):
    def stop(self, *args):
        original(self, *args)
        raise KeyboardInterrupt

    name = "_save_checkpoint" if checkpoint else "training_step"
    original = getattr(pretrain_recipe.PretrainTrainer, name)
    monkeypatch.setattr(pretrain_recipe.PretrainTrainer, name, stop)
    with pytest.raises(KeyboardInterrupt):
        PretrainRun(recipe(), tmp_path).run()
    monkeypatch.setattr(PretrainRun, "_perform", lambda *args: pytest.fail("trained"))
    with pytest.raises(StageError, match=r"tokenizer.vocab_size was 700, the recipe has 710\. Restore"):
        PretrainRun(recipe(tokenizer={"vocab_size": 710}), tmp_path).run()
    if checkpoint:
        with pytest.raises(StageError, match=r"interrupted.*pretrain.learning_rate was None, .* 0\.1\. Rest"):
            PretrainRun(recipe(pretrain={**SMALL["pretrain"], "learning_rate": 0.1}), tmp_path).run()
        (tmp_path / "tokenizer" / "trained_on.json").unlink()
        with pytest.raises(StageError, match=r"interrupted.*pretrain.tokenizer.vocab_size was 700, .* 710"):
            PretrainRun(recipe(tokenizer={"vocab_size": 710}), tmp_path).run()


def test_a_teacher_whose_gate_is_trained_is_not_trained_anew(finished, tmp_path):
    folder, _ = finished
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "pretrain")
    with pytest.raises(StageError, match=f"'pretrain' is not done .* Remove {tmp_path}/run/gate to make them"):
        PretrainRun(recipe(gate=None), tmp_path / "run").run()


def test_null_parts_have_their_defaults():
    read = recipe(evaluate=None, tasks=None, gate=None, start=None, pretrain={"length": 64.0})
    assert (read.evaluate, read.tasks, read.gate, read.start) == ({}, [], None, None)
    assert isinstance(read.pretrain["length"], int)


def test_the_start_sets_embeddings_and_branches(tmp_path):
    model = PretrainRun(recipe(start=None), tmp_path)._new_model()
    assert model.model.layers[1].input_layernorm_2.weight.unique().tolist() == [1.0]
    Start(embedding_std=2.0, branch_scale=0.5).apply(model)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(2.0, rel=0.05)
    for layer in model.model.layers:
        for norm in (layer.input_layernorm_2, layer.post_attention_layernorm_2):
            assert norm.weight.unique().tolist() == [0.5]
        assert layer.input_layernorm.weight.unique().tolist() == [1.0]


def test_the_seed_draws_the_weights(tmp_path):
    one, same, other = (PretrainRun(recipe(seed=seed), tmp_path)._new_model().lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_trained_tokenizer_has_ouros_special_tokens():
    tokenizer = pretrain_recipe.train_tokenizer(["some text, some more text"] * 3, 300)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.decode(tokenizer("some text")["input_ids"]) == "some text"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretrain": {"max_stepz": 3}}, r"pretrain: unknown keys \['max_stepz'\]"),
        ({"gate": {"beta": 3}}, r"gate: unknown keys"),
        ({"start": {"std": 1}}, r"start: unknown keys .* embedding_std"),
        ({"tokenizer": {"size": 1}}, r"tokenizer: unknown keys .* vocab_size"),
        ({"evaluate": {"tokens": 1}}, r"evaluate: unknown keys"),
        ({"model": {"hidden": 3}}, r"OuroConfig has no field hidden; it has .*hidden_size.*num_loops"),
        ({"tasks": [{"task": "recall"}]}, r"needs `task` and `share`"),
        ({"tasks": [{"task": "recall", "share": 0.1, "pairs": 3}]}, r"tasks, recall: unknown keys \['pairs'\]"),
        ({"tasks": [{"task": "chess", "share": 0.1}]}, r"no task 'chess'"),
        ({"pretrain": None}, r"pretrain: this must be a mapping of fields, .* got None"),
        ({"gate": 5}, r"gate: this must be a mapping of fields, .* got 5"),
        ({"gate": {"length": "long"}}, r"gate: `length` must be a whole number, got 'long'"),
        ({"start": {"branch_scale": "small"}}, r"start: `branch_scale` must be a number, got 'small'"),
        ({"tokenizer": {}}, r"tokenizer: `vocab_size` is missing"),
        ({"teacher": "smollm2"}, r"unknown keys \['teacher'\]"),
        ({"data": 5}, r"`data` must be a text, got 5"),
        ({"data": None}, r"`data` must be a text, got None"),
        ({"seed": "abc"}, r"`seed` must be a whole number, got 'abc'"),
        ({"seed": None}, r"`seed` must be a whole number, got None"),
        ({"seed": 1.5}, r"`seed` must be a whole number, got 1.5"),
        ({"seed": -1}, r"`seed` must be at least 0, got -1"),
        ({"tokenizer": None}, r"`tokenizer` must be a mapping or a text, got None"),
        ({"tokenizer": {"vocab_size": "abc"}}, r"tokenizer: `vocab_size` must be a whole number, got 'abc'"),
        ({"tokenizer": {"vocab_size": 400.5}}, r"tokenizer: `vocab_size` must be a whole number, got 400.5"),
        ({"model": 5}, r"`model` must be a mapping, got 5"),
        ({"tasks": 5}, r"`tasks` must be a list of mappings, got 5"),
        ({"tasks": ["recall"]}, r"`tasks` must be a list of mappings, got \['recall'\]"),
        ({"tasks": [{"task": "recall", "share": "abc"}]}, r"tasks, recall: `share` must be a number, got 'abc'"),
        ({"tasks": [{"task": "recall", "share": 0.1, "length": 9.5}]}, r"recall: `length` must be a whole .* 9.5"),
        ({"tasks": [{"task": "permutations", "share": 0.1}]}, r"'permutations' has a vocabulary of its own.* recall"),
        ({"start": {"embedding_std": -1.0}}, r"start: `embedding_std` must be at least 0, got -1.0"),
        ({"start": {"embedding_std": float("nan")}}, r"start: `embedding_std` must be a finite number, got nan"),
        ({"gate": {"steepness": float("nan")}}, r"gate: `steepness` must be a finite number, got nan"),
        ({"pretrain": {"entropy_weight": float("inf")}}, r"`entropy_weight` must be a finite number, got inf"),
        ({"pretrain": {"bf16": "maybe"}}, r"pretrain: `bf16` must be true or false, got 'maybe'"),
        ({"pretrain": {"output_dir": "x"}}, r"pretrain: `output_dir` cannot be set here, got 'x': .*\(-o\)"),
        ({"pretrain": {"seed": 1}}, r"pretrain: `seed` cannot be set here, got 1: the recipe's own"),
        ({"gate": {"data_seed": 1}}, r"gate: `data_seed` cannot be set here, got 1: .* the recipe's own"),
    ],
)
def test_keys_and_values_that_a_recipe_does_not_take_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        recipe(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": {"length": 1}}, "gate: `length` must be at least 2"),
        ({"gate": {"length": 16}}, "gate: .* a row 16"),
        ({"gate": {"max_steps": -1}}, "gate: give `target_tokens` or `max_steps`"),
        ({"gate": {"length": 512}}, "gate: Rows have 512 tokens, but the model's .*256, or `model.max_position_embed"),
        ({"gate": {"steepness": -1}}, "gate: `steepness` must be at least 0, got -1"),
        ({"model": {"num_loops": 1}}, "gate: .* at least two loops, the model's `num_loops` is 1"),
        ({"model": {"vocab_size": 100}}, "model: `vocab_size` must be at least 700, .* got 100"),
        ({"evaluate": {"length": 512}}, "evaluate: Rows have 512 tokens, but the model's"),
        ({"pretrain": {"per_device_train_batch_size": 0}}, "`per_device_train_batch_size` must be at least 1, got 0"),
        (
            {"pretrain": {"per_device_train_batch_size": -2}},
            "`per_device_train_batch_size` must be at least 1, got -2",
        ),
        ({"pretrain": {"per_device_eval_batch_size": 0}}, "`per_device_eval_batch_size` must be at least 1, got 0"),
        ({"pretrain": {"gradient_accumulation_steps": 0}}, "`gradient_accumulation_steps` must be at least 1, got 0"),
        ({"pretrain": {"loss_chunk_size": -4}}, "`loss_chunk_size` must be at least 1, got -4"),
        ({"pretrain": {"remove_unused_columns": True}}, "`remove_unused_columns` must be false, got True"),
        ({"pretrain": {"report_to": "nosuch"}}, "`report_to`: nosuch is not installed here"),
        ({"tasks": {"num_pairs": 1, "num_keys": 1, "num_values": 2, "length": 4}}, "has too few sequences for"),
    ],
)
def test_what_a_run_refuses_comes_up_before_it_trains(tmp_path, monkeypatch, changes, message):
    ((name, part),) = changes.items()
    value = [{**SMALL["tasks"][0], **part}] if name == "tasks" else {**SMALL[name], **part}
    monkeypatch.setattr(PretrainRun, "_perform", lambda *args: pytest.fail("trained"))
    with pytest.raises(ValueError, match=message):
        PretrainRun(recipe(**{name: value}), tmp_path / "run").run()


def test_without_held_out_text_a_run_trains_all_the_same_and_logs_the_loss_of_a_short_one(tmp_path):
    short = {**SMALL["pretrain"], "max_steps": 1, "logging_steps": 10}
    changes = {"gate": None, "tasks": [], "pretrain": short}
    job = PretrainRun(recipe(**changes, evaluate={"num_tokens": 0}), tmp_path)
    report = job.run()
    assert report["stages"] == []
    assert len(report["losses"]["pretrain"]) == 1
    assert StageRecord.load(job.model_folder()).tokens_seen == 128
    with pytest.raises(StageError, match=r"finished .*: .*evaluate.num_tokens was 0, the recipe has 256"):
        PretrainRun(recipe(**changes), tmp_path).run()


def test_a_tokenizer_is_trained_on_chats_as_its_own_template_writes_them(tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    lines = [json.dumps({"messages": [*turns, {"role": "user", "content": str(index)}]}) for index in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    data = str(tmp_path / "chats.jsonl")
    job = PretrainRun(recipe(data=data, tokenizer={"vocab_size": 300}, tasks=[]), tmp_path / "run")
    ids = torch.cat([batch["input_ids"].flatten() for batch in job.held_out]).tolist()
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho" in job.tokenizer.decode(ids)


def test_a_mistyped_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data: there is no file or folder 'my_texts'.*Correct the path"):
        PretrainRun(recipe(data="my_texts"), tmp_path)


def test_a_tokenizer_has_a_token_for_every_byte(tmp_path):
    with pytest.raises(ValueError, match="`vocab_size` must be at least 259, got 258"):
        PretrainRun(recipe(tokenizer={"vocab_size": 258}), tmp_path)
    assert len(pretrain_recipe.train_tokenizer(["some text"], 259)) == 259


def test_a_task_of_another_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"listops.*vocabulary"):
        PretrainRun(recipe(tasks=[{"task": "listops", "share": 0.1}]), tmp_path)


def test_the_recipes_of_the_package_are_sound():
    files = {name: file for name, file in recipe_files().items() if name in ("ouro-10m", "ouro-tiny")}
    assert len(files) == 2
    for file in files.values():
        read = PretrainRecipe.from_yaml(file)
        assert read.gate is not None
        assert dataclasses.asdict(read)["model"]["num_loops"] == 4


def test_the_command_runs_a_recipe_with_settings_over_it(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "tasks": []}))
    options = ["-o", str(tmp_path / "run"), "--set", "pretrain.max_steps=1", "--set", "gate=None"]
    result = CliRunner().invoke(app, ["pretrain", str(file), *options])
    assert result.exit_code == 0, result.output
    assert "held-out perplexity by loop" in result.output
    assert result.output.strip().endswith(str(tmp_path / "run" / "pretrain"))
    assert StageRecord.load(tmp_path / "run" / "pretrain").tokens_seen == 128
