# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What a looped model derives from its inputs once per forward, for all loops: positions, documents and masks."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import (
    create_causal_mask,
    create_recurrent_attention_mask,
    create_sliding_window_causal_mask,
)

from loopergy.configuration.looped_config import (
    INDEXED,
    POOLED,
    RECURRENT,
    LoopedConfigMixin,
    SlotPlan,
    resolve_num_loops,
)
from loopergy.modeling.continuous_batching import is_paged
from loopergy.modeling.kernels.sparse_attention import fit, real_tokens
from loopergy.modeling.looped_cache import open_cache

# A 2-D padding mask, a ready mask of the attention implementation (tensor or block mask), or none.
Mask = Any


@dataclass(frozen=True)
class LoopedInputs:
    """Hold what one forward needs in every loop.

    Attributes:
        plan ([`SlotPlan`]): slots of the loops that will run.
        cache (`Cache`, *optional*): the cache to write to.
        documents ([`Documents`], *optional*): packed documents.
        position_ids (`torch.LongTensor` of shape (batch or 1, length), *optional*): always there in a forward; `None`
            where only masks are made, ahead of one (`create_masks_for_generate`).
        real (`torch.Tensor` of shape (batch, length), *optional*): 0 at padding among the new tokens.
    """

    plan: SlotPlan
    cache: Cache | None
    documents: "Documents | None"
    position_ids: torch.Tensor | None
    real: torch.Tensor | None


@dataclass(frozen=True)
class Documents:
    """Mark the documents packed into each row.

    Attributes:
        ids (`torch.LongTensor` of shape (batch, length)): tokens of one document share a number within their row.
        cu_seqlens (`torch.LongTensor` of shape (documents + 1,)): their boundaries in the flattened batch, runs of
            padding counted as documents.
    """

    ids: torch.Tensor
    cu_seqlens: torch.Tensor


def read_inputs(
    config: LoopedConfigMixin,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    use_cache: bool | None,
    num_loops: int | None,
    kwargs: dict,
) -> LoopedInputs:
    """Check the arguments of a forward and derive from them what all loops share.

    Args:
        config: an Ouro or LT2 config.
        inputs_embeds (`torch.Tensor` of shape (batch, length, hidden_size)): the new tokens.
        attention_mask, position_ids, cache, use_cache, num_loops: as the model got them.
        kwargs (`dict`): the model's other arguments, of which `cu_seq_lens_q` and `seq_idx` mark documents.

    Raises:
        ValueError: as [`resolve_num_loops`], [`check_inputs`], [`find_documents`] and [`open_cache`].
    """
    plan = config.slot_plan(resolve_num_loops(config, num_loops))
    shape = inputs_embeds.shape[:2]
    position_ids = check_inputs(shape, attention_mask, position_ids, past_length(cache, plan))
    real = None
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        real = attention_mask[:, -shape[1] :]
    # Ready masks come from `generate`, whose positions restart at padding only.
    marks = None if isinstance(attention_mask, dict) else position_ids
    documents = None
    if not is_paged(cache):  # whose rows hold several requests, kept apart by the mask
        documents = find_documents(shape, marks, real, kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx"))
    cache = open_cache(config, cache, use_cache, num_loops, plan, packed=documents is not None)
    if position_ids is None:
        past = past_length(cache, plan)
        position_ids = default_positions(shape, attention_mask, past, documents, inputs_embeds.device)
    return LoopedInputs(plan, cache, documents, position_ids, real)


def check_inputs(
    shape: torch.Size, attention_mask: Mask, position_ids: torch.Tensor | None, past: int | torch.Tensor
) -> torch.Tensor | None:
    """Check what comes with the new tokens; return their positions with rows, if there are any.

    Args:
        shape: (batch, length) of the new tokens.
        attention_mask: as the model got it.
        position_ids (`torch.LongTensor` of shape (batch or 1, length) or (length,), *optional*).
        past: tokens in the cache.

    Raises:
        ValueError: for no tokens, a mask of another number of rows (one per query and key may have a single one for
            all), a padding mask that is not as wide as cached and new tokens together, a mask per query and key of
            whole numbers, and a mask of neither kind.
    """
    if shape[1] == 0:
        raise ValueError(f"The inputs have shape {tuple(shape)}: give at least one token in a row.")
    if isinstance(attention_mask, torch.Tensor):
        given = f"attention_mask of shape {tuple(attention_mask.shape)} and type {attention_mask.dtype}"
        if attention_mask.ndim not in (2, 4):
            raise ValueError(f"{given}: give (batch, cached + new tokens), or (batch, 1, new, cached + new tokens).")
        if attention_mask.ndim == 4 and attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise ValueError(
                f"{given}: a mask per query and key is boolean, True where visible, or added to the scores. Pass "
                "attention_mask.bool()."
            )
        rows, width = attention_mask.shape[:2]
        if rows != shape[0] and not (attention_mask.ndim == 4 and rows == 1):
            raise ValueError(
                f"attention_mask has {rows} rows for {shape[0]} rows of tokens: give one for each, as "
                "attention_mask.expand(batch, -1) does for one mask that all share."
            )
        if attention_mask.ndim == 2 and not torch.compiler.is_compiling() and width != int(past) + shape[1]:
            raise ValueError(
                f"attention_mask has {width} columns for {int(past)} cached and {shape[1]} new tokens: it must cover "
                "both."
            )
    return position_ids[None] if position_ids is not None and position_ids.ndim == 1 else position_ids


def find_documents(
    shape: torch.Size,
    position_ids: torch.Tensor | None,
    real: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> Documents | None:
    """Find packed documents: from explicit boundaries, or from positions that restart between real tokens.

    Args:
        shape: (batch, length) of the new tokens.
        position_ids (`torch.LongTensor` of shape (batch or 1, length), *optional*): positions as the caller gave them.
        real (`torch.Tensor` of shape (batch, length), *optional*): 0 at padding among the new tokens.
        cu_seq_lens (`torch.Tensor` of shape (documents + 1,), *optional*): boundaries, for a batch of one row.
        seq_idx (`torch.Tensor` of shape (batch, length), *optional*): document number per token.

    Returns:
        [`Documents`], or `None` if every row is one document.

    Raises:
        ValueError: if `cu_seq_lens` comes with several rows or does not span the row in order.
    """
    batch, length = shape
    if cu_seq_lens is not None:
        _check_boundaries(shape, cu_seq_lens)
        row = torch.arange(length, device=cu_seq_lens.device)
        starts = _changes(torch.searchsorted(cu_seq_lens[1:].contiguous(), row, right=True)[None])
    elif seq_idx is not None:
        starts = _changes(seq_idx.reshape(shape))
    elif position_ids is None or length == 1 or torch.compiler.is_exporting():
        return None
    else:
        starts = _restarts(position_ids.expand(shape), real)
    if not bool(starts.any()):
        return None
    if real is not None:
        starts = starts | _changes(real.to(torch.bool))
    ids = starts.cumsum(dim=1)
    first = torch.zeros_like(starts)
    first[:, 0] = True
    cu_seqlens = torch.nn.functional.pad((starts | first).flatten().nonzero().flatten(), (0, 1), value=batch * length)
    return Documents(ids, cu_seqlens)


def _check_boundaries(shape: torch.Size, cu_seq_lens: torch.Tensor) -> None:
    """Refuse boundaries that do not rise from 0 to the length of one row; the numbers are read in one transfer."""
    batch, length = shape
    first, last, falls = 0, 0, 0
    if len(cu_seq_lens) > 1:
        steps = cu_seq_lens.diff()
        first, last, falls = torch.stack((cu_seq_lens[0], cu_seq_lens[-1], (steps < 0).sum().to(steps))).tolist()
    if batch != 1 or first != 0 or last != length or falls:
        raise ValueError(
            f"cu_seq_lens_q of {len(cu_seq_lens)} boundaries from {first} to {last}, {falls} of them below the one "
            f"before, for inputs of shape {tuple(shape)}: they must rise from 0 to {length}, the length of one row "
            "that holds all documents, padding included. Flatten the batch to one row."
        )


def _changes(values: torch.Tensor) -> torch.Tensor:
    """True where a row's value differs from the one before."""
    change = values[:, 1:] != values[:, :-1]
    return torch.nn.functional.pad(change, (1, 0), value=False)


def _restarts(position_ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """True at real tokens whose position does not follow that of the real token before."""
    if real is None:
        return torch.nn.functional.pad(position_ids.diff(dim=1) != 1, (1, 0), value=False)
    real = real.to(torch.bool)
    index = torch.arange(real.shape[1], device=real.device).expand_as(real)
    last_real = torch.where(real, index, -1).cummax(dim=1).values
    previous = torch.nn.functional.pad(last_real[:, :-1], (1, 0), value=-1)
    follows = position_ids == position_ids.gather(1, previous.clamp(min=0)) + 1
    return real & (previous >= 0) & ~follows


def past_length(cache: Cache | None, plan: SlotPlan) -> int:
    """Return how many tokens the cache holds, as the first slot that counts them says."""
    slot = next((slot for slot, kind in enumerate(plan.layer_types) if kind != RECURRENT), 0)
    return 0 if cache is None or is_paged(cache) else cache.get_seq_length(slot)


def default_positions(
    shape: torch.Size, attention_mask: Mask, past: int, documents: Documents | None, device: torch.device
) -> torch.Tensor:
    """Return the positions (batch or 1, length) of new tokens: documents from 0, padding not counted.

    Args:
        shape: (batch, length) of the new tokens.
        attention_mask: 2-D over cached and new tokens, or anything else, which is then ignored.
        past: tokens in the cache.
        documents: packed documents, if there are any.
        device: where to put the result.
    """
    length = shape[1]
    index = torch.arange(length, device=device)
    if documents is not None:
        starts = torch.where(_changes(documents.ids), index, 0).cummax(dim=1).values
        return index - starts
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 and attention_mask.shape[1] >= length:
        return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -length:]
    return index[None] + past


def mask_key(layer_type: str, window: int | None) -> str:
    """Name the mask of a visit in the dictionary that [`looped_masks`] makes."""
    return layer_type if window is None else f"{layer_type}_{window}"


def looped_masks(
    config: LoopedConfigMixin,
    inputs: LoopedInputs,
    inputs_embeds: torch.Tensor,
    attention_mask: Mask,
    materialise: bool = False,
) -> dict:
    """Make each mask that the visits need, once for all loops.

    Args:
        config: gives the attention implementation.
        inputs ([`LoopedInputs`]): the types and windows that occur, the cache before this forward's tokens are
            written, and packed documents to keep apart.
        inputs_embeds (`torch.Tensor` of shape (batch, length, *)): gives batch, length, type and device.
        attention_mask: 2-D padding mask over cached and new tokens, a ready 4-D mask, or `None`.
        materialise (`bool`): return a mask even where "causal" could be left to the kernel.

    Returns:
        `dict`: [`mask_key`] -> mask in the form of the attention implementation, or the 2-D mask of recurrent mixers
        (new tokens) and of sparse ones (cached and new tokens).
    """
    masks = {}
    plan, documents = inputs.plan, inputs.documents
    for slot, (layer_type, window) in enumerate(zip(plan.layer_types, plan.windows, strict=True)):
        key = mask_key(layer_type, window)
        if key in masks:
            continue
        if layer_type == RECURRENT:
            masks[key] = _recurrent_mask(config, inputs_embeds, attention_mask)
            continue
        if layer_type in (INDEXED, POOLED):
            masks[key] = _padding_mask(attention_mask, inputs.cache, slot, inputs_embeds.shape[1])
            continue
        create, own_config = create_causal_mask, config
        if window is not None:
            create, own_config = create_sliding_window_causal_mask, copy.copy(config)
            own_config.__dict__["sliding_window"] = window
        masks[key] = create(
            config=own_config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=inputs.cache,
            and_mask_function=None if documents is None else same_document(documents.ids),
            layer_idx=slot,
            allow_is_causal_skip=not materialise,
        )
    return masks


def _recurrent_mask(config: LoopedConfigMixin, inputs_embeds: torch.Tensor, attention_mask: Mask) -> Mask:
    """Return which new tokens are real, (batch, length); `None` if all are.

    transformers' own function takes a single token for a real one, which a pad in a prompt read token by token is not.

    Raises:
        ValueError: for a mask per query and key, which a recurrence cannot follow.
    """
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)}: a recurrent mixer takes in token after token, so "
            "it takes the padding mask (batch, cached + new tokens) and no mask per query and key. For packed "
            "documents pass restarting position_ids, seq_idx or cu_seq_lens_q."
        )
    if inputs_embeds.shape[1] == 1 and attention_mask is not None and not torch.compiler.is_compiling():
        newest = attention_mask[:, -1:]
        return None if bool(newest.all()) else newest
    return create_recurrent_attention_mask(config, inputs_embeds, attention_mask)


def _padding_mask(attention_mask: Mask, cache: Cache | None, slot: int, length: int) -> torch.Tensor | None:
    """Return which cached and new tokens are real, (batch, columns of the slot); `None` if all are."""
    real = real_tokens(attention_mask)
    if real is None or (not torch.compiler.is_compiling() and bool(real.all())):
        return None
    if cache is None:
        return real
    return fit(real, cache.get_mask_sizes(length, slot)[0])


def same_document(ids: torch.Tensor) -> Callable:
    """Return a mask function in the form of transformers': True where query and key are of one document.

    Args:
        ids (`torch.LongTensor` of shape (batch, length)): document number of each token, as in [`Documents`].
    """

    def visible(batch: int, head: int, query: int, key: int) -> torch.Tensor:
        return ids[batch, query] == ids[batch, key]

    return visible
