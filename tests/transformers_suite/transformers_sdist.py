# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Make the test classes of an unpacked transformers sdist (or a git checkout) importable.

Transformers publishes its model tests as files of the package `tests`. That name is ours too, so the folder is
imported under another one. The sdist holds the top-level test files only; where a file of a subfolder is missing (the
generation and export tests, the values of the config test) a stand-in takes its place, and `Suite.missing` says so.
"""

import importlib
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "LOOPERGY_TRANSFORMERS_TESTS"
ALIAS = "transformers_own_tests"
# Values that differ from the defaults of PreTrainedConfig: a config class has to keep each of them.
CONFIG_VALUES = {
    "architectures": ["SomeModel"],
    "chunk_size_feed_forward": 3,
    "dtype": "float16",
    "id2label": {0: "no", 1: "yes", 2: "perhaps"},
    "is_encoder_decoder": True,
    "label2id": {"no": 0, "yes": 1, "perhaps": 2},
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
}


@dataclass(frozen=True)
class Suite:
    """Hold what the model tests inherit from, and which parts the unpacked folder lacks."""

    model_tests: type
    generation_tests: type
    config_tester: type
    missing: tuple[str, ...]


def _stand_in(folder: Path, module: str, **members: object) -> bool:
    """Put an empty module in the place of a missing test file; return whether it was missing."""
    if folder.joinpath(*module.split(".")).with_suffix(".py").is_file():
        return False
    package, _, _ = module.rpartition(".")
    for name in (package, module):
        full = f"{ALIAS}.{name}"
        if full not in sys.modules:
            sys.modules[full] = types.ModuleType(full)
            sys.modules[full].__path__ = [str(folder / package)]
    vars(sys.modules[f"{ALIAS}.{module}"]).update(members)
    return True


def load() -> Suite | str:
    """Import the suite named by LOOPERGY_TRANSFORMERS_TESTS; return it, or the reason why there is none."""
    place = os.environ.get(VARIABLE)
    if not place:
        return f"{VARIABLE} does not point to an unpacked transformers sdist"
    folder = Path(place) / "tests"
    if not (folder / "test_modeling_common.py").is_file():
        raise FileNotFoundError(
            f"{VARIABLE}={place!r} has no tests/test_modeling_common.py. Set it to the folder that "
            f"`pip download --no-deps --no-binary transformers transformers==X` and `tar -xzf` leave behind."
        )
    (folder / "__init__.py").touch()  # the config tests run it by its path
    package = types.ModuleType(ALIAS)
    package.__path__ = [str(folder)]
    sys.modules[ALIAS] = package
    generation = type("GenerationTesterMixin", (), {})
    missing = {
        "export": _stand_in(folder, "exporters.test_export", ExportTesterMixin=type("ExportTesterMixin", (), {})),
        "generation": _stand_in(folder, "generation.test_utils", GenerationTesterMixin=generation),
        "config": _stand_in(folder, "utils.test_configuration_utils", config_common_kwargs=CONFIG_VALUES),
    }
    common = importlib.import_module(f"{ALIAS}.test_modeling_common")
    return Suite(
        model_tests=common.ModelTesterMixin,
        generation_tests=common.GenerationTesterMixin,
        config_tester=importlib.import_module(f"{ALIAS}.test_configuration_common").ConfigTester,
        missing=tuple(name for name, absent in missing.items() if absent),
    )
