# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold the baselines against the official numbers, and their caches against full runs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from loopergy import (
    GPTBaselineConfig,
    GPTBaselineForCausalLM,
    GPTBaselineForSequenceClassification,
    gpt_baseline_from_official,
    gpt_baseline_to_official,
)

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "nrgpt"
NAMES = {"GPT": "none", "GPT_Rec": "sequential", "GPT_Rec_parallel": "parallel"}


def load(name: str, dtype: torch.dtype) -> tuple[GPTBaselineForCausalLM, dict[str, torch.Tensor]]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        data = {key: torch.from_numpy(file[key]) for key in file}
    tensors = {key.removeprefix("param/"): value for key, value in data.items() if key.startswith("param/")}
    recurrent = {} if name == "GPT" else {"num_hidden_layers": 3, "recurrence": NAMES[name]}
    return gpt_baseline_from_official(tensors, **recurrent).to(dtype), data


def build(recurrence: str, **fields) -> GPTBaselineForCausalLM:
    torch.manual_seed(0)
    config = GPTBaselineConfig.from_preset("tiny", recurrence=recurrence, initializer_range=0.2, **fields)
    return GPTBaselineForCausalLM(config).double().eval()


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", list(NAMES))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_logits_and_parameter_gradients_are_the_official_ones(name, dtype, tolerance):
    model, data = load(name, dtype)
    logits = model(data["input_ids"]).logits
    torch.testing.assert_close(logits.double(), data["logits_f64"], rtol=0, atol=tolerance)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data["targets"].flatten())
    assert abs(float(loss.detach()) - float(data["loss_f64"])) < tolerance
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    found = gpt_baseline_to_official(model)
    wanted = {key.removeprefix("grad_f64/"): value for key, value in data.items() if key.startswith("grad_f64/")}
    assert len(wanted) > 10
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key].double(), gradient.double(), rtol=1.2e-7, atol=tolerance, msg=key)


@pytest.mark.parametrize("name", list(NAMES))
def test_greedy_texts_within_and_beyond_the_position_table_are_the_official_ones(name):
    model, data = load(name, torch.float64)
    short, long = data["greedy_ids"], data["greedy_ids_overflow"]
    assert model.generate(short[:, :5], max_new_tokens=8, do_sample=False).equal(short)
    assert model.generate(long[:, :10], max_new_tokens=12, do_sample=False, recompute_window=True).equal(long)
    with pytest.raises(ValueError, match="recompute_window=True"):
        model.generate(long[:, :10], max_new_tokens=12)


@pytest.mark.parametrize("recurrence", list(NAMES.values()))
def test_a_cached_and_a_padded_run_equal_the_full_run(recurrence):
    """Guards A1, A4, A6."""
    model, ids = build(recurrence), draw(2, 12)
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[:, :3] = 0
    with torch.no_grad():
        full = model(ids).logits
        cache = DynamicCache(config=model.config)
        parts = torch.cat([model(part, cache=cache).logits for part in ids.split([5, 1, 4, 2], dim=1)], dim=1)
        padded = model(torch.cat((draw(2, 3, seed=9), ids), dim=1), attention_mask=mask).logits[:, 3:]
    assert len(cache.layers) == 3
    torch.testing.assert_close(parts, full, rtol=0, atol=1e-10)
    torch.testing.assert_close(padded, full, rtol=0, atol=1e-10)


@pytest.mark.parametrize("recurrence", list(NAMES.values()))
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"cache_implementation": "static"}, {}], ids=str)
def test_every_way_of_generating_gives_the_text_of_a_run_without_cache(recurrence, options):
    model, ids = build(recurrence), draw(1, 8)
    beams = {key: value for key, value in options.items() if key == "num_beams"}
    common = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **common, **options).equal(model.generate(ids, use_cache=False, **common, **beams))


def test_parameters_depend_on_the_depth_of_a_gpt_only():
    counts = {
        recurrence: [
            sum(p.numel() for p in build(recurrence, num_hidden_layers=depth).parameters()) for depth in (2, 4)
        ]
        for recurrence in NAMES.values()
    }
    width, wide = 32, 128
    block = 4 * width**2 + width + 2 * width * wide + wide + width + 4 * width
    assert counts["none"][1] - counts["none"][0] == 2 * block
    assert counts["sequential"][0] == counts["sequential"][1] == counts["parallel"][0]
    listops = GPTBaselineForCausalLM(GPTBaselineConfig.from_preset("listops-64", hidden_size=50))
    assert sum(parameter.numel() for parameter in listops.parameters()) == 12 * 50**2 + 180 * 50 + 20


def test_the_classifier_scores_each_sequence():
    torch.manual_seed(0)
    model = GPTBaselineForSequenceClassification(GPTBaselineConfig.from_preset("tiny", num_labels=3)).eval()
    assert model(draw(2, 6), attention_mask=torch.ones(2, 6)).logits.shape == (2, 3)
