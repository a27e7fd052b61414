# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure CEM-Llama against transformers' LlamaForCausalLM of the same shape, in one run.

    python benchmarks/bench_cem_llama.py                     # tables on screen
    python benchmarks/bench_cem_llama.py --output cem.json

Weights are random (speed does not depend on them). All models of a row run in turn in one process, on one thread;
figures are medians of process CPU time, and of the ratios within each turn.

- Training (forward, backward) and prefill: time against Llama's, beside the FLOPs against Llama's.
- Decoding: time per token at a context length, with transformers' `DynamicCache` for both models, and with the cache
  that writes in place for both. `bytes` is what the cache holds.
- The diagonal: weights formed a chunk of queries at a time (what the model does), all at once, and a fused attention
  call on concatenated features.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from timing import in_turn, median_ratio, medians
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from loopergy import CEMLlamaConfig, CEMLlamaForCausalLM
from loopergy.modeling.causal_energies import DiagonalPart, interaction_force
from loopergy.modeling.looped_cache import with_growing_layers

SIZES = {"vocab_size": 4096, "max_position_embeddings": 65536}
VARIANTS = {
    "T=1, no diagonal": {"cem_diag": "none"},
    "T=1, shared diagonal": {"cem_diag": "shared"},
    "T=2, no diagonal": {"cem_diag": "none", "num_steps": 2},
    "T=2, shared diagonal": {"cem_diag": "shared", "num_steps": 2},
    "T=2, per-head diagonal": {"cem_diag": "per_head", "num_steps": 2},
}


def build(variant: str, attention: str, sizes: dict) -> torch.nn.Module:
    """Build Llama or a variant of CEM-Llama."""
    torch.manual_seed(0)
    if variant == "llama":
        return LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation=attention)
    config = CEMLlamaConfig(**sizes, **VARIANTS[variant])
    return CEMLlamaForCausalLM._from_config(config, attn_implementation=attention)


def flops_per_token(variant: str, length: int, sizes: dict, logits: int) -> float:
    """Count the matrix products of a forward pass per token, at the average causal length; `logits` tokens get any."""
    d, f, layers, heads = (
        sizes[f"{name}"] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    head = 2 * d * sizes["vocab_size"] * logits / length
    if variant == "llama":
        return layers * (8 * d * d + 2 * length * d + 6 * d * f) + head
    fields = VARIANTS[variant]
    steps = fields.get("num_steps", 1)
    diagonal = {"none": 0, "shared": 1, "per_head": heads}[fields["cem_diag"]]
    attention = 2 * d * d + steps * (4 * d * d + 2 * length * d * (1 + diagonal))
    return layers * (attention + 2 * d * f * (1 + 2 * steps)) + head


def against(base: str, runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, dict[str, float]]:
    """Time the runs in turn, and tell how often as long as `base` each takes."""
    times = in_turn(runs, repeats)
    return {
        name: {"ms": 1e3 * seconds, "ratio": median_ratio(times[name], times[base])}
        for name, seconds in medians(times).items()
    }


def shape(width: int, layers: int) -> dict[str, int]:
    """Return the fields of a model with heads of 64 and an MLP three times as wide."""
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": width // 64}
    return SIZES | sizes | {"num_hidden_layers": layers}


def measure_pass(sizes: dict, variants: list[str], length: int, training: bool, attention: str, repeats: int) -> dict:
    """Time a training step (forward and backward) or a prefill of one row."""
    ids = torch.randint(3, sizes["vocab_size"], (1, length))
    models = {name: build(name, attention, sizes).train(training) for name in ("llama", *variants)}

    def run(model: torch.nn.Module) -> None:
        if training:
            model(ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad(set_to_none=True)
        else:
            with torch.inference_mode():
                model(ids, logits_to_keep=1, use_cache=True)

    rows = against("llama", {name: lambda model=model: run(model) for name, model in models.items()}, repeats)
    for name, row in rows.items():
        flops, of_llama = (flops_per_token(x, length, sizes, length if training else 1) for x in (name, "llama"))
        row["flop_ratio"] = flops / of_llama
    return rows


@torch.inference_mode()
def measure_decoding(context: int, rows: int, repeats: int, steps: int) -> dict:
    """Time one token of every row at a context length, for two kinds of cache."""
    sizes = shape(512, 10) | {"vocab_size": 50257}
    models = {
        name: build(name, "sdpa", sizes).eval() for name in ("llama", "T=1, no diagonal", "T=1, shared diagonal")
    }
    token, runs, held = torch.full((rows, 1), 5), {}, {}
    for kind in ("concatenating", "in place"):
        for name, model in models.items():
            cache = DynamicCache(config=model.config)
            cache = with_growing_layers(cache) if kind == "in place" else cache
            config = model.config
            keys = torch.randn(rows, config.num_key_value_heads, context, config.head_dim)
            width = 0 if name == "T=1, no diagonal" else config.head_dim  # with a diagonal, the width of u per head
            for layer in range(config.num_hidden_layers):
                cache.update(keys, keys[..., :width], layer)
                cache.update(keys[:, :, :1], keys[:, :, :1, :width], layer)
            key = f"{name}, {kind}"
            held[key] = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

            def run(model: torch.nn.Module = model, cache: DynamicCache = cache) -> None:
                for _ in range(steps):
                    model(token, cache=cache, use_cache=True)

            runs[key] = run
    found = against("llama, concatenating", runs, repeats)
    base = {kind: found[f"llama, {kind}"]["ms"] for kind in ("concatenating", "in place")}
    for name, row in found.items():
        faster = base[name.rpartition(", ")[2]] / row["ms"]
        row |= {"ms": row["ms"] / steps, "faster_than_llama": faster, "cache_bytes": held[name]}
    return found


def diagonal_forms(length: int, training: bool, device: str = "cpu") -> dict[str, Callable[[], None]]:
    """Return one step of attention with a shared diagonal in three forms, at 8 heads of 64, as calls."""
    torch.manual_seed(0)
    query, keys = torch.randn(2, 1, 8, length, 64, device=device).requires_grad_(training)
    point, context = torch.randn(2, 1, length, 512, device=device).requires_grad_(training)
    diagonal = torch.full((1, 512), 0.01, device=device)

    def formed(all_at_once: bool) -> tuple[torch.Tensor, torch.Tensor]:
        part = DiagonalPart(diagonal, point, context[:, None])
        return interaction_force(query, keys, part, None, 8.0, keep_weights=all_at_once)[:2]

    def fused() -> tuple[torch.Tensor, torch.Tensor]:
        wide_query = torch.cat((query, (point * diagonal)[:, None].expand(1, 8, length, 512)), dim=-1)
        wide = torch.cat((keys, context[:, None].expand(1, 8, length, 512)), dim=-1)
        output = torch.nn.functional.scaled_dot_product_attention(
            wide_query, wide, wide, is_causal=length > 1, scale=1 / 8
        )
        return output[..., :64], diagonal * output[..., 64:].sum(dim=1)

    def run(form: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.set_grad_enabled(training):
            loss = sum(part.square().sum() for part in form())
        if training:
            torch.autograd.grad(loss, (query, keys, point, context))

    forms = {"chunks": lambda: run(lambda: formed(False)), "all at once": lambda: run(lambda: formed(True))}
    return forms | {"fused": lambda: run(fused)}


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="hidden size of training and prefill")
    parser.add_argument("--layers", type=int, default=2, help="layers of training and prefill")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048], help="of training and prefill")
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192], help="of decoding")
    parser.add_argument("--rows", type=int, default=1, help="texts that are decoded together")
    parser.add_argument("--diagonals", type=int, nargs="*", default=[128, 512, 2048], help="lengths of the last table")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="tokens per repeat of decoding")
    parser.add_argument("--attention", default="sdpa", help="attention implementation of both models")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)

    sizes = shape(options.width, options.layers)
    results: dict = {"sizes": sizes, "attention": options.attention, "pass": {}, "decoding": {}, "diagonal": {}}
    print("| pass | length | model | ms | time / Llama's | FLOPs / Llama's |")
    print("|---|---|---|---|---|---|")
    for length in options.lengths:
        for what in ("training", "prefill"):
            # Per-head diagonals cost H times as much; the shortest length shows it.
            variants = [name for name in VARIANTS if "per-head" not in name or length == min(options.lengths)]
            rows = measure_pass(sizes, variants, length, what == "training", options.attention, options.repeats)
            results["pass"][f"{what} {length}"] = rows
            for name, row in rows.items():
                ratios = f"{row['ratio']:.2f} | {row['flop_ratio']:.2f}"
                print(f"| {what} | {length} | {name} | {row['ms']:.0f} | {ratios} |", flush=True)
    print("\n| context | model and cache | ms per token | faster than Llama with such a cache | cache MiB |")
    print("|---|---|---|---|---|")
    for context in options.contexts:
        results["decoding"][context] = rows = measure_decoding(context, options.rows, options.repeats, options.steps)
        for name, row in rows.items():
            faster = f"{row['faster_than_llama']:.2f}x | {row['cache_bytes'] / 2**20:.0f}"
            print(f"| {context} | {name} | {row['ms']:.1f} | {faster} |", flush=True)
    print("\n| diagonal, length | form | ms | time / chunks' |")
    print("|---|---|---|---|")
    for length in options.diagonals:
        for what in ("training", "forward"):
            rows = in_turn(diagonal_forms(length, what == "training"), 3, "chunks")
            results["diagonal"][f"{what} {length}"] = rows
            for name, row in rows.items():
                print(f"| {what}, {length} | {name} | {row['ms']:.1f} | {row['ratio']:.2f} |", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
