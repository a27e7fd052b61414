# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Bring a checkpoint from one format to another that computes the same, from name to folder."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel

from loopergy.conversion.cem_llama_maps import cem_to_llama, llama_to_cem
from loopergy.conversion.folders import check_new_folder, new_folder, saved_tokenizer
from loopergy.conversion.hybrid_students import is_hybrid_student, lt2_from_student
from loopergy.conversion.lt2_official import is_official_lt2, lt2_from_official
from loopergy.conversion.nrgpt_official import nrgpt_from_official
from loopergy.conversion.weight_maps import ConversionError
from loopergy.modeling.modeling_cem_llama import CEMLlamaForCausalLM

# Target to what it is made from: model type, or a file of the official code.
EXACT_FORMATS = {
    "llama": "cem_llama",
    "cem_llama": "llama",
    "nrgpt": "a .pt file of the official NRGPT code",
    "lt2": "a consolidated checkpoint of the official LT2 code, or a student of the hybrid-distillation code",
}


def is_lt2_elsewhere(source: str | Path) -> bool:
    """Say whether a file, folder or Hub id holds an LT2 model in a format of other code."""
    return is_official_lt2(source) or is_hybrid_student(source)


def convert_format(
    source: str | Path, target: str, folder: str | Path, *, overwrite: bool = False, **options: Any
) -> PreTrainedModel:
    """Convert a checkpoint to another format without changing what it computes, and write it as a folder.

    Args:
        source: folder or Hub id; for `"nrgpt"` a file of the official code.
        target (`str`): `"llama"` (from CEM-Llama), `"cem_llama"` (from a Llama with tied weights), `"nrgpt"` or
            `"lt2"` (from a consolidated folder of the official code, or a student of the hybrid-distillation code).
        folder: where to write, with the tokenizer if there is one; it appears whole or not at all.
        overwrite (`bool`): replace a folder that holds something.
        **options: of [`llama_to_cem`], [`nrgpt_from_official`], [`lt2_from_official`] or [`lt2_from_student`].

    Returns:
        the converted model.

    Raises:
        ConversionError: if the source is of another kind, or the target cannot compute what it does.
    """
    if target not in EXACT_FORMATS:
        raise ConversionError(f"target={target!r} must be one of {', '.join(EXACT_FORMATS)}.")
    check_new_folder(folder, overwrite=overwrite)
    tokenizer = None
    if target == "nrgpt":
        model: PreTrainedModel = nrgpt_from_official(source, **options)
    elif target == "lt2" and is_hybrid_student(source):
        model = lt2_from_student(source, **options)
        tokenizer = saved_tokenizer(source)
    elif target == "lt2":
        model = lt2_from_official(source, **options)
    else:
        found = AutoConfig.from_pretrained(source).model_type
        if found != EXACT_FORMATS[target]:
            raise ConversionError(f"{source} is of type {found!r}; {target!r} is made from {EXACT_FORMATS[target]!r}.")
        if target == "llama":
            if options:
                raise ConversionError(f"options {sorted(options)}: conversion to 'llama' takes none.")
            model = cem_to_llama(CEMLlamaForCausalLM.from_pretrained(source, dtype="auto"))
        else:
            model = llama_to_cem(LlamaForCausalLM.from_pretrained(source, dtype="auto"), **options)
        tokenizer = saved_tokenizer(source)
    with new_folder(folder, overwrite=overwrite) as place:
        model.save_pretrained(place)
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
    return model
