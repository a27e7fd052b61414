# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from loopergy.modeling.kernels.sparse_attention import (
    document_slices,
    real_tokens,
    take_rows,
    token_order,
    top_indices,
)


@pytest.mark.parametrize("count", [1, 3, 7, 12])
def test_the_largest_are_chosen_and_of_equal_ones_the_first(count):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (6, 5, 12), generator=generator).double()
    scores[0] = -torch.inf
    scores[1, :, 4:] = -torch.inf
    scores[2] = torch.randn(5, 12, dtype=torch.float64, generator=generator)
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values
    assert torch.equal(top_indices(scores, count), expected)


def test_traced_choices_are_the_same(monkeypatch):
    scores = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    expected = top_indices(scores, 8)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(top_indices(scores, 8), expected)


@pytest.mark.parametrize("grad", [False, True])
def test_rows_are_fetched_from_the_front_of_a_buffer(grad):
    buffer = torch.randn(3, 20, 4).requires_grad_(grad)
    index = torch.randint(0, 13, (3, 9))
    rows = buffer[:, :13]
    expected = torch.stack([rows[row, index[row]] for row in range(3)])
    assert torch.equal(take_rows(rows, index), expected)
    transposed = torch.randn(3, 4, 13).transpose(1, 2)
    assert torch.equal(take_rows(transposed, index), torch.stack([transposed[row, index[row]] for row in range(3)]))


def test_ranks_count_real_tokens_and_lead_back_to_their_columns():
    real = torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0]]).bool()
    order = token_order(real, past=3, new=3, device=real.device)
    assert order.ranks.tolist() == [[1, 1, 2], [3, 4, 5], [1, 2, 2]]
    assert token_order(real, past=0, new=3, device=real.device).ranks.tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 0]]
    assert order.column(torch.tensor([[0, 1, 2], [2, 4, 5], [0, 1, 2]])).tolist() == [[2, 3, 5], [2, 4, 5], [0, 3, 4]]


def test_documents_without_tokens_are_passed_over():
    assert document_slices(torch.tensor([0, 3, 3, 5])) == [slice(0, 3), slice(3, 5)]


def test_a_mask_per_query_and_key_is_refused():
    with pytest.raises(ValueError, match=r"chooses its keys itself"):
        real_tokens(torch.ones(2, 1, 5, 5))


SMALL = {
    "nsa": {"nsa_block_size": 4, "nsa_block_count": 4, "nsa_window": 3},
    "dsa": {"dsa_latent_dim": 12, "dsa_tail_dim": 4, "dsa_topk": 5, "dsa_index_head_dim": 8},
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("mixer", SMALL)
def test_function_transforms_give_the_gradients_of_autograd(mixer, make_lt2, make_ids):
    """Under torch.func nothing is computed again for the backward pass, since its hooks do not work there."""
    model, ids = make_lt2(layer_mixers=mixer, **SMALL[mixer]), make_ids(2, 29)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, row):
        return torch.func.functional_call(model, weights, (row[None],), {"use_cache": False}).logits.square().mean()

    rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids)
    for row, tokens in enumerate(ids):
        alone = torch.func.grad(loss)(parameters, tokens)
        model.zero_grad()
        loss({}, tokens).backward()
        for name, parameter in model.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(alone[name], expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(rows[name][row], expected, rtol=0, atol=1e-10)
