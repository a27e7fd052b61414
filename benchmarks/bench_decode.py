# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure decoding: time per token and cache bytes against context length, for Ouro and its linear-time hybrid.

    python benchmarks/bench_decode.py                     # table on screen
    python benchmarks/bench_decode.py --output decode.json

Weights are random (speed does not depend on them). Rows, interleaved in one process, medians of process CPU time on
one thread:

- `ouro, concatenating`: Ouro with `DynamicCache(config=...)`, which copies the past at each token as published code
  does;
- `ouro`: the same model with the cache that `generate` makes, which writes in place;
- `ouro, shared slots`: the same with `kv_sharing="last"`;
- `hybrid`: the model converted to Gated DeltaNet with a quarter of the layers kept.

A second table has one attention slot alone (append + attention; the C allocator hands blocks above 32 MiB back to the
system, which makes concatenation at 8,192 tokens and more pay for fresh pages at every token), a third early exit: the
share of loop passes that thresholds save on random gates.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from timing import in_turn, medians
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from loopergy import LT2Config, LT2ForCausalLM, OuroConfig, OuroForCausalLM
from loopergy.configuration.looped_config import RECURRENT
from loopergy.distill.report import cache_bytes
from loopergy.modeling.looped_cache import GrowingLayer, make_cache

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4}
SIZES |= {"vocab_size": 4096, "num_loops": 4, "max_position_embeddings": 65536}


def build_models() -> dict[str, tuple]:
    """Build the models and say how each makes its cache."""
    torch.manual_seed(0)
    ouro = OuroForCausalLM(OuroConfig(**SIZES)).eval()
    shared = OuroForCausalLM(OuroConfig(**SIZES, kv_sharing="last")).eval()
    shared.load_state_dict(ouro.state_dict())
    hybrid = LT2ForCausalLM(
        LT2Config(
            **SIZES,
            layer_mixers="gdn*3,full",
            gdn_head_dim=64,
            gdn_expand_v=1,
            gdn_use_short_conv=False,
            block_style="sandwich",
            norm_between_loops=True,
            use_loop_residual=False,
            early_exit_gate=True,
        )
    ).eval()
    return {
        "ouro, concatenating": (ouro, lambda: DynamicCache(config=ouro.config)),
        "ouro": (ouro, lambda: make_cache(ouro.config)),
        "ouro, shared slots": (shared, lambda: make_cache(shared.config)),
        "hybrid": (hybrid, lambda: make_cache(hybrid.config)),
    }


def fill(cache, config, context: int) -> None:
    """Put `context` random tokens into every slot, without the cost of reading a prompt."""
    keys = torch.randn(1, config.num_key_value_heads, context, config.head_dim)
    for slot, kind in enumerate(config.slot_plan().layer_types):
        if kind == RECURRENT:
            heads, key, value = config.gdn_num_heads, config.gdn_head_dim, config.gdn_value_head_dim
            cache.update_recurrent_state(torch.randn(1, heads, key, value), slot, num_tokens=context)
        else:
            cache.update(keys, keys, slot)


@torch.inference_mode()
def measure(context: int, repeats: int, steps: int) -> dict[str, dict[str, float]]:
    """Time one token per model at a context length, models in turn."""
    models = build_models()
    caches = {}
    for name, (model, make) in models.items():
        caches[name] = make()
        fill(caches[name], model.config, context)
    held = {name: cache_bytes(cache) / 2**20 for name, cache in caches.items()}
    token = torch.tensor([[5]])

    def decode(name: str) -> None:
        for _ in range(steps):
            models[name][0](token, cache=caches[name], use_cache=True)

    times = medians(in_turn({name: partial(decode, name) for name in models}, repeats))
    return {name: {"ms_per_token": times[name] / steps * 1e3, "cache_mib": held[name]} for name in models}


@torch.inference_mode()
def measure_slot(context: int, repeats: int) -> dict[str, float]:
    """Time appending one token to one slot and attending to it (16 heads of 64), in milliseconds."""
    query = torch.randn(1, 16, 1, 64)
    layers = {"concatenating": DynamicLayer(), "in place": GrowingLayer()}
    past = torch.randn(1, 16, context, 64)
    for layer in layers.values():
        layer.update(past, past)
        layer.update(query, query)

    def attend(layer: DynamicLayer) -> None:
        torch.nn.functional.scaled_dot_product_attention(query, *layer.update(query, query))

    times = medians(in_turn({name: partial(attend, layer) for name, layer in layers.items()}, repeats, unmeasured=0))
    return {name: seconds * 1e3 for name, seconds in times.items()}


@torch.inference_mode()
def measure_early_exit(thresholds: list[float], repeats: int) -> list[dict[str, float]]:
    """Count the loop passes that each threshold leaves out while decoding, and the time it takes."""
    torch.manual_seed(0)
    model = OuroForCausalLM(OuroConfig(**SIZES, initializer_range=0.1, eos_token_id=None)).eval()
    passed: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *call: passed.append(call[-1].shape[:2].numel()))
    prompt = torch.randint(3, SIZES["vocab_size"], (1, 64))
    rows = []
    for threshold in thresholds:
        times = []
        for _ in range(repeats):
            passed.clear()
            start = time.process_time()
            model.generate(prompt, max_new_tokens=32, do_sample=False, exit_threshold=threshold)
            times.append(time.process_time() - start)
        loops = SIZES["num_loops"]
        rows.append(
            {
                "threshold": threshold,
                "saved_share_of_loop_passes": 1 - sum(passed) / (loops * (64 + 31)),
                "seconds": statistics.median(times),
            }
        )
    return rows


def main() -> None:
    """Run the three measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="tokens per repeat")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)

    results: dict = {"sizes": SIZES, "decode": {}, "slot": {}}
    print("| context | model | ms per token | against `ouro, concatenating` | cache MiB |")
    print("|---|---|---|---|---|")
    for context in options.contexts:
        rows = results["decode"][context] = measure(context, options.repeats, options.steps)
        base = rows["ouro, concatenating"]["ms_per_token"]
        for name, row in rows.items():
            speed = base / row["ms_per_token"]
            print(f"| {context} | {name} | {row['ms_per_token']:.1f} | {speed:.2f}x | {row['cache_mib']:.1f} |")
    print("\n| context | one slot, concatenating, ms | in place, ms | ratio |")
    print("|---|---|---|---|")
    for context in options.contexts:
        row = results["slot"][context] = measure_slot(context, 20 * options.repeats)
        ratio = row["concatenating"] / row["in place"]
        print(f"| {context} | {row['concatenating']:.2f} | {row['in place']:.2f} | {ratio:.1f}x |")
    print("\n| exit threshold | loop passes left out | seconds for 32 tokens |")
    print("|---|---|---|")
    results["early_exit"] = measure_early_exit([0.0, 0.3, 0.5, 0.7, 0.9, 1.0], 3)
    for row in results["early_exit"]:
        print(f"| {row['threshold']} | {row['saved_share_of_loop_passes']:.0%} | {row['seconds']:.2f} |")
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
