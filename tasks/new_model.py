# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Small fresh models of any causal type that transformers knows, sized for a task."""

from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    set_seed,
)

from loopergy.conversion.config_fields import check_field_names
from loopergy.tasks.task import Task

SMALL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


def new_model(model_type: str, task: Task, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Return an untrained causal language model with the vocabulary and at least the context of a task.

    Args:
        model_type (`str`): `"llama"`, `"gpt2"`, after `import loopergy` also its own, such as `"ouro"` or `"lt2"`.
        task (`Task`): Gives vocabulary, special tokens and row length.
        seed (`int`, defaults to 0): Seed of the weights.
        **fields: Fields of the config. By default 2 layers of width 64 with 2 heads.

    Raises:
        ValueError: An unknown type, or a field that its config does not have.
    """
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"transformers knows no model type {model_type!r}; give one such as 'llama', 'ouro' or 'lt2'."
        )
    kind = CONFIG_MAPPING[model_type]
    known = check_field_names(kind, fields)
    tokenizer = task.tokenizer
    sized = {
        **SMALL,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": max(task.row_length, 64),
        **{f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")},
    }
    # A field given under its own name beats the general name for it, as n_embd does hidden_size.
    given = {kind.attribute_map.get(name, name) for name in fields}
    sized = {name: value for name, value in sized.items() if kind.attribute_map.get(name, name) not in given}
    config = AutoConfig.for_model(model_type, **{k: v for k, v in sized.items() if k in known}, **fields)
    set_seed(seed)
    return AutoModelForCausalLM.from_config(config)
