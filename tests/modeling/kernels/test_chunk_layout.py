# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopergy.modeling.kernels.chunk_layout import Chunks, chunk_layout, document_boundaries


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), chunk_size=st.integers(1, 7), packed=st.booleans()
)
def test_tokens_go_to_chunks_and_back(lengths, chunk_size, packed):
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    length = int(boundaries[-1])
    layout = chunk_layout(length, chunk_size, boundaries.tolist() if packed else None)
    tokens = torch.arange(1.0, 1 + length * 6).view(1, length, 3, 2)
    chunks = layout.to_chunks(tokens, 0, layout.num_chunks)
    assert chunks.shape == (layout.num_chunks, 1, 3, chunk_size, 2)
    assert chunks.count_nonzero() == tokens.numel()
    assert torch.equal(layout.from_chunks(chunks, 0, layout.num_chunks), tokens)
    target = torch.zeros_like(tokens)
    for first in range(0, layout.num_chunks, 2):
        end = min(first + 2, layout.num_chunks)
        part = layout.to_chunks(tokens, first, end)
        assert torch.equal(part, chunks[first:end])
        assert torch.equal(Chunks(layout, tokens).part(first, end), part)
        with Chunks(layout, target).writing(first, end) as place:
            place.copy_(part)
    assert torch.equal(target, tokens)


def test_every_document_starts_a_chunk_and_wastes_less_than_one():
    layout = chunk_layout(21, 4, [0, 5, 5, 13, 21])
    assert layout.first_chunks == {0: 0, 2: 2, 4: 3}
    assert layout.last_chunks == {1: 0, 3: 2, 5: 3}
    assert layout.documents == 4
    assert layout.num_chunks * 4 - 21 < 4 * 3


def test_whole_chunks_of_one_sequence_are_a_view():
    tokens = torch.zeros(2, 12, 3, 2)
    chunks = chunk_layout(12, 4).to_chunks(tokens, 1, 3)
    assert chunks.untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        (torch.tensor([0, 3, 9]), r"from 0 to the length of the row, 10, got \[0, 3, 9\]"),
        (torch.tensor([1, 10]), "from 0"),
        (torch.tensor([0, 7, 5, 10]), "rise"),
        (torch.tensor([0.0, 10.0]), "integer"),
        (torch.tensor([[0, 10]]), "1-D"),
    ],
    ids=["too short", "late start", "falling", "float", "matrix"],
)
def test_boundaries_that_do_not_describe_the_row_are_refused(boundaries, message):
    with pytest.raises(ValueError, match=message):
        document_boundaries(boundaries, 1, 10)


def test_boundaries_are_returned_as_a_list():
    assert document_boundaries(torch.tensor([0, 4, 10], dtype=torch.int32), 1, 10) == [0, 4, 10]
    assert document_boundaries(None, 3, 10) is None
