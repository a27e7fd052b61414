# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest

from loopergy.conversion.folders import check_new_folder, new_folder


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
