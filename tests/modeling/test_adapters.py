# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""LoRA on every linear layer of every looped model: each adapter counts, and merging changes nothing."""

import pytest
import torch

peft = pytest.importorskip("peft")


def test_lora_on_all_linear_layers_reaches_every_adapter_and_merges(any_model, make_ids):
    """Guards J1, J4."""
    ids = make_ids(2, 9)
    plain = any_model(ids).logits.detach()
    settings = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(any_model, settings).double().eval()
    model(ids, labels=ids).loss.backward()
    still = [name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    # Neither a gate that is not asked nor a choice of tokens gets a gradient from the last loop's loss.
    assert [name for name in still if "early_exit_gate" not in name and "score" not in name] == []
    with torch.no_grad():
        adapted = model(ids).logits
        assert (adapted - plain).abs().max() > 1e-3
        torch.testing.assert_close(model.merge_and_unload()(ids).logits, adapted, rtol=0, atol=1e-8)
