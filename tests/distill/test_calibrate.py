# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Calibration: regressions against least squares on concatenated tokens, in float64, and what it leaves alone."""

import pytest
import torch

from loopergy.cli import stage_recipe
from loopergy.configuration.layer_patterns import MIXERS
from loopergy.conversion import convert
from loopergy.distill import calibrate as room
from loopergy.distill.align import alignment_errors
from loopergy.distill.calibrate import calibrate
from loopergy.distill.recipe import Recipe, RecipeRun
from loopergy.distill.regressions import RIDGES, Sums, choose_ridge, solve, squared_error
from loopergy.distill.stage import StageError, StageRecord
from loopergy.distill.teacher import loop_states, watch_mixers
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM

OPTIONS = {
    "window": {"sliding_window": 4},
    "nsa": {"nsa_block_size": 4, "nsa_window": 4, "nsa_block_count": 3},
    "dsa": {"dsa_topk": 6},
}
TRAINING = {"length": 24, "max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True}


def visits(student, teacher, batches, layer):
    """Return features and targets of one layer in all loops, one document at a time and nothing but real tokens."""
    features, targets = [], []
    mixer = student.model.layers[layer].self_attn
    last = mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj
    for ids in batches:
        calls, seen = [], []
        with torch.no_grad(), watch_mixers(teacher, calls.append):
            loop_states(teacher, {"input_ids": ids})
        handle = last.register_forward_pre_hook(lambda module, arguments, seen=seen: seen.append(arguments[0]))
        for call in (call for call in calls if call.layer == layer):
            mixer(call.inputs)
            # The last token of a document has no target.
            features.append(seen.pop()[:, :-1].flatten(0, 1).detach())
            targets.append(call.output[:, :-1].flatten(0, 1))
        handle.remove()
    return torch.cat(features), torch.cat(targets)


def padded_least_squares(features, targets, strength, start):
    """Return ridge regression as plain least squares with rows added."""
    width = features.shape[1]
    rows = torch.cat([features, strength**0.5 * torch.eye(width, dtype=torch.float64)])
    wanted = torch.cat([targets, strength**0.5 * start])
    return torch.linalg.lstsq(rows, wanted).solution


@pytest.mark.parametrize("ridge", [0.0, 0.3])
@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
def test_the_last_projection_is_the_ridge_solution_over_all_loops(teacher, random_batch, mixer, ridge):
    """Guards H14: a looped teacher's loops share one solution; and constant memory, as sums are all that is kept."""
    student = convert(teacher, [], mixer).model
    batches = [random_batch(rows=3, length=20, seed=seed) for seed in range(3)]
    found = []
    for layer in range(3):
        features, targets = visits(student, teacher, [batch["input_ids"] for batch in batches], layer)
        assert len(features) == getattr(teacher.config, "num_loops", 1) * 3 * 3 * 19
        if hasattr(teacher.model.layers[layer], "input_layernorm_2"):
            # What the norm after the mixer divides by.
            epsilon = teacher.model.layers[layer].input_layernorm_2.variance_epsilon
            size = (targets.square().mean(-1, keepdim=True) + epsilon).sqrt()
            features, targets = features / size, targets / size
        mixer_module = student.model.layers[layer].self_attn
        start = (mixer_module.out_proj if mixer == "mamba2" else mixer_module.o_proj).weight.detach().T
        strength = ridge * features.square().sum(0).mean()
        found.append(padded_least_squares(features, targets, strength, start))
    calibrate(student, teacher, batches, parts=["output"], ridge=ridge)
    for layer, expected in enumerate(found):
        mixer_module = student.model.layers[layer].self_attn
        weight = (mixer_module.out_proj if mixer == "mamba2" else mixer_module.o_proj).weight.T
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-8)


def test_sums_give_the_error_and_the_solution_nearest_to_the_start():
    generator = torch.Generator().manual_seed(0)
    a, b, start = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((9, 4), (9, 3), (4, 3)))
    a[:, 3] = a[:, 0] - a[:, 1]  # one direction that the tokens say nothing about
    gram, cross = a.T @ a, a.T @ b
    out = solve(gram, cross, 0.0, start)
    expected = start + torch.linalg.pinv(a) @ (b - a @ start)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    error = squared_error((gram, cross, b.square().sum()), start)
    assert error.item() == pytest.approx((b - a @ start).square().sum().item(), rel=1e-10)
    assert solve(torch.zeros(4, 4).double(), torch.zeros(4, 3).double(), 0.1, start).equal(start)


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "full"])
def test_every_mixer_comes_closer_to_the_attention_it_replaces(teacher, random_batch, mixer):
    student = convert(teacher, [1], mixer, **OPTIONS.get(mixer, {})).model
    batches = [random_batch(rows=4, length=24, seed=seed) for seed in range(4)]
    before = alignment_errors(student, teacher, batches)
    found = calibrate(student, teacher, batches)
    after = alignment_errors(student, teacher, batches)
    assert (after <= before).all()
    assert after.mean() < 0.95 * before.mean()
    assert found.layers == [0, 2] == list(found.error)
    assert all(fitted <= start for start, fitted in found.error.values())
    assert found.tokens == 4 * 4 * 23


def test_what_is_reported_as_the_error_is_the_alignment_error(llama, random_batch):
    student = convert(llama, []).model
    batches = [random_batch(rows=3, length=20, seed=seed) for seed in range(2)]
    found = calibrate(student, llama, batches)
    errors = alignment_errors(student, llama, batches, target="mixer")[0]
    for layer, (_, error) in found.error.items():
        _, targets = visits(student, llama, [batch["input_ids"] for batch in batches], layer)
        assert errors[layer].item() == pytest.approx(error * targets.square().mean().item(), rel=1e-5)


@pytest.mark.parametrize("mixer", ["gdn", "kda", "deltanet"])
def test_each_head_gets_the_memory_that_fits_it_best(ouro, random_batch, mixer):
    """The grid, by least squares on concatenated tokens; a constant strength is the regression of 1, times it."""
    student = convert(ouro, [], mixer).model
    batches = [random_batch(rows=4, length=32, seed=seed) for seed in range(3)]
    found = calibrate(student, ouro, batches, parts=["memory"])
    for layer in range(3):
        module = student.model.layers[layer].self_attn
        x = torch.cat([call.inputs[:, :-1].flatten(0, 1) for call in calls_of(ouro, batches) if call.layer == layer])
        one = torch.ones(len(x), 1, dtype=torch.float64)
        constant = padded_least_squares(x, one, 1e-2 * x.square().sum(0).mean(), torch.zeros(32, 1).double())
        expected = torch.logit(torch.tensor(found.strength[layer]).double())[:, None] * constant.T
        torch.testing.assert_close(module.b_proj.weight.double(), expected, rtol=1e-6, atol=1e-9)
        if mixer != "deltanet":
            decay = module.A_log.exp() * torch.nn.functional.softplus(module.dt_bias).unflatten(0, (2, -1))[:, 0]
            torch.testing.assert_close(decay.double(), torch.tensor(found.decay[layer]).double(), rtol=1e-4, atol=1e-6)
    errors = scores(convert(ouro, [], mixer).model, ouro, batches)
    for layer, table in errors.items():
        assert table.argmin(0).tolist() == [
            room._grid(student.model.layers[layer].self_attn).index(pair)
            for pair in zip(found.decay[layer], found.strength[layer], strict=True)
        ]


def calls_of(teacher, batches):
    calls = []
    with torch.no_grad(), watch_mixers(teacher, calls.append):
        for batch in batches:
            loop_states(teacher, batch)
    return calls


def scores(student, teacher, batches):
    """Return, for each layer, the error of each candidate and head, by least squares on concatenated tokens."""
    calls, out = calls_of(teacher, batches), {}
    heads = []
    for index in range(3):
        teacher.model.layers[index].self_attn.o_proj.register_forward_pre_hook(
            lambda module, arguments, index=index: heads.append((index, arguments[0]))
        )
    calls_of(teacher, batches)
    for layer in range(3):
        module = student.model.layers[layer].self_attn
        inputs = torch.cat([call.inputs for call in calls if call.layer == layer])
        wanted = torch.cat([value for index, value in heads if index == layer])[:, :-1].reshape(-1, 2, 16)
        table = []
        for candidate in room._candidates(module):
            with room._replaced(module, {**candidate, **room._open(module), "o_proj": torch.nn.Identity()}):
                features = torch.cat([module(x[None])[0] for x in inputs])[:, :-1].reshape(-1, 2, 16).detach()
            row = []
            for head in range(2):
                a, b = features[:, head], wanted[:, head]
                strength = 1e-2 * a.square().sum(0).mean()
                fit = padded_least_squares(a, b, strength, torch.zeros(16, 16, dtype=torch.float64))
                row.append((b - a @ fit).square().sum())
            table.append(torch.stack(row))
        out[layer] = torch.stack(table)
    return out


def test_pads_and_borders_of_documents_do_not_count(teacher, random_batch):
    """Guards C4 and H4: padded, packed and separate documents give the same mixers."""
    ids = random_batch(rows=1, length=15)["input_ids"]
    pads = random_batch(rows=1, length=6, seed=9)["input_ids"]
    borders = torch.cat([torch.arange(6), torch.arange(9)])[None]
    forms = {
        "separate": [{"input_ids": ids[:, :6]}, {"input_ids": ids[:, 6:]}],
        "packed": [{"input_ids": ids, "position_ids": borders, "labels": ids.masked_fill(borders == 0, -100)}],
        "padded": [
            {
                "input_ids": torch.cat([torch.cat([pads[:, :3], ids[:, :6]], 1), ids[:, 6:]]),
                "attention_mask": torch.tensor([[0] * 3 + [1] * 6, [1] * 9]),
            }
        ],
        "right": [
            {
                "input_ids": torch.cat([torch.cat([ids[:, :6], pads[:, :3]], 1), ids[:, 6:]]),
                "attention_mask": torch.tensor([[1] * 6 + [0] * 3, [1] * 9]),
            }
        ],
    }
    states = {}
    for name, batches in forms.items():
        student = convert(teacher, []).model
        assert calibrate(student, teacher, batches, ridge=0.1).tokens == 13
        states[name] = student.state_dict()
    for name in ("packed", "padded", "right"):
        for key, value in states["separate"].items():
            # Llama's rotary angles are float32, and shift with left pads.
            torch.testing.assert_close(states[name][key], value, rtol=1e-4, atol=1e-5, msg=f"{name} {key}")


def test_nothing_but_the_new_mixers_changes(ouro, random_batch):
    student = convert(ouro, [1]).model
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    training = {name: parameter.requires_grad for name, parameter in student.named_parameters()}
    calibrate(student.train(), ouro, [random_batch()])
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}
    names = ("o_proj.weight", "a_proj.weight", "b_proj.weight", "A_log", "dt_bias")
    assert changed == {f"model.layers.{layer}.self_attn.{name}" for layer in (0, 2) for name in names}
    assert student.training
    assert training == {name: parameter.requires_grad for name, parameter in student.named_parameters()}
    assert not any(module._forward_pre_hooks for module in ouro.modules())


def test_the_ridge_is_the_one_that_does_best_on_the_other_fold():
    generator = torch.Generator().manual_seed(0)
    sums, data = Sums(), []
    truth = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    for fold in (0, 1):
        a = torch.randn(14, 12, generator=generator, dtype=torch.float64)
        data.append((a, a @ truth + 4 * torch.randn(14, 2, generator=generator, dtype=torch.float64)))
        sums.add(*data[-1], fold)
    start = torch.zeros(12, 2, dtype=torch.float64)

    def error(ridge):
        total = 0.0
        for fold in (0, 1):
            (a, b), (other, wanted) = data[fold], data[1 - fold]
            fit = padded_least_squares(a, b, ridge * a.square().sum(0).mean(), start)
            total += (wanted - other @ fit).square().sum().item()
        return total

    assert choose_ridge(sums, start) == min(RIDGES, key=error)
    assert error(RIDGES[0]) != pytest.approx(error(RIDGES[-1]), rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": ["scale"]}, "`parts` must be some of"),
        ({"parts": []}, "`parts` must be some of"),
        ({"batches": []}, "`batches` is empty"),
        ({"batches": [{"input_ids": torch.full((1, 4), 7), "labels": torch.full((1, 4), -100)}]}, "no position"),
        ({"ridge": -1.0}, "`ridge` must be at least 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(ouro, random_batch, change, message):
    student, values = convert(ouro, []).model, {"batches": [random_batch()], **change}
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        calibrate(student, ouro, values.pop("batches"), **values)
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())
    with pytest.raises(ValueError, match="nothing to calibrate"):
        calibrate(convert(ouro, "all").model, ouro, [random_batch()])


@pytest.fixture
def small(ouro, byte_tokenizer, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(40):
        (texts / f"{index}.txt").write_text(f"text number {index}, " * 4)
    teacher = ouro.float()

    def run(**changes):
        done = []
        values = {
            "teacher": "tiny",
            "data": str(texts),
            "calibrate": {"num_tokens": 192, "length": 24, "batch_size": 2},
            "align": {**TRAINING, "save_strategy": "no"},
            "select": None,
            "distill": None,
            "evaluate": {"num_tokens": 96, "length": 24},
        }
        recipe = Recipe.from_dict({**values, **changes})
        job = RecipeRun(recipe, tmp_path / "out", teacher, byte_tokenizer, lambda name, record: done.append(name))
        return job, done

    return run


def test_a_recipe_calibrates_between_conversion_and_alignment(small, tmp_path, monkeypatch):
    """Guards I7: the stage is skipped when done, and refused with other settings."""
    pytest.importorskip("matplotlib")
    job, done = small()
    report = job.run()
    assert done == ["convert", "calibrate", "align"]
    assert list(report.heldout_kl) == ["converted", "calibrated", "aligned"]
    assert report.heldout_kl["calibrated"] < report.heldout_kl["converted"]
    assert [row["stage"] for row in report.stages] == done
    record = StageRecord.load(tmp_path / "out" / "align")
    assert record.parent["stage"] == "calibrate"
    assert record.parent["parent"]["stage"] == "convert"
    assert record.parent["metrics"]["calibration"]["parts"] == ["memory", "output"]
    assert 0 < record.parent["tokens_seen"] <= 192
    again, _ = small()

    def refuse(*args, **kwargs):
        raise AssertionError("a finished stage was run again")

    monkeypatch.setattr("loopergy.distill.recipe.calibrate", refuse)
    assert again.run().heldout_kl == report.heldout_kl
    with pytest.raises(StageError, match=r"'calibrate'.*other settings"):
        small(calibrate={"num_tokens": 96, "length": 24})[0].run()
    with pytest.raises(ValueError, match=r"calibrate: unknown keys.*num_tokens"):
        small(calibrate={"tokens": 96})


def test_alignment_starts_from_the_calibrated_student(small, tmp_path):
    pytest.importorskip("matplotlib")
    small(align={**TRAINING, "save_strategy": "no", "learning_rate": 0.0})[0].run()
    folders = [tmp_path / "out" / name for name in ("convert", "calibrate", "align")]
    converted, calibrated, aligned = (LT2ForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert all(torch.equal(aligned[name], tensor) for name, tensor in calibrated.items())
    assert not torch.equal(
        converted["model.layers.0.self_attn.o_proj.weight"], aligned["model.layers.0.self_attn.o_proj.weight"]
    )


def test_single_stages_of_a_run_know_whether_it_was_calibrated(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("teacher: tiny\ncalibrate: {num_tokens: 96}\nselect: null\n")
    flags: dict[str, str | None] = {"teacher": None, "data": None}
    assert stage_recipe("align", tmp_path, file, flags, {}).calibrate == {"num_tokens": 96}
    for stage in ("convert", "align"):
        (tmp_path / stage).mkdir()
        StageRecord(stage, [], "", metrics={"settings": {}}).save(tmp_path / stage)
    assert stage_recipe("distill", tmp_path, file, flags, {}).calibrate is None
    (tmp_path / "calibrate").mkdir()
    StageRecord("calibrate", [], "", metrics={"settings": {"num_tokens": 48}}).save(tmp_path / "calibrate")
    assert stage_recipe("distill", tmp_path, file, flags, {}).calibrate == {"num_tokens": 48}
