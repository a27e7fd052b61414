# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from loopergy import LT2Config
from loopergy.modeling.building_blocks import GatedMLP, RMSNorm, RotaryEmbedding
from loopergy.modeling.mixers.attention import Attention


def build(**fields) -> tuple[Attention, RotaryEmbedding]:
    torch.manual_seed(0)
    config = LT2Config.from_preset("tiny", layer_mixers="full", **fields)
    config._attn_implementation = "sdpa"
    return Attention(config, 0, bias=True).eval(), RotaryEmbedding(config)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@torch.no_grad()
def test_attention_equals_that_of_llama(kv_heads):
    mixer, rotary = build(num_key_value_heads=kv_heads)
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=kv_heads, attention_bias=True, head_dim=16
    )
    config._attn_implementation = "sdpa"
    peer = LlamaAttention(config, 0).eval()
    peer.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 9, 64)
    tables = rotary(x, torch.arange(9)[None])
    assert torch.equal(mixer(x, tables)[0], peer(x, tables, attention_mask=None)[0])


@pytest.mark.parametrize("cast", ["before_weight", "after_weight"])
def test_norms_keep_the_type_and_differ_in_rounding_only(cast):
    norm = RMSNorm(64, cast=cast)
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(3, 64, dtype=torch.float64)
    expected = x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm.double()(x), expected, rtol=0, atol=1e-12)
    half = norm.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_rotary_tables_are_exact_to_float64_for_float64_models():
    _, rotary = build()
    position = torch.tensor([[123_456]])
    cos, _ = rotary(torch.zeros(1, dtype=torch.float64), position)
    assert cos.dtype == torch.float64
    expected = (position * rotary.inv_freq.double()).cos()
    torch.testing.assert_close(cos[0, 0, :8], expected[0], rtol=0, atol=1e-12)
    assert rotary(torch.zeros(1, dtype=torch.bfloat16), position)[0].dtype == torch.bfloat16


def test_the_mlp_is_gated():
    config = LT2Config.from_preset("tiny")
    mlp, x = GatedMLP(config), torch.randn(2, 64)
    expected = mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert torch.equal(mlp(x), expected)
