# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Files of official codes that are damaged are named, whatever the pickle comes to."""

import pickle

import pytest
import torch

from loopergy.conversion import ConversionError
from loopergy.conversion.tensor_files import check_whole_numbers, read_json_file, read_tensor_file


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_a_file_that_is_cut_short_is_named(tmp_path, zipped, share):
    file = tmp_path / "cut.pt"
    torch.save({"a": torch.ones(2000)}, file, _use_new_zipfile_serialization=zipped)
    assert torch.equal(read_tensor_file(file)["a"], torch.ones(2000))
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ConversionError, match=r"cut\.pt' is damaged, cut short or no file of tensors"):
        read_tensor_file(file)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04abc", bytes(64), pickle.dumps("x")])
def test_a_file_of_something_else_is_named(tmp_path, content):
    (tmp_path / "bad.pt").write_bytes(content)
    with pytest.raises(ConversionError, match=r"bad\.pt' is damaged, cut short or no file of tensors"):
        read_tensor_file(tmp_path / "bad.pt")


def test_what_is_no_dictionary_or_no_file_is_named(tmp_path):
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(ConversionError, match=r"list\.pt' holds a list, not a dictionary"):
        read_tensor_file(tmp_path / "list.pt")
    with pytest.raises(ConversionError, match="is not a file: pass the path of a"):
        read_tensor_file(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"), [("{oops", "is no JSON"), ("[1]", "holds a list"), ("\udcff", "is no JSON")]
)
def test_json_that_cannot_be_read_is_named(tmp_path, text, says):
    (tmp_path / "params.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConversionError, match=rf"params\.json' {says}"):
        read_json_file(tmp_path / "params.json")


@pytest.mark.parametrize("value", ["two", 0, 1.5, True, None])
def test_numbers_of_a_foreign_config_are_whole(value):
    with pytest.raises(ConversionError, match=f"n={value!r} must be a whole number of at least 1"):
        check_whole_numbers({"n": value}, ["n"])
    check_whole_numbers({"n": 1, "m": None}, ["n"], ["m", "absent"])
