# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Compare Llama with CEM-Llama's variants: the same tokens in the same order, the same seeds, one small size.

    python benchmarks/study_cem_llama.py train -o runs/cem             # resumes; one folder a run
    python benchmarks/study_cem_llama.py speed -o runs/cem             # training tokens per second, interleaved
    python benchmarks/study_cem_llama.py table -o runs/cem --plot docs/images/cem_llama_study.svg

Text: the sources of Python's standard library by characters, the last tenth held out. Everything but the variant is
equal: width, depth, heads, MLP width, optimizer, schedule, batches. Parameters and arithmetic are not made equal, they
are columns of the table.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from loopergy.describe import model_cost
from loopergy.tasks.characters import Characters
from loopergy.tasks.new_model import new_model
from loopergy.tasks.training import HISTORY_FILE, History, TaskConfig, train_on_task

SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
LENGTH, BATCH = 128, 16
PLAIN = {"cem_diag": "none"}
TWO = {"cem_attn_steps": 2, "cem_mlp_steps": 2}
VARIANTS: dict[str, dict] = {
    "llama": {},
    "CEM attention": {**PLAIN, "cem_mlp": False},
    "CEM attention, T=2": {**PLAIN, "cem_mlp": False, "cem_attn_steps": 2},
    "CEM MLP": {"cem_attention": False},
    "CEM MLP, T=2": {"cem_attention": False, "cem_mlp_steps": 2},
    "both": PLAIN,
    "both, T=2": {**PLAIN, **TWO},
    "both, shared diagonal": {},
    "both, shared diagonal, T=2": TWO,
    "both, diagonal per head": {"cem_diag": "per_head"},
    "both, shared diagonal, T=2, P diag": {**TWO, "cem_precond": "diag"},
    "both, shared diagonal, T=2, P diag + low rank": {**TWO, "cem_precond": "dlr"},
}


def text() -> Characters:
    return Characters(source="offline:code", length=LENGTH, max_characters=4_000_000)


def build(name: str, task: Characters, seed: int = 0) -> torch.nn.Module:
    return new_model("llama" if name == "llama" else "cem_llama", task, seed=seed, **SIZES, **VARIANTS[name])


def run_folder(output: Path, name: str, seed: int) -> Path:
    kept = "".join(letter if letter.isalnum() or letter == "=" else "-" for letter in name)
    return output / f"{kept}-seed{seed}"


def train(output: Path, updates: int, seeds: int) -> None:
    """Train what is not trained yet; a seed fixes weights and batches, the same for all variants."""
    task = text()
    for seed in range(seeds):
        for name in VARIANTS:
            folder = run_folder(output, name, seed)
            if (folder / HISTORY_FILE).is_file():
                continue
            settings = TaskConfig(
                str(folder),
                max_steps=updates,
                per_device_train_batch_size=BATCH,
                learning_rate=2e-3,
                warmup_steps=updates // 20,
                decay="cosine",
                eval_strategy="no",
                test_rows=600,
                seed=seed,
            )
            history = train_on_task(build(name, task, seed), task, settings)
            print(
                f"{name}, seed {seed}: {history.test['loss']:.4f} nats/character in {history.seconds:.0f} s",
                flush=True,
            )


def speed(output: Path, rounds: int) -> None:
    """Time forward, backward and update, one step a variant in turn, as process time of one thread."""
    torch.set_num_threads(1)
    task = text()
    models = {name: build(name, task) for name in VARIANTS}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
    rows = task.rows("train", BATCH)
    ids = torch.stack([rows[row]["input_ids"] for row in range(BATCH)])
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds + 2):
        for name, model in models.items():
            began = time.process_time()
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            seconds[name].append(time.process_time() - began)
    result = {name: BATCH * LENGTH / statistics.median(values[2:]) for name, values in seconds.items()}
    (output / "speed.json").write_text(json.dumps(result, indent=1))
    for name, value in result.items():
        print(f"{name:<48}{value:10,.0f} tokens/s  {value / result['llama']:.2f} of llama's")


def forward_flops(config) -> float:
    """Count the matrix products of a forward over one row, per token."""
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, LENGTH, dtype=torch.long), use_cache=False)
    return counter.get_total_flops() / LENGTH


def collect(output: Path) -> list[dict]:
    """Gather one row a variant that has at least one run."""
    task = text()
    speeds = json.loads((output / "speed.json").read_text()) if (output / "speed.json").is_file() else {}
    rows = []
    for name in VARIANTS:
        folders = [folder for seed in range(99) if (folder := run_folder(output, name, seed)).is_dir()]
        losses = [History.load(folder).test["loss"] for folder in folders if (folder / HISTORY_FILE).is_file()]
        if not losses:
            continue
        config = build(name, task).config
        cost = model_cost(config, context=LENGTH, dtype=torch.float32)
        rows.append(
            {
                "variant": name,
                "parameters": cost.parameters - cost.embedding_parameters,
                "mflops_per_token": forward_flops(config) / 1e6,
                "losses": losses,
                "loss": statistics.mean(losses),
                "spread": max(losses) - min(losses),
                "perplexity": statistics.mean(torch.tensor(losses).exp().tolist()),
                "tokens_per_second": speeds.get(name),
                "cache_bytes_per_token": cost.cache_bytes / LENGTH,
            }
        )
    return rows


def table(rows: list[dict]) -> str:
    lines = [
        "| variant | parameters without embeddings | MFLOP / token | held-out loss, nats | spread | perplexity "
        "| training tokens / s | cache bytes / token |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        pace = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"
        lines.append(
            f"| {row['variant']} | {row['parameters']:,} | {row['mflops_per_token']:.2f} | {row['loss']:.4f} "
            f"| {row['spread']:.4f} | {row['perplexity']:.3f} | {pace} | {row['cache_bytes_per_token']:,.0f} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Draw held-out loss against parameters, every seed a dot."""
    from loopergy.distill.pictures import FULL_COLOUR, INK, new_figure, styled

    @styled
    def draw() -> None:
        figure, axis = new_figure(figsize=(8.5, 4.6))
        for number, row in enumerate(reversed(rows)):
            colour = INK if row["variant"] == "llama" else FULL_COLOUR
            axis.plot(row["losses"], [number] * len(row["losses"]), "o", color=colour, alpha=0.45, ms=5)
            axis.plot(row["loss"], number, "|", color=colour, ms=16, mew=2.5)
        names = [f"{row['variant']}  ({row['parameters'] / 1e3:,.0f}k)" for row in reversed(rows)]
        axis.set_yticks(range(len(rows)), names)
        axis.set_xlabel("held-out loss, nats per character (dots: seeds; bar: mean; parameters without embeddings)")
        axis.grid(True, axis="x")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight")

    draw()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("train", "speed", "table"))
    parser.add_argument("--output", "-o", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--plot", type=Path, help="write the picture here")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.what == "train":
        train(arguments.output, arguments.updates, arguments.seeds)
    elif arguments.what == "speed":
        speed(arguments.output, arguments.rounds)
    else:
        rows = collect(arguments.output)
        print(table(rows))
        (arguments.output / "table.json").write_text(json.dumps(rows, indent=1))
        if arguments.plot:
            plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
