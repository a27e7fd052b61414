# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Tiny teachers and students."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loopergy.configuration.configuration_ouro import OuroConfig
from loopergy.conversion import convert
from loopergy.modeling.modeling_ouro import OuroForCausalLM

LOOPS, LAYERS, VOCAB = 2, 3, 259
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def make_ouro(dtype=torch.float64, **options):
    """Return a random tiny Ouro whose logits differ clearly between tokens."""
    torch.manual_seed(1)
    values = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "num_loops": LOOPS, "initializer_range": 0.2}
    return OuroForCausalLM(OuroConfig(**{**SIZES, **values, **options})).to(dtype).eval()


def make_llama(dtype=torch.float64):
    """Return a random tiny Llama with shared key and value heads."""
    torch.manual_seed(1)
    config = LlamaConfig(
        **{**SIZES, "num_key_value_heads": 1},
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS,
        initializer_range=0.2,
        pad_token_id=0,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture
def ouro():
    return make_ouro()


@pytest.fixture
def new_ouro():
    """Return the function that makes one, for tests that need another size or dtype."""
    return make_ouro


@pytest.fixture
def llama():
    return make_llama()


@pytest.fixture(params=["ouro", "llama"])
def teacher(request):
    return make_ouro() if request.param == "ouro" else make_llama()


@pytest.fixture
def student(teacher):
    return convert(teacher, keep_layers=[]).model


@pytest.fixture
def random_batch():
    def make(rows=2, length=12, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return {"input_ids": torch.randint(3, VOCAB, (rows, length), generator=generator)}

    return make
