# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure the torch kernels of the recurrent mixers beside the best public ones in plain torch.

The peers are transformers' own (Kimi Delta Attention, the Mamba2 mixer, the gated delta rule's stands in
`bench_gated_delta_rule.py`) and, where it has none, flash-linear-attention's naive references, read from the installed
package file by file, as the package itself needs a GPU. Both run in one process, turn by turn; a figure is the median
over the turns, a ratio is theirs over ours. With one thread the process's CPU time is taken. Peak memory is read in a
process of its own per function. Errors are against the recurrence in float64. Nothing is asserted about time.

    python benchmarks/bench_linear_attention.py --output linear_attention.json
    python benchmarks/bench_linear_attention.py --only kda gla --no-memory
"""

import argparse
import importlib.util
import json
import logging
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import transformers
from transformers import Mamba2Config
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from loopergy import LT2Config
from loopergy.modeling.kernels import (
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_simple_gla,
    recurrent_gated_delta_rule,
    recurrent_gla,
    recurrent_kda,
    recurrent_simple_gla,
)
from loopergy.modeling.mixers.mamba2 import Mamba2

# Length, width of a head; one row, eight heads.
SHAPES = [(512, 64), (2048, 64)]
HEADS = 8
KINDS = ["kda", "deltanet", "gla", "hgrn2", "retnet", "simple gla", "la", "mamba2 mixer"]
# What takes longer is measured once only.
_LONG_SECONDS = 1.0
Tensors = dict[str, torch.Tensor]
Call = Callable[..., torch.Tensor]
Rule = Callable[..., tuple[torch.Tensor, ...]]


def naive(name: str) -> ModuleType:
    """Return the naive references of one of flash-linear-attention's operators."""
    package = importlib.util.find_spec("fla")
    if package is None or package.origin is None:
        raise SystemExit("The peers are flash-linear-attention's: pip install flash-linear-attention")
    path = Path(package.origin).parent / "ops" / name / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(names: str, length: int, width: int, kind: str) -> Tensors:
    """Draw q, k, v and the gates of a kind, as far as they are named."""
    generator = torch.Generator().manual_seed(0)
    if kind == "mamba2 mixer":
        return {"x": torch.randn(1, length, HEADS * width // 2, generator=generator)}
    shape = (1, length, HEADS, width)
    tensors = {name: torch.randn(shape, generator=generator) for name in "qkv"}
    uniform = torch.rand(shape if kind in ("kda", "gla", "hgrn2") else shape[:3], generator=generator)
    tensors["g"] = -uniform if kind == "kda" else -0.2 * uniform
    tensors["beta"] = torch.rand(shape[:3], generator=generator)
    if kind == "hgrn2":
        # Log forget gates as they start out: log sigmoid of numbers around 0.
        tensors["g"] = torch.nn.functional.logsigmoid(0.5 * torch.randn(shape, generator=generator))
        tensors["k"] = 1 - tensors["g"].exp()
    if kind == "retnet":
        rate = torch.log1p(-(2.0 ** (-5 - torch.arange(HEADS))))
        tensors["g"] = rate.expand(shape[:3]).contiguous()
    if kind in ("kda", "deltanet"):
        tensors["q"], tensors["k"] = (torch.nn.functional.normalize(tensors[name], dim=-1) for name in "qk")
    return {name: tensors[name] for name in names.split()}


class Contest(NamedTuple):
    """Our function, the peer's and the recurrence token by token, all from the named tensors to the output.

    Args:
        names: of the tensors, in order.
        peer_name: what the peer is called in tables.
        target: the ratio to reach, for the table.
    """

    names: str
    peer_name: str
    ours: Call
    peer: Call
    exact: Call | None = None
    target: float = 1.0


def first(rule: Rule) -> Call:
    """Return the rule without the state in its results."""
    return lambda *tensors: rule(*tensors)[0]


def heads_first(rule: Rule) -> Call:
    """Return a rule for [batch, heads, length, dim] as one for [batch, length, heads, dim]."""
    return lambda *tensors: rule(*(x.transpose(1, 2) for x in tensors))[0].transpose(1, 2)


def without_decay(rule: Rule) -> Call:
    """Return the gated delta rule as the delta rule."""
    return lambda q, k, v, beta: rule(q, k, v, torch.zeros_like(beta), beta)[0]


def mamba2_mixers(width: int) -> tuple[Call, Call]:
    """Return our Mamba2 mixer and transformers' with the same weights: HEADS heads, `width` wide."""
    torch.manual_seed(0)
    hidden = HEADS * width // 2
    mixer = Mamba2(
        LT2Config(hidden_size=hidden, mamba2_num_heads=HEADS, layer_mixers="mamba2", num_attention_heads=HEADS)
    )
    sizes = {"num_heads": HEADS, "head_dim": width, "state_size": 64, "n_groups": 1, "expand": 2, "conv_kernel": 4}
    peer = Mamba2Mixer(Mamba2Config(hidden_size=hidden, layer_norm_epsilon=1e-6, use_bias=False, **sizes), layer_idx=0)
    peer.load_state_dict(mixer.state_dict())
    return first(mixer), peer


def contest(kind: str, width: int) -> Contest:
    """Return who meets whom for a kind of recurrence."""
    if kind == "kda":
        peer = first(chunk_kimi_delta_attention)
        return Contest("q k v g beta", "transformers", first(chunk_kda), peer, first(recurrent_kda), 30.0)
    if kind == "deltanet":
        peer = heads_first(naive("delta_rule").delta_rule_chunkwise)
        ours, exact = without_decay(chunk_gated_delta_rule), without_decay(recurrent_gated_delta_rule)
        return Contest("q k v beta", "fla naive chunk", ours, peer, exact)
    if kind == "la":
        peer, ours = naive("linear_attn").naive_chunk_linear_attn, first(chunk_simple_gla)
        return Contest("q k v", "fla naive chunk", ours, peer, first(recurrent_simple_gla))
    if kind in ("gla", "hgrn2"):
        peer = first(naive("gla").naive_recurrent_gla)
        return Contest("q k v g", "fla naive recurrent", first(chunk_gla), peer, first(recurrent_gla), 6.0)
    if kind == "mamba2 mixer":
        return Contest("x", "transformers", *mamba2_mixers(width))
    peer = first(naive("simple_gla").naive_chunk_simple_gla)
    return Contest("q k v g", "fla naive chunk", first(chunk_simple_gla), peer, first(recurrent_simple_gla))


def run(call: Call, inputs: Tensors, backward: bool) -> torch.Tensor:
    tensors = [x.detach().requires_grad_(backward) for x in inputs.values()]
    with torch.set_grad_enabled(backward):
        output = call(*tensors)
        if backward:
            output.backward(torch.ones_like(output))
    return output


def timed(call: Call, inputs: Tensors, backward: bool) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run(call, inputs, backward)
    return clock() - start


def medians(calls: dict[str, Call], inputs: Tensors, backward: bool, turns: int) -> dict[str, float]:
    """Return the median seconds of every call, taken turn by turn after a warm-up; long calls run once."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    warm = {name: timed(call, inputs, backward) for name, call in calls.items()}
    for _ in range(turns):
        for name, call in calls.items():
            if warm[name] < _LONG_SECONDS:
                taken[name].append(timed(call, inputs, backward))
    return {name: statistics.median(seconds or [warm[name]]) for name, seconds in taken.items()}


def error(call: Call, exact: Call, inputs: Tensors) -> float:
    """Return the largest error of the output and all gradients, each relative to the largest number of its kind."""
    results = []
    for rule, dtype in ((call, torch.float32), (exact, torch.float64)):
        tensors = [x.to(dtype).requires_grad_() for x in inputs.values()]
        output = rule(*tensors)
        results.append([output, *torch.autograd.grad(output.sin().sum(), tensors)])
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(*results, strict=True))


def peak_memory(kind: str, who: str, length: int, width: int, backward: bool) -> float:
    """Return by how many MB a call raises the peak memory of a fresh process."""
    command = [sys.executable, __file__, "--peak-of", kind, who, str(length), str(width), str(int(backward))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(kind: str, who: str, length: int, width: int, backward: bool) -> None:
    fight = contest(kind, width)
    # A small call first: what torch loads on first use is not what a call needs.
    run(getattr(fight, who), draw(fight.names, 64, width, kind), backward)
    inputs = draw(fight.names, length, width, kind)
    before = highest_memory()
    run(getattr(fight, who), inputs, backward)
    print(highest_memory() - before)


def highest_memory() -> float:
    """Return the process's highest memory so far in MB (Linux)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure(kind: str, length: int, width: int, turns: int, memory: bool) -> dict:
    fight = contest(kind, width)
    inputs = draw(fight.names, length, width, kind)
    row: dict = {"kind": kind, "length": length, "width": width, "peer": fight.peer_name, "target": fight.target}
    if fight.exact is not None:
        short = draw(fight.names, 128, width, kind)
        row["error"] = {who: error(getattr(fight, who), fight.exact, short) for who in ("peer", "ours")}
    calls = {"peer": fight.peer, "ours": fight.ours}
    for name, backward in (("forward", False), ("forward_backward", True)):
        seconds = medians(calls, inputs, backward, turns)
        figures = {f"{who}_ms": 1000 * value for who, value in seconds.items()}
        figures["ratio"] = seconds["peer"] / seconds["ours"]
        if memory:
            figures |= {f"{who}_mb": peak_memory(kind, who, length, width, backward) for who in calls}
        row[name] = figures
    return row


def line(row: dict) -> str:
    cells = [f"{row['kind']} T{row['length']} D{row['width']}".ljust(24)]
    for name in ("forward", "forward_backward"):
        r = row[name]
        cells.append(f"{r['peer_ms']:8.1f} {r['ours_ms']:7.1f} {r['ratio']:6.1f}x")
        if "peer_mb" in r:
            cells.append(f"{r['peer_mb']:6.0f} {r['ours_mb']:5.0f} MB")
    if "error" in row:
        cells.append(f"{row['error']['peer']:.0e} {row['error']['ours']:.0e}")
    return " | ".join(cells) + f" | {row['peer']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--turns", type=int, default=7, help="turns per figure (default: 7)")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="kinds to measure (default: all)")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak memory out")
    parser.add_argument("--peak-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable(logging.WARNING)
    if options.peak_of:
        kind, who, length, width, backward = options.peak_of
        print_peak(kind, who, int(length), int(width), bool(int(backward)))
        return
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.threads} thread(s), float32")
    print("ms peer, ms ours, ratio; peak MB peer, ours; first forward, then with backward; errors peer, ours; peer")
    rows = []
    for kind in options.only:
        for length, width in SHAPES:
            rows.append(measure(kind, length, width, options.turns, not options.no_memory))
            print(line(rows[-1]), flush=True)
    if options.output:
        machine = platform.processor() or platform.machine()
        figures = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": machine}
        options.output.write_text(json.dumps({**figures, "threads": options.threads, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
