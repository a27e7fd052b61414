# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Exported programs: other batches and lengths than the example's, and decoding on a static cache."""

import pytest
import torch
from compiled_kinds import MAIN, build
from torch.export import Dim, ExportedProgram
from transformers import PreTrainedModel
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

EXACT = {"rtol": 1e-5, "atol": 1e-5}
OTHERS = ("lt2-gdn", "lt2-mamba2", "lt2-nsa", "lt2-dsa", "lt2-full", "cem-no-diagonal", "cem-shared", "gpt-recurrent")


def exported(model: PreTrainedModel, ids: torch.Tensor, **mask: torch.Tensor) -> ExportedProgram:
    """Export a forward whose batch and length are left open."""
    sizes = {name: {0: Dim.AUTO, 1: Dim.AUTO} for name in ("input_ids", *mask)}
    inputs = {"input_ids": ids, "use_cache": False, **mask}
    return torch.export.export(model, (), inputs, dynamic_shapes={**sizes, "use_cache": None}, strict=False)


@pytest.mark.parametrize("kind", [*MAIN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
@torch.no_grad()
def test_an_exported_forward_takes_other_batches_and_lengths(kind, make_ids):
    model = build(kind)
    program = exported(model, make_ids(2, 9)).module()
    # Recurrent mixers unroll their chunks, of at least 16 tokens; a row alone is laid out otherwise in Mamba-2, whose
    # queries and keys have one head.
    alone = 4 if kind == "lt2-mamba2" else 1
    for shape in ((2, 9), (3, 14), (alone, 15 if kind.startswith("lt2") else 33)):
        ids = make_ids(*shape)
        found = program(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lt2-full", "cem-no-diagonal", "nrgpt"])
@torch.no_grad()
def test_an_exported_forward_takes_padding(kind, make_ids):
    model = build(kind)
    program = exported(model, make_ids(2, 9), attention_mask=torch.ones(2, 9, dtype=torch.long)).module()
    ids, mask = make_ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[1, :4] = 0
    found = program(input_ids=ids, attention_mask=mask, use_cache=False).logits
    wanted = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], **EXACT)


@pytest.mark.parametrize("kind", ["gpt", pytest.param("ouro", marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_step_on_a_static_cache_is_exported_with_a_slot_for_each_visit(kind, make_ids):
    model, ids = build(kind), make_ids(1, 8)
    model.generation_config.cache_implementation = "static"
    stepper = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=16)
    assert len(stepper.static_cache.layers) == 2
    step = {"input_ids": ids[:, :1], "cache_position": torch.tensor([0])}
    program = torch.export.export(stepper, (), step, strict=False).module()
    steps = [program(input_ids=ids[:, t : t + 1], cache_position=torch.tensor([t])) for t in range(8)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
