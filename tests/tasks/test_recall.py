# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Multi-query associative recall, checked by a dictionary."""

import math
from collections import Counter

import pytest

from loopergy.tasks.recall import Recall


def read(task, ids):
    """Follow a sequence with a dictionary; return pairs asked, and whether each answer is the stored value."""
    words = task.tokenizer.convert_ids_to_tokens(ids)
    stored, right, place = {}, [], 0
    while place < len(words):
        if words[place] == ".":
            place += 1
        elif words[place] in stored:
            right.append(stored[words[place]] == words[place + 1])
            place += 2
        else:
            stored[words[place]] = words[place + 1]
            place += 2
    return stored, right


def test_every_answer_is_the_value_stored_with_its_key():
    task = Recall(num_pairs=6, num_queries=4, length=40, num_keys=9, num_values=5)
    for index in range(50):
        example = task.draw("train", index)
        stored, right = read(task, example.input_ids)
        assert (len(stored), right) == (6, [True] * 4)
        assert len(example.input_ids) == 40
        answers = [(a.start, a.tokens[0]) for a in example.answers]
        assert all(example.input_ids[start] == token for start, token in answers)
        labels = example.row()["labels"].tolist()
        assert [i for i, label in enumerate(labels) if label != -100] == [start for start, _ in answers]


def test_queries_lie_anywhere_behind_the_pairs():
    task = Recall(num_pairs=2, num_queries=1, length=9, num_keys=4, num_values=4)
    starts = Counter(task.draw("train", index).answers[0].start for index in range(2000))
    assert set(starts) == {5, 6, 7, 8}
    assert min(starts.values()) > 350


def test_groups_say_how_long_ago_the_pair_was():
    task = Recall(num_pairs=3, length=30, num_keys=5, num_values=5)
    for index in range(30):
        example = task.draw("train", index)
        for answer in example.answers:
            key = example.input_ids[answer.start - 1]
            ago = answer.start - 1 - example.input_ids.index(key)
            limit = int(answer.groups[0].split()[2])
            assert limit / 2 < ago <= limit


def test_more_queries_than_pairs_ask_all_pairs_in_turn():
    task = Recall(num_pairs=3, num_queries=8, length=24, num_keys=5, num_values=5)
    for index in range(30):
        example = task.draw("train", index)
        ids = example.input_ids
        asked = [ids[answer.start - 1] for answer in example.answers]
        assert set(asked[:3]) == set(asked[3:6]) == set(ids[:6:2])
        assert len(set(asked[6:])) == 2
        assert all(ids[answer.start] == ids[ids.index(ids[answer.start - 1]) + 1] for answer in example.answers)
        for answer in example.answers:
            place = answer.start - 1
            ago = ids[:place][::-1].index(ids[place]) + 1
            limit = int(answer.groups[0].split()[2])
            assert limit / 2 < ago <= limit


def dictionary(task):
    """Choose as a dictionary does: after a key that was seen before, its value."""

    def choose(ids):
        before = ids[:-1]
        return ids[before.index(ids[-1]) + 1] if ids[-1] in before else 0

    return choose


def test_a_dictionary_gets_everything_right(knows):
    task = Recall()
    model = knows(len(task.tokenizer), dictionary(task))
    score = task.evaluate(model, count=30)
    assert (score.accuracy, score.total) == (1.0, 240)
    assert sum(all_ for _, all_ in score.groups.values()) == 240
    assert max(model.kept) <= 64 - 16


def test_a_guess_among_the_values_is_right_by_chance(guesses):
    task = Recall(num_values=4, num_pairs=8, num_keys=8, length=32)
    score = task.evaluate(guesses(len(task.tokenizer), 9, 13), count=200)
    assert task.chance == 0.25
    assert abs(score.accuracy - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 1600)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pairs": 65, "length": 400}, "num_pairs.*got 65"),
        ({"num_queries": 0}, "num_queries.*got 0"),
        ({"num_queries": 25}, "at least 66.*got 64"),
        ({"length": 31}, "at least 32.*got 31"),
        ({"num_values": 1}, "num_values"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Recall(**options)


def test_with_a_models_vocabulary_keys_and_values_are_words_of_it(topics_tokenizer):
    task = Recall(num_pairs=4, length=24, num_keys=12, num_values=10, vocabulary=topics_tokenizer)
    assert task.tokenizer is topics_tokenizer
    keys, values = set(), set()
    for index in range(60):
        example = task.draw("train", index)
        stored, right = read(task, example.input_ids)
        assert (len(stored), right) == (4, [True] * 4)
        keys, values = keys | set(stored), values | set(stored.values())
    assert (len(keys), len(values)) == (12, 10)
    assert not keys & values
    assert all(word[0] == "Ġ" and word[1:].isascii() and word[1:].isalpha() for word in keys | values)
    with pytest.raises(ValueError, match=r"words of three letters .* 5000 keys and 10 values"):
        Recall(num_keys=5000, num_values=10, vocabulary=topics_tokenizer)
