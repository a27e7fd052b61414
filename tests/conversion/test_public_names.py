# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import os
from pathlib import Path

import pytest

from loopergy.conversion.public_names import public_name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("ByteDance/Ouro-1.4B", "ByteDance/Ouro-1.4B"),
        ("smollm2", "smollm2"),
        ("memory", "memory"),
        ("", ""),
        ("/somewhere/secret/model.gguf", "model.gguf"),
        (Path("/somewhere/model/"), "model"),
        ("~/models/mine", "mine"),
        ("../runs/mine", "mine"),
    ],
)
def test_of_a_path_only_the_last_part_is_published(source, name):
    assert public_name(source) == name


def test_a_folder_that_exists_is_a_path_whatever_it_looks_like(tmp_path, monkeypatch):
    (tmp_path / "me" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name("me/model") == "model"
    monkeypatch.chdir(tmp_path / "me")
    assert public_name(".") == "me"
    assert public_name(os.curdir + "/model") == "model"
