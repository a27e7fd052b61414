# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Where tokens stand once a row is cut into chunks, be it one sequence or several documents packed together.

Every document starts with a chunk of its own, so that a kernel keeps documents apart by starting a fresh state at
certain chunks and needs no mask inside a chunk. Places that only fill up a document's last chunk hold zeros; there are
fewer than `chunk_size` of them per document.

Shape letters: B batch, L length, H heads, C tokens of a chunk, s chunks of a range.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class ChunkLayout(NamedTuple):
    """Say which token stands where. Made by `chunk_layout`.

    Args:
        chunk_size: tokens in a chunk.
        num_chunks: chunks, over all documents.
        length: tokens in the row.
        documents: documents in the row, empty ones too.
        places: [length], place `chunk * chunk_size + offset` of every token; None where it is the token's own index.
        token_starts: [num_chunks + 1], tokens before each chunk; None together with `places`.
        first_chunks: chunk with which a document starts -> index of that document.
        last_chunks: chunk with which a document ends -> index of that document. Empty documents have no chunk.
    """

    chunk_size: int
    num_chunks: int
    length: int
    documents: int
    places: Tensor | None
    token_starts: list[int] | None
    first_chunks: dict[int, int]
    last_chunks: dict[int, int]

    def to_chunks(self, tokens: Tensor, first: int, end: int) -> Tensor:
        """Return chunks `first` to `end - 1` of `tokens`.

        Args:
            tokens: [B, L, H, ...], any strides.
            first: first chunk of the range.
            end: one past its last chunk.

        Returns:
            [s, B, H, C, ...]; a view of `tokens` unless places have to be filled up.
        """
        start, stop = self.tokens_of(first, end)
        part = tokens[:, start:stop]
        room = (end - first) * self.chunk_size
        if self.places is not None:
            filled = part.new_zeros(part.shape[0], room, *part.shape[2:])
            part = filled.index_copy(1, self.places[start:stop] - first * self.chunk_size, part)
        elif stop - start < room:
            part = torch.nn.functional.pad(part, [0, 0] * (part.dim() - 2) + [0, room - (stop - start)])
        return _split(part, self.chunk_size)

    def from_chunks(self, chunks: Tensor, first: int, end: int) -> Tensor:
        """Return the tokens [B, tokens of the range, H, ...] of chunks `first` to `end - 1` [s, B, H, C, ...]."""
        start, stop = self.tokens_of(first, end)
        tokens = chunks.transpose(2, 3).movedim(1, 0).flatten(1, 2)
        if self.places is not None:
            return tokens.index_select(1, self.places[start:stop] - first * self.chunk_size)
        return tokens[:, : stop - start]

    def tokens_of(self, first: int, end: int) -> tuple[int, int]:
        """Return the first token of chunks `first` to `end - 1`, and one past their last one."""
        if self.token_starts is not None:
            return self.token_starts[first], self.token_starts[end]
        return first * self.chunk_size, min(end * self.chunk_size, self.length)


class Chunks:
    """The chunks of one tensor, for a kernel that goes through them part by part.

    Args:
        layout: where the tokens stand.
        tokens: [B, L, H, ...], any strides.
    """

    def __init__(self, layout: ChunkLayout, tokens: Tensor) -> None:
        self.layout, self.tokens = layout, tokens
        # One view of all chunks that need no filling up: a part of it is had by a single operation.
        self.full = layout.length // layout.chunk_size if layout.places is None else 0
        self.view = _split(tokens[:, : self.full * layout.chunk_size], layout.chunk_size)

    def part(self, first: int, end: int) -> Tensor:
        """Return chunks `first` to `end - 1`, as `ChunkLayout.to_chunks` does."""
        return self.view[first:end] if end <= self.full else self.layout.to_chunks(self.tokens, first, end)

    @contextmanager
    def writing(self, first: int, end: int) -> Iterator[Tensor]:
        """Lend a tensor [s, B, H, C, ...]; what is written there stands in the tokens afterwards.

        The tensor is a view of the tokens unless places have to be filled up, so that results go straight to their
        place.
        """
        place = self.part(first, end)
        yield place
        if end > self.full:
            start, stop = self.layout.tokens_of(first, end)
            self.tokens[:, start:stop] = self.layout.from_chunks(place, first, end)


def _split(tokens: Tensor, chunk_size: int) -> Tensor:
    """Return [s, B, H, C, ...], a view of `tokens` [B, s * C, H, ...]."""
    return tokens.unflatten(1, (tokens.shape[1] // chunk_size, chunk_size)).movedim(0, 1).transpose(2, 3)


def chunk_layout(
    length: int, chunk_size: int, boundaries: list[int] | None = None, device: torch.device | str = "cpu"
) -> ChunkLayout:
    """Cut a row of tokens into chunks.

    Args:
        length: tokens in the row.
        chunk_size: tokens in a chunk, at least 1.
        boundaries: [0, ..., length], the boundaries of the documents, as `document_boundaries` returns them;
            None for one document.
        device: where `places` is to live.

    Returns:
        The layout.
    """
    if boundaries is None:
        num_chunks = int(-(-length // chunk_size))  # a plain number in traced programs too, which unroll the chunks
        starts, ends = ({0: 0}, {num_chunks - 1: 0}) if num_chunks else ({}, {})
        return ChunkLayout(chunk_size, num_chunks, length, 1, None, None, starts, ends)
    starts, ends, places, token_starts = {}, {}, [torch.zeros(0, dtype=torch.long)], [0]
    for document, (start, stop) in enumerate(pairwise(boundaries)):
        if start == stop:
            continue
        first = len(token_starts) - 1
        starts[first] = document
        places.append(torch.arange(stop - start) + first * chunk_size)
        token_starts.extend(range(start + chunk_size, stop, chunk_size))
        token_starts.append(stop)
        ends[len(token_starts) - 2] = document
    all_places = torch.cat(places).to(device)
    return ChunkLayout(
        chunk_size, len(token_starts) - 1, length, len(boundaries) - 1, all_places, token_starts, starts, ends
    )


def document_boundaries(cu_seqlens: Tensor | None, batch: int, length: int) -> list[int] | None:
    """Check cumulative document lengths and return them as a list.

    Args:
        cu_seqlens: [documents + 1], integers rising from 0 to `length`; None for one document per row.
        batch: rows; packed documents share a single row.
        length: tokens in a row.

    Returns:
        The list, or None for None.

    Raises:
        ValueError: `cu_seqlens` is not such a tensor, or there are several rows.
    """
    if cu_seqlens is None:
        return None
    if batch != 1:
        raise ValueError(
            f"`cu_seqlens` describes documents packed into one row, so the batch size must be 1, got {batch}. "
            "Flatten the batch into one row: x.flatten(0, 1).unsqueeze(0)."
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"`cu_seqlens` must be a 1-D integer tensor, got shape {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}."
        )
    boundaries = cu_seqlens.tolist()
    rises = all(start <= stop for start, stop in pairwise(boundaries))
    if boundaries[0] != 0 or boundaries[-1] != length or not rises:
        raise ValueError(f"`cu_seqlens` must rise from 0 to the length of the row, {length}, got {boundaries}.")
    return boundaries
