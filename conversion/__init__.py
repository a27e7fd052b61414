# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Bring weights in and out. Folder `conversion/`, imported as `loopergy.conversion`."""

# Not lazy: `convert` is both a file and a function here, and the function must win however the file is imported first.
from loopergy.conversion.cem_llama_maps import cem_to_llama, llama_to_cem
from loopergy.conversion.convert import Conversion, convert, restore_layers
from loopergy.conversion.errors import ConversionError
from loopergy.conversion.families import parse_keep_layers, student_config
from loopergy.conversion.hybrid_students import lt2_from_student
from loopergy.conversion.lt2_official import lt2_from_official
from loopergy.conversion.nrgpt_official import (
    gpt_baseline_from_official,
    gpt_baseline_to_official,
    nrgpt_from_official,
    nrgpt_to_official,
)
from loopergy.conversion.report import ConversionReport

__all__ = [
    "Conversion",
    "ConversionError",
    "ConversionReport",
    "cem_to_llama",
    "convert",
    "gpt_baseline_from_official",
    "gpt_baseline_to_official",
    "llama_to_cem",
    "lt2_from_official",
    "lt2_from_student",
    "nrgpt_from_official",
    "nrgpt_to_official",
    "parse_keep_layers",
    "restore_layers",
    "student_config",
]
