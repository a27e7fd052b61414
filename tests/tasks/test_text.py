# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Token streams and their windows."""

import pytest
import torch

from loopergy.tasks.text import Windows, read_text


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "play.txt").write_text("First Citizen:\nBefore we proceed\n")
    assert read_text(tmp_path / "play.txt") == "First Citizen:\nBefore we proceed\n"
    assert read_text(tmp_path / "play.txt", 5) == "First"


def test_documents_are_joined_by_a_line_end_and_reading_stops_early(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 4)
    assert read_text(tmp_path) == "aaaa\nbbbb\ncccc"
    assert read_text(tmp_path, 6) == "aaaa\nb"


def test_a_stream_is_read_no_further_than_needed(monkeypatch):
    from loopergy.tasks import text

    taken = []

    class Long:
        def iterate_from(self, start):
            for _ in range(100):
                taken.append(start)
                yield "word"

    monkeypatch.setattr(text, "load_documents", lambda source: Long())
    assert read_text("some/dataset", 12) == "word\nword\nwo"
    assert len(taken) == 3


def test_drawn_windows_lie_anywhere_and_within():
    stream = torch.arange(20)
    windows = Windows.drawn(stream, 5, 400, seed=0)
    starts = {int(window["input_ids"][0]) for window in windows}
    assert starts == set(range(16))
    assert all(torch.equal(w["input_ids"], torch.arange(5) + w["input_ids"][0]) for w in windows)


def test_windows_in_order_make_every_token_a_label_once():
    windows = Windows.in_order(torch.arange(20), 5)
    labels = [int(i) for window in windows for i in window["labels"][1:]]
    assert labels == list(range(1, 17))
    assert len(Windows.in_order(torch.arange(21), 5)) == 5


def test_fewer_windows_are_spread_evenly():
    windows = Windows.in_order(torch.arange(101), 2, count=10)
    assert windows.starts.tolist() == list(range(0, 100, 10))
    assert len(Windows.in_order(torch.arange(10), 2, count=99)) == 9


@pytest.mark.parametrize("length", [1, 21])
def test_a_window_that_does_not_fit_is_refused(length):
    with pytest.raises(ValueError, match=f"2 to 20 tokens.*got {length}"):
        Windows.drawn(torch.arange(20), length, 1, 0)
