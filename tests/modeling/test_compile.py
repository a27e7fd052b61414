# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Compiled models: one graph, eager's numbers, and a bounded number of compilations."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from compiled_kinds import KINDS, MAIN, build
from torch._dynamo.utils import counters
from transformers import CompileConfig

EXACT = {"rtol": 1e-5, "atol": 1e-5}
FORWARDS = (*MAIN, "lt2-dsa")  # sparse attention has code of its own for tracers
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on the CPU")


def slowly(*kinds: str) -> list:
    """Mark kinds as slow."""
    return [pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


@pytest.fixture(autouse=True)
def _forget_programs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compilations() -> int:
    """Return how many graphs were compiled so far."""
    return counters["stats"]["unique_graphs"]


@contextmanager
def no_more_compilations() -> Iterator[None]:
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [*FORWARDS, *slowly(*(kind for kind in KINDS if kind not in FORWARDS))])
@torch.no_grad()
def test_a_forward_is_one_graph_for_all_lengths_and_equals_eager(kind, make_ids):
    """Guards F12. The second length makes the sizes symbols; the third finds a program for them."""
    model = build(kind)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (9, 13):
        ids = make_ids(2, length)
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, **EXACT)
    assert compilations() <= 2
    assert not counters["graph_break"]
    with no_more_compilations():
        ids = make_ids(2, 15)  # no chunk more, of at least 16 tokens, for those that unroll them
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, **EXACT)


@pytest.mark.parametrize("kind", ["cem-shared", *slowly("cem-no-diagonal", "nrgpt")])
@torch.no_grad()
def test_energies_are_those_of_eager_in_one_graph(kind, make_ids):
    model, ids = build(kind), make_ids(2, 9)
    options = {"use_cache": False, "output_energies": True}
    found = torch.compile(model, backend="eager", fullgraph=True)(ids, **options).energies
    for part, energies in model(ids, **options).energies.items():
        torch.testing.assert_close(found[part], energies, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lt2-gdn", "cem-shared", "nrgpt-strict"])
@torch.no_grad()
def test_padding_means_the_same_in_a_compiled_forward(kind, make_ids):
    """Guards F12."""
    model, ids = build(kind), make_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    logits = torch.compile(model, backend="eager", fullgraph=True)(ids, attention_mask=mask, use_cache=False).logits
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits[mask.bool()], wanted[mask.bool()], **EXACT)


@pytest.mark.parametrize("kind", ["gpt", *slowly("ouro", "lt2-gdn", "lt2-mamba2", "cem-shared", "nrgpt")])
def test_the_gradients_of_a_compiled_training_step_are_those_of_eager(kind, make_ids):
    """Guards F12."""
    model, ids = build(kind).train(), make_ids(2, 33)
    model(ids, labels=ids, use_cache=False).loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, labels=ids, use_cache=False).loss
    loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
    assert compilations() == 1


@pytest.mark.parametrize("kind", [*MAIN, *slowly("lt2-gdn-full", "lt2-window", "cem-shared", "gpt-recurrent")])
def test_generation_with_a_static_cache_compiles_twice_whatever_the_prompts(kind, make_ids):
    """Guards A12: one program for the first cache size, one for all others, and the tokens of an eager run."""
    model = build(kind)
    compiling = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiling._compile_all_devices = True
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def check(length: int) -> None:
        ids = make_ids(2, length)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        static = {"cache_implementation": "static", "compile_config": compiling}
        found = model.generate(ids, attention_mask=mask, **settings, **static)
        assert torch.equal(found, model.generate(ids, attention_mask=mask, **settings))

    check(7)
    check(11)
    assert 1 <= compilations() <= 2
    assert not counters["graph_break"]
    with no_more_compilations():
        check(14)


@torch.no_grad()
def test_another_number_of_loops_compiles_once(make_ids):
    model, ids = build("ouro"), make_ids(1, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for loops in (2, 3, 2, 3):
        found = compiled(ids, num_loops=loops, use_cache=False).logits
        torch.testing.assert_close(found, model(ids, num_loops=loops, use_cache=False).logits, **EXACT)
    assert compilations() == 2


@pytest.mark.slow
@torch.no_grad()
def test_positions_that_may_mark_documents_break_the_graph_and_keep_their_meaning(make_ids):
    """Guards F12: packed rows are found in a compiled forward too, which takes a look at the numbers."""
    model, ids = build("ouro"), make_ids(1, 12)
    positions = torch.tensor([[*range(5), *range(7)]])
    found = torch.compile(model, backend="eager")(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, model(ids, position_ids=positions, use_cache=False).logits, **EXACT)
    assert sum(counters["graph_break"].values()) >= 1


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("kind", ["gpt", "nrgpt"])
def test_inductor_gives_the_numbers_of_eager(kind, make_ids):
    """Guards F12."""
    model, ids = build(kind), make_ids(1, 33)
    wanted = model(ids, labels=ids, use_cache=False)
    wanted.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    outputs = torch.compile(model, fullgraph=True)(ids, labels=ids, use_cache=False)
    outputs.loss.backward()
    torch.testing.assert_close(outputs.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)
