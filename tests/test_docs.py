# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What the documentation says about the source is in the source: error texts, test names, links."""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
ROOMS = ("configuration", "modeling", "conversion", "training", "tasks", "distill", "loopergy")
GAP = "…"  # stands in quoted errors for what differs from case to case
FOREIGN_FILES = (
    "tokenization_utils_base.py",
    "cache_utils.py",
    "dynamic_module_utils.py",
    "generation/utils.py",
    "models/auto/configuration_auto.py",
    "tuners/tuners_utils.py",
)
QUOTE = re.compile(r"(?<!`)(`{1,2})(?!`) ?(.+?) ?\1(?!`)", re.S)


def written(node: ast.expr) -> str | None:
    """Return the text of a string or f-string, with a gap for each value; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) or GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = written(node.left), written(node.right)
        return None if sides == (None, None) else "".join(side or GAP for side in sides)
    return None


@cache
def texts_of_the_source() -> list[str]:
    """Return every string of the package that is more than a word."""
    trees = [ast.parse(path.read_text("utf-8")) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    texts = {text for tree in trees for node in ast.walk(tree) if (text := written(node))}  # type: ignore[arg-type]
    return [text for text in texts if " " in text]


def pieces(quote: str) -> list[str]:
    """Return what stands between the gaps of a quote, on one line each."""
    return [piece for part in quote.split(GAP) if (piece := " ".join(part.split()))]


def has_in_order(text: str, wanted: list[str]) -> bool:
    start = 0
    for piece in wanted:
        start = text.find(piece, start) + len(piece)
        if start < len(piece):
            return False
    return True


def is_in_the_source(quote: str) -> bool:
    """Whether one string of the package has the pieces of the quote in their order."""
    return any(has_in_order(text, pieces(quote)) for text in texts_of_the_source())


def entries() -> tuple[list[str], list[str]]:
    """Return the entries of the page on troubleshooting: about our errors, and about those of other libraries."""
    own, _, foreign = (ROOT / "docs/troubleshooting.md").read_text("utf-8").partition("## From other libraries")
    return tuple(re.findall(r"^- .*?(?=^- |^#|\Z)", part, re.S | re.M) for part in (own, foreign))


def quoted(entry: str) -> str:
    return QUOTE.search(entry)[2]


def test_every_error_of_the_troubleshooting_page_is_raised_somewhere():
    own, foreign = entries()
    own += [entry for entry in foreign if "our own log line" in entry]
    assert len(own) > 60
    assert [quoted(entry) for entry in own if not is_in_the_source(quoted(entry))] == []


def test_every_error_of_transformers_and_peft_on_that_page_is_theirs():
    missing, count = [], 0
    for entry in entries()[1]:
        if library := re.search(r"` \((transformers|peft)\) - ", " ".join(entry.split())):
            files = [path for name in FOREIGN_FILES for path in Path(find_spec(library[1]).origin).parent.glob(name)]
            # Long texts are written in pieces over several lines: line breaks and quotes are left out.
            texts = [re.sub(r'"\s+f?"', "", path.read_text("utf-8")) for path in files]
            missing += [quoted(entry)] if not any(has_in_order(text, pieces(quoted(entry))) for text in texts) else []
            count += 1
    assert count > 6
    assert missing == []


@pytest.mark.parametrize("quote", ["The cache has … slots, but nobody counted", "No such words … anywhere"])
def test_an_error_that_is_not_raised_is_noticed(quote):
    assert not is_in_the_source(quote)


def test_every_link_between_pages_leads_somewhere():
    links = [
        (page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
        if not re.match(r"\w+:", target)
    ]
    assert len(links) > 20
    assert [f"{page.name}: {target}" for page, target in links if not (page.parent / target).exists()] == []


def test_the_index_names_every_page():
    index = (ROOT / "docs/README.md").read_text("utf-8")
    pages = sorted(page.name for page in ROOT.glob("docs/*.md") if page.name != "README.md")
    assert [name for name in pages if f"({name})" not in index] == []


def named_tests(row: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py::\w+)`", row)


@cache
def names_in(file: Path) -> set[str]:
    """Return the test functions of a file, and the names that it binds: test classes may be built."""
    body = ast.parse(file.read_text("utf-8")).body if file.is_file() else []
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return names | {ast.unparse(target) for node in body if isinstance(node, ast.Assign) for target in node.targets}


def test_every_cell_of_the_features_names_a_test_that_exists_or_a_reason():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs/features.md").read_text("utf-8").splitlines()
        if line.startswith("|") and not line.startswith(("| |", "|--"))
    ]
    assert len(rows) > 35
    assert [row[0] for row in rows if len(row) != 5] == []
    cells = [(row[0], cell) for row in rows for cell in row[1:]]
    named = {name for _, cell in cells for name in named_tests(cell)}
    pairs = [name.split("::") for name in sorted(named)]
    assert [test for file, test in pairs if test not in names_in(ROOT / "tests" / file)] == []
    assert [where for where, cell in cells if not named_tests(cell) and len(cell.split()) < 4] == []
