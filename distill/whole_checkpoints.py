# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of a `Trainer` that are whole or not there: a kill while one is written leaves the one before."""

import os
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import rotate_checkpoints

_UNFINISHED = ".unfinished"


class WholeCheckpointsTrainer(Trainer):
    """A `transformers.Trainer` that writes each checkpoint under another name and renames it when it is whole."""

    def add_to_checkpoint(self, folder: Path) -> None:
        """Write what else belongs to the checkpoint; called on the process that writes."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        final, main = Path(str(self.args.output_dir)), self.args.should_save
        unfinished, name = final / _UNFINISHED, f"checkpoint-{self.state.global_step}"
        if main:
            shutil.rmtree(unfinished, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.args.output_dir = str(unfinished)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.output_dir = str(final)
        self.accelerator.wait_for_everyone()
        if self.state.best_model_checkpoint == str(unfinished / name):
            self.state.best_model_checkpoint = str(final / name)
        if main:
            self.state.save_to_json(str(unfinished / name / TRAINER_STATE_NAME))
            self.add_to_checkpoint(unfinished / name)
            shutil.rmtree(final / name, ignore_errors=True)
            os.replace(unfinished / name, final / name)
            shutil.rmtree(unfinished, ignore_errors=True)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(final), self.args.save_total_limit, best, use_mtime=True)
        self.accelerator.wait_for_everyone()
