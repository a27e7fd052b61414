# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold the closed-form gradients against autograd of the energies, and the descent guarantee against experiments."""

import math
from types import SimpleNamespace

import pytest
import torch

from loopergy import NRGPTConfig, NRGPTModel
from loopergy.modeling.descent_guarantee import descent_conditions
from loopergy.modeling.kernels import energy_gradients
from loopergy.modeling.token_energies import EnergyAttention, FeedForwardEnergy, Neighbours

FORMS = ("ff1", "ff2", "ff2w")


def settings(**fields) -> SimpleNamespace:
    wanted = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20, "ff_energy": "ff2w"}
    wanted |= {"attention_beta": 1.0, "learn_alpha": False, "dropout": 0.0, "_attn_implementation": "sdpa"}
    return SimpleNamespace(**{**wanted, **fields})


def make(kind: type, seed: int = 0, **fields):
    torch.manual_seed(seed)
    module = kind(settings(**fields)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    return module


def states(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Gradients.


@pytest.mark.parametrize("form", FORMS)
def test_the_feed_forward_gradient_is_that_of_its_energy(form):
    ff, g = make(FeedForwardEnergy, ff_energy=form), states(2, 5, 12).requires_grad_()
    (wanted,) = torch.autograd.grad(ff.energy(g).sum(), g)
    torch.testing.assert_close(ff(g), wanted, rtol=0, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(ff(g), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_parameter_gradients_through_the_feed_forward_gradient_are_autograds(form):
    ff, g, weight = (
        make(FeedForwardEnergy, ff_energy=form),
        states(2, 5, 12).requires_grad_(),
        states(2, 5, 12, seed=4),
    )
    (gradient,) = torch.autograd.grad(ff.energy(g).sum(), g, create_graph=True)
    inputs = [g, *ff.parameters()]
    wanted = torch.autograd.grad((gradient * weight).sum(), inputs, allow_unused=True)
    found = torch.autograd.grad((ff(g) * weight).sum(), inputs, allow_unused=True)
    for ours, theirs in zip(found, wanted, strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("learn_alpha", [False, True])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_the_attention_gradient_is_that_of_each_tokens_energy_less_the_part_through_its_own_key(
    beta, learn_alpha, exclude_self
):
    attn, g = make(EnergyAttention, attention_beta=beta, learn_alpha=learn_alpha), states(1, 6, 12)
    neighbours = Neighbours(exclude_self=exclude_self)
    found, _ = attn(g, g, neighbours)
    eager = make(EnergyAttention, attention_beta=beta, learn_alpha=learn_alpha, _attn_implementation="eager")
    _, weights = eager(g, g, neighbours)
    alpha = torch.ones(3, dtype=torch.float64) if attn.alpha is None else attn.alpha
    matrices = attn.k_proj.weight.view(3, 12, 12)
    for token in range(6):
        own = g[:, [token]].clone().requires_grad_()
        joined = torch.cat((g[:, :token], own, g[:, token + 1 :]), dim=1)
        energy = attn.energy(joined, joined, neighbours)[0, token]
        if exclude_self and token == 0:
            assert float(energy.detach()) == 0
            assert found[0, 0].abs().max() == 0
            continue
        (wanted,) = torch.autograd.grad(energy, own)
        own_key = -torch.einsum("h,h,hde,d->e", alpha, weights[0, :, token, token], matrices, g[0, token])
        torch.testing.assert_close(found[0, token], wanted[0, 0] - own_key, rtol=0, atol=1e-12)
        assert (own_key.abs().max() == 0) == exclude_self


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize(("length", "new"), [(9, 9), (9, 1), (9, 3), (9, 6), (1, 1)])
def test_expanded_absorbed_eager_and_recomputed_attention_agree(exclude_self, length, new):
    g = states(2, length, 12)
    visible = torch.ones(1, 1, length, length, dtype=torch.bool).tril(-int(exclude_self))[:, :, -new:]
    wanted, _ = make(EnergyAttention, _attn_implementation="eager")(
        g[:, -new:], g, Neighbours.of(visible, exclude_self)
    )
    attn = make(EnergyAttention)
    cases = [Neighbours.of(visible, exclude_self)]
    if new in (1, length):
        cases.append(Neighbours(exclude_self=exclude_self))
    for case in cases:
        for with_gradient in (False, True):
            with torch.set_grad_enabled(with_gradient):
                torch.testing.assert_close(attn(g[:, -new:], g, case)[0], wanted, rtol=0, atol=1e-12)
                absorbed = (
                    -attn._attend_absorbed(g[:, -new:], g, case) if case.visible is not None or new == 1 else wanted
                )
                if not (exclude_self and length == 1):
                    torch.testing.assert_close(absorbed, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize(("length", "heads"), [(1, 2), (2, 2), (7, 5), (70, 2)])
def test_recomputed_attention_has_autograds_gradients(exclude_self, length, heads):
    """Guards F7: both with keys kept and with keys made again, and across the border of a block of queries."""
    g, weight = states(2, length, 4).requires_grad_(), (0.5 * states(heads * 4, 4, seed=5)).requires_grad_()
    keys = (g @ weight.t()).view(2, length, heads, 4).transpose(1, 2)
    allowed = torch.ones(length, length, dtype=torch.bool).tril(-int(exclude_self))
    scores = (0.7 * g[:, None] @ keys.transpose(2, 3)).masked_fill(~allowed, -1e30)
    wanted = ((scores.softmax(dim=-1) * allowed) @ keys).sum(dim=1)
    found = energy_gradients.causal_pull(g, weight, 0.7, exclude_self)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    direction = states(2, length, 4, seed=6)
    for ours, theirs in zip(
        torch.autograd.grad(found, (g, weight), direction),
        torch.autograd.grad(wanted, (g, weight), direction),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_slopes_of_the_gelu_have_their_own_slopes():
    z, u = states(40).requires_grad_(), states(40, seed=8).requires_grad_()
    assert torch.autograd.gradcheck(energy_gradients.slope_product, (u, z))
    w1, w2, b2 = states(40, 3, seed=9), states(3, 40, seed=10), states(3, seed=11)
    inputs = [tensor.requires_grad_() for tensor in (z[None].detach(), u[None].detach(), w1, w2, b2)]
    assert torch.autograd.gradcheck(energy_gradients.gelu_and_slope, inputs)


# Identities of the energies.


def test_attention_energy_is_minus_mean_score_minus_entropy():
    attn, g = make(EnergyAttention, _attn_implementation="eager"), states(1, 7, 12)
    _, weights = attn(g, g, Neighbours())
    scores = g[:, None] @ attn.keys(g).transpose(2, 3)
    free_energy = (weights * scores).sum(dim=-1) + torch.special.entr(weights).sum(dim=-1)
    torch.testing.assert_close(attn.energy(g, g, Neighbours()), -free_energy.sum(dim=1), rtol=0, atol=1e-12)


def test_attention_energy_has_its_lower_bound():
    attn, g = make(EnergyAttention), states(1, 7, 12)
    radius = float(g.norm(dim=-1).max())
    norms = torch.linalg.matrix_norm(attn.k_proj.weight.view(3, 12, 12), ord=2)
    bound = -(norms * radius**2).sum() - 3 * torch.arange(1, 8, dtype=torch.float64).log()
    assert (attn.energy(g, g, Neighbours())[0] >= bound).all()


def test_heads_and_hidden_units_may_change_places():
    attn, ff, g = make(EnergyAttention), make(FeedForwardEnergy), states(1, 5, 12)
    pulled, gradient = attn(g, g, Neighbours())[0], ff(g)
    with torch.no_grad():
        attn.k_proj.weight.copy_(attn.k_proj.weight.view(3, 12, 12)[[2, 0, 1]].flatten(0, 1))
        order = torch.randperm(20)
        ff.fc1.weight.copy_(ff.fc1.weight[order])
        ff.fc1.bias.copy_(ff.fc1.bias[order])
        ff.fc2.weight.copy_(ff.fc2.weight[:, order])
    torch.testing.assert_close(attn(g, g, Neighbours())[0], pulled, rtol=0, atol=1e-12)
    torch.testing.assert_close(ff(g), gradient, rtol=0, atol=1e-12)


def test_the_factor_of_ff2w_may_go_into_its_second_layer():
    ff, g = make(FeedForwardEnergy), states(1, 5, 12)
    wanted = 0.6 * ff(g)
    with torch.no_grad():
        ff.fc2.weight.mul_(0.6)
        ff.fc2.bias.mul_(0.6)
    torch.testing.assert_close(ff(g), wanted, rtol=0, atol=1e-12)


# Norms: what a step sees of the state.


def small_model(seed: int = 0, **fields) -> NRGPTModel:
    torch.manual_seed(seed)
    wanted = {"vocab_size": 50, "hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 40}
    wanted |= {"exclude_self": True, "eta_type": "scalar", "initializer_range": 0.3, "max_position_embeddings": 16}
    model = NRGPTModel(NRGPTConfig(**{**wanted, **fields})).double().eval()
    with torch.no_grad():
        if getattr(model.block.norm, "weight", None) is not None:
            model.block.norm.weight.add_(0.5 * torch.rand_like(model.block.norm.weight))
        if hasattr(model.block.eta, "weight") and model.config.eta_type in ("scalar", "gamma", "diag"):
            model.block.eta.weight.mul_(0.1)
    return model


@pytest.mark.parametrize("norm_type", ["bare_layernorm", "layernorm", "rmsnorm"])
def test_the_norms_jacobian_is_gamma_times_a_projection_over_the_width(norm_type):
    block = small_model(norm_type=norm_type).block
    x = states(12)
    gamma = getattr(block.norm, "weight", torch.ones(12, dtype=torch.float64)).detach()
    centred = x if norm_type == "rmsnorm" else x - x.mean()
    width = (centred.square().mean() + 1e-5).sqrt()
    unit = centred / width
    projection = torch.eye(12, dtype=torch.float64) - torch.outer(unit, unit) / 12
    if norm_type != "rmsnorm":
        projection = projection - 1 / 12
        assert (projection @ torch.ones(12, dtype=torch.float64)).abs().max() < 1e-12
    jacobian = torch.autograd.functional.jacobian(block.norm, x)
    torch.testing.assert_close(jacobian, torch.diag(gamma) @ projection / width, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(projection).min() > -1e-12


def test_an_update_does_not_see_constants_and_hardly_the_scale_of_the_state():
    block, x = small_model().block, states(1, 6, 12)
    update = block(x, Neighbours(exclude_self=True)) - x
    shifted, scaled = x + 3.0, 5 * x
    torch.testing.assert_close(block(shifted, Neighbours(exclude_self=True)) - shifted, update, rtol=0, atol=1e-12)
    assert (block.norm(scaled) - block.norm(x)).abs().max() < 1e-4


@pytest.mark.parametrize("norm_type", ["bare_layernorm", "rmsnorm"])
def test_the_tangent_projection_takes_what_the_norm_does_not_see(norm_type):
    plain, x = small_model(norm_type=norm_type, eta_type="full").block, states(1, 6, 12)
    neighbours = Neighbours(exclude_self=True)
    update = plain(x, neighbours) - x
    plain.tangent_projection = True
    projected = plain(x, neighbours) - x
    assert (update - projected).abs().max() > 1e-3
    assert (projected * x).sum(dim=-1).abs().max() < 1e-10
    jacobian = torch.autograd.functional.jacobian(plain.norm, x[0, 0])
    torch.testing.assert_close(jacobian @ projected[0, 0], jacobian @ update[0, 0], rtol=0, atol=1e-4)


# Descent.


def rises(model: NRGPTModel, x: torch.Tensor, steps: int) -> tuple[int, int]:
    """Count over a joint run how often one token's own step raises its energy with all others frozen; and for token 0
    how often the joint step does."""
    neighbours = Neighbours(exclude_self=model.config.exclude_self)
    alone = first = 0
    with torch.no_grad():
        for _ in range(steps):
            new, before = model.block(x, neighbours), model.block.energies(x, neighbours)[2][0]
            for token in range(x.shape[1]):
                moved = x.clone()
                moved[:, token] = new[:, token]
                after = model.block.energies(moved, neighbours)[2][0, token]
                alone += int(after > before[token] + 1e-12)
            first += int(model.block.energies(new, neighbours)[2][0, 0] > before[0] + 1e-12)
            x = new
    return alone, first


GUARANTEED = {
    "ff1": {"ff_energy": "ff1"},
    "ff2": {"ff_energy": "ff2"},
    "ff2w": {},
    "tangent": {"tangent_projection": True},
    "gamma": {"norm_type": "layernorm", "eta_type": "gamma"},
    "gamma-rms": {"norm_type": "rmsnorm", "eta_type": "gamma", "attention_beta": 0.7, "learn_alpha": True},
    "no-norm": {"norm_type": "none", "eta_type": "diag", "initializer_range": 0.1},
}


@pytest.mark.parametrize("case", list(GUARANTEED))
def test_each_token_descends_where_the_theory_promises_it(case):
    """Guards D7."""
    model = small_model(**GUARANTEED[case])
    assert descent_conditions(model).guaranteed
    assert rises(model, states(1, 6, 12), 25) == (0, 0)


def test_without_a_norm_any_rate_with_a_positive_symmetric_part_descends():
    model = small_model(norm_type="none", eta_type="full", initializer_range=0.1)
    with torch.no_grad():
        half = 0.05 * states(12, 12, seed=1)
        model.block.eta.weight.copy_(half @ half.t() + 0.05 * (states(12, 12, seed=2) - states(12, 12, seed=2).t()))
    assert descent_conditions(model).guaranteed
    assert rises(model, states(1, 6, 12), 25) == (0, 0)


def counter_examples():
    half = states(12, 12, seed=1)
    swirl = states(12, 12, seed=2)
    return {
        "random": 0.05 * half,
        "positive, not proportional to gamma": 0.01 * half @ half.t(),
        "gamma plus antisymmetric": 0.02 * torch.eye(12, dtype=torch.float64) + 0.05 * (swirl - swirl.t()),
    }


@pytest.mark.parametrize("case", list(counter_examples()))
def test_with_a_norm_other_rates_raise_energies_and_are_called_unsafe(case):
    """Guards D7: no promise where there is none."""
    model = small_model(eta_type="full")
    with torch.no_grad():
        model.block.eta.weight.copy_(counter_examples()[case])
    report = descent_conditions(model)
    assert not report.guaranteed
    assert [condition.name for condition in report.conditions if not condition.holds] == ["inference rate"]
    assert rises(model, states(1, 6, 12), 40)[0] > 0


def test_identity_rate_with_another_scale_is_called_unsafe():
    assert not descent_conditions(small_model(norm_type="layernorm", eta_type="identity")).guaranteed


def test_a_rate_may_add_the_same_to_all_dimensions_under_a_layer_norm():
    model = small_model(eta_type="full")
    with torch.no_grad():
        model.block.eta.weight.copy_(0.02 * torch.eye(12, dtype=torch.float64) + 0.1 * states(12, seed=4))
    assert descent_conditions(model).guaranteed
    assert rises(model, states(1, 6, 12), 25) == (0, 0)
    assert not descent_conditions(small_model(eta_type="full", norm_type="rmsnorm")).guaranteed


def test_with_the_own_token_among_the_neighbours_even_the_identity_can_raise_an_energy():
    model = small_model(exclude_self=False)
    with torch.no_grad():
        model.block.scale_ff.zero_()
        matrices = states(2, 12, 12, seed=5)
        model.block.attn.k_proj.weight.copy_((matrices - matrices.transpose(1, 2)).flatten(0, 1))
    report = descent_conditions(model)
    assert [condition.name for condition in report.conditions if not condition.holds] == ["exact gradient"]
    assert rises(model, states(1, 6, 12), 60)[0] > 0


def test_dropout_in_training_is_named():
    model = small_model(dropout=0.2)
    assert descent_conditions(model).guaranteed
    assert "no dropout" in str(descent_conditions(model.train()))
    assert not descent_conditions(model).guaranteed


def test_a_rate_of_zero_leaves_the_state_alone():
    model, x = small_model(eta_type="full"), states(1, 6, 12)
    with torch.no_grad():
        model.block.eta.weight.zero_()
        assert model.block(x, Neighbours(exclude_self=True)).equal(x)


def test_the_first_token_of_a_strict_model_descends_the_feed_forward_energy_alone():
    model, x = small_model(), states(1, 6, 12)
    neighbours = Neighbours(exclude_self=True)
    alone = x[:, :1]
    with torch.no_grad():
        for _ in range(10):
            g = model.block.norm(alone)
            alone = alone - model.block.scaled(model.block.scale_ff * model.block.ff(g))
            x = model.block(x, neighbours)
    torch.testing.assert_close(x[:, :1], alone, rtol=0, atol=1e-12)


def test_energies_are_float32_at_least():
    attn, ff = make(EnergyAttention).bfloat16(), make(FeedForwardEnergy).bfloat16()
    g = states(1, 5, 12).bfloat16()
    assert attn.energy(g, g, Neighbours()).dtype == ff.energy(g).dtype == torch.float32
    assert math.isfinite(float(attn.energy(g, g, Neighbours()).sum()))
