# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Train small LT2 models with 1, 2 and 4 loops on recall and on state tracking, and compare what they learn.

    python benchmarks/study_loops.py train -o runs/loops             # resumes; one folder a run
    python benchmarks/study_loops.py table -o runs/loops --plot docs/images/loops_study.svg

Two layers of width 64 for all; looping adds no weights. Recall: 4 pairs in 32 tokens. Windows see 8 tokens: two layers
reach 15 tokens in one pass, 29 in two and all in four. State tracking: 12 moves of S3, the arrangement asked
after each; the delta rules may have negative eigenvalues.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from loopergy.tasks.catalog import make_task
from loopergy.tasks.new_model import new_model
from loopergy.tasks.training import TaskConfig, train_on_task

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"gdn_num_heads": 2, "gdn_head_dim": 32, "gdn_expand_v": 1, "kda_num_heads": 2, "kda_head_dim": 32}
SIZES |= {"gdn_allow_neg_eigval": True, "kda_allow_neg_eigval": True, "sliding_window": 8}
MIXERS = ("full", "window", "gdn", "kda", "gdn,full", "gdn,window")
LOOPS = (1, 2, 4)
ACCURACY_FILE = "accuracy.json"
TASKS: dict[str, dict[str, Any]] = {
    "recall": {"num_pairs": 4, "length": 32, "num_keys": 16, "num_values": 16},
    "permutations": {"group": "S3", "length": 12},
}


def run_folder(output: Path, task: str, mixers: str, loops: int, seed: int) -> Path:
    return output / f"{task}-{mixers.replace(',', '+')}-T{loops}-seed{seed}"


def train(output: Path, tasks: list[str], updates: int, seeds: int) -> None:
    """Train what is not trained yet; a seed fixes weights and batches."""
    for seed in range(seeds):
        for name in tasks:
            task = make_task(name, **TASKS[name])
            for loops in LOOPS:
                for mixers in MIXERS:
                    folder = run_folder(output, name, mixers, loops, seed)
                    if (folder / ACCURACY_FILE).is_file():
                        continue
                    model = new_model("lt2", task, seed=seed, layer_mixers=mixers, num_loops=loops, **SIZES)
                    settings = TaskConfig(
                        str(folder),
                        max_steps=updates,
                        per_device_train_batch_size=64,
                        learning_rate=3e-3,
                        warmup_steps=updates // 20,
                        decay="cosine",
                        final_learning_rate_share=0.05,
                        eval_strategy="no",
                        test_rows=1000,
                        seed=seed,
                    )
                    history = train_on_task(model, task, settings)
                    accuracy = task.evaluate(model.eval(), count=1000)
                    groups = {group: right / of for group, (right, of) in accuracy.groups.items()}
                    found = {"accuracy": accuracy.accuracy, "groups": groups}
                    (folder / ACCURACY_FILE).write_text(json.dumps(found, indent=1))
                    print(
                        f"{name}, {mixers}, T={loops}: {accuracy.accuracy:.3f} in {history.seconds:.0f} s", flush=True
                    )


def collect(output: Path) -> dict[str, dict[str, dict[int, dict]]]:
    """Gather task, mixers, loops: the accuracies of the seeds that are done, and their means by group."""
    found: dict = {}
    for name in TASKS:
        for mixers in MIXERS:
            for loops in LOOPS:
                files = [run_folder(output, name, mixers, loops, seed) / ACCURACY_FILE for seed in range(99)]
                runs = [json.loads(file.read_text()) for file in files if file.is_file()]
                if not runs:
                    continue
                groups = {group: sum(run["groups"][group] for run in runs) / len(runs) for group in runs[0]["groups"]}
                row = {"accuracies": [run["accuracy"] for run in runs], "groups": groups}
                found.setdefault(name, {}).setdefault(mixers, {})[loops] = row
    return found


def spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.2f} to {max(values):.2f})"


def cells(row: dict[int, dict], group: str | None = None) -> str:
    found = [row[loops] for loops in LOOPS if loops in row]
    return " | ".join(f"{one['groups'][group]:.2f}" if group else spread(one["accuracies"]) for one in found)


def print_tables(found: dict) -> None:
    """Print mean, lowest and highest accuracy by T, and the means by how many tokens or moves ago."""
    head = " | ".join(f"T={loops}" for loops in LOOPS)
    for name, rows in found.items():
        print(f"\n| {name} | {head} |\n|---|{'---|' * len(LOOPS)}")
        for mixers, row in rows.items():
            print(f"| {mixers} | {cells(row)} |")
    for name, rows in found.items():
        mixers = "window" if name == "recall" else "gdn"
        if mixers not in rows:
            continue
        print(f"\n| {name}, {mixers} | {head} |\n|---|{'---|' * len(LOOPS)}")
        groups = next(iter(rows[mixers].values()))["groups"]
        for group in sorted(groups, key=lambda name: int(name.split()[2])):  # "up to 8 moves"
            print(f"| {group.strip()} | {cells(rows[mixers], group)} |")


def plot(found: dict, path: Path) -> None:
    """Draw mean accuracy over T, one panel a task."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(4.6 * len(found), 3.4), layout="constrained", sharey=True)
    for axis, (name, rows) in zip(axes, found.items(), strict=True):
        for mixers, row in rows.items():
            style = "--" if "," in mixers else "-"
            means = [statistics.mean(value["accuracies"]) for value in row.values()]
            axis.plot(list(row), means, style, marker="o", label=mixers)
        axis.set_xscale("log", base=2)
        axis.set_xticks(LOOPS, [str(loops) for loops in LOOPS])
        axis.set(title=name, xlabel="loops T", ylim=(0, 1.03))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy on unseen sequences")
    axes[-1].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["train", "table"])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="what to train on")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="picture to write with the table")
    options = parser.parse_args()
    if options.verb == "train":
        train(options.output, options.tasks, options.updates, options.seeds)
        return
    found = collect(options.output)
    print_tables(found)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
