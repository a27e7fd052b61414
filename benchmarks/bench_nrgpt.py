# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure NRGPT against the way the official code computes: generation, training, peak memory, cache.

The peer has the same weights and gives the same numbers (checked before each measurement), but keeps every head's
matrix apart and loops over the heads, forms whole score maps, gets the feed-forward gradient from `torch.func.grad`,
and generates by running the whole text again for every token.

    python benchmarks/bench_nrgpt.py --output nrgpt.json

Peak memory is that of a process of its own (`--peak` is what it runs).
"""

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import in_turn, median_ratio, medians
from transformers import CompileConfig

from loopergy import GPTBaselineConfig, GPTBaselineForCausalLM, NRGPTConfig, NRGPTForCausalLM, nrgpt_to_official

SMALL = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
WIDE = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
LENGTH = 256


def build(sizes: dict, recurrence: str | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    fields = {"vocab_size": 65, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, **sizes}
    if recurrence is not None:
        return GPTBaselineForCausalLM(GPTBaselineConfig(recurrence=recurrence, **fields))
    return NRGPTForCausalLM(NRGPTConfig(**fields))


class Peer(torch.nn.Module):
    """NRGPT (FF2W, own token included) as the official code computes it, with the weights of one of our models."""

    def __init__(self, model: NRGPTForCausalLM):
        super().__init__()
        config = model.config
        self.steps, self.heads, self.limit = config.num_hidden_layers, config.num_attention_heads, LENGTH * 2
        weights = nrgpt_to_official(model)
        self.weights = torch.nn.ParameterDict(
            {
                name.replace(".", "/"): weight
                for name, weight in weights.items()
                if "tril" not in name and name != "pos_idx"
            }
        )
        self.register_buffer("mask", torch.ones(self.limit, self.limit).tril())

    def at(self, name: str) -> torch.Tensor:
        """Return a weight by its official name."""
        return self.weights[name.replace(".", "/")]

    def attend(self, g: torch.Tensor) -> torch.Tensor:
        """Return the attention gradient, head by head."""
        length, total = g.shape[1], 0
        for head in range(self.heads):
            keys = g @ self.at(f"blocks.attn.heads.{head}.H.weight").T
            scores = (g @ keys.transpose(-2, -1)).masked_fill(self.mask[:length, :length] == 0, -math.inf)
            total = total - scores.softmax(dim=-1) @ keys
        return total

    def feed_forward_energy(self, g: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward energy, summed over batch and tokens."""
        hidden = F.gelu(F.linear(g, self.at("blocks.ffwd.net.0.weight"), self.at("blocks.ffwd.net.0.bias")))
        return -(g * F.linear(hidden, self.at("blocks.ffwd.net.2.weight"), self.at("blocks.ffwd.net.2.bias"))).sum()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        size = (self.at("blocks.ln.bias").shape[0],)
        x = self.at("token_embedding_table.weight")[ids]
        x = x + self.at("position_embedding_table.weight")[: ids.shape[1]]
        for _ in range(self.steps):
            g = F.layer_norm(x, size, None, self.at("blocks.ln.bias"))
            gradient = self.attend(g) + self.at("blocks.scale_ff") * torch.func.grad(self.feed_forward_energy)(g)
            x = x - gradient @ self.at("blocks.proj.weight").T
        x = F.layer_norm(x, size, self.at("ln_f.weight"), self.at("ln_f.bias"))
        return F.linear(x, self.at("lm_head.weight"), self.at("lm_head.bias"))

    def generate(self, ids: torch.Tensor, new: int) -> torch.Tensor:
        """Generate greedily, the whole text again for every token."""
        for _ in range(new):
            ids = torch.cat([ids, self(ids[:, -self.limit :])[:, -1:].argmax(dim=-1)], dim=1)
        return ids


def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model(ids) if isinstance(model, Peer) else model(ids, use_cache=False).logits
    return out


def train_step(model: torch.nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(logits_of(model, ids).flatten(0, 1), targets.flatten()).backward()


def interleaved(first, second, rounds: int) -> tuple[float, float, float]:
    """Run two functions in turn; return both medians and the median ratio second / first, in seconds of CPU time."""
    times = in_turn({"first": first, "second": second}, rounds)
    return *medians(times).values(), median_ratio(times["second"], times["first"])


def bench_generation(rounds: int, compiled: bool) -> dict:
    model = build(SMALL).eval()
    peer = Peer(model)
    ids = torch.randint(65, (1, 16))
    new = LENGTH
    kwargs: dict = {"max_new_tokens": new, "do_sample": False}
    if compiled:
        settings = CompileConfig(fullgraph=True, dynamic=False)
        settings._compile_all_devices = True  # transformers compiles on accelerators alone unless told so
        kwargs |= {"cache_implementation": "static", "compile_config": settings}
    with torch.no_grad():
        same = bool(model.generate(ids, **kwargs).equal(peer.generate(ids, new)))
        ours, theirs, ratio = interleaved(
            lambda: model.generate(ids, **kwargs), lambda: peer.generate(ids, new), rounds
        )
    return {
        "what": f"generate {new} tokens, D 128{', static cache, compiled' if compiled else ''}",
        "unit": "tokens/s",
        "ours": new / ours,
        "peer": new / theirs,
        "ratio": ratio,
        "same_tokens": same,
    }


def bench_training(sizes: dict, batch: int, rounds: int) -> dict:
    model = build(sizes).train()
    peer = Peer(model)
    ids, targets = torch.randint(65, (2, batch, LENGTH)).unbind()
    difference = float((logits_of(model, ids) - logits_of(peer, ids)).detach().abs().max())
    ours, theirs, ratio = interleaved(
        lambda: train_step(model, ids, targets), lambda: train_step(peer, ids, targets), rounds
    )
    tokens = batch * LENGTH
    return {
        "what": f"train, D {sizes['hidden_size']}, H {sizes['num_attention_heads']}, T {LENGTH}, batch {batch}",
        "unit": "tokens/s",
        "ours": tokens / ours,
        "peer": tokens / theirs,
        "ratio": ratio,
        "max_difference": difference,
    }


def peak(which: str, batch: int) -> None:
    """Print by how many MiB a training step raises the memory of this process at its peak (Linux)."""
    model = build(WIDE).train()
    if which == "peer":
        model = Peer(model)
    short = torch.randint(65, (1, 8))
    train_step(model, short, short)
    Path("/proc/self/clear_refs").write_text("5")  # let the high-water mark start from here
    before = high_water()
    ids = torch.randint(65, (batch, LENGTH))
    train_step(model, ids, ids)
    print(high_water() - before)


def high_water() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) / 1024


def bench_peak(batch: int) -> dict:
    found = {}
    for which in ("ours", "peer"):
        command = [sys.executable, __file__, "--peak", which, "--batch", str(batch)]
        found[which] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {
        "what": f"peak of a training step, D 256, H 8, T {LENGTH}, batch {batch}",
        "unit": "MiB",
        **found,
        "ratio": found["peer"] / found["ours"],
    }


def bench_cache() -> dict:
    sizes = {}
    for name, model in (("ours", build(SMALL)), ("peer", build(SMALL, "parallel"))):
        cache = model.eval()(torch.randint(65, (1, LENGTH)), use_cache=True).cache
        sizes[name] = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    return {
        "what": f"cache of {LENGTH} tokens, D 128, L 6; peer: GPT",
        "unit": "bytes",
        **sizes,
        "ratio": sizes["peer"] / sizes["ours"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write the numbers to this JSON file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--peak", choices=("ours", "peer"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        peak(arguments.peak, arguments.batch)
        return
    rows = [
        bench_generation(3, compiled=False),
        bench_generation(3, compiled=True),
        bench_training(SMALL, arguments.batch, arguments.rounds),
        bench_training(WIDE, arguments.batch, arguments.rounds),
        bench_peak(arguments.batch),
        bench_cache(),
    ]
    for row in rows:
        print(f"{row['what']:<58}{row['ours']:>12.1f}{row['peer']:>12.1f} {row['unit']:<9}{row['ratio']:>7.2f}x")
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "threads": 1, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
