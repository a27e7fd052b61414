# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from loopergy import LT2Config, LT2ForSequenceClassification, OuroConfig, OuroForSequenceClassification


@pytest.fixture(params=["ouro", "lt2"])
def classifier(request):
    if request.param == "ouro":
        config = OuroConfig.from_preset("tiny", num_labels=3, initializer_range=0.2)
        return OuroForSequenceClassification(config).eval()
    config = LT2Config.from_preset("tiny", vocab_size=128, num_labels=3, initializer_range=0.2, pad_token_id=0)
    return LT2ForSequenceClassification(config).eval()


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_the_score_is_that_of_the_last_real_token(classifier, make_ids, side):
    ids = make_ids(1, 6)
    alone = classifier(ids).logits
    pads = (3, 0) if side == "left" else (0, 3)
    padded = torch.nn.functional.pad(ids, pads, value=0)
    mask = (padded != 0).long()
    torch.testing.assert_close(classifier(padded, attention_mask=mask).logits, alone, rtol=0, atol=1e-5)
    # A real token that happens to be the padding id counts as real when the mask says so.
    ids[0, -1] = 0
    padded = torch.nn.functional.pad(ids, pads, value=0)
    expected = classifier.score(classifier.model(ids).last_hidden_state[:, -1])
    torch.testing.assert_close(classifier(padded, attention_mask=mask).logits, expected, rtol=0, atol=1e-5)


def test_without_mask_the_padding_id_tells_the_end(classifier, make_ids):
    ids = torch.nn.functional.pad(make_ids(2, 5), (0, 2), value=0)
    expected = classifier(ids, attention_mask=torch.tensor([[1] * 5 + [0] * 2] * 2)).logits
    torch.testing.assert_close(classifier(ids).logits, expected, rtol=0, atol=1e-5)


def test_several_sequences_without_a_known_end_are_refused(classifier, make_ids):
    classifier.config.pad_token_id = None
    with pytest.raises(ValueError, match="pad_token_id"):
        classifier(make_ids(2, 5))
    assert classifier(make_ids(1, 5)).logits.shape == (1, 3)


def test_the_loss_has_gradients_and_counts_items(classifier, make_ids):
    """Guards I1."""
    ids, labels = make_ids(4, 5), torch.tensor([0, 2, 1, 1])
    whole = classifier(ids, labels=labels).loss
    parts = sum(classifier(ids[row : row + 1], labels=labels[row : row + 1]).loss / 4 for row in range(4))
    torch.testing.assert_close(parts, whole)
    whole.backward()
    assert classifier.score.weight.grad.ne(0).any()


@pytest.mark.parametrize("told_by", ["mask", "padding id"])
def test_the_indexers_divergence_is_part_of_the_loss(make_ids, told_by):
    """The mean of each sequence's, so that neither padding nor the way a batch is cut changes it."""
    fields = {"layer_mixers": "dsa", "dsa_topk": 5, "dsa_latent_dim": 12, "dsa_tail_dim": 4, "num_labels": 3}
    config = LT2Config.from_preset("tiny", vocab_size=128, initializer_range=0.2, pad_token_id=0, **fields)
    model = LT2ForSequenceClassification(config).double().train()
    ids, labels = make_ids(2, 9), torch.tensor([0, 2])
    ids[0, 6:] = 0
    mask = {"attention_mask": (ids != 0).long()} if told_by == "mask" else {}

    def loss(rows: slice, **options):
        own = {name: value[rows] for name, value in mask.items()}
        return model(ids[rows], labels=labels[rows], **own, **options).loss

    every = slice(None)
    plain = loss(every)
    config.dsa_indexer_loss_weight = 0.5
    divergence = model.model(ids, **mask, output_indexer_divergence=True).indexer_divergence
    expected = plain + 0.5 * (divergence[0, :6].mean() + divergence[1].mean()) / 2
    torch.testing.assert_close(loss(every), expected, rtol=0, atol=1e-10)
    parts = [loss(slice(row, row + 1), num_items_in_batch=torch.tensor(2)) for row in range(2)]
    torch.testing.assert_close(sum(parts), expected, rtol=0, atol=1e-10)
    model.eval()
    torch.testing.assert_close(loss(every), plain, rtol=0, atol=1e-10)
