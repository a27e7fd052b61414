# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Compare what can be chosen in a distillation, at equal budgets: the layers to keep, and the losses.

    python benchmarks/study_distillation.py selection -o runs/study --teacher runs/ouro-10m/gate  # resumes
    python benchmarks/study_distillation.py losses -o runs/study --teacher runs/ouro-10m/gate
    python benchmarks/study_distillation.py table -o runs/study

All students of one seed and one alignment start from the same aligned weights. Every arm distils on the same rows.
Held out are documents that no stage is trained on; KL and perplexity are those of the last loop. With `--tasks` the
accuracy on recall and needle tasks is measured too, for teachers that were trained on them.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from loopergy.conversion import convert
from loopergy.distill.align import AlignConfig, AlignTrainer
from loopergy.distill.distill import DistillConfig, DistillTrainer, prepare_student
from loopergy.distill.report import HeldOut, evaluate_heldout
from loopergy.distill.select import select_layers
from loopergy.distill.stage import STAGE_FILE
from loopergy.distill.teacher import resolve_teacher, resolve_tokenizer
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.tasks.catalog import make_task
from loopergy.training.data import PackedDataset, held_out_batches

TASKS: dict[str, dict[str, Any]] = {"recall": {"length": 64, "num_pairs": 8}, "needle": {"length": 256}}
SHARES = (0.125, 0.25, 0.5)
# Strategy, and the share of the distillation's budget that each candidate is trained on.
STRATEGIES = {
    "one-shot": ("oneshot", 0.0),
    "one-shot, trained": ("oneshot", 0.05),
    "greedy": ("greedy_add", 0.0),
    "leave one out": ("leave_one_out", 0.0),
    "mse": ("mse", 0.0),
    "uniform": ("uniform", 0.0),
}
# What differs from the defaults in stage 1 and in stage 2.
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "last loop only": ({}, {"uniform_frac": 0.0, "anneal_frac": 0.0}),
    "all loops to the end": ({}, {"uniform_frac": 1.0, "anneal_frac": 0.0}),
    "top 64 with tail": ({}, {"top_k": 64}),
    "top 64 alone": ({}, {"top_k": 64, "tail_bucket": False}),
    "reverse KL": ({}, {"direction": "reverse"}),
    "Jensen-Shannon": ({}, {"direction": "js"}),
    "align mixer": ({"target": "mixer"}, {}),
    "align block": ({"target": "block"}, {}),
    "align, not squared": ({"form": "l2norm"}, {}),
    "one learning rate": ({}, {"body_learning_rate": None}),
    "body at rest": ({}, {"body_learning_rate": 0.0}),
}
ARMS: dict[str, Any] = {"selection": STRATEGIES, "losses": LOSSES}


class Study:
    """Everything that the arms share: teacher, text, held-out batches, budgets."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.folder = options, options.output
        self.teacher: PreTrainedModel = resolve_teacher(options.teacher)
        self.tokenizer = resolve_tokenizer(options.teacher)
        self.rows = {"length": options.length, "batch_size": 4}
        batches = held_out_batches(options.data, self.tokenizer, num_tokens=options.held_out, **self.rows)
        self.held_out = HeldOut.of(self.teacher, batches)

    def settings(self, name: str, tokens: int, seed: int, **changes: Any) -> dict[str, Any]:
        """Return the settings of a stage."""
        values = {
            "output_dir": str(self.folder / "checkpoints" / name),
            "length": self.options.length,
            "per_device_train_batch_size": self.options.batch_size,
            "target_tokens": tokens,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "bf16": self.options.bf16,
            "seed": seed,
        }
        return {**values, **changes}

    def text(self, seed: int) -> PackedDataset:
        """Return the rows to train on."""
        return PackedDataset(self.options.data, self.tokenizer, self.options.length, seed=seed)

    def aligned(self, seed: int, changes: dict[str, Any]) -> Path:
        """Return the folder of the aligned student, made if it is not there."""
        name = "-".join(["aligned", f"seed{seed}", *(f"{value}" for value in changes.values())])
        folder = self.folder / name
        if not (folder / STAGE_FILE).is_file():
            student = convert(self.teacher, keep_layers=[], seed=seed).model
            args = AlignConfig(**self.settings(name, self.options.align, seed, **changes))
            trainer = AlignTrainer(student, self.teacher, args, self.text(seed))
            trainer.train()
            trainer.save_stage(folder)
        return folder

    def run(self, kind: str, name: str, seed: int, keep: float, arm: tuple[str, float], changes: Any) -> None:
        """Select, distil and measure one arm, if that is not done yet."""
        file = self.folder / kind / f"{name.replace(', ', '-').replace(' ', '-')}-{keep}-seed{seed}.json"
        if file.is_file():
            return
        align_changes, distill_changes = changes
        folder = self.aligned(seed, align_changes)
        student = LT2ForCausalLM.from_pretrained(folder, dtype=self.teacher.dtype)
        batches = held_out_batches(
            self.options.data,
            self.tokenizer,
            num_tokens=self.options.select,
            split="train",
            seed=seed + 1,
            **self.rows,
        )
        strategy, budget = arm
        began = time.perf_counter()
        selection = select_layers(
            student, self.teacher, batches, keep, strategy=strategy, budget_tokens=round(budget * self.options.distill)
        )
        cost = time.perf_counter() - began
        found: dict[str, Any] = {"kept": selection.kept_layers, "selection_seconds": cost}
        found |= self.twin(file.parent, seed, selection.kept_layers) if kind == "selection" else {}
        if "after" not in found:
            found |= self.distilled(folder, file.stem, seed, selection.kept_layers, distill_changes)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".unfinished").write_text(json.dumps({"name": name, "keep": keep, "seed": seed, **found}))
        file.with_suffix(".unfinished").rename(file)
        kl = f"KL {found['before']['kl']:.3f} -> {found['after']['kl']:.3f}"
        print(f"{kind}: {name}, {keep}, seed {seed}: {kl}", flush=True)

    def twin(self, folder: Path, seed: int, kept: list[int]) -> dict[str, Any]:
        """Return what an arm measured that kept the same layers: the same training would give the same numbers."""
        for file in folder.glob("*.json"):
            arm = json.loads(file.read_text())
            if (arm["seed"], arm["kept"]) == (seed, kept):
                return {name: arm[name] for name in ("before", "after", "tasks") if name in arm}
        return {}

    def distilled(self, aligned: Path, name: str, seed: int, kept: list[int], changes: Any) -> dict[str, Any]:
        """Distil the aligned student with these layers kept, and return what is measured before and after."""
        student, record = prepare_student(aligned, self.teacher, kept)
        student.to(self.teacher.dtype)
        before = evaluate_heldout(student, self.teacher, self.held_out)
        rate = self.options.learning_rate
        options = {"learning_rate": rate, "body_learning_rate": rate / 10, **changes}
        args = DistillConfig(**self.settings(name, self.options.distill, seed, **options))
        trainer = DistillTrainer(student, self.teacher, args, self.text(seed + 2), previous=record)
        trainer.train()
        found: dict[str, Any] = {"before": before, "after": evaluate_heldout(student, self.teacher, self.held_out)}
        if self.options.tasks:
            found["tasks"] = self.accuracies(student)
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        return found

    def accuracies(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the accuracy on each task."""
        tasks = (make_task(name, vocabulary=self.tokenizer, **options) for name, options in TASKS.items())
        return {task.name: task.evaluate(model, "test", 200, 16).accuracy for task in tasks}  # type: ignore[union-attr]


def run(options: argparse.Namespace) -> None:
    """Run all arms of a study that are not done, one seed after the other."""
    study = Study(options)
    if options.tasks:
        print("teacher:", study.accuracies(study.teacher))
    arms = options.arms or list(ARMS[options.verb])
    for seed in range(options.seeds):
        if options.verb == "selection":
            for keep in options.keep:
                for name in arms:
                    study.run("selection", name, seed, keep, STRATEGIES[name], ({}, {}))
        else:
            for name in arms:
                study.run("losses", name, seed, 0.25, ("oneshot", 0.0), LOSSES[name])


def collect(folder: Path) -> Iterator[tuple[str, float, list[dict[str, Any]]]]:
    """Yield name, share of kept layers and the runs of all seeds, in the order of the tables."""
    runs = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    order = {name: index for index, name in enumerate([*STRATEGIES, *LOSSES])}
    keys = sorted({(run["keep"], order[run["name"]], run["name"]) for run in runs})
    for keep, _, name in keys:
        yield name, keep, [run for run in runs if (run["keep"], run["name"]) == (keep, name)]


def spread(values: list[float], digits: int = 3) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def print_tables(output: Path) -> None:
    """Print mean and standard deviation over the seeds that are done."""
    for kind in ("selection", "losses"):
        rows = list(collect(output / kind))
        if not rows:
            continue
        tasks = list(rows[0][2][0].get("tasks", {}))
        head = [
            "kept",
            kind,
            "layers (seed 0)",
            "selection, s",
            "KL before",
            "KL after",
            "perplexity",
            *tasks,
            "seeds",
        ]
        print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        for name, keep, runs in rows:
            cells = [
                f"{keep:.1%}",
                name,
                ", ".join(map(str, runs[0]["kept"])),
                spread([run["selection_seconds"] for run in runs], 0),
                spread([run["before"]["kl"] for run in runs]),
                spread([run["after"]["kl"] for run in runs]),
                spread([run["after"]["perplexity"] for run in runs], 2),
                *(spread([run["tasks"][task] for run in runs], 2) for task in tasks),
                str(len(runs)),
            ]
            print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["selection", "losses", "table"])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--teacher", help="what `loopergy run` takes as teacher")
    parser.add_argument("--data", default="offline")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--batch-size", type=int, default=4, help="rows a step")
    parser.add_argument("--align", type=int, default=65_536, help="tokens of alignment, once a seed")
    parser.add_argument("--select", type=int, default=8192, help="tokens candidates are scored on")
    parser.add_argument("--distill", type=int, default=65_536, help="tokens of distillation, each arm")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the mixers; a tenth for all else")
    parser.add_argument("--held-out", type=int, default=32_768, help="tokens measured on")
    parser.add_argument("--keep", type=float, nargs="+", default=SHARES, help="shares of the layers to keep")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", help="names of the rows to run; all by default")
    parser.add_argument("--tasks", action="store_true", help="measure recall and needle too")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 where the processor has it")
    options = parser.parse_args()
    if options.verb == "table":
        print_tables(options.output)
    elif not options.teacher:
        parser.error("--teacher is needed to train")
    elif unknown := set(options.arms or ()) - set(ARMS[options.verb]):
        parser.error(f"--arms: {', '.join(sorted(unknown))}: none of {', '.join(ARMS[options.verb])}")
    else:
        run(options)


if __name__ == "__main__":
    main()
