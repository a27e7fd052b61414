# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""LT2 with sparse mixers: what only they do, beside the tests that run over every mixer."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from loopergy.modeling.building_blocks import RotaryEmbedding
from loopergy.modeling.kernels import sparse_attention
from loopergy.modeling.looped_cache import GrowingLayer, PooledLayer, StaticPooledLayer
from loopergy.modeling.modeling_lt2 import build_mixer

EXACT = {"rtol": 0, "atol": 1e-10}
NSA = {"layer_mixers": "nsa", "nsa_block_size": 4, "nsa_block_count": 4, "nsa_window": 3}
DSA = {"layer_mixers": "dsa", "dsa_latent_dim": 12, "dsa_tail_dim": 4, "dsa_topk": 5, "dsa_index_head_dim": 8}
BOTH = {**NSA, **DSA, "layer_mixers": "nsa,dsa"}


def greedy(model, ids, tokens, **kwargs):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **kwargs)


@torch.no_grad()
def test_drafts_are_exact_since_their_caches_roll_back(make_lt2, make_ouro, make_ids):
    """Guards A8."""
    model, ids = make_lt2(**BOTH), make_ids(1, 6).repeat(1, 3)
    expected = greedy(model, ids, 12)
    assert torch.equal(greedy(model, ids, 12, prompt_lookup_num_tokens=3), expected)
    assert torch.equal(greedy(model, ids, 12, assistant_model=make_ouro(num_loops=1)), expected)


@torch.no_grad()
def test_shared_slots_leave_the_prompt_exact_and_one_loop_unchanged(make_lt2, make_ids):
    """Property G27."""
    ids = make_ids(2, 17)
    exact, shared = make_lt2(**BOTH), make_lt2(kv_sharing="last", **BOTH)
    outputs = shared(ids, use_cache=True)
    torch.testing.assert_close(outputs.logits, exact(ids).logits, **EXACT)
    assert len(outputs.cache) == 4
    assert torch.equal(greedy(shared, ids, 6, num_loops=1), greedy(exact, ids, 6, num_loops=1))
    assert torch.equal(greedy(shared, ids, 6, cache_implementation="static"), greedy(shared, ids, 6))


@torch.no_grad()
def test_their_slots_write_in_place(make_lt2, make_ids):
    cache = make_lt2(**BOTH)(make_ids(1, 9), use_cache=True).cache
    assert [type(layer) for layer in cache.layers[:2]] == [PooledLayer, GrowingLayer]
    assert isinstance(cache.layers[0], GrowingLayer)


@torch.no_grad()
def test_a_reset_cache_takes_another_batch(make_lt2, make_ids):
    model = make_lt2(**BOTH)
    cache = model(make_ids(2, 11), use_cache=True).cache
    cache.reset()
    ids = make_ids(3, 9, seed=2)
    torch.testing.assert_close(model(ids, cache=cache).logits, model(ids, use_cache=False).logits, **EXACT)


@torch.no_grad()
def test_a_cache_without_averages_is_refused(make_lt2, make_ids):
    with pytest.raises(ValueError, match=r"0 slots, but 12"):
        make_lt2(**NSA)(make_ids(1, 4), cache=DynamicCache())
    # Latents and index keys fit into any slot.
    model, ids = make_lt2(**DSA), make_ids(1, 12)
    cache = model(ids[:, :8], cache=DynamicCache()).cache
    torch.testing.assert_close(model(ids[:, 8:], cache=cache).logits, model(ids).logits[:, 8:], **EXACT)


@pytest.mark.parametrize("layer", [PooledLayer(), StaticPooledLayer(max_cache_len=30)])
def test_a_layer_moves_its_averages_with_its_keys(layer, make_lt2):
    model = make_lt2(**NSA)
    pooling = model.model.layers[0].self_attn.branches.pooling
    tokens = torch.randn(2, 1, 9, 16)
    (_, averages), _ = layer.update(tokens, tokens, pooling=pooling)
    expected = averages.clone()
    layer.offload()
    layer.prefetch()
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.block_keys[:, :, : expected.shape[2]], expected[[1, 0]])
    assert torch.equal(layer.block_values, layer.block_keys)


@torch.no_grad()
def test_a_mask_per_query_and_key_is_refused(make_lt2, make_ids):
    for fields in (NSA, DSA):
        with pytest.raises(ValueError, match="chooses its keys itself"):
            make_lt2(**fields)(make_ids(1, 4), attention_mask=torch.ones(1, 1, 4, 4))


@torch.no_grad()
def test_a_mask_without_padding_never_reaches_the_mixers(make_lt2, make_ids):
    model, ids, seen = make_lt2(**BOTH), make_ids(2, 7), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, arguments: seen.append(arguments["attention_mask"]), with_kwargs=True
        )
    model(ids, attention_mask=torch.ones_like(ids))
    assert seen == [None] * 12


@torch.no_grad()
def test_a_mask_of_the_new_tokens_alone_is_refused(make_lt2, make_ids):
    """Guards B3."""
    for fields in (NSA, DSA):
        model, ids = make_lt2(**fields), make_ids(1, 6)
        cache, mask = model(ids, use_cache=True).cache, torch.tensor([[0, 1]])
        with pytest.raises(ValueError, match="2 columns for 6 cached and 2 new tokens"):
            model(ids[:, :2], attention_mask=mask, cache=cache)


@pytest.mark.parametrize("indexer", ["lt2", "deepseek"])
def test_the_divergence_joins_the_loss_in_training_only(make_lt2, make_ids, indexer):
    model, ids = make_lt2(**DSA, dsa_indexer=indexer, dsa_indexer_loss_weight=0.5), make_ids(2, 12)
    plain = model(ids, labels=ids)
    assert plain.indexer_divergence is None
    asked = model(ids, output_indexer_divergence=True).indexer_divergence
    model.train()
    outputs = model(ids, labels=ids)
    assert outputs.indexer_divergence.shape == (2, 12)
    assert torch.equal(outputs.indexer_divergence, asked)
    # The last token predicts nothing, and so counts as little here as in the cross-entropy.
    torch.testing.assert_close(outputs.loss, plain.loss + 0.5 * asked[:, :-1].mean(), **EXACT)
    model.config.dsa_indexer_loss_weight = 0.0
    assert torch.equal(model(ids, labels=ids).loss, plain.loss)


def test_the_divergence_is_the_mean_over_visits(make_lt2, make_ids):
    model, ids = make_lt2(**DSA, num_hidden_layers=2), make_ids(1, 12)
    seen = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    divergence = model(ids, output_indexer_divergence=True).indexer_divergence
    assert len(seen) == 6
    torch.testing.assert_close(divergence, torch.stack(seen).mean(0), **EXACT)


def test_the_indexers_loss_counts_items_however_the_batch_is_cut(make_lt2, make_ids):
    """Guards I1."""
    model, ids = make_lt2(**DSA, dsa_indexer_loss_weight=0.5).train(), make_ids(4, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    items = (labels[:, 1:] != -100).sum()
    whole = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=items).loss
    parts = [
        model(ids[row, None], attention_mask=mask[row, None], labels=labels[row, None], num_items_in_batch=items).loss
        for row in range(4)
    ]
    # The cross-entropy is transformers', in float32.
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shifted", [False, True])
def test_the_indexers_loss_is_of_the_positions_that_predict_a_label(make_lt2, make_ids, shifted):
    """Guards I1: prompts of other lengths neither weigh it nor tell how a batch was cut."""
    model, ids = make_lt2(**DSA, dsa_indexer_loss_weight=0.5).train(), make_ids(2, 12)
    answers = torch.tensor([[10], [3]]) <= torch.arange(12)  # two and nine labels
    labels = ids.masked_fill(~answers, -100)
    divergence = model(ids, output_indexer_divergence=True).indexer_divergence
    expected = 0.5 * divergence[:, :-1][answers[:, 1:]].mean()

    def indexer_loss(rows: slice, **options):
        given = {"labels": labels[rows], **options}
        if shifted:
            given["shift_labels"] = torch.nn.functional.pad(labels[rows, 1:], (0, 1), value=-100)
            given["labels"] = given["shift_labels"]
        whole = model(ids[rows], **given).loss
        model.config.dsa_indexer_loss_weight = 0.0
        plain = model(ids[rows], **given).loss
        model.config.dsa_indexer_loss_weight = 0.5
        return whole - plain

    # The cross-entropy is transformers', in float32.
    for items in (None, 11, torch.tensor(11)):
        found = indexer_loss(slice(None), **({} if items is None else {"num_items_in_batch": items}))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    parts = [indexer_loss(slice(row, row + 1), num_items_in_batch=11) for row in range(2)]
    torch.testing.assert_close(sum(parts), expected, rtol=0, atol=1e-5)


def test_padding_does_not_count_in_the_indexers_mean(make_lt2, make_ids):
    model, ids = make_lt2(**DSA, dsa_indexer_loss_weight=0.5).train(), make_ids(1, 9)
    padded, mask = torch.nn.functional.pad(ids, (5, 0)), (torch.arange(14) >= 5)[None].long()
    alone = model(ids, labels=ids).loss
    labels = torch.where(torch.arange(14) > 5, padded, -100)  # no token predicts the first one
    torch.testing.assert_close(model(padded, attention_mask=mask, labels=labels).loss, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("indexer", ["lt2", "deepseek"])
def test_an_indexer_learns_in_the_warm_up_and_afterwards(make_lt2, make_ids, indexer):
    model = make_lt2(**DSA, dsa_indexer=indexer, dsa_indexer_loss_weight=1.0, dsa_dense_warmup=True, num_loops=1)
    indexers = [parameter for name, parameter in model.named_parameters() if "_score_" in name]
    optimizer, ids = torch.optim.Adam(indexers, lr=0.02), make_ids(4, 24)
    for warm in (True, False):
        model.config.dsa_dense_warmup = warm
        course = []
        for _ in range(20):
            loss = model(ids, output_indexer_divergence=True).indexer_divergence.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            course.append(loss.item())
        assert course[-1] < 0.7 * course[0]


def test_packed_documents_have_the_divergence_they_have_alone(make_lt2, make_ids):
    """Guards C1."""
    model, ids = make_lt2(**DSA), make_ids(1, 20)
    positions = torch.cat((torch.arange(8), torch.arange(12)))[None]
    packed = model(ids, position_ids=positions, output_indexer_divergence=True).indexer_divergence
    alone = [model(part, output_indexer_divergence=True).indexer_divergence for part in ids.split((8, 12), dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), **EXACT)


@pytest.mark.parametrize("fields", [NSA, DSA], ids=["nsa", "dsa"])
@torch.no_grad()
def test_the_first_difference_to_reading_everything_is_just_past_the_budget(make_lt2, make_ids, fields):
    """Guards G3: at NSA's second branch and at top-k, in a whole model."""
    ids = make_ids(1, 20)
    everything = {"nsa_block_count": 5} if fields is NSA else {"dsa_topk": 20}
    budget = 16 if fields is NSA else 5
    few, all_of_them = make_lt2(**fields)(ids).logits, make_lt2(**{**fields, **everything})(ids).logits
    torch.testing.assert_close(few[:, :budget], all_of_them[:, :budget], **EXACT)
    assert not torch.allclose(few[:, budget:], all_of_them[:, budget:])


class LargestTensor(TorchDispatchMode):
    """Remember the largest number of elements of any tensor made inside."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("indexer", ["lt2", "deepseek", None])
def test_no_tensor_grows_with_the_square_of_the_length(monkeypatch, make_lt2, indexer):
    """Forward and backward, also of the indexer's loss and of its warm-up."""
    monkeypatch.setattr(sparse_attention, "_PIECE_PER_THREAD", 2**13)
    fields = NSA if indexer is None else {**DSA, "dsa_indexer": indexer, "dsa_indexer_loss_weight": 1.0}
    config = make_lt2(**fields, num_hidden_layers=1, num_loops=1, dtype=torch.float32).config
    mixer = build_mixer(config, 0)
    rotary = RotaryEmbedding(config)

    def largest(length: int) -> int:
        x, positions = torch.randn(1, length, 64, requires_grad=True), torch.arange(length)[None]
        mask = (torch.arange(length) >= 9)[None]
        arguments = {"position_embeddings": rotary(x, positions), "position_ids": positions, "attention_mask": mask}
        if indexer is not None:
            arguments["output_divergence"] = True
        with LargestTensor() as seen:
            output, divergence = mixer(x, **arguments)
            (output.sum() if divergence is None else output.sum() + divergence.sum()).backward()
        return seen.elements

    for warm in (False, True):
        config.dsa_dense_warmup = warm and indexer is not None
        assert largest(256) <= 2.2 * largest(128)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_step_on_a_static_cache_is_one_graph(make_lt2, make_ids):
    model, ids = make_lt2(**BOTH, dtype=torch.float32, num_hidden_layers=2, num_loops=2), make_ids(1, 13)
    whole = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :10], cache=cache)
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    for t in range(10, 13):
        token = ids[:, t : t + 1]
        masks = model.create_masks_for_generate(model.config, model.model.embed_tokens(token), None, cache)
        logits = step(token, attention_mask=masks, position_ids=torch.tensor([[t]]), cache=cache).logits
        torch.testing.assert_close(logits, whole[:, t : t + 1], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@torch.no_grad()
def test_a_gpu_gives_the_numbers_of_a_cpu(make_lt2, make_ids):
    model, ids = make_lt2(**BOTH, num_loops=2), make_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected = model(ids, attention_mask=mask).logits
    tokens = greedy(model, ids, 8, attention_mask=mask)
    model, ids, mask = model.cuda(), ids.cuda(), mask.cuda()
    torch.testing.assert_close(model(ids, attention_mask=mask).logits.cpu(), expected, **EXACT)
    for kind in ({}, {"cache_implementation": "offloaded"}):
        assert torch.equal(greedy(model, ids, 8, attention_mask=mask, **kind).cpu(), tokens)
