# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""A checkpoint is loaded whole or not at all, and a name that leads nowhere is named."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from loopergy.conversion import ConversionError
from loopergy.conversion.whole_loading import checked_dtype, existing_source, load_whole, read_config

NORM = "model.norm.weight"


@pytest.fixture
def folder(make_llama, tmp_path):
    make_llama().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def damage(folder, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop(NORM), r"1 tensor\(s\) missing: model\.norm\.weight"),
        (lambda state: state.update(foo=torch.ones(1)), r"1 tensor\(s\) unexpected: foo"),
        (
            lambda state: state.update({NORM: torch.ones(3)}),
            r"1 tensor\(s\) of another shape: model\.norm\.weight \[3\] instead of \[64\]",
        ),
    ],
    ids=["missing", "unexpected", "shape"],
)
@pytest.mark.parametrize("kind", [AutoModelForCausalLM, LlamaForCausalLM])
def test_tensors_that_do_not_fit_are_named(folder, kind, change, says):
    damage(folder, change)
    with pytest.raises(ConversionError, match=f"'{folder}' does not fit its own config: {says}"):
        load_whole(kind, folder)


def test_a_whole_checkpoint_loads_in_the_dtype_asked_for(folder):
    assert load_whole(AutoModelForCausalLM, str(folder), dtype=None).dtype == torch.float32
    assert load_whole(LlamaForCausalLM, folder, dtype="bfloat16", revision=None).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype='int8' is not one of float32, bfloat16, float16, float64"):
        load_whole(LlamaForCausalLM, folder, dtype="int8")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", torch.float8_e5m2, "int8", "Tensor", "oops"])
def test_only_dtypes_that_can_be_computed_in_are_allowed(dtype):
    with pytest.raises(ValueError, match=r"dtype=.* is not one of float32, bfloat16, float16, float64"):
        checked_dtype(dtype)
    assert checked_dtype("float64") == checked_dtype(torch.float64) == torch.float64
    assert checked_dtype(None) is None


def test_a_name_is_here_or_could_be_on_the_hub(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert existing_source("~/llama") == str(folder)
    assert existing_source("owner/name") == "owner/name"
    assert existing_source("owner/name/file.gguf") == "owner/name/file.gguf"
    for path in ("", "a/b/c", "./llama", "/llama", "~/other", tmp_path / "other.gguf"):
        with pytest.raises(FileNotFoundError, match="There is no folder or file"):
            existing_source(path)
    with pytest.raises(ConversionError, match=r"revision='next' is for a Hub id, and .*llama' is on this machine"):
        existing_source(folder, "next")


def test_a_single_file_is_no_model_and_the_text_says_what_reads_it(tmp_path):
    (tmp_path / "run.pt").write_bytes(b"x")
    with pytest.raises(ConversionError, match=r"run\.pt' is one file; .*`loopergy convert --to nrgpt`"):
        existing_source(tmp_path / "run.pt")


def test_a_name_that_the_hub_does_not_have_is_in_the_error(monkeypatch, tmp_path):
    def nothing(source, **_):
        raise OSError(f"we looked\nfor {source}")

    monkeypatch.setattr("loopergy.conversion.whole_loading.PreTrainedConfig.get_config_dict", nothing)
    with pytest.raises(
        FileNotFoundError, match=r"'m/nope' is no folder here, and the Hub did not give .*: we looked for"
    ):
        read_config("m/nope")
    with pytest.raises(OSError, match="we looked\nfor"):  # what is here is not looked for on the Hub
        read_config(tmp_path)


@pytest.mark.parametrize("place", ["", "select"])
def test_the_folder_of_a_run_names_the_stages_that_hold_models(folder, tmp_path, place):
    run = tmp_path / "run"
    for stage in ("align", "select"):
        (run / stage).mkdir(parents=True)
        (run / stage / "stage.json").write_text("{}")
    (run / "align" / "config.json").write_text("{}")
    with pytest.raises(ConversionError, match=f"holds no model; the stages of its run that do: {run / 'align'}$"):
        existing_source(run / place)
    assert existing_source(run / "align") == str(run / "align")
    assert existing_source(folder) == str(folder)
