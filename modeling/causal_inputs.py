# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What a causal model without loops derives from its inputs once per forward, and the cache it generates with."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask

from loopergy.configuration.configuration_cem_llama import check_num_steps
from loopergy.modeling.cached_generation import RoomyGenerationMixin
from loopergy.modeling.continuous_batching import is_paged
from loopergy.modeling.looped_cache import check_not_packed, with_growing_layers
from loopergy.modeling.looped_inputs import default_positions, find_documents


@dataclass(frozen=True)
class CausalInputs:
    """Hold what one forward needs in every layer.

    Attributes:
        cache (`Cache`, *optional*): the cache to write to.
        position_ids (`torch.LongTensor` of shape (batch or 1, length)).
        mask: in the form of the attention implementation; `None` means causal.
        causal (`bool`): the mask is known to hide all keys behind a query, as one that the caller made may not.
    """

    cache: Cache | None
    position_ids: torch.Tensor
    mask: Any
    causal: bool


def read_causal_inputs(
    config: Any,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    use_cache: bool | None,
    borders: dict,
) -> CausalInputs:
    """Check the arguments of a forward and derive from them what all layers share.

    Args:
        config: gives the attention implementation, and sizes a new cache.
        inputs_embeds (`torch.Tensor` of shape (batch, length, hidden_size)): the new tokens.
        attention_mask, position_ids, cache, use_cache: as the model got them.
        borders (`dict`): the model's other arguments, of which `cu_seq_lens_q` and `seq_idx` mark documents.

    Raises:
        ValueError: for packed documents together with a cache.
    """
    padding = attention_mask if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 else None
    # A ready mask says all: those of `generate` come with positions that restart at padding.
    ready = attention_mask is not None and padding is None
    length = inputs_embeds.shape[1]
    documents = None
    if is_paged(cache):
        cache = cast(Any, PagedHalves(cache))
    else:
        documents = find_documents(
            inputs_embeds.shape[:2],
            None if ready else position_ids,
            None if padding is None else padding[:, -length:],
            borders.get("cu_seq_lens_q"),
            borders.get("seq_idx"),
        )
    if cache is not None:
        check_not_packed(documents is not None)
    if use_cache and cache is None and documents is None:
        cache = with_growing_layers(DynamicCache(config=config))
    if position_ids is None:
        past = 0 if cache is None else cache.get_seq_length()
        position_ids = default_positions(inputs_embeds.shape[:2], padding, past, documents, inputs_embeds.device)
    if isinstance(attention_mask, dict):
        return CausalInputs(cache, position_ids, attention_mask["full_attention"], causal=False)
    ids = None if documents is None else documents.ids
    mask = create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        cache=cache,
        and_mask_function=None if ids is None else lambda row, head, query, key: ids[row, query] == ids[row, key],
    )
    return CausalInputs(cache, position_ids, mask, causal=not ready)


class PagedHalves:
    """Write to a paged cache, whose halves are equally wide, the keys a second time where there is nothing else.

    Args:
        cache: the cache of continuous batching.
    """

    def __init__(self, cache: Any):
        self.cache = cache

    def update(
        self, keys: torch.Tensor, others: torch.Tensor, slot: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and others, each [1, heads, new, dim]; return those of all requests of the batch."""
        return self.cache.update(keys, others if others.shape[-1] else keys, slot, kwargs=kwargs)


class UnevenGenerationMixin(RoomyGenerationMixin):
    """Prepare caches whose two halves differ in width, the second of which may be empty."""

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any, **kwargs: Any) -> None:
        if generation_config.cache_implementation == "quantized":
            raise ValueError(
                "cache_implementation='quantized' stores keys and values of equal width, and this model keeps one "
                "tensor, or another beside the keys. Leave cache_implementation out to use the default cache."
            )
        super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    def cache_config(self, model_kwargs: dict) -> Any:
        """Return the config, which describes the cache for any number of steps of at least 1."""
        check_num_steps(model_kwargs.get("num_steps"))
        return self.config

    def paged_obstacle(self) -> str | None:
        """Name the second tensor beside the keys if it is of another width."""
        config = self.config
        if config.has_diagonal and config.num_key_value_heads * config.head_dim != config.hidden_size:
            return (
                "its paged cache holds two tensors of one width, and with a diagonal this model keeps keys of width "
                f"{config.num_key_value_heads * config.head_dim} and features of width {config.hidden_size}."
            )
        return None

    def _get_static_cache_init_shape(self) -> None:
        """Leave a static cache to be sized by what is first written to it."""
        return
