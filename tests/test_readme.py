# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Run the code of the README, and check that the commands it names exist.

A python block runs unless the line before it is `<!-- not run: reason -->`, or `<!-- needs: package -->` and the
package is not installed; the blocks of a page run in one session, in order. Hub ids stand for tiny models of the same
kind that are made here.
"""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if page.is_file()]
MARKER = r"<!-- (?:(?P<skip>not run): [^>]+|needs: (?P<package>\w+)) -->\n"
BLOCK = re.compile(rf"(?:{MARKER})?```(?P<language>\w+)\n(?P<code>.*?)```", re.S)
OURO_IDS = re.compile(r"ByteDance/Ouro-[\w.]+(-Thinking)?")


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of one language that are meant to run."""
    found = [match for match in BLOCK.finditer(page.read_text("utf-8")) if match["language"] == language]
    return [
        match["code"] for match in found if not match["skip"] and (not match["package"] or find_spec(match["package"]))
    ]


@pytest.fixture(scope="session")
def tiny_ouro(tmp_path_factory, topics_tokenizer) -> Path:
    """Save an untrained Ouro of a few layers with a tokenizer and a chat template."""
    from loopergy import OuroConfig, OuroForCausalLM

    folder = tmp_path_factory.mktemp("hub") / "Ouro-tiny"
    layers = 8  # the README keeps six
    config = OuroConfig.from_preset("tiny", vocab_size=len(topics_tokenizer), num_hidden_layers=layers)
    OuroForCausalLM(config).save_pretrained(folder)
    topics_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_python_block_runs(page, tiny_ouro, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {"__name__": "__main__"}
    for number, code in enumerate(blocks(page, "python"), 1):
        source = OURO_IDS.sub(tiny_ouro.as_posix(), code)
        exec(compile(source, f"{page.name}, python block {number}", "exec"), session)


def commands() -> list[tuple[str, list[str]]]:
    """Return (page, words) for each line of a bash block."""
    joined = ((page, block.replace("\\\n", " ")) for page in PAGES for block in blocks(page, "bash"))
    lines = [(page.name, line) for page, block in joined for line in block.splitlines()]
    return [(page, words) for page, line in lines if (words := shlex.split(line, comments=True))]


def test_every_make_target_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    named = {words[1] for _, words in commands() if words[0] == "make"}
    assert named
    assert named <= targets


def test_every_loopergy_line_is_understood():
    import typer

    from loopergy.cli import app

    group = typer.main.get_command(app)
    lines = [words[1:] for _, words in commands() if words[0] == "loopergy"]
    assert lines
    for verb, *arguments in lines:
        command = group.commands[verb]
        while hasattr(command, "commands"):  # a verb with verbs of its own, such as `loopergy task train`
            verb, *arguments = arguments
            command = command.commands[verb]
        command.make_context(verb, list(arguments))
