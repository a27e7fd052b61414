# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Long texts as token streams, and the windows cut from them."""

from pathlib import Path

import torch
from torch.utils.data import Dataset

from loopergy.training.data import Split, in_split, load_documents


def read_text(source: str | Path, max_characters: int | None = None, split: Split = "all") -> str:
    """Return the documents of a source, one line end between them, as one text.

    Args:
        source (`str` or `Path`): What `loopergy.training.data` reads: `"offline:prose"` for the reference manual that
            Python carries, a file, a folder, or the name of a data set, which is streamed.
        max_characters (`int`, *optional*): Stop there; a stream needs it.
        split (`str`, defaults to `"all"`): `"train"` or `"held_out"` for the documents of that side alone.

    Raises:
        ValueError: As `load_documents`, or no text on that side.
    """
    documents = load_documents(source)
    parts, size = [], 0
    for text in documents if isinstance(documents, list) else documents.iterate_from(0):
        if not in_split(text, split):
            continue
        parts.append(text)
        size += len(text) + 1
        if max_characters is not None and size > max_characters:
            break
    if not parts:
        raise ValueError(f"Source {str(source)!r} has no text in the split {split!r}: give another source or split.")
    return "\n".join(parts)[:max_characters]


class Windows(Dataset):
    """Windows of one length of a token stream; every token of a window but its first is a label.

    Args:
        stream (`torch.Tensor` of shape (tokens,)): The ids.
        starts (`torch.Tensor` of shape (windows,)): Where each window begins.
        length (`int`): Tokens in a window.
    """

    def __init__(self, stream: torch.Tensor, starts: torch.Tensor, length: int):
        self.stream, self.starts, self.length = stream, starts, length

    @classmethod
    def drawn(cls, stream: torch.Tensor, length: int, count: int, seed: int) -> "Windows":
        """Return `count` windows at places that a seed fixes."""
        _check_length(stream, length)
        generator = torch.Generator().manual_seed(seed)
        return cls(stream, torch.randint(len(stream) - length + 1, (count,), generator=generator), length)

    @classmethod
    def in_order(cls, stream: torch.Tensor, length: int, count: int | None = None) -> "Windows":
        """Return the windows that follow each other, one token shared, so that each token is a label once.

        With `count`, that many of them, evenly spread. Up to `length - 2` tokens at the end are left out.
        """
        _check_length(stream, length)
        starts = torch.arange(0, len(stream) - length + 1, length - 1)
        if count is not None and count < len(starts):
            starts = starts[torch.arange(count) * len(starts) // count]
        return cls(stream, starts, length)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(self.starts[index])
        ids = self.stream[start : start + self.length]
        return {"input_ids": ids, "labels": ids}


def _check_length(stream: torch.Tensor, length: int) -> None:
    if not 2 <= length <= len(stream):
        raise ValueError(f"A window must have 2 to {len(stream)} tokens, as many as the text has; got {length}.")
