# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Attention with a shared part of the scores, against the formula written out in float64."""

import pytest
import torch

from loopergy.modeling.causal_energies import DiagonalPart, interaction_force
from loopergy.modeling.kernels.interaction_attention import fits

LENGTH, TOTAL, TEMPERATURE = 150, 160, 2.0  # more queries than a chunk holds, and keys before the first


def draw(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tensors():
    shapes = (2, 4, LENGTH, 4), (2, 2, TOTAL, 4), (2, LENGTH, 16), (2, TOTAL, 16), (1, 16)
    return [draw(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def causal_mask():
    return torch.ones(LENGTH, TOTAL, dtype=torch.bool).tril(TOTAL - LENGTH)[None, None]


def mask_of(kind):
    if kind == "none":
        return None
    if kind == "causal":
        return causal_mask()
    mask = causal_mask().repeat(2, 1, 1, 1)
    mask[0, :, :, :13] = False  # the first queries of the first row see nothing
    return mask


def written_out(tensors, mask):
    query, keys, point, context, diagonal = tensors
    keys = keys.repeat_interleave(2, dim=1)
    scores = query @ keys.mT + ((point * diagonal) @ context.mT)[:, None]
    visible = torch.ones(LENGTH, TOTAL, dtype=torch.bool).tril() if mask is None else mask
    # The lowest number, as an infinity would make nan of a row that sees nothing.
    weights = (scores / TEMPERATURE).masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
    return (weights @ keys).transpose(1, 2), diagonal * (weights.sum(1) @ context)


def run(tensors, mask, causal=False):
    query, keys, point, context, diagonal = tensors
    part = DiagonalPart(diagonal, point, context[:, None])
    assert fits(query, part.context, diagonal, mask)
    return interaction_force(query, keys, part, mask, TEMPERATURE, causal)[:2]


@pytest.mark.parametrize("kind", ["none", "causal", "padded"])
def test_outputs_and_all_gradients_are_those_of_the_formula(tensors, kind):
    mask = mask_of(kind)
    found, expected = run(tensors, mask, causal=kind == "causal"), written_out(tensors, mask)
    probes = [draw(*y.shape, seed=9) for y in expected]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    mine, theirs = (torch.autograd.grad(outputs, tensors, probes) for outputs in (found, expected))
    for name, one, other in zip(("query", "keys", "point", "context", "diagonal"), mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_without_gradients_it_gives_the_same(tensors):
    with torch.inference_mode():
        found = run(tensors, mask_of("padded"))
    for mine, theirs in zip(found, run(tensors, mask_of("padded")), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_of_gradients_are_those_of_the_formula(tensors):
    results = []
    for outputs in (run(tensors, mask_of("causal")), written_out(tensors, mask_of("causal"))):
        first = torch.autograd.grad(sum(y.square().sum() for y in outputs), tensors, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), tensors))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("trained", [(0,), (1, 4), (2, 3)])
def test_what_is_frozen_gets_no_gradient(tensors, trained):
    for index, x in enumerate(tensors):
        x.requires_grad_(index in trained)
    for create_graph in (False, True):
        loss = sum(y.square().sum() for y in run(tensors, None))
        loss.backward(create_graph=create_graph)
    assert [index for index, x in enumerate(tensors) if x.grad is not None] == list(trained)


def test_it_is_left_to_the_plain_form_where_it_does_not_serve(tensors):
    query, _, _, context, diagonal = tensors
    context = context[:, None]
    assert fits(query, context, diagonal, causal_mask())
    assert not fits(query, context, diagonal, causal_mask().double())  # numbers to be added
    assert not fits(query, context, diagonal, causal_mask().expand(1, 4, -1, -1))  # a mask for each head
    assert not fits(query, context, diagonal.expand(4, -1), None)  # a diagonal for each head
    assert not fits(query[:, :, :1], context, diagonal, None)  # a lone query
    assert not fits(query, context.view(2, TOTAL, 2, 8).transpose(1, 2), diagonal, None)  # context from a cache
    assert not fits(query.bfloat16(), context.bfloat16(), diagonal.bfloat16(), None)
    assert not fits(query.float(), context, diagonal, None)
    assert not fits(query.to("meta"), context, diagonal, None)
    seen = []
    torch.compile(lambda q: seen.append(fits(q, context, diagonal, None)) or q + 1, backend="eager")(query)
    assert seen == [False]
