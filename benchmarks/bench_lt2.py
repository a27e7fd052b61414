# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure whole LT2 models of about 100M parameters and four loops: decoding, reading a prompt, cache bytes.

    python benchmarks/bench_lt2.py                  # tables on screen; takes 14 GB at 32,768 tokens
    python benchmarks/bench_lt2.py --output lt2.json

Rows, one thread, float32, random weights and random cached tokens: the looped full-attention transformer, and the same
with Gated DeltaNet in four of five layers, with sparse attention (DSA) in the fifth, and with Gated DeltaNet alone.

- Decoding: one token at a context length, rows in turn, medians of process CPU time.
- Prompt: a piece of 256 tokens behind that context, so that the figure is the speed at that place of a long prompt.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from loopergy import LT2Config, LT2ForCausalLM
from loopergy.configuration.looped_config import INDEXED, RECURRENT
from loopergy.distill.report import cache_bytes
from loopergy.modeling.looped_cache import make_cache

SIZES = {"vocab_size": 32000, "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 15, "num_loops": 4}
SIZES |= {"num_attention_heads": 10, "max_position_embeddings": 65536, "tie_word_embeddings": True}
SIZES |= {"gdn_num_heads": 5, "gdn_head_dim": 96}
ROWS = {"full": "full", "gdn + full, 4:1": "gdn*4,full", "gdn + dsa, 4:1": "gdn*4,dsa", "gdn": "gdn"}
PIECE = 256


def build(row: str) -> LT2ForCausalLM:
    """Build a row's model."""
    torch.manual_seed(0)
    return LT2ForCausalLM(LT2Config(**SIZES, layer_mixers=ROWS[row])).eval()


def filled_cache(config: LT2Config, context: int):
    """Make a cache that holds `context` random tokens in every slot."""
    cache = make_cache(config)
    for slot, kind in enumerate(config.slot_plan().layer_types):
        if kind.endswith(RECURRENT):
            shape = (1, config.gdn_num_heads, config.gdn_head_dim, config.gdn_value_head_dim)
            cache.update_recurrent_state(torch.randn(shape), slot, num_tokens=context)
            width = 2 * shape[1] * shape[2] + shape[1] * shape[3]
            cache.update_conv_state(torch.randn(1, width, config.gdn_conv_size), slot)
        elif kind == INDEXED:
            width = config.dsa_latent_dim + config.dsa_tail_dim
            cache.update(
                torch.randn(1, 1, context, width), torch.randn(1, 1, context, config.dsa_index_head_dim), slot
            )
        else:
            keys = torch.randn(1, config.num_key_value_heads, context, config.head_dim)
            cache.update(keys, keys, slot)
    return cache


@torch.inference_mode()
def measure(context: int, repeats: int) -> dict[str, dict[str, float]]:
    """Time one token, and a piece of a prompt, behind a context; rows in turn."""
    models = {row: build(row) for row in ROWS}
    caches = {row: filled_cache(model.config, context) for row, model in models.items()}
    held = {row: cache_bytes(cache) for row, cache in caches.items()}
    token, piece = torch.tensor([[5]]), torch.randint(3, SIZES["vocab_size"], (1, PIECE))
    seconds: dict[tuple[str, int], list[float]] = {}
    # The first turn moves the cached tokens into buffers with room, and does not count.
    turns = [token] * (repeats + 1) + [piece] * 2
    for turn, ids in enumerate(turns):
        for row, model in models.items():
            began = time.process_time()
            model(ids, cache=caches[row], use_cache=True, logits_to_keep=1)
            if turn:
                seconds.setdefault((row, ids.shape[1]), []).append(time.process_time() - began)
    return {
        row: {
            "parameters": models[row].num_parameters(),
            "decode_tokens_per_second": 1 / statistics.median(seconds[row, 1]),
            "prompt_tokens_per_second": PIECE / statistics.median(seconds[row, PIECE]),
            "cache_bytes": held[row],
        }
        for row in ROWS
    }


def main() -> None:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)

    results: dict = {"sizes": SIZES, "rows": ROWS, "contexts": {}}
    print("| context | row | parameters | decoding, tokens/s | prompt, tokens/s | cache MiB |")
    print("|---|---|---|---|---|---|")
    for context in options.contexts:
        results["contexts"][context] = measured = measure(context, options.repeats)
        for row, figures in measured.items():
            speeds = f"{figures['decode_tokens_per_second']:.2f} | {figures['prompt_tokens_per_second']:.1f}"
            size, cache = figures["parameters"] / 1e6, figures["cache_bytes"] / 2**20
            print(f"| {context} | {row} | {size:.0f}M | {speeds} | {cache:.0f} |", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
