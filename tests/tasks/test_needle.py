# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The needle, found by a regular expression."""

import re

import pytest

from loopergy.tasks.needle import WORDS, Needle
from loopergy.tasks.vocabulary import character_tokenizer


def finder(tokenizer):
    """Choose the next token of the number by looking for its sentence in the text."""

    def choose(ids):
        text = tokenizer.decode(ids)
        asked = re.search(r"The secret number of (\w+) is( \d*)?$", text)
        found = asked and re.search(rf"The secret number of {asked[1]} is( \d+)\.", text)
        if not found:
            return 0
        written, answer = asked[2] or "", tokenizer(found[1], add_special_tokens=False)["input_ids"]
        done = len(tokenizer(written, add_special_tokens=False)["input_ids"]) if written else 0
        return answer[min(done, len(answer) - 1)]

    return choose


@pytest.mark.parametrize("vocabulary", [None, "topics"])
def test_a_regular_expression_finds_every_needle(knows, vocabulary, topics_tokenizer):
    tokenizer = None if vocabulary is None else topics_tokenizer
    task = Needle(lengths=(160, 400), depths=(0.0, 0.3, 1.0), vocabulary=tokenizer)
    model = knows(len(task.tokenizer), finder(task.tokenizer))
    score = task.evaluate(model, count=18)
    assert (score.accuracy, score.total) == (1.0, 18)
    assert {all_ for _, all_ in score.groups.values()} == {3}
    assert len(score.groups) == 6
    assert max(model.kept) <= 8


def test_one_wrong_digit_is_wrong(knows):
    task = Needle(length=200, depths=(0.5,))
    right = finder(task.tokenizer)
    seven = task.tokenizer.get_vocab()["7"]

    def last_digit_is_seven(ids):
        text = task.tokenizer.decode(ids)
        return seven if re.search(r"is \d{4}$", text) else right(ids)

    score = task.evaluate(knows(len(task.tokenizer), last_digit_is_seven), count=60)
    assert 0 < score.accuracy < 0.3


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_needle_lies_at_its_depth_and_the_question_at_the_end(depth):
    import random

    task = Needle(length=900)
    example = task.hide(random.Random(0), 900, depth)
    text = task.tokenizer.decode(example.input_ids)
    assert len(text) == len(example.input_ids) == 900
    needle = re.search(r"\nThe secret number of (\w+) is (\d{5})\.\n", text)
    assert text.endswith(f"\nThe secret number of {needle[1]} is {needle[2]}")
    question = text.rindex("\nThe secret")
    assert needle.start() == pytest.approx(depth * (question - len(needle[0])), abs=1)
    assert task.tokenizer.decode(example.answers[0].tokens) == f" {needle[2]}"


def test_the_haystack_is_the_text_cut_anywhere_and_repeated_if_short(tmp_path):
    (tmp_path / "hay.txt").write_text("hay and straw and more. ")
    task = Needle(source=str(tmp_path / "hay.txt"), length=300)
    text = task.tokenizer.decode(task.draw("train", 0).input_ids)
    hay = re.sub(r"\nThe secret number of \w+ is \d+(\.\n)?", "", text)
    assert "hay and straw and more. hay and straw" in hay
    starts = {task.tokenizer.decode(task.draw("train", i).input_ids)[:6] for i in range(30)}
    assert len(starts) > 5


def test_a_tokenizer_that_cannot_write_the_needle_is_refused():
    with pytest.raises(ValueError, match=r"lacks characters of .*jacket"):
        Needle(
            vocabulary=character_tokenizer("The secret number of is.\n 0123456789" + "".join(WORDS).replace("j", ""))
        )


def test_other_errors_of_a_tokenizer_are_seen(topics_tokenizer, monkeypatch):
    monkeypatch.setattr(type(topics_tokenizer), "_encode_plus", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Needle(vocabulary=topics_tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (0.5, 1.5)}, "from 0 to 1"),
        ({"depths": ()}, "from 0 to 1"),
        ({"digits": 0}, "digits"),
        ({"lengths": (50, 500)}, "above .* got 50"),
        ({"length": 60}, "got 60"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Needle(**options)


@pytest.mark.parametrize(("count", "depths"), [(3, 3), (5, 5), (7, 5)])
def test_no_more_texts_are_measured_than_asked_for(knows, count, depths):
    task = Needle(length=160)
    score = task.evaluate(knows(len(task.tokenizer), lambda ids: 0), count=count)
    assert (score.total, len(score.groups)) == (count, depths)


def test_a_haystack_that_is_not_there_is_named(tmp_path, topics_tokenizer):
    with pytest.raises(FileNotFoundError, match=r"nosuch\.txt"):
        Needle(source=str(tmp_path / "nosuch.txt"))
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"blank\.txt' has no text in the split 'all'"):
        Needle(source=str(tmp_path / "blank.txt"))
    with pytest.raises(ValueError, match=r"blank\.txt' has no text"):
        Needle(source=str(tmp_path / "blank.txt"), vocabulary=topics_tokenizer).check_splits()
