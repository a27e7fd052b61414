# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""`loopergy convert`: every option that is given is used, or refused by its name."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import loopergy
from loopergy.cli import app


@pytest.fixture
def cem(tmp_path):
    config = loopergy.CEMLlamaConfig.from_preset("tiny", cem_diag="none", cem_rope_values="plain")
    loopergy.CEMLlamaForCausalLM(config).save_pretrained(tmp_path / "cem")
    return tmp_path / "cem"


def run(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["-k", "7,9", "--mixer", "kda", "--seed", "0"], "as a llama: without --keep-layers, --mixer, --seed"),
        (["--revision", "nope"], "revision='nope' is for a Hub id"),
        (["--set", "oops=1"], "the conversion to 'llama' has no option oops; it has none"),
        (["--set", "dtype=bfloat16"], "--set dtype: give it as a flag, --dtype"),
    ],
)
def test_an_exact_rewriting_refuses_what_it_does_not_use(cem, tmp_path, given, says):
    done = run(cem, "--to", "llama", "-o", tmp_path / "out", *given)
    assert says in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_an_exact_rewriting_writes_the_dtype_asked_for(cem, tmp_path):
    done = run(cem, "--to", "llama", "-o", tmp_path / "out", "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_hybrid_says_what_keep_layers_takes_and_takes_a_share(make_ouro, tmp_path):
    make_ouro(num_hidden_layers=4).save_pretrained(tmp_path / "ouro")
    wanted = "3,7,11, a count, a share such as 0.25, all or none"
    assert wanted in str(run(tmp_path / "ouro", "-o", tmp_path / "out").exception)
    assert "a share" in run("--help").output
    assert run(tmp_path / "ouro", "-k", "0.25", "-o", tmp_path / "out").exit_code == 0
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert config.layer_mixers == ["gdn", "gdn", "gdn", "full"]
    for nothing in ("", ","):
        assert "names no layer" in str(run(tmp_path / "ouro", "-k", nothing, "-o", tmp_path / "no").exception)


def test_a_revision_of_a_folder_is_refused_for_a_hybrid_too(make_ouro, tmp_path):
    make_ouro().save_pretrained(tmp_path / "ouro")
    done = run(tmp_path / "ouro", "-k", "1", "--revision", "x", "-o", tmp_path / "out")
    assert "revision='x' is for a Hub id" in str(done.exception)


def test_the_output_is_looked_at_before_the_teacher(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_text("1")
    assert "(--overwrite)" in str(run("no/such", "-k", "1", "-o", tmp_path / "old").exception)


def test_a_teacher_is_not_replaced_by_its_student(make_ouro, cem, tmp_path):
    make_ouro(num_hidden_layers=2, dtype=torch.float32).save_pretrained(tmp_path / "ouro")
    for arguments in ((tmp_path / "ouro", "-k", "1"), (cem, "--to", "llama")):
        before = (arguments[0] / "model.safetensors").read_bytes()
        done = run(*arguments, "--overwrite", "-o", arguments[0])
        assert "made from; give another folder" in str(done.exception)
        assert (arguments[0] / "model.safetensors").read_bytes() == before
