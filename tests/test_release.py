# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What is released holds together: versions, supported ranges, and archives that build and work by themselves."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import loopergy

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_one_version_is_named_everywhere():
    assert loopergy.__version__ == PROJECT["version"]
    assert re.search(r"^version: (.+)$", read("CITATION.cff"), re.M)[1] == PROJECT["version"]
    assert re.search(r"^## (\S+)", read("CHANGELOG.md"), re.M)[1] == PROJECT["version"]


def test_the_page_on_installing_names_the_lowest_versions_of_the_package():
    page = read("docs/installing.md")
    floors = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+)", page, re.M))
    declared = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(PROJECT["dependencies"]), re.M))
    del declared["safetensors"]  # transformers asks for the same
    assert floors == declared | {"Python": re.search(r"[\d.]+", PROJECT["requires-python"])[0]}


def test_python_is_not_promised_below_what_transformers_takes():
    from importlib.metadata import metadata

    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.search(r"[\d.]+", text)[0].split("."))[:2]

    assert number(PROJECT["requires-python"]) >= number(metadata("transformers")["Requires-Python"])


def test_every_paper_is_cited_and_linked():
    papers = {"2510.25741", "2605.20670", "2605.07588", "2512.16762"}
    for text in (read("CITATION.cff"), read("README.md"), " ".join(PROJECT["urls"].values())):
        assert set(re.findall(r"arxiv\.org/abs/([\d.]+\d)", text)) >= papers


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a checkout says which files belong to the repository")
def test_the_source_distribution_builds_a_wheel_that_works_by_itself(tmp_path):
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    copy = tmp_path / "copy"
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    for name in filter(None, subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")):
        source, target = ROOT / name.decode(), copy / name.decode()
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=copy, capture_output=True, check=True)
    archive = next(tmp_path.glob("loopergy-*.tar.gz"))
    with tarfile.open(archive) as files:
        inside = {Path(*Path(name).parts[1:]).as_posix() for name in files.getnames()}
    kept = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert sorted(name for name in kept - inside if not name.startswith(".git")) == []

    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(archive)], check=True, capture_output=True)
    top = {
        path.name for path in (tmp_path / "site").iterdir() if path.is_dir() and not path.name.endswith(".dist-info")
    }
    assert top - {"bin"} == {"loopergy"}
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path / "site")!r})
import loopergy, loopergy.conversion, loopergy.demo
assert loopergy.__file__.startswith({str(tmp_path)!r}), loopergy.__file__
loopergy.demo.demo_recipe("smollm2")
print(loopergy.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == loopergy.__version__, done.stderr
