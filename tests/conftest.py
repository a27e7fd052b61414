# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Keep the tests offline, seeded and on one thread each; share a tokenizer and a text that need no download."""

import os

# Read by the libraries when they are first imported, so set before any of them is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import random
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TRANSFORMERS_MARKERS = (
    "accelerate_tests",
    "all_flash_attn_test",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "generate",
    "torch_compile_test",
)


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker one thread: two workers on two cores are faster than two that fight over both."""
    torch.set_num_threads(1)
    for name in TRANSFORMERS_MARKERS if os.environ.get("LOOPERGY_TRANSFORMERS_TESTS") else ():
        config.addinivalue_line("markers", f"{name}: used by transformers' own model tests")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the repository's folder."""
    return ROOT


@pytest.fixture(scope="session")
def topics() -> list[str]:
    """Return the documents of Python's own help, sorted by name: real English text that every machine has."""
    from pydoc_data.topics import topics as documents

    return [documents[name] for name in sorted(documents)]


@pytest.fixture(scope="session")
def topics_tokenizer(topics):
    """Train a byte-level BPE of 1,024 tokens on the topics, with Ouro's special tokens at Ouro's ids 0, 1 and 2."""
    from loopergy.training.new_tokenizer import train_tokenizer

    return train_tokenizer(topics, 1024)


@pytest.fixture(scope="session")
def byte_tokenizer():
    """Return a tokenizer with `<pad>` 0, `<eos>` 1, `<unk>` 2 and byte b at b + 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<eos>", "<unk>", *alphabet]
    backend = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


@pytest.fixture(scope="session")
def run_in_chunks():
    """Feed token ids to a causal model in pieces; return the logits of all of them and the cache."""

    def run(model, ids, sizes, cache=None, **kwargs):
        logits, start = [], 0
        for size in sizes:
            outputs = model(ids[:, start : start + size], cache=cache, use_cache=True, **kwargs)
            logits.append(outputs.logits)
            cache, start = outputs.cache, start + size
        return torch.cat(logits, dim=1), cache

    return run


@pytest.fixture(scope="session")
def shifted_nrgpt():
    """Build a tiny NRGPT in float64 whose biases and scales are moved off their starts."""
    from loopergy import NRGPTConfig, NRGPTForCausalLM

    def build(**fields):
        torch.manual_seed(0)
        config = NRGPTConfig.from_preset("tiny", **{"initializer_range": 0.2, **fields})
        model = NRGPTForCausalLM(config).double().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "bias" in name or parameter.ndim == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
        return model

    return build
