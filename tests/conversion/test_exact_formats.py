# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""A checkpoint in another format computes the same, from folder to folder."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import loopergy
from loopergy.conversion import ConversionError
from loopergy.conversion.exact_formats import convert_format

GOLDEN = Path(__file__).parents[1] / "golden" / "nrgpt"
IDS = torch.arange(3, 17)[None]


@pytest.fixture
def cem(tmp_path, topics_tokenizer):
    """Save a CEM-Llama that a Llama can express, with a tokenizer."""
    torch.manual_seed(0)
    config = loopergy.CEMLlamaConfig.from_preset("tiny", cem_diag="none", cem_rope_values="plain", cem_precond="dlr")
    loopergy.CEMLlamaForCausalLM(config).save_pretrained(tmp_path / "cem")
    topics_tokenizer.save_pretrained(tmp_path / "cem")
    return tmp_path / "cem"


def logits(folder) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits


def test_cem_llama_becomes_a_llama_with_its_tokenizer(cem, tmp_path):
    model = convert_format(cem, "llama", tmp_path / "llama")
    assert isinstance(model, LlamaForCausalLM)
    assert torch.allclose(logits(tmp_path / "llama"), logits(cem), atol=1e-5)
    assert (tmp_path / "llama" / "tokenizer.json").is_file()


def test_any_llama_becomes_a_cem_llama_whose_sub_layers_stay_as_they_are(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    convert_format(tmp_path / "llama", "cem_llama", tmp_path / "cem", cem_attention=False, cem_mlp=False)
    assert torch.allclose(logits(tmp_path / "cem"), logits(tmp_path / "llama"), atol=1e-5)
    with pytest.raises(ConversionError, match="layer"):
        convert_format(tmp_path / "llama", "cem_llama", tmp_path / "tied")
    assert not (tmp_path / "tied").exists()


def test_an_official_nrgpt_file_becomes_a_folder(tmp_path):
    checkpoint = GOLDEN / "official_ckpt_FF2W.pt"
    model = convert_format(checkpoint, "nrgpt", tmp_path / "nrgpt")
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "nrgpt"), model(IDS).logits)


def test_the_wrong_kind_of_source_is_named(cem, tmp_path):
    with pytest.raises(ConversionError, match="of type 'cem_llama'; 'cem_llama' is made from 'llama'"):
        convert_format(cem, "cem_llama", tmp_path / "out")
    with pytest.raises(ConversionError, match="target='gguf'"):
        convert_format(cem, "gguf", tmp_path / "out")
    with pytest.raises(ValueError, match="the conversion to 'llama' has no option tolerance; it has none"):
        convert_format(cem, "llama", tmp_path / "out", tolerance=1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"oops": 1}, "'cem_llama' has no option oops; it has cem_attention, cem_mlp, tolerance"),
        ({"tolerance": "oops"}, r"tolerance='oops' must be a float, such as 1e-06"),
        ({"cem_mlp": 1}, "cem_mlp=1 must be a bool"),
    ],
)
def test_options_that_a_rewriting_does_not_have_are_refused(cem, tmp_path, options, says):
    convert_format(cem, "llama", tmp_path / "llama")
    with pytest.raises(ValueError, match=says):
        convert_format(tmp_path / "llama", "cem_llama", tmp_path / "back", **options)


def test_a_checkpoint_that_lacks_tensors_is_not_filled_up(cem, tmp_path):
    state = load_file(cem / "model.safetensors")
    del state["model.layers.0.mlp.up_proj.weight"]
    save_file(state, cem / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"missing: model\.layers\.0\.mlp\.up_proj\.weight"):
        convert_format(cem, "llama", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_dtype_asked_for_is_written(cem, tmp_path):
    assert convert_format(cem, "llama", tmp_path / "llama", dtype="bfloat16").dtype == torch.bfloat16
    checkpoint = GOLDEN / "official_ckpt_FF2W.pt"
    convert_format(checkpoint, "nrgpt", tmp_path / "nrgpt", dtype=torch.float64)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "nrgpt").dtype == torch.float64
    with pytest.raises(ValueError, match="dtype='float8_e4m3fn' is not one of"):
        convert_format(cem, "llama", tmp_path / "out", dtype="float8_e4m3fn")
    with pytest.raises(ConversionError, match="revision='x' is for a Hub id"):
        convert_format(checkpoint, "nrgpt", tmp_path / "out", revision="x")


def test_the_source_is_not_overwritten(cem):
    with pytest.raises(ValueError, match="made from; give another folder"):
        convert_format(cem, "llama", cem, overwrite=True)
    assert (cem / "model.safetensors").is_file()
