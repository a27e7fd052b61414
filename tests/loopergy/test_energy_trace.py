# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Traces hold the model's own energies, and count what rises."""

import json

import pytest
import torch

import loopergy
from loopergy.energy_trace import EnergyTrace, trace


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "nrgpt":
        config = loopergy.NRGPTConfig.from_preset("tiny", exclude_self=True, eta_type="scalar")
        return loopergy.NRGPTForCausalLM(config).double()
    config = loopergy.CEMLlamaConfig.from_preset("tiny", cem_mlp=kind != "cem-attention", initializer_range=0.2)
    return loopergy.CEMLlamaForCausalLM(config).double()


IDS = [5, 9, 3, 7, 7, 20]


@pytest.mark.parametrize("kind", ["nrgpt", "cem", "cem-attention"])
def test_energies_are_those_of_the_forward_pass(kind):
    model = build(kind).train()
    traced = trace(model, IDS, num_steps=4)
    assert model.training
    expected = model.eval().model(torch.tensor([IDS]), num_steps=4, output_energies=True).energies
    assert set(traced.energies) == {name for name, value in expected.items() if value is not None}
    for part, energies in traced.energies.items():
        assert torch.allclose(energies, expected[part][:, :, 0], rtol=0, atol=1e-12)
        assert energies.shape[1:] == (5, len(IDS))


def test_attention_of_cem_never_rises_and_the_share_says_so():
    traced = trace(build("cem"), IDS, num_steps=3)
    assert traced.share_rising("attention").eq(0).all()


def test_cem_tells_whether_its_preconditioners_are_definite():
    config = loopergy.CEMLlamaConfig.from_preset("tiny", cem_precond="dlr", initializer_range=0.2, cem_mlp=False)
    model = loopergy.CEMLlamaForCausalLM(config).double()
    assert trace(model, IDS).conditions.guaranteed
    precond = model.model.layers[1].self_attn.descent.precond
    with torch.no_grad():
        precond.d.fill_(-8)
        precond.V.copy_(-precond.U)
    traced = trace(model, IDS, num_steps=2)
    assert traced.share_rising("attention")[1].max() > 0
    assert not traced.conditions.guaranteed
    assert "layers.1.self_attn are not" in str(traced)
    with torch.no_grad():
        precond.reset_parameters()
    model.config.cem_norm_mode = "every_step"
    assert "[NO] norm: cem_norm_mode='every_step'" in str(trace(model, IDS))


def test_share_rising_counts_tokens_step_by_step():
    energies = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1.0, -1.0, -1.0, 0.0], [0.0, -2.0, 3.0, 1e-9]]]).double()
    traced = EnergyTrace({"total": energies}, list("abcd"))
    assert traced.share_rising("total").tolist() == [[0.25, 0.25]]
    assert traced.mean("total").tolist() == [[0.0, -0.25, pytest.approx(0.25)]]


def test_nrgpt_tells_how_far_it_is_from_rest_and_what_its_weights_promise():
    model = build("nrgpt")
    traced = trace(model, torch.tensor(IDS), num_steps=4)
    seen = model.eval().model(torch.tensor([IDS]), num_steps=4, output_hidden_states=True).hidden_states
    before, after = (model.model.block.norm(state)[0] for state in seen[:2])
    assert traced.state_change.shape == (4, len(IDS))
    assert torch.allclose(traced.state_change[0], (after - before).square().mean(-1).sqrt(), atol=1e-12)
    assert traced.conditions.guaranteed
    assert "descent: guaranteed" in str(traced)


def test_a_trace_is_written_and_drawn(tmp_path, topics_tokenizer):
    traced = trace(build("nrgpt"), IDS, tokenizer=topics_tokenizer)
    traced.to_json(tmp_path / "trace.json")
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read["tokens"] == topics_tokenizer.convert_ids_to_tokens(IDS)
    assert torch.allclose(torch.tensor(read["total"]["energies"]).double(), traced.energies["total"])
    traced.plot(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 10_000
    assert "feed_forward" in str(traced)


def test_what_has_no_energy_is_refused():
    with pytest.raises(ValueError, match="model_type='ouro' has no energies"):
        trace(loopergy.OuroForCausalLM(loopergy.OuroConfig.from_preset("tiny")), IDS)
    with pytest.raises(ValueError, match=r"shape \(2, 6\)"):
        trace(build("cem"), torch.tensor([IDS, IDS]))
    config = loopergy.CEMLlamaConfig.from_preset("tiny", cem_attention=False, cem_mlp=False)
    with pytest.raises(ValueError, match="No sub-layer"):
        trace(loopergy.CEMLlamaForCausalLM(config), IDS)
