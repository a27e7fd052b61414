# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Checks of a stage: before training, settings that cannot be right; after it, weights that are not finite."""

from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.integrations import get_available_reporting_integrations
from transformers.utils import logging

from loopergy.training.fields import read_fields

logger = logging.get_logger(__name__)

_LEAST = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1}
_LEAST |= {"learning_rate": 0, "weight_decay": 0}


def check_least(where: str, settings: Any, **least: float) -> None:
    """Raise `ValueError` for fields that have a value below the least that they may have; `where` may be empty."""
    for name, smallest in least.items():
        value = getattr(settings, name)
        if value is not None and value < smallest:
            raise ValueError(f"{where}{': ' if where else ''}`{name}` must be at least {smallest}, got {value}.")


def check_arguments(args: Any, **least: float) -> None:
    """Refuse settings of a trainer that it would fail on later, or ignore; for its `__post_init__`.

    Args:
        args (`TrainingArguments`): Before its own `__post_init__`; whole numbers are made `int`.
        **least: Fields of its own and the least value of each.

    Raises:
        ValueError: A value of another type, one that is too small, dropped columns, or a tracker that is not there.
    """
    read_fields(args)
    check_least("", args, **_LEAST, **least)
    if args.remove_unused_columns:
        raise ValueError("`remove_unused_columns` must be false, got True: it drops columns that the models read.")
    asked = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    available = get_available_reporting_integrations()
    if missing := sorted(set(asked) - {"none", "all", *available}):
        raise ValueError(
            f"`report_to`: {', '.join(missing)} is not installed here; there is {', '.join(available) or 'none'}. "
            "Install it, or give none."
        )


def check_trains(args: Any) -> None:
    """Raise `ValueError` for the settings of a stage that do not say how long it trains: its data have no end."""
    if args.max_steps < 1:
        raise ValueError("give `target_tokens` or `max_steps`, above 0: the data have no end of their own.")


def check_row_length(length: int, limit: int, whose: str = "student", otherwise: str = "") -> None:
    """Raise `ValueError` for rows longer than the `max_position_embeddings` of a model.

    Args:
        length (`int`): Tokens in a row.
        limit (`int`): The model's `max_position_embeddings`.
        whose (`str`, defaults to `"student"`): What the model is called.
        otherwise (`str`, *optional*): What else to do than to shorten the rows; `ExtendTrainer` for a student.
    """
    if length > limit:
        otherwise = otherwise or f"ExtendTrainer with `extend_to={length}`"
        raise ValueError(
            f"Rows have {length} tokens, but the {whose}'s max_position_embeddings is {limit}. Use rows of at most "
            f"{limit}, or {otherwise}."
        )


def check_vocabulary(name: str, tokens: int, known: int) -> None:
    """Raise `ValueError` for a tokenizer of more tokens than its model has embeddings for."""
    if tokens > known:
        raise ValueError(
            f"tokenizer: {name!r} has {tokens} tokens, and the teacher embeds {known}. Leave `tokenizer` out to take "
            "the teacher's own, or give one that was made for it."
        )


def check_extension(length: int, present: int) -> None:
    """Raise `ValueError` for a `max_position_embeddings` below the present one."""
    if length < present:
        raise ValueError(
            f"`extend_to`={length} is below the present max_position_embeddings, {present}. Give at least that, or "
            "leave it out."
        )


def warn_of_rounding(model: nn.Module) -> None:
    """Warn of trained weights below float32: most updates are smaller than what they can hold, and are rounded away.

    A norm weight of 1.0 in bfloat16 has its next neighbours 0.004 away, and AdamW moves it by the learning rate.

    Args:
        model (`nn.Module`): What requires a gradient is looked at.
    """
    low = {p.dtype for p in model.parameters() if p.requires_grad and torch.finfo(p.dtype).bits < 32}
    if low and PartialState().is_main_process:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in low))
        logger.warning(
            f"The weights to train are {names}: AdamW's updates are mostly smaller than what that can hold, and are "
            "rounded away. Load the student in float32 (`dtype: float32` in a recipe) and compute in bfloat16 with "
            "`bf16=True`, if the memory allows it."
        )


def check_finite(model: nn.Module, accelerator: Accelerator, checkpoints: str) -> None:
    """Refuse trained weights that are not finite; all processes call this together, as each may hold a shard.

    Args:
        model (`nn.Module`): What requires a gradient is looked at.
        accelerator (`Accelerator`): Of the trainer.
        checkpoints (`str`): Folder of the stage's checkpoints, for the message.

    Raises:
        ValueError: On all processes, if one has such a weight.
    """
    wrong = [name for name, p in model.named_parameters() if p.requires_grad and not _is_finite(p)]
    count = torch.tensor(len(wrong), device=accelerator.device)
    if int(accelerator.reduce(count, reduction="sum")) == 0:  # type: ignore[arg-type]
        return
    where = f", first in {wrong[0]!r}" if wrong else ", on another process"
    raise ValueError(
        f"The trained weights are not finite{where}: training diverged, and nothing is saved. Lower `learning_rate` "
        f"(or set `max_grad_norm`), remove {checkpoints}, whose last checkpoints may be lost too, and train again."
    )


def _is_finite(parameter: torch.Tensor) -> bool:
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return bool(torch.isfinite(own.detach()).all())
