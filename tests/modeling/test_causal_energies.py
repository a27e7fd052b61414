# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The interaction energy and its descent, against literal per-token sums, autograd and golden numbers, in float64."""

import math

import pytest
import torch
from causal_energies_by_hand import (
    LENGTH,
    close,
    closures,
    config,
    energy_by_hand,
    filled,
    norm_of,
    randn,
    tables,
    torch64,
)
from torch.nn import functional as F

from loopergy.modeling.building_blocks import RMSNorm, rotate
from loopergy.modeling.causal_energies import (
    DiagonalPart,
    NormedStream,
    interaction_energy,
    interaction_force,
    query_chunks,
    visible_scores,
)
from loopergy.modeling.modeling_cem_llama import CEMAttention

DIAGONALS = ("none", "shared", "per_head")


# Golden numbers: three tokens, two heads that share a key head, sizes and weights as written here.


def golden_attention(**fields) -> tuple[CEMAttention, RMSNorm, torch.Tensor]:
    def a(*shape):
        return torch.arange(math.prod(shape), **torch64).view(shape)

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    attention = CEMAttention(config(**sizes, cem_diag="shared", cem_step_size_div_steps=False, **fields), 0).double()
    norm = RMSNorm(8, eps=1e-6).double()
    with torch.no_grad():
        attention.q_proj.weight.copy_(0.5 * torch.cos(0.7 * a(8, 8)))
        attention.k_proj.weight.copy_(0.5 * torch.sin(0.3 + 0.9 * a(4, 8)))
        attention.diagonal.copy_(0.1 * torch.cos(a(1, 8)))
        norm.weight.copy_(1 + 0.1 * torch.sin(a(8)))
        precond = attention.descent.precond
        if precond is not None:
            precond.d.copy_(0.5 + 0.05 * torch.sin(a(8)))
            precond.U.copy_(0.2 * torch.cos(a(8, 1)))
            precond.V.copy_(0.2 * torch.sin(1 + a(8, 1)))
    return attention, norm, torch.sin(1 + a(3, 8))[None]


@torch.no_grad()
def test_interaction_energy_and_its_gradient_have_the_golden_numbers():
    attention, norm, h = golden_attention()
    force, _, energies = attention(norm(h), NormedStream(h, norm), tables(4, 3), output_energies=True)
    close(energies[0, 0], [4.016274046783, -5.274935404331, -16.427674972164])
    first = [-1.782294963291, 0.589983824285, 2.885599250275, 3.933723657933]
    close(force[0, 2], [*first, 2.952374968213, 0.736069896245, -1.661610515411, -3.443518012778])


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        (
            {},
            [
                -1.852544973525,
                -0.455995334629,
                1.592676834800,
                2.879807079694,
                2.312843122643,
                0.359183638832,
                -1.677025661881,
                -2.627337368396,
            ],
        ),
        (
            {"cem_precond": "dlr", "cem_attn_steps": 2},
            [
                -3.569802215917,
                -0.853218069060,
                3.169281690868,
                5.597092590500,
                4.425779504566,
                0.702646425754,
                -3.212796033492,
                -5.174954540352,
            ],
        ),
        (
            {"cem_precond": "dlr", "cem_attn_steps": 2, "cem_norm_mode": "every_step"},
            [
                -3.541857452740,
                -0.829395439414,
                3.175533330713,
                5.581138176444,
                4.399060113140,
                0.679068306584,
                -3.225007100567,
                -5.170563101255,
            ],
        ),
    ],
)
@torch.no_grad()
def test_descents_of_half_a_step_end_at_the_golden_numbers(fields, numbers):
    attention, norm, h = golden_attention(cem_step_size=0.5, cem_precond_rank=1, **fields)
    move, _, _ = attention(norm(h), NormedStream(h, norm), tables(4, 3))
    close((h + move)[0, 2], numbers)


# Attention.


@pytest.mark.parametrize("diagonal", DIAGONALS)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("scale", "turn"), [(1.0, True), (1.37, True), (1.0, False)])
@pytest.mark.parametrize("bias", [False, True])
def test_one_step_is_the_gradient_of_the_energy_written_out(diagonal, groups, scale, turn, bias):
    """Guards D7: also where the rotary table is scaled, so that transpose and inverse rotation differ."""
    fields = {"cem_diag": diagonal, "num_key_value_heads": groups, "cem_step_size": 0.3, "attention_bias": bias}
    attention = filled(CEMAttention(config(**fields), 0))
    norm, h = norm_of(16), randn(1, LENGTH, 16)
    u = norm(h)
    cos, sin = tables(4, scale=scale, turn=turn)
    move, _, energies = attention(u, NormedStream(h, norm), (cos, sin), output_energies=True)
    point = u[0].detach().requires_grad_()
    written_out = energy_by_hand(attention, point, u[0].detach(), cos[0], sin[0])
    torch.testing.assert_close(energies[0, 0], written_out, rtol=0, atol=1e-10)
    (gradient,) = torch.autograd.grad(written_out.sum(), point)
    torch.testing.assert_close(move[0], -0.3 * gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["once", "every_step", "exact_jacobian"])
@pytest.mark.parametrize("precond", ["none", "diag", "dlr"])
def test_many_steps_follow_the_gradients_of_the_energy_written_out(mode, precond):
    """Guards D7: T = 3, in all norm modes, energies of each step included."""
    fields = {"cem_diag": "per_head", "cem_norm_mode": mode, "cem_precond": precond, "cem_step_size": 0.6}
    attention = filled(CEMAttention(config(**fields, cem_attn_steps=3), 0))
    norm, h = norm_of(16), randn(1, LENGTH, 16)
    u, (cos, sin) = norm(h)[0].detach(), tables(4)
    x = u if mode == "once" else h[0]
    p = torch.eye(16, **torch64) if precond == "none" else attention.descent.precond.dense().detach()
    expected = []
    for _ in range(3):
        x = x.detach().requires_grad_()
        point = x if mode == "once" else norm(x)
        energies = energy_by_hand(attention, point, u, cos[0], sin[0])
        target = x if mode == "exact_jacobian" else point
        (gradient,) = torch.autograd.grad(energies.sum(), target)
        expected.append(energies)
        x = x - 0.2 * gradient @ p
    expected.append(energy_by_hand(attention, x if mode == "once" else norm(x), u, cos[0], sin[0]))
    move, _, energies = attention(norm(h), NormedStream(h, norm), (cos, sin), output_energies=True)
    torch.testing.assert_close(move[0], x - (u if mode == "once" else h[0]), rtol=0, atol=1e-10)
    torch.testing.assert_close(energies[:, 0], torch.stack(expected), rtol=0, atol=1e-10)


@torch.no_grad()
def test_exact_values_are_a_fused_attention_of_the_keys_turned_back_and_plain_values_are_not():
    u, norm, (cos, sin) = randn(2, LENGTH, 16), norm_of(16), tables(4)
    exact = filled(CEMAttention(config(num_key_value_heads=2), 0))
    plain = filled(CEMAttention(config(num_key_value_heads=2, cem_rope_values="plain"), 0))
    q = exact.q_proj(u).unflatten(-1, (-1, 4)).transpose(1, 2)
    k = exact.k_proj(u).unflatten(-1, (-1, 4)).transpose(1, 2)
    halves = cos[..., :2], sin[..., :2]
    rotated = rotate(k, *halves)
    weight = exact.q_proj.weight
    fused = F.scaled_dot_product_attention(rotate(q, *halves), rotated, rotated, is_causal=True, enable_gqa=True)
    expected = rotate(fused, halves[0], -halves[1]).transpose(1, 2).flatten(-2) @ weight
    mine = exact(u, NormedStream(u, norm), (cos, sin))[0]
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    fused = F.scaled_dot_product_attention(rotate(q, *halves), rotated, k, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(
        plain(u, NormedStream(u, norm), (cos, sin))[0], fused.transpose(1, 2).flatten(-2) @ weight, rtol=0, atol=1e-12
    )
    assert (mine - plain(u, NormedStream(u, norm), (cos, sin))[0]).abs().max() > 0.1


@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_the_query_jacobian_is_symmetric_and_positive_and_does_not_cross_positions(diagonal):
    attention = filled(CEMAttention(config(cem_diag=diagonal), 0))
    u = randn(1, LENGTH, 16)
    force, _ = closures(attention, u, tables(4, scale=1.37))
    jacobian = torch.autograd.functional.jacobian(lambda x: force(x[None])[0], u[0])
    for i in range(LENGTH):
        block = jacobian[i, :, i]
        torch.testing.assert_close(block, block.T, rtol=0, atol=1e-12)
        assert torch.linalg.eigvalsh(block).min() > -1e-12
        assert jacobian[i][:, [j for j in range(LENGTH) if j != i]].abs().max() == 0
    assert jacobian[0].abs().max() < 1e-12
    assert jacobian[1:].abs().max() > 0.1


def test_plain_values_have_an_asymmetric_query_jacobian():
    attention = filled(CEMAttention(config(cem_rope_values="plain"), 0))
    u = randn(1, LENGTH, 16)
    force, energy = closures(attention, u, tables(4))
    assert energy is None
    jacobian = torch.autograd.functional.jacobian(lambda x: force(x[None])[0], u[0])
    assert max((jacobian[i, :, i] - jacobian[i, :, i].T).abs().max() for i in range(LENGTH)) > 0.1


@pytest.mark.parametrize("diagonal", DIAGONALS)
@torch.no_grad()
def test_any_step_size_and_any_symmetric_preconditioner_lower_the_energy_at_least_as_promised(diagonal):
    """Guards D7: concavity gives E(x + eta P n) <= E(x) - eta n^T P n, indefinite P included."""
    attention = filled(CEMAttention(config(cem_diag=diagonal), 0))
    u = randn(1, LENGTH, 16)
    force, energy = closures(attention, u, tables(4))
    for seed in range(40):
        p = randn(16, 16, seed=seed)
        p = p + p.T
        eta = 10 ** (4 * torch.rand((), generator=torch.Generator().manual_seed(seed)).item() - 2)
        x = randn(1, LENGTH, 16, seed=100 + seed)
        n = force(x)
        bound = energy(x) - eta * (n @ p * n).sum(-1)
        after = energy(x + eta * n @ p)
        assert bool((after <= bound + 1e-9 * (1 + bound.abs() + after.abs())).all())


@pytest.mark.parametrize("diagonal", DIAGONALS)
@torch.no_grad()
def test_only_the_interaction_matrix_counts(diagonal):
    """Queries times s and keys over s give the same, for a number s or a complex one per rotated pair."""
    u, norm, turn = randn(1, LENGTH, 16), norm_of(16), tables(4)
    attention = filled(CEMAttention(config(cem_diag=diagonal, num_key_value_heads=2), 0))
    before = attention(u, NormedStream(u, norm), turn, num_steps=2)[0]
    attention.q_proj.weight *= 2.5
    attention.k_proj.weight /= 2.5
    torch.testing.assert_close(attention(u, NormedStream(u, norm), turn, num_steps=2)[0], before, rtol=0, atol=1e-11)
    scale = torch.complex(randn(2, seed=5), randn(2, seed=6))  # one number per pair (m, m + d / 2), all heads alike
    for projection, factor in ((attention.q_proj, scale), (attention.k_proj, 1 / scale.conj())):
        heads = projection.weight.view(-1, 2, 2, 16)  # head, half, pair, column
        pairs = torch.complex(heads[:, 0], heads[:, 1]) * factor[:, None]
        projection.weight.copy_(torch.stack((pairs.real, pairs.imag), dim=1).view(-1, 16))
    torch.testing.assert_close(attention(u, NormedStream(u, norm), turn, num_steps=2)[0], before, rtol=0, atol=1e-11)


@pytest.mark.parametrize("scale", [1.0, 1.37])
@torch.no_grad()
def test_only_relative_positions_count(scale):
    u, norm = randn(1, LENGTH, 16), norm_of(16)
    attention = filled(CEMAttention(config(cem_diag="shared"), 0))
    near = attention(u, NormedStream(u, norm), tables(4, scale=scale), num_steps=2)[0]
    far = attention(u, NormedStream(u, norm), tables(4, scale=scale, first=1000), num_steps=2)[0]
    torch.testing.assert_close(near, far, rtol=0, atol=1e-11)


@pytest.mark.parametrize("mode", ["once", "every_step"])
@pytest.mark.parametrize("diagonal", DIAGONALS)
@torch.no_grad()
def test_the_first_position_moves_by_a_linear_map_proportional_to_the_steps(mode, diagonal):
    """One token attends to itself alone: move = T eta P sum_k A_k c_0."""
    fields = {"cem_norm_mode": mode, "cem_diag": diagonal, "cem_step_size_div_steps": False, "cem_step_size": 0.3}
    attention = filled(CEMAttention(config(**fields, cem_precond="dlr"), 0))
    h, norm = randn(1, LENGTH, 16), norm_of(16)
    one, two, five = (attention(norm(h), NormedStream(h, norm), tables(4), num_steps=t)[0][:, 0] for t in (1, 2, 5))
    torch.testing.assert_close(two, 2 * one, rtol=0, atol=1e-11)
    torch.testing.assert_close(five, 5 * one, rtol=0, atol=1e-11)
    matrix = attention.q_proj.weight.T @ attention.k_proj.weight
    if attention.diagonal is not None:
        matrix += torch.diag(attention.diagonal.sum(0) * (4 if diagonal == "shared" else 1))
    expected = 0.3 * norm(h)[:, 0] @ matrix.T @ attention.descent.precond.dense()
    torch.testing.assert_close(one, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("steps", [1, 2, 3])
@torch.no_grad()
def test_nothing_moves_before_a_changed_token(steps):
    attention = filled(CEMAttention(config(cem_diag="per_head"), 0))
    u, norm = randn(1, LENGTH, 16), norm_of(16)
    other = u.clone()
    other[:, 3] += 1
    first, second = (attention(x, NormedStream(x, norm), tables(4), num_steps=steps)[0] for x in (u, other))
    assert torch.equal(first[:, :3], second[:, :3])
    assert (first[:, 3:] - second[:, 3:]).abs().min() > 0


@torch.no_grad()
def test_more_and_smaller_steps_converge_to_the_flow_at_first_order():
    attention = filled(CEMAttention(config(cem_diag="shared"), 0))
    u, norm = randn(1, LENGTH, 16), norm_of(16)
    ends = {t: attention(u, NormedStream(u, norm), tables(4), num_steps=t)[0] for t in (8, 16, 32, 512)}
    errors = [(ends[t] - ends[512]).abs().max().item() for t in (8, 16, 32)]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.15)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.15)


@torch.no_grad()
def test_norm_modes_agree_at_one_step_and_part_at_two():
    norm, h = norm_of(16), randn(1, LENGTH, 16, scale=3.0)
    modules = [filled(CEMAttention(config(cem_norm_mode=mode), 0)) for mode in ("once", "every_step")]
    for steps in (1, 2):
        first, second = (module(norm(h), NormedStream(h, norm), tables(4), num_steps=steps)[0] for module in modules)
        assert torch.equal(first, second) if steps == 1 else (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("diagonal", ["shared", "per_head"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_chunks_of_queries_give_what_all_at_once_give(diagonal, pieces):
    """More queries than a chunk holds, with and without padding, cached keys, and gradients."""
    length, total = 150, 160
    q, k = randn(2, 4, length, 4, seed=1), randn(2, 2, total, 4, seed=2)
    c, x = randn(2, total, 16, seed=3), randn(2, length, 16, seed=4).requires_grad_()
    d = randn(4 if diagonal == "per_head" else 1, 16, seed=5, scale=0.2)
    part = DiagonalPart(d, x, c.view(2, total, pieces, -1).transpose(1, 2))
    visible = torch.ones(length, total, dtype=torch.bool).tril(total - length).repeat(2, 1, 1, 1)
    padded = visible.clone()
    padded[1, :, :, :7] = False
    for mask in (None, visible, padded):
        shown = torch.ones(length, total, dtype=torch.bool).tril() if mask is None else mask
        scores = q @ k.repeat_interleave(2, 1).mT + (x[:, None] * d[:, None]) @ c[:, None].mT
        weights = (scores / 2).masked_fill(~shown, -torch.inf).softmax(-1)
        near = (weights @ k.repeat_interleave(2, 1)).transpose(1, 2)
        expected = (d[:, None] * ((weights if len(d) > 1 else weights.sum(1, keepdim=True)) @ c[:, None])).sum(1)
        for causal in (False, True):
            output, moved, _ = interaction_force(q, k, part, mask, 2.0, causal)
            torch.testing.assert_close(output, near, rtol=0, atol=1e-12)
            torch.testing.assert_close(moved, expected, rtol=0, atol=1e-12)
            probe = randn(*moved.shape, seed=8)
            mine, theirs = (torch.autograd.grad((y * probe).sum(), x, retain_graph=True)[0] for y in (moved, expected))
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
            energy = interaction_energy(q, k, part, mask, 2.0, causal)
            whole = -2 * (scores / 2).masked_fill(~shown, -torch.inf).logsumexp(-1).sum(1)
            torch.testing.assert_close(energy, whole, rtol=0, atol=1e-11)
        kept = interaction_force(q, k, part, mask, 2.0, keep_weights=True)[2]
        torch.testing.assert_close(kept, weights[..., : kept.shape[-1]], rtol=0, atol=1e-12)


def test_chunks_leave_later_keys_out_only_where_they_are_hidden():
    assert [reach for _, reach, _ in query_chunks(300, 310, None, False)] == [128, 256, 300]
    assert [reach for _, reach, _ in query_chunks(1, 310, None, False)] == [310]
    mask = torch.ones(1, 1, 300, 310, dtype=torch.bool)
    assert [reach for _, reach, _ in query_chunks(300, 310, mask, True)] == [138, 266, 310]
    assert [reach for _, reach, _ in query_chunks(300, 310, mask, False)] == [310, 310, 310]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_query_that_sees_nothing_stays_finite(dtype):
    hidden = torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    scores = torch.full((1, 1, 2, 3), -50.0, dtype=dtype)
    assert visible_scores(scores.clone(), hidden).softmax(-1).isfinite().all()
    added = torch.full((1, 1, 2, 3), torch.finfo(dtype).min, dtype=dtype)
    assert visible_scores(scores.clone(), added).softmax(-1).isfinite().all()
