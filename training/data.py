# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Text for all three stages: read documents, tokenise, pack into rows of one length, resume at any row.

Sources are named by a string:

| source                        | documents                                                           |
|-------------------------------|---------------------------------------------------------------------|
| `"offline"`                   | both of the next two                                                |
| `"offline:prose"`             | Python's language reference, 79 texts (`pydoc_data.topics`)         |
| `"offline:code"`              | the modules of Python's standard library                            |
| a `.txt`, `.md` or `.py` file | one document                                                        |
| a `.jsonl` file               | one document a line, from its `text` or its chat `messages`         |
| a folder                      | all such files below it, sorted by path                             |
| anything else                 | a data set of the Hub, streamed; `"name"` or `"name:config"`        |

**Held-out documents.** A document is held out if the CRC-32 of its text is divisible by 8 (`is_held_out`). The rule
needs no list, holds for streams, and keeps copies of a document on one side. Blank documents are on neither.

**Packing.** Documents follow each other, each closed by the separator token, cut into rows of `length` tokens without
loss. With `documents="separate"` the positions restart at each document, which all mixers of our models and
transformers' attention take as a boundary; the first token of a document is no target. With `"contiguous"` a row is
one long text.
"""

import hashlib
import itertools
import json
import sysconfig
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

IGNORE = -100  # the label of what is no target
HELD_OUT_EVERY = 8
_TEXT_FILES = (".txt", ".md", ".py", ".rst")
_OTHER_FILES = (".parquet", ".csv", ".tsv", ".json", ".gz", ".zst", ".zip", ".arrow")
# Rows whose start is remembered, so that a checkpoint can be taken behind what a data loader fetched ahead.
_REMEMBERED_ROWS = 4096

_NOT_UTF_8 = "not UTF-8. Convert the file, such as with iconv -f LATIN1."

Split = Literal["train", "held_out", "all"]


def is_held_out(text: str) -> bool:
    """Say whether a document is kept from training: CRC-32 of its UTF-8 text divisible by 8."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % HELD_OUT_EVERY == 0


def in_split(text: str, split: Split) -> bool:
    """Say whether a document belongs to `"train"`, `"held_out"` or `"all"`; a blank one belongs to none of them."""
    return bool(text.strip()) and split in ("all", "held_out" if is_held_out(text) else "train")


def offline_documents(kind: Literal["all", "prose", "code"] = "all") -> list[str]:
    """Return the text that every Python carries: 79 topics of its reference, and the modules of its standard library.

    Args:
        kind (`str`, defaults to `"all"`): `"prose"` for the topics, `"code"` for the modules, or both.

    Returns:
        `list[str]`: Documents in a fixed order.
    """
    documents: list[str] = []
    if kind in ("all", "prose"):
        from pydoc_data.topics import topics

        documents += [topics[name] for name in sorted(topics)]
    if kind in ("all", "code"):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        documents += [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return [text for text in documents if text.strip()]


def whole_characters(text: str) -> str:
    r"""Return a text with halves of UTF-16 pairs, which no tokenizer takes, joined or replaced by U+FFFD.

    Texts that were cut within an emoji hold such halves; in JSON they look like `\ud83d`.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _record_text(record: Any, tokenizer: PreTrainedTokenizerBase | None, where: str) -> str:
    """Read one record: its `text`, or its chat rendered by the tokenizer's template."""
    expected = (
        f"{where}: a record needs a field `text` with a text, or `messages` / `conversations` and a tokenizer with a "
        f"chat template; "
    )
    if not isinstance(record, Mapping):
        raise ValueError(f'{expected}this one is no object such as {{"text": "..."}}, but {str(record)[:60]!r}.')
    if isinstance(record.get("text"), str):
        return whole_characters(record["text"])
    chat = record.get("messages") or record.get("conversations")
    if not chat or tokenizer is None:
        shown = {str(key)[:20]: value if value is None else type(value).__name__ for key, value in record.items()}
        raise ValueError(f"{expected}this one has {shown}.")
    if not isinstance(chat, Sequence) or not all(isinstance(turn, Mapping) for turn in chat):
        raise ValueError(
            f"{where}: a chat is a list of turns such as {{'role': 'user', 'content': '...'}}, got {str(chat)[:60]!r}."
        )
    if tokenizer.chat_template is None:
        raise ValueError(f"{expected}this tokenizer has none.")
    roles = {"human": "user", "gpt": "assistant"}
    turns = [
        {
            "role": roles.get(turn.get("role") or turn.get("from"), turn.get("role") or turn.get("from")),
            "content": turn.get("content") or turn.get("value"),
        }
        for turn in chat
    ]
    return whole_characters(str(tokenizer.apply_chat_template(turns, tokenize=False)))


def jsonl_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield `"FILE, line N"` and the value of each line that is not blank.

    Raises:
        ValueError: A line that is not UTF-8 or no JSON; with file and line.
    """
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                line.encode("utf-8")
                record = json.loads(line) if line.strip() else None
            except UnicodeEncodeError:
                raise ValueError(f"{where}: {_NOT_UTF_8}") from None
            except ValueError as error:
                raise ValueError(f"{where}: no JSON ({error}). Every line of a .jsonl file is one object.") from None
            if line.strip():
                yield where, record


def _file_documents(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[str]:
    if path.suffix != ".jsonl":
        try:
            yield path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: {_NOT_UTF_8}") from None
        return
    for where, record in jsonl_records(path):
        yield _record_text(record, tokenizer, where)


class _Stream:
    """Iterate over the texts of a streamed data set of the Hub, from any record."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase | None):
        self.name, self.tokenizer = name, tokenizer

    def iterate_from(self, start: int) -> Iterator[str]:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError

        name, _, config = self.name.partition(":")
        try:
            records: Any = load_dataset(name, config or None, split="train", streaming=True)
        except (OSError, DatasetNotFoundError) as error:
            raise FileNotFoundError(
                f"Source {self.name!r} is no file or folder here, and the Hub did not give a data set of that name: "
                f"{error}"
            ) from error
        for record in records.skip(start) if start else records:
            yield _record_text(record, self.tokenizer, f"data set {self.name!r}")


Documents = list[str] | _Stream


def load_documents(source: str | Path | Iterable[str], tokenizer: PreTrainedTokenizerBase | None = None) -> Documents:
    """Turn a source into documents that can be read again and from any point.

    Args:
        source (`str`, `Path` or iterable of `str`): See the table of this file, or the texts themselves.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Renders chats.

    Returns:
        Documents for `PackedDataset`.

    Raises:
        FileNotFoundError: A path that does not exist.
        ValueError: A folder without text, a file of another type or not UTF-8, or a line of a `.jsonl` file that is no
            document; with file and line.
    """
    if not isinstance(source, str | Path):
        return [whole_characters(text) for text in source]
    name = str(source)
    if name == "offline" or name.startswith("offline:"):
        kind = name.partition(":")[2] or "all"
        if kind not in ("all", "prose", "code"):
            raise ValueError(f"Source {name!r}: allowed are 'offline', 'offline:prose' and 'offline:code'.")
        return offline_documents(kind)
    path = Path(name).expanduser()
    if path.is_dir():
        suffixes = (*_TEXT_FILES, ".jsonl")
        files = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
        if not files:
            raise ValueError(f"Folder {name!r} holds no file ending in {', '.join(suffixes)}.")
        return [text for file in files for text in _file_documents(file, tokenizer)]
    if path.is_file():
        if path.suffix not in (*_TEXT_FILES, ".jsonl"):
            raise ValueError(f"File {name!r}: allowed are {', '.join(_TEXT_FILES)} and .jsonl.")
        return list(_file_documents(path, tokenizer))
    if path.suffix in (*_TEXT_FILES, ".jsonl", *_OTHER_FILES) or name.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"Source {name!r} is neither a file nor a folder.")
    return _Stream(name, tokenizer)


def separator_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id that closes a document: `<|endoftext|>` where it exists, else the end-of-sequence token."""
    known = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    if isinstance(known, int) and known != tokenizer.unk_token_id:
        return known
    return tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else None


def _too_few(found: int, split: Split) -> str:
    """Say why no document of `found` is in a split, and what to do."""
    if split == "all" or not found:
        return "it has no documents at all, or blank ones alone."
    others = {"train": "held out", "held_out": "for training"}[split]
    hint = ""
    if split == "held_out":
        hint = " `evaluate.num_tokens: 0` in a recipe does without held-out text."
    return (
        f"it has {found} in all, and the checksum of each says that it is {others} (one document in {HELD_OUT_EVERY} "
        f"is held out). Give more documents, {8 * HELD_OUT_EVERY} or so: a folder of files, or a .jsonl file with one "
        f"document a line, and not one long text.{hint}"
    )


@dataclass
class _Row:
    """A row that fills up: its tokens and the position of each within its document."""

    tokens: list[int]
    positions: list[int]


class PackedDataset(IterableDataset):
    """Pack documents into rows of `length` tokens; the same rows for the same arguments, from any row on.

    Each item has `input_ids` and `labels` `[length]`, and `position_ids` `[length]` that restart with each document if
    documents are kept separate. The last row of a pass may be shorter if the data are not repeated.

    Args:
        source (`str`, `Path` or iterable of `str`): What `load_documents` takes.
        tokenizer (`PreTrainedTokenizerBase`): Adds no special tokens here; documents are closed by the separator.
        length (`int`): Tokens a row.
        documents (`str`, defaults to `"separate"`): `"separate"` or `"contiguous"`.
        split (`str`, defaults to `"train"`): `"train"`, `"held_out"` or `"all"`, see `is_held_out`.
        seed (`int`, defaults to 0): Order of the documents in each pass. Streams keep their order.
        repeat (`bool`, defaults to `True`): Start another pass when the documents are used up.

    Raises:
        ValueError: A length below 2, an unknown option, or no document on this side of the split. On iteration: no
            token in any document.
    """

    def __init__(
        self,
        source: str | Path | Iterable[str],
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        *,
        documents: Literal["separate", "contiguous"] = "separate",
        split: Split = "train",
        seed: int = 0,
        repeat: bool = True,
    ):
        if length < 2:
            raise ValueError(f"`length` must be at least 2, got {length}: one token has no target.")
        if documents not in ("separate", "contiguous"):
            raise ValueError(f"`documents` must be 'separate' or 'contiguous', got {documents!r}.")
        if split not in ("train", "held_out", "all"):
            raise ValueError(f"`split` must be 'train', 'held_out' or 'all', got {split!r}.")
        self.documents: Documents = load_documents(source, tokenizer)
        if not isinstance(self.documents, _Stream):
            found = sum(bool(text.strip()) for text in self.documents)
            self.documents = [text for text in self.documents if in_split(text, split)]
            if not self.documents:
                name = f"Source {str(source)!r}" if isinstance(source, str | Path) else "The list of texts"
                raise ValueError(f"{name} has no document in the split {split!r}: {_too_few(found, split)}")
        self.tokenizer, self.length, self.separate = tokenizer, length, documents == "separate"
        self.split: Split = split
        self.seed, self.repeat = seed, repeat
        self.separator = separator_token(tokenizer)
        self._start = {"epoch": 0, "document": 0, "token": 0, "rows": 0}
        self._row_starts: deque[dict[str, int]] = deque(maxlen=_REMEMBERED_ROWS)

    @cached_property
    def texts_hash(self) -> str:
        """SHA-256 of all documents; a stream of the Hub counts by its name."""
        digest = hashlib.sha256()
        for text in self.documents if isinstance(self.documents, list) else [self.documents.name]:
            digest.update(f"{len(text)} ".encode() + text.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def _texts(self, epoch: int, start: int) -> Iterator[tuple[int, str]]:
        """Yield (index, text) of one pass from document `start` on, in the order of the pass."""
        documents = self.documents
        if isinstance(documents, _Stream):
            for index, text in enumerate(documents.iterate_from(start), start):
                if in_split(text, self.split):
                    yield index, text
            return
        # Hashed, so that later passes of one seed are not the passes of the next seed.
        hashed = hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()
        seed = int.from_bytes(hashed[:6], "little") if epoch else self.seed
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(documents), generator=generator).tolist()
        for index in range(start, len(order)):
            yield index, documents[order[index]]

    def _pieces(self) -> Iterator[tuple[list[int], int, int, int]]:
        """Yield the tokens left of each document, with pass, document and first token."""
        worker = get_worker_info()
        first, start, skip = (self._start[key] for key in ("epoch", "document", "token"))
        for epoch in itertools.count(first) if self.repeat else [first]:
            mine, some = False, start > 0 or skip > 0
            for index, text in self._texts(epoch, start):
                if worker is not None and index % worker.num_workers != worker.id:
                    continue
                tokens = self._tokens(text)
                mine, some = True, some or bool(tokens)
                yield tokens[skip:], epoch, index, skip
                skip = 0
            if worker is not None and not mine and start == 0:
                # More workers than documents: another pass would give this one nothing either.
                return
            if not some and not any(self._tokens(text) for _, text in self._texts(epoch, 0)):
                raise ValueError(f"No document of split {self.split!r} has a token: none is there, or all are empty.")
            start = 0

    def _tokens(self, text: str) -> list[int]:
        """Tokenise a document and close it."""
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return tokens if self.separator is None else [*tokens, self.separator]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self._row_starts.clear()
        self._row_starts.append(self._start)
        rows, row = self._start["rows"], _Row([], [])
        for tokens, epoch, document, first in self._pieces():
            taken = 0
            while taken < len(tokens):
                part = tokens[taken : taken + self.length - len(row.tokens)]
                row.tokens += part
                row.positions += range(len(part))
                taken += len(part)
                if len(row.tokens) == self.length:
                    rows += 1
                    self._row_starts.append(
                        {"epoch": epoch, "document": document, "token": first + taken, "rows": rows}
                    )
                    yield self._item(row)
                    row = _Row([], [])
        if len(row.tokens) > 1:
            yield self._item(row)

    def _item(self, row: _Row) -> dict[str, torch.Tensor]:
        input_ids = torch.tensor(row.tokens)
        if not self.separate:
            return {"input_ids": input_ids, "labels": input_ids.clone()}
        position_ids = torch.tensor(row.positions)
        return {
            "input_ids": input_ids,
            "labels": input_ids.masked_fill(position_ids == 0, IGNORE),
            "position_ids": position_ids,
        }

    def state_dict(self, rows: int | None = None) -> dict[str, int]:
        """Return where the row after the first `rows` rows begins; default: after the last row given out.

        Args:
            rows (`int`, *optional*): Rows used so far, those before a resumed start included.

        Raises:
            ValueError: That row was not given out here, or too long ago.
        """
        if rows is None:
            return dict(self._row_starts[-1]) if self._row_starts else dict(self._start)
        for start in reversed(self._row_starts or [self._start]):
            if start["rows"] == rows:
                return dict(start)
        raise ValueError(
            f"The start of row {rows} is not known here; known are the last {len(self._row_starts)} rows."
        )

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Make the next iteration begin at the row that `state_dict` named."""
        missing = self._start.keys() - state.keys()
        if missing:
            raise ValueError(f"The data state lacks {sorted(missing)}; it has {sorted(state)}.")
        self._start = {key: int(state[key]) for key in self._start}
        self._row_starts.clear()


@dataclass
class LanguageModelCollator:
    """Stack rows into a batch, padding shorter ones on the right.

    Labels are the item's `labels`, else its `input_ids`, where its own `attention_mask` is 1. Pads get label
    -100 because of where they are, never because of their id, so a real end-of-sequence token keeps its label even if
    it is also the padding token. Pads of rows with `position_ids` become a document of their own; other rows get an
    `attention_mask` if there is any pad.

    Args:
        pad_token_id (`int`): Fills up; `tokenizer.pad_token_id`.
    """

    pad_token_id: int

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `labels`, and `position_ids` or `attention_mask` where needed; all `[batch, length]`."""
        rows = [{key: torch.as_tensor(value) for key, value in item.items()} for item in items]
        length = max(len(row["input_ids"]) for row in rows)
        columns: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "attention_mask": []}
        positions = []
        for row in rows:
            ids, pads = row["input_ids"], length - len(row["input_ids"])
            mask = row.get("attention_mask", torch.ones_like(ids))
            # Nothing predicts a real token after a pad either.
            behind_pad = torch.nn.functional.pad(mask[:-1], (1, 0), value=1) == 0
            labels = row.get("labels", ids).masked_fill((mask == 0) | behind_pad, IGNORE)
            columns["input_ids"].append(torch.nn.functional.pad(ids, (0, pads), value=self.pad_token_id))
            columns["labels"].append(torch.nn.functional.pad(labels, (0, pads), value=IGNORE))
            columns["attention_mask"].append(torch.nn.functional.pad(mask, (0, pads), value=0))
            if "position_ids" in row:
                positions.append(torch.cat([row["position_ids"], torch.arange(pads)]))
        batch = {key: torch.stack(values) for key, values in columns.items()}
        if positions:
            if len(positions) != len(rows):
                raise ValueError("Either all rows of a batch have `position_ids` or none.")
            batch["position_ids"] = torch.stack(positions)
        if positions or bool(batch["attention_mask"].all()):
            del batch["attention_mask"]
        return batch


def held_out_batches(
    source: str | Path | Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    num_tokens: int,
    batch_size: int = 1,
    documents: Literal["separate", "contiguous"] = "separate",
    split: Split = "held_out",
    seed: int = 0,
) -> list[dict[str, torch.Tensor]]:
    """Return fixed batches of documents that training never sees, for evaluation and layer selection.

    Args:
        source (`str`, `Path` or iterable of `str`): What `load_documents` takes.
        tokenizer (`PreTrainedTokenizerBase`): As in `PackedDataset`.
        length (`int`): Tokens a row.
        num_tokens (`int`): Tokens wanted; rounded up to whole rows, fewer if the documents end before.
        batch_size (`int`, defaults to 1): Rows a batch.
        documents (`str`, defaults to `"separate"`): As in `PackedDataset`.
        split (`str`, defaults to `"held_out"`): `"train"` gives a fixed sample of the training side, for selection.
        seed (`int`, defaults to 0): Order of the documents.

    Returns:
        `list[dict[str, torch.Tensor]]`: The same list for the same arguments.
    """
    data = PackedDataset(source, tokenizer, length, documents=documents, split=split, seed=seed, repeat=False)
    rows = list(itertools.islice(iter(data), -(-num_tokens // length)))
    pad = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0
    collate = LanguageModelCollator(pad)
    return [collate(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
