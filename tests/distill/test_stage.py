# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The trainers: cutting a step does not matter, interrupted runs go on, folders are whole."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from loopergy.conversion import convert
from loopergy.distill.align import AlignConfig, AlignTrainer
from loopergy.distill.distill import DistillConfig, DistillTrainer
from loopergy.distill.extend import ExtendConfig, ExtendTrainer
from loopergy.distill.stage import StageError, StageRecord, check_previous, config_hash
from loopergy.training.data import PackedDataset

STAGES = {
    "align": (AlignTrainer, AlignConfig),
    "distill": (DistillTrainer, DistillConfig),
    "extend": (ExtendTrainer, ExtendConfig),
}


def make_trainer(stage, teacher, folder, data, **options):
    """Return a trainer with a fresh student that keeps layer 1."""
    trainer, config = STAGES[stage]
    values = {
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "length": 16,
    }
    args = config(
        str(folder), **{**values, "use_cpu": True, "disable_tqdm": True, "require_previous": False, **options}
    )
    return trainer(convert(teacher, keep_layers=[1]).model, teacher, args, data)


def history(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("stage", STAGES)
def test_loss_and_gradient_norm_do_not_depend_on_how_a_step_is_cut(stage, ouro, tmp_path, random_batch):
    """Guards H3 and I1: rows of unequal length, with 1, 2 and 4 micro batches."""
    teacher = ouro.float()
    lengths = [12, 3, 7, 5]
    rows = [random_batch(rows=1, length=n, seed=n)["input_ids"][0] for n in lengths]
    seen = []
    for micro, accumulation in ((4, 1), (2, 2), (1, 4)):
        options = {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": accumulation,
            "max_grad_norm": 1e9,
        }
        data = [{"input_ids": row} for row in rows]
        trainer = make_trainer(stage, teacher, tmp_path, data, train_sampling_strategy="sequential", **options)
        if not seen:
            options = {"progress": 0.0} if stage == "distill" else {}
            whole = trainer.model(**trainer.data_collator(data), **options)["loss"].item()
        trainer.train()
        seen.append((history(trainer)[0], history(trainer, "grad_norm")[0]))
    # The mean over the targets of all rows, whatever the cut.
    assert seen[0][0] == pytest.approx(whole, rel=1e-5)
    for loss, norm in seen[1:]:
        assert loss == pytest.approx(seen[0][0], rel=1e-5)
        assert norm == pytest.approx(seen[0][1], rel=1e-4)
    assert seen[0][0] > 0.01


@pytest.mark.parametrize("stage", ["distill", "extend"])
def test_activation_checkpointing_changes_nothing(stage, ouro, tmp_path, random_batch):
    """Guards I2 for the stages that run the whole student."""
    data = [{"input_ids": row} for row in random_batch(rows=4)["input_ids"]]
    seen = []
    for checkpointing in (False, True):
        trainer = make_trainer(
            stage, ouro.float(), tmp_path, data, activation_checkpointing=checkpointing, max_steps=2
        )
        trainer.train()
        assert trainer.student.model.gradient_checkpointing is checkpointing
        seen.append((history(trainer), history(trainer, "grad_norm")))
    for plain, checkpointed in zip(*seen, strict=True):
        assert checkpointed == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(stage, ouro, tmp_path, byte_tokenizer):
    """Guards I7: optimizer, schedule, random state and the next row of the data."""
    texts = [f"document {index} " * (index % 5 + 1) for index in range(9)]
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}

    def run(folder, resume=None):
        data = PackedDataset(texts, byte_tokenizer, 16, split="all")
        trainer = make_trainer(stage, ouro.float(), folder, data, **options)
        trainer.student.config.attention_dropout = 0.1
        for layer in trainer.student.model.layers:
            layer.self_attn.attention_dropout = 0.1
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    resumed = run(tmp_path / "cut", resume=True)
    assert history(resumed) == pytest.approx(history(whole), rel=1e-6)
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen == 6 * 2 * 16
    for one, other in zip(whole.student.parameters(), resumed.student.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    # Its data state is that of the uninterrupted run too, so that it can be interrupted again.
    states = [json.loads((tmp_path / n / "checkpoint-6" / "data_state.json").read_text()) for n in ("whole", "cut")]
    assert states[0] == states[1]
    assert states[0]["rows"] == 12


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_does_not_go_on_with_other_texts(ouro, tmp_path, byte_tokenizer, workers):
    def trainer(text):
        data = PackedDataset([text * 9, "another text " * 9], byte_tokenizer, 16, split="all")
        options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "dataloader_num_workers": workers}
        return make_trainer("align", ouro.float(), tmp_path, data, **options)

    trainer("some text ").train()
    with pytest.raises(StageError, match=r"texts are not those that .*checkpoint-1 was trained on.*remove"):
        trainer("some test ").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer("some text ").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_checkpoints_hold_the_student_alone_and_appear_whole(ouro, tmp_path, random_batch, monkeypatch):
    """Guards H12."""
    data = [{"input_ids": row} for row in random_batch(rows=4)["input_ids"]]
    trainer = make_trainer("distill", ouro.float(), tmp_path, data, max_steps=2, save_strategy="steps", save_steps=1)
    monkeypatch.setattr(
        trainer, "_save_optimizer_and_scheduler", lambda folder: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))
    monkeypatch.undo()
    trainer.train()
    from safetensors import safe_open

    with safe_open(tmp_path / "checkpoint-2" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(trainer.student.state_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]


def test_logs_tell_tokens_speed_and_the_time_that_is_left(ouro, tmp_path, random_batch):
    data = [{"input_ids": row} for row in random_batch(rows=4)["input_ids"]]
    trainer = make_trainer("align", ouro.float(), tmp_path, data, max_steps=4)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["num_input_tokens_seen"] for entry in entries] == [12, 24, 36, 48]
    assert all(entry["train_tokens_per_second"] > 0 for entry in entries)
    assert entries[0]["eta_seconds"] > 0
    assert entries[-1]["eta_seconds"] == 0


def test_a_checkpoint_of_another_student_is_refused(ouro, tmp_path, random_batch):
    """Guards H2."""
    data = [{"input_ids": row} for row in random_batch(rows=4)["input_ids"]]
    options = {"save_strategy": "steps", "save_steps": 1}
    make_trainer("distill", ouro.float(), tmp_path, data, **options).train()
    other = make_trainer("distill", ouro.float(), tmp_path, data, max_steps=2, **options)
    other.student.config.layer_mixers = ["gdn", "gdn", "full"]
    with pytest.raises(StageError, match="not of this student"):
        other.train(resume_from_checkpoint=True)


def test_records_tell_their_history_and_the_hash_sees_the_layers(ouro, tmp_path):
    one, two = (convert(ouro, keep_layers=kept).model.config for kept in ([1], [2]))
    assert config_hash(one) != config_hash(two)
    first = StageRecord.of("align", one, tokens_seen=5)
    second = StageRecord.of("distill", one, first, metrics={"kl": 0.5})
    second.save(tmp_path)
    assert StageRecord.load(tmp_path) == second
    assert second.parent["tokens_seen"] == 5
    assert StageRecord.load(tmp_path / "nowhere") is None
    assert check_previous(second, one, ("distill",), "extend") is second


@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_round_updates_away_are_warned_of(stage, ouro, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("loopergy.training.checks.logger.warning", told.append)
    for teacher in (ouro.float(), ouro.double()):
        make_trainer(stage, teacher, tmp_path, [])
    assert told == []
    for dtype in (torch.bfloat16, torch.float16):
        make_trainer(stage, ouro.to(dtype), tmp_path, [])
        assert len(told) == 1
        (text,) = told
        assert str(dtype).removeprefix("torch.") in text
        assert "`dtype: float32` in a recipe" in text
        assert "`bf16=True`" in text
        told.clear()


@pytest.mark.parametrize("stage", STAGES)
def test_a_float32_student_learns_from_a_bfloat16_teacher(stage, ouro, tmp_path, random_batch, monkeypatch):
    data = [{"input_ids": row} for row in random_batch(rows=4)["input_ids"]]
    trainer, config = STAGES[stage]
    values = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "length": 16, "bf16": True}
    values |= {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "require_previous": False}
    values |= {"kl_weight": 0.5} if stage == "extend" else {}
    student = convert(ouro.float(), keep_layers=[1]).model
    trained = trainer(student, ouro.bfloat16(), config(str(tmp_path), **values), data)
    before = {name: p.detach().clone() for name, p in trained.student.named_parameters() if p.requires_grad}
    trained.train()
    assert all(p.dtype == torch.float32 for p in trained.student.parameters())
    moved = [(p != before[name]).float().mean() for name, p in trained.student.named_parameters() if name in before]
    assert min(moved) > 0
    assert sum(moved) / len(moved) > 0.5


def test_what_diverged_is_logged_as_such_and_not_saved(ouro, tmp_path, random_batch):
    data = [{"input_ids": row} for row in random_batch(rows=4)["input_ids"]]
    trainer = make_trainer("distill", ouro.float(), tmp_path / "run", data, max_steps=3, learning_rate=1e30)
    trainer.train()
    assert any(math.isnan(loss) for loss in history(trainer))
    with pytest.raises(ValueError, match=r"not finite, first in 'model\..*Lower `learning_rate`.*remove .*run"):
        trainer.save_stage(tmp_path / "stage")
    assert [path.name for path in tmp_path.iterdir()] == ["run"] or not list(tmp_path.iterdir())


DRIVER = """
import sys
sys.path.insert(0, sys.argv[3])
from conftest import make_ouro
from test_stage import history, make_trainer
from loopergy.training.data import PackedDataset
from transformers import PreTrainedTokenizerFast
import json, torch
torch.set_num_threads(1)
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[2] + "/tokenizer")
texts = [f"document {i} " * (i % 5 + 1) for i in range(9)]
data = PackedDataset(texts, tokenizer, 16, split="all")
options = {"max_steps": 40, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
trainer = make_trainer("distill", make_ouro(torch.float32), sys.argv[1], data, **options)
trainer.train_or_resume()
json.dump(history(trainer), open(sys.argv[1] + "/losses.json", "w"))
"""


@pytest.mark.slow
def test_a_run_killed_at_any_moment_goes_on_to_the_same_losses(tmp_path, byte_tokenizer):
    """Guards I7."""
    byte_tokenizer.save_pretrained(tmp_path / "tokenizer")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(folder):
        command = [sys.executable, "-c", DRIVER, str(folder), str(tmp_path), str(Path(__file__).parent)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    whole = start(tmp_path / "whole")
    assert whole.wait(300) == 0, whole.stderr.read().decode()[-2000:]
    for step in (1, 9, 22):
        process = start(tmp_path / "cut")
        while not list((tmp_path / "cut").glob(f"checkpoint-{step}*")) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.07 * step % 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = start(tmp_path / "cut")
    assert last.wait(300) == 0, last.stderr.read().decode()[-2000:]
    losses = [json.loads((tmp_path / name / "losses.json").read_text()) for name in ("whole", "cut")]
    assert len(losses[0]) == 40
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


TWO_PROCESSES = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from conftest import make_ouro
from test_stage import STAGES, history, make_trainer
rows = [torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(n)) for n in (12, 3, 7, 5)]
result = {}
for stage in STAGES:
    options = {"per_device_train_batch_size": int(sys.argv[3]), "max_steps": 2, "max_grad_norm": 1e9}
    data = [{"input_ids": row} for row in rows]
    options |= {"train_sampling_strategy": "sequential", "ddp_backend": "gloo" if "RANK" in os.environ else None}
    options |= {"activation_checkpointing": stage == "extend"}
    trainer = make_trainer(stage, make_ouro(torch.float32), sys.argv[1], data, **options)
    trainer.train()
    total = sum(p.double().abs().sum() for p in trainer.student.parameters()).item()
    result[stage] = [history(trainer), history(trainer, "grad_norm"), total]
if os.environ.get("RANK", "0") == "0":
    json.dump(result, open(sys.argv[1] + "/result.json", "w"))
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path):
    """Guards H3 and I5: rows of unequal length, all stages, gloo."""
    script = tmp_path / "train.py"
    script.write_text(TWO_PROCESSES)
    here = str(Path(__file__).parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, launcher, rows in (
        ("one", [sys.executable], "4"),
        ("two", [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29517"], "2"),
    ):
        (tmp_path / name).mkdir()
        command = [*launcher, str(script), str(tmp_path / name), here, rows]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    for stage in STAGES:
        assert two[stage][0] == pytest.approx(one[stage][0], rel=1e-5), stage
        assert two[stage][1] == pytest.approx(one[stage][1], rel=1e-4), stage
        assert two[stage][2] == pytest.approx(one[stage][2], rel=1e-6), stage
