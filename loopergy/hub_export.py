# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Write a model as one folder that loads where loopergy is not installed, and publish such a folder.

The folder holds weights, config, tokenizer, a card, and the code: the modeling file, and every file of ours that it
imports, side by side (see `hub_code.py`). transformers loads it with `trust_remote_code=True`; where loopergy has been
imported its own classes are used instead.
"""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from loopergy.conversion.folders import new_folder, saved_tokenizer
from loopergy.conversion.whole_loading import load_whole
from loopergy.hub_code import code_of
from loopergy.loading import auto_class, found_model, model_config
from loopergy.public_files import copy_public

logger = logging.get_logger(__name__)

# Hidden files that belong to a repository; others are the user's.
_PUBLISHED = (".eval_results", ".gitattributes")
# What transformers notes in a tokenizer's settings about this machine.
_NOTED = ("is_local", "local_files_only", "name_or_path")


def export(
    model: Any, folder: str | Path, tokenizer: Any = None, *, dtype: str | None = None, overwrite: bool = False
) -> Path:
    """Write a self-contained folder of a model of ours.

    Reports beside the model come along; of a path of this machine they keep the last part.

    Args:
        model: the model in memory, or a folder (a Trainer's checkpoint too) or Hub id to load it from, with the head
            that it was saved with.
        folder (`str` or `Path`): where to write; it appears whole or not at all.
        tokenizer (*optional*): saved beside the model; by default the one beside the weights, if there is one.
        dtype (`str`, *optional*): type to load and write the weights in; by default the one they have.
        overwrite (`bool`): replace a folder that holds something.

    Returns:
        `Path`: the folder.

    Raises:
        ValueError: for a model that is not ours, an adapter that is not merged, packed weights, `dtype` with a model
            in memory, or a checkpoint that lacks tensors, has others, or has some of another shape.
        FileNotFoundError: for a model that is neither here nor on the Hub.
        FileExistsError: if the folder holds something.
    """
    folder, source = Path(folder).expanduser(), None
    if isinstance(model, (str, Path)):
        source = found_model(model)
        model = _load(source, dtype)
        tokenizer = tokenizer or saved_tokenizer(source)
    elif dtype is not None:
        raise ValueError(
            f"dtype={dtype!r} is for loading; a model in memory is written as it is: model.to(...) first."
        )
    _check_exportable(model)
    with new_folder(folder, overwrite=overwrite) as place:
        model.save_pretrained(place)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
            _forget_source(place / "tokenizer_config.json")
        _add_card(place, source, folder.resolve().name)
    return folder


def _forget_source(settings: Path) -> None:
    """Drop what a tokenizer's settings say about where it was loaded from."""
    if settings.is_file():
        values = json.loads(settings.read_text(encoding="utf-8"))
        kept = {name: value for name, value in values.items() if name not in _NOTED}
        settings.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _add_card(place: Path, source: str | None, name: str) -> None:
    """Copy what belongs to the model, and write its card from that; a card that was edited by hand is kept."""
    from loopergy.card_facts import kept_files
    from loopergy.model_card import CARD_FILE, is_edited, write_card

    beside = Path(source) if source is not None and Path(source).is_dir() else None
    if beside is not None:
        card = {CARD_FILE: beside / CARD_FILE} if (beside / CARD_FILE).is_file() else {}
        copy_public({**kept_files(beside), **card}, place)
    if is_edited(place / CARD_FILE):
        logger.warning(
            f"{CARD_FILE} of {source} was edited by hand and is kept; a new one: loopergy card FOLDER --overwrite"
        )
    else:
        write_card(place, name=name, base_model=None if beside is not None else source)


def push(folder: str | Path, repo_id: str, *, private: bool | None = None, revision: str | None = None) -> str:
    """Publish an exported folder in one commit: all of it arrives, or nothing.

    Hidden files and `__pycache__` stay here, but for `.eval_results` and `.gitattributes`.

    Args:
        folder: what [`export`] wrote.
        repo_id (`str`): `"user/name"`; made if it does not exist.
        private (`bool`, *optional*): for a new repository.
        revision (`str`, *optional*): branch to commit to; made if it does not exist.

    Returns:
        `str`: the commit's address.

    Raises:
        ValueError: as [`check_export`].
    """
    place = Path(folder).expanduser()
    check_export(place)
    message = f"Upload {place.resolve().name}"
    return _commit(place, repo_id, private=private, revision=revision, commit_message=message).commit_url


def push_model(
    model: Any,
    repo_id: str,
    *,
    commit_message: str = "Upload model",
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
) -> Any:
    """Publish a model in memory with its code in one commit; `model.push_to_hub` is this function.

    It differs from the method of transformers' models in that the repository gets our card, unless it has one. The
    tokenizer is not the model's: `tokenizer.push_to_hub(repo_id)`, or [`export`] and [`push`] for both at once.

    Args:
        model: a model of ours, or one of its heads.
        repo_id (`str`): `"user/name"`; made if it does not exist.
        commit_message, commit_description, private, token, revision, create_pr, max_shard_size, tags: as in
            `PreTrainedModel.push_to_hub`. `tags` go into a card that is written now.

    Returns:
        `CommitInfo`: the commit; `str()` of it is its address.

    Raises:
        ValueError: as [`export`].
    """
    from huggingface_hub import HfApi

    from loopergy.model_card import write_card

    _check_exportable(model)
    with TemporaryDirectory() as place:
        folder = Path(place)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if not HfApi(token=token).file_exists(repo_id, "README.md", revision=revision):
            write_card(folder, name=repo_id.rpartition("/")[2], repo_id=repo_id, tags=tags or ())
        return _commit(
            folder,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            commit_description=commit_description,
            create_pr=create_pr,
        )


def _commit(
    folder: Path, repo_id: str, *, private: bool | None, revision: str | None, token: Any = None, **options: Any
) -> Any:
    """Make the repository, and the branch if one is named, and send the files of a folder in one commit."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    # Not `upload_folder`, which may split a large folder over several commits.
    names = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    operations = [CommitOperationAdd(name.as_posix(), folder / name) for name in names if _is_published(name)]
    return api.create_commit(repo_id, operations, revision=revision, **options)


def _is_published(name: Path) -> bool:
    return not any(part == "__pycache__" or (part[0] == "." and part not in _PUBLISHED) for part in name.parts)


def check_export(folder: Path) -> None:
    """Fail unless a folder has what an export has: config with `auto_map`, the code that it names, whole weight files.

    The weight files hold what the index names; that these are all tensors of the model is for [`export`] to see.

    Raises:
        ValueError: naming what is missing or damaged and how to get it.
    """
    fields = _json_object(folder / "config.json")
    if "auto_map" not in fields:
        raise ValueError(
            f"{folder} is no exported model (no config.json with auto_map): loopergy export MODEL -o FOLDER"
        )
    wanted = {f"{entry.partition('.')[0]}.py" for entry in fields["auto_map"].values()}
    for file in folder.glob("*.py"):
        imported = re.findall(r"^\s*from \.(\w+) import", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        wanted |= {f"{module}.py" for module in imported}
    tensors: dict[str, set[str]] = {}
    for tensor, shard in _json_object(folder / "model.safetensors.index.json").get("weight_map", {}).items():
        tensors.setdefault(shard, set()).add(tensor)
    tensors = tensors or {"model.safetensors": set()}
    missing = sorted(name for name in wanted | tensors.keys() if not (folder / name).is_file())
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}: export the model again.")
    for shard, names in tensors.items():
        try:
            with safe_open(folder / shard, framework="pt") as weights:
                absent = sorted(names - set(weights.keys()))
        except SafetensorError as error:
            raise ValueError(f"{folder / shard} is damaged or cut short ({error}): export the model again.") from error
        if absent:
            raise ValueError(f"{folder / shard} lacks {', '.join(absent[:5])} of the index: export it again.")


def _json_object(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds names and values; nothing if it is not there."""
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}): export the model again.") from error
    return values if isinstance(values, dict) else {}


def _load(source: str, dtype: str | None) -> Any:
    config = model_config(source)
    if (packed := getattr(config, "quantization_config", None)) is not None:
        raise _packed_error(packed)
    return load_whole(auto_class(config), source, dtype=dtype)


def _packed_error(packed: Any) -> ValueError:
    """Return the error for weights that a quantiser packed and that were then loaded: they cannot be written again."""
    method = packed.get("quant_method") if isinstance(packed, dict) else getattr(packed, "quant_method", None)
    return ValueError(
        f"The weights are packed (quant_method {str(getattr(method, 'value', method))!r}) and cannot be written once "
        "they are loaded: copy the folder, which holds its code, or export the full weights and quantise those again."
    )


def _check_exportable(model: Any) -> None:
    """Fail unless the model's folder will hold whole weights and their code."""
    if hasattr(model, "peft_config"):
        raise ValueError(
            "The model carries an adapter: export(model.merge_and_unload(), ...), or save the adapter alone with "
            "model.save_pretrained."
        )
    if getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False):
        raise _packed_error(model.config.quantization_config)
    code = code_of(model.config)
    if code is None:
        raise ValueError(
            f"{type(model).__name__} is not a model of loopergy (its code is in {type(model).__module__}); "
            "transformers' own models need no export: model.save_pretrained(folder)."
        )
    _ = code.files  # fails for an installation without sources, which `save_pretrained` only warns of
