# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Random window layouts: which visits of attention layers see all tokens, and the vote of a model over layouts.

A model trained with a new layout at every step (`loopergy.training.random_windows`) works under any of them. Its vote
is the mean of the logits under several:

    windows = RandomWindows(share_full=0.25, window=512)
    logits = windows.vote(model, input_ids, votes=5)

Source: LT2 (arXiv 2605.20670), ablation of layouts; patterns `random:a:b` and `bookend_random:a:b` of its recipes,
with `share_full` = b / (a + b). Its tables give the vote no advantage over a fixed layout, at five times the cost.
"""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from loopergy.configuration.configuration_lt2 import LT2Config

ATTENTION = ("full", "window")


@dataclass
class RandomWindows:
    """Draw which visits of LT2's attention layers see all tokens; the others see a window.

    Args:
        share_full (`float`, defaults to 0.25): share of the visits without a window, rounded down to whole visits.
        window (`int`, defaults to 2048): window of the others in tokens, the token itself included.
        keep_ends (`bool`, defaults to `False`): the first and the last attention layer of each loop never have one.
            They count in the share.

    Raises:
        ValueError: for a share outside 0 to 1 or a window below 1.
    """

    share_full: float = 0.25
    window: int = 2048
    keep_ends: bool = False

    def __post_init__(self):
        if not 0 <= self.share_full <= 1:
            raise ValueError(f"share_full must be from 0 to 1, got {self.share_full}.")
        if self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}.")

    @classmethod
    def from_pattern(cls, pattern: str, window: int = 2048) -> "RandomWindows":
        """Read LT2's spelling: `"random:3:1"` for 3 visits with a window to 1 without, `"bookend_random:3:1"`.

        Raises:
            ValueError: for any other text.
        """
        found = re.fullmatch(r"(bookend_)?random:(\d+):(\d+)", pattern.strip())
        if found is None or int(found[2]) + int(found[3]) == 0:
            raise ValueError(f"{pattern!r} is not a random layout: write 'random:3:1' or 'bookend_random:3:1'.")
        windowed, full = int(found[2]), int(found[3])
        return cls(full / (windowed + full), window, keep_ends=found[1] is not None)

    def draw(self, config: LT2Config, seed: int) -> list[list[int | None]]:
        """Return `loop_windows`, one list a loop with one entry a layer, the same for the same seed.

        Raises:
            ValueError: for a config without attention layers.
        """
        layers = [layer for layer, mixer in enumerate(config.layer_mixers) if mixer in ATTENTION]
        if not layers:
            raise ValueError("layer_mixers has no 'full' or 'window' layer, so there are no windows to draw.")
        loops = range(config.num_trained_loops or config.num_loops)
        visits = [(loop, layer) for loop in loops for layer in layers]
        kept = [visit for visit in visits if self.keep_ends and visit[1] in (layers[0], layers[-1])]
        others = [visit for visit in visits if visit not in kept]
        # 49 visits times 1 / 49 are 0.999...
        count = int(len(visits) * self.share_full + 1e-9) - len(kept)
        full = {*kept, *random.Random(seed).sample(others, max(0, count))}
        return [
            [
                self.window if layer in layers and (loop, layer) not in full else None
                for layer in range(config.num_hidden_layers)
            ]
            for loop in loops
        ]

    @contextmanager
    def applied(self, config: LT2Config, seed: int) -> Iterator[None]:
        """Set a drawn layout on a model's config, and the former one again at the end of the `with` block."""
        before = config.loop_windows
        config.loop_windows = self.draw(config, seed)  # type: ignore[assignment]
        try:
            yield
        finally:
            config.loop_windows = before

    @torch.no_grad()
    def vote(
        self, model: PreTrainedModel, input_ids: torch.Tensor, votes: int = 5, seed: int = 0, **inputs: Any
    ) -> torch.Tensor:
        """Return the mean of the logits under several drawn layouts.

        Args:
            model (`LT2ForCausalLM`): in evaluation mode; runs `votes` times.
            input_ids (`torch.Tensor` of shape `[batch, length]`): tokens.
            votes (`int`, defaults to 5): layouts, drawn with the seeds `seed`, `seed + 1`, ...
            seed (`int`, defaults to 0): of the first layout.
            **inputs: other arguments of the model, such as `attention_mask`. There is no cache: layouts differ in
                what they keep.

        Returns:
            `torch.Tensor` of shape `[batch, length, vocabulary]`.

        Raises:
            ValueError: for fewer than one vote.
        """
        if votes < 1:
            raise ValueError(f"votes must be at least 1, got {votes}.")
        config: Any = model.config
        total: torch.Tensor | float = 0.0
        for vote in range(votes):
            with self.applied(config, seed + vote):
                total = total + model(input_ids, use_cache=False, **inputs).logits
        return torch.as_tensor(total) / votes


__all__ = ["RandomWindows"]
