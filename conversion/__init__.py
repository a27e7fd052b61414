# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Bring weights in and out. Folder `conversion/`, imported as `loopergy.conversion`."""

# Not lazy: `convert` is both a file and a function here, and the function must win however the file is imported first.
from loopergy.conversion.convert import Conversion, convert, restore_layers
from loopergy.conversion.families import parse_keep_layers, student_config
from loopergy.conversion.report import ConversionReport
from loopergy.conversion.weight_maps import ConversionError

__all__ = [
    "Conversion",
    "ConversionError",
    "ConversionReport",
    "convert",
    "parse_keep_layers",
    "restore_layers",
    "student_config",
]
