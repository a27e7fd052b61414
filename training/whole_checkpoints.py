# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints of a `Trainer` that are whole or not there: a kill while one is written leaves the one before."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

_UNFINISHED = ".unfinished"
# In a checkpoint: what `Trainer` forgets, the time so far and the losses that are not logged yet.
PROGRESS_FILE = "progress.json"


class WholeCheckpointsTrainer(Trainer):
    """A `transformers.Trainer` that writes each checkpoint under another name and renames it when it is whole.

    A resumed run logs the losses, and tells the seconds, of one that was not interrupted.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._began, self._seconds_before = time.perf_counter(), 0.0
        self._progress: dict[str, Any] | None = None

    @property
    def seconds(self) -> float:
        """Wall time since the trainer was made, and before the checkpoint that it resumed from."""
        return self._seconds_before + time.perf_counter() - self._began

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer` does; a resumed run goes on with the time and the losses of its checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(str(self.args.output_dir)) or True
        if resume_from_checkpoint:
            self.read_progress(str(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def read_progress(self, checkpoint: str) -> None:
        """Go on with the time and the losses of a checkpoint; an older one does not have them."""
        file = Path(checkpoint) / PROGRESS_FILE
        if file.is_file():
            self._progress = json.loads(file.read_text(encoding="utf-8"))
            self._seconds_before = self._progress["seconds"]  # type: ignore[index]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of a step; before the first one after a resume, take up the losses not logged yet."""
        samples = super().get_batch_samples(*args, **kwargs)
        if self._progress is not None:
            self._tr_loss += self._progress["loss"]
            self._total_loss_scalar -= self._progress["loss"]
            self._globalstep_last_logged, self._progress = self._progress["logged_step"], None
        return samples

    def add_to_checkpoint(self, folder: Path) -> None:
        """Write what else belongs to the checkpoint; called on the process that writes."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # The mean over all processes, each of which goes on from it.
        loss = float(self.accelerator.reduce(self._tr_loss, reduction="mean"))  # type: ignore[arg-type]
        progress = {"seconds": self.seconds, "loss": loss, "logged_step": self._globalstep_last_logged}
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
            (unfinished / name / PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")
            self.add_to_checkpoint(unfinished / name)
            shutil.rmtree(final / name, ignore_errors=True)
            os.replace(unfinished / name, final / name)
            shutil.rmtree(unfinished, ignore_errors=True)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(final), self.args.save_total_limit, best, use_mtime=True)
        self.accelerator.wait_for_everyone()
