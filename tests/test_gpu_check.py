# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The script that checks a GPU, on what of it needs none."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_check")


def test_small_models_of_all_families_agree_with_float64(gpu_check):
    rows = gpu_check.check_models("cpu")
    assert [row["case"] for row in rows] == list(gpu_check.MODELS)
    assert all(row["ok"] for row in rows), rows
    assert all(set(row["errors"]) == {"logits", "cached", "gradients"} for row in rows)


def test_a_model_that_is_off_or_fails_is_told(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "MODELS", {"Ouro": ("Ouro", {}), "no loops": ("LT2", {"num_loops": 0})})
    given = gpu_check.results_of
    monkeypatch.setattr(
        gpu_check,
        "results_of",
        lambda model, ids: {
            key: value * (1 if model.dtype.itemsize == 8 else 1.1) for key, value in given(model, ids).items()
        },
    )
    off = gpu_check.check_models("cpu")
    assert [row["ok"] for row in off] == [False, False]
    assert "num_loops" in off[1]["error"]
