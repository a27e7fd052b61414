# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Data: nothing lost, documents kept apart, held-out documents never seen, any row can be the first after a resume."""

import itertools
import json
import zlib

import pytest
import torch

from loopergy.training.data import (
    LanguageModelCollator,
    PackedDataset,
    held_out_batches,
    is_held_out,
    load_documents,
    offline_documents,
)

TEXTS = ["alpha beta", "gamma", "delta epsilon zeta", "eta", "theta iota kappa lambda", "mu nu"]


def rows(data, count):
    return list(itertools.islice(iter(data), count))


def test_a_pass_gives_every_token_of_every_document_once_with_a_separator_after_each(byte_tokenizer):
    data = PackedDataset(TEXTS, byte_tokenizer, 7, split="all", repeat=False)
    tokens = torch.cat([row["input_ids"] for row in data]).tolist()
    documents = sorted(byte_tokenizer.decode(tokens).split("<eos>")[:-1])
    assert documents == sorted(TEXTS)
    assert all(len(row["input_ids"]) == 7 for row in list(data)[:-1])


def test_positions_restart_with_each_document_and_its_first_token_is_no_target(byte_tokenizer):
    data = PackedDataset(["abc", "defg"], byte_tokenizer, 9, split="all", repeat=False)
    row = next(iter(data))
    first = 4 if row["input_ids"][3] == 1 else 5
    assert row["position_ids"].tolist() == [*range(first), *range(9 - first)]
    assert (row["labels"] == -100).nonzero().flatten().tolist() == [0, first]
    contiguous = next(iter(PackedDataset(["abc", "defg"], byte_tokenizer, 9, split="all", documents="contiguous")))
    assert "position_ids" not in contiguous
    assert torch.equal(contiguous["labels"], contiguous["input_ids"])


def test_documents_are_held_out_by_their_checksum_and_never_trained_on(byte_tokenizer):
    texts = [f"document number {index}" for index in range(64)]
    held = {text for text in texts if zlib.crc32(text.encode()) % 8 == 0}
    assert 0 < len(held) < 32
    assert held == {text for text in texts if is_held_out(text)}
    train = PackedDataset(texts, byte_tokenizer, 16, repeat=False)
    seen = byte_tokenizer.decode(torch.cat([row["input_ids"] for row in train]).tolist())
    assert not any(text + "<eos>" in seen for text in held)
    batches = held_out_batches(texts, byte_tokenizer, length=16, num_tokens=10_000)
    text = byte_tokenizer.decode(torch.cat([batch["input_ids"].flatten() for batch in batches]).tolist())
    assert {part for part in text.replace("<pad>", "").split("<eos>") if part} == held


@pytest.mark.parametrize("done", [1, 5, 11, 23])
def test_resuming_from_a_state_gives_the_rows_that_would_have_come(byte_tokenizer, done):
    """Guards I7: across documents, passes and reshuffles."""
    whole = rows(PackedDataset(TEXTS, byte_tokenizer, 7, split="all", seed=3), 30)
    first = PackedDataset(TEXTS, byte_tokenizer, 7, split="all", seed=3)
    rows(first, done + 4)
    state = json.loads(json.dumps(first.state_dict(done)))
    assert state["rows"] == done
    second = PackedDataset(TEXTS, byte_tokenizer, 7, split="all", seed=3)
    second.load_state_dict(state)
    for row, expected in zip(rows(second, 30 - done), whole[done:], strict=True):
        assert torch.equal(row["input_ids"], expected["input_ids"])
    assert second.state_dict()["rows"] == 30


def test_a_run_can_be_resumed_twice_within_one_long_document(byte_tokenizer):
    """Guards I7."""
    text = ["a long document " * 20]
    whole = rows(PackedDataset(text, byte_tokenizer, 7, split="all"), 12)
    state, got = None, []
    for _ in range(4):
        data = PackedDataset(text, byte_tokenizer, 7, split="all")
        if state is not None:
            data.load_state_dict(state)
        got += rows(data, 3)
        state = data.state_dict()
    for row, expected in zip(got, whole, strict=True):
        assert torch.equal(row["input_ids"], expected["input_ids"])


def test_the_state_of_a_row_that_was_not_given_out_is_an_error(byte_tokenizer):
    data = PackedDataset(TEXTS, byte_tokenizer, 7, split="all")
    rows(data, 2)
    with pytest.raises(ValueError, match="row 9"):
        data.state_dict(9)


def test_passes_have_different_orders_and_a_seed_repeats_them(byte_tokenizer):
    def text(seed):
        return torch.cat(
            [r["input_ids"] for r in rows(PackedDataset(TEXTS, byte_tokenizer, 7, split="all", seed=seed), 40)]
        )

    assert torch.equal(text(0), text(0))
    assert not torch.equal(text(0), text(1))
    length = sum(len(t) + 1 for t in TEXTS)
    assert not torch.equal(text(0)[:length], text(0)[length : 2 * length])


def test_workers_share_the_documents_without_overlap(byte_tokenizer):
    data = PackedDataset(TEXTS, byte_tokenizer, 6, split="all", repeat=False)
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2)
    tokens = torch.cat([row["input_ids"] for row in loader]).tolist()
    assert sorted(tokens) == sorted(torch.cat([row["input_ids"] for row in data]).tolist())


def test_workers_without_documents_end_and_the_others_go_on(byte_tokenizer):
    data = PackedDataset(["one document", "two"], byte_tokenizer, 6, split="all")
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=4, timeout=30)
    got = torch.stack([row["input_ids"] for row in itertools.islice(loader, 12)])
    assert got.shape == (12, 6)
    assert {"n", "t"} <= set(byte_tokenizer.decode(got.flatten().tolist()))


def test_end_of_sequence_keeps_its_label_when_it_is_also_the_pad():
    """Guards I8."""
    eos = 2
    batch = LanguageModelCollator(eos)([{"input_ids": [5, 6, eos]}, {"input_ids": [7, eos, 8, 9, eos]}])
    assert batch["labels"].tolist() == [[5, 6, eos, -100, -100], [7, eos, 8, 9, eos]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    left = LanguageModelCollator(eos)([{"input_ids": [eos, eos, 5, eos], "attention_mask": [0, 0, 1, 1]}])
    # No real position predicts the 5.
    assert left["labels"].tolist() == [[-100, -100, -100, eos]]


def test_pads_of_packed_rows_are_a_document_of_their_own():
    items = [
        {"input_ids": [5, 6, 7], "position_ids": [0, 1, 0], "labels": [-100, 6, -100]},
        {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 2, 3]},
    ]
    batch = LanguageModelCollator(0)(items)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100], [5, 6, 7, 8]]
    assert "attention_mask" not in batch


def test_the_offline_corpus_is_there_in_a_fixed_order_and_has_both_sides_of_the_split():
    prose = offline_documents("prose")
    assert len(prose) >= 70
    assert sum(map(len, prose)) > 400_000
    assert prose == offline_documents("prose")
    assert 3 <= sum(map(is_held_out, prose)) <= len(prose) // 3
    assert len(offline_documents()) > len(prose) + 100


def test_files_folders_and_chats_are_read(tmp_path, topics_tokenizer):
    (tmp_path / "b.txt").write_text("plain text")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jsonl").write_text(
        '{"text": "one"}\n\n{"messages": [{"role": "user", "content": "hi"}]}\n'
        '{"conversations": [{"from": "human", "value": "ho"}]}\n'
    )
    assert load_documents(tmp_path / "b.txt") == ["plain text"]
    chat = "<|im_start|>user\n{}<|im_end|>\n"
    expected = ["plain text", "one", chat.format("hi"), chat.format("ho")]
    assert load_documents(tmp_path, topics_tokenizer) == expected
    with pytest.raises(ValueError, match=r"a.jsonl, line 3.*chat template"):
        load_documents(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": nope}', "no JSON"),
        (b'["a", "b"]', r"no object.*\['a', 'b'\]"),
        (b'"abc"', "no object.*abc"),
        (b"5", "no object.*5"),
        (b"null", "no object.*None"),
        ('{"text": "café"}'.encode("latin-1"), "not UTF-8"),
        (b'{"text": null}', "a field `text` with a text.*this one has {'text': None}"),
        (b'{"messages": ["hi", "there"]}', "a chat is a list of turns.*hi"),
        (b'{"messages": {"role": "user", "content": "hi"}}', "a chat is a list of turns"),
        (b'{"messages": [{"role": "user", "content": "hi"}]}', "this tokenizer has none"),
    ],
)
def test_a_line_that_is_no_document_is_refused_with_file_and_line(tmp_path, byte_tokenizer, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 3: .*{message}"):
        load_documents(tmp_path, byte_tokenizer)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfthree")
    assert load_documents(tmp_path) == ["one", "two", "three"]


def test_halves_of_characters_are_replaced_so_that_texts_can_be_tokenised(tmp_path, byte_tokenizer):
    (tmp_path / "a.jsonl").write_text(r'{"text": "cut \ud83d"}' + "\n" + r'{"text": "whole \ud83d\ude00"}')
    assert load_documents(tmp_path) == ["cut \ufffd", "whole \U0001f600"]
    assert load_documents(["\udc00 cut"]) == ["\ufffd cut"]
    assert rows(PackedDataset(tmp_path, byte_tokenizer, 8, split="all"), 9)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("/no/such/folder", FileNotFoundError, "neither"),
        ("corpus.parquet", FileNotFoundError, "neither"),
        ("offline:poems", ValueError, "offline:prose"),
    ],
)
def test_a_source_that_is_not_there_says_what_is_allowed(source, error, message):
    with pytest.raises(error, match=message):
        load_documents(source)


def test_a_name_that_the_hub_does_not_have_is_said_to_be_no_path_either(byte_tokenizer):
    data = PackedDataset("data/mistyped", byte_tokenizer, 8)
    with pytest.raises(FileNotFoundError, match="'data/mistyped' is no file or folder here, and the Hub did not give"):
        next(iter(data))


def test_streamed_data_sets_are_read_and_resumed_without_tokenising_what_was_read(byte_tokenizer, monkeypatch):
    import datasets

    streamed = datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: streamed)
    data = PackedDataset("owner/name", byte_tokenizer, 7, split="all")
    whole = rows(data, 20)
    state = data.state_dict(8)
    again = PackedDataset("owner/name", byte_tokenizer, 7, split="all")
    again.load_state_dict(state)
    for row, expected in zip(rows(again, 12), whole[8:], strict=True):
        assert torch.equal(row["input_ids"], expected["input_ids"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"length": 1}, "at least 2"), ({"documents": "mixed"}, "contiguous"), ({"split": "test"}, "held_out")],
)
def test_options_that_cannot_be_are_refused(byte_tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        PackedDataset(TEXTS, byte_tokenizer, **{"length": 8, "split": "all", **options})


def test_a_split_without_documents_is_an_error(byte_tokenizer):
    kept = [text for text in TEXTS if not is_held_out(text)]
    with pytest.raises(ValueError, match="no document in the split 'held_out'"):
        PackedDataset(kept, byte_tokenizer, 8, split="held_out")


def test_a_single_file_is_told_how_many_documents_a_split_needs(byte_tokenizer, tmp_path):
    text = next(text for text in TEXTS if not is_held_out(text))
    (tmp_path / "book.txt").write_text(text)
    with pytest.raises(ValueError, match=r"book.txt' has no .*it has 1 in all.*64 or so.*`evaluate.num_tokens: 0`"):
        held_out_batches(tmp_path / "book.txt", byte_tokenizer, length=8, num_tokens=8)
    held = next(text for text in map(str, itertools.count()) if is_held_out(text))
    with pytest.raises(ValueError, match=r"The list of texts has no document in the split 'train'.*held out"):
        PackedDataset([held], byte_tokenizer, 8)
    with pytest.raises(ValueError, match="no documents at all"):
        PackedDataset([], byte_tokenizer, 8, split="all")


def test_blank_documents_are_on_no_side_of_the_split(byte_tokenizer):
    assert is_held_out("")
    texts = ["", " \n", *(text for text in TEXTS if not is_held_out(text))]
    with pytest.raises(ValueError, match="no document in the split 'held_out'"):
        held_out_batches(texts, byte_tokenizer, length=8, num_tokens=8)
    with pytest.raises(ValueError, match="blank ones alone"):
        PackedDataset(["", ""], byte_tokenizer, 8, split="all")


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "old.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"old\.txt: not UTF-8.*iconv"):
        load_documents(tmp_path)


def test_later_passes_of_a_seed_are_not_those_of_the_next_one():
    class Words:
        unk_token_id, eos_token_id = None, 0

        def convert_tokens_to_ids(self, token):
            return None

        def __call__(self, text, **options):
            return {"input_ids": [int(text)]}

    def passes(seed):
        data = PackedDataset(list(map(str, range(1, 17))), Words(), 32, split="all", seed=seed)
        return [row["input_ids"].tolist() for row in rows(data, 4)]

    assert not any(one == other for one in passes(0)[1:] for other in passes(1))
    generator = torch.Generator().manual_seed(1)
    assert passes(1)[0][::2] == [1 + place for place in torch.randperm(16, generator=generator).tolist()]


@pytest.mark.timeout(60)
def test_documents_without_any_token_are_an_error_and_not_an_endless_search(byte_tokenizer, monkeypatch):
    monkeypatch.setattr("loopergy.training.data.separator_token", lambda tokenizer: None)
    tokenise = byte_tokenizer.__call__
    monkeypatch.setattr(
        type(byte_tokenizer), "__call__", lambda self, text, **options: tokenise(text.replace("-", ""), **options)
    )
    data = PackedDataset(["-", "--"], byte_tokenizer, 8, split="all")
    with pytest.raises(ValueError, match="has a token"):
        rows(data, 1)
    some = PackedDataset(["-", "ab", "--"], byte_tokenizer, 4, split="all")
    assert [byte_tokenizer.decode(row["input_ids"].tolist()) for row in rows(some, 2)] == ["abab", "abab"]
