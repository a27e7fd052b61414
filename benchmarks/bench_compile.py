# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure eager against compiled models: forward, training step, and decoding on a static cache.

    python benchmarks/bench_compile.py --output compile.json

Weights are random. Eager and compiled runs alternate in one process on one thread, after a warm-up in which the
compiler runs; medians of process CPU time, and how long the compiler took. Decoding is one token at a time on a
static cache in both columns, so that the ratio is that of compiling alone; `--families` picks some of the families.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from timing import in_turn, median_ratio, medians
from transformers import StaticCache

from loopergy import (
    CEMLlamaConfig,
    CEMLlamaForCausalLM,
    GPTBaselineConfig,
    GPTBaselineForCausalLM,
    LT2Config,
    LT2ForCausalLM,
    NRGPTConfig,
    NRGPTForCausalLM,
    OuroConfig,
    OuroForCausalLM,
)

COMMON = {"vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 512}
COMMON |= {"bos_token_id": None, "eos_token_id": None}
LLAMA = {**COMMON, "intermediate_size": 704, "num_hidden_layers": 2}
LENGTH, NEW = 128, 16
FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "ouro": lambda: OuroForCausalLM(OuroConfig(**LLAMA, num_loops=2)),
    "lt2, gdn and full": lambda: LT2ForCausalLM(
        LT2Config(**LLAMA, num_loops=2, layer_mixers="gdn,full", gdn_num_heads=4, gdn_head_dim=64, gdn_expand_v=1)
    ),
    "cem-llama, no diagonal": lambda: CEMLlamaForCausalLM(CEMLlamaConfig(**LLAMA, cem_diag="none")),
    "cem-llama, diagonal, T=2": lambda: CEMLlamaForCausalLM(
        CEMLlamaConfig(**LLAMA, cem_diag="shared", cem_attn_steps=2, cem_mlp_steps=2)
    ),
    "nrgpt": lambda: NRGPTForCausalLM(NRGPTConfig(**COMMON, num_hidden_layers=4)),
    "gpt": lambda: GPTBaselineForCausalLM(GPTBaselineConfig(**COMMON, num_hidden_layers=2)),
}


def compare(what: str, eager: Callable[[], object], compiled: Callable[[], object], rounds: int) -> dict:
    """Run both once, the compiler included, then in turn."""
    eager()
    compiling = time.perf_counter()
    compiled()
    compiling = time.perf_counter() - compiling
    compiled()
    times = in_turn({"eager": eager, "compiled": compiled}, rounds, unmeasured=0)
    return {
        "what": what,
        **{f"{name}_ms": 1e3 * seconds for name, seconds in medians(times).items()},
        "ratio": median_ratio(times["eager"], times["compiled"]),
        "compiler_s": compiling,
    }


def decoder(model: torch.nn.Module, forward: Callable, ids: torch.Tensor) -> Callable[[], None]:
    """Return a run that decodes `NEW` tokens on a static cache which holds the prompt."""
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=LENGTH + NEW)
    make_mask = getattr(type(model), "create_masks_for_generate", None)

    def run() -> None:
        cache.reset()
        model(ids, cache=cache, logits_to_keep=1)
        for place in range(LENGTH, LENGTH + NEW):
            token, mask = ids[:, :1], None
            if make_mask is not None:
                mask = make_mask(
                    config=model.config, inputs_embeds=torch.empty(1, 1, 0), attention_mask=None, cache=cache
                )
            forward(token, attention_mask=mask, position_ids=torch.tensor([[place]]), cache=cache)

    return run


def bench(family: str, rounds: int) -> list[dict]:
    """Measure the three runs of one family."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = FAMILIES[family]()
    ids = torch.randint(3, 2048, (1, LENGTH))

    def step(forward: Callable) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            forward(ids, labels=ids, use_cache=False).loss.backward()

        return run

    model.train()
    compiled = torch.compile(model, fullgraph=True)
    rows = [compare("training step", step(model), step(compiled), rounds)]
    model.eval()
    with torch.no_grad():
        forwards = (lambda: model(ids, use_cache=False)), (lambda: compiled(ids, use_cache=False))
        rows.append(compare("forward", *forwards, rounds))
        one = torch.compile(model, fullgraph=True)
        rows.append(compare(f"{NEW} tokens", decoder(model, model, ids), decoder(model, one, ids), rounds))
    return [{"family": family, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the numbers to this JSON file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES), metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in arguments.families:
        for row in bench(family, arguments.rounds):
            rows.append(row)
            times = f"{row['eager_ms']:>9.1f} ms{row['compiled_ms']:>9.1f} ms{row['ratio']:>7.2f}x"
            print(f"{family:<26}{row['what']:<15}{times}   compiled in {row['compiler_s']:.0f} s", flush=True)
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "threads": 1, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
