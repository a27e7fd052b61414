# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Tiny teachers with weights large enough for wrong code to show."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loopergy.configuration.configuration_ouro import OuroConfig
from loopergy.modeling.modeling_ouro import OuroForCausalLM


def shake(model, seed: int = 0):
    """Move every parameter off its initial value: norms of one and biases of zero would hide mixed-up tensors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture
def make_ouro():
    def make(loops: int = 3, dtype: torch.dtype = torch.float32, **fields) -> OuroForCausalLM:
        torch.manual_seed(0)
        settings = {"initializer_range": 0.2, "total_ut_steps": loops, "num_hidden_layers": 3, **fields}
        return shake(OuroForCausalLM._from_config(OuroConfig.from_preset("tiny", **settings), dtype=dtype))

    return make


@pytest.fixture
def make_llama():
    def make(dtype: torch.dtype = torch.float32, **fields) -> LlamaForCausalLM:
        torch.manual_seed(0)
        settings = {
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            **fields,
        }
        return shake(LlamaForCausalLM._from_config(LlamaConfig(**settings), dtype=dtype))

    return make


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 128, (2, 17), generator=torch.Generator().manual_seed(1))
