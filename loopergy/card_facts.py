# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Read what lies in a model's folder and belongs in its card: provenance, training, results, energies.

| file                     | left by                                  | says                             |
|--------------------------|------------------------------------------|----------------------------------|
| `config.json`            | every model                              | family, layers, cache            |
| `conversion_report.json` | `loopergy convert`, `run`                | where each tensor came from      |
| `stage.json`             | `loopergy align`, `distill`, `extend`    | stages, held-out KL, settings    |
| `selection.json`         | `loopergy select`, `run`                 | which layers were kept, and why  |
| `report.json`            | `loopergy run`, `demo`                   | losses, speed, samples           |
| `pretraining.json`       | `loopergy pretrain`                      | losses; each loop, each task     |
| `history.json`           | `loopergy task train`                    | a training on a task             |
| `evaluation/*.json`      | `loopergy eval`                          | results of lm-eval               |
| `energies.json`          | `loopergy trace --json energies.json`    | energies of one text             |
| `pictures/*`, `LICENSE`  | you                                      |                                  |
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from transformers.utils import logging

from loopergy.conversion.report import REPORT_FILE, ConversionReport
from loopergy.distill.pretrain_recipe import REPORT_FILE as PRETRAINING_FILE
from loopergy.distill.pretrain_recipe import STAGES as PRETRAINING_STAGES
from loopergy.distill.recipe import STAGES
from loopergy.distill.select import Selection
from loopergy.distill.stage import STAGE_FILE, StageRecord
from loopergy.energy_trace import EnergyTrace
from loopergy.evaluation import RESULTS_FOLDER, Evaluation
from loopergy.loading import model_config
from loopergy.tasks.training import HISTORY_FILE, History

logger = logging.get_logger(__name__)

ENERGIES_FILE, PICTURES_FOLDER = "energies.json", "pictures"
PICTURE_ENDINGS = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp")
_RUN_REPORTS = ("report.json", "report.html")
_KEPT = (
    REPORT_FILE,
    STAGE_FILE,
    "selection.json",
    "log_history.json",
    *_RUN_REPORTS,
    PRETRAINING_FILE,
    HISTORY_FILE,
    ENERGIES_FILE,
    "LICENSE",
)
_Read = TypeVar("_Read")


def kept_files(source: Path) -> dict[str, Path]:
    """Find what belongs to a model and lies beside its weights, or elsewhere in the run that it is a stage of.

    Args:
        source (`Path`): Folder of a model; if it is a stage of a run, the run's conversion report and selection count
            as its own, and the run's report too if no later stage is done.

    Returns:
        `dict[str, Path]`: Path in the model's folder to the file.
    """
    found = {}
    record, run = _record(source), source.resolve().parent
    if record is not None and record.stage in STAGES and (run / "convert" / STAGE_FILE).is_file():
        found[REPORT_FILE] = run / "convert" / REPORT_FILE
        if "select" in {stage.stage for stage in lineage(record)}:
            found["selection.json"] = run / "select" / "selection.json"
        later = STAGES[STAGES.index(record.stage) + 1 :]
        if not any((run / stage / STAGE_FILE).is_file() for stage in later):
            found.update({name: run / name for name in _RUN_REPORTS})
    if record is not None and record.stage in PRETRAINING_STAGES:
        found[PRETRAINING_FILE] = run / PRETRAINING_FILE
    found.update({name: source / name for name in _KEPT if (source / name).is_file()})
    for folder, endings in ((RESULTS_FOLDER, (".json",)), (PICTURES_FOLDER, PICTURE_ENDINGS)):
        for file in sorted((source / folder).glob("*")):
            if file.suffix.lower() in endings and not file.name.startswith("."):
                found[f"{folder}/{file.name}"] = file
    return {name: file for name, file in found.items() if file.is_file()}


def lineage(record: StageRecord | None) -> list[StageRecord]:
    """Return the records of a stage and of those before it, first stage first."""
    stages: list[StageRecord] = []
    while record is not None:
        stages.insert(0, record)
        record = None if record.parent is None else StageRecord(**record.parent)
    return stages


def _record(folder: Path) -> StageRecord | None:
    """Read the record of a stage; None if there is none whose whole lineage can be read."""
    record = _read(folder / STAGE_FILE, lambda file: lineage(StageRecord.load(file.parent)))
    return record[-1] if record else None


@dataclass
class CardFacts:
    """Everything that is known about the model in a folder; what no file tells is None or empty.

    Args:
        config (`PreTrainedConfig`): The model's.
        conversion (`ConversionReport`, *optional*): Of its conversion.
        selection (`Selection`, *optional*): Of its kept layers.
        stages (`list[StageRecord]`): First stage first.
        report (`dict`): Of the run.
        pretraining (`dict`): Of the training from nothing.
        history (`History`, *optional*): Of the training on a task.
        energies (`EnergyTrace`, *optional*): Of one text.
        evaluations (`list[Evaluation]`): Oldest first.
        losses (`dict`): Stage to (tokens, loss) points.
        pictures (`list[str]`): Paths in the folder.
        chat (`bool`): The tokenizer has a chat template.
    """

    config: Any
    conversion: ConversionReport | None = None
    selection: Selection | None = None
    stages: list[StageRecord] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    pretraining: dict[str, Any] = field(default_factory=dict)
    history: History | None = None
    energies: EnergyTrace | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    losses: dict[str, list[Any]] = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)
    chat: bool = False

    @classmethod
    def of(cls, folder: Path) -> "CardFacts":
        """Read a folder. Of the files beside the config, one that is no JSON or has another shape is left out.

        A warning names it. What a report holds further inside is not looked at.

        Raises:
            ValueError: For a folder without a config, or with one that cannot be read.
        """
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no model: there is no config.json")
        report, pretraining = (_read(folder / name, _read_json) or {} for name in ("report.json", PRETRAINING_FILE))
        results = [_read(file, Evaluation.load) for file in sorted((folder / RESULTS_FOLDER).glob("*.json"))]
        return cls(
            config=model_config(folder),
            conversion=_read(folder / REPORT_FILE, ConversionReport.from_json),
            selection=_read(folder / "selection.json", Selection.from_json),
            stages=lineage(_record(folder)),
            report=report,
            pretraining=pretraining,
            history=_read(folder / HISTORY_FILE, lambda file: History.load(file.parent)),
            energies=_read(folder / ENERGIES_FILE, EnergyTrace.from_json),
            evaluations=sorted((result for result in results if result is not None), key=lambda result: result.date),
            losses=report.get("losses") or pretraining.get("losses") or {},
            pictures=_pictures(folder),
            chat=_has_chat_template(folder),
        )

    @property
    def heldout(self) -> dict[str, dict[str, float]]:
        """Stage to `kl`, `perplexity`, `teacher_perplexity` and `tokens` on held-out text, first stage first."""
        return {record.stage: record.metrics["heldout"] for record in self.stages if record.metrics.get("heldout")}


def _pictures(folder: Path) -> list[str]:
    inside = [file for place in (folder, folder / PICTURES_FOLDER) for file in sorted(place.glob("*"))]
    return [file.relative_to(folder).as_posix() for file in inside if file.suffix.lower() in PICTURE_ENDINGS]


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    return bool((_read(folder / "tokenizer_config.json", _read_json) or {}).get("chat_template"))


def _read_json(file: Path) -> dict[str, Any]:
    values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}, not names and values")
    return values


def _read(file: Path, reader: Callable[[Path], _Read]) -> _Read | None:
    if not file.is_file():
        return None
    try:
        return reader(file)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning(f"{file.name} is left out of the model card, as it cannot be read: {error!r}")
        return None
