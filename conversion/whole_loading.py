# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Load checkpoints whose tensors are exactly those that their config describes.

transformers fills what a checkpoint lacks with random numbers, drops what it has too much, and warns. A conversion
would write that down as a whole model.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GgufConfig, PreTrainedConfig, PreTrainedModel

from loopergy.conversion.errors import ConversionError, list_names

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_whole(auto_class: Any, source: str | os.PathLike, **options: Any) -> PreTrainedModel:
    """Load a model, and refuse a checkpoint that lacks tensors, has others, or has some of another shape.

    Args:
        auto_class (`type`): An Auto class or a model class: what has `from_pretrained`.
        source (`str` or `Path`): A folder, a Hub id, or a `.gguf` file, which is dequantised (to float32 by default).
        options: Of `from_pretrained`, such as `dtype` and `revision`; those that are None count as not given.

    Returns:
        `PreTrainedModel`: In eval mode.

    Raises:
        ConversionError: With the names of the tensors that do not fit, or as [`existing_source`].
        FileNotFoundError: If there is no such folder or file, nor a model of that name on the Hub.
    """
    location = source = existing_source(source, options.get("revision"))
    options = {"revision": "main"} | {name: value for name, value in options.items() if value is not None}
    if options.get("dtype", "auto") != "auto":
        options["dtype"] = checked_dtype(options["dtype"])
    if source.endswith(".gguf"):
        location, options["gguf_file"] = str(Path(source).parent), Path(source).name
        options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)} | options
    with _named(location):
        model, info = auto_class.from_pretrained(
            location, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    shapes = [f"{name} {list(got)} instead of {list(wanted)}" for name, got, wanted in info["mismatched_keys"]]
    kinds = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "of another shape": shapes}
    faults = [f"{len(names)} tensor(s) {kind}: {list_names(names)}" for kind, names in kinds.items() if names]
    if faults:
        raise ConversionError(f"the checkpoint {source!r} does not fit its own config: {'; '.join(faults)}")
    return model


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that is meant; None stays None.

    Raises:
        ValueError: For one that weights are not stored and computed in.
    """
    named = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if named is not None and named not in _DTYPES:
        allowed = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise ValueError(f"dtype={dtype!r} is not one of {allowed}")
    return named


def read_config(source: str | os.PathLike, revision: str | None = None) -> dict[str, Any]:
    """Return what `config.json` of a folder or Hub id holds; nothing for a `.gguf` file.

    Raises:
        ConversionError, FileNotFoundError: As [`existing_source`].
        OSError: If a folder has no `config.json`, or one that cannot be read.
    """
    source = existing_source(source, revision)
    if source.endswith(".gguf"):
        return {}
    with _named(source):
        return PreTrainedConfig.get_config_dict(source, revision=revision)[0]


def existing_source(source: str | os.PathLike, revision: str | None = None) -> str:
    """Return a source with its `~` expanded, if it is here, or could be the name of a model on the Hub.

    Raises:
        ConversionError: For a file that is no `.gguf` file, a revision of something that is here, or the folder of a
            run in place of one of its stages.
        FileNotFoundError: For a path that is not there.
    """
    text = os.path.expanduser(os.fspath(source))
    packed, here = text.endswith(".gguf"), text != "" and Path(text).exists()
    # A .gguf file may be a part of a repository: OWNER/NAME/FILE.gguf.
    location = str(Path(text).parent) if packed else text
    if not here and (location.count("/") > 1 or text[:1] in ("", "/", ".") or (packed and Path(location).exists())):
        raise FileNotFoundError(f"There is no folder or file {text!r} to load a model from.")
    if here and revision is not None:
        raise ConversionError(f"revision={revision!r} is for a Hub id, and {text!r} is on this machine; leave it out")
    if Path(text).is_file() and not packed:
        raise ConversionError(
            f"{text!r} is one file; a model is a folder, a Hub id or a .gguf file. A .pt file of the official NRGPT "
            "code is read by nrgpt_from_official (`loopergy convert --to nrgpt`)"
        )
    if here and not packed:
        _check_no_run(Path(text))
    return text


def _check_no_run(folder: Path) -> None:
    """Refuse the folder of a run, or of a stage without weights, and name the stages that hold models."""
    if (folder / "config.json").is_file():
        return
    run = folder.parent if (folder / "stage.json").is_file() else folder
    models = [str(place.parent) for place in run.glob("*/stage.json") if (place.parent / "config.json").is_file()]
    if models:
        raise ConversionError(f"{str(folder)!r} holds no model; the stages of its run that do: {', '.join(models)}")


@contextmanager
def _named(location: str) -> Iterator[None]:
    """Name a source that is neither here nor on the Hub; errors about a folder that is here pass unchanged."""
    try:
        yield
    except OSError as error:
        if Path(location).exists():
            raise
        raise FileNotFoundError(
            f"{location!r} is no folder here, and the Hub did not give a model of that name: "
            f"{' '.join(str(error).split())}"
        ) from error
