# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Caches whose two halves, keys and values in other models, differ in width or are the same tensor."""

from typing import Any

import torch

from loopergy.modeling.cached_generation import RoomyGenerationMixin


class PagedHalves:
    """Wrap a paged cache, whose halves are equally wide: the keys are written twice where there is nothing else.

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
    """Prepare caches whose two halves differ in width; the second may be empty."""

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any, **kwargs: Any) -> None:
        if generation_config.cache_implementation == "quantized":
            raise ValueError(
                "cache_implementation='quantized' stores keys and values of equal width, and this model keeps one "
                "tensor a token, or two that differ. Leave cache_implementation out to use the default cache."
            )
        super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    def _get_static_cache_init_shape(self) -> None:
        """Leave a static cache to be sized by what is first written to it."""
        return


__all__ = ["PagedHalves", "UnevenGenerationMixin"]
