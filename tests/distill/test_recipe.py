# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Recipes: all stages from one file, finished ones skipped, interrupted ones resumed."""

import json
import math
from pathlib import Path

import pytest
import torch

from loopergy.distill import recipe as recipe_room
from loopergy.distill.recipe import Recipe, RecipeRun
from loopergy.distill.report import evaluate_heldout
from loopergy.distill.select import Selection, select_layers
from loopergy.distill.stage import StageError, StageRecord
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.tasks import mixture

FILES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
# Those with a teacher; the others make one.
RECIPES = [file for file in FILES if "\nteacher:" in file.read_text("utf-8")]
TRAINING = {"length": 24, "max_steps": 3, "per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True}


@pytest.fixture
def small(ouro, byte_tokenizer, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(40):
        (texts / f"{index}.txt").write_text(f"text number {index}, " * 4)
    values = {
        "teacher": "tiny",
        "data": str(texts),
        "align": {**TRAINING, "save_strategy": "no"},
        "select": {"keep": 1, "num_tokens": 96, "length": 24},
        "distill": {**TRAINING, "save_strategy": "steps", "save_steps": 1},
        "extend": {**TRAINING, "save_strategy": "no", "length": 48, "kl_weight": 0.5},
        "evaluate": {"num_tokens": 96, "length": 24},
    }
    teacher = ouro.float()

    def run(teacher_and_tokenizer=(teacher, byte_tokenizer), **changes):
        done = []
        recipe = Recipe.from_dict({**values, **changes})
        job = RecipeRun(
            recipe, tmp_path / "out", *teacher_and_tokenizer, on_stage=lambda name, record: done.append(name)
        )
        return job, done

    return run


def test_all_stages_run_in_order_and_leave_folders_that_load(small, tmp_path, ouro, monkeypatch):
    pytest.importorskip("matplotlib")
    asked = []
    monkeypatch.setattr(recipe_room, "gap_closed", lambda *perplexities: asked.append(perplexities) or 0.5)
    job, done = small()
    report = job.run()
    assert done == ["convert", "align", "select", "distill", "extend"]
    assert list(report.heldout_kl) == ["converted", "aligned", "distilled", "extended"]
    assert report.heldout_kl["distilled"] < report.heldout_kl["converted"]
    gaps = {row["stage"]: row.get("gap closed") for row in report.stages}
    assert (gaps["convert"], gaps["extend"]) == (None, "50.0%")
    ppl = report.heldout_perplexity
    assert asked[-1] == tuple(ppl[name] for name in ("converted", "extended", "teacher"))
    assert set(report.student["mixers"]) == {"gdn", "full"}
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert written["heldout_kl"] == report.heldout_kl
    selection = Selection.from_json(tmp_path / "out" / "select" / "selection.json")
    record = StageRecord.load(tmp_path / "out" / "extend")
    assert record.kept_layers == selection.kept_layers
    assert job.student_folder() == tmp_path / "out" / "extend"
    student = LT2ForCausalLM.from_pretrained(job.student_folder())
    again = evaluate_heldout(student, ouro, job.held_out)
    assert again["kl"] == pytest.approx(report.heldout_kl["extended"], rel=1e-4)
    assert not list((tmp_path / "out" / "checkpoints").glob("*"))
    assert sum(row["seconds"] for row in report.stages) == report.seconds > 0


def test_finished_stages_are_skipped_and_an_interrupted_one_resumes(small, tmp_path, monkeypatch):
    """Guards I7 across stages."""
    pytest.importorskip("matplotlib")
    job, done = small()
    original = recipe_room.DistillTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == 2:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(recipe_room.DistillTrainer, "training_step", stop)
    with pytest.raises(KeyboardInterrupt):
        job.run()
    assert done == ["convert", "align", "select"]
    monkeypatch.undo()
    steps = []

    def count(self, *args, **kwargs):
        steps.append(self.state.global_step)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(recipe_room.DistillTrainer, "training_step", count)
    job, _ = small()
    job.run()
    assert steps == [2]
    assert StageRecord.load(tmp_path / "out" / "distill").tokens_seen == 3 * 2 * 24
    job, _ = small()
    job.run()
    assert steps == [2]
    with pytest.raises(StageError, match="other settings"):
        small(select={"keep": 2, "num_tokens": 96, "length": 24})[0].run()


def test_tasks_are_trained_on_and_measured(small, tmp_path, monkeypatch, topics_tokenizer, new_ouro):
    """The words of the tasks need a tokenizer that has words."""
    pytest.importorskip("matplotlib")
    teacher = new_ouro(torch.float32, vocab_size=len(topics_tokenizer))
    tasks = [{"task": "recall", "share": 0.9, "length": 24, "num_pairs": 2, "num_keys": 8, "num_values": 8}]
    drawn = []
    original = mixture.task_row
    monkeypatch.setattr(
        mixture, "task_row", lambda entry, length, *args: drawn.append(length) or original(entry, length, *args)
    )
    alone = {**TRAINING, "save_strategy": "no", "length": 48, "tasks": []}
    job, done = small(tasks=tasks, extend=alone, teacher_and_tokenizer=(teacher, topics_tokenizer))
    report = job.run()
    assert done == ["convert", "align", "select", "distill", "extend"]
    assert len(drawn) >= 3
    assert set(drawn) == {24}, "the last stage asks for no tasks"
    for stage in ("convert", "align", "distill", "extend"):
        record = StageRecord.load(tmp_path / "out" / stage)
        assert 0 <= record.metrics["tasks"]["recall"] <= 1
    assert all("recall" in row for row in report.stages if row["stage"] != "select")
    assert "of the teacher: recall 0." in report.notes[-1]
    with pytest.raises(ValueError, match="documents: separate"):
        Recipe(teacher="tiny", tasks=tasks, documents="contiguous")
    with pytest.raises(ValueError, match="needs `task` and `share`"):
        Recipe(teacher="tiny", tasks=[{"share": 0.4}])


def test_layers_are_chosen_by_what_a_task_asks(small, tmp_path, topics_tokenizer, new_ouro):
    pytest.importorskip("matplotlib")
    teacher = new_ouro(torch.float32, vocab_size=len(topics_tokenizer))
    task = {"task": "recall", "share": 1, "length": 24, "num_pairs": 2, "num_keys": 8, "num_values": 8}
    choice = {"keep": 1, "strategy": "leave_one_out", "num_tokens": 96, "length": 48, "tasks": [task]}
    job, _ = small(select=choice, distill=None, extend=None, teacher_and_tokenizer=(teacher, topics_tokenizer))
    report = job.run()
    assert report.selection.tokens == 2 * 2 * 2, "two rows of two examples with two answers each"
    student = LT2ForCausalLM.from_pretrained(tmp_path / "out" / "align", dtype=torch.float32)
    (share,) = mixture.task_shares([task], topics_tokenizer)
    batches = mixture.task_batches([share], length=48, num_tokens=96)
    wanted = select_layers(student, teacher, batches, 1, strategy="leave_one_out", progress=False)
    assert report.selection.scores == pytest.approx(wanted.scores, rel=1e-3)
    assert "KL without it" in [axis.get_ylabel() for axis in report.selection.plot().axes]
    with pytest.raises(ValueError, match="'recall' has 24 tokens, a row 16"):
        small(select={**choice, "length": 16}, teacher_and_tokenizer=(teacher, topics_tokenizer))[0].run()
    with pytest.raises(ValueError, match="unknown keys"):
        small(select={**choice, "tasks": [{**task, "pairs": 3}]})
    with pytest.raises(ValueError, match="`share` must be above 0, got 0"):
        small(select={**choice, "tasks": [{**task, "share": 0}]})


def test_a_folder_that_another_run_writes_to_is_refused(small, tmp_path, monkeypatch):
    job, done = small(select=None, distill=None, extend=None)
    second, _ = small(select=None, distill=None, extend=None)
    original = RecipeRun._convert

    def meanwhile(self, settings):
        with pytest.raises(ValueError, match="out is in use by another run"):
            second.run()
        return original(self, settings)

    monkeypatch.setattr(RecipeRun, "_convert", meanwhile)
    pytest.importorskip("matplotlib")
    job.run()
    assert done == ["convert", "align"]
    second.run()


def test_a_file_system_without_locks_is_no_obstacle(small, monkeypatch):
    pytest.importorskip("matplotlib")

    def unsupported(self):
        raise NotImplementedError

    monkeypatch.setattr("filelock.FileLock.acquire", unsupported)
    job, done = small(select=None, distill=None, extend=None)
    job.run()
    assert done == ["convert", "align"]


SAVING = {**TRAINING, "save_strategy": "steps", "save_steps": 1}
TASK = {"task": "recall", "share": 0.5, "length": 20, "num_pairs": 2, "num_keys": 4, "num_values": 4}
ALONE = {"align": SAVING, "select": None, "distill": None, "extend": None, "evaluate": {"num_tokens": 0}}


@pytest.fixture
def interrupted(small, monkeypatch):
    """Return `small` for runs of alignment alone, one of which was interrupted at its second step."""
    pytest.importorskip("matplotlib")
    original = recipe_room.AlignTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == 1:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(recipe_room.AlignTrainer, "training_step", stop)
    with pytest.raises(KeyboardInterrupt):
        small(**ALONE)[0].run()
    monkeypatch.undo()
    return lambda **changes: small(**{**ALONE, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"align": {**SAVING, "learning_rate": 0.01}}, "align.learning_rate was None, the recipe has 0.01"),
        ({"align": {**SAVING, "form": "l2norm"}}, "align.form was None, the recipe has 'l2norm'"),
        ({"align": {**SAVING, "length": 16}}, "align.length was 24, the recipe has 16"),
        (
            {"align": {**SAVING, "per_device_train_batch_size": 1}},
            "train_batch_size was 2, the recipe has 1",
        ),
        ({"align": {**SAVING, "max_steps": 2}}, "align.max_steps was 3, the recipe has 2"),
        ({"align": {**SAVING, "data": "offline:code"}}, "data was '.*texts', the recipe has 'offline:code'"),
        ({"data": "offline:code"}, "data was '.*texts', the recipe has 'offline:code'"),
        ({"documents": "contiguous"}, "documents was 'separate', the recipe has 'contiguous'"),
        ({"align": {**SAVING, "dataloader_num_workers": 1}}, "num_workers was None, the recipe has 1"),
    ],
)
def test_an_interrupted_stage_goes_on_with_its_settings_alone(interrupted, changes, message, monkeypatch):
    monkeypatch.setattr(recipe_room.RecipeRun, "_train", lambda *args: pytest.fail("trained"))
    with pytest.raises(StageError, match=rf"'align'.*was interrupted.*{message}.*Restore them.*give another output"):
        interrupted(**changes)[0].run()


@pytest.mark.parametrize("recorded", [True, False])
def test_an_interrupted_stage_goes_on_with_other_logs_or_without_record(interrupted, recorded, tmp_path, monkeypatch):
    changes = {} if recorded else {"learning_rate": 0.01}
    job, done = interrupted(align={**SAVING, "logging_steps": 1, "save_steps": 2, "save_total_limit": 1, **changes})
    file = tmp_path / "out" / "checkpoints" / "align" / "run.json"
    assert json.loads(file.read_text())["align"]["length"] == 24
    if not recorded:
        file.unlink()
    steps, original = [], recipe_room.AlignTrainer.training_step

    def count(self, *args, **kwargs):
        steps.append(self.state.global_step)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(recipe_room.AlignTrainer, "training_step", count)
    job.run()
    assert done == ["convert", "align"]
    assert steps == [1, 2]


def test_checkpoints_are_what_holds_an_interrupted_stage_to_its_settings(interrupted, tmp_path):
    (checkpoint,) = (tmp_path / "out" / "checkpoints" / "align").glob("checkpoint-*")
    checkpoint.rename(tmp_path / "elsewhere")
    interrupted(align={**SAVING, "length": 16})[0].run()
    assert StageRecord.load(tmp_path / "out" / "align").tokens_seen == 3 * 2 * 16


def test_finished_stages_are_of_one_teacher_text_and_seed(small, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    small(**ALONE)[0].run()
    monkeypatch.setattr(recipe_room.RecipeRun, "_train", lambda *args: pytest.fail("trained"))
    changes = {"seed": 1, "data": "offline:code", "documents": "contiguous", "dtype": "float32"}
    for name, value in changes.items():
        with pytest.raises(StageError, match=rf"finished with other settings: {name} was .*the recipe has {value!r}"):
            small(**{**ALONE, "distill": SAVING, name: value})[0].run()
    with pytest.raises(StageError, match=r"finished with other settings: .*evaluate.num_tokens was 0, .* 96"):
        small(**{**ALONE, "evaluate": {"num_tokens": 96, "length": 24}})[0].run()
    for stage in ("convert", "align"):
        record = StageRecord.load(tmp_path / "out" / stage)
        del record.metrics["run"]
        record.save(tmp_path / "out" / stage)
    small(**{**ALONE, "seed": 1, "align": {**SAVING, "logging_steps": 7}})[0].run()


def test_names_may_change_where_teacher_and_texts_stay_and_not_the_other_way_round(small, ouro, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    small(**ALONE)[0].run()
    texts = tmp_path / "texts"
    monkeypatch.chdir(tmp_path)
    small(**{**ALONE, "teacher": "renamed", "data": "texts"})[0].run()
    monkeypatch.setattr(recipe_room.RecipeRun, "_train", lambda *args: pytest.fail("trained"))
    for text in texts.iterdir():
        text.write_text(text.read_text() + "changed")
    with pytest.raises(StageError, match=r"'align' .* finished with other settings: texts was"):
        small(**{**ALONE, "distill": SAVING})[0].run()
    for text in texts.iterdir():
        text.write_text(text.read_text().removesuffix("changed"))
    with torch.no_grad():
        ouro.model.norm.weight.mul_(2)
    with pytest.raises(StageError, match=r"'convert' .* finished with other settings: teacher_weights was"):
        small(**{**ALONE, "distill": SAVING})[0].run()


@pytest.mark.parametrize("place", ["align", "extend", "checkpoints/align", "checkpoints/mine"])
def test_what_no_stage_has_written_is_not_replaced(small, tmp_path, place):
    pytest.importorskip("matplotlib")
    mine = tmp_path / "out" / place
    mine.mkdir(parents=True)
    (mine / "code.py").write_text("1")
    job, done = small()
    with pytest.raises(StageError, match=rf"{mine} would be replaced"):
        job.run()
    assert (mine / "code.py").read_text() == "1"
    assert done == []


def test_a_stage_that_later_ones_were_not_made_from_is_refused(small, tmp_path):
    pytest.importorskip("matplotlib")
    small(**{**ALONE, "distill": SAVING})[0].run()
    out = tmp_path / "out"
    select = {"keep": 1, "num_tokens": 96, "length": 24}
    for changes, late, gone in (
        ({"select": select}, "select", f"{out / 'distill'} to"),
        ({"select": select, "distill": None}, "select", f"{out / 'distill'} to"),
        ({"calibrate": {"num_tokens": 48, "length": 24}}, "calibrate", f"{out / 'align'}, {out / 'distill'} to"),
    ):
        with pytest.raises(StageError, match=f"'{late}' is not done in .*were not made from it. Remove {gone}"):
            small(**{**ALONE, "distill": SAVING, **changes})[0].run()
    assert not (out / "select").exists()
    (out / "select").mkdir()
    record = StageRecord.load(out / "align")
    record.stage, record.parent, record.metrics = "select", {"stage": "align"}, {"settings": select}
    record.save(out / "select")
    with pytest.raises(StageError, match=rf"'distill' .* made from stage 'align', .* has 'select' .*{out}/distill"):
        small(**{**ALONE, "distill": SAVING, "select": select})[0].run()


LESS = {key: value for key, value in TRAINING.items() if key != "max_steps"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"align": LESS}, "align: give `target_tokens` or `max_steps`"),
        ({"distill": LESS}, "distill: give `target_tokens` or `max_steps`"),
        ({"extend": LESS}, "extend: give `target_tokens` or `max_steps`"),
        ({"extend": {**TRAINING, "extend_to": 25}}, "extend: `extend_to`=25 is below the present max_position_emb"),
        ({"extend": {**TRAINING, "rope_theta": 0}}, "extend: `rope_theta` must be above 0, got 0"),
        ({"distill": {**TRAINING, "teacher_states": "s", "tasks": [TASK]}}, "distill: `teacher_states` 's' .*tasks"),
        ({"select": {"keep": 9}}, r"keep_layers=9: out of range"),
        ({"select": {"keep": 1, "length": 999_999}}, "select: Rows have 999999 tokens, but the teacher's"),
        ({"calibrate": {"length": 999_999}}, "calibrate: Rows have 999999 tokens, but the teacher's"),
        ({"select": {"keep": 1, "strategy": "best"}}, "`strategy` must be one of"),
        ({"select": {"keep": 0}, "convert": {"keep_layers": [1]}}, r"full attention in layers \[1\] already"),
        ({"extend": {**TRAINING, "length": 1}}, "`length` must be at least 2, got 1"),
        ({"extend": {"length": 24, "target_tokens": 0}}, "`target_tokens` must be at least 1, got 0"),
        ({"distill": {**TRAINING, "learning_rate": -1.0}}, "`learning_rate` must be at least 0, got -1"),
        ({"distill": {**TRAINING, "body_learning_rate": -1.0}}, "`body_learning_rate` must be at least 0, got -1"),
        ({"distill": {**TRAINING, "optim": "adamw_bnb_8bit"}}, "distill: `optim` 'adamw_bnb_8bit' cannot be"),
        ({"extend": {**TRAINING, "data": "no/such.txt"}}, "no/such.txt' is neither a file nor a folder"),
        ({"distill": {**TRAINING, "teacher_states": __file__}}, "distill: `teacher_states` .* is a file"),
        ({"distill": {**TRAINING, "direction": "sideways"}}, "`direction` must be one of"),
        ({"distill": {**TRAINING, "final_mass": 0.1}}, "`final_mass` must lie between"),
        ({"extend": {**TRAINING, "kl_weight": -1.0}}, "`kl_weight` must be at least 0"),
        (
            {"extend": {**TRAINING, "length": 999_999}},
            r"Rows have 999999 tokens.*max_position_embeddings is \d+.*extend_to",
        ),
    ],
)
def test_what_a_later_stage_refuses_comes_up_before_the_first(small, changes, message, topics_tokenizer, new_ouro):
    if "tasks" in changes.get("distill", {}):
        changes = {**changes, "teacher_and_tokenizer": (new_ouro(vocab_size=len(topics_tokenizer)), topics_tokenizer)}
    job, done = small(**changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        job.run()
    assert done == []


def test_a_tokenizer_of_more_tokens_than_the_teacher_embeds_is_refused(small, new_ouro, topics_tokenizer, tmp_path):
    topics_tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=rf"tokenizer: .* has {len(topics_tokenizer)} tokens.*embeds 100"):
        RecipeRun(
            Recipe(teacher="tiny", tokenizer=str(tmp_path / "tokenizer"), data="offline:prose"),
            tmp_path,
            teacher=new_ouro(vocab_size=100),
        )


def test_held_out_rows_that_the_teacher_is_not_made_for_are_refused(small):
    with pytest.raises(ValueError, match="evaluate: Rows have 999999 tokens, but the teacher's"):
        small(evaluate={"num_tokens": 96, "length": 999_999})


def test_held_out_rows_are_no_longer_than_the_teacher_takes_unless_asked(small, new_ouro, byte_tokenizer):
    job, _ = small((new_ouro(torch.float32, max_position_embeddings=20), byte_tokenizer), evaluate={"num_tokens": 60})
    assert job.held_out.batches[0]["input_ids"].shape[1] == 20


def test_tasks_too_long_for_a_later_stage_come_up_before_the_first(small, new_ouro, topics_tokenizer):
    teacher = new_ouro(torch.float32, vocab_size=len(topics_tokenizer))
    tasks = [{"task": "recall", "share": 0.5, "length": 24, "num_pairs": 2, "num_keys": 8, "num_values": 8}]
    changes = {"extend": {**TRAINING, "length": 16, "tasks": tasks}}
    job, done = small(**changes, teacher_and_tokenizer=(teacher, topics_tokenizer))
    with pytest.raises(ValueError, match="'recall' has 24 tokens, a row 16"):
        job.run()
    assert done == []


def test_no_share_of_a_gap_is_told_where_there_was_none(small, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(recipe_room, "gap_closed", lambda *perplexities: math.nan)
    job, _ = small(select=None, distill=None, extend=None)
    assert all("gap closed" not in row for row in job.run().stages)


def test_stages_can_be_left_out(small, tmp_path):
    pytest.importorskip("matplotlib")
    job, done = small(select=None, extend=None, convert={"keep_layers": [1]}, evaluate={"num_tokens": 0})
    report = job.run()
    assert done == ["convert", "align", "distill"]
    assert report.heldout_kl == {}
    assert StageRecord.load(tmp_path / "out" / "distill").kept_layers == [1]


@pytest.mark.parametrize("file", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_repository_are_read(file):
    recipe = Recipe.from_yaml(file)
    assert recipe.dtype in (None, "float32"), "below it updates are rounded away; `bf16: true` computes in bfloat16"
    for name, (config, _) in recipe_room.STAGE_CLASSES.items():
        part = {key: value for key, value in (getattr(recipe, name) or {}).items() if key not in ("data", "tasks")}
        if getattr(recipe, name) is not None:
            bf16 = part.pop("bf16", False)
            args = config("unused", use_cpu=True, **part)
            assert args.max_steps > 0 or args.target_tokens
            assert isinstance(bf16, bool)


def test_numbers_are_read_as_everyone_writes_them(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text(
        "teacher: t\ndistill: {learning_rate: 1e-4, body_learning_rate: 7E-6, target_tokens: 600_000_000}\n"
    )
    assert Recipe.from_yaml(file).distill == {
        "learning_rate": 1e-4,
        "body_learning_rate": 7e-6,
        "target_tokens": 600_000_000,
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"teacher": "t", "student": "s"}, r"\['student'\].*align, .*convert, data"),
        ({"teacher": "t", "align": {"lr": 1}}, r"align: unknown keys \['lr'\].*learning_rate"),
        ({"teacher": "t", "select": {"count": 1}}, r"select: unknown keys.*strategy"),
        ({"data": "offline"}, "`teacher` is missing"),
        ({"teacher": "t", "align": None}, "needs `align`"),
        ({"teacher": "t", "distill": None, "extend": {}}, "needs `distill`"),
        ({"teacher": "t", "align": 5}, "align: this must be a mapping of fields, .* got 5"),
        ({"teacher": "t", "select": [1]}, r"select: this must be a mapping of fields, .* got \[1\]"),
        ({"teacher": "t", "convert": None, "select": {}}, "convert: .* must be a mapping of options, .* got None"),
        ({"teacher": "t", "align": {"learning_rate": "fast"}}, "align: `learning_rate` must be a number, got 'fast'"),
        ({"teacher": "t", "align": {"length": 32.5}}, "align: `length` must be a whole number, got 32.5"),
        ({"teacher": "t", "align": {"length": True}}, "align: `length` must be a whole number, got True"),
        ({"teacher": "t", "align": {"length": None}}, "align: `length` must be a whole number, got None"),
        ({"teacher": "t", "select": {"batch_size": 0}}, "select: `batch_size` must be at least 1, got 0"),
        ({"teacher": "t", "select": {"num_tokens": 0}}, "select: `num_tokens` must be at least 1, got 0"),
        ({"teacher": "t", "select": {"length": 1}}, "select: `length` must be at least 2, got 1"),
        ({"teacher": "t", "evaluate": {"num_tokens": -1}}, "evaluate: `num_tokens` must be at least 0, got -1"),
        ({"teacher": "t", "calibrate": {"batch_size": 0}}, "calibrate: `batch_size` must be at least 1, got 0"),
        ({"teacher": "t", "calibrate": {"parts": "memory"}}, "calibrate: `parts` must be a list of .* got 'memory'"),
        ({"teacher": "t", "tokenizer": 5}, "`tokenizer` must be a text, got 5"),
        ({"teacher": "t", "seed": -1}, "`seed` must be at least 0, got -1"),
        ({"teacher": "t", "tasks": {"task": "recall"}}, "`tasks` must be a list of mappings, got {'task'"),
        ({"teacher": "t", "align": {"output_dir": "x"}}, "align: `output_dir` cannot be set here, got 'x'"),
        ({"teacher": "t", "align": {"data_seed": 1}}, "align: `data_seed` cannot be set here, got 1"),
        ({"teacher": "t", "align": {"label_smoothing_factor": 0.1}}, "`label_smoothing_factor` cannot be set here"),
        ({"teacher": "t", "distill": {"neftune_noise_alpha": 5}}, "`neftune_noise_alpha` cannot be set here"),
        ({"teacher": "t", "extend": {"eval_strategy": "steps"}}, "`eval_strategy` cannot be set here"),
        ({"teacher": "t", "extend": {"push_to_hub": True}}, "`push_to_hub` cannot be set here.*loopergy push"),
        ({"teacher": "t", "extend": {"resume_from_checkpoint": "x"}}, "`resume_from_checkpoint` cannot be set here"),
        ({"teacher": "t", "extend": {"use_liger_kernel": True}}, "`use_liger_kernel` cannot .*kl_backend: liger"),
    ],
)
def test_recipes_that_cannot_be_name_what_is_known(values, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(values)


def test_whole_numbers_may_be_written_with_a_point_and_null_is_the_default():
    values = {"align": {"length": 32.0, "learning_rate": 1, "target_tokens": None, "tasks": None, "data": None}}
    values["extend"] = {"push_to_hub": False, "eval_strategy": "no"}
    values |= {"select": {"num_tokens": 1e2, "keep": 0.5, "strategy": "uniform"}, "evaluate": None, "tasks": None}
    recipe = Recipe.from_dict({"teacher": "t", **values})
    assert recipe.align == {"length": 32, "learning_rate": 1, "target_tokens": None}
    assert recipe.select == {"num_tokens": 100, "keep": 0.5, "strategy": "uniform"}
    assert all(isinstance(number, int) for number in (recipe.align["length"], recipe.select["num_tokens"]))
    assert (recipe.evaluate, recipe.tasks) == ({}, [])
    assert (
        Recipe.from_dict({"teacher": "t", "select": {"strategy": "uniform", "num_tokens": 0}}).select["num_tokens"]
        == 0
    )
