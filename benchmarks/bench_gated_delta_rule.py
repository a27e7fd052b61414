# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure the torch kernels of the gated delta rule beside the functions they replace, transformers' own.

Both run in one process, turn by turn; a figure is the median over the turns, a ratio is theirs over ours. With one
thread the process's CPU time is taken, which other programs disturb least, with more threads the time on the wall.
Peak memory is read in a process of its own per function. Correctness is measured against the recurrence in float64,
token by token. Nothing is asserted about time.

    python benchmarks/bench_gated_delta_rule.py --output gated_delta_rule.json
    python benchmarks/bench_gated_delta_rule.py --quick

Last come whole layers: one token through Gated DeltaNet here and through transformers' Qwen3-Next layer of that shape.
"""

import argparse
import json
import logging
import math
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from timing import in_turn, medians
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from loopergy import LT2Config
from loopergy.modeling.kernels import chunk_gated_delta_rule, recurrent_gated_delta_rule
from loopergy.modeling.kernels.gated_delta_rule_step import gated_delta_rule_step
from loopergy.modeling.looped_cache import make_cache
from loopergy.modeling.mixers.gated_deltanet import GatedDeltaNet

# Batch, length, heads, key and value width, lowest log decay.
GRID = [
    (1, 1, 8, 64, -0.1),
    (1, 16, 8, 64, -0.1),
    (1, 64, 8, 64, -0.1),
    (1, 512, 8, 64, -0.1),
    (1, 2048, 8, 64, -0.1),
    (1, 2048, 8, 64, -20.0),
    (1, 2048, 8, 128, -0.1),
    (1, 2048, 16, 128, -0.1),
    (4, 2048, 16, 64, -0.1),
    (4, 2048, 8, 128, -0.1),
    (1, 8192, 8, 64, -0.1),
    (4, 8192, 8, 64, -0.1),
]
QUICK = [(1, 16, 8, 64, -0.1), (1, 512, 8, 64, -0.1), (1, 2048, 8, 64, -0.1)]
# Rows, heads, key width, value width.
STEPS = [(1, 8, 64, 64), (1, 8, 128, 256), (1, 16, 128, 128), (8, 8, 64, 64), (8, 16, 128, 128)]
# Rows, hidden size, heads, key width, value width.
LAYERS = [
    (1, 512, 8, 64, 64),
    (1, 576, 9, 64, 64),
    (1, 1024, 8, 96, 192),
    (8, 1024, 8, 128, 128),
    (1, 2048, 16, 128, 128),
]
TOKENS = 40
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
RULES: dict[str, Rule] = {"peer": torch_chunk_gated_delta_rule, "ours": chunk_gated_delta_rule}


def draw(batch: int, length: int, heads: int, width: int, values: int, lowest: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, length, heads, width, generator=generator) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": torch.randn(batch, length, heads, values, generator=generator),
        "g": lowest * torch.rand(batch, length, heads, generator=generator),
        "beta": torch.rand(batch, length, heads, generator=generator),
    }


def run(rule: Rule, inputs: dict[str, torch.Tensor], backward: bool) -> None:
    q, k, v, g, beta = (x.detach().requires_grad_(backward) for x in inputs.values())
    with torch.set_grad_enabled(backward):
        output, _ = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        if backward:
            output.backward(torch.ones_like(output))


def repeat(times: int, rule: Rule, inputs: dict[str, torch.Tensor], backward: bool) -> None:
    for _ in range(times):
        run(rule, inputs, backward)


def timed(calls: dict[str, Callable[[], None]], turns: int) -> dict[str, float]:
    """Return the median seconds of every call; of one turn alone, the first, unmeasured one counts too."""
    return medians(in_turn(calls, 2, unmeasured=0) if turns == 1 else in_turn(calls, turns))


def peak_memory(name: str, shape: tuple[int, int, int, int, float], backward: bool) -> float:
    """Return by how many MB a call raises the peak memory of a fresh process."""
    command = [sys.executable, __file__, "--peak-of", name, json.dumps(shape), str(int(backward))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(name: str, shape: tuple[int, int, int, int, float], backward: bool) -> None:
    batch, length, heads, width, lowest = shape
    # A small call first: what torch loads on first use is not what a call needs.
    run(RULES[name], draw(1, 64, 1, width, width, lowest), backward)
    inputs = draw(batch, length, heads, width, width, lowest)
    before = highest_memory()
    run(RULES[name], inputs, backward)
    print(highest_memory() - before)


def highest_memory() -> float:
    """Return the process's highest memory so far in MB."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike ru_maxrss, this is not inherited from the process that started this one.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (20 if platform.system() == "Darwin" else 10)


def bench_sequences(grid: list[tuple[int, int, int, int, float]], turns: int, memory: bool) -> list[dict]:
    rows = []
    for shape in grid:
        batch, length, heads, width, lowest = shape
        inputs, row = draw(batch, length, heads, width, width, lowest), {"shape": shape}
        for kind, backward in (("forward", False), ("forward_backward", True)):
            # Short calls are repeated within a turn, long ones get fewer turns.
            repeats = max(1, 512 // length)
            count = max(1, min(turns, 2**17 // (batch * length * (4 if backward else 1))))

            calls = {name: partial(repeat, repeats, rule, inputs, backward) for name, rule in RULES.items()}
            seconds = timed(calls, count)
            row[kind] = {name: 1000 * value / repeats for name, value in seconds.items()}
            row[kind]["ratio"] = seconds["peer"] / seconds["ours"]
            if memory and length >= 512:
                peaks = {f"{name}_mb": peak_memory(name, shape, backward) for name in RULES}
                row[kind] |= {**peaks, "memory_ratio": peaks["peer_mb"] / max(peaks["ours_mb"], 0.1)}
        rows.append(row)
        print(sequence_line(row), flush=True)
    return rows


def sequence_line(row: dict) -> str:
    batch, length, heads, width, lowest = row["shape"]
    cells = [f"B{batch} T{length} H{heads} D{width} g>={lowest:g}".ljust(30)]
    for kind in ("forward", "forward_backward"):
        r = row[kind]
        cells.append(f"{r['peer']:9.2f} {r['ours']:8.2f} {r['ratio']:6.2f}x")
        if "memory_ratio" in r:
            cells.append(f"{r['peer_mb']:6.0f} {r['ours_mb']:5.0f} {r['memory_ratio']:5.1f}x")
        else:
            cells.append(" " * 19)
    return " | ".join(cells)


def take_steps(rule: Rule, inputs: dict[str, torch.Tensor], state: torch.Tensor) -> None:
    q, k, v, g, beta = inputs.values()
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with torch.no_grad():
        for _ in range(20):
            rule(q, k, v, g=g, beta=beta, **options)


def take_steps_in_place(inputs: dict[str, torch.Tensor], state: torch.Tensor) -> None:
    q, k, v, g, beta = (x[:, 0] for x in inputs.values())
    qk = torch.stack((q, k), dim=1)
    with torch.no_grad():
        for _ in range(20):
            gated_delta_rule_step(qk, v, g, beta, state)


def bench_steps(turns: int) -> list[dict]:
    rows = []
    for rows_, heads, width, values in STEPS:
        inputs = draw(rows_, 1, heads, width, values, -1e-4)
        states = [torch.randn(rows_, heads, width, values) for _ in range(3)]
        calls = {
            "peer": partial(take_steps, torch_recurrent_gated_delta_rule, inputs, states[0]),
            "ours": partial(take_steps, recurrent_gated_delta_rule, inputs, states[1]),
            "in_place": partial(take_steps_in_place, inputs, states[2]),
        }
        seconds = timed(calls, 4 * turns)
        row = {name: 1e6 * value / 20 for name, value in seconds.items()}
        row |= {
            "shape": (rows_, heads, width, values),
            "ratio": row["peer"] / row["ours"],
            "ratio_in_place": row["peer"] / row["in_place"],
        }
        rows.append(row)
        print(
            f"B{rows_} H{heads} K{width} V{values}".ljust(30),
            f"{row['peer']:8.0f} {row['ours']:7.0f} {row['ratio']:6.2f}x",
            f"{row['in_place']:7.0f} {row['ratio_in_place']:6.2f}x",
            sep=" | ",
        )
    return rows


def bench_layers(turns: int) -> list[dict]:
    """Time one token through a whole layer, projections, convolution and cache included."""
    rows = []
    for batch, hidden, heads, width, values in LAYERS:
        config = LT2Config(
            vocab_size=8,
            hidden_size=hidden,
            num_hidden_layers=1,
            num_loops=1,
            num_attention_heads=heads,
            layer_mixers="gdn",
            gdn_num_heads=heads,
            gdn_head_dim=width,
            gdn_expand_v=values / width,
        )
        theirs = Qwen3NextConfig(
            hidden_size=hidden,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            linear_key_head_dim=width,
            linear_value_head_dim=values,
        )
        layer, peer = GatedDeltaNet(config).eval(), Qwen3NextGatedDeltaNet(theirs, 0).eval()
        cache, peer_cache = make_cache(config), DynamicCache(config=theirs)
        prompt, token = torch.randn(batch, 8, hidden), torch.randn(batch, 1, hidden)

        def ours(x: torch.Tensor, layer: GatedDeltaNet = layer, cache: DynamicCache = cache) -> None:
            layer(x, cache=cache, slot=0)

        with torch.no_grad():
            ours(prompt)
            peer(prompt, cache=peer_cache)
            calls = {
                "ours": partial(take_tokens, ours, token),
                "peer": partial(take_tokens, partial(peer, cache=peer_cache), token),
            }
            times = timed(calls, turns)
        row = {"shape": [batch, hidden, heads, width, values]}
        row |= {name: 1e6 * seconds / TOKENS for name, seconds in times.items()}
        row["ratio"] = row["peer"] / row["ours"]
        rows.append(row)
        line = f"B{batch} d{hidden} H{heads} K{width} V{values}".ljust(30)
        print(line, f"{row['peer']:8.0f} {row['ours']:8.0f} {row['ratio']:6.2f}x", sep=" | ", flush=True)
    return rows


def take_tokens(layer: Callable[[torch.Tensor], object], token: torch.Tensor) -> None:
    for _ in range(TOKENS):
        layer(token)


def errors() -> list[dict]:
    """Return the largest errors against the float64 recurrence, relative to the largest number of the kind."""
    rows = []
    for lowest in (-0.1, -1.0, -20.0, -1000.0):
        inputs = draw(1, 300, 2, 64, 64, lowest)
        results = {}
        for name, rule, dtype in (
            ("exact", recurrent_gated_delta_rule, torch.float64),
            ("peer", torch_chunk_gated_delta_rule, torch.float32),
            ("ours", chunk_gated_delta_rule, torch.float32),
        ):
            q, k, v, g, beta = (x.to(dtype).requires_grad_() for x in inputs.values())
            output, state = rule(q, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
            grads = torch.autograd.grad(output.sin().sum(), (q, k, v, g, beta))
            results[name] = [output, state, *grads]
        row: dict = {"lowest_log_decay": lowest}
        for name in ("peer", "ours"):
            row[name] = [
                ((x - y).abs().max() / y.abs().max()).item()
                for x, y in zip(results[name], results["exact"], strict=True)
            ]
        rows.append(row)
        shown = " ".join(f"{x:.0e}/{y:.0e}" for x, y in zip(row["peer"], row["ours"], strict=True))
        print(f"g >= {lowest:<8g} {shown}")
    return rows


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--turns", type=int, default=9, help="turns per figure, fewer for long shapes (default: 9)")
    parser.add_argument("--quick", action="store_true", help="three shapes, three turns, no memory")
    parser.add_argument("--peak-of", nargs=3, metavar=("NAME", "SHAPE", "BACKWARD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    if options.peak_of:
        name, shape, backward = options.peak_of
        print_peak(name, tuple(json.loads(shape)), bool(int(backward)))
        return

    turns = 3 if options.quick else options.turns
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.threads} thread(s), float32")
    print("Largest relative errors, peer/ours: output, state, gradients of q, k, v, g, beta")
    error_rows = errors()
    print("Sequences: ms peer, ms ours, ratio; peak MB peer, ours, ratio; first forward, then forward and backward")
    sequence_rows = bench_sequences(QUICK if options.quick else GRID, turns, not options.quick)
    long = [row for row in sequence_rows if row["shape"][1] >= 512]
    means = {kind: geometric_mean([row[kind]["ratio"] for row in long]) for kind in ("forward", "forward_backward")}
    print("Geometric means from T512 on: " + ", ".join(f"{kind} {mean:.2f}x" for kind, mean in means.items()))
    print("Steps: us peer, us ours, ratio; us in place, ratio")
    step_rows = bench_steps(turns)
    print("Layers, one token: us peer, us ours, ratio")
    layer_rows = bench_layers(turns)
    layer_mean = geometric_mean([row["ratio"] for row in layer_rows])
    print(f"Geometric mean of layers: {layer_mean:.2f}x")
    if options.output:
        figures = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": options.threads,
            "machine": platform.processor() or platform.machine(),
            "errors": error_rows,
            "sequences": sequence_rows,
            "geometric_means": means,
            "steps": step_rows,
            "layers": layer_rows,
            "layers_geometric_mean": layer_mean,
        }
        options.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
