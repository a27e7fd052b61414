# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure a training step of alignment and distillation against the loop that one writes with two models and no more.

    python benchmarks/bench_distill.py --teacher runs/ouro-tiny/gate
    python benchmarks/bench_distill.py --teacher smollm2 --rows 1 --length 256 --repeats 3

The plain loops: for alignment, hooks collect the inputs and outputs of all mixers of the teacher, then each mixer of
the student answers them all, and one backward pass follows; for distillation, both models give all logits of all
loops, and `kl_div` compares them. Both losses are held against the stage's before anything is timed.

liger-kernel takes part where it is installed (`pip install --no-deps liger-kernel` on a CPU).

All on one thread in float32, a step with its optimizer (AdamW), candidates in turn; medians of process CPU time. Peak
memory is that of a process of its own with two steps, less what it held before the first.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timing import apart, peak_bytes
from torch.nn import functional as F
from transformers.utils import is_liger_kernel_available

from loopergy.conversion import convert
from loopergy.distill.align import AlignModule, aligned_layers
from loopergy.distill.distill import DistillConfig, DistillModule
from loopergy.distill.teacher import num_loops, resolve_teacher, resolve_tokenizer
from loopergy.distill.teacher_states import TeacherStates, write_teacher_states
from loopergy.training.data import PackedDataset

PLAIN = "two models"


class Work:
    """Teacher, student and rows that all candidates share."""

    def __init__(self, options: argparse.Namespace):
        self.teacher = resolve_teacher(options.teacher, dtype=torch.float32)
        self.student = convert(self.teacher, keep_layers=0.25).model.train()
        self.loops = num_loops(self.teacher)
        data = PackedDataset(
            options.data, resolve_tokenizer(options.teacher), options.length, documents="contiguous", repeat=True
        )
        self.args = DistillConfig(
            "unused",
            max_steps=options.repeats + 1,
            per_device_train_batch_size=options.rows,
            length=options.length,
            uniform_frac=1.0,
            anneal_frac=0.0,
            use_cpu=True,
            disable_tqdm=True,
        )
        self.data = data
        rows = iter(data)
        self.batches = [
            torch.stack([next(rows)["input_ids"] for _ in range(options.rows)]) for _ in range(options.repeats + 1)
        ]

    def align_plain(self, ids: torch.Tensor) -> torch.Tensor:
        """Collect what all mixers of the teacher saw and gave, then let the student answer."""
        seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        handles = []
        for index, layer in enumerate(self.teacher.base_model.layers):  # type: ignore[arg-type]

            def hook(module, args, kwargs, output, index=index):
                seen.append((index, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output[0]))

            handles.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
        with torch.no_grad():
            self.teacher(ids, use_cache=False)
        for handle in handles:
            handle.remove()
        layers, losses = aligned_layers(self.student), []
        positions = torch.arange(ids.shape[1])[None]
        for index, inputs, wanted in seen:
            if index in layers:
                mixer: Any = self.student.model.layers[index].self_attn
                given, _ = mixer(inputs, cache=None, attention_mask=None, position_ids=positions, cu_seqlens=None)
                norm = getattr(self.teacher.base_model.layers[index], "input_layernorm_2", torch.nn.Identity())  # type: ignore[index]
                # The last position has no target.
                losses.append(F.mse_loss(norm(given)[:, :-1], norm(wanted)[:, :-1]))
        return torch.stack(losses).mean()

    def distill_plain(self, ids: torch.Tensor) -> torch.Tensor:
        """Compare all logits of all loops."""
        with torch.no_grad():
            wanted = self.all_logits(self.teacher, ids)
        losses = []
        for given, target in zip(self.all_logits(self.student, ids), wanted, strict=True):
            student, teacher = (logits[:, :-1].flatten(0, 1).log_softmax(-1) for logits in (given, target))
            losses.append(F.kl_div(student, teacher, reduction="batchmean", log_target=True))
        return torch.stack(losses).mean()

    def all_logits(self, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the logits of each loop."""
        if hasattr(model.config, "num_loops"):
            return model(ids, use_cache=False, output_loop_logits=True).loop_logits
        return (model(ids, use_cache=False).logits,)

    def candidates(self, stage: str, states: Path) -> dict[str, Any]:
        """Return functions from rows to a loss, and freeze what the stage does not train."""
        if stage == "align":
            module = AlignModule(self.student, self.teacher)
            return {PLAIN: self.align_plain, "stage": lambda ids: module(ids)["loss"]}
        module = DistillModule(self.student, self.teacher, self.args).train()
        write_teacher_states(self.teacher, self.data, states, self.args)
        offline = DistillModule(self.student, None, self.args, TeacherStates(states)).train()
        found = {
            PLAIN: self.distill_plain,
            "stage": lambda ids: module(ids, progress=0.0)["loss"],
            "stage, teacher's states from disk": lambda ids: offline(ids, progress=0.0)["loss"],
        }
        if is_liger_kernel_available():
            settings = replace(self.args, kl_backend="liger")
            fused = DistillModule(self.student, self.teacher, settings).train()
            found["stage, liger-kernel"] = lambda ids: fused(ids, progress=0.0)["loss"]
        return found


def take_step(optimizer: torch.optim.Optimizer, loss_of: Any, ids: torch.Tensor) -> float:
    """Do a step; return its seconds of CPU time."""
    began = time.process_time()
    loss_of(ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - began


def make_optimizer(work: Work) -> torch.optim.Optimizer:
    """Make the optimizer of what trains, at a rate that leaves the student where it is."""
    return torch.optim.AdamW([p for p in work.student.parameters() if p.requires_grad], lr=1e-6)


def measure_peak(work: Work, stage: str, name: str) -> int:
    """Return what two steps of one candidate add to the memory of this process."""
    with tempfile.TemporaryDirectory() as folder:
        loss_of = work.candidates(stage, Path(folder) / "states")[name]
        optimizer = make_optimizer(work)
        before = peak_bytes()
        for ids in work.batches[:2]:
            take_step(optimizer, loss_of, ids)
    return peak_bytes() - before


def measure(work: Work, stage: str) -> dict[str, dict[str, float]]:
    """Time all candidates of a stage in turn."""
    tokens = work.batches[0].numel()
    with tempfile.TemporaryDirectory() as folder:
        candidates = work.candidates(stage, Path(folder) / "states")
        losses = {name: float(loss_of(work.batches[0])) for name, loss_of in candidates.items()}
        for name, loss in losses.items():
            if abs(loss - losses[PLAIN]) > 1e-4 * losses[PLAIN]:
                raise AssertionError(f"{stage}: the loss of {name!r} is {loss}, that of {PLAIN!r} {losses[PLAIN]}")
        optimizer = make_optimizer(work)
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for number, ids in enumerate(work.batches):
            for name, loss_of in candidates.items():
                spent = take_step(optimizer, loss_of, ids)
                if number:
                    seconds[name].append(spent)
        held = sum(file.stat().st_size for file in Path(folder).rglob("states-*"))
    figures = {}
    for name, times in seconds.items():
        figures[name] = {"tokens_per_second": tokens / statistics.median(times)}
    if stage == "distill":
        figures["stage, teacher's states from disk"]["bytes_per_token"] = held / tokens / len(work.batches)
    return figures


def main() -> None:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="folder, .gguf file or smollm2")
    parser.add_argument("--data", default="offline:prose")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--stages", nargs="+", default=["align", "distill"], choices=["align", "distill"])
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = Work(options)
    results: dict[str, Any] = {"teacher": options.teacher, "rows": options.rows, "length": options.length}
    print("| stage | candidate | tokens/s | against two models | peak above start, MiB | bytes a token on disk |")
    print("|---|---|---|---|---|---|")
    for stage in options.stages:
        results[stage] = apart(measure, work, stage)
        for name, figures in results[stage].items():
            figures["peak"] = apart(measure_peak, work, stage, name)
        plain = results[stage][PLAIN]["tokens_per_second"]
        for name, figures in results[stage].items():
            speed = figures["tokens_per_second"]
            disk = f"{figures['bytes_per_token']:.0f}" if "bytes_per_token" in figures else ""
            print(
                f"| {stage} | {name} | {speed:.1f} | {speed / plain:.2f} | {figures['peak'] / 2**20:.0f} | {disk} |",
                flush=True,
            )
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
