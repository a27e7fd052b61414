# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Train LT2 with random window layouts: a `Trainer` draws a new one for every optimizer step.

    windows = RandomWindows(share_full=0.25, window=512)
    callback = RandomWindowsCallback(windows, model.config)
    Trainer(model, args, train_dataset=data, callbacks=[callback]).train()

Source: LT2 (arXiv 2605.20670), ablation of layouts.
"""

from typing import Any

from transformers import TrainerCallback

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.modeling.random_windows import RandomWindows


class RandomWindowsCallback(TrainerCallback):
    """Draw a layout for every optimizer step, from `seed` and the number of the step.

    Between steps the config has its own layout, so checkpoints and evaluation have that one.

    Args:
        windows ([`RandomWindows`]): what to draw from.
        config ([`LT2Config`]): the config of the model that is trained, `model.config`.
        seed (`int`, defaults to 0): of the first step; the next steps follow it.
    """

    def __init__(self, windows: RandomWindows, config: LT2Config, seed: int = 0):
        self.windows, self.config, self.seed = windows, config, seed
        self.own = config.loop_windows

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the layout of the step."""
        self.config.loop_windows = self.windows.draw(self.config, self.seed + state.global_step)  # type: ignore[assignment]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the config's own layout again."""
        self.config.loop_windows = self.own


__all__ = ["RandomWindowsCallback"]
