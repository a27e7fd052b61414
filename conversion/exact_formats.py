# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Rewrite a checkpoint in another format that computes the same, from its name to a saved folder."""

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from loopergy.conversion.cem_llama_maps import cem_to_llama, llama_to_cem
from loopergy.conversion.config_fields import check_names
from loopergy.conversion.errors import ConversionError
from loopergy.conversion.folders import check_new_folder, new_folder, saved_tokenizer
from loopergy.conversion.hybrid_students import is_hybrid_student, lt2_from_student
from loopergy.conversion.lt2_official import is_official_lt2, lt2_from_official
from loopergy.conversion.nrgpt_official import nrgpt_from_official
from loopergy.conversion.whole_loading import checked_dtype, load_whole, read_config
from loopergy.modeling.modeling_cem_llama import CEMLlamaForCausalLM

# From target to what it is made from: a model type, or a file of the official code.
EXACT_FORMATS = {
    "llama": "cem_llama",
    "cem_llama": "llama",
    "nrgpt": "a .pt file of the official NRGPT code",
    "lt2": "a consolidated checkpoint of the official LT2 code, or a student of the hybrid-distillation code",
}


def is_lt2_elsewhere(source: str | Path, revision: str | None = None) -> bool:
    """Say whether a file, folder or Hub id holds an LT2 model in a format of other code."""
    return is_official_lt2(source) or is_hybrid_student(source, revision)


def convert_format(
    source: str | Path,
    target: str,
    folder: str | Path,
    *,
    overwrite: bool = False,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Convert a checkpoint to another format without changing what it computes, and write it as a folder.

    Args:
        source: folder or Hub id; for `"nrgpt"` a file of the official code.
        target (`str`): `"llama"` (from CEM-Llama), `"cem_llama"` (from a Llama with tied weights), `"nrgpt"` or
            `"lt2"` (from a consolidated folder of the official code, or a student of the hybrid-distillation code).
        folder: where to write, with the tokenizer if there is one; it appears whole or not at all.
        overwrite (`bool`): replace a folder that holds something.
        dtype (`torch.dtype` or `str`, *optional*): type of the written weights; that of the source by default.
        revision (`str`, *optional*): of a Hub id.
        **options: of [`llama_to_cem`], [`nrgpt_from_official`], [`lt2_from_official`] or [`lt2_from_student`].

    Returns:
        the converted model.

    Raises:
        ConversionError: if the source is of another kind, or the target cannot compute what it does.
        ValueError: for an unknown option or dtype, or an option of another type than its default.
        FileNotFoundError: if the source is neither here nor on the Hub.
    """
    if target not in EXACT_FORMATS:
        raise ConversionError(f"target={target!r} must be one of {', '.join(EXACT_FORMATS)}.")
    check_new_folder(folder, overwrite=overwrite, source=source)
    dtype = checked_dtype(dtype)
    is_file = target == "nrgpt" or is_official_lt2(source)
    if is_file and revision is not None:
        raise ConversionError(f"revision={revision!r} is for a Hub id, and {source} is a checkpoint in files")
    tokenizer = None
    if target == "nrgpt":
        model: PreTrainedModel = nrgpt_from_official(source, dtype=dtype, **options)
    elif target == "lt2" and is_file:
        model = lt2_from_official(source, dtype=dtype, **options)
    else:
        if target == "lt2":
            model = lt2_from_student(source, dtype=dtype, revision=revision, **options)
        else:
            model = _rewritten(source, target, dtype, revision, options)
        tokenizer = saved_tokenizer(source, revision)
    with new_folder(folder, overwrite=overwrite) as place:
        model.save_pretrained(place)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
    return model


def _rewritten(
    source: str | Path, target: str, dtype: torch.dtype | None, revision: str | None, options: dict[str, Any]
) -> PreTrainedModel:
    """Load a Llama or a CEM-Llama, and make the other of the two."""
    found = read_config(source, revision).get("model_type")
    if found != EXACT_FORMATS[target]:
        raise ConversionError(f"{source} is of type {found!r}; {target!r} is made from {EXACT_FORMATS[target]!r}.")
    kind, rewrite = {"llama": (CEMLlamaForCausalLM, cem_to_llama), "cem_llama": (LlamaForCausalLM, llama_to_cem)}[
        target
    ]
    _check_options(rewrite, target, options)
    return rewrite(load_whole(kind, source, dtype=dtype or "auto", revision=revision), **options)


def _check_options(rewrite: Any, target: str, options: dict[str, Any]) -> None:
    """Raise for options that a function does not have, or of another type than their defaults."""
    _, *parameters = inspect.signature(rewrite).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters}
    check_names(f"the conversion to {target!r}", options, defaults, what="option")
    for name, value in options.items():
        wanted = type(defaults[name])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ValueError(f"{name}={value!r} must be a {wanted.__name__}, such as {defaults[name]}.")
