# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure the sparse mixers beside full attention of the same width: one layer, decoding and reading a prompt.

    python benchmarks/bench_sparse_attention.py                     # tables on screen
    python benchmarks/bench_sparse_attention.py --output sparse.json

One layer of hidden size 1024 with 16 heads, random weights, one row, float32, one thread, process CPU time. Rows:

- `full`: softmax attention with 16 key heads by torch's fused kernel, new tokens written in place;
- `full, one key head`: the same with one key head, the shape of `nsa`;
- `nsa`: Native Sparse Attention, 16 blocks of 64 and a window of 512;
- `dsa, every token`: DeepSeek Sparse Attention with top-k above the context, the dense attention of its shape;
- `dsa, 512`, `dsa, 2048`, `lightning, 512`: the released and the lightning indexer with that top-k.

Decoding takes the rows in turn in one process and gives medians. Reading a prompt is measured in a process of its own
per row and length, for the sake of the peak memory: what the layer takes beyond its weights, inputs and output.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timing import in_turn, medians

from loopergy import LT2Config
from loopergy.configuration.looped_config import INDEXED, POOLED
from loopergy.distill.report import cache_bytes
from loopergy.modeling.building_blocks import RotaryEmbedding
from loopergy.modeling.looped_cache import make_cache
from loopergy.modeling.modeling_lt2 import build_mixer

WIDTH = 1024
ROWS: dict[str, dict] = {
    "full": {"layer_mixers": "full"},
    "full, one key head": {"layer_mixers": "full", "num_key_value_heads": 1},
    "nsa": {"layer_mixers": "nsa"},
    "dsa, every token": {"layer_mixers": "dsa", "dsa_topk": 2**20},
    "dsa, 512": {"layer_mixers": "dsa", "dsa_topk": 512},
    "dsa, 2048": {"layer_mixers": "dsa", "dsa_topk": 2048},
    "lightning, 512": {"layer_mixers": "dsa", "dsa_topk": 512, "dsa_indexer": "deepseek"},
}


def build(name: str):
    """Build a row's config, mixer and rotary table."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 16, "num_hidden_layers": 1, "num_loops": 1, "vocab_size": 8}
    config = LT2Config(**sizes, max_position_embeddings=65536, **ROWS[name])
    config._attn_implementation = "sdpa"
    return config, build_mixer(config, 0).eval(), RotaryEmbedding(config)


def decoder(name: str, context: int) -> tuple[Callable[[], object], float]:
    """Return a function that decodes one token after `context` random ones, and the MiB that these take."""
    config, mixer, rotary = build(name)
    cache, (kind,) = make_cache(config), config.slot_plan().layer_types
    if kind == INDEXED:
        width = config.dsa_latent_dim + config.dsa_tail_dim
        cache.update(torch.randn(1, 1, context, width), torch.randn(1, 1, context, config.dsa_index_head_dim), 0)
    else:
        heads = config.nsa_num_key_value_heads if kind == POOLED else config.num_key_value_heads
        pooling = {"pooling": mixer.branches.pooling} if kind == POOLED else {}
        cache.update(*(torch.randn(1, heads, context, config.head_dim) for _ in range(2)), 0, **pooling)
    x = torch.randn(1, 1, WIDTH)

    def step() -> None:
        position = torch.tensor([[cache.get_seq_length(0)]])
        mixer(x, position_embeddings=rotary(x, position), position_ids=position, cache=cache)

    return step, cache_bytes(cache) / 2**20


@torch.inference_mode()
def measure_decoding(context: int, repeats: int) -> dict[str, dict[str, float]]:
    """Time one token per row at a context length, rows in turn, in milliseconds."""
    steps = {name: decoder(name, context) for name in ROWS}
    times = medians(in_turn({name: step for name, (step, _) in steps.items()}, repeats, unmeasured=2))
    return {name: {"ms": 1e3 * times[name], "cache_mib": steps[name][1]} for name in ROWS}


@torch.inference_mode()
def read_prompt(name: str, length: int) -> dict[str, float]:
    """Read a prompt once; return seconds and the peak MiB beyond weights, input and output."""
    _, mixer, rotary = build(name)
    x, positions = torch.randn(1, length, WIDTH), torch.arange(length)[None]
    angles = rotary(x, positions)
    mixer(x[:, :64], position_embeddings=tuple(part[:, :64] for part in angles), position_ids=positions[:, :64])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    output, _ = mixer(x, position_embeddings=angles, position_ids=positions)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "peak_mib": peak / 1024 - output.numel() * output.element_size() / 2**20}


def measure_prompt(name: str, length: int) -> dict[str, float]:
    """Run [`read_prompt`] in a process of its own."""
    command = [sys.executable, __file__, "--row", name, "--length", str(length)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    """Run the two measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192, 32768])
    parser.add_argument("--prompts", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--row", choices=ROWS, help="measure one row's prompt in this process")
    parser.add_argument("--length", type=int, default=2048, help="of that prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.row:
        print(json.dumps(read_prompt(options.row, options.length)))
        return

    results: dict = {"decode": {}, "prompt": {}}
    print("| context | row | ms per token | against `full` | cache MiB |")
    print("|---|---|---|---|---|")
    for context in options.contexts:
        rows = results["decode"][context] = measure_decoding(context, options.repeats)
        for name, row in rows.items():
            speed = rows["full"]["ms"] / row["ms"]
            print(f"| {context} | {name} | {row['ms']:.2f} | {speed:.2f}x | {row['cache_mib']:.1f} |", flush=True)
    print("\n| prompt | row | seconds | against `full` | peak MiB |")
    print("|---|---|---|---|---|")
    for length in options.prompts:
        rows = results["prompt"][length] = {}
        for name in ROWS:
            row = rows[name] = measure_prompt(name, length)
            speed = rows["full"]["seconds"] / row["seconds"]
            print(f"| {length} | {name} | {row['seconds']:.2f} | {speed:.2f}x | {row['peak_mib']:.0f} |", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
