# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Write a model as one folder that loads where loopergy is not installed, and publish such a folder.

The folder holds weights, config, tokenizer, a card, and the code: the modeling file, and every file of ours that it
imports, side by side. transformers loads it with `trust_remote_code=True`; where loopergy has been imported its own
classes are used instead.
"""

import ast
import json
import re
import shutil
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from loopergy.conversion.folders import new_folder, saved_tokenizer

_PACKAGE = "loopergy."
# What may stand beside the weights of a checkpoint and is worth sharing.
_KEPT_FILES = ("conversion_report.json", "report.html", "report.json", "selection.json")


def export(
    model: Any, folder: str | Path, tokenizer: Any = None, *, dtype: str | None = None, overwrite: bool = False
) -> Path:
    """Write a self-contained folder of a model of ours.

    Args:
        model: the model in memory, or a folder (a Trainer's checkpoint too) or Hub id to load it from.
        folder (`str` or `Path`): where to write; it appears whole or not at all.
        tokenizer (*optional*): saved beside the model; by default the one beside the weights, if there is one.
        dtype (`str`, *optional*): type to load and write the weights in; by default the one they have.
        overwrite (`bool`): replace a folder that holds something.

    Returns:
        `Path`: the folder.

    Raises:
        ValueError: for a model that is not ours, an adapter that is not merged, or `dtype` with a model in memory.
        FileExistsError: if the folder holds something.
    """
    source = None
    if isinstance(model, (str, Path)):
        source = str(model)
        model = _load(source, dtype)
        tokenizer = tokenizer or saved_tokenizer(source)
    elif dtype is not None:
        raise ValueError(
            f"dtype={dtype!r} is for loading; a model in memory is written as it is: model.to(...) first."
        )
    code = _code_of(model)
    with new_folder(folder, overwrite=overwrite) as place:
        model.save_pretrained(place)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        for name, text in code.items():
            (place / f"{name}.py").write_text(text, encoding="utf-8")
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        config["auto_map"] = _auto_map(model)
        (place / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name in _KEPT_FILES:
            if source is not None and (Path(source) / name).is_file():
                shutil.copy(Path(source) / name, place / name)
        if not (place / "README.md").exists():
            (place / "README.md").write_text(_card(model, tokenizer), encoding="utf-8")
    return Path(folder)


def push(folder: str | Path, repo_id: str, *, private: bool | None = None, revision: str | None = None) -> str:
    """Publish an exported folder in one commit: all of it arrives, or nothing.

    Args:
        folder: what [`export`] wrote.
        repo_id (`str`): `"user/name"`; made if it does not exist.
        private (`bool`, *optional*): for a new repository.
        revision (`str`, *optional*): branch to commit to.

    Returns:
        `str`: the commit's address.

    Raises:
        ValueError: if the folder is no export, or lacks a shard of its weights.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    place = Path(folder)
    check_export(place)
    files = sorted(file for file in place.rglob("*") if file.is_file())
    api = HfApi()
    api.create_repo(repo_id, private=private, exist_ok=True)
    # Not `upload_folder`, which may split a large folder over several commits.
    commit = api.create_commit(
        repo_id,
        [CommitOperationAdd(file.relative_to(place).as_posix(), file) for file in files],
        commit_message=f"Upload {place.resolve().name}",
        revision=revision,
    )
    return commit.commit_url


def check_export(folder: Path) -> None:
    """Fail unless a folder loads on its own: config with `auto_map`, the code that it names, all weights.

    Raises:
        ValueError: naming what is missing and how to get it.
    """
    config = folder / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if "auto_map" not in fields:
        raise ValueError(
            f"{folder} is no exported model (no config.json with auto_map): loopergy export MODEL -o FOLDER"
        )
    wanted = {f"{entry.partition('.')[0]}.py" for entry in fields["auto_map"].values()}
    for file in folder.glob("*.py"):
        imported = re.findall(r"^\s*from \.(\w+) import", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        wanted |= {f"{module}.py" for module in imported}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        wanted.add("model.safetensors")
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}: export the model again.")


def _load(source: str, dtype: str | None) -> Any:
    config = AutoConfig.from_pretrained(source)
    classifies = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    return auto.from_pretrained(source, dtype=dtype or "auto")


def _code_of(model: Any) -> dict[str, str]:
    """Return file name to text: the modeling file and the files of ours that it imports, with flat imports."""
    if hasattr(model, "peft_config"):
        raise ValueError(
            "The model carries an adapter: export(model.merge_and_unload(), ...), or save the adapter alone with "
            "model.save_pretrained."
        )
    start = type(model).__module__
    if not start.startswith(_PACKAGE):
        raise ValueError(
            f"{type(model).__name__} is not a model of loopergy (its code is in {start}); transformers' own models "
            "need no export: model.save_pretrained(folder)."
        )
    texts: dict[str, str] = {}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        name = module.rpartition(".")[2]
        if name in texts:
            continue
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ValueError(f"{module} has no source file: export needs loopergy installed from source or a wheel.")
        texts[name], imported = _flat(Path(spec.origin).read_text(encoding="utf-8"))
        waiting += imported
    return texts


def _flat(text: str) -> tuple[str, list[str]]:
    """Rewrite `from loopergy.room.file import` to `from .file import`; return the text and the modules."""
    lines = text.splitlines(keepends=True)
    modules = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            module = str(node.module)
            row = node.lineno - 1
            lines[row] = lines[row].replace(f"from {module} import", f"from .{module.rpartition('.')[2]} import", 1)
            modules.append(module)
    return "".join(lines), modules


def _auto_map(model: Any) -> dict[str, str]:
    """Name config and heads of the model's family, as `file.Class`."""
    family = type(model).__name__
    for ending in ("ForCausalLM", "ForSequenceClassification", "Model"):
        family = family.removesuffix(ending)
    modeling, configuration = sys.modules[type(model).__module__], import_module(type(model.config).__module__)
    auto = {
        "AutoConfig": (configuration, "Config"),
        "AutoModel": (modeling, "Model"),
        "AutoModelForCausalLM": (modeling, "ForCausalLM"),
        "AutoModelForSequenceClassification": (modeling, "ForSequenceClassification"),
    }
    return {
        role: f"{module.__name__.rpartition('.')[2]}.{family}{ending}"
        for role, (module, ending) in auto.items()
        if hasattr(module, family + ending)
    }


def _card(model: Any, tokenizer: Any) -> str:
    """Write the least that a card needs: what it is, and how to load it."""
    config = model.config
    generates = type(model).__name__.endswith("ForCausalLM")
    chat = tokenizer is not None and getattr(tokenizer, "chat_template", None) is not None
    prompt = '[{"role": "user", "content": "Hello"}]' if chat else '"Once upon a time"'
    task = "text-generation" if generates else "text-classification"
    return f"""---
library_name: transformers
pipeline_tag: {task}
tags:
- loopergy
- {config.model_type}
---

# {type(model).__name__}, {model.num_parameters():,} parameters

A model of the family `{config.model_type}`, written by loopergy {version("loopergy")}.

```python
from transformers import pipeline

pipe = pipeline("{task}", "PATH_OR_ID", trust_remote_code=True)
print(pipe({prompt}))
```

With `import loopergy` first, loopergy's installed code is used and `trust_remote_code` is not needed.
"""
