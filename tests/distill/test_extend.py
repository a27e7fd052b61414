# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Stage 3: the loss against full logits, and positions beyond the declared ones on request only."""

import pytest
import torch

from loopergy.conversion import convert
from loopergy.distill.extend import ExtendConfig, ExtendModule, ExtendTrainer, extend_positions
from loopergy.distill.losses import divergence
from loopergy.distill.stage import StageError, StageRecord


def settings(folder, **options):
    return ExtendConfig(str(folder), **{"max_steps": 1, "use_cpu": True, "length": 12, **options})


@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_loss_is_the_cross_entropy_plus_the_weighted_kl_of_the_last_loop(teacher, random_batch, kl_weight):
    student = convert(teacher, keep_layers=[1]).model
    batch = random_batch()
    logits, wanted = student(**batch).logits[:, :-1], teacher(**batch).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    expected = expected + kl_weight * divergence(logits.flatten(0, 1), wanted.flatten(0, 1)).mean()
    loss = ExtendModule(student, teacher if kl_weight else None, kl_weight=kl_weight)(**batch)["loss"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)


def test_a_weight_on_the_kl_needs_a_teacher(ouro, tmp_path):
    student = convert(ouro, keep_layers=[1]).model
    with pytest.raises(ValueError, match=r"kl_weight=0\.5 needs a teacher"):
        ExtendModule(student, None, kl_weight=0.5)
    with pytest.raises(ValueError, match="at least 0"):
        ExtendConfig(str(tmp_path), kl_weight=-1.0)


def test_pads_and_ignored_labels_do_not_count(ouro, random_batch):
    """Guards H4."""
    student = convert(ouro, keep_layers=[1]).model
    module, ids = ExtendModule(student), random_batch(length=10)["input_ids"]
    plain = module(input_ids=ids)["loss"].item()
    padded = torch.cat([ids, torch.randint(3, 200, (2, 10))], dim=1)
    mask = (torch.arange(20) < 10).long().expand(2, 20)
    assert module(input_ids=padded, attention_mask=mask)["loss"].item() == pytest.approx(plain, rel=1e-9)
    assert module(input_ids=ids, labels=torch.full_like(ids, -100))["loss"].item() == 0.0


def test_longer_rows_need_an_explicit_option(ouro, tmp_path, random_batch):
    """Guards H16."""
    ouro.config.max_position_embeddings = 16
    student = convert(ouro, keep_layers=[1]).model
    record = StageRecord.of("distill", student.config)
    rows = random_batch(length=32)
    trainer = ExtendTrainer(student, None, settings(tmp_path), previous=record)
    with pytest.raises(ValueError, match="extend_to=32"):
        trainer.model(**rows)
    before = student.model.rotary_emb.inv_freq.clone()
    options = settings(tmp_path, extend_to=32, rope_theta=5e6)
    trainer = ExtendTrainer(student, None, options, previous=record)
    assert torch.isfinite(trainer.model(**rows)["loss"])
    assert student.config.max_position_embeddings == 32
    assert student.config.rope_parameters["rope_theta"] == 5e6
    assert not torch.equal(student.model.rotary_emb.inv_freq, before)
    with pytest.raises(ValueError, match="below the present max_position_embeddings, 32"):
        extend_positions(student, 16)


def test_a_new_rotary_base_reaches_the_tables_of_sparse_mixers(ouro, random_batch):
    student = convert(ouro, [0], "dsa", dsa_indexer="deepseek").model
    extend_positions(student, 200_000, rope_theta=5e6)
    ours, width = student.model.layers[1].self_attn, 16
    want = 5e6 ** (-torch.arange(0, width, 2) / width)
    torch.testing.assert_close(ours.rotary_emb.inv_freq, want)
    assert len(ours.index_rotary_emb.inv_freq) == 32
    torch.testing.assert_close(ours.index_rotary_emb.inv_freq[1].item(), 5e6 ** (-1 / 32))
    assert torch.isfinite(ExtendModule(student)(**random_batch())["loss"])


def test_only_a_distilled_student_is_extended(ouro, tmp_path):
    """Guards H2."""
    student = convert(ouro, keep_layers=[1]).model
    with pytest.raises(StageError, match="'align'"):
        ExtendTrainer(student, None, settings(tmp_path), previous=StageRecord.of("align", student.config))
    with pytest.raises(StageError, match="fresh"):
        ExtendTrainer(student, None, settings(tmp_path))
