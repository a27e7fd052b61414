# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Two processes give what one gives, whole or sharded, interrupted or not; what the launchers' recipes say is read."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from loopergy.configuration.configuration_ouro import OuroConfig
from loopergy.conversion import convert
from loopergy.distill.extend import ExtendConfig, ExtendTrainer
from loopergy.distill.stage import StageRecord
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.modeling.modeling_ouro import OuroForCausalLM
from loopergy.training.processes import check_sharding, join_processes, shared_folder, whole

HERE = Path(__file__).parent
LAUNCH_FILES = sorted((HERE.parents[1] / "recipes" / "accelerate").glob("*.yaml"))
STAGES = ("convert", "align", "select", "distill", "extend")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}


def run_case(case: str, folder: Path) -> None:
    """Run a case of `two_processes.py`, which ends all that it started."""
    command = [sys.executable, str(HERE / "two_processes.py"), case, str(folder)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def job(tmp_path, ouro, byte_tokenizer) -> Path:
    """Make a folder with a teacher, its tokenizer and texts."""
    ouro.save_pretrained(tmp_path / "teacher")
    byte_tokenizer.save_pretrained(tmp_path / "teacher")
    (tmp_path / "texts").mkdir()
    for index in range(40):
        (tmp_path / "texts" / f"{index}.txt").write_text(f"text number {index}, " * 4)
    return tmp_path


def history(folder: Path, key: str) -> list[float]:
    entries = json.loads((folder / "log_history.json").read_text())
    return [entry[key] for entry in entries if "loss" in entry]


def check_same_run(one: Path, other: Path, rel: float) -> None:
    """Hold two runs of a recipe against each other: files, tokens, layers, losses, held-out text, weights."""
    files = [sorted(path.relative_to(run) for path in run.rglob("*") if path.suffix != ".py") for run in (one, other)]
    assert files[0] == files[1]
    for stage in STAGES:
        records = [StageRecord.load(run / stage) for run in (one, other)]
        assert records[0].tokens_seen == records[1].tokens_seen
        assert records[0].kept_layers == records[1].kept_layers
        for key in ("kl", "perplexity"):
            seen = [record.metrics["heldout"][key] for record in records]
            assert seen[1] == pytest.approx(seen[0], rel=rel), stage
        if (one / stage / "log_history.json").is_file():
            assert history(other / stage, "loss") == pytest.approx(history(one / stage, "loss"), rel=rel), stage
            # Few numbers make up the norm where the gradient is steep.
            norms = [history(run / stage, "grad_norm") for run in (one, other)]
            assert norms[1] == pytest.approx(norms[0], rel=max(100 * rel, 1e-6)), stage
    selections = [json.loads((run / "select" / "selection.json").read_text()) for run in (one, other)]
    assert selections[0]["order"] == selections[1]["order"]
    weights = [load_file(run / "extend" / "model.safetensors") for run in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=max(100 * rel, 1e-6), msg=name)


@pytest.mark.slow
def test_a_recipe_on_two_processes_is_the_recipe_on_one_and_survives_a_kill_in_every_stage(job):
    """Guards H3, I5, I7: a process killed in alignment, selection, distillation and extension."""
    run_case("pipeline", job)
    # The logs keep losses in float32.
    check_same_run(job / "one", job / "two", rel=2e-7)
    check_same_run(job / "one", job / "killed", rel=2e-7)
    check_same_run(job / "one", job / "stored", rel=2e-7)
    assert len(list((job / "states").glob("states-*.safetensors"))) > 0
    killed = json.loads((job / "killed_runs.json").read_text())
    stages = [[name for name in STAGES if name in run] for run in killed]
    assert stages == [["convert"], ["convert", "align"], ["convert", "align", "select"], [*STAGES[:4]]]


@pytest.mark.slow
def test_a_sharded_recipe_is_the_recipe_on_one_process_and_survives_a_kill(job):
    """Guards H12, H13: FSDP2 as recipes/accelerate/fsdp2.yaml asks for it; stage 1 stays whole."""
    run_case("sharded_pipeline", job)
    check_same_run(job / "one", job / "two", rel=1e-5)
    check_same_run(job / "two", job / "killed", rel=1e-6)
    assert json.loads((job / "two-sharded.json").read_text()) == [False, True, True]


def check_families(folder: Path, name: str, sharded: bool, steps: int = 4) -> None:
    """Hold the training of every family against that on one process."""
    one, two = (json.loads((folder / f"{run}.json").read_text()) for run in ("one", name))
    assert len(one) == 6
    for family, wanted in one.items():
        got = two[family]
        assert got["sharded"] is sharded
        assert len(wanted["loss"]) == 4
        assert got["loss"][-steps:] == pytest.approx(wanted["loss"][-steps:], rel=1e-6), family
        assert got["grad_norm"][-steps:] == pytest.approx(wanted["grad_norm"][-steps:], rel=1e-9), family
        weights = [load_file(folder / run / family / "final" / "model.safetensors") for run in ("one", name)]
        # Trainer writes a tied head once more when it has gathered it from shards.
        assert weights[1].keys() - weights[0].keys() <= {"lm_head.weight"}
        for key, tensor in weights[0].items():
            torch.testing.assert_close(weights[1][key], tensor, rtol=0, atol=1e-6, msg=f"{family} {key}")


@pytest.mark.slow
def test_every_family_trains_on_two_processes_as_on_one(tmp_path):
    """Guards I1, I5: rows of unequal length, with and without activation checkpointing, blocks visited T times."""
    run_case("families", tmp_path)
    check_families(tmp_path, "two", sharded=False)
    check_families(tmp_path, "two-checkpointing", sharded=False)


@pytest.mark.slow
def test_every_family_trains_sharded_as_on_one_process_and_resumes(tmp_path):
    """Guards I5: a sharded block is gathered in each of its T visits; tied embeddings; whole safetensors are saved."""
    run_case("sharded_families", tmp_path)
    check_families(tmp_path, "two", sharded=True)
    check_families(tmp_path, "two-checkpointing", sharded=True)
    check_families(tmp_path, "resumed", sharded=True, steps=2)


def test_a_tied_head_that_was_gathered_is_written_once(tmp_path):
    """Guards H12."""
    teacher = OuroForCausalLM(OuroConfig.from_preset("tiny", tie_word_embeddings=True))
    student = convert(teacher, keep_layers=[1]).model
    args = ExtendConfig(str(tmp_path), use_cpu=True, require_previous=False, max_steps=1)
    trainer = ExtendTrainer(student, None, args, [])
    gathered = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    assert "student.lm_head.weight" in gathered
    trainer._save(str(tmp_path), state_dict=gathered)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == student.state_dict().keys() - {"lm_head.weight"}
    loaded = LT2ForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, student.lm_head.weight)


FAILING = """
import os
from loopergy.distill.recipe import RecipeRun
from loopergy.cli import main

def fail(self, settings):
    raise ValueError("the disk of process 1 is full")

if os.environ["RANK"] == "1":
    RecipeRun._select = fail
main()
"""


@pytest.mark.slow
def test_a_launched_command_ends_when_one_process_fails_and_goes_on_when_run_again(job):
    pytest.importorskip("matplotlib")
    training = {"length": 24, "max_steps": 2, "per_device_train_batch_size": 2, "disable_tqdm": True}
    values = {
        "teacher": str(job / "teacher"),
        "data": str(job / "texts"),
        "align": training,
        "select": {"keep": 1, "num_tokens": 96, "length": 24},
        "distill": training,
        "evaluate": {"num_tokens": 96, "length": 24},
    }
    (job / "recipe.yaml").write_text(yaml.safe_dump(values))
    (job / "failing.py").write_text(FAILING)
    command = ["run", str(job / "recipe.yaml"), "-o", str(job / "out")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]

    def start(words: list[str], **environment: str) -> subprocess.CompletedProcess:
        options = {"env": ENVIRONMENT | environment, "capture_output": True, "text": True, "timeout": 300}
        return subprocess.run([*words, *command], **options)

    failed = start([*torchrun, str(job / "failing.py")])
    assert failed.returncode != 0
    assert "the disk of process 1 is full" in failed.stderr
    assert (job / "out" / "align").exists()
    assert not (job / "out" / "distill").exists()
    done = start([*launch, "-m", "loopergy.cli"], ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr[-3000:]
    # One process reports.
    assert done.stdout.count("report:") == 1
    assert StageRecord.load(job / "out" / "distill").tokens_seen == 2 * 2 * 2 * 24


@pytest.mark.parametrize("file", LAUNCH_FILES, ids=lambda path: path.stem)
def test_recipes_for_accelerate_are_read_whole(file):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(file))
    written = yaml.safe_load(file.read_text())
    assert str(config.distributed_type.value) == written["distributed_type"]
    options = {action.dest for action in launch_command_parser()._actions}
    for part in ("fsdp_config", "deepspeed_config"):
        assert set(written.get(part, {})) <= options
        assert getattr(config, part) == written.get(part, {})


def test_there_is_a_recipe_for_each_way_to_spread_a_model():
    assert [file.stem for file in LAUNCH_FILES] == ["ddp", "fsdp2", "zero3"]


def test_processes_without_accelerators_find_each_other(monkeypatch):
    monkeypatch.setattr("loopergy.training.processes.PartialState", lambda cpu: cpu)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_processes() is False
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert join_processes() is True
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert join_processes() is False


def test_only_the_main_process_is_given_a_folder(tmp_path, monkeypatch):
    with shared_folder(tmp_path / "whole") as unfinished:
        (unfinished / "file").touch()
        assert not (tmp_path / "whole").exists()
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["file"]
    other = Namespace(is_main_process=False, wait_for_everyone=lambda: None)
    monkeypatch.setattr("loopergy.training.processes.PartialState", lambda: other)
    with shared_folder(tmp_path / "whole") as unfinished:
        assert unfinished is None
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({"fsdp_version": 1}, "FSDP 1 .* needs fsdp_version 2"),
        ({"state_dict_type": "StateDictType.SHARDED_STATE_DICT"}, "FULL_STATE_DICT"),
        ({}, r"\['torch.float32', 'torch.float64'\].*Load it in float32"),
    ],
)
def test_ways_of_sharding_that_cannot_work_are_refused(plugin, message, student):
    values = {"fsdp_version": 2, "state_dict_type": "StateDictType.FULL_STATE_DICT", **plugin}
    accelerator = Namespace(state=Namespace(fsdp_plugin=Namespace(**values)), mixed_precision="no")
    with pytest.raises(ValueError, match=message):
        check_sharding(accelerator, student)
    check_sharding(Namespace(state=Namespace()), student)
    assert whole(student) is student
