# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""All stages from one YAML file: convert, calibrate, align, select, distill, extend, each into a folder of its own.

A recipe that is run again skips the stages whose folder has a `stage.json`, and resumes the one that was interrupted
from its last checkpoint. So the same command starts, continues and finishes a run. On many processes
(`accelerate launch`) the stages share out the rows; conversion, selection and evaluation are done by every process.

```yaml
teacher: ByteDance/Ouro-1.4B
data: HuggingFaceFW/fineweb-edu:sample-10BT
align:   {target_tokens: 100_000_000, length: 512, per_device_train_batch_size: 96}
select:  {keep: 0.25, num_tokens: 1_000_000}
distill: {target_tokens: 600_000_000}
extend:  {target_tokens: 600_000_000}
```
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.conversion import convert, parse_keep_layers
from loopergy.conversion.folders import replace_file
from loopergy.conversion.report import REPORT_FILE
from loopergy.distill.align import AlignConfig, AlignTrainer
from loopergy.distill.calibrate import calibrate
from loopergy.distill.distill import DistillConfig, DistillTrainer, prepare_student
from loopergy.distill.extend import ExtendConfig, ExtendTrainer
from loopergy.distill.recipe_settings import (
    CalibrateSettings,
    EvaluateSettings,
    RecipeFile,
    SelectSettings,
    naming,
    read_stage,
)
from loopergy.distill.report import HeldOut, Report, evaluate_heldout, gap_closed, loss_curve
from loopergy.distill.select import Selection, select_layers, wanted_layers
from loopergy.distill.stage import StageRecord
from loopergy.distill.staged_run import PER_STAGE, StagedRun
from loopergy.distill.teacher import num_loops, resolve_teacher, resolve_tokenizer
from loopergy.distill.teacher_states import weights_hash
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.tasks.mixture import accuracies, check_entries, check_lengths, task_batches, task_shares
from loopergy.training.checks import check_extension, check_least, check_row_length, check_vocabulary
from loopergy.training.data import held_out_batches
from loopergy.training.fields import read_fields, read_part
from loopergy.training.processes import shared_folder

STAGES = ("convert", "calibrate", "align", "select", "distill", "extend")
STAGE_CLASSES = {
    "align": (AlignConfig, AlignTrainer),
    "distill": (DistillConfig, DistillTrainer),
    "extend": (ExtendConfig, ExtendTrainer),
}


@dataclass
class Recipe(RecipeFile):
    """What to train, on what, and how; a YAML file with these keys.

    The `align`, `distill` and `extend` parts take every field of their config class (`AlignConfig`, ...), and `data`
    and `tasks` to use others than the rest. A part that is `null` is left out, except that `distill` needs `align`
    before it.
    """

    teacher: str = field(metadata={"help": "Folder, Hub id, .gguf file, or smollm2."})
    data: str = field(default="offline", metadata={"help": "Text to train on; see loopergy.training.data."})
    tokenizer: str | None = field(default=None, metadata={"help": "Folder or Hub id. None: the teacher's."})
    dtype: str | None = field(default=None, metadata={"help": "Of teacher and student. None: the checkpoint's."})
    documents: str = field(default="separate", metadata={"help": "separate or contiguous packing."})
    seed: int = field(default=0, metadata={"help": "Of fresh tensors, document order and training."})
    tasks: list[dict[str, Any]] = field(
        default_factory=list,
        metadata={"help": "Tasks mixed into the text and measured after every stage; see loopergy.tasks.mixture."},
    )
    convert: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Options of `convert`; by default no layer keeps attention."}
    )
    calibrate: dict[str, Any] | None = field(
        default=None, metadata={"help": "Fields of CalibrateSettings, for short budgets. None: no calibration."}
    )
    align: dict[str, Any] | None = field(default_factory=dict, metadata={"help": "Fields of AlignConfig."})
    select: dict[str, Any] | None = field(default_factory=dict, metadata={"help": "Fields of SelectSettings."})
    distill: dict[str, Any] | None = field(default_factory=dict, metadata={"help": "Fields of DistillConfig."})
    extend: dict[str, Any] | None = field(default=None, metadata={"help": "Fields of ExtendConfig."})
    evaluate: dict[str, Any] = field(default_factory=dict, metadata={"help": "Fields of EvaluateSettings."})

    def __post_init__(self):
        # What is null has the default; a part that is null is left out.
        self.tasks, self.evaluate = self.tasks or [], {} if self.evaluate is None else self.evaluate
        for name, (config, _) in STAGE_CLASSES.items():
            part = getattr(self, name)
            if part is not None:
                part = read_stage(name, part, config, PER_STAGE)
                part = {key: value for key, value in part.items() if value is not None or key not in PER_STAGE}
                setattr(self, name, part)
                check_entries(part.get("tasks", ()))
        for name, kind in (
            ("select", SelectSettings),
            ("calibrate", CalibrateSettings),
            ("evaluate", EvaluateSettings),
        ):
            if getattr(self, name) is not None:
                setattr(self, name, part := read_part(name, getattr(self, name), kind))
                check_entries(part.get("tasks", ()))
                kind(**part)
        check_entries(self.tasks)
        if not isinstance(self.convert, Mapping):
            raise ValueError(
                f"convert: every other stage starts from it, so it must be a mapping of options, {{}} for the "
                f"defaults; got {self.convert!r}."
            )
        read_fields(self)
        check_least("", self, seed=0)
        if self.tasks and self.documents != "separate":
            raise ValueError(f"`tasks` need `documents: separate`, as every example is one; got {self.documents!r}.")
        if self.align is None and (self.distill is not None or self.extend is not None):
            raise ValueError("A recipe with `distill` or `extend` needs `align`: the new mixers start untrained.")
        if self.distill is None and self.extend is not None:
            raise ValueError("A recipe with `extend` needs `distill`.")


class RecipeRun(StagedRun):
    """Carry out a recipe in a folder.

    | folder below `output_dir` | what                                                      |
    |---------------------------|-----------------------------------------------------------|
    | `convert` ... `extend`    | the finished stages: student, tokenizer, `stage.json`      |
    | `select`                  | `selection.json`, `stage.json`                             |
    | `checkpoints`             | the stage that is running                                  |

    Args:
        recipe (`Recipe`): What to do.
        output_dir (`str` or `Path`): Where.
        teacher (`PreTrainedModel`, *optional*): In memory, instead of the recipe's.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): In memory, instead of the recipe's.
        on_stage (callable, *optional*): Called with the name and the record of every stage that is done, by the main
            process.
    """

    stages = STAGES
    trainers = STAGE_CLASSES
    data_seeds = {"calibrate": 0, "align": 1, "select": 1, "distill": 3, "extend": 4}
    row_limit = ("teacher", "a teacher for longer texts")

    def __init__(
        self,
        recipe: Recipe,
        output_dir: str | Path,
        teacher: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        on_stage: Callable[[str, StageRecord], None] = lambda name, record: None,
    ):
        super().__init__(recipe, output_dir, on_stage)
        self.teacher = resolve_teacher(teacher if teacher is not None else recipe.teacher, dtype=recipe.dtype)
        self.config = self.teacher.config
        self.tokenizer = tokenizer or resolve_tokenizer(recipe.tokenizer or recipe.teacher)
        if recipe.tokenizer is not None:
            check_vocabulary(recipe.tokenizer, len(self.tokenizer), self.config.vocab_size)
        self.tasks = task_shares(recipe.tasks, self.tokenizer)
        batches = self._held_out(documents=recipe.documents)
        self.held_out = None if batches is None else HeldOut.of(self.teacher, batches)

    def run(self) -> Report:
        """Run what is not done yet; return the report of everything, which is written too."""
        self.run_stages()
        report = self.report()
        if self.is_main:
            report.save(self.folder)
        return report

    def student_folder(self) -> Path:
        """Return the folder of the last stage with weights that is done."""
        return self.model_folder()

    def _check(self) -> None:
        super()._check()
        if "calibrate" in self.parts:
            self._check_rows("calibrate", CalibrateSettings(**self.parts["calibrate"]).length)
        if "select" in self.parts:
            chosen, layers = SelectSettings(**self.parts["select"]), self.config.num_hidden_layers
            own = parse_keep_layers(self.parts["convert"].get("keep_layers", []), layers)
            with naming("select"):
                wanted_layers(chosen.keep, chosen.strategy, chosen.budget_tokens, layers, own)
                check_lengths(task_shares(chosen.tasks, self.tokenizer), chosen.length)
            self._check_rows("select", chosen.length)

    def _check_training(self, name: str, args: Any) -> None:
        super()._check_training(name, args)
        limit = self.config.max_position_embeddings
        if isinstance(args, ExtendConfig) and args.extend_to is not None:
            check_extension(args.extend_to, limit)
            limit = args.extend_to
        check_row_length(args.length, limit)
        if isinstance(args, DistillConfig):
            args.schedule(0.0, num_loops(self.teacher))
            states = None if args.teacher_states is None else Path(args.teacher_states).expanduser()
            if states is not None and states.exists() and not states.is_dir():
                raise ValueError(f"`teacher_states` {args.teacher_states!r} is a file; give a folder.")
            if args.teacher_states is not None and self._tasks_of(name):
                raise ValueError(
                    f"`teacher_states` {args.teacher_states!r} are of rows of text, and this stage trains on tasks "
                    "too. Leave `teacher_states` out, or give this part `tasks: []`."
                )

    @cached_property
    def _teacher_weights(self) -> str:
        return weights_hash(self.teacher)

    def _origin(self, name: str) -> dict[str, Any]:
        recipe = self.recipe
        origin = {key: getattr(recipe, key) for key in ("teacher", "dtype", "seed")} | super()._origin(name)
        origin["teacher_weights"] = self._teacher_weights
        if name != "convert":
            origin |= {"data": recipe.data, "tokenizer": recipe.tokenizer, "documents": recipe.documents}
        if name in STAGE_CLASSES:
            origin |= {key: self.parts[name].get(key, getattr(recipe, key)) for key in PER_STAGE}
        return origin

    def _measure(self, model: LT2ForCausalLM) -> dict[str, Any]:
        return {} if self.held_out is None else {"heldout": evaluate_heldout(model, self.teacher, self.held_out)}

    def _perform(self, name: str) -> StageRecord:
        stages: dict[str, Callable[[dict[str, Any]], StageRecord]] = {
            "convert": self._convert,
            "calibrate": self._calibrate,
            "align": self._align,
            "select": self._select,
            "distill": self._distill,
            "extend": self._extend,
        }
        return stages[name](self.parts[name])

    def _convert(self, settings: dict[str, Any]) -> StageRecord:
        began = time.perf_counter()
        options = {"keep_layers": [], "seed": self.recipe.seed, **settings}
        conversion = convert(self.teacher, **options)
        metrics = self._metrics("convert", time.perf_counter() - began, conversion.model)
        record = StageRecord.of("convert", conversion.model.config, metrics=metrics)
        with shared_folder(self.folder / "convert") as unfinished:
            if unfinished is not None:
                conversion.model.save_pretrained(unfinished)
                self.tokenizer.save_pretrained(unfinished)
                conversion.report.to_json(unfinished / REPORT_FILE)
                record.save(unfinished)
        return record

    def _calibrate(self, settings: dict[str, Any]) -> StageRecord:
        began, chosen = time.perf_counter(), CalibrateSettings(**settings)
        student = self._load("convert")
        batches = self._sample("calibrate", chosen)
        found = calibrate(student, self.teacher, batches, parts=chosen.parts)
        seconds = time.perf_counter() - began
        metrics = {**self._metrics("calibrate", seconds, student), "calibration": dataclasses.asdict(found)}
        record = StageRecord.of(
            "calibrate", student.config, StageRecord.load(self.folder / "convert"), metrics=metrics
        )
        record.tokens_seen = found.tokens
        with shared_folder(self.folder / "calibrate") as unfinished:
            if unfinished is not None:
                student.save_pretrained(unfinished)
                self.tokenizer.save_pretrained(unfinished)
                record.save(unfinished)
        return record

    def _sample(self, name: str, chosen: CalibrateSettings | SelectSettings) -> list[dict[str, torch.Tensor]]:
        """Return a fixed sample of the training documents."""
        return held_out_batches(
            self.recipe.data,
            self.tokenizer,
            length=chosen.length,
            num_tokens=chosen.num_tokens,
            batch_size=chosen.batch_size,
            documents=self.recipe.documents,  # type: ignore[arg-type]
            split="train",
            seed=self.recipe.seed + self.data_seeds[name],
        )

    def _align(self, settings: dict[str, Any]) -> StageRecord:
        start = "convert" if self.recipe.calibrate is None else "calibrate"
        return self._train("align", self._load(start), None)

    def _select(self, settings: dict[str, Any]) -> StageRecord:
        began, chosen = time.perf_counter(), SelectSettings(**settings)
        student = self._load("align")
        if chosen.tasks:
            size = {name: getattr(chosen, name) for name in ("length", "num_tokens", "batch_size")}
            batches = task_batches(task_shares(chosen.tasks, self.tokenizer), **size, seed=self.recipe.seed)
        else:
            batches = self._sample("select", chosen)
        selection = select_layers(
            student,
            self.teacher,
            batches,
            chosen.keep,
            strategy=chosen.strategy,
            budget_tokens=chosen.budget_tokens,
            progress=self.is_main,
        )
        selected, record = prepare_student(student, self.teacher, selection.kept_layers)
        record.metrics.update(self._metrics("select", time.perf_counter() - began, selected))
        record.tokens_seen = selection.tokens
        with shared_folder(self.folder / "select") as unfinished:
            if unfinished is not None:
                selection.to_json(unfinished / "selection.json")
                record.save(unfinished)
        return record

    def _distill(self, settings: dict[str, Any]) -> StageRecord:
        student, record = self._load("align"), StageRecord.load(self.folder / "align")
        if self.recipe.select is not None:
            selection = Selection.from_json(self.folder / "select" / "selection.json")
            student, record = prepare_student(student, self.teacher, selection.kept_layers)
        return self._train("distill", student, record)

    def _extend(self, settings: dict[str, Any]) -> StageRecord:
        return self._train("extend", self._load("distill"), None)

    def _load(self, name: str) -> LT2ForCausalLM:
        return LT2ForCausalLM.from_pretrained(str(self.folder / name), dtype=self.teacher.dtype)

    def _train(self, name: str, student: LT2ForCausalLM, previous: StageRecord | None) -> StageRecord:
        """Train a stage, with the teacher if its loss asks for it."""
        unasked = name == "extend" and not self.parts[name].get("kl_weight")
        teacher = None if unasked else self.teacher
        return self._train_stage(name, student, teacher, previous, documents=self.recipe.documents)

    def _teacher_accuracies(self) -> dict[str, float]:
        """Measure the teacher on the tasks, once a run."""
        file = self.folder / "teacher_tasks.json"
        if not file.is_file() and self.is_main:
            replace_file(file, json.dumps(accuracies(self.teacher, self.tasks)))
        self.processes.wait_for_everyone()
        return json.loads(file.read_text(encoding="utf-8"))

    def report(self) -> Report:
        """Collect the records of all finished stages."""
        config = self.teacher.config
        report = Report(
            title=f"{self.recipe.teacher}, made a linear-time hybrid",
            teacher={
                "name": self.recipe.teacher,
                "parameters": self.teacher.num_parameters(),
                "layers": config.num_hidden_layers,
                "loops": num_loops(self.teacher),
            },
            data=self.recipe.data,
        )
        trained = {"align": "aligned", "distill": "distilled", "extend": "extended"}
        adjectives = {"convert": "converted", "calibrate": "calibrated", **trained}
        for name in STAGES:
            record = StageRecord.load(self.folder / name)
            if record is None:
                continue
            report.student["kept_layers"] = record.kept_layers
            if (self.folder / name / CONFIG_NAME).is_file():
                report.student["mixers"] = LT2Config.from_pretrained(str(self.folder / name)).layer_mixers
            heldout = record.metrics.get("heldout")
            row: dict[str, Any] = {"stage": name, "tokens": record.tokens_seen, "seconds": record.metrics["seconds"]}
            if heldout:
                row["held-out KL"] = f"{heldout['kl']:.3f}"
                row["held-out perplexity"] = f"{heldout['perplexity']:.1f}"
                start = report.heldout_perplexity.get("converted")
                share = gap_closed(start, heldout["perplexity"], heldout["teacher_perplexity"]) if start else math.nan
                if not math.isnan(share):
                    row["gap closed"] = f"{share:.1%}"
                if name in adjectives:
                    report.add_heldout(adjectives[name], heldout)
            row.update({task: f"{value:.2f}" for task, value in record.metrics.get("tasks", {}).items()})
            report.stages.append(row)
            history = self.folder / name / "log_history.json"
            if history.is_file():
                report.losses[name] = loss_curve(json.loads(history.read_text(encoding="utf-8")))
        if self.tasks:
            teacher = ", ".join(f"{task} {value:.2f}" for task, value in self._teacher_accuracies().items())
            report.notes.append(f"Share of right answers on the tasks in the text, of the teacher: {teacher}.")
        if (self.folder / "select" / "selection.json").is_file():
            report.selection = Selection.from_json(self.folder / "select" / "selection.json")
        report.seconds = sum(row["seconds"] for row in report.stages)
        return report


def run(recipe: Recipe | str | Path, output_dir: str | Path) -> Report:
    """Run the stages of a recipe that are not done yet, and write `report.json` and `report.html`.

    Args:
        recipe (`Recipe`, `str` or `Path`): What to do, or its YAML file.
        output_dir (`str` or `Path`): Gets one folder a stage; see `RecipeRun`.

    Returns:
        `Report`: What was measured.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_yaml(recipe)
    return RecipeRun(recipe, output_dir).run()
