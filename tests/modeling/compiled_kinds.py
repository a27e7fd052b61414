# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""One small model per family and mixer for the tests of compilers and exporters, which pay for each operation."""

import torch
from conftest import CEM_KINDS, LT2_KINDS, build_cem, build_lt2, build_ouro, shaken
from transformers import PreTrainedModel

from loopergy import GPTBaselineConfig, GPTBaselineForCausalLM, NRGPTConfig, NRGPTForCausalLM

SMALL = {"num_hidden_layers": 1, "num_loops": 2}
MIXERS = ("gdn", "kda", "deltanet", "mamba2", "hgrn2", "retnet", "gla", "la", "nsa", "dsa", "full", "window")
# What is compiled each time; the others are slow.
MAIN = ("ouro", "nrgpt")
KINDS = (*MAIN, "lt2-gdn-full", *(f"lt2-{mixer}" for mixer in MIXERS), "cem-no-diagonal", "cem-shared")
KINDS += ("nrgpt-strict", "gpt", "gpt-recurrent")


def build(kind: str, **fields) -> PreTrainedModel:
    """Build the float32 model of a kind."""
    family, _, name = kind.partition("-")
    torch.manual_seed(0)
    if family == "ouro":
        return build_ouro(torch.float32, **SMALL, **fields)
    if family == "lt2":
        known = {"layer_mixers": "gdn,full", "num_hidden_layers": 2} if name == "gdn-full" else LT2_KINDS[name]
        loops = {} if name == "gdn-full" else {"num_loops": 1}
        return build_lt2(torch.float32, **{**SMALL, **loops, **known, **fields})
    if family == "cem":
        return build_cem(torch.float32, **{"num_hidden_layers": 1, **CEM_KINDS[name], **fields})
    shared = {"num_hidden_layers": 2, "initializer_range": 0.2, **fields}
    if family == "nrgpt":
        return shaken(NRGPTForCausalLM(NRGPTConfig.from_preset("tiny", **shared, exclude_self=name == "strict")))
    recurrence = "parallel" if name else "none"
    return shaken(GPTBaselineForCausalLM(GPTBaselineConfig.from_preset("tiny", **shared, recurrence=recurrence)))
