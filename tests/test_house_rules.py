# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold the rules of the house: floors, imports, names, precision, import cost, documentation.

Each rule is a function from source text to a list of offences, so each is also shown an offender and must name it.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0."
ROOMS = ("configuration", "modeling", "conversion", "training", "tasks", "distill")
OTHERS = ("tests", "benchmarks", "examples", "notebooks", "recipes", "docs", "model_cards", ".ci")
CODE_FOLDERS = ("loopergy", *ROOMS, *OTHERS)
BUNDLED = ("configuration", "modeling")
ALWAYS_THERE = ("torch", "transformers", "huggingface_hub")  # the last one comes with transformers
HEAVY = ("datasets", "peft", "matplotlib", "lm_eval", "triton", "gguf", "typer.testing")
FLOAT32_KEYWORD_CALLS = ("softmax", "log_softmax", "sum", "cumsum", "mean", "to", "type")


def python_files(*folders: str) -> list[Path]:
    """Return every Python file below the named folders of the repository, sorted."""
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def offences(rule, *folders: str) -> list[str]:
    """Apply a rule `(path, source) -> messages` to every Python file of the folders."""
    return [
        f"{shown(path)}: {text}" for path in python_files(*folders) for text in rule(path, path.read_text("utf-8"))
    ]


# The floors, bottom first. Imports go down or stay on their floor, never up.


def floor(module: str) -> int:
    """Return the floor of a module's dotted name below `loopergy`, or of a repository path without its suffix."""
    parts = module.replace("/", ".").removeprefix("loopergy.").split(".")
    if parts[0] == "configuration":
        return 0
    if parts[0] == "modeling":
        if parts[1:2] == ["kernels"]:
            return 1
        return 3 if len(parts) == 1 or parts[1].startswith(("modeling_", "__init__")) else 2
    return {"conversion": 4, "training": 5, "tasks": 6, "distill": 7}.get(parts[0], 8)


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str, tuple[str, ...]]]:
    """Yield (statement, module, names) for each import; relative imports keep their dots in the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, "." * node.level + (node.module or ""), tuple(alias.name for alias in node.names)


def upward_imports(path: Path, source: str) -> list[str]:
    here = floor(shown(path).removesuffix(".py"))
    found = []
    for node, module, names in imports(ast.parse(source)):
        if module.split(".")[0] != "loopergy":
            continue
        targets = [f"loopergy.{name}" for name in names] if module == "loopergy" and names else [module]
        for target in targets:
            room = target.split(".")[1] if "." in target else ""
            there = floor(target) if room in ROOMS else 8
            if there > here:
                found.append(f"line {node.lineno} imports {target} from a floor above")
    return found


def test_imports_go_down_only():
    assert offences(upward_imports, "loopergy", *ROOMS) == []


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("configuration/configuration_x.py", "from loopergy.modeling.modeling_x import Y"),
        ("modeling/kernels/x.py", "from loopergy.modeling.mixers.attention import Attention"),
        ("modeling/mixers/x.py", "import loopergy.modeling.modeling_ouro"),
        ("conversion/x.py", "from loopergy import distill"),
        ("training/x.py", "from loopergy.tasks.task import Task"),
        ("tasks/x.py", "from loopergy.distill.recipe import RecipeRun"),
        ("distill/x.py", "import loopergy"),
        ("tasks/x.py", "from loopergy.cli import app"),
    ],
)
def test_an_upward_import_is_noticed(place, line):
    assert len(upward_imports(ROOT / place, line)) == 1


# What a bundled file may import. A pushed folder holds these files flat, and the Hub's loader demands every import
# that is neither in a `try` nor under `if is_..._available():`.


def guarded(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes inside `try:` bodies and under `if is_..._available():`."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) or (
            isinstance(node, ast.If) and re.search(r"is_\w+_available\(", ast.unparse(node.test))
        ):
            for statement in node.body:
                inside.update(ast.walk(statement))
    return inside


def foreign_imports(path: Path, source: str) -> list[str]:
    tree = ast.parse(source)
    optional = guarded(tree)
    found = []
    for node, module, _ in imports(tree):
        top = module.split(".")[0]
        if module.startswith("."):
            found.append(f"line {node.lineno} is a relative import")
        elif top == "loopergy":
            target = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
            if not target.is_file():
                found.append(f"line {node.lineno} imports {module}, which is not one file of a room")
        elif top not in sys.stdlib_module_names and top not in ALWAYS_THERE and node not in optional:
            found.append(f"line {node.lineno} imports {top} without a guard")
    found += [
        f"reads like a relative import: {line.strip()!r}"
        for line in re.findall(r"^\s*from\s+\.\S+\s+import.*$", source, re.M)
    ]
    return found


def test_bundled_files_import_only_what_a_pushed_folder_has():
    assert offences(foreign_imports, *BUNDLED) == []


@pytest.mark.parametrize(
    "line",
    [
        "import einops",
        "def f():\n    import fla",
        "from . import attention",
        "from loopergy.modeling import mixers",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jaxtyping",
    ],
)
def test_a_foreign_import_is_noticed(line):
    assert foreign_imports(ROOT / "modeling/modeling_x.py", line) != []


def test_a_guarded_import_is_allowed():
    source = """
from transformers.utils import is_x_available
if is_x_available():
    import fla
try:
    import triton
except ImportError:
    triton = None
"""
    assert foreign_imports(ROOT / "modeling/modeling_x.py", source) == []


def test_bundled_file_names_are_unique():
    names = [path.name for path in python_files(*BUNDLED) if path.name != "__init__.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def config_isinstance(path: Path, source: str) -> list[str]:
    """A config loaded as remote code is of another class object than the one that the modeling file imported."""
    return [
        f"line {node.lineno} tests a config by its class"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "isinstance"
        and len(node.args) == 2
        and re.search(r"\b\w+Config\b", ast.unparse(node.args[1]))
    ]


def test_bundled_files_never_test_a_config_by_its_class():
    assert offences(config_isinstance, *BUNDLED) == []
    assert config_isinstance(ROOT / "modeling/x.py", "isinstance(c, (int, OuroConfig))") != []


# Precision: float32 is a floor to promote to, never a ceiling that float64 is cut to.


def hard_float32(path: Path, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        given = [ast.unparse(value) for value in node.args]
        given += [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "dtype"]
        if (name == "float" and not node.args) or (
            name in FLOAT32_KEYWORD_CALLS and {"torch.float32", "torch.float"} & set(given)
        ):
            found.append(f"line {node.lineno} has a hard float32: {ast.unparse(node)[:60]}")
    return found


def test_modeling_promotes_and_never_casts_down_to_float32():
    assert offences(hard_float32, "modeling") == []


@pytest.mark.parametrize(
    "line", ["x.float()", "x.to(torch.float32)", "x.to(dtype=torch.float32)", "F.softmax(x, -1, dtype=torch.float32)"]
)
def test_a_hard_float32_is_noticed(line):
    assert len(hard_float32(ROOT / "modeling/x.py", line)) == 1


# Import cost and public names, seen from a fresh process.


def test_import_loads_nothing_heavy(tmp_path):
    # transformers itself imports torchao where it is installed, and that has something to say.
    code = "import sys; sys.modules['torchao'] = None; import loopergy"
    code += f"; print([n for n in {HEAVY!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, "[]", "")


def test_loading_and_generating_imports_nothing_heavy(tmp_path):
    code = f"""
import sys; sys.modules['torchao'] = None
import loopergy, torch
from transformers import AutoModelForCausalLM
for config, _, model_class, _ in loopergy.FAMILIES:
    model_class(config.from_preset("tiny")).save_pretrained(config.model_type)
    model = AutoModelForCausalLM.from_pretrained(config.model_type)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_exported_name_resolves_and_is_documented():
    import loopergy

    assert len(set(loopergy.__all__)) == len(loopergy.__all__)
    bare = []
    for name in loopergy.__all__:
        thing = getattr(loopergy, name)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            doc = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
            first = (doc or "").strip().split("\n\n")[0]
            if not first.endswith(".") or first.startswith(f"{name}("):
                bare.append(name)
    assert bare == []


def untyped(path: Path, source: str) -> list[str]:
    """Name the classes without a docstring and the public functions, methods included, that lack an annotation."""
    found = []
    tree = ast.parse(source)
    for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in scope.body:
            if getattr(node, "name", "_").startswith("_"):
                continue
            if isinstance(node, ast.ClassDef) and not ast.get_docstring(node):
                found.append(f"class {node.name} has no docstring")
            if isinstance(node, ast.FunctionDef):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                if arguments and arguments[0].arg == "ctx":
                    continue  # torch.autograd.Function fixes these signatures
                bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
                if bare or node.returns is None:
                    found.append(f"{node.name} lacks types: {', '.join(bare) or 'return'}")
    return found


def test_public_functions_are_typed_and_classes_documented():
    assert offences(untyped, "loopergy", *ROOMS) == []
    assert len(untyped(ROOT / "modeling/x.py", "class A:\n    def f(self, x): ...")) == 2


# Files: licence line, size, no traces of a machine, no bare room names, nothing half done.


def test_every_file_starts_with_the_licence_line():
    late = [shown(p) for p in python_files(*CODE_FOLDERS) if p.read_text("utf-8").split("\n", 1)[0] != HEADER]
    assert late == []


def test_files_and_functions_stay_short():
    def long(path: Path, source: str) -> list[str]:
        lines = source.count("\n") + 1
        found = [f"{lines} lines"] if lines > 501 else []
        if path.parts[len(ROOT.parts)] == "tests":
            return found
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                start = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.body[0].lineno
                if (node.end_lineno or start) - start + 1 > 60:
                    found.append(f"{node.name} has more than 60 lines of code")
        return found

    assert offences(long, "loopergy", *ROOMS, "tests", "benchmarks", "examples") == []


def bare_room_imports(path: Path, source: str) -> list[str]:
    return [
        f"line {node.lineno} imports the bare {module.split('.')[0]}"
        for node, module, _ in imports(ast.parse(source))
        if module.split(".")[0] in (*ROOMS, "tests")
    ]


def test_rooms_are_imported_by_their_full_name():
    assert offences(bare_room_imports, *CODE_FOLDERS) == []
    assert bare_room_imports(ROOT / "tests/x.py", "import modeling.modeling_ouro") != []


def text_files() -> Iterator[tuple[Path, str]]:
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cff", ".json", ".html", ".j2", ".sh", ""}
    top = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".git")]
    below = [path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in sorted({*top, *below}):
        if path.suffix in suffixes and "__pycache__" not in path.parts:
            yield path, path.read_text("utf-8")


def test_no_file_names_a_path_of_one_machine():
    homes = re.compile(
        "|".join(
            ["/wo" + "rk/", "/ro" + "ot/", "/ho" + r"me/\w", "/Us" + r"ers/\w", "/o" + "pt/venv", "/tm" + r"p/\w"]
        )
    )
    assert [f"{shown(p)}: {m.group()}" for p, text in text_files() for m in homes.finditer(text)] == []


def test_nothing_is_left_half_done():
    notes = re.compile(r"\b(TO" + "DO|FIX" + "ME|X" + r"XX)\b")
    assert [f"{shown(p)}: {m.group()}" for p, text in text_files() for m in notes.finditer(text)] == []


def pickles(path: Path, source: str) -> list[str]:
    return [
        f"line {node.lineno} reads a pickle"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads")
        and not (path.parts[len(ROOT.parts)] == "conversion" and "weights_only=True" in ast.unparse(node))
    ]


def test_weights_are_never_read_from_a_pickle_that_may_run_code():
    assert offences(pickles, "loopergy", *ROOMS) == []
    assert pickles(ROOT / "conversion/x.py", "torch.load(f)") != []
    assert pickles(ROOT / "conversion/x.py", "torch.load(f, weights_only=True)") == []


def test_the_wheel_lists_every_folder_with_code():
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    folders = {shown(p.parent) for p in python_files("loopergy", "recipes", *ROOMS) if p.name == "__init__.py"}
    expected = {f if f == "loopergy" else "loopergy." + f.replace("/", "."): f for f in folders}
    assert settings["package-dir"] == expected
    assert sorted(settings["packages"]) == sorted(expected)
