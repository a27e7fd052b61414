# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Run the stages of a recipe in a folder: skip those that are done, resume the one that was interrupted.

A folder holds one recipe's work. Each finished stage records its settings and what it was made from; a stage that is
running has the same beside its checkpoints, in `run.json`. A recipe that says otherwise is refused before it starts.
"""

import gc
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import CONFIG_NAME

from loopergy.conversion.folders import replace_file
from loopergy.distill.recipe_settings import EvaluateSettings, naming
from loopergy.distill.stage import STAGE_FILE, StageConfig, StageError, StageRecord
from loopergy.tasks.mixture import TaskShare, TextAndTasks, accuracies, check_shares, task_shares
from loopergy.training.checks import check_row_length, check_trains
from loopergy.training.data import PackedDataset, held_out_batches
from loopergy.training.fields import HARMLESS, differences
from loopergy.training.processes import alone, join_processes, whole

RUN_FILE = "run.json"
# What a stage that trains may have of its own, instead of the recipe's.
PER_STAGE = ("data", "tasks")
# Names that may be spelt otherwise, and the hash that tells whether they mean the same.
_WITNESSES = {"teacher": "teacher_weights", "data": "texts"}


class StagedRun:
    """Carry out the stages of a recipe in a folder; a subclass says which there are, and performs them.

    A subclass sets the class attributes `stages` (the names of all stages, each made from the one before it),
    `trainers` (those that train, with config class and trainer) and `data_seeds` (what is added to the recipe's seed
    for the order of the documents). Its constructor sets `tokenizer`, `tasks`, and the `config` that limits the rows.

    Args:
        recipe: With a field for each stage, None for one that is left out, and `data`, `tasks`, `evaluate`, `seed`.
        output_dir (`str` or `Path`): Gets a folder for each finished stage; `checkpoints` for the one that runs.
        on_stage (callable): Called with the name and the record of every stage that is done, by the main process.
    """

    stages: tuple[str, ...]
    trainers: dict[str, tuple[Any, Any]]
    data_seeds: dict[str, int]
    tokenizer: PreTrainedTokenizerBase
    tasks: list[TaskShare]
    config: PreTrainedConfig
    # The model that limits the length of rows, and what to do instead of shortening them.
    row_limit: tuple[str, str]

    def __init__(self, recipe: Any, output_dir: str | Path, on_stage: Callable[[str, StageRecord], None]):
        self.recipe, self.folder, self.on_stage = recipe, Path(output_dir), on_stage
        self.processes = join_processes()
        self.parts = {name: part for name in self.stages if (part := getattr(recipe, name)) is not None}
        self._hashes: dict[str, str] = {}

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.processes.is_main_process

    def model_folder(self) -> Path:
        """Return the folder of the last stage with weights that is done."""
        folders = [self.folder / name for name in self.stages]
        done = [each for each in folders if all((each / file).is_file() for file in (STAGE_FILE, CONFIG_NAME))]
        if not done:
            raise FileNotFoundError(f"No stage is finished in {self.folder}.")
        return done[-1]

    def run_stages(self) -> None:
        """Run the stages that the folder does not have yet, and tell of each.

        Raises:
            StageError: A stage that was finished or interrupted with other settings, or whose successor was made
                without it.
            ValueError: Settings that no stage takes, or a folder that another run is writing to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check()
        with alone(self.folder, self.is_main):
            self._check_folder()
            for name in self.parts:
                record, checkpoints = StageRecord.load(self.folder / name), self.folder / "checkpoints" / name
                # No process begins a stage before all have seen what is done.
                self.processes.wait_for_everyone()
                if record is None:
                    if self.is_main:
                        replace_file(checkpoints / RUN_FILE, json.dumps(self._run_of(name), indent=1) + "\n")
                    record = self._perform(name)
                if self.is_main:
                    shutil.rmtree(checkpoints, ignore_errors=True)
                    self.on_stage(name, record)

    def _perform(self, name: str) -> StageRecord:
        """Do one stage."""
        raise NotImplementedError(f"{type(self).__name__} must perform its stages")

    def _measure(self, model: Any) -> dict[str, Any]:
        """Return what the record of a stage tells of its model on held-out text."""
        raise NotImplementedError(f"{type(self).__name__} must measure its models")

    def _settings(self, name: str) -> dict[str, Any]:
        """Return the settings that the record of a stage holds."""
        return self.parts[name]

    def _origin(self, name: str) -> dict[str, Any]:
        """Return what a stage depends on besides its settings; what an older record lacks of it is not compared."""
        origin: dict[str, Any] = {"evaluate": asdict(self._evaluation())}
        if name in self.data_seeds:
            origin["texts"] = self._texts_hash(self._source(name))
        return origin

    def _arguments(self, name: str) -> StageConfig:
        """Return the arguments of a stage's trainer."""
        fields = {key: value for key, value in self.parts[name].items() if key not in PER_STAGE}
        folder = self.folder / "checkpoints" / name
        return self.trainers[name][0](output_dir=str(folder), **{"seed": self.recipe.seed, **fields})

    def _source(self, name: str) -> str:
        """Return the name of the text that a stage reads."""
        return self.parts[name].get("data", self.recipe.data)

    def _texts_hash(self, source: str) -> str:
        """Return the hash of the texts to train on, read once a run."""
        if source not in self._hashes:
            self._hashes[source] = PackedDataset(source, self.tokenizer, 2).texts_hash
        return self._hashes[source]

    def _evaluation(self) -> EvaluateSettings:
        """Return the settings of the evaluation; rows are as long as the model takes, unless the recipe says more."""
        chosen = EvaluateSettings(**self.recipe.evaluate)
        if "length" not in self.recipe.evaluate:
            chosen.length = min(chosen.length, self.config.max_position_embeddings)
        return chosen

    def _tasks_of(self, name: str) -> list[TaskShare]:
        """Return the tasks that a stage trains on."""
        own = self.parts[name].get("tasks")
        return self.tasks if own is None else task_shares(own, self.tokenizer)

    def _check(self) -> None:
        """Raise now what a later stage would raise after hours: settings that no stage takes."""
        for name in self.trainers:
            if name in self.parts:
                with naming(name):
                    self._check_training(name, self._arguments(name))

    def _check_training(self, name: str, args: Any) -> None:
        """Raise for settings that the trainer of a stage does not take, or not with this model."""
        check_trains(args)
        check_shares(self._tasks_of(name), args.length)
        self._texts_hash(self._source(name))
        try:
            Trainer.get_optimizer_cls_and_kwargs(args)
        except (ImportError, ValueError) as error:
            raise ValueError(f"`optim` {str(args.optim.value)!r} cannot be made here: {error}") from error

    def _check_rows(self, name: str, length: int) -> None:
        """Refuse rows that the model was not made for."""
        whose, otherwise = self.row_limit
        with naming(name):
            check_row_length(length, self.config.max_position_embeddings, whose, otherwise.format(length=length))

    def _held_out(self, **options: Any) -> list[dict[str, torch.Tensor]] | None:
        """Return the held-out text that the stages are measured on, None if the recipe asks for no evaluation."""
        chosen = self._evaluation()
        if chosen.num_tokens == 0:
            return None
        self._check_rows("evaluate", chosen.length)
        return held_out_batches(self.recipe.data, self.tokenizer, **asdict(chosen), **options)

    def _metrics(self, name: str, seconds: float, model: PreTrainedModel) -> dict[str, Any]:
        """Return what the record of a stage holds: its settings and origin, and what its model does."""
        metrics = {"settings": self._settings(name), "run": self._origin(name), "seconds": round(seconds, 2)}
        metrics |= self._measure(model)
        if self.tasks:
            metrics["tasks"] = accuracies(model, self.tasks)
        return metrics

    def _train_stage(
        self,
        name: str,
        student: PreTrainedModel | str,
        teacher: PreTrainedModel | None = None,
        previous: StageRecord | None = None,
        **packing: Any,
    ) -> StageRecord:
        """Train a stage, or what of it an interrupted run left; measure it and write its folder."""
        args, seed = self._arguments(name), self.recipe.seed + self.data_seeds[name]
        data: Any = PackedDataset(self._source(name), self.tokenizer, args.length, seed=seed, **packing)
        if tasks := self._tasks_of(name):
            data = TextAndTasks(data, tasks, seed)
        trainer = self.trainers[name][1](
            student, teacher, args, data, processing_class=self.tokenizer, previous=previous
        )
        trainer.train_or_resume()
        metrics = self._metrics(name, trainer.seconds, whole(trainer.student))
        record = trainer.save_stage(self.folder / name, metrics)
        trainer.accelerator.free_memory()
        # A trainer is full of reference cycles, and its optimizer has to be gone before the next stage makes its own.
        del trainer
        gc.collect()
        return record

    def _run_of(self, name: str, there: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return all that a stage depends on: its settings and those of the stages before it, and its origin.

        With a record `there`, only the part of the origin that it has too: an older one has fewer entries.
        """
        names = list(self.parts)
        before = {earlier: self._settings(earlier) for earlier in names[: names.index(name) + 1]}
        return {**before, **_recorded(self._origin(name), there)}

    def _check_folder(self) -> None:
        """Refuse a folder in which something was made by another recipe, or by hand, before anything is done."""
        for place in (*(self.folder / name for name in self.parts), *(self.folder / "checkpoints").glob("*")):
            if place.exists() and not _is_ours(place):
                raise StageError(
                    f"{place} would be replaced, and holds what no stage has written. Move it away, or give another "
                    "output."
                )
        records = {name: StageRecord.load(self.folder / name) for name in self.stages}
        before = None
        for name in self.parts:
            record = records[name]
            following = [other for other in self.stages[self.stages.index(name) :] if records[other] is not None]
            made = ", ".join(str(self.folder / other) for other in following)
            if record is None:
                self._check_interrupted(name)
                if following:
                    raise StageError(
                        f"Stage {name!r} is not done in {self.folder}, but stages that come after it are: they were "
                        f"not made from it. Remove {made} to make them from it, or leave {name!r} out of the recipe, "
                        "or give another output."
                    )
            else:
                self._check_finished(name, record)
                parent = (record.parent or {}).get("stage", before)
                if before is not None and parent != before:
                    raise StageError(
                        f"Stage {name!r} in {self.folder} was made from stage {parent!r}, and the recipe has "
                        f"{before!r} before it. Remove {made}, or restore the recipe, or give another output."
                    )
            before = name

    def _check_finished(self, name: str, record: StageRecord) -> None:
        """Refuse a stage that was finished with other settings."""
        changed = _changes(record.metrics.get("settings") or {}, self._settings(name))
        if not changed and (run := record.metrics.get("run")):
            changed = _changes(run, _recorded(self._origin(name), run))
        if changed:
            raise StageError(
                f"Stage {name!r} in {self.folder} was finished with other settings: {changed}. Remove that folder and "
                "those of later stages, or give another output."
            )

    def _check_interrupted(self, name: str) -> None:
        """Refuse to go on from checkpoints of another run; those without a `run.json` are older, and are taken."""
        checkpoints = self.folder / "checkpoints" / name
        file = checkpoints / RUN_FILE
        if not file.is_file() or get_last_checkpoint(str(checkpoints)) is None:
            return
        there = json.loads(file.read_text(encoding="utf-8"))
        if changed := _changes(there, self._run_of(name, there)):
            raise StageError(
                f"Stage {name!r} in {self.folder} was interrupted, and began with other settings: {changed}. Restore "
                f"them to go on, or remove {checkpoints} to begin the stage anew, or give another output."
            )


def _is_ours(place: Path) -> bool:
    """Whether a stage wrote a folder, finished or not; an empty one is nobody's."""
    if not place.is_dir():
        return False
    names = {entry.name for entry in place.iterdir()}
    return not names or STAGE_FILE in names or RUN_FILE in names or get_last_checkpoint(str(place)) is not None


def _changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Tell what differs between a record and a recipe, apart from what may; empty if nothing does."""
    # JSON turns the layers of a mapping into text.
    found = differences(there, json.loads(json.dumps(here)))
    for name, witness in _WITNESSES.items():
        if there.get(witness) is not None and there[witness] == here.get(witness):
            found.pop(name, None)
    return "; ".join(
        f"{name} was {old!r}, the recipe has {new!r}"
        for name, (old, new) in found.items()
        if name.rpartition(".")[2] not in HARMLESS
    )


def _recorded(origin: Mapping[str, Any], there: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the part of an origin that a record has too, as an older one has fewer entries; all without a record."""
    return {name: value for name, value in origin.items() if there is None or name in there}
