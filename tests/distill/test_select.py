# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Layer selection: scores against models that are really built, and every strategy on its own definition."""

import json

import pytest
import torch

from loopergy.conversion import convert, restore_layers
from loopergy.distill.align import alignment_errors
from loopergy.distill.losses import divergence
from loopergy.distill.select import STRATEGIES, Candidates, Selection, candidate_kls, ranked, select_layers
from loopergy.distill.teacher import loop_states


def literal_kl(student, teacher, batches):
    """Return the KL of each loop from full logits."""
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            values = []
            for s, t in zip(loop_states(student, batch), loop_states(teacher, batch), strict=True):
                logits = student.lm_head(s)[:, :-1].flatten(0, 1), teacher.lm_head(t)[:, :-1].flatten(0, 1)
                values.append(divergence(*logits).sum())
            total, tokens = total + torch.stack(values), tokens + logits[0].shape[0]
    return total / tokens


@pytest.fixture
def batches(random_batch):
    return [random_batch(seed=seed, length=length) for seed, length in ((0, 9), (1, 14))]


def test_candidates_equal_models_that_are_built_with_those_layers(teacher, student, batches):
    """Restoring a physical layer changes it in all loops."""
    sets = [[], [0], [1, 2], [0, 1, 2]]
    kls = candidate_kls(Candidates(student, teacher), teacher, batches, sets)
    for index, layers in enumerate(sets):
        built = restore_layers(student, teacher, layers) if layers else student
        torch.testing.assert_close(kls[index], literal_kl(built, teacher, batches), rtol=1e-8, atol=1e-11)
    assert kls[-1].abs().max() < 1e-11
    assert kls[0, 0] > 0.01


def test_candidates_of_a_mixed_student_equal_models_that_are_built(teacher, batches):
    student = convert(teacher, [], "retnet,dsa,nsa", dsa_topk=4, nsa_block_size=4, nsa_window=4).model
    kls = candidate_kls(Candidates(student, teacher), teacher, batches, [[], [0], [1], [2]])
    for index, built in enumerate([student, *(restore_layers(student, teacher, [layer]) for layer in range(3))]):
        torch.testing.assert_close(kls[index], literal_kl(built, teacher, batches), rtol=1e-8, atol=1e-11)
    selection = select_layers(student, teacher, batches, 1, progress=False)
    assert selection.mixers == ["retnet", "dsa", "nsa"]
    assert Selection.from_json(selection.to_json()) == selection


def test_a_student_is_the_same_before_and_after(teacher, student, batches):
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    modules = [layer.self_attn for layer in student.model.layers]
    config = student.config.to_dict()
    for strategy in ("oneshot", "greedy_add", "greedy_remove", "leave_one_out", "mse"):
        select_layers(student, teacher, batches, 1, strategy=strategy, progress=False)
    select_layers(student, teacher, batches, 1, budget_tokens=60, progress=False)
    assert student.config.to_dict() == config
    assert all(layer.self_attn is module for layer, module in zip(student.model.layers, modules, strict=True))
    for name, tensor in student.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    with pytest.raises(RuntimeError), Candidates(student, teacher).restored([1]):
        raise RuntimeError
    assert student.config.to_dict() == config


def test_oneshot_ranks_by_the_kl_that_each_layer_saves(ouro, batches):
    student = convert(ouro, keep_layers=[]).model
    selection = select_layers(student, ouro, batches, 2, progress=False)
    baseline = literal_kl(student, ouro, batches)[-1]
    saved = {
        n: (baseline - literal_kl(restore_layers(student, ouro, [n]), ouro, batches)[-1]).item() for n in range(3)
    }
    assert selection.scores == pytest.approx(saved, rel=1e-7)
    assert selection.order == sorted(saved, key=saved.get, reverse=True)
    assert selection.kept_layers == sorted(selection.order[:2])
    assert len(selection.kl[0]) == len(selection.baseline_kl) == 2
    assert selection.tokens == 2 * (8 + 13)


def test_the_only_layer_that_needs_attention_is_ranked_first_and_the_others_score_zero(ouro, batches):
    """Guards H9: all layers but one equal the teacher already."""
    student = convert(ouro, keep_layers=[], mixer="window", sliding_window=4096).model
    with torch.no_grad():
        student.model.layers[2].self_attn.v_proj.weight.mul_(-1)
    selection = select_layers(student, ouro, batches, 1, progress=False)
    assert selection.kept_layers == [2]
    assert selection.baseline_kl[-1] > 1e-3
    assert abs(selection.scores[0]) < 1e-12
    assert abs(selection.scores[1]) < 1e-12


def test_greedy_add_follows_its_definition_and_starts_with_the_best_layer(ouro, batches):
    student = convert(ouro, keep_layers=[]).model
    selection = select_layers(student, ouro, batches, 2, strategy="greedy_add", progress=False)
    assert selection.order[0] == select_layers(student, ouro, batches, 1, progress=False).order[0]
    first = selection.order[0]
    rest = [n for n in range(3) if n != first]
    pairs = {n: literal_kl(restore_layers(student, ouro, [first, n]), ouro, batches)[-1] for n in rest}
    assert selection.order[1] == min(pairs, key=pairs.get)
    assert selection.steps[1]["kl"][-1] == pytest.approx(min(pairs.values()).item(), rel=1e-8)


def test_greedy_remove_follows_its_definition(ouro, batches):
    student = convert(ouro, keep_layers=[]).model
    selection = select_layers(student, ouro, batches, 1, strategy="greedy_remove", progress=False)
    rests = {n: [m for m in range(3) if m != n] for n in range(3)}
    without = {n: literal_kl(restore_layers(student, ouro, rest), ouro, batches)[-1] for n, rest in rests.items()}
    assert selection.steps[0]["removed"] == min(without, key=without.get)
    assert sorted(selection.order) == [0, 1, 2]
    assert selection.kept_layers == [selection.order[0]]


def test_leave_one_out_ranks_by_the_kl_that_each_absence_costs(ouro, batches):
    student = convert(ouro, keep_layers=[]).model
    selection = select_layers(student, ouro, batches, 2, strategy="leave_one_out", progress=False)
    rests = {n: [m for m in range(3) if m != n] for n in range(3)}
    cost = {n: literal_kl(restore_layers(student, ouro, rest), ouro, batches)[-1].item() for n, rest in rests.items()}
    assert selection.scores == pytest.approx(cost, rel=1e-7)
    assert selection.order == sorted(cost, key=cost.get, reverse=True)
    assert selection.kept_layers == sorted(selection.order[:2])
    assert max(selection.baseline_kl) < 1e-11, "with all layers restored the student is the teacher"


def test_only_labels_count_in_a_score(ouro, batches):
    student = convert(ouro, keep_layers=[]).model
    asked = [{**batch, "labels": torch.full_like(batch["input_ids"], -100)} for batch in batches]
    for batch in asked:
        batch["labels"][:, 5] = batch["input_ids"][:, 5]
    selection = select_layers(student, ouro, asked, 1, strategy="leave_one_out", progress=False)
    assert selection.tokens == sum(len(batch["input_ids"]) for batch in batches)
    total, built = 0.0, restore_layers(student, ouro, [1, 2])
    with torch.no_grad():
        for batch in batches:
            logits = built(batch["input_ids"]).logits[:, 4], ouro(batch["input_ids"]).logits[:, 4]
            total += divergence(*logits).sum().item()
    assert selection.scores[0] == pytest.approx(total / selection.tokens, rel=1e-6)


def test_mse_keeps_the_layers_that_fit_worst(ouro, batches):
    student = convert(ouro, keep_layers=[]).model
    errors = alignment_errors(student, ouro, batches).mean(0).tolist()
    selection = select_layers(student, ouro, batches, 1, strategy="mse", progress=False)
    assert selection.kept_layers == [errors.index(max(errors))]


def test_uniform_and_given_need_no_data(ouro):
    student = convert(ouro, keep_layers=[]).model
    assert select_layers(student, ouro, [], 1, strategy="uniform").kept_layers == [2]
    for keep in ([2, 0], "2,0", " 0, 2,"):
        assert select_layers(student, ouro, [], keep, strategy="given").kept_layers == [0, 2]
    assert select_layers(student, ouro, [], "all", strategy="uniform").kept_layers == [0, 1, 2]


def test_keeping_all_layers_leaves_no_kl(teacher, student, batches):
    selection = select_layers(student, teacher, batches, 1.0, strategy="greedy_add", progress=False)
    assert selection.kept_layers == [0, 1, 2]
    assert abs(selection.steps[-1]["kl"][-1]) < 1e-11


def test_layers_kept_before_count_and_stay(ouro, batches):
    student = convert(ouro, keep_layers=[1]).model
    selection = select_layers(student, ouro, batches, 2, progress=False)
    assert len(selection.kept_layers) == 2
    assert 1 in selection.kept_layers
    assert set(selection.scores) == {0, 2}


def test_equal_scores_go_by_index_and_a_selection_repeats(ouro, batches):
    """Guards H9."""
    student = convert(ouro, keep_layers=[]).model
    one, two = (select_layers(student, ouro, batches, 2, progress=False) for _ in range(2))
    one.seconds = two.seconds = 0.0
    assert one == two
    assert ranked({3: 0.5, 1: 0.5, 2: 0.7, 0: 0.1}) == [2, 1, 3, 0]


def test_a_budget_trains_each_candidate_before_it_is_scored(ouro, batches):
    student = convert(ouro, keep_layers=[]).model
    free = select_layers(student, ouro, batches, 1, progress=False)
    trained = select_layers(student, ouro, batches, 1, budget_tokens=400, learning_rate=3e-3, progress=False)
    assert trained.budget_tokens == 400
    assert all(trained.kl[layer][-1] < free.kl[layer][-1] for layer in range(3))
    assert trained.baseline_kl[-1] < free.baseline_kl[-1]


@pytest.mark.parametrize(
    ("keep", "options", "message"),
    [
        ([0, 0], {"strategy": "given"}, "twice"),
        ([5], {"strategy": "given"}, "out of range"),
        ([-1], {"strategy": "given"}, "out of range"),
        (1, {"strategy": "given"}, "list of layers"),
        ([1, 2], {}, "strategy='given'"),
        ([1, 2], {"strategy": "uniform"}, "strategy='given'"),
        ("1,2", {"strategy": "mse"}, "strategy='given'"),
        ("1", {}, "without quotes"),
        ("some", {}, "not understood"),
        (9, {}, "out of range"),
        (1, {"strategy": "best"}, "oneshot"),
        (1, {"strategy": "mse", "budget_tokens": 5}, "oneshot"),
    ],
)
def test_selections_that_cannot_be_are_refused(ouro, batches, keep, options, message):
    """Guards H9."""
    student = convert(ouro, keep_layers=[]).model
    with pytest.raises(ValueError, match=message):
        select_layers(student, ouro, batches, keep, progress=False, **options)
    with pytest.raises(ValueError, match="at least one batch"):
        select_layers(student, ouro, [], 1, progress=False)
    with pytest.raises(ValueError, match="nothing to select"):
        select_layers(convert(ouro, keep_layers="all").model, ouro, batches, 3, progress=False)


def test_a_selection_survives_json_and_has_a_picture(ouro, batches, tmp_path):
    student = convert(ouro, keep_layers=[]).model
    selection = select_layers(student, ouro, batches, 1, progress=False)
    selection.to_json(tmp_path / "selection.json")
    assert Selection.from_json(tmp_path / "selection.json") == selection
    assert Selection.from_json(selection.to_json()) == selection
    assert json.loads(selection.to_json())["strategy"] in STRATEGIES
    pytest.importorskip("matplotlib")
    selection.plot(tmp_path / "selection.svg")
    assert "loop 2" in (tmp_path / "selection.svg").read_text()
