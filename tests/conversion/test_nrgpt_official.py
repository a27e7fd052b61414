# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Read the official checkpoints, write them back bit for bit, and refuse what does not fit or is not told."""

from pathlib import Path

import numpy as np
import pytest
import torch

from loopergy import (
    GPTBaselineConfig,
    GPTBaselineForCausalLM,
    NRGPTConfig,
    NRGPTForCausalLM,
    gpt_baseline_from_official,
    gpt_baseline_to_official,
    nrgpt_from_official,
    nrgpt_to_official,
)
from loopergy.conversion import ConversionError

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "nrgpt"
CHECKPOINT = GOLDEN / "official_ckpt_FF2W.pt"


def content() -> dict:
    return torch.load(CHECKPOINT, weights_only=True)


def small(**fields) -> NRGPTForCausalLM:
    torch.manual_seed(0)
    return NRGPTForCausalLM(NRGPTConfig.from_preset("tiny", max_position_embeddings=8, **fields))


@pytest.mark.parametrize("source", [CHECKPOINT, str(CHECKPOINT), "content"])
def test_the_official_checkpoint_gives_the_official_logits(source):
    model = nrgpt_from_official(content() if source == "content" else source)
    with np.load(GOLDEN / "official_ckpt_FF2W_expected.npz") as file:
        ids, wanted, exact = (torch.from_numpy(file[key]) for key in ("input_ids", "logits_f32", "logits_f64"))
    assert (model.config.num_hidden_layers, model.config.exclude_self, model.config.ff_energy) == (3, False, "ff2w")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(model.double()(ids).logits, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_a_bare_state_dict_goes_in_and_comes_out_bit_for_bit(prefix):
    official = {key.removeprefix("_orig_mod."): value for key, value in content()["model"].items()}
    model = nrgpt_from_official({prefix + key: value for key, value in official.items()}, num_hidden_layers=3)
    written = nrgpt_to_official(model)
    assert set(written) == set(official)
    for key, value in official.items():
        assert written[key].equal(value), key
        assert written[key].dtype == value.dtype, key


@pytest.mark.parametrize("form", ["ff1", "ff2", "ff2w"])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_what_tensors_tell_is_read_off_them(form, exclude_self):
    model = small(ff_energy=form, exclude_self=exclude_self, intermediate_size=48, num_attention_heads=3)
    back = nrgpt_from_official(nrgpt_to_official(model), num_hidden_layers=3)
    fields = ("ff_energy", "exclude_self", "intermediate_size", "num_attention_heads", "hidden_size", "vocab_size")
    assert [getattr(back.config, name) for name in fields] == [getattr(model.config, name) for name in fields]
    ids = torch.randint(128, (1, 8))
    with torch.no_grad():
        assert back(ids).logits.equal(model.eval()(ids).logits)


@pytest.mark.parametrize("eta_type", ["scalar", "diag", "identity", "gamma"])
def test_a_diagonal_rate_is_written_as_the_matrix_that_it_is(eta_type):
    model = small(eta_type=eta_type).double().eval()
    with torch.no_grad():
        for parameter in model.model.block.eta.parameters():
            parameter.copy_(torch.linspace(0.3, 0.9, parameter.numel()))
    back, ids = nrgpt_from_official(nrgpt_to_official(model), num_hidden_layers=3), torch.randint(128, (1, 8))
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_type": "rmsnorm"},
        {"attention_beta": 0.5},
        {"learn_alpha": True},
        {"tangent_projection": True},
        {"lm_head_bias": False},
        {"layer_norm_eps": 1e-2},
        {"stop_tolerance": 5.0},
    ],
)
def test_what_the_official_code_cannot_express_is_refused_by_name(fields):
    with pytest.raises(ConversionError, match=next(iter(fields))):
        nrgpt_to_official(small(**fields))


def test_what_nothing_tells_is_asked_for():
    tensors = nrgpt_to_official(small())
    with pytest.raises(ConversionError, match="pass num_hidden_layers="):
        nrgpt_from_official(tensors)
    bare = {key: value for key, value in tensors.items() if "tril" not in key}
    with pytest.raises(ConversionError, match="pass exclude_self=True"):
        nrgpt_from_official(bare, num_hidden_layers=3)
    assert nrgpt_from_official(bare, num_hidden_layers=3, exclude_self=True).config.exclude_self
    square = nrgpt_to_official(small(intermediate_size=32))
    with pytest.raises(ConversionError, match="ff_energy='ff2' or 'ff2w'"):
        nrgpt_from_official(square, num_hidden_layers=3)
    assert nrgpt_from_official(square, num_hidden_layers=3, ff_energy="ff2w").config.intermediate_size == 32


def test_what_is_told_otherwise_is_an_error():
    with pytest.raises(ConversionError, match="exclude_self=True was given, but the checkpoint says False"):
        nrgpt_from_official(CHECKPOINT, exclude_self=True)


def test_given_steps_and_fields_win_over_the_file():
    model = nrgpt_from_official(CHECKPOINT, num_hidden_layers=5, dropout=0.1)
    assert (model.config.num_hidden_layers, model.config.dropout) == (5, 0.1)


def test_missing_extra_and_misshapen_tensors_are_errors():
    """Guards E12."""
    tensors = nrgpt_to_official(small())
    lacking = {key: value for key, value in tensors.items() if key != "blocks.proj.weight"}
    with pytest.raises(ConversionError, match=r"missing: \['blocks.proj.weight'\]"):
        nrgpt_from_official(lacking, num_hidden_layers=3)
    with pytest.raises(ConversionError, match=r"left over: \['blocks.noise'\]"):
        nrgpt_from_official({**tensors, "blocks.noise": torch.zeros(1)}, num_hidden_layers=3)
    with pytest.raises(ConversionError, match=r"eta.weight would have shape \[2, 2\]"):
        nrgpt_from_official({**tensors, "blocks.proj.weight": torch.zeros(2, 2)}, num_hidden_layers=3)
    with pytest.raises(ConversionError, match=r"blocks\.ln\.weight is not all ones"):
        nrgpt_from_official({**tensors, "blocks.ln.weight": torch.zeros(32)}, num_hidden_layers=3)
    with pytest.raises(ConversionError, match="not a model of the official"):
        nrgpt_from_official({"a": torch.zeros(1)}, num_hidden_layers=3)
    with pytest.raises(ConversionError, match="not a tensor"):
        nrgpt_from_official({**tensors, "epoch": 3}, num_hidden_layers=3)


def test_a_file_that_could_run_code_is_refused(tmp_path):
    torch.save({"model": nrgpt_to_official(small()), "config": Path("runs")}, tmp_path / "run.pt")
    with pytest.raises(ConversionError, match="could run code"):
        nrgpt_from_official(tmp_path / "run.pt")
    with pytest.raises(ConversionError, match="not a file"):
        nrgpt_from_official(tmp_path / "none.pt")


def test_what_is_in_a_file_is_checked_before_it_is_used(tmp_path):
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ConversionError, match=r"list\.pt' holds a list"):
        nrgpt_from_official(tmp_path / "list.pt")
    with pytest.raises(ConversionError, match="source is a list"):
        nrgpt_from_official([1])
    with pytest.raises(ConversionError, match="model_args is a str"):
        nrgpt_from_official({"model": {}, "model_args": "x"})
    tensors = nrgpt_to_official(small())
    with pytest.raises(ConversionError, match=r"'blocks\.ffwd\.net\.0\.weight' has shape \[3\], but must be a matrix"):
        nrgpt_from_official({**tensors, "blocks.ffwd.net.0.weight": torch.ones(3)}, 3)


def test_fields_that_the_config_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"NRGPTConfig has no field oops; it has .*num_hidden_layers"):
        nrgpt_from_official(CHECKPOINT, oops=1)
    baseline = gpt_baseline_to_official(
        GPTBaselineForCausalLM(GPTBaselineConfig.from_preset("tiny", recurrence="none"))
    )
    with pytest.raises(ValueError, match="GPTBaselineConfig has no field oops"):
        gpt_baseline_from_official(baseline, oops=1)
    assert gpt_baseline_from_official(baseline, dtype="float64").dtype == torch.float64


def test_known_vocabularies_bring_their_end_of_text():
    assert nrgpt_from_official(nrgpt_to_official(small(vocab_size=20)), 3).config.eos_token_id == 0
    assert nrgpt_from_official(nrgpt_to_official(small()), 3).config.eos_token_id is None


@pytest.mark.parametrize("recurrence", ["none", "sequential", "parallel"])
def test_baselines_go_in_and_come_out(recurrence):
    torch.manual_seed(0)
    model = GPTBaselineForCausalLM(
        GPTBaselineConfig.from_preset("tiny", recurrence=recurrence, max_position_embeddings=8)
    )
    tensors = gpt_baseline_to_official(model)
    assert ("blocks.1.sa.heads.0.tril" in tensors) == (recurrence == "none")
    given = {} if recurrence == "none" else {"num_hidden_layers": 3, "recurrence": recurrence}
    back = gpt_baseline_from_official(tensors, **given)
    assert back.config.recurrence == recurrence
    assert all(value.equal(model.state_dict()[name]) for name, value in back.state_dict().items())
    written = gpt_baseline_to_official(back)
    assert set(written) == set(tensors)


def test_a_baselines_class_is_read_from_its_file_or_asked_for():
    model = GPTBaselineForCausalLM(GPTBaselineConfig.from_preset("tiny", recurrence="sequential"))
    tensors = gpt_baseline_to_official(model)
    with pytest.raises(ConversionError, match="pass recurrence="):
        gpt_baseline_from_official(tensors, 3)
    file = {"model": tensors, "model_args": {"n_layer": 4}, "config": {"model_path": "models.GPT_Rec"}}
    config = gpt_baseline_from_official(file).config
    assert (config.recurrence, config.num_hidden_layers) == ("sequential", 4)
    with pytest.raises(ConversionError, match="recurrence='parallel' was given"):
        gpt_baseline_from_official(file, recurrence="parallel")


def test_the_two_readers_name_each_other():
    baseline = GPTBaselineForCausalLM(GPTBaselineConfig.from_preset("tiny"))
    with pytest.raises(ConversionError, match="use gpt_baseline_from_official"):
        nrgpt_from_official(gpt_baseline_to_official(baseline), 3)
    with pytest.raises(ConversionError, match="not a baseline"):
        gpt_baseline_from_official(nrgpt_to_official(small()), 3)
    relu = GPTBaselineForCausalLM(GPTBaselineConfig.from_preset("tiny", hidden_act="gelu"))
    with pytest.raises(ConversionError, match="hidden_act"):
        gpt_baseline_to_official(relu)
    other = GPTBaselineForCausalLM(GPTBaselineConfig.from_preset("tiny", layer_norm_eps=1e-2))
    with pytest.raises(ConversionError, match=r"the official code has no layer_norm_eps=0\.01"):
        gpt_baseline_to_official(other)


class Trap:
    """Run something when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_file_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    torch.save({"model": content()["model"], "trap": Trap(tmp_path / "sprung")}, tmp_path / "checkpoint.pt")
    with pytest.raises(ConversionError, match="could run code"):
        nrgpt_from_official(tmp_path / "checkpoint.pt", num_hidden_layers=3)
    assert not (tmp_path / "sprung").exists()
