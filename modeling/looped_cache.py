# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The generation cache of looped models: transformers' cache, one layer of it per (loop, layer) visit.

Three kinds of cache layer are ours. [`GrowingLayer`] holds keys and values in a buffer with room to spare, so that a
new token is written in place instead of copying the whole past. [`PooledLayer`] holds averages of blocks beside them.
[`RecurrentLayer`] holds the state of a linear-attention mixer. Everything else (windows, static, offloaded and
quantised caches, beams) is transformers'.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from loopergy.configuration.looped_config import (
    COUNTED_RECURRENT,
    INDEXED,
    POOLED,
    RECURRENT,
    LoopedConfigMixin,
    SlotPlan,
)
from loopergy.modeling.kernels.block_sparse_attention import Pooling, completed_blocks, pool_blocks
from loopergy.modeling.kernels.sparse_attention import fit


class GrowingLayer(DynamicLayer):
    """Cache keys and values like `DynamicLayer`, without copying the past at each token.

    `keys` and `values`, [batch, heads, length, dim], are the filled front of a larger buffer. Cropping shortens the
    view; whatever replaces them by other tensors (beams, offloading, batch selection) is noticed at the next update,
    which then moves them into a buffer of their own. Where gradients or tracing need values that are never
    overwritten, the update concatenates as `DynamicLayer` does.
    """

    headroom = 0.25  # of the length, kept free when the buffer is moved: memory against number of moves

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `key_states` and `value_states` of shape [batch, heads, new, dim]; return all keys and values.

        Raises:
            ValueError: if they are of another number of sequences than those in the cache.
        """
        if torch.compiler.is_compiling() or key_states.requires_grad or value_states.requires_grad:
            self._buffers = None
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        if start and self.keys is not None and self.keys.shape[0] != key_states.shape[0]:
            raise ValueError(
                f"The cache holds {self.keys.shape[0]} sequences and the new tokens are of {key_states.shape[0]}. "
                "Repeat or select those of the cache, with batch_repeat_interleave or batch_select_indices."
            )
        end = start + key_states.shape[-2]
        buffers = self._buffers
        if buffers is None or not self._has_room(end, key_states.dtype, value_states.dtype):
            capacity = end if start == 0 else end + int(self.headroom * end) + 64
            buffers = (
                _moved(self.keys, key_states, start, capacity),
                _moved(self.values, value_states, start, capacity),
            )
            self._buffers = buffers
        for buffer, new in zip(buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :].copy_(new)
        self.keys, self.values = buffers[0][..., :end, :], buffers[1][..., :end, :]
        return self.keys, self.values

    def _has_room(self, end: int, *dtypes: torch.dtype) -> bool:
        """Whether `keys` and `values` still are the front of the buffers, and `end` tokens of these types fit."""
        return self._buffers is not None and all(
            tensor is not None
            and buffer.shape[-2] >= end
            and buffer.dtype == torch.promote_types(buffer.dtype, dtype)
            and tensor.data_ptr() == buffer.data_ptr()
            and tensor.shape[:2] == buffer.shape[:2]
            and buffer.is_inference() == torch.is_inference_mode_enabled()
            for buffer, tensor, dtype in zip(self._buffers, (self.keys, self.values), dtypes, strict=True)
        )

    def reset(self) -> None:
        """Forget all tokens."""
        self._buffers = None
        super().reset()


def _moved(past: torch.Tensor | None, new: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    if past is None or not length:
        past = new[..., :0, :]
    # Of the wider type, as if past and new were concatenated: a call under autocast may have left a narrower one.
    dtype = torch.promote_types(past.dtype, new.dtype)
    buffer = new.new_empty((*new.shape[:2], capacity, new.shape[-1]), dtype=dtype)
    buffer[..., :length, :].copy_(past)
    return buffer


class PooledBlocksMixin(CacheLayerMixin):
    """Keep averages of blocks of keys and values beside a layer's keys and values.

    Attributes:
        block_keys, block_values (`torch.Tensor` of shape [batch, heads, blocks, dim], *optional*): what
            [`pool_blocks`] makes.
        pooling ([`Pooling`], *optional*): what they average over, known from the first update on.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block_keys: torch.Tensor | None = None
        self.block_values: torch.Tensor | None = None
        self.pooling: Pooling | None = None

    def offload(self) -> None:
        """Move everything to the host."""
        super().offload()
        self._replace(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move everything back."""
        super().prefetch()
        self._replace(lambda tensor: tensor.to(self.device, non_blocking=True))  # pyright: ignore

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the sequences of the batch."""
        super().reorder_cache(beam_idx)
        self._replace(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.block_keys is not None and self.block_values is not None:
            self.block_keys, self.block_values = change(self.block_keys), change(self.block_values)


class PooledLayer(PooledBlocksMixin, GrowingLayer):
    """Cache keys and values, and the averages of their blocks that are complete."""

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        pooling: Pooling,
        real: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Append keys and values [batch, heads, new, dim].

        Args:
            pooling ([`Pooling`]): what blocks average over.
            real (`torch.BoolTensor` of shape [batch, cached + new], *optional*): False at padding.

        Returns:
            (all keys, their block averages), (all values, their block averages).
        """
        past, new = self.get_seq_length(), key_states.shape[-2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.pooling = pooling
        self.block_keys = pool_blocks(keys, self.block_keys, pooling, past, new, real)
        self.block_values = pool_blocks(values, self.block_values, pooling, past, new, real)
        return (keys, self.block_keys), (values, self.block_values)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, and the blocks that they were part of."""
        super().crop(tokens_to_remove)
        if self.pooling is not None:
            blocks = self.pooling.complete(self.get_seq_length())
            self._replace(lambda tensor: tensor[:, :, :blocks])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._replace(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices` of the batch."""
        super().batch_select_indices(indices)
        self._replace(lambda tensor: tensor[indices, ...])

    def reset(self) -> None:
        """Forget all tokens."""
        self.block_keys = self.block_values = None
        super().reset()


class StaticPooledLayer(PooledBlocksMixin, StaticLayer):
    """Cache like [`PooledLayer`] in buffers of fixed size.

    The averages have a row more than there are blocks: what a compiled step computes for blocks that are not complete
    is written there, and never read.
    """

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        pooling: Pooling,
        real: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Write keys and values [batch, heads, new, dim] behind those there; as [`PooledLayer.update`]."""
        past, new = self.cumulative_length.to(key_states.device, copy=True), key_states.shape[-2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        blocks = pooling.complete(self.max_cache_len)
        if self.block_keys is None or self.block_values is None:
            self.block_keys = keys.new_zeros(*keys.shape[:2], blocks + 1, keys.shape[-1])
            self.block_values = values.new_zeros(*values.shape[:2], blocks + 1, values.shape[-1])
        real = fit(real, self.max_cache_len)
        for averages, tokens in ((self.block_keys, keys), (self.block_values, values)):
            index, fresh = completed_blocks(tokens, pooling, past, new, real)
            averages.scatter_(2, index[:, None, :, None].expand_as(fresh), fresh)
        return (keys, self.block_keys[:, :, :blocks]), (values, self.block_values[:, :, :blocks])


class RecurrentLayer(LinearAttentionLayer):
    """Cache the recurrent state, and the convolution history if any, of a linear-attention mixer.

    It differs from its parent in that a mixer without convolution keeps its state too, that the batch can be repeated
    and selected, and that it can count tokens. A recurrent state cannot be rolled back, so `is_croppable` is False
    from the start.

    Args:
        max_cache_len (`int`, *optional*): given by a static cache, whose tensors stay where they are.

    Attributes:
        cumulative_length (`int` or `torch.Tensor`, *optional*): tokens that the state has taken in, if counted.
    """

    is_croppable = False  # pyright: ignore[reportAssignmentType]

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.is_static = max_cache_len is not None
        self.cumulative_length: int | torch.Tensor | None = None

    def count_tokens(self) -> None:
        """Count tokens from now on; a slot that holds some uncounted ones stays without a count."""
        if self.cumulative_length is None and not self.has_previous_state[0]:
            # A tensor in a static cache: a Python number would make each step of a compiled model a new program.
            self.cumulative_length = torch.zeros(1, dtype=torch.long) if self.is_static else 0

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, num_tokens: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Store the state [batch, heads, key dim, value dim] in place and return the stored tensor.

        `num_tokens` (`int`): tokens that it has taken in since the last update, padding included.
        """
        if isinstance(self.cumulative_length, torch.Tensor):
            if self.cumulative_length.device != recurrent_states.device:
                self.cumulative_length = self.cumulative_length.to(recurrent_states.device)
            self.cumulative_length.add_(num_tokens)
        elif self.cumulative_length is not None:
            self.cumulative_length += num_tokens
        self._make_writable(recurrent_states)
        state = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self.has_previous_state[state_idx] = True
        return state

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Store the last columns of [batch, channels, columns] in place; return them behind the earlier ones."""
        self._make_writable(conv_states)
        return super().update_conv_state(conv_states, *args, **kwargs)

    def _make_writable(self, new: torch.Tensor) -> None:
        """Copy what must not be overwritten: tensors of inference mode outside of it, and what a gradient needs."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        if new.requires_grad:
            self._replace(torch.clone)
        else:
            self._replace(lambda tensor: tensor.clone() if tensor.is_inference() else tensor)

    def reset(self) -> None:
        """Forget the state and the count; a dynamic cache then takes a batch of any size, as attention's do."""
        if isinstance(self.cumulative_length, torch.Tensor):
            self.cumulative_length.zero_()
        elif self.cumulative_length is not None:
            self.cumulative_length = 0
        if not self.is_static:
            for index in range(self.number_of_states):
                self.conv_states[index] = self.recurrent_states[index] = None
                self.is_conv_states_initialized[index] = self.is_recurrent_states_initialized[index] = False
        super().reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch `repeats` times."""
        self._replace(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices` of the batch."""
        self._replace(lambda tensor: tensor[indices, ...])

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for index in range(self.number_of_states):
            for states in (self.conv_states, self.recurrent_states):
                state = states[index]
                if state is not None:
                    states[index] = change(state)


class CountedRecurrentLayer(RecurrentLayer, CacheLayerMixin):
    """Cache a recurrent state and say how many tokens it has seen.

    The first slot of a model without attention is of this kind: `generate` asks the cache how long it is when a text
    is continued, and would otherwise feed the beginning twice.
    """

    supports_early_init = False

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        CacheLayerMixin.__init__(self)
        RecurrentLayer.__init__(self, max_cache_len, **kwargs)
        self.count_tokens()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse keys and values: a recurrent mixer has none."""
        raise TypeError("This slot holds a recurrent state; keys and values belong in the slot of an attention layer.")

    def get_seq_length(self) -> Any:
        """Return the number of tokens seen."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        """Return the length that a mask over all tokens would have, and its offset 0."""
        return self.get_seq_length() + query_length, 0


# A state is of one size, so that it serves dynamic and static caches alike.
for _mapping in (DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING):
    _mapping[RECURRENT], _mapping[COUNTED_RECURRENT] = RecurrentLayer, CountedRecurrentLayer
# Latents and index keys fit into the keys and values of a layer that attends to everything.
DYNAMIC_LAYER_TYPE_MAPPING |= {INDEXED: DynamicLayer, POOLED: PooledLayer}
STATIC_LAYER_TYPE_MAPPING |= {INDEXED: StaticLayer, POOLED: StaticPooledLayer}


def tokens_before(cache: Cache | None, slot: int, rewrite: int = 0) -> int | torch.Tensor:
    """Return how many tokens a slot holds, after taking back its last `rewrite` ones.

    A static cache counts in place, so its answer is copied: it stays what it was when the new tokens are written.
    """
    if cache is None:
        return 0
    if rewrite:
        cache.layers[slot].crop(-rewrite)  # pyright: ignore[reportAttributeAccessIssue]
    past = cache.get_seq_length(slot)
    return past.clone() if isinstance(past, torch.Tensor) else past


def with_growing_layers(cache: DynamicCache) -> DynamicCache:
    """Replace the empty concatenating layers of a cache by [`GrowingLayer`], in place, and return it."""
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer and not layer.is_initialized else layer for layer in cache.layers
    ]
    return cache


def make_cache(config: LoopedConfigMixin, num_loops: int | None = None) -> DynamicCache:
    """Build the empty cache of a looped model.

    Args:
        config: an Ouro or LT2 config.
        num_loops (`int`, *optional*): loops that will run; the config's by default.
    """
    cache = with_growing_layers(DynamicCache(config=config.decoder_view(num_loops)))
    count_in_every_loop(config, cache, config.slot_plan(num_loops))
    return cache


def check_not_packed(packed: bool) -> None:
    """Refuse to continue a cache with rows that hold several documents.

    Raises:
        ValueError: if `packed`.
    """
    if packed:
        raise ValueError(
            "The rows hold several packed documents (position_ids restart, or cu_seq_lens_q or seq_idx were given), "
            "which a cache cannot continue. Pass one document per row, or leave the cache out."
        )


def open_cache(
    config: LoopedConfigMixin,
    cache: Cache | None,
    use_cache: bool | None,
    num_loops: int | None,
    plan: SlotPlan,
    packed: bool,
) -> Cache | None:
    """Return the cache to use in a forward: the given one, a new one if asked for, or none.

    Args:
        config: an Ouro or LT2 config.
        cache: the caller's cache.
        use_cache: whether a new one is wanted.
        num_loops: loops that will run.
        plan ([`SlotPlan`]): the slots that will be used.
        packed (`bool`): the rows hold several documents, which a cache cannot continue.

    Raises:
        ValueError: for a cache with too few slots, which would fail deep inside a layer, one that fewer loops filled,
            or a cache with packed documents.
    """
    if cache is None:
        return make_cache(config, num_loops) if use_cache and not packed else None
    check_not_packed(packed)
    slots = len(plan.layer_types)
    special = {RECURRENT, POOLED} & set(plan.layer_types)
    lazy = getattr(cache, "layer_class_to_replicate", None) is not None and not special
    if not lazy and hasattr(cache, "layers") and len(cache.layers) < slots:
        raise ValueError(
            f"The cache has {len(cache.layers)} slots, but {slots} (loop, layer) visits keep something. Build it with "
            "DynamicCache(config=model.config), or for another number of loops with "
            "DynamicCache(config=model.config.decoder_view(num_loops))."
        )
    count_in_every_loop(config, cache, plan)
    layer = counting_layer(config, plan)
    check_filled(cache, plan.table[0][layer], plan.table[-1][layer], "num_loops")
    return cache


def counting_layer(config: LoopedConfigMixin, plan: SlotPlan) -> int:
    """Return the physical layer whose slots say how many tokens each loop has taken in.

    It is the first attention layer; the first recurrent one where there is no other, and where the loops share the
    slots of attention (`kv_sharing="last"`).
    """
    wants_recurrent = config.kv_sharing == "last"
    for layer, slot in enumerate(plan.table[0]):
        if (plan.layer_types[slot] == RECURRENT) == wants_recurrent:
            return layer
    return 0


def count_in_every_loop(config: LoopedConfigMixin, cache: Cache, plan: SlotPlan) -> None:
    """Let the slots of [`counting_layer`] count tokens if they are recurrent, which otherwise do not.

    `plan` ([`SlotPlan`]): the slots that will be used. Nothing is done in a compiled forward.
    """
    if torch.compiler.is_compiling():
        return
    layer, layers = counting_layer(config, plan), getattr(cache, "layers", [])
    for row in plan.table:
        slot = layers[row[layer]] if row[layer] < len(layers) else None
        if isinstance(slot, RecurrentLayer):
            slot.count_tokens()


def check_filled(cache: Cache, first: int, last: int, what: str) -> None:
    """Refuse a cache whose last slot lacks tokens that its first one holds: earlier calls went less deep.

    Args:
        cache: the caller's.
        first, last (`int`): slots of the first and of the last loop or step that will run.
        what (`str`): the argument that says how many run.

    Raises:
        ValueError: if they differ.
    """
    if torch.compiler.is_compiling() or not getattr(cache, "layers", None):
        return
    length, reached = _tokens_held(cache, first), _tokens_held(cache, last)
    if length and reached is not None and reached != length:
        raise ValueError(
            f"The cache was filled by calls with a smaller {what}: its later slots lack the {length} tokens that the "
            f"first ones hold. Continue with the {what} that it was filled with, or start a new cache."
        )


def _tokens_held(cache: Cache, slot: int) -> int | None:
    """Return the tokens in a slot; `None` for a recurrent state that does not count them."""
    layer: Any = cache.layers[slot] if slot < len(cache.layers) else None
    if isinstance(layer, LinearAttentionLayer):
        count = getattr(layer, "cumulative_length", None)
        return None if count is None else int(count)
    return 0 if layer is None else int(layer.get_seq_length())
