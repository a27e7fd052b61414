# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Permutations checked by products of matrices, swaps by moving values in a list."""

import itertools
import math

import pytest
import torch

from loopergy.tasks.state_tracking import Permutations, SwapRecall, rearrange


def matrix(name: str) -> torch.Tensor:
    """Return the matrix that puts into place i what was in the place that the i-th digit names."""
    result = torch.zeros(len(name), len(name), dtype=torch.int64)
    for place, digit in enumerate(name):
        result[place, int(digit) - 1] = 1
    return result


@pytest.mark.parametrize(("group", "size"), [("S3", 6), ("S4", 24), ("S5", 120)])
@pytest.mark.parametrize("moves", ["all", "swaps"])
def test_every_label_is_the_product_of_the_moves_so_far(group, size, moves):
    task = Permutations(group, moves, length=12)
    n = int(group[1])
    assert len(task.elements) == size == len(task.tokenizer) - 1
    for row in task.rows("train", 20):
        words = task.tokenizer.convert_ids_to_tokens(row["input_ids"].tolist())
        assert words[-1] == "="
        state = torch.arange(1, n + 1)
        for place, word in enumerate(words[:-1], start=1):
            state = matrix(word) @ state
            label = task.tokenizer.convert_ids_to_tokens(int(row["labels"][place]))
            assert label == "".join(map(str, state.tolist()))
        assert int(row["labels"][0]) == -100


def test_the_documented_example_holds():
    state, shown = (0, 1, 2), []
    for move in ((1, 0, 2), (0, 2, 1), (1, 0, 2)):
        state = rearrange(state, move)
        shown.append("".join(str(1 + thing) for thing in state))
    assert shown == ["213", "231", "321"]


def test_swaps_are_the_moves_that_exchange_two_things():
    for group, count in (("S3", 3), ("S4", 6), ("S5", 10)):
        task = Permutations(group, "swaps", length=40)
        seen = {i for row in task.rows("train", 30) for i in row["input_ids"][:-1].tolist()}
        assert len(seen) == count
        assert all(
            torch.linalg.det(matrix(n).double()) == -1 for n in task.tokenizer.convert_ids_to_tokens(list(seen))
        )


def test_permutations_form_the_group():
    elements = Permutations("S4").elements
    assert elements == list(itertools.permutations(range(4)))
    assert {rearrange(a, b) for a in elements[:5] for b in elements} == set(elements)


def test_a_model_that_composes_gets_everything_right(knows):
    task = Permutations("S5", length=20)
    number = task.tokenizer.get_vocab()

    def choose(ids):
        state = torch.arange(1, 6)
        for word in task.tokenizer.convert_ids_to_tokens(ids):
            state = matrix(word) @ state if word != "=" else state
        return number["".join(map(str, state.tolist()))]

    score = task.evaluate(knows(121, choose), count=10)
    assert (score.accuracy, score.total) == (1.0, 200)
    assert [all_ for _, (_, all_) in sorted(score.groups.items())] == [10, 10, 20, 40, 80, 40]


def test_a_guess_is_right_by_chance(guesses):
    task = Permutations(length=20)
    score = task.evaluate(guesses(7, 0, 6), count=100)
    assert task.chance == pytest.approx(1 / 6)
    assert abs(score.accuracy - 1 / 6) < 4 * math.sqrt(5 / 36 / 2000)


def follow(words: list[str]) -> list[tuple[str, str]]:
    """Move values about as a sequence says; return what was asked with what is really there."""
    held, swapped, place, asked = {}, False, 0, []
    while place < len(words):
        if words[place] == "swap":
            one, other = words[place + 1], words[place + 2]
            held[one], held[other] = held[other], held[one]
            swapped, place = True, place + 3
        elif words[place] in held:
            asked.append((words[place + 1], held[words[place]]))
            place += 2
        else:
            assert not swapped
            held[words[place]] = words[place + 1]
            place += 2
    return asked


@pytest.mark.parametrize("swaps", [None, 0, 3, 40])
def test_every_answer_is_what_the_swaps_left_there(swaps):
    task = SwapRecall(num_items=6, num_swaps=swaps, max_items=10)
    for index in range(40):
        example = task.draw("test", index)
        words = task.tokenizer.convert_ids_to_tokens(example.input_ids)
        asked = follow(words)
        assert len(asked) == 6
        assert all(answer == there for answer, there in asked)
        assert len(words) == task.row_length
        assert words.count("swap") == (6 if swaps is None else swaps)
        for answer in example.answers:
            assert example.input_ids[answer.start] == answer.tokens[0]
            place = words[answer.start - 1]
            count = sum(place in words[i + 1 : i + 3] for i, word in enumerate(words) if word == "swap")
            assert answer.groups[0].startswith(f"in {min(count, 4)}")


def test_the_stages_of_the_curriculum_share_one_vocabulary():
    stages = SwapRecall(max_items=64).stages()
    assert [(task.num_items, task.row_length) for task in stages] == [(8, 56), (16, 112), (32, 224), (64, 448)]
    assert len({tuple(sorted(task.tokenizer.get_vocab().items())) for task in stages}) == 1
    assert [task.num_items for task in SwapRecall().stages()] == [8, 16, 32, 64, 128, 256]
    assert SwapRecall(num_swaps=1).stages((4,))[0].row_length == 28


def test_a_model_that_moves_values_gets_everything_right_and_one_that_does_not_fails(knows):
    task = SwapRecall(num_items=8, max_items=16)
    number = task.tokenizer.get_vocab()

    def choose(ids, moves=True):
        words = task.tokenizer.convert_ids_to_tokens(ids)
        held = {}
        for place, word in enumerate(words[:-1]):
            if word == "swap" and moves and place + 2 < len(words):
                one, other = words[place + 1 : place + 3]
                held[one], held[other] = held[other], held[one]
            elif word[0] == "a" and words[place + 1][0] == "v":
                held[word] = words[place + 1]
        return number[held.get(words[-1], "swap")]

    assert task.evaluate(knows(33, choose), count=20).accuracy == 1.0
    still = task.evaluate(knows(33, lambda ids: choose(ids, moves=False)), count=20)
    assert still.accuracy < 0.6
    assert still.groups["in 0 swaps"][0] == still.groups["in 0 swaps"][1]
    assert task.chance == 1 / 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Permutations("S9"), "S3, S4, S5.*'S9'"),
        (lambda: Permutations(moves="turns"), "'all' or 'swaps'"),
        (lambda: Permutations(length=0), "length"),
        (lambda: SwapRecall(num_items=1), "from 2 to .* 256"),
        (lambda: SwapRecall(num_items=9, max_items=8), "from 2 to .* 8"),
        (lambda: SwapRecall(num_swaps=-1), "num_swaps"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
