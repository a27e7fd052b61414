# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from loopergy.modeling.looped_inputs import default_positions, find_documents, same_document


def documents(positions, mask=None):
    positions = torch.tensor(positions)
    mask = None if mask is None else torch.tensor(mask)
    return find_documents(positions.shape, positions, mask)


def test_positions_that_restart_mark_documents():
    found = documents([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert found.ids.tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
    assert found.cu_seqlens.tolist() == [0, 3, 5, 6, 12]


def test_padding_is_no_document():
    """`generate` fills the positions of padding with a constant; only real tokens are compared."""
    left = [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert documents(left, [[0, 0, 1, 1, 1], [1] * 5]) is None
    assert documents([[1, 1, 0, 1, 2]], [[0, 0, 1, 1, 1]]) is None
    assert documents([[5, 6, 7]]) is None


def test_padding_between_and_behind_documents_stands_alone():
    found = documents([[0, 1, 0, 0, 1, 0]], [[1, 1, 0, 1, 1, 0]])
    assert found.ids.tolist() == [[0, 0, 1, 2, 2, 3]]
    assert found.cu_seqlens.tolist() == [0, 2, 3, 5, 6]


def test_a_gap_in_the_positions_is_a_border_too():
    """Documents of one token each have position 0 twice; a jump forward can only be another document."""
    assert documents([[0, 0, 5]]).ids.tolist() == [[0, 1, 2]]


def test_default_positions_skip_padding_and_restart_in_documents():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert default_positions((2, 5), mask, 0, None, mask.device).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert default_positions((2, 1), mask, 4, None, mask.device).tolist() == [[2], [4]]
    assert default_positions((2, 2), None, 4, None, mask.device).tolist() == [[4, 5]]
    found = find_documents((1, 5), None, None, torch.tensor([0, 2, 5]))
    assert default_positions((1, 5), None, 0, found, mask.device).tolist() == [[0, 1, 0, 1, 2]]


@pytest.mark.parametrize("bounds", [[1, 3, 5], [0, 4, 2, 5], [0, 3], [3, 5], [0, 2, 6], [5], []])
def test_boundaries_that_do_not_span_the_row_in_order_are_refused(bounds):
    with pytest.raises(ValueError, match=r"cu_seq_lens_q .* must rise from 0 to 5"):
        find_documents((1, 5), None, None, torch.tensor(bounds, dtype=torch.int32))
    assert find_documents((1, 5), None, None, torch.tensor([0, 2, 2, 5])).ids.tolist() == [[0, 0, 1, 1, 1]]


def test_documents_are_told_apart_by_number():
    visible = same_document(torch.tensor([[0, 0, 1]]))
    assert [[bool(visible(0, 0, query, key)) for key in range(3)] for query in range(3)] == [
        [True, True, False],
        [True, True, False],
        [False, False, True],
    ]


@torch.no_grad()
def test_a_padding_mask_of_other_rows_is_refused(each_family, build_kind, make_ids):
    model, ids = build_kind(each_family), make_ids(2, 6)
    for rows in (1, 3):
        with pytest.raises(ValueError, match=rf"attention_mask has {rows} rows for 2 rows of tokens"):
            model(ids, attention_mask=torch.ones(rows, 6, dtype=torch.long))


@torch.no_grad()
def test_one_mask_per_query_and_key_may_serve_all_rows(make_ouro, make_ids):
    model, ids, visible = make_ouro(), make_ids(2, 6), torch.ones(6, 6, dtype=torch.bool).tril()
    for rows in (1, 2):
        given = visible.expand(rows, 1, 6, 6)
        torch.testing.assert_close(model(ids, attention_mask=given).logits, model(ids).logits)
    with pytest.raises(ValueError, match="attention_mask has 3 rows for 2 rows of tokens"):
        model(ids, attention_mask=visible.expand(3, 1, 6, 6))
