# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The energy of a token alone, its descent, and what all descents share: preconditioner, norm, step size."""

import math

import pytest
import torch
from causal_energies_by_hand import LENGTH, close, closures, config, filled, norm_of, randn, torch64
from torch.nn import functional as F
from transformers.activations import ACT2FN

from loopergy.modeling.building_blocks import RMSNorm
from loopergy.modeling.causal_energies import EnergyDescent, NormedStream, Preconditioner, potential, pull_back
from loopergy.modeling.modeling_cem_llama import CEMMLP


@torch.no_grad()
def test_elementwise_energy_and_its_gradient_have_the_golden_numbers():
    mlp = CEMMLP(config(hidden_size=8, intermediate_size=6)).double()
    norm, h = RMSNorm(8, eps=1e-6).double(), torch.sin(1 + torch.arange(24, **torch64)).view(1, 3, 8)
    norm.weight.copy_(1 + 0.1 * torch.sin(torch.arange(8, **torch64)))
    index = torch.arange(48, **torch64).view(6, 8)
    mlp.up_proj.weight.copy_(0.5 * torch.sin(0.4 * index))
    mlp.gate_proj.weight.copy_(0.5 * torch.cos(0.6 * index))
    force, energies = mlp(norm(h), NormedStream(h, norm), output_energies=True)
    close(energies[0, 0], [-0.002809691315, 0.055429438776, 0.001140032949])
    first = [-0.006506733133, -0.011404299456, -0.014501377652, -0.015309007173]
    close(force[0, 2], [*first, -0.013699681076, -0.009927476566, -0.004587941792, 0.001475928112])


@pytest.mark.parametrize("form", ["tied", "gate"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "tanh"])
def test_one_mlp_step_is_the_gradient_of_its_energy(form, bias, activation):
    """Guards D7."""
    mlp = filled(CEMMLP(config(cem_mlp_act_on=form, mlp_bias=bias, hidden_act=activation)))
    u = randn(1, LENGTH, 16, scale=2.0)
    force, energy = closures(mlp, u)
    x = randn(1, LENGTH, 16, seed=4).requires_grad_()
    (gradient,) = torch.autograd.grad(energy(x).sum(), x)
    torch.testing.assert_close(force(x), -gradient, rtol=0, atol=1e-10)


@torch.no_grad()
def test_one_mlp_step_is_llamas_mlp_with_a_tied_way_down():
    u, norm = randn(2, LENGTH, 16), norm_of(16)
    tied = filled(CEMMLP(config()))
    up, gate = tied.up_proj, tied.gate_proj
    assert torch.equal(tied(u, NormedStream(u, norm))[0], F.silu(up(u)) * gate(u) @ up.weight)
    on_gate = filled(CEMMLP(config(cem_mlp_act_on="gate")))
    assert torch.equal(on_gate(u, NormedStream(u, norm))[0], F.silu(gate(u)) * up(u) @ up.weight)


@pytest.mark.parametrize("form", ["tied", "gate"])
def test_mlp_steps_below_the_bound_descend_and_the_jacobian_is_symmetric(form):
    """Guards D7: the gate stays that of the layer's input, so that the map has a potential."""
    mlp = filled(CEMMLP(config(cem_mlp_act_on=form)))
    u = randn(1, LENGTH, 16)
    force, energy = closures(mlp, u)
    gate = mlp.gate_proj(u) if form == "tied" else F.silu(mlp.gate_proj(u))
    steepest = 1.09984 if form == "tied" else 1.0
    bound = 2 / (torch.linalg.matrix_norm(mlp.up_proj.weight, 2) ** 2 * gate.abs().amax(-1, keepdim=True) * steepest)
    with torch.no_grad():
        for share in (0.01, 0.3, 0.99):
            x = u
            for _ in range(6):
                lower = x + share * bound * force(x)
                assert bool((energy(lower) <= energy(x) + 1e-12).all())
                x = lower
    jacobian = torch.autograd.functional.jacobian(lambda x: force(x[None, None].expand(1, LENGTH, 16))[0, 2], u[0, 2])
    torch.testing.assert_close(jacobian, jacobian.T, rtol=0, atol=1e-12)
    assert jacobian.abs().max() > 0.01


def test_potentials_are_integrals_of_their_activations():
    z = torch.linspace(-60, 60, 241, **torch64).requires_grad_()
    for name, tolerance in (("silu", 1e-8), ("swish", 1e-8), ("relu", 1e-2), ("gelu", 1e-5)):
        (slope,) = torch.autograd.grad(potential(ACT2FN[name], z).sum(), z)
        torch.testing.assert_close(slope, ACT2FN[name](z.detach()), rtol=0, atol=tolerance * 60)
    silu = potential(ACT2FN["silu"], torch.tensor([-1000.0, 0.0, 1000.0], **torch64))
    expected = [math.pi**2 / 12, 0.0, 500000 - math.pi**2 / 12]
    torch.testing.assert_close(silu, torch.tensor(expected, **torch64), rtol=0, atol=1e-9)
    near = torch.linspace(-9, 9, 37, **torch64)
    density, share = (-near * near / 2).exp() / math.sqrt(2 * math.pi), torch.special.ndtr(near)
    closed = ((near * near - 1) * share + near * density) / 2 + 0.25
    torch.testing.assert_close(potential(ACT2FN["gelu"], near), closed, rtol=0, atol=1e-12)


# Preconditioner, norm, step size.


@torch.no_grad()
def test_the_preconditioner_is_the_symmetric_matrix_of_its_formula():
    p = filled(Preconditioner(16, 3))
    dense = torch.diag(F.softplus(p.d)) + p.U @ p.V.T + p.V @ p.U.T
    x = randn(2, 5, 16)
    torch.testing.assert_close(p(x), x @ dense.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(p.dense(), dense, rtol=0, atol=1e-12)
    diagonal = filled(Preconditioner(16, 0))
    torch.testing.assert_close(diagonal.dense(), torch.diag(F.softplus(diagonal.d)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_fresh_preconditioner_is_the_identity_and_can_learn(rank):
    p = Preconditioner(16, rank)
    torch.testing.assert_close(p.dense(), torch.eye(16), rtol=0, atol=2e-7)
    p(torch.randn(8, 16)).square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for name, parameter in p.named_parameters() if name != "U")


def test_pulling_back_through_a_norm_is_its_transposed_jacobian():
    norm, x, g = norm_of(16), randn(3, 16).requires_grad_(), randn(3, 16, seed=1)
    (expected,) = torch.autograd.grad(norm(x), x, g)
    torch.testing.assert_close(pull_back(norm, x, g), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("learn", [True, False])
@torch.no_grad()
def test_the_moves_add_up_to_step_size_times_preconditioned_forces(divide, learn):
    fields = {"cem_step_size": 0.8, "cem_learn_step_size": learn, "cem_step_size_div_steps": divide}
    descent = EnergyDescent(config(**fields, cem_precond="dlr", cem_attn_steps=4), "cem_attn_steps").double()
    filled(descent.precond)
    u, seen = randn(2, 3, 16), []

    def force(x):
        seen.append(torch.sin(x))
        return seen[-1]

    move, _ = descent(force, u, NormedStream(u, norm_of(16)))
    eta = (0.8 if not learn else descent.step_size) / (4 if divide else 1)
    assert len(seen) == 4
    torch.testing.assert_close(move, eta * descent.precond(sum(seen)), rtol=0, atol=1e-12)
    assert [name for name, _ in descent.named_parameters() if "step" in name] == (["step_size"] if learn else [])
