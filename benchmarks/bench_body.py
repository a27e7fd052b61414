# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure stage 2 with the whole student training, with adapters on what is not new, and with that part frozen.

    python benchmarks/bench_body.py --teacher runs/ouro-tiny/gate --align-steps 24 --steps 24
    python benchmarks/bench_body.py --teacher smollm2 --rows 1 --length 256 --steps 2

A quarter of the layers keeps attention. All candidates start from one student (converted, and aligned if asked for),
see the same rows, and run in a process of their own, on one thread in float32. Tokens a second of CPU time; the most
memory that the process ever held; bytes of the optimizer's moments; KL on held-out text.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from timing import apart, peak_bytes

from loopergy.conversion import convert
from loopergy.distill.align import AlignConfig, AlignTrainer
from loopergy.distill.distill import DistillConfig, DistillTrainer
from loopergy.distill.report import evaluate_heldout
from loopergy.distill.teacher import resolve_teacher, resolve_tokenizer
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.training.data import PackedDataset, held_out_batches

# Body, and what the body's rate is multiplied by.
CANDIDATES = (("full", 1.0), ("lora", 1.0), ("lora", 10.0), ("frozen", 1.0))


def settings(options: argparse.Namespace, **others: Any) -> dict[str, Any]:
    """Return what both stages have in common."""
    values = {"per_device_train_batch_size": options.rows, "length": options.length, "save_strategy": "no"}
    return {**values, "use_cpu": True, "disable_tqdm": True, "logging_steps": 1000, "warmup_steps": 0.1, **others}


def make_student(options: argparse.Namespace, folder: Path, teacher: Any, tokenizer: Any) -> None:
    """Convert, align, and leave the student that all candidates start from."""
    student = convert(teacher, keep_layers=0.25).model
    if options.align_steps:
        args = AlignConfig(str(folder / "run"), **settings(options, max_steps=options.align_steps))
        AlignTrainer(student, teacher, args, PackedDataset(options.data, tokenizer, options.length)).train()
    student.save_pretrained(folder / "student")


def measure(
    options: argparse.Namespace, folder: Path, teacher: Any, tokenizer: Any, body: str, factor: float
) -> dict[str, float]:
    """Train one candidate; return its figures."""
    student = LT2ForCausalLM.from_pretrained(folder / "student")
    rates = {"learning_rate": options.rate, "body_learning_rate": options.body_rate * factor, "body": body}
    args = DistillConfig(
        str(folder / "run"), require_previous=False, **settings(options, max_steps=options.steps, **rates)
    )
    data = PackedDataset(options.data, tokenizer, options.length, seed=1)
    trainer = DistillTrainer(student, teacher, args, data)
    began = time.process_time()
    trainer.train()
    seconds = time.process_time() - began
    peak = peak_bytes()
    optimizer: Any = trainer.optimizer
    moments = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim > 0)
    figures = {
        "trained": sum(p.numel() for p in student.parameters() if p.requires_grad),
        "moments": moments,
        "peak": peak,
        "tokens_per_second": args.max_steps * args.rows_per_step * args.length / seconds,
    }
    if options.held_out:
        batches = held_out_batches(
            options.data, tokenizer, length=options.length, num_tokens=options.held_out, batch_size=options.rows
        )
        figures["kl"] = evaluate_heldout(student, teacher, batches)["kl"]
    return figures


def main() -> None:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder, .gguf file or smollm2")
    parser.add_argument("--data", default="offline:prose")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--align-steps", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rate", type=float, default=1e-3, help="of the mixers")
    parser.add_argument("--body-rate", type=float, default=1e-4, help="of everything else")
    parser.add_argument("--held-out", type=int, default=0, help="held-out tokens")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    teacher, tokenizer = resolve_teacher(options.teacher, dtype=torch.float32), resolve_tokenizer(options.teacher)
    results = {}
    print("| body | body rate | trained | optimizer, MiB | peak, MiB | tokens/s | held-out KL |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        apart(make_student, options, Path(folder), teacher, tokenizer)
        for body, factor in CANDIDATES:
            figures = results[f"{body} x{factor:g}"] = apart(
                measure, options, Path(folder), teacher, tokenizer, body, factor
            )
            kl = f"{figures['kl']:.3f}" if "kl" in figures else ""
            rate = "" if body == "frozen" else f"{options.body_rate * factor:g}"
            sizes = (
                f"{figures['trained'] / 1e6:.2f}M | {figures['moments'] / 2**20:.1f} | {figures['peak'] / 2**20:.0f}"
            )
            print(f"| {body} | {rate} | {sizes} | {figures['tokens_per_second']:.1f} | {kl} |", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
