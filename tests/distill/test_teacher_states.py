# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Stage 2 from the teacher's states on disk: the run it is with the teacher, whole shards, nothing of another run."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from loopergy.conversion import convert
from loopergy.distill import teacher_states as room
from loopergy.distill.distill import DistillConfig, DistillTrainer
from loopergy.distill.recipe import Recipe, RecipeRun
from loopergy.distill.stage import StageRecord
from loopergy.distill.teacher import loop_states
from loopergy.distill.teacher_states import MANIFEST_FILE, TeacherStates, row_keys, write_teacher_states
from loopergy.training.data import PackedDataset

TEXTS = [f"document {index} " * (index % 5 + 1) for index in range(9)]
STEPS, LENGTH, ROWS = 6, 16, 12
ROW_BYTES = 2 * LENGTH * 32 * 4


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Let a shard hold the three rows of one and a half steps."""
    monkeypatch.setattr(room, "SHARD_BYTES", 3 * ROW_BYTES + 5)


@pytest.fixture
def setup(ouro, byte_tokenizer, tmp_path):
    """Return functions that make the data and the trainer of one run."""
    ouro.float()

    def data(texts=TEXTS, **options):
        return PackedDataset(texts, byte_tokenizer, LENGTH, split="all", **options)

    def settings(folder="run", **options):
        values = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
        values |= {"logging_steps": 1, "save_strategy": "no", "length": LENGTH, "disable_tqdm": True, "use_cpu": True}
        values |= {"learning_rate": 1e-3, "body_learning_rate": 1e-3, "require_previous": False}
        return DistillConfig(str(tmp_path / folder), **{**values, **options})

    def trainer(teacher=ouro, rows=None, **options):
        student = convert(ouro, keep_layers=[1]).model
        return DistillTrainer(student, teacher, settings(**options), data() if rows is None else rows)

    return ouro, data, settings, trainer


def history(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_a_run_from_disk_is_the_run_with_the_teacher(setup, tmp_path, monkeypatch):
    """The schedule passes its three phases, and the teacher is asked once, before."""
    teacher, _, _, trainer = setup
    online = trainer()
    online.train()
    folder = str(tmp_path / "states")
    asked = []
    forward = type(teacher.model).forward

    def counted(self, *args, **kwargs):
        asked.append(len(kwargs["input_ids"]))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(teacher.model), "forward", counted)
    for owner in (teacher, None, teacher):
        offline = trainer(teacher=owner, teacher_states=folder)
        offline.train()
        assert history(offline) == pytest.approx(history(online), rel=1e-6)
        assert history(offline, "grad_norm") == pytest.approx(history(online, "grad_norm"), rel=1e-5)
        for one, other in zip(online.student.parameters(), offline.student.parameters(), strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
        assert sum(asked) == ROWS


def test_shards_have_the_loops_that_the_schedule_needs_and_no_more(setup, tmp_path):
    teacher, data, settings, _ = setup
    args = settings(uniform_frac=0.3, anneal_frac=0.1)
    folder = write_teacher_states(teacher, data(), tmp_path / "states", args)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    # Rows 0 to 5 are those of steps 0, 1 and 2; at half of the steps the last loop is alone.
    assert manifest["loops_of_shards"] == [[0, 1], [0, 1], [1], [1]]
    for entry, loops in zip(manifest["shards"], manifest["loops_of_shards"], strict=True):
        tensors = load_file(folder / entry["file"])
        assert tensors.keys() == {"keys", *(f"loop_{loop}" for loop in loops)}
        assert all(tensors[f"loop_{loop}"].shape == (3, LENGTH, 32) for loop in loops)
    states, rows = TeacherStates(folder), iter(data())
    batch = {name: torch.stack(part) for name, part in _columns([next(rows) for _ in range(4)]).items()}
    expected = loop_states(teacher, {name: batch[name] for name in ("input_ids", "position_ids")})
    found = states.read(batch, [1, 0])
    for loop in (0, 1):
        torch.testing.assert_close(found[loop], expected[loop], rtol=0, atol=1e-5)
    assert torch.equal(states.head, teacher.lm_head.weight)
    assert len(states._opened) == 2


def _columns(items):
    return {name: [item[name] for item in items] for name in items[0]}


def test_rows_are_known_by_their_tokens_and_their_borders():
    ids = torch.arange(8).view(2, 4)
    borders = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    keys = row_keys({"input_ids": ids, "position_ids": borders})
    assert (
        len({*keys, *row_keys({"input_ids": ids}), *row_keys({"input_ids": ids, "position_ids": borders.flip(0)})})
        == 6
    )
    assert row_keys({"input_ids": ids[1:].to(torch.int32), "position_ids": borders[1:]}) == keys[1:]


def test_a_killed_writer_goes_on_with_the_shard_it_lost(setup, tmp_path, monkeypatch):
    """Killed while a shard is written, and between a shard and its entry in the manifest."""
    teacher, data, settings, _ = setup
    write_teacher_states(teacher, data(), tmp_path / "whole", settings())

    def stop_at(name, count):
        original, calls = getattr(room, name), []

        def stop(file, *args):
            calls.append(file)
            if len(calls) == count:
                raise KeyboardInterrupt
            return original(file, *args)

        with monkeypatch.context() as patch:
            patch.setattr(room, name, stop)
            with pytest.raises(KeyboardInterrupt):
                write_teacher_states(teacher, data(), tmp_path / "cut", settings())

    def done():
        return len(json.loads((tmp_path / "cut" / MANIFEST_FILE).read_text())["shards"])

    stop_at("_file_hash", 3)
    assert (tmp_path / "cut" / "states-00001.tmp").is_file()
    assert not (tmp_path / "cut" / "states-00001.safetensors").exists()
    assert done() == 1
    with pytest.raises(ValueError, match=r"1 of 4 shards\. Pass a teacher"):
        TeacherStates(tmp_path / "cut")
    stop_at("replace_file", 2)
    assert (tmp_path / "cut" / "states-00002.safetensors").is_file()
    assert done() == 2
    rows, begun_at = data(), []
    load = PackedDataset.load_state_dict
    monkeypatch.setattr(
        PackedDataset, "load_state_dict", lambda s, state: (begun_at.append(state["rows"]), load(s, state))[1]
    )
    write_teacher_states(teacher, rows, tmp_path / "cut", settings())
    assert begun_at == [6, 0]
    write_teacher_states(teacher, rows, tmp_path / "cut", settings())
    assert begun_at == [6, 0]
    assert next(iter(rows))["input_ids"].equal(next(iter(data()))["input_ids"])
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("whole", "cut")]
    assert (
        files[0] == files[1] == ["head.safetensors", MANIFEST_FILE, *(f"states-{n:05d}.safetensors" for n in range(4))]
    )
    for name in files[0]:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name


def test_states_of_another_teacher_data_or_run_are_refused_by_name(setup, tmp_path, byte_tokenizer, ouro):
    """Guards H2."""
    teacher, data, settings, trainer = setup
    folder = write_teacher_states(teacher, data(), tmp_path / "states", settings())

    def refuse(names, rows=None, **options):
        with pytest.raises(ValueError, match=rf"different are: {names}\."):
            write_teacher_states(teacher, data() if rows is None else rows, folder, settings(**options))

    refuse("data.seed", data(seed=1))
    refuse("data.documents", data([*TEXTS, "one more"]))
    refuse("data.separate", data(documents="contiguous"))
    refuse("loops_of_shards", uniform_frac=0.9)
    refuse("autocast", bf16=True)
    refuse("dtype, loops_of_shards, rows_per_shard", teacher_states_dtype="float64")
    other = data()
    other.tokenizer = type(byte_tokenizer).from_pretrained(_saved(byte_tokenizer, tmp_path))
    other.tokenizer.add_tokens(["<new>"])
    refuse("data.tokenizer", other)
    with torch.no_grad():
        teacher.lm_head.weight[5, 3] += 1e-3
    refuse("teacher.weights")
    with pytest.raises(ValueError, match=r"of other data; different are: seed\."):
        trainer(teacher=None, rows=data(seed=1), teacher_states=str(folder)).train()


def _saved(tokenizer, folder):
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def test_files_that_changed_or_are_missing_are_refused(setup, tmp_path):
    """Guards H2: each shard is checked when it is first read."""
    teacher, data, settings, trainer = setup
    folder = write_teacher_states(teacher, data(), tmp_path / "states", settings())
    file = folder / "states-00001.safetensors"
    tensors = load_file(file)
    tensors["loop_1"][0, 0, 0] += 1
    save_file(tensors, file)
    broken = trainer(teacher=None, teacher_states=str(folder))
    with pytest.raises(ValueError, match=r"states-00001\.safetensors.*is not what was written"):
        broken.train()
    assert broken.state.global_step == 1
    file.unlink()
    with pytest.raises(ValueError, match=r"states-00001\.safetensors.*is missing"):
        TeacherStates(folder)
    with pytest.raises(FileNotFoundError, match=r"has no manifest\.json"):
        TeacherStates(tmp_path)
    with pytest.raises(ValueError, match="or `teacher_states` of one"):
        trainer(teacher=None)


def test_rows_and_loops_that_were_not_written_are_named(setup, tmp_path, random_batch):
    teacher, data, settings, trainer = setup
    states = TeacherStates(write_teacher_states(teacher, data(), tmp_path / "states", settings()))
    with pytest.raises(
        ValueError, match=r"12 tokens needs the teacher's loops \[1\].*has none of it.*12 rows of 16 tok"
    ):
        states.read(random_batch(), [1])
    rows = iter(data())
    last = [next(rows) for _ in range(ROWS)][-1]
    batch = {name: last[name][None] for name in ("input_ids", "position_ids")}
    assert states.read(batch, [1])[1].shape == (1, LENGTH, 32)
    with pytest.raises(ValueError, match=r"loops \[0, 1\], and .* has \[1\] of it"):
        states.read(batch, [0, 1])
    # Rows of evaluation come from the teacher, if it is there.
    evaluation = [{"input_ids": row, "labels": row} for row in random_batch()["input_ids"]]
    online = trainer().evaluate(evaluation)["eval_loss"]
    mixed = trainer(teacher_states=str(tmp_path / "states"))
    mixed.train()
    mixed.student.load_state_dict(convert(teacher, keep_layers=[1]).model.state_dict())
    assert mixed.evaluate(evaluation)["eval_loss"] == pytest.approx(online, rel=1e-6)


def test_bfloat16_halves_the_bytes_and_hardly_moves_the_loss(setup, tmp_path):
    _, _, _, trainer = setup
    losses, sizes = [], []
    for dtype in (None, "bfloat16"):
        folder = tmp_path / str(dtype)
        run = trainer(teacher_states=str(folder), teacher_states_dtype=dtype)
        run.train()
        losses.append(history(run))
        sizes.append(sum(t.nbytes for f in folder.glob("states-*") for k, t in load_file(f).items() if k != "keys"))
    # Six rows need both loops, six the last.
    assert sizes == [18 * ROW_BYTES // 2, 18 * ROW_BYTES // 4]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]


def test_a_resumed_run_reads_on_from_disk(setup, tmp_path):
    """Guards I7."""
    _, _, _, trainer = setup
    options = {"teacher_states": str(tmp_path / "states"), "save_strategy": "steps", "save_steps": 4}
    whole = trainer(folder="a", **options)
    whole.train()
    resumed = trainer(teacher=None, folder="a", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert history(resumed) == pytest.approx(history(whole), rel=1e-6)


def test_what_cannot_be_written_is_refused_before(setup, tmp_path):
    teacher, data, settings, _ = setup
    for rows, options, message in (
        ([{"input_ids": torch.arange(4)}], {}, "got a list"),
        (data(), {"dataloader_num_workers": 2}, "dataloader_num_workers=2"),
        (data(), {"max_steps": -1}, "max_steps=-1"),
        (data(repeat=False), {"max_steps": 600}, r"The data end after \d+ rows of 16 tokens, and the run reads 1200"),
    ):
        with pytest.raises(ValueError, match=message):
            write_teacher_states(teacher, rows, tmp_path / "states", settings(**options))
    with pytest.raises(ValueError, match="`teacher_states_dtype` must be"):
        settings(teacher_states_dtype="int8")


def test_a_recipe_names_the_folder_and_a_second_one_finds_it_full(ouro, byte_tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    (tmp_path / "texts").mkdir()
    for index in range(20):
        (tmp_path / "texts" / f"{index}.txt").write_text(f"text number {index}, " * 4)
    training = {"length": LENGTH, "max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True}
    training |= {"disable_tqdm": True, "save_strategy": "no"}
    values = {"teacher": "tiny", "data": str(tmp_path / "texts"), "align": training, "select": None}
    values |= {"convert": {"keep_layers": [1]}, "evaluate": {"num_tokens": 48, "length": 24}}
    states = str(tmp_path / "states")
    heldout = []
    for name, options in (
        ("online", {}),
        ("first", {"teacher_states": states}),
        ("again", {"teacher_states": states}),
    ):
        if name == "again":
            monkeypatch.setattr(room, "_states", None)
        RecipeRun(
            Recipe.from_dict({**values, "distill": {**training, **options}}),
            tmp_path / name,
            ouro.float(),
            byte_tokenizer,
        ).run()
        heldout.append(StageRecord.load(tmp_path / name / "distill").metrics["heldout"]["kl"])
    assert heldout[1:] == pytest.approx([heldout[0]] * 2, rel=1e-6)


def test_the_folder_may_lie_in_the_home_folder(setup, tmp_path, monkeypatch):
    teacher, data, settings, _ = setup
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = write_teacher_states(teacher, data(), "~/states", settings())
    assert folder == tmp_path / "states"
    assert TeacherStates("~/states").folder == folder
