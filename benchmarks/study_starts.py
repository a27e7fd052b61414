# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What a start without training is worth: copied weights against each part of calibration, before and after alignment.

    python benchmarks/study_starts.py --teacher smollm2
    python benchmarks/study_starts.py --teacher runs/ouro-tiny/gate --align-tokens 16384

All layers are replaced. A row is printed as soon as it is measured: held-out KL and perplexity right after the start,
the start's own CPU seconds and the share of the attention's square that its mixers miss on the tokens fitted on. With
`--align-tokens`, the first and the last start are then aligned on that many tokens and measured again.
"""

import argparse
import copy
import json
import tempfile
import time

import torch

import loopergy
from loopergy.distill.report import HeldOut, evaluate_heldout
from loopergy.distill.teacher import resolve_teacher, resolve_tokenizer
from loopergy.training.data import PackedDataset, held_out_batches

STARTS = ("copy", "output", "memory,output")


def row(name: str, student, teacher, held_out: HeldOut, cost: float, **more) -> None:
    """Measure a student and print the row."""
    result = evaluate_heldout(student, teacher, held_out)
    numbers = {"kl": round(result["kl"], 3), "perplexity": round(result["perplexity"], 1)}
    print(json.dumps({"start": name, **numbers, "cpu_seconds": round(cost, 1), **more}), flush=True)


def align(student, teacher, tokenizer, options) -> float:
    """Align on the budget; return the CPU seconds."""
    text = PackedDataset(options.data, tokenizer, length=options.length, seed=1)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        args = loopergy.AlignConfig(
            folder,
            target_tokens=options.align_tokens,
            length=options.length,
            per_device_train_batch_size=options.align_batch,
            warmup_steps=0.1,
            bf16=options.bf16,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        loopergy.AlignTrainer(student, teacher, args, text).train()
    return time.process_time() - began


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="smollm2")
    parser.add_argument("--mixer", default="gdn")
    parser.add_argument("--data", default="offline")
    parser.add_argument("--starts", nargs="+", default=STARTS, metavar="PARTS")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="to fit on")
    parser.add_argument("--held-out", type=int, default=2048, help="tokens to measure on")
    parser.add_argument("--align-tokens", type=int, default=0)
    parser.add_argument("--align-batch", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    teacher = resolve_teacher(options.teacher, dtype=torch.float32)
    tokenizer = resolve_tokenizer(options.teacher)
    sizes = {"length": options.length}
    batches = held_out_batches(options.data, tokenizer, num_tokens=options.tokens, split="train", **sizes)
    held_out = HeldOut.of(teacher, held_out_batches(options.data, tokenizer, num_tokens=options.held_out, **sizes))
    print(json.dumps({"teacher": options.teacher, "perplexity": round(held_out.teacher_perplexity, 2)}), flush=True)
    converted = loopergy.convert(teacher, keep_layers=[], mixer=options.mixer).model
    kept = {}
    for start in options.starts:
        student, began, more = copy.deepcopy(converted), time.process_time(), {}
        if start != "copy":
            found = loopergy.calibrate(student, teacher, batches, parts=start.split(","))
            more = {
                "missed": [round(sum(pair) / len(found.error), 3) for pair in zip(*found.error.values(), strict=True)]
            }
        row(start, student, teacher, held_out, time.process_time() - began, **more)
        if start in (options.starts[0], options.starts[-1]):
            kept[start] = student
    if options.align_tokens:
        for start, student in kept.items():
            cost = align(student, teacher, tokenizer, options)
            row(f"{start}, then aligned", student, teacher, held_out, cost, tokens=options.align_tokens)


if __name__ == "__main__":
    main()
