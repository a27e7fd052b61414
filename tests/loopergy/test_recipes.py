# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The recipes are found by name wherever the package is installed."""

from fnmatch import fnmatch

import pytest

from loopergy.recipes import find_recipe, recipe_files


def test_a_recipe_is_found_by_name_and_by_its_path_in_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = recipe_files()["accelerate/ddp"]
    assert file.read_text().count("distributed_type: MULTI_GPU") == 1
    for name in ("accelerate/ddp", "accelerate/ddp.yaml", "recipes/accelerate/ddp.yaml", file):
        assert find_recipe(name) == file


def test_a_file_of_ones_own_comes_first_and_an_unknown_name_lists_the_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").write_text("teacher: mine")
    assert find_recipe("smollm2-135m").read_text() == "teacher: mine"
    with pytest.raises(FileNotFoundError, match=r"nonsense is neither.*accelerate/fsdp2.*smollm2-135m"):
        find_recipe("nonsense")


def test_the_command_line_lists_them_and_prints_the_file_of_one(capsys, monkeypatch):
    from loopergy import cli

    def said(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["loopergy", "recipes", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        return capsys.readouterr().out

    assert said("accelerate/zero3").strip() == str(recipe_files()["accelerate/zero3"])
    listed = [line for line in said().splitlines() if not line.startswith(" ")]
    assert listed == list(recipe_files())


def test_the_wheel_carries_every_recipe(root):
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    patterns = settings["package-data"]["loopergy.recipes"]
    for name in recipe_files():
        assert any(fnmatch(f"{name}.yaml", pattern) and name.count("/") == pattern.count("/") for pattern in patterns)
