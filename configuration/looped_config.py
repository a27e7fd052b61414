# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Loop count and cache layout, common to the configs of all looped models.

A looped model applies N physical layers T times. `config.json` holds N and T as they are; whatever needs one entry per
(loop, layer) visit, which is only the generation cache, asks the config for its *decoder view*.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedConfig
from transformers.utils import logging

from loopergy.configuration.checked_fields import check_count

logger = logging.get_logger(__name__)

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "looped_recurrent"
# Sparse attention: latents with index keys (`dsa`), and keys and values with averages of their blocks (`nsa`).
INDEXED, POOLED = "looped_indexed", "looped_pooled"
# The first slot of a cache without any attention: it also counts tokens.
COUNTED_RECURRENT = "looped_recurrent_counted"


@dataclass(frozen=True)
class SlotPlan:
    """Say which cache slot each (loop, layer) visit uses, and what each slot holds.

    Attributes:
        table (`list[list[int]]` of shape T x N): slot of layer `l` in loop `t` at `table[t][l]`.
        layer_types (`list[str]`): one cache layer type per slot: `"full_attention"`, `"sliding_attention"`,
            `"looped_recurrent"`, `"looped_indexed"` or `"looped_pooled"`.
        windows (`list[int | None]`): one window per slot, in tokens, the token itself included; `None` without a
            window.
    """

    table: list[list[int]]
    layer_types: list[str]
    windows: list[int | None]


class LoopedConfigMixin(PreTrainedConfig if TYPE_CHECKING else object):
    """Add loops to a `PreTrainedConfig`: slot plan, decoder view, and a warning when the loop count is raised.

    A class that uses it has `num_hidden_layers` (N), `num_loops` (T) and `kv_sharing`, and says by `visit(loop,
    layer)` what the mixer of one visit keeps between tokens.
    """

    num_hidden_layers: int
    num_loops: int
    kv_sharing: str
    attribute_map: ClassVar[dict[str, str]]

    @property
    def total_num_hidden_layers(self) -> int:
        """Visits in all, T * N: the number of hidden states and of attention maps that are recorded."""
        return self.num_hidden_layers * self.num_loops

    def visit(self, loop: int, layer: int) -> tuple[str, int | None]:
        """Return (cache layer type, window in tokens or `None`) of the given loop and physical layer."""
        raise NotImplementedError(f"{type(self).__name__} must say what a (loop, layer) visit keeps")

    def slot_plan(self, num_loops: int | None = None) -> SlotPlan:
        """Lay out the cache: slot = loop * N + layer, except where loops share the keys and values of a layer.

        Args:
            num_loops (`int`, *optional*): loops to plan for; the config's own `num_loops` by default.

        Returns:
            [`SlotPlan`]: with `kv_sharing="last"` the loops of an attention layer share one slot (Ouro paper, table
            14), and recurrent layers still have one slot per loop.
        """
        table, types, windows = [], [], []
        for loop in range(self.num_loops if num_loops is None else num_loops):
            row = []
            for layer in range(self.num_hidden_layers):
                layer_type, window = self.visit(loop, layer)
                if loop > 0 and self.kv_sharing == "last" and layer_type != RECURRENT:
                    row.append(table[0][layer])
                    continue
                row.append(len(types))
                types.append(layer_type)
                windows.append(window)
            table.append(row)
        return SlotPlan(table, types, windows)

    def decoder_view(self, num_loops: int | None = None) -> "LoopedConfigMixin":
        """Return a shallow copy of the config that describes the cache: one "layer" per slot.

        transformers' cache classes read `num_hidden_layers`, `layer_types` and the windows from it; nothing else does.
        """
        plan = self.slot_plan(num_loops)
        layer_types = list(plan.layer_types)
        if set(layer_types) == {RECURRENT}:
            layer_types[0] = COUNTED_RECURRENT
        view = copy.copy(self)
        # transformers' layers keep the last window - 1 tokens, which they get wrong for 0; masks hide the token kept.
        windows = [None if window is None else max(window, 2) for window in plan.windows]
        # Bypasses `__setattr__`, so that no check of a changed loop count runs on the view.
        view.__dict__.update(
            num_hidden_layers=len(layer_types),
            layer_types=layer_types,
            sliding_window=next((window for window in windows if window is not None), None),
            _is_decoder_view=True,
        )
        if len({window for window in windows if window is not None}) > 1:
            view.per_layer_config = {
                slot: {"sliding_window": window} for slot, window in enumerate(windows) if window is not None
            }
        return view

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the decoder view where a cache is being sized (`decoder=True`), the config itself otherwise."""
        if not decoder or self.__dict__.get("_is_decoder_view") or not self.__dict__.get("_post_init_done"):
            return super().get_text_config(decoder=decoder, encoder=encoder)
        return self.decoder_view()

    def __setattr__(self, key: str, value: Any) -> None:
        if key in self.attribute_map:
            # Set again under the field's own name, so that the field's checks see it.
            setattr(self, self.attribute_map[key], value)
            return
        if key == self.attribute_map.get("num_loops", "num_loops") and self.__dict__.get("_post_init_done"):
            warn_beyond_trained(value, self.num_loops)
        super().__setattr__(key, value)


def warn_beyond_trained(num_loops: int, trained: int) -> None:
    """Warn once when a model is asked for more loops than its checkpoint says (Ouro: MMLU 67.45 at 4, 64.49 at 8)."""
    if isinstance(num_loops, int) and num_loops > trained and not torch.compiler.is_compiling():
        logger.warning_once(
            f"num_loops={num_loops} is more than the {trained} loops of the checkpoint: looped models usually get "
            "worse beyond the trained depth."
        )


def resolve_num_loops(config: LoopedConfigMixin, num_loops: Any) -> int:
    """Return a loop count given at call time; `None` means the config's.

    Raises:
        ValueError: if `num_loops` is not a whole number of at least 1.
    """
    if num_loops is None:
        return config.num_loops
    num_loops = check_count("num_loops", num_loops, f"the config's {config.num_loops}")
    warn_beyond_trained(num_loops, config.num_loops)
    return num_loops
