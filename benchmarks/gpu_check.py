# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Check every CUDA path against the same on a CPU or in plain torch, and time the kernels.

For each family (gated delta rule, delta rule with a decay per channel, linear attention without decay and with one per
head or channel) and case the dispatcher's answer on the GPU (flash-linear-attention's kernels, if they are usable) is
compared with our torch kernels on the same GPU in float64: outputs, final states and gradients, packed documents,
single steps, short and ragged lengths, strong decay. Small models of all families give logits, gradients and, token by
token from a cache, logits again; the same on the CPU in float64. Then times by device events, next to two ceilings
measured here: the rate of matrix products and of copies. Exits with 1 if a case is off, and with 0 where there is no
GPU.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --output gpu_check.json
"""

import argparse
import copy
import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from bench_cem_llama import diagonal_forms

import loopergy
from loopergy.modeling.kernels import (
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_simple_gla,
    gated_delta_rule,
    gla,
    kda,
    kernel_backend,
    recurrent_gated_delta_rule,
    recurrent_gla,
    recurrent_kda,
    recurrent_simple_gla,
    short_convolution,
    simple_gla,
)


class Family(NamedTuple):
    """The dispatcher of a recurrence, our torch kernels behind it, and what it takes."""

    dispatch: Callable
    chunk: Callable
    step: Callable
    decay: str
    delta: bool

    def options(self) -> dict[str, bool]:
        """Return what every call of the family is given."""
        return {"use_qk_l2norm_in_kernel": True} if self.delta else {}


FAMILIES = {
    "gated delta rule": Family(gated_delta_rule, chunk_gated_delta_rule, recurrent_gated_delta_rule, "head", True),
    "kda": Family(kda, chunk_kda, recurrent_kda, "channel", True),
    "simple gla": Family(simple_gla, chunk_simple_gla, recurrent_simple_gla, "head", False),
    "linear attention": Family(simple_gla, chunk_simple_gla, recurrent_simple_gla, "none", False),
    "gla": Family(gla, chunk_gla, recurrent_gla, "channel", False),
}
# Triton's float32 products are rounded to 10 bits (TF32) on the way in.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 1e-2}
# Length, heads, value heads, key width, value width, edges of packed documents, lowest log decay.
CASES = {
    "one token": (1, 4, 4, 64, 64, None, -0.5),
    "one token, wide values": (1, 4, 4, 64, 128, None, -0.5),
    "short": (33, 4, 4, 64, 64, None, -0.5),
    "ragged": (130, 4, 4, 64, 64, None, -0.5),
    "three heads, narrow": (257, 3, 3, 48, 96, None, -0.5),
    "K = V = 128": (512, 4, 4, 128, 128, None, -0.5),
    "K = 192, V = 384": (256, 2, 2, 192, 384, None, -0.5),
    "grouped heads": (200, 2, 6, 64, 64, None, -0.5),
    "packed": (300, 4, 4, 64, 64, (0, 1, 64, 129, 300), -0.5),
    "strong decay": (200, 4, 4, 64, 64, None, -200.0),
}
# Config class of a small model, and its fields.
MODELS = {
    "Ouro": ("Ouro", {}),
    "LT2, gdn and full": ("LT2", {}),
    "LT2, kda and window": ("LT2", {"layer_mixers": "kda*4,window", "sliding_window": 16}),
    "LT2, mamba2 and dsa": ("LT2", {"layer_mixers": "mamba2*4,dsa", "dsa_topk": 16}),
    "LT2, nsa": ("LT2", {"layer_mixers": "nsa"}),
    "CEM-Llama": ("CEMLlama", {"cem_diag": "none", "num_steps": 2}),
    "CEM-Llama, shared diagonal": ("CEMLlama", {"cem_diag": "shared", "num_steps": 2}),
    "CEM-Llama, diagonal per head": ("CEMLlama", {"cem_diag": "per_head", "num_steps": 2}),
    "NRGPT": ("NRGPT", {"max_position_embeddings": 128}),
}
# Batch, length, heads, key width, value width.
TIMED = [(8, 2048, 8, 128, 128), (1, 8192, 16, 128, 256), (4, 1, 16, 128, 256), (64, 1, 16, 128, 256)]


def draw(
    family: Family, case: tuple, dtype: torch.dtype, batch: int = 2
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    length, heads, value_heads, width, values, edges, lowest = case
    generator = torch.Generator("cuda").manual_seed(0)
    batch = batch if edges is None else 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device="cuda")

    documents = batch if edges is None else len(edges) - 1
    inputs = {
        "q": normal(batch, length, heads, width).to(dtype),
        "k": normal(batch, length, heads, width).to(dtype),
        "v": normal(batch, length, value_heads, values).to(dtype),
    }
    if family.decay != "none":
        channels = (width,) if family.decay == "channel" else ()
        inputs["g"] = lowest * uniform(batch, length, value_heads, *channels)
    if family.delta:
        inputs["beta"] = uniform(batch, length, value_heads).to(dtype)
    inputs["initial_state"] = normal(documents, value_heads, width, values)
    return inputs, None if edges is None else torch.tensor(edges, device="cuda")


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()


def errors_of(family: Family, case: tuple, dtype: torch.dtype, backward: bool) -> dict[str, float]:
    """Return the relative errors of output, state and, with `backward`, all gradients of the dispatcher."""
    inputs, edges = draw(family, case, dtype)
    results = []
    for rule, kind in ((family.dispatch, None), (family.chunk, torch.float64)):
        tensors = {name: (x if kind is None else x.to(kind)).requires_grad_(backward) for name, x in inputs.items()}
        with torch.set_grad_enabled(backward):
            output, state = rule(**tensors, output_final_state=True, cu_seqlens=edges, **family.options())
        found = {"output": output.detach(), "state": state.detach()}
        if backward:
            # The same loss weights for both, so that every gradient is asked for.
            weights = [torch.linspace(-1, 1, x.numel(), device="cuda").view(x.shape) for x in (output, state)]
            loss = (output.double() * weights[0]).sum() + (state.double() * weights[1]).sum()
            grads = torch.autograd.grad(loss, list(tensors.values()))
            found |= {f"grad {name}": grad for name, grad in zip(inputs, grads, strict=True)}
        results.append(found)
    return {name: relative(results[0][name], results[1][name]) for name in results[0]}


def check_cases(title: str, family: Family) -> list[dict]:
    rows = []
    for name, case in CASES.items():
        if case[1] != case[2] and family.decay == "channel" and not family.delta:
            continue
        for dtype in TOLERANCE:
            for backward in (False, True):
                row = {"case": f"{title}, {name}", "dtype": str(dtype).removeprefix("torch."), "backward": backward}
                try:
                    row["errors"] = errors_of(family, case, dtype, backward)
                    # Where nothing is left of the past, these gradients are rounding noise.
                    noise = ("grad g", "grad initial_state") if case[-1] < -100 else ()
                    judged = {key: error for key, error in row["errors"].items() if key not in noise}
                    worst = max(judged, key=lambda key: judged[key] if judged[key] == judged[key] else math.inf)
                    row["ok"] = judged[worst] < TOLERANCE[dtype]
                    note = f"worst {judged[worst]:.1e} in {worst}"
                except Exception as error:
                    row |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
                    note = row["error"][:150]
                rows.append(row)
                verdict, kind = "ok " if row["ok"] else "OFF", "f+b" if backward else "fwd"
                print(f"{verdict} {row['case']:42s} {row['dtype']:9s} {kind} {note}", flush=True)
    return rows


def check_continuation(title: str, family: Family) -> dict:
    """Prefill, then step by step, against one pass; and the convolution, against the CPU."""
    inputs, _ = draw(family, (80, 4, 4, 64, 64, None, -0.5), torch.bfloat16)
    state = inputs.pop("initial_state")
    options = {"output_final_state": True, **family.options()}
    with torch.no_grad():
        whole, last = family.dispatch(**inputs, initial_state=state, **options)
        outputs = []
        for start, stop in [(0, 70), *((t, t + 1) for t in range(70, 80))]:
            piece = {name: x[:, start:stop] for name, x in inputs.items()}
            output, state = family.dispatch(**piece, initial_state=state, **options)
            outputs.append(output)
        x, weight = torch.randn(2, 40, 96, device="cuda"), torch.randn(96, 4, device="cuda")
        gpu, cpu = short_convolution(x, weight), short_convolution(x.cpu(), weight.cpu())
    errors = {
        "output": relative(torch.cat(outputs, 1), whole),
        "state": relative(state, last),
        "convolution": relative(gpu.cpu(), cpu),
    }
    row = {
        "case": f"{title}, prefill and steps",
        "errors": errors,
        "ok": max(errors.values()) < TOLERANCE[torch.bfloat16],
    }
    print(f"{'ok ' if row['ok'] else 'OFF'} {row['case']:42s} {errors}")
    return row


def check_models(device: str) -> list[dict]:
    """Compare logits, gradients and cached logits of small models on a device with the logits of a CPU in float64."""
    rows = []
    for name, (family, fields) in MODELS.items():
        torch.manual_seed(0)
        try:
            config = getattr(loopergy, f"{family}Config").from_preset("tiny", **fields)
            exact = getattr(loopergy, f"{family}ForCausalLM")(config).double().eval()
            ids = torch.randint(3, config.vocab_size, (2, 70))
            found = [results_of(model, ids) for model in (copy.deepcopy(exact).float().to(device), exact)]
            errors = {key: relative(found[0][key].cpu(), found[1][key]) for key in found[1]}
            row = {"case": name, "errors": errors, "ok": max(errors.values()) < TOLERANCE[torch.float32]}
            note = ", ".join(f"{key} {error:.1e}" for key, error in errors.items())
        except Exception as error:
            row = {"case": name, "ok": False, "error": f"{type(error).__name__}: {error}"}
            note = row["error"][:150]
        rows.append(row)
        print(f"{'ok ' if row['ok'] else 'OFF'} {name:42s} {note}", flush=True)
    return rows


def results_of(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return logits, those of the last ten tokens from a cache, and the gradients of all parameters in one piece."""
    ids = ids.to(next(model.parameters()).device)
    logits = model(ids, use_cache=False).logits
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(logits.sin().sum(), parameters, allow_unused=True)
    with torch.no_grad():
        outputs = model(ids[:, :-10], use_cache=True)
        steps = []
        for token in ids[:, -10:].split(1, dim=1):
            outputs = model(token, cache=outputs.cache, use_cache=True)
            steps.append(outputs.logits)
    return {
        "logits": logits.detach(),
        "cached": torch.cat(steps, dim=1),
        "gradients": torch.cat([grad.flatten() for grad in grads if grad is not None]),
    }


def time_diagonals() -> list[dict]:
    """Time the forms of CEM-Llama's attention with a shared diagonal."""
    rows = []
    for length in (512, 2048, 8192):
        for training in (False, True):
            times = {name: milliseconds(form, 5) for name, form in diagonal_forms(length, training, "cuda").items()}
            rows.append({"length": length, "training": training, "ms": times})
            shown = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
            print(f"shared diagonal, {length} tokens, {'f+b' if training else 'fwd'}: {shown}", flush=True)
    return rows


def milliseconds(call: Callable[[], object], turns: int = 20) -> float:
    """Return the median time of a call by device events, after a warm-up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(turns):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def forward(rule: Callable, inputs: dict[str, torch.Tensor], options: dict[str, bool]) -> None:
    with torch.no_grad():
        rule(**inputs, output_final_state=True, **options)


def forward_backward(rule: Callable, inputs: dict[str, torch.Tensor], options: dict[str, bool]) -> None:
    tensors = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    output, _ = rule(**tensors, **options)
    output.backward(torch.ones_like(output))


def ceilings() -> tuple[float, float]:
    """Return the highest rates met here: of matrix products in TFLOP/s, of copies in GB/s."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = torch.zeros(2**28, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * 8192**3 / milliseconds(lambda: matrix @ matrix) / 1e9
    return rate, 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6


def time_shapes(title: str, family: Family, bandwidth: float) -> list[dict]:
    rows = []
    for batch, length, heads, width, values in TIMED:
        inputs, _ = draw(family, (length, heads, heads, width, values, None, -0.1), torch.bfloat16, batch)
        slow, options = family.step if length == 1 else family.chunk, family.options()
        row: dict = {"family": title, "shape": (batch, length, heads, width, values)}
        for kind, run in (("forward", forward), ("forward_backward", forward_backward)):
            if length == 1 and kind == "forward_backward":
                continue
            row[kind] = {
                "torch": milliseconds(partial(run, slow, inputs, options), 5),
                "dispatched": milliseconds(partial(run, family.dispatch, inputs, options)),
            }
            row[kind]["ratio"] = row[kind]["torch"] / row[kind]["dispatched"]
        touched = sum(x.nbytes for x in inputs.values()) + inputs["v"].nbytes + inputs["initial_state"].nbytes
        row["share_of_bandwidth"] = touched / row["forward"]["dispatched"] / 1e6 / bandwidth
        rows.append(row)
        shown = ", ".join(
            f"{kind} {row[kind]['torch']:.3f} -> {row[kind]['dispatched']:.3f} ms ({row[kind]['ratio']:.1f}x)"
            for kind in ("forward", "forward_backward")
            if kind in row
        )
        print(f"{title} {row['shape']}: {shown}; {row['share_of_bandwidth']:.0%} of the bandwidth", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    parser.add_argument("--no-timing", action="store_true", help="check only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device here: nothing to check.")
        return 0
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, kernels: {kernel_backend('cuda')}")
    # The comparison is about kernels, not about shortened float32 products in the torch path.
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, timings, diagonals = [], [], []
    for title, family in FAMILIES.items():
        rows += [*check_cases(title, family), check_continuation(title, family)]
    rows += check_models("cuda")
    if not options.no_timing:
        rate, bandwidth = ceilings()
        print(f"Ceilings: {rate:.0f} TFLOP/s in bfloat16 products, {bandwidth:.0f} GB/s in copies")
        for title, family in FAMILIES.items():
            timings += time_shapes(title, family, bandwidth)
        diagonals = time_diagonals()
    wrong = sorted({row["case"] for row in rows if not row["ok"]})
    agree = sum(row["ok"] for row in rows)
    print(f"{agree} of {len(rows)} cases agree" + (f"; off: {', '.join(wrong)}" if wrong else ""))
    if options.output:
        backend = kernel_backend("cuda")
        figures: dict = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "backend": backend.name}
        options.output.write_text(
            json.dumps({**figures, "cases": rows, "timings": timings, "diagonals": diagonals}, indent=2) + "\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
