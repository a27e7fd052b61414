# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What a causal model without loops derives from its inputs once per forward: positions, masks and documents."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask

from loopergy.modeling.continuous_batching import is_paged
from loopergy.modeling.looped_cache import check_not_packed, with_growing_layers
from loopergy.modeling.looped_inputs import Documents, check_inputs, default_positions, find_documents, same_document
from loopergy.modeling.uneven_caches import PagedHalves


@dataclass(frozen=True)
class CausalInputs:
    """Hold what one forward needs in every layer or step.

    Attributes:
        cache (`Cache`, *optional*): the cache to write to.
        past (`int` or `torch.Tensor`): tokens in it.
        position_ids (`torch.LongTensor` of shape (batch or 1, length)).
        attention_mask: the padding mask, or a complete mask, or `None`.
        ready (`bool`): `attention_mask` is a complete mask, used unchanged; it need not be causal.
        real (`torch.Tensor` of shape (batch, length), *optional*): 0 at padding among the new tokens.
        documents ([`Documents`], *optional*): packed documents.
    """

    cache: Cache | None
    past: int | torch.Tensor
    position_ids: torch.Tensor
    attention_mask: Any
    ready: bool
    real: torch.Tensor | None
    documents: Documents | None


def read_causal_inputs(
    config: Any,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    use_cache: bool | None,
    **kwargs: Any,
) -> CausalInputs:
    """Check the arguments of a forward and derive from them what all layers or steps share.

    Args:
        config: sizes a new cache; its `cache_widths`, if it has them, are those of a cache that it has filled.
        inputs_embeds (`torch.Tensor` of shape (batch, length, hidden_size)): the new tokens.
        attention_mask, position_ids, cache, use_cache: as the model got them.
        **kwargs: the model's other arguments, of which `cu_seq_lens_q` and `seq_idx` mark packed documents.

    Raises:
        ValueError: as [`check_inputs`], for packed documents together with a cache, and for a cache that another
            model filled.
    """
    shape, paged = inputs_embeds.shape[:2], is_paged(cache)
    past = 0 if cache is None or paged else cache.get_seq_length()
    padding = attention_mask if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 else None
    # A complete mask marks documents itself; those of `generate` come with positions that restart at padding.
    ready = attention_mask is not None and padding is None
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask["full_attention"]
    position_ids = check_inputs(shape, attention_mask, position_ids, past)
    real = None if padding is None else padding[:, -shape[1] :]
    documents = None
    if paged:
        cache = PagedHalves(cache)  # pyright: ignore[reportAssignmentType]
    else:
        marks = None if ready else position_ids
        documents = find_documents(shape, marks, real, kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx"))
    if cache is not None:
        check_not_packed(documents is not None)
        check_widths(cache, getattr(config, "cache_widths", None))
    elif use_cache and documents is None:
        cache = with_growing_layers(DynamicCache(config=config))
    if position_ids is None:
        position_ids = default_positions(shape, padding, past, documents, inputs_embeds.device)
    return CausalInputs(cache, past, position_ids, attention_mask, ready, real, documents)


def causal_mask(config: Any, inputs_embeds: torch.Tensor, inputs: CausalInputs) -> Any:
    """Return the mask in the form of the attention implementation; `None` means causal.

    Args:
        config: gives the attention implementation.
        inputs_embeds (`torch.Tensor` of shape (batch, length, *)): gives batch, length, type and device.
        inputs ([`CausalInputs`]): before this forward's tokens are written to the cache.
    """
    if inputs.ready or isinstance(inputs.cache, PagedHalves):
        return inputs.attention_mask
    return create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=inputs.attention_mask,
        cache=inputs.cache,
        and_mask_function=None if inputs.documents is None else same_document(inputs.documents.ids),
    )


def check_widths(cache: Any, widths: tuple[int, int, int] | None) -> None:
    """Refuse a cache whose first slot does not hold what the model keeps.

    Args:
        cache: the caller's cache.
        widths: number of heads, and the widths of a head in the two halves of a slot; `None` skips the check.

    Raises:
        ValueError: if the cache has other widths.
    """
    layers = getattr(cache, "layers", None) or [None]
    keys, values = (getattr(layers[0], half, None) for half in ("keys", "values"))
    if widths is None or keys is None or values is None or torch.compiler.is_compiling():
        return
    found = (keys.shape[1], keys.shape[-1], values.shape[-1])
    if found != widths:
        raise ValueError(
            f"The cache holds {found[0]} heads, {found[1]} and {found[2]} wide in its two halves, where this model "
            f"keeps {widths[0]}, {widths[1]} and {widths[2]} wide. Another model filled it, or it is the prefix of "
            "prefix tuning, which learns keys and values that this model has not: use prompt tuning or LoRA."
        )


__all__ = ["CausalInputs", "causal_mask", "check_widths", "read_causal_inputs"]
