# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure the torch kernel of every mixer beside the best public one in plain torch, and beside its products alone.

The peers are transformers' own (the gated delta rule, Kimi Delta Attention, the Mamba2 mixer) and, where it has none,
flash-linear-attention's naive references, read from the installed package file by file, as the package itself needs a
GPU. Both run in one process, turn by turn; a figure is the median over the turns, a ratio is theirs over ours. With
one thread the process's CPU time is taken. The floor is the time of our matrix products at the rate of large ones,
measured between the turns. Peak memory is read in a process of its own per function. Errors are against the recurrence
in float64. Nothing is asserted about time.

    python benchmarks/bench_kernels.py --output kernels.json
    python benchmarks/bench_kernels.py --only kda gla --no-memory

Linear kernels have eight heads of 64, sparse ones as many query heads as their peers ask for and one key head. Full
and windowed attention are torch's own. More about `gdn` and about sparse attention: `bench_gated_delta_rule.py`,
`bench_sparse_attention.py`.
"""

import argparse
import importlib.util
import json
import logging
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest.mock import MagicMock, patch

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode, bmm_flop
from transformers import Mamba2Config
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

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
from loopergy.modeling.kernels.block_sparse_attention import Branches, Pooling, native_sparse_attention, pool_blocks
from loopergy.modeling.kernels.indexed_attention import Indexer, indexed_attention
from loopergy.modeling.mixers.mamba2 import Mamba2

# Length, width of a head; one row, eight heads.
SHAPES = [(512, 64), (2048, 64)]
HEADS = 8
KINDS = ["gdn", "kda", "deltanet", "gla", "hgrn2", "retnet", "simple gla", "la", "mamba2 mixer", "nsa", "dsa"]
# Blocks of 32, of which 4 are read, and a window of 128; the reference asks for 16 query heads a key head.
BRANCHES = Branches(Pooling(32, 32), block_size=32, block_count=4, window=128)
NSA_HEADS = 16
# Tokens that the indexer leaves, and its heads.
TOP_K, INDEX_HEADS, INDEX_WIDTH = 128, 4, 32
# What takes longer than the first is measured once only, what takes less than the second as often as fills it.
_LONG_SECONDS, _TURN_SECONDS = 1.0, 0.1
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
    # Helpers for packed documents, which need a GPU to be imported and are not called here.
    helpers = ("fla", "fla.ops", "fla.ops.utils", "fla.ops.utils.pooling")
    with patch.dict(sys.modules, {helper: MagicMock() for helper in helpers}):
        spec.loader.exec_module(module)
    return module


def draw(names: str, length: int, width: int, kind: str) -> Tensors:
    """Draw q, k, v and the gates of a kind, as far as they are named."""
    generator = torch.Generator().manual_seed(0)
    if kind == "mamba2 mixer":
        return {"x": torch.randn(1, length, HEADS * width // 2, generator=generator)}
    if kind in ("nsa", "dsa"):
        shapes = {
            "q": (1, length, NSA_HEADS if kind == "nsa" else HEADS, width),
            "k": (1, length, 1, width),
            "v": (1, length, 1, width),
            "gates": (1, length, NSA_HEADS, 3),
            "query": (1, length, INDEX_HEADS, INDEX_WIDTH),
            "key": (1, length, INDEX_WIDTH),
            "weights": (1, length, INDEX_HEADS),
        }
        tensors = {name: torch.randn(shapes[name], generator=generator) for name in names.split()}
        # Weights above 0: with others many scores are 0, and equal ones have no order.
        return {name: x.abs() if name == "weights" else x for name, x in tensors.items()}
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
    if kind in ("gdn", "kda", "deltanet"):
        tensors["q"], tensors["k"] = (torch.nn.functional.normalize(tensors[name], dim=-1) for name in "qk")
    return {name: tensors[name] for name in names.split()}


class Contest(NamedTuple):
    """Our function, the peer's and the recurrence token by token, all from the named tensors to the output.

    Args:
        names: of the tensors, in order.
        peer_name: what the peer is called in tables.
    """

    names: str
    peer_name: str
    ours: Call
    peer: Call
    exact: Call | None = None


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


def native_sparse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Return our Native Sparse Attention with averages made on the way."""
    keys, values = k.transpose(1, 2), v.transpose(1, 2)
    pooled = (pool_blocks(x, None, BRANCHES.pooling, 0, x.shape[2]) for x in (keys, values))
    return native_sparse_attention(q, keys, values, *pooled, gates, BRANCHES, q.shape[-1] ** -0.5)


def naive_native_sparse(reference: ModuleType) -> Call:
    """Return the reference's branches put together; its window is flash attention, here a mask for torch's own."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        size, scale, length = BRANCHES.block_size, q.shape[-1] ** -0.5, q.shape[1]
        pooled = [x[:, : length // size * size].unflatten(1, (-1, size)).mean(2) for x in (k, v)]
        summary, _ = reference.naive_nsa_compression(q, *pooled, size, scale)
        chosen = reference.naive_nsa_topk(q, pooled[0], BRANCHES.block_count, size, scale)
        selection = reference.naive_nsa_selection(q, k, v, chosen, size, scale)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < BRANCHES.window)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        window = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
        return (torch.stack((summary, selection, window.transpose(1, 2)), -1) * gates[..., None, :]).sum(-1)

    return attend


def indexed(
    q: torch.Tensor, k: torch.Tensor, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return our DeepSeek Sparse Attention with values that are the keys."""
    indexer, width = Indexer(query, key, weights), q.shape[-1]
    return indexed_attention(q, k[:, :, 0], width, indexer, TOP_K, width**-0.5)[0]


def contest(kind: str, width: int) -> Contest:
    """Return who meets whom for a kind of mixer."""
    if kind == "gdn":
        ours, exact = first(chunk_gated_delta_rule), first(recurrent_gated_delta_rule)
        return Contest("q k v g beta", "transformers", ours, first(torch_chunk_gated_delta_rule), exact)
    if kind == "nsa":
        return Contest("q k v gates", "fla naive", native_sparse, naive_native_sparse(naive("nsa")))
    if kind == "dsa":
        reference = naive("dsa").naive_dsa
        peer = lambda q, k, *index: reference(q, k, k, *index, topk=TOP_K)  # noqa: E731
        return Contest("q k query key weights", "fla naive", indexed, peer)
    if kind == "kda":
        peer = first(chunk_kimi_delta_attention)
        return Contest("q k v g beta", "transformers", first(chunk_kda), peer, first(recurrent_kda))
    if kind == "deltanet":
        peer = heads_first(naive("delta_rule").delta_rule_chunkwise)
        ours, exact = without_decay(chunk_gated_delta_rule), without_decay(recurrent_gated_delta_rule)
        return Contest("q k v beta", "fla naive chunk", ours, peer, exact)
    if kind == "la":
        peer, ours = naive("linear_attn").naive_chunk_linear_attn, first(chunk_simple_gla)
        return Contest("q k v", "fla naive chunk", ours, peer, first(recurrent_simple_gla))
    if kind in ("gla", "hgrn2"):
        peer = first(naive("gla").naive_recurrent_gla)
        return Contest("q k v g", "fla naive recurrent", first(chunk_gla), peer, first(recurrent_gla))
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


def timed(call: Call, inputs: Tensors, backward: bool, times: int = 1) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(times):
        run(call, inputs, backward)
    return (clock() - start) / times


def medians(calls: dict[str, Call], inputs: Tensors, backward: bool, turns: int) -> dict[str, float]:
    """Return the median seconds of every call, taken turn by turn after a warm-up.

    Long calls run once; short ones are repeated in every turn.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    warm = {name: timed(call, inputs, backward) for name, call in calls.items()}
    for _ in range(turns):
        for name, call in calls.items():
            if warm[name] < _LONG_SECONDS:
                times = math.ceil(_TURN_SECONDS / warm[name])
                taken[name].append(timed(call, inputs, backward, times))
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


def product_rate() -> float:
    """Return multiplications and additions per second of a large matrix product."""
    x = torch.randn(1024, 1024)
    seconds = [timed(lambda x: x @ x, {"x": x}, False) for _ in range(7)]
    return 2 * 1024**3 / statistics.median(seconds)


def products(call: Call, inputs: Tensors, backward: bool) -> int:
    """Return multiplications and additions of a call's matrix products, of those into a given place too."""
    in_place = lambda place, left, right, *factors, out_shape: bmm_flop(left, right)  # noqa: E731
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: in_place}) as counter:
        run(call, inputs, backward)
    return counter.get_total_flops()


def measure(kind: str, length: int, width: int, turns: int, memory: bool) -> dict:
    fight = contest(kind, width)
    inputs = draw(fight.names, length, width, kind)
    row: dict = {"kind": kind, "length": length, "width": width, "peer": fight.peer_name}
    if fight.exact is not None:
        short = draw(fight.names, 128, width, kind)
        row["error"] = {who: error(getattr(fight, who), fight.exact, short) for who in ("peer", "ours")}
    calls = {"peer": fight.peer, "ours": fight.ours}
    for name, backward in (("forward", False), ("forward_backward", True)):
        seconds = medians(calls, inputs, backward, turns)
        figures = {f"{who}_ms": 1000 * value for who, value in seconds.items()}
        figures["ratio"] = seconds["peer"] / seconds["ours"]
        figures["floor_ms"] = 1000 * products(fight.ours, inputs, backward) / product_rate()
        if memory:
            figures |= {f"{who}_mb": peak_memory(kind, who, length, width, backward) for who in calls}
        row[name] = figures
    return row


HEADER = (
    "| kernel | tokens | pass | peer | peer, ms | ours, ms | ratio | products alone, ms | peer, MB | ours, MB |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def lines(row: dict) -> str:
    """Return a row of the table for each pass."""
    texts = []
    for name, text in (("forward", "forward"), ("forward_backward", "with backward")):
        r = row[name]
        memory = f"{r['peer_mb']:.0f} | {r['ours_mb']:.0f}" if "peer_mb" in r else " | "
        times = f"{r['peer_ms']:.1f} | {r['ours_ms']:.1f} | {r['ratio']:.1f}x | {r['floor_ms']:.1f}"
        texts.append(f"| {row['kind']} | {row['length']:,} | {text} | {row['peer']} | {times} | {memory} |")
    return "\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--turns", type=int, default=9, help="turns per figure (default: 9)")
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
    print(HEADER)
    rows = []
    for kind in options.only:
        for length, width in SHAPES:
            rows.append(measure(kind, length, width, options.turns, not options.no_memory))
            print(lines(rows[-1]), flush=True)
    print("\nLargest errors of outputs and gradients on 128 tokens, peer and ours:")
    for row in rows:
        if "error" in row and row["length"] == SHAPES[0][0]:
            print(f"{row['kind']}: {row['error']['peer']:.0e}, {row['error']['ours']:.0e}")
    if options.output:
        machine = platform.processor() or platform.machine()
        figures = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": machine}
        options.output.write_text(json.dumps({**figures, "threads": options.threads, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
