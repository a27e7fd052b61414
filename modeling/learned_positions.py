# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Learned absolute positions: a table of fixed length, and generation that stops at its end or slides a window."""

from typing import Any

import torch
from transformers.generation import GenerationMode

from loopergy.modeling.cached_generation import RoomyGenerationMixin


def check_positions(position_ids: torch.Tensor, longest: int | torch.Tensor, limit: int) -> None:
    """Refuse positions outside the table, which would otherwise be an index error inside the model.

    Args:
        position_ids (`torch.LongTensor`): positions of the new tokens.
        longest (`int`): cached and new tokens, padding included: below the limit nothing has to be read on a GPU.
        limit (`int`): `config.max_position_embeddings`.

    Raises:
        ValueError: for a position of `limit` or more, or below 0.
    """
    if torch.compiler.is_compiling() or (longest <= limit and position_ids.device.type != "cpu"):
        return
    if position_ids.numel() == 0:
        return
    first, last = map(int, position_ids.aminmax())
    if first < 0:
        raise ValueError(f"position_ids go down to {first}, and learned positions start at 0.")
    if last >= limit:
        raise ValueError(
            f"A text of {last + 1} tokens is longer than max_position_embeddings={limit}, and learned positions end "
            "there. Shorten the text, or generate with recompute_window=True, which keeps the last tokens only."
        )


class WindowedGenerationMixin(RoomyGenerationMixin):
    """Generate within the position table, or beyond it with `generate(..., recompute_window=True)`.

    Beyond the table the last `max_position_embeddings` tokens are numbered from 0 and computed afresh for each new
    token, since every state depends on its position; up to there the cache serves. This is what the official
    `generate` does at any length, number for number.
    """

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        cache: Any = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        recompute_window: bool = False,
        **kwargs: Any,
    ) -> dict:
        """Prepare one forward of `generate`; with a window, cut the text to it and leave the cache alone."""
        limit = self.config.max_position_embeddings
        if recompute_window and input_ids.shape[1] > limit:
            input_ids = input_ids[:, -limit:]
            attention_mask = None if attention_mask is None else attention_mask[:, -limit:]
            next_sequence_length, cache = None, None
            kwargs |= {"use_cache": False, "position_ids": None}
        return super().prepare_inputs_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def generate_batch(
        self, inputs: list[list[int]], generation_config: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Generate by continuous batching, within the position table; see [`RoomyGenerationMixin.generate_batch`].

        Raises:
            ValueError: if the longest prompt and its new tokens do not fit, or for `recompute_window`.
        """
        settings = generation_config or self.generation_config
        if kwargs.get("recompute_window") or getattr(settings, "recompute_window", None):
            raise ValueError("recompute_window=True computes each text afresh; use generate(), one text per call.")
        new = kwargs.get("max_new_tokens") or settings.max_new_tokens or 0
        self._check_budget(None, max(map(len, inputs), default=0) + new - 1)
        return super().generate_batch(inputs, generation_config, *args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        if model_kwargs.get("recompute_window"):
            if generation_mode == GenerationMode.ASSISTED_GENERATION or model_kwargs.get("inputs_embeds") is not None:
                raise ValueError(
                    "recompute_window=True renumbers the text and works from token ids, so it goes neither with "
                    "assisted or prompt-lookup decoding nor with inputs_embeds. Leave one of the two out."
                )
        else:
            self._check_budget(model_kwargs.get("attention_mask"), max_cache_length)
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _check_budget(self, attention_mask: torch.Tensor | None, max_cache_length: int) -> None:
        """Refuse a length that the table does not hold before the first token rather than at the last."""
        limit = self.config.max_position_embeddings
        padding = 0
        if max_cache_length > limit and attention_mask is not None and attention_mask.ndim == 2:
            padding = int((attention_mask == 0).sum(dim=-1).min())
        if max_cache_length - padding > limit:
            raise ValueError(
                f"Prompt and new tokens would be {max_cache_length - padding + 1} tokens, but learned positions end "
                f"at max_position_embeddings={limit}. Lower max_new_tokens or max_length, shorten the prompt, or pass "
                "recompute_window=True to go on with the last tokens only (each token then costs a full forward)."
            )


__all__ = ["WindowedGenerationMixin", "check_positions"]
