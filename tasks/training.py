# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Train any causal language model on a task with `transformers.Trainer`.

    model = new_model("llama", task, hidden_size=64)
    history = train_on_task(model, task, TaskConfig("runs/recall", max_steps=1000, learning_rate=1e-3))

The folder of a run gets the checkpoints, at the end the model with its tokenizer, and last `history.json`. The same
call goes on from the last checkpoint of an interrupted run as if it had not been interrupted.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from loopergy.conversion.folders import replace_file
from loopergy.modeling.weight_decay import decays
from loopergy.tasks.task import Accuracy, Task, TokenLoss, device_of, evaluating
from loopergy.training.checks import check_arguments, check_finite
from loopergy.training.fields import HARMLESS
from loopergy.training.processes import LOCK_FILE, alone, join_processes
from loopergy.training.whole_checkpoints import WholeCheckpointsTrainer

HISTORY_FILE = "history.json"
RUN_FILE = "task_run.json"
# Settings that may differ between the two halves of an interrupted run.
_MAY_CHANGE = (*HARMLESS, "output_dir", "eval_steps", "eval_rows", "use_cpu")
# Settings of `TrainingArguments` that change nothing here, and what does.
_UNHEEDED = {"lr_scheduler_type": "decay", "lr_scheduler_kwargs": "decay", "num_train_epochs": "max_steps"}
DECAYS = ("geometric", "cosine", "constant")


@dataclass
class TaskConfig(TrainingArguments):
    """Settings of a training on a task: those of `TrainingArguments`, with other defaults, and a few more.

    Every field says in its `help` what it does; the command line prints that text.
    """

    output_dir: str = field(default="loopergy-task", metadata={"help": "Folder of the run."})
    max_steps: int = field(default=1000, metadata={"help": "Optimizer steps."})
    per_device_train_batch_size: int = field(default=64, metadata={"help": "Rows a step and device."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows at once in evaluation."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    decay: str = field(
        default="geometric",
        metadata={"help": "From learning_rate to its final share: geometric, cosine, or constant for no decay."},
    )
    final_learning_rate_share: float = field(
        default=0.1, metadata={"help": "The last learning rate as a share of the peak."}
    )
    weight_decay: float = field(
        default=0.1, metadata={"help": "Weight decay of matrices; norms, biases and decay parameters have none."}
    )
    adam_beta2: float = field(default=0.95, metadata={"help": "Second moment decay of AdamW."})
    eval_rows: int = field(default=256, metadata={"help": "Validation examples at each evaluation in training."})
    test_rows: int = field(default=1000, metadata={"help": "Test examples at the end."})
    stop_at: float | None = field(
        default=None, metadata={"help": "Stop when validation accuracy reaches this. None: train all steps."}
    )
    eval_strategy: str = field(default="steps", metadata={"help": "Evaluate every eval_steps steps, or no."})
    eval_steps: float | None = field(default=0.1, metadata={"help": "Steps, or a share of all steps."})
    logging_steps: float = field(default=0.05, metadata={"help": "Steps between logs, or a share of all steps."})
    save_steps: float = field(default=0.1, metadata={"help": "Steps between checkpoints, or a share of all steps."})
    save_total_limit: int | None = field(default=1, metadata={"help": "Checkpoints to keep."})
    report_to: str | list[str] | None = field(default="none", metadata={"help": "Trackers to report to."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Keep it False: rows are used whole."})
    include_num_input_tokens_seen: str | bool = field(default="all", metadata={"help": "Count tokens in the logs."})
    disable_tqdm: bool | None = field(default=True, metadata={"help": "Show no progress bar."})

    def __post_init__(self):
        check_arguments(self, max_steps=1, eval_rows=1, test_rows=1)
        if self.decay not in DECAYS:
            raise ValueError(f"`decay` must be one of {', '.join(DECAYS)}, got {self.decay!r}.")
        if not 0 < self.final_learning_rate_share <= 1:
            raise ValueError(
                f"`final_learning_rate_share` must be above 0 and at most 1, got {self.final_learning_rate_share}."
            )
        for name, instead in _UNHEEDED.items():
            if getattr(self, name) != TrainingArguments.__dataclass_fields__[name].default:
                raise ValueError(f"`{name}` changes nothing here, got {getattr(self, name)!r}: set `{instead}`.")
        join_processes()
        super().__post_init__()
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type != "cpu"


@dataclass
class History:
    """What a training on a task did.

    Args:
        task (`dict`): The task's name and options.
        model_type (`str`): Of the model's config.
        parameters (`int`): Parameters of the model.
        settings (`dict`): The fields of `TaskConfig` that were not left at their defaults.
        points (`list[dict]`): `step`, `tokens`, and of `loss`, `learning_rate`, `eval_loss`, `eval_accuracy` those
            that were measured there.
        test (`dict`): Metrics on the test split after the last step.
        steps (`int`, defaults to 0): Steps done; fewer than planned if `stop_at` was reached.
        seconds (`float`, defaults to 0.0): Wall time, that before an interruption included.
    """

    task: dict[str, Any]
    model_type: str
    parameters: int
    settings: dict[str, Any]
    points: list[dict[str, float]] = field(default_factory=list)
    test: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return (step, value) wherever `name` was measured."""
        return [(point["step"], point[name]) for point in self.points if name in point]

    def save(self, folder: str | Path) -> Path:
        """Write `history.json`, replaced in one step."""
        return _write_json(Path(folder) / HISTORY_FILE, asdict(self))

    @classmethod
    def load(cls, folder: str | Path) -> "History":
        """Read `history.json` of a folder."""
        return cls(**json.loads((Path(folder) / HISTORY_FILE).read_text(encoding="utf-8")))


def learning_rate_share(step: int, steps: int, warmup: int, decay: str, last: float) -> float:
    r"""Return the learning rate of a step as a share of the peak.

    Linear over the warm-up; then, with r from 0 to 1 over the rest, \(last^r\) (geometric),
    \(last + (1 - last)(1 + \cos \pi r) / 2\) (cosine), or 1 (constant).

    Args:
        step (`int`): From 0.
        steps (`int`): All steps.
        warmup (`int`): Steps of warm-up among them.
        decay (`str`): `"geometric"`, `"cosine"` or `"constant"`.
        last (`float`): Share at the end.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    r = min(1.0, (step - warmup) / max(1, steps - warmup))
    if decay == "geometric":
        return last**r
    if decay == "cosine":
        return last + (1 - last) * (1 + math.cos(math.pi * r)) / 2
    return 1.0


class TaskTrainer(WholeCheckpointsTrainer):
    """A `transformers.Trainer` that groups parameters, decays the learning rate and evaluates as a task says.

    Args:
        model (`PreTrainedModel`): Any causal language model with the task's vocabulary.
        task (`Task`): What to learn.
        args (`TaskConfig`): Settings.
        callbacks (sequence of `TrainerCallback`, *optional*): As in `Trainer`.
    """

    args: TaskConfig

    def __init__(
        self, model: PreTrainedModel, task: Task, args: TaskConfig, callbacks: Sequence[TrainerCallback] = ()
    ):
        for name in ("logging_steps", "eval_steps", "save_steps"):
            value = getattr(args, name)
            if value is not None and 0 < value < 1:
                # A share is made a number here: a resumed Trainer would warn that the two differ.
                setattr(args, name, math.ceil(value * args.max_steps))
        count = args.max_steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        super().__init__(
            model=model,
            args=args,
            data_collator=default_data_collator,
            train_dataset=task.rows("train", count, args.seed),
            eval_dataset=task.rows("validation", args.eval_rows, args.seed),
            processing_class=task.tokenizer,
            callbacks=list(callbacks),
        )
        self.remove_callback(PrinterCallback)
        self.task = task

    def take_up(self, checkpoint: str) -> None:
        """Take the weights, the state and the time of a checkpoint, without training."""
        _load_weights(self.model, checkpoint)  # type: ignore[arg-type]
        self.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
        self.read_progress(checkpoint)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that get weight decay; see [`decays`]."""
        return [name for name, parameter in model.named_parameters() if decays(name, parameter)]

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """Make the schedule of `learning_rate_share`."""
        if self.lr_scheduler is None:
            warmup, args = self.args.get_warmup_steps(num_training_steps), self.args
            self.lr_scheduler = LambdaLR(
                optimizer or self.optimizer,  # type: ignore[arg-type]
                lambda step: learning_rate_share(
                    step, num_training_steps, warmup, args.decay, args.final_learning_rate_share
                ),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler  # type: ignore[return-value]

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure the task on its validation split, log it, and stop the training if `stop_at` is reached."""
        where = {"count": self.args.eval_rows, "batch_size": self.args.per_device_eval_batch_size}
        metrics = measure(self.model, self.task, "validation", **where)  # type: ignore[arg-type]
        logged = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(logged)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
        if self.args.stop_at is not None and metrics.get("accuracy", -math.inf) >= self.args.stop_at:
            self.control.should_training_stop = True
        return logged


def measure(model: nn.Module, task: Task, split: Any, count: int, batch_size: int) -> dict[str, float]:
    """Return a task's metrics: its `loss`, and `accuracy` where it has one."""
    result: Accuracy | TokenLoss = task.evaluate(model, split, count, batch_size)
    metrics = result.metrics()
    return metrics if "loss" in metrics else {**metrics, **task.loss(model, split, count, batch_size).metrics()}


def train_on_task(
    model: PreTrainedModel, task: Task, args: TaskConfig, callbacks: Sequence[TrainerCallback] = ()
) -> History:
    """Train a model on a task, or go on where an interrupted run in `args.output_dir` stopped.

    A run that is done is not done again: the model gets its weights. On many processes each trains on its own rows.

    Args:
        model (`PreTrainedModel`): Any causal language model; trained in place.
        task (`Task`): What to learn.
        args (`TaskConfig`): Settings; `args.seed` fixes rows and dropout.
        callbacks (sequence of `TrainerCallback`, *optional*): As in `Trainer`.

    Returns:
        `History`: Also written to `history.json`, beside the trained model and its tokenizer.

    Raises:
        ValueError: A model that is not causal, or whose vocabulary or context is too small for the task; a task of
            too few sequences; a folder that holds something else, or that another run writes to; weights that are not
            finite after the training.
    """
    check_fits(model, task)
    task.check_splits(args.seed)
    folder, processes = Path(args.output_dir), join_processes()
    _check_folder(folder)
    # No process writes before all have looked.
    processes.wait_for_everyone()
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder, processes.is_main_process):
        settings = _claim_folder(folder, model, task, args)
        processes.wait_for_everyone()
        if is_finished(folder):
            _load_weights(model, folder)
            return History.load(folder)
        return _train(TaskTrainer(model, task, args, callbacks), settings)


def _train(trainer: TaskTrainer, settings: dict[str, Any]) -> History:
    """Train, from the last checkpoint if there is one; write the model, then its history."""
    model: Any = trainer.model
    task, args, folder = trainer.task, trainer.args, Path(str(trainer.args.output_dir))
    last = get_last_checkpoint(str(folder))
    if last is not None and _has_stopped(last, args.stop_at):
        trainer.take_up(last)
    else:
        trainer.train(resume_from_checkpoint=last)
    check_finite(model, trainer.accelerator, str(folder))
    trainer.save_model(str(folder))
    history = History(
        task=task.options(),
        model_type=str(model.config.model_type),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        settings=settings,
        points=_points(trainer.state.log_history),
        test=measure(model, task, "test", args.test_rows, args.per_device_eval_batch_size),
        steps=trainer.state.global_step,
        seconds=round(trainer.seconds, 2),
    )
    if trainer.is_world_process_zero():
        history.save(folder)
    return history


def train_curriculum(
    model: PreTrainedModel, stages: Sequence[Task], args: TaskConfig, target: float = 0.9
) -> list[History]:
    """Train on one task after the other; the next begins when validation accuracy reaches `target`.

    The same call goes on with an interrupted curriculum.

    Args:
        model (`PreTrainedModel`): Trained in place.
        stages (sequence of `Task`): Rising in difficulty, with one vocabulary, such as `SwapRecall().stages()`.
        args (`TaskConfig`): Settings of every stage; stage i has the folder `stage-i` in `output_dir`.
        target (`float`, defaults to 0.9): Accuracy to reach within `max_steps` of each stage.

    Returns:
        `list[History]`: One a stage that was begun; all but the last, and perhaps the last too, reached the target.

    Source: the curriculum of LT2, arXiv 2605.20670: stages of 8 to 256, accuracy 0.9, at most 100,000 steps each.
    """
    histories = []
    for number, task in enumerate(stages, start=1):
        folder = str(Path(args.output_dir) / f"stage-{number}")
        stage = replace(args, output_dir=folder, stop_at=target)
        histories.append(train_on_task(model, task, stage))
        reached = [value for _, value in histories[-1].curve("eval_accuracy")]
        if not reached or reached[-1] < target:
            break
    return histories


def check_fits(model: PreTrainedModel, task: Task) -> None:
    """Raise `ValueError` if a model is not causal, or its vocabulary or context is too small for a task."""
    config = model.config.get_text_config()
    if config.vocab_size < len(task.tokenizer):
        raise ValueError(
            f"Task {task.name!r} has {len(task.tokenizer)} tokens, the model's `vocab_size` is {config.vocab_size}. "
            f"Make the model with `vocab_size={len(task.tokenizer)}`."
        )
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and context < task.row_length:
        raise ValueError(
            f"Rows of task {task.name!r} have {task.row_length} tokens, but the model's `max_position_embeddings` is "
            f"{context}. Make the rows shorter or the model's context longer."
        )
    ids = torch.arange(min(16, task.row_length), device=device_of(model)).repeat(2, 1) % config.vocab_size
    ids[1, -1] = (ids[1, -1] + 1) % config.vocab_size
    with evaluating(model):
        one, other = model(input_ids=ids).logits[:, :-1]
    if one.numel() and float((one - other).abs().max()) > 1e-4 * float(one.abs().max()):
        raise ValueError(
            f"This {type(model).__name__} is not causal: its predictions change with later tokens. Give a model that "
            "reads from left to right, such as 'llama', or a field that makes it so, such as is_decoder=true."
        )


def is_finished(folder: str | Path) -> bool:
    """Say whether a folder holds a run that is done: its history, and the weights that it is of."""
    return (Path(folder) / HISTORY_FILE).is_file() and any(Path(folder).glob("model*.safetensors"))


def _has_stopped(checkpoint: str, stop_at: float | None) -> bool:
    """Say whether a run had reached its accuracy when it wrote a checkpoint."""
    history = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME)).log_history
    reached = [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry]
    return stop_at is not None and bool(reached) and reached[-1] >= stop_at


def _load_weights(model: PreTrainedModel, folder: str | Path) -> None:
    kind: Any = type(model)
    model.load_state_dict(kind.from_pretrained(folder, dtype=model.dtype).state_dict())


def _check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than a run."""
    held = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if held - {LOCK_FILE} and RUN_FILE not in held:
        raise ValueError(f"{folder} holds something and no {RUN_FILE}: it is no run of a task. Give another folder.")


def _claim_folder(folder: Path, model: PreTrainedModel, task: Task, args: TaskConfig) -> dict[str, Any]:
    """Write what the run is, or make sure that the run in the folder is this one; return the settings."""
    plain = TaskConfig()
    named = [f.name for f in fields(TaskConfig) if f.init and getattr(args, f.name) != getattr(plain, f.name)]
    settings = json.loads(json.dumps({name: getattr(args, name) for name in named}, default=str))
    shape = {"model_type": model.config.model_type, "shapes": [list(p.shape) for p in model.parameters()]}
    kept = {name: value for name, value in settings.items() if name not in _MAY_CHANGE}
    run = {"task": json.loads(json.dumps(task.options())), "settings": kept, "model": shape}
    file = folder / RUN_FILE
    if file.is_file():
        there = json.loads(file.read_text(encoding="utf-8"))
        other = sorted(key for key in run if there.get(key) != run[key])
        if other:
            raise ValueError(
                f"{folder} holds a run with different {' and '.join(other)}: {[there.get(key) for key in other]}, not "
                f"{[run[key] for key in other]}. Give another folder, or remove this one."
            )
    elif args.process_index == 0:
        _write_json(file, run)
    return settings


def task_of_run(folder: str | Path) -> dict[str, Any] | None:
    """Return name (under `"task"`) and options of the task that a folder's run trains on; None if it is no run."""
    file = Path(folder) / RUN_FILE
    return json.loads(file.read_text(encoding="utf-8"))["task"] if file.is_file() else None


def _points(log_history: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Keep of a trainer's log what a curve needs, one point a step."""
    points: dict[int, dict[str, float]] = {}
    for entry in log_history:
        point = points.setdefault(entry["step"], {"step": entry["step"]})
        if "num_input_tokens_seen" in entry:
            point["tokens"] = entry["num_input_tokens_seen"]
        for name in ("loss", "learning_rate", "grad_norm", "eval_loss", "eval_accuracy"):
            # JSON has no NaN or infinity, such as the norm of a step that float16 skipped.
            if name in entry and math.isfinite(entry[name]):
                point[name] = float(entry[name])
    return [points[step] for step in sorted(points) if len(points[step]) > 2]


def _write_json(file: Path, content: Any) -> Path:
    return replace_file(file, json.dumps(content, indent=1, allow_nan=False) + "\n")
