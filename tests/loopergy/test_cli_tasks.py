# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The verbs of `loopergy task`."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from loopergy import cli
from loopergy.tasks.catalog import TASKS

GROUP = typer.main.get_command(cli.app).commands["task"]
SHORT = ["--set", "max_steps=2", "--set", "per_device_train_batch_size=4", "--set", "eval_rows=4"]
SHORT += ["--set", "test_rows=4", "--set", "use_cpu=true"]


def run(*arguments):
    return CliRunner().invoke(cli.app, ["task", *map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "recall"
    options = ["--option", "num_pairs=3", "--option", "num_values=7", "--config", "hidden_size=32"]
    done = run("train", "recall", "ouro", "-o", folder, *options, *SHORT)
    assert done.exit_code == 0, done.exception
    return folder, done.output


@pytest.mark.parametrize("verb", sorted(GROUP.commands))
def test_help_shows_an_example_that_the_verb_understands(verb):
    assert "Example:" in run(verb, "--help").output
    line = re.search(r"\[bold\](.+)\[/bold\]", GROUP.commands[verb].epilog).group(1)
    words = shlex.split(line)
    assert words[:3] == ["loopergy", "task", verb]
    GROUP.commands[verb].make_context(verb, words[3:])


def test_all_tasks_are_listed_with_their_options():
    shown = run("list").output
    assert all(f"\n{name}\n" in f"\n{shown}" for name in TASKS)
    assert "num_pairs=8" in shown
    assert "operators=['max_10', 'median_10', 'add_10']" in shown


def test_train_writes_the_model_and_its_history(trained):
    folder, output = trained
    history = json.loads((folder / "history.json").read_text())
    assert (history["task"]["num_values"], history["model_type"], history["steps"]) == (7, "ouro", 2)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32
    assert "recall: ouro, " in output
    assert "eval_accuracy" in output
    assert f"test: accuracy {history['test']['accuracy']:.4f}, loss" in output


def test_eval_takes_the_options_of_the_run(trained):
    folder, _ = trained
    done = run("eval", "recall", folder, "--count", 5, "--device", "cpu")
    assert done.exit_code == 0, done.exception
    assert "of 15, chance 0.1429" in done.output
    fewer = run("eval", "recall", folder, "--count", 5, "--option", "num_queries=1", "--device", "cpu")
    assert "of 5, chance 0.1429" in fewer.output


def test_training_goes_on_from_a_folder_and_may_start_from_one(trained, tmp_path):
    folder, _ = trained
    again = run("train", "recall", folder, "-o", tmp_path / "next", *SHORT)
    assert again.exit_code == 0, again.exception
    assert json.loads((tmp_path / "next" / "history.json").read_text())["task"]["num_values"] == 7
    refused = run("train", "recall", folder, "-o", tmp_path / "x", "--config", "hidden_size=8")
    assert "--config shapes a fresh model" in str(refused.exception)


def test_a_model_with_another_vocabulary_is_refused(trained):
    folder, _ = trained
    assert "another vocabulary" in str(run("eval", "permutations", folder).exception)
    assert "another vocabulary" in str(run("eval", "recall", folder, "--option", "num_values=9").exception)


def test_an_unfinished_run_is_named(trained, tmp_path):
    folder, _ = trained
    (tmp_path / "task_run.json").write_text((folder / "task_run.json").read_text())
    assert "unfinished run" in str(run("eval", "recall", tmp_path).exception)


def test_listops_is_sampled_and_asked_by_operation(tmp_path):
    options = ["--option", "train_samples=50", "--option", "test_samples=10", "--option", "length=32"]
    done = run("train", "listops", "llama", "-o", tmp_path / "run", *options, *SHORT)
    assert done.exit_code == 0, done.exception
    shown = run("eval", "listops", tmp_path / "run", "--operator", "add_10", "--sample", "--device", "cpu").output
    assert "of 10, chance 0.1000" in shown
    assert "add_10" in shown
    assert "max_10" not in shown
    wrong = run("eval", "recall", tmp_path / "run", "--option", "num_values=9")
    assert "another vocabulary" in str(wrong.exception)


def test_the_needle_is_hidden_in_the_models_own_tokens(tmp_path, topics_tokenizer):
    from loopergy import OuroConfig, OuroForCausalLM

    OuroForCausalLM(OuroConfig.from_preset("tiny", vocab_size=len(topics_tokenizer))).save_pretrained(tmp_path)
    topics_tokenizer.save_pretrained(tmp_path)
    options = ["--option", "lengths=[80, 160]", "--option", "depths=[0, 1]", "--option", "length=160"]
    done = run("eval", "needle", tmp_path, *options, "--count", 8, "--device", "cpu")
    assert done.exit_code == 0, done.exception
    assert "0 of 8" in done.output
    assert " 80 tokens, depth 100%" in done.output


def test_wrong_words_are_refused_by_name(trained, tmp_path):
    folder, _ = trained
    assert "there is no setting 'max_step'" in str(
        run("train", "recall", "llama", "-o", tmp_path, "--set", "max_step=3").exception
    )
    assert "no task 'recal'" in str(run("train", "recal", "llama", "-o", tmp_path).exception)
    assert "are for listops" in str(run("eval", "recall", folder, "--sample").exception)
    assert "--option 'num_pairs'" in str(run("eval", "recall", folder, "--option", "num_pairs").exception)


def test_the_folder_of_a_run_has_one_name(tmp_path):
    refused = run("train", "recall", "llama", "-o", tmp_path / "a", "--set", f"output_dir={tmp_path / 'b'}")
    assert re.search(r"--set output_dir=.*/b: the folder of the run is --output", str(refused.exception))
    assert not any(tmp_path.iterdir())


def test_a_folder_with_the_name_of_a_model_type_does_not_stand_for_it(trained, tmp_path, monkeypatch):
    folder, _ = trained
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "lt2")
    short = [*SHORT, "--set", "max_steps=1", "--option", "num_pairs=3", "--option", "num_values=7"]
    done = run("train", "recall", "lt2", "-o", "fresh", *short)
    assert "lt2 is a model type and a folder here: training a fresh lt2; ./lt2 is the folder" in done.output
    assert "recall: lt2, " in done.output
    assert "recall: ouro, " in run("train", "recall", "./lt2", "-o", "next", *short).output


def test_a_task_that_was_mixed_into_a_text_is_asked_in_the_models_own_tokens(tmp_path, topics_tokenizer):
    from loopergy import OuroConfig, OuroForCausalLM

    OuroForCausalLM(OuroConfig.from_preset("tiny", vocab_size=len(topics_tokenizer))).save_pretrained(tmp_path)
    topics_tokenizer.save_pretrained(tmp_path)
    options = ["--option", "num_keys=9", "--option", "num_values=9", "--option", "num_pairs=4"]
    done = run("eval", "recall", tmp_path, *options, "--count", 3, "--device", "cpu")
    assert done.exit_code == 0, done.exception
    assert "of 12, chance 0.1111" in done.output


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path):
    call = ["--nproc_per_node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    call += ["-m", "loopergy.cli", "task", "train", "permutations", "llama", "-o", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "torch.distributed.run", *call, "--option", "length=5", *SHORT]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("written to") == done.stdout.count("permutations: llama") == 1
    history = json.loads((tmp_path / "run" / "history.json").read_text())
    # Two steps of four rows of six tokens on each of two processes.
    assert history["points"][-1]["tokens"] == 2 * 2 * 4 * 6
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_the_settings_are_listed():
    shown = run("train", "--fields").output
    assert "stop_at = None\n    Stop when validation accuracy" in shown
    assert "TrainingArguments" in shown
