# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Check what a verb was given before anything is loaded: the model's name, its folder, loops, steps and device."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from loopergy.conversion.whole_loading import existing_source, load_whole, read_config


def found_model(name: str | Path) -> str:
    """Return the folder or Hub id of a model, `~` expanded, if it is here or the Hub has it.

    Raises:
        ValueError: For a file that is no model.
        FileNotFoundError: If there is no such folder, nor a model of that name on the Hub.
    """
    source = existing_source(name)
    if not Path(source).exists():
        read_config(source)
    return source


def model_config(name: str | Path) -> Any:
    """Return the config of a folder, a `config.json` or a Hub id; code that lies beside it is not run.

    Raises:
        ValueError: For an adapter, or a model type that neither transformers nor loopergy knows.
        FileNotFoundError: As [`found_model`].
    """
    source = str(name) if Path(name).is_file() else found_model(name)
    if (Path(source) / "adapter_config.json").is_file() and not (Path(source) / "config.json").is_file():
        raise ValueError(
            f"{source} holds an adapter and no model: merge it first, "
            f"AutoPeftModelForCausalLM.from_pretrained({source!r}).merge_and_unload().save_pretrained(FOLDER)"
        )
    return AutoConfig.from_pretrained(source, trust_remote_code=False)


def auto_class(config: Any) -> Any:
    """Return the Auto class of what a config was saved with; `AutoModelForCausalLM` where the config does not say."""
    (kind,) = (config.architectures or [""])[:1]
    if kind.endswith("ForSequenceClassification"):
        return AutoModelForSequenceClassification
    # The mapping loads lazily: `get` of the dict below it finds nothing.
    base: Any = MODEL_MAPPING[type(config)] if type(config) in MODEL_MAPPING else None  # noqa: SIM401
    return AutoModel if base is not None and kind == base.__name__ else AutoModelForCausalLM


def check_whole(source: str) -> None:
    """Fail unless a checkpoint has all tensors of a causal language model and no others; only its headers are read.

    Raises:
        ConversionError: With the names of the tensors that do not fit.
    """
    load_whole(AutoModelForCausalLM, source, device_map="meta")


def check_run_options(model: str | Path, num_loops: int | None = None, num_steps: int | None = None) -> None:
    """Raise `ValueError` for loops or steps that a saved model does not have; only its config is read.

    Args:
        model (`str` or `Path`): Folder or Hub id.
        num_loops, num_steps (`int`, *optional*): What was asked for.
    """
    loops, steps = ("num_loops", num_loops, "ouro and lt2"), ("num_steps", num_steps, "cem_llama and nrgpt")
    for name, value, families in (loops, steps):
        if value is None:
            continue
        config = model_config(model)
        if not hasattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{name}={value} ({flag}): a model of type {config.model_type!r} has no such setting; "
                f"those of type {families} have. Leave it out."
            )


def checked_device(name: str | None = None) -> torch.device:
    """Return the device that is meant, with its number; by default a GPU if there is one.

    Raises:
        ValueError: For a name that is no device, or a device that is not there.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError, ImportError):
        device = torch.device("meta")
    if device.type == "meta":
        there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise ValueError(f"device={name!r} (--device) is not there: use {', '.join(there)}, or leave it out")
    return torch.device("cpu") if device.type == "cpu" else device
