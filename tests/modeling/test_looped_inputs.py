# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import torch

from loopergy.modeling.looped_inputs import default_positions, find_documents


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
