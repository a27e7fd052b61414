# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""ListOps: the published data token by token, and an interpreter of its own for every chain."""

import hashlib
import math
import statistics

import pytest
import torch

from loopergy.tasks.listops import EOS, EQUALS, OPERATIONS, VOCABULARY, ListOps, Sampler, answer_of, written_out
from loopergy.tasks.new_model import new_model

DIGITS = "0123456789"


@pytest.fixture(scope="module")
def official():
    return ListOps()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def value(words: list[str]) -> int:
    """Interpret one expression, read as words, from the definitions alone."""

    def read(place: int) -> tuple[int, int]:
        if words[place] in DIGITS:
            return int(words[place]), place + 1
        name, place, arguments = words[place], place + 2, []
        while words[place] != ")":
            argument, place = read(place)
            arguments.append(argument)
        signed = [number if i % 2 == 0 else -number for i, number in enumerate(arguments)]
        result = {
            "min": min(arguments),
            "max": max(arguments),
            "median": statistics.median_high(arguments),
            "add": sum(arguments),
            "prod": math.prod(arguments),
            "nadd": sum(signed),
        }[name.removesuffix("_10")]
        return result % 10, place + 1

    result, end = read(0)
    assert end == len(words)
    return result


def split_chain(ids: list[int]) -> list[list[str]]:
    """Cut a chain at its equals signs, without <eos>."""
    words, parts = [VOCABULARY[i] for i in ids[:-1]], [[]]
    for word in words:
        if word == "=":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def test_the_vocabulary_is_the_published_one(official):
    operations = ["min_10", "max_10", "median_10", "add_10", "prod_10", "nadd_10"]
    expected = ["<eos>", "(", ")", "=", *operations, *DIGITS]
    assert official.tokenizer.convert_ids_to_tokens(list(range(20))) == expected
    assert len(official.tokenizer) == 20
    assert official.tokenizer.eos_token_id == EOS == 0


def test_the_training_stream_is_the_published_one(official):
    ids = [i for sample in official.train_chains for i in sample]
    assert len(ids) == 791_016
    assert ids[:17] == [5, 1, 12, 19, 13, 2, 3, 19, 0, 7, 1, 16, 15, 2, 3, 11, 0]
    assert sha256(bytes(ids)) == "0a1bd57b5522ff55b374ced266e4efcc725c63183698f6d35e144cbaa13aab33"


def test_the_test_samples_are_the_published_ones(official):
    lines = [",".join(VOCABULARY[i] for i in sample) for sample in official.test_chains]
    assert len(lines) == 2000
    assert sha256("\n".join(lines).encode()) == "4e647215646b98db82ab6f1ae81bf438950219d70809ba65fb530d224dc2bde3"


def test_the_held_out_triples_are_the_published_ones(official):
    triples = ";".join(sorted(",".join(triple) for triple in official.held_out))
    assert sha256(triples.encode()) == "249907bc451424dcb2cec90ba994789ac1a7c6b8c028a30018ae9d8982d4cf2f"
    assert len(official.held_out) == 49


def test_lengths_and_splits_are_the_published_ones(official):
    operations = [sample.count(EQUALS) for sample in official.train_chains]
    assert [operations.count(n) for n in (1, 2, 3, 4)] == [25044, 19618, 4979, 359]
    lengths = {len(sample) for sample in official.train_chains}
    assert (min(lengths), max(lengths)) == (8, 60)
    assert [len(official.stream(split)) for split in ("train", "validation")] == [711_914, 79_102]


def test_the_loss_floor_is_0_773_nats_a_token(official):
    assert official.floor == pytest.approx(0.773, abs=5e-4)
    assert official.floor * 791_016 / 50_000 == pytest.approx(12.233, abs=1e-3)


def test_the_floor_is_the_mean_surprise_of_drawn_expressions():
    """A sample's probability, followed draw by draw, gives the entropy that the floor is made of."""
    sizes = {"train_samples": 6000, "test_samples": 1, "held_out_triples": 1}
    task = ListOps(operators=("max_10", "nadd_10"), max_depth=3, **sizes)

    def surprise(words: list[str], place: int, depth: int) -> tuple[float, int]:
        total, place = math.log(2) + math.log(2), place + 2
        while words[place] != ")":
            coin = 0.25 if depth < 3 else 0.0
            if words[place] in DIGITS:
                total += math.log(10) - math.log(1 - coin)
                place += 1
            else:
                inner, place = surprise(words, place, depth + 1)
                total += inner - math.log(coin)
        return total, place + 1

    nats = [surprise(split_chain(sample)[0], 0, 1)[0] for sample in task.train_chains]
    per_token = sum(nats) / sum(map(len, task.train_chains))
    assert task.floor == pytest.approx(per_token, rel=0.02)


def test_every_step_of_every_chain_has_the_same_value_and_one_operation_less(official):
    for ids in official.train_chains[:3000] + official.test_chains:
        steps = split_chain(ids)
        values = {value(step) for step in steps}
        assert values == {int(steps[-1][0])}
        assert [step.count("(") for step in steps] == list(range(len(steps) - 1, -1, -1))
        assert ids[-1] == EOS


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_what_its_name_says(name):
    for arguments in ([3, 8], [9, 0, 4], [7, 7, 1], [0, 5, 9]):
        chain = written_out((name, list(arguments)))
        assert int(chain[-2]) == value(chain[: chain.index("=")])


def test_the_left_most_solvable_operation_goes_first():
    node = ("max_10", [1, ("add_10", [2, ("add_10", [9, 9])]), ("add_10", [3, 4])])
    assert " ".join(written_out(node)) == (
        "max_10 ( 1 add_10 ( 2 add_10 ( 9 9 ) ) add_10 ( 3 4 ) ) = max_10 ( 1 add_10 ( 2 8 ) add_10 ( 3 4 ) ) = "
        "max_10 ( 1 0 add_10 ( 3 4 ) ) = max_10 ( 1 0 7 ) = 7 <eos>"
    )


def test_no_training_chain_has_a_held_out_triple_and_every_test_chain_has_one(official):
    triples = {tuple(VOCABULARY.index(digit) for digit in triple) for triple in official.held_out}

    def has_one(ids):
        return any(tuple(ids[i : i + 3]) in triples for i in range(len(ids)))

    assert not any(map(has_one, official.train_chains))
    assert all(map(has_one, official.test_chains))


def test_the_splits_share_no_sample(official):
    train, validation = official._chains["train"], official._chains["validation"]
    assert len(train) + len(validation) == 50_000
    stream = [i for sample in validation for i in sample]
    assert official.stream("validation").tolist()[-len(stream) :] == stream
    assert len(official.stream("validation")) - len(stream) < 60


def test_test_samples_of_one_operation_have_no_other(official):
    assert set(official.single_test_chains) == {"max_10", "median_10", "add_10"}
    for name, samples in official.single_test_chains.items():
        assert len(samples) == 2000
        used = {VOCABULARY[i] for sample in samples for i in sample} & set(OPERATIONS)
        assert used == {name}


def test_depth_is_bounded_and_reached():
    sampler = Sampler(["min_10"], seed=0, max_depth=4, held_out=1)

    def depth(node):
        return 0 if isinstance(node, int) else 1 + max(map(depth, node[1]))

    depths = {depth(sampler.expression()) for _ in range(3000)}
    assert depths == {1, 2, 3, 4}


@pytest.fixture(scope="module")
def small():
    return ListOps(train_samples=400, test_samples=300)


def solver(steps: bool):
    """Choose the next token of a solution: the chain as written, or the answer at once."""

    def choose(ids):
        words = [VOCABULARY[i] for i in ids]
        prompt = words[: words.index("=")]
        answer = str(value(prompt))
        rest = words[words.index("=") + 1 :]
        solution = [answer, "<eos>"]
        if steps:
            solution = ["add_10", "(", answer, "0", ")", "=", answer, "<eos>"]
        return VOCABULARY.index(solution[len(rest)])

    return choose


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("operator", [None, "median_10"])
def test_a_model_that_interprets_gets_everything_right_whatever_its_steps(small, knows, steps, operator):
    score = small.evaluate(knows(20, solver(steps)), count=200, operator=operator)
    assert (score.accuracy, score.total) == (1.0, 200)
    by_root = {name: all_ for name, (_, all_) in score.groups.items() if name.endswith("_10")}
    assert sum(by_root.values()) == 200
    assert set(by_root) == ({"max_10", "median_10", "add_10"} if operator is None else {operator})


def test_a_model_that_answers_a_random_digit_is_right_one_time_in_ten(small, knows):
    def choose(ids):
        return EOS if ids[-1] != EQUALS else int(torch.randint(10, 20, ()))

    score = small.evaluate(knows(20, choose), count=300)
    assert abs(score.accuracy - score.chance) < 4 * math.sqrt(0.09 / 300)


def test_the_default_budget_finishes_every_sample_and_the_published_one_does_not(official, knows):
    """The published budget of 22 tokens cuts off 2.5 % of the test samples."""
    solutions = {tuple(s[: s.index(EQUALS) + 1]): s for s in official.test_chains}

    def choose(ids):
        sample = solutions[tuple(ids[: ids.index(EQUALS) + 1])]
        return sample[len(ids)]

    model = knows(20, choose)
    assert official.evaluate(model, count=2000).accuracy == 1.0
    assert official.evaluate(model, count=2000, max_new_tokens=22).accuracy == pytest.approx(0.975, abs=0.006)


@pytest.mark.parametrize(("ids", "answer"), [([5, 3, 12, 0, 14, 0], 12), ([5, 3, 12, 14], 14)])
def test_the_answer_stands_before_the_first_end(ids, answer):
    assert answer_of(ids) == answer


def test_greedy_evaluation_of_a_real_model_does_not_depend_on_the_batch(small):
    model = new_model("llama", small, initializer_range=0.5)
    scores = [small.evaluate(model, count=60, batch_size=size, max_new_tokens=6) for size in (1, 7, 64)]
    assert scores[0] == scores[1] == scores[2]


def test_sampled_evaluation_is_fixed_by_its_seed_and_leaves_the_global_one_alone(small):
    model = new_model("llama", small, initializer_range=0.5)
    before = torch.random.get_rng_state()
    scores = [small.evaluate(model, count=100, sample=True, seed=s, max_new_tokens=2) for s in (0, 0, 1)]
    assert torch.equal(before, torch.random.get_rng_state())
    assert scores[0] == scores[1]
    assert scores[0].groups != scores[2].groups


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operators": ("max_10", "sort_10")}, "operators"),
        ({"operators": ()}, "operators"),
        ({"max_depth": 0}, "max_depth"),
        ({"test_samples": 0}, "test_samples"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ListOps(**options)


def test_an_operation_without_test_samples_is_refused(small, knows):
    model = knows(20, solver(False))
    with pytest.raises(ValueError, match="'prod_10' with 'test'"):
        small.evaluate(model, operator="prod_10")
    with pytest.raises(ValueError, match="with split 'test'"):
        small.evaluate(model, split="train", operator="max_10")
