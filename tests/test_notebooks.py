# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Run the notebooks as the scripts that they are, with tiny models and few steps."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.py"))
# What makes a notebook short; each has to be found in it.
SHORTER = {
    "talk_to_ouro": {"ByteDance/Ouro-1.4B-Thinking": "HUB"},
    "convert_and_distil": {"= 245_760, 60, 60, 8192": "= 2048, 2, 2, 512"},
    "watch_energies": {"STEPS = 200": "STEPS = 3"},
}
PICTURES = {
    "talk_to_ouro": ["exits.png"],
    "convert_and_distil": ["quality.png"],
    "watch_energies": ["cem.png", "nrgpt.png"],
}


@pytest.fixture
def tiny_ouro(tmp_path, topics_tokenizer) -> Path:
    from loopergy import OuroConfig, OuroForCausalLM

    OuroForCausalLM(OuroConfig.from_preset("tiny", vocab_size=len(topics_tokenizer))).save_pretrained(tmp_path / "hub")
    topics_tokenizer.save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end_and_draws_its_pictures(notebook, tiny_ouro, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = notebook.read_text("utf-8")
    for long, short in SHORTER[notebook.stem].items():
        assert long in source
        source = source.replace(long, short.replace("HUB", tiny_ouro.as_posix()))
    exec(compile(source, notebook.name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.count("\n") > 10
    if find_spec("matplotlib"):
        assert [name for name in PICTURES[notebook.stem] if not (tmp_path / name).is_file()] == []


def cells(source: str) -> list[tuple[str, str]]:
    """Split a script in the percent format into (kind, text)."""
    parts = re.split(r"^# %%(.*)\n", source, flags=re.M)[1:]
    return [(head.strip() or "code", body) for head, body in zip(parts[::2], parts[1::2], strict=True)]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_prose_or_code_and_the_first_is_a_title(notebook):
    found = cells(notebook.read_text("utf-8"))
    assert found[0][1].startswith("# # ")
    assert {kind for kind, _ in found} == {"code", "[markdown]"}
    for kind, body in found:
        if kind == "code":
            ast.parse(body)
        else:
            assert all(line.startswith("#") or not line for line in body.splitlines())
