# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What all training stages share: settings, trainer, checkpoints, and the record that ties them together.

A stage is a `StageModule`: it holds the student, which learns, and its `forward` maps a batch to a loss. All else is
`transformers.Trainer`. As the loss is computed inside the wrapped module's forward, data parallel training sees every
gradient, and the loss, divided by `num_items_in_batch`, does not depend on how a step is cut.

The teacher is held outside the module tree: it is in no optimizer, no checkpoint and no gradient reduction.

A finished stage is a folder that `from_pretrained` loads, with `stage.json` beside the weights. The next stage reads
it and refuses to start from anything else.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.conversion.folders import replace_file
from loopergy.distill.adapters import load_weights
from loopergy.distill.losses import shift_targets
from loopergy.distill.teacher import resolve_teacher
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.modeling.weight_decay import decays
from loopergy.training.checks import check_arguments, check_finite, check_row_length, warn_of_rounding
from loopergy.training.data import IGNORE, LanguageModelCollator
from loopergy.training.processes import check_sharding, shared_folder
from loopergy.training.whole_checkpoints import WholeCheckpointsTrainer

STAGE_FILE = "stage.json"
DATA_STATE_FILE = "data_state.json"
# Fields of a config that say nothing about what the weights compute.
_NOT_HASHED = ("transformers_version", "architectures", "dtype", "use_cache", "_name_or_path", "auto_map")
_NOT_HASHED += ("max_position_embeddings",)


class StageError(ValueError):
    """Raised when a stage is started from something that is not the stage before it."""


def config_hash(config: PreTrainedConfig) -> str:
    """Return 16 hexadecimal digits that change whenever the architecture does, the kept layers included."""
    fields = {key: value for key, value in config.to_dict().items() if key not in _NOT_HASHED}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def kept_layers(config: PreTrainedConfig) -> list[int]:
    """Return the physical layers with full attention, in all loops; all layers of a model that has no other mixer."""
    mixers = getattr(config, "layer_mixers", None) or ["full"] * config.num_hidden_layers
    return [layer for layer, mixer in enumerate(mixers) if mixer == "full"]


def indexer_parameters(student: LT2ForCausalLM) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of the indexers of `dsa` layers, which no loss reaches but their own."""
    for index, mixer in enumerate(student.config.layer_mixers):
        if mixer == "dsa":
            sparse: nn.Module = student.model.layers[index].self_attn  # type: ignore[assignment]
            yield from (parameter for name, parameter in sparse.named_parameters() if "_score_" in name)


@dataclass
class StageRecord:
    """What a finished stage leaves beside its weights.

    Args:
        stage (`str`): `"pretrain"` or `"gate"` for a teacher of our own; `"convert"`, `"align"`, `"select"`,
            `"distill"` or `"extend"`.
        kept_layers (`list[int]`): Physical layers with full attention.
        config_hash (`str`): `config_hash` of the student.
        tokens_seen (`int`, defaults to 0): Tokens this stage trained on.
        parent (`dict`, *optional*): The record of the stage before, so that a folder tells its whole history.
        metrics (`dict`): Numbers worth keeping, such as the final loss.
    """

    stage: str
    kept_layers: list[int]
    config_hash: str
    tokens_seen: int = 0
    parent: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, stage: str, config: PreTrainedConfig, parent: "StageRecord | None" = None, **fields: Any) -> Self:
        """Describe a student as it is now."""
        ancestor = asdict(parent) if parent is not None else None
        return cls(stage, kept_layers(config), config_hash(config), parent=ancestor, **fields)

    @classmethod
    def load(cls, folder: str | Path) -> "StageRecord | None":
        """Read the record of a folder; None if it has none."""
        file = Path(folder) / STAGE_FILE
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    def save(self, folder: str | Path) -> None:
        """Write the record, replacing an old one in one step."""
        replace_file(Path(folder) / STAGE_FILE, json.dumps(asdict(self), indent=2) + "\n")


def check_previous(
    record: StageRecord | None, student: LT2Config, allowed: tuple[str, ...], stage: str
) -> StageRecord:
    """Return the record of the stage before, or say why the student cannot enter this stage.

    Args:
        record (`StageRecord`, *optional*): What the student came with.
        student (`LT2Config`): The student's config.
        allowed (`tuple[str]`): Stages that may come before.
        stage (`str`): The stage to start.

    Raises:
        StageError: No record, the wrong stage, or another config than recorded; the text lists the differences.
    """
    expected = " or ".join(repr(name) for name in allowed)
    if record is None:
        raise StageError(
            f"Stage {stage!r} continues from stage {expected}, but the student has no {STAGE_FILE}: its weights may "
            f"be fresh. Pass the folder of that stage as `model`, or its record as `previous`, or set "
            f"`require_previous=False` to start from these weights on purpose."
        )
    if record.stage not in allowed:
        raise StageError(f"Stage {stage!r} continues from stage {expected}, but the student is of {record.stage!r}.")
    now, before = set(kept_layers(student)), set(record.kept_layers)
    if now != before:
        raise StageError(
            f"The student does not have the full-attention layers of its {STAGE_FILE}: only in the student "
            f"{sorted(now - before)}, only in the record {sorted(before - now)}."
        )
    if record.config_hash != config_hash(student):
        raise StageError(
            f"The student's config has changed since stage {record.stage!r} (hash {config_hash(student)}, recorded "
            f"{record.config_hash}), with the same full-attention layers {sorted(now)}. Load the folder as saved."
        )
    return record


@dataclass
class StageConfig(TrainingArguments):
    """Settings of a training stage: those of `TrainingArguments`, with other defaults, and a few more.

    Every field says in its `help` what it does; the command line prints that text.
    """

    output_dir: str = field(default="loopergy-stage", metadata={"help": "Folder for checkpoints."})
    target_tokens: int | None = field(
        default=None, metadata={"help": "Train on this many tokens; sets max_steps from the batch size and length."}
    )
    length: int = field(default=512, metadata={"help": "Tokens in a row of the packed data."})
    body_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Learning rate of everything outside the mixers. None: learning_rate for all."},
    )
    require_previous: bool = field(
        default=True, metadata={"help": "Refuse to start from weights without the stage.json of the stage before."}
    )
    loss_chunk_size: int | None = field(
        default=None, metadata={"help": "Tokens a chunk of logits in the loss. None: chosen by vocabulary and device."}
    )
    max_steps: int = field(default=-1, metadata={"help": "Optimizer steps; target_tokens sets it."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Second moment decay of AdamW."})
    weight_decay: float = field(
        default=0.01, metadata={"help": "Weight decay of matrices; norms, biases and decay parameters have none."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Log every so many steps."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Log a loss that is not finite as the mean of the others; 0.0 if none is."}
    )
    report_to: str | list[str] | None = field(default="none", metadata={"help": "Trackers to report to."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Keep it False: packing arguments must reach the mixers."}
    )
    prediction_loss_only: bool = field(default=True, metadata={"help": "Evaluation returns the loss, never logits."})
    include_num_input_tokens_seen: str | bool = field(
        default="all", metadata={"help": "Count tokens; gives tokens per second in the logs."}
    )

    def __post_init__(self):
        check_arguments(self, length=2, target_tokens=1, body_learning_rate=0, loss_chunk_size=1)
        # transformers trains in bfloat16 on a CPU only if this is set.
        self.use_cpu = self.use_cpu or (self.bf16 and not torch.accelerator.is_available())
        super().__post_init__()
        # Pinned memory without an accelerator is a warning and nothing else.
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type != "cpu"
        if self.target_tokens is not None:
            if self.max_steps > 0:
                raise ValueError(
                    f"Give `target_tokens` or `max_steps`, not both ({self.target_tokens}, {self.max_steps})."
                )
            self.max_steps = math.ceil(self.target_tokens / (self.rows_per_step * self.length))
        # A short run logs the loss of all its steps.
        if self.max_steps > 0:
            self.logging_steps = min(self.logging_steps, self.max_steps)

    @property
    def rows_per_step(self) -> int:
        """Rows of data in one optimizer step, over all processes."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.world_size


class StageModule(nn.Module):
    """Hold the student and compute a stage's loss in `forward`.

    Args:
        student (`LT2ForCausalLM`): Trained in place.
        teacher (`PreTrainedModel`, *optional*): Frozen; not a submodule.
    """

    # Trainer counts targets as this loss does: at positions 1.. of `labels`, over the whole step and all processes.
    loss_type = "ForCausalLM"
    accepts_loss_kwargs = True

    def __init__(self, student: LT2ForCausalLM, teacher: PreTrainedModel | None = None):
        super().__init__()
        self.student = student
        # What accelerate shards as one unit.
        self._no_split_modules = student._no_split_modules
        self._outside = (teacher,)

    @property
    def teacher(self) -> PreTrainedModel:
        """The frozen teacher."""
        if self._outside[0] is None:
            raise ValueError(f"{type(self).__name__} was built without a teacher.")
        return self._outside[0]

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Recompute the student's layers in the backward pass."""
        self.student.activation_checkpointing_enable(**options)

    def check_length(self, input_ids: torch.Tensor) -> None:
        """Refuse rows longer than the student's config declares."""
        check_row_length(input_ids.shape[1], self.student.config.max_position_embeddings)


def batch_targets(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the token each position of a batch must predict, -100 for none.

    Args:
        batch (mapping): `input_ids` `[batch, length]` and, optionally, `labels` and `attention_mask`. Without labels
            every token is a target.

    Returns:
        `torch.Tensor` of shape `[batch, length]`; a pad neither is a target nor has one.
    """
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    targets = shift_targets(batch["input_ids"] if labels is None else labels)
    if mask is None:
        return targets
    real = (mask != 0) & (nn.functional.pad(mask[:, 1:], (0, 1)) != 0)
    return targets.masked_fill(~real, IGNORE)


class StageTrainer(WholeCheckpointsTrainer):
    """Train one stage; a `transformers.Trainer` that saves the student alone and resumes its data.

    Args:
        model (`LT2ForCausalLM` or `str`): The student, or the folder of the stage before.
        teacher (`PreTrainedModel`, `str` or None): What `resolve_teacher` takes.
        args (`StageConfig`): Settings.
        train_dataset: Usually a `PackedDataset`; with it a resumed run starts at the very next row.
        eval_dataset: As in `Trainer`.
        processing_class (`PreTrainedTokenizerBase`, *optional*): Saved beside the weights.
        data_collator (callable, *optional*): Default: `LanguageModelCollator`.
        previous (`StageRecord` or `str`, *optional*): Record, or folder, of the stage before. Default: that of the
            folder the student was loaded from.
        callbacks (`list[TrainerCallback]`, *optional*): As in `Trainer`.

    Raises:
        StageError: The student does not come from the stage before.
    """

    stage = ""
    allowed_previous: tuple[str, ...] = ()
    args: StageConfig

    def __init__(
        self,
        model: LT2ForCausalLM | str | Path,
        teacher: PreTrainedModel | str | Path | None,
        args: StageConfig,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        data_collator: Any = None,
        previous: StageRecord | str | Path | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ):
        student: Any = model if isinstance(model, nn.Module) else AutoModelForCausalLM.from_pretrained(str(model))
        if previous is None:
            previous = StageRecord.load(student.name_or_path) if student.name_or_path else None
        elif not isinstance(previous, StageRecord):
            previous = StageRecord.load(previous)
        if args.require_previous and self.allowed_previous:
            check_previous(previous, student.config, self.allowed_previous, self.stage)
        self.previous = previous
        if teacher is not None:
            teacher = resolve_teacher(teacher, device=args.device)
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs are visible to one process. Start one process a GPU with `accelerate launch`, or "
                f"set CUDA_VISIBLE_DEVICES to one."
            )
        pad = student.config.pad_token_id
        super().__init__(
            model=self.build_module(student, teacher, args),
            args=args,
            data_collator=data_collator or LanguageModelCollator(pad if isinstance(pad, int) else 0),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
        self.student = student
        check_sharding(self.accelerator, student)
        warn_of_rounding(student)
        self._rows_before, self._step_before = 0, 0
        self._resumed_from: str | None = None

    def build_module(self, student: LT2ForCausalLM, teacher: PreTrainedModel | None, args: StageConfig) -> StageModule:
        """Build the module whose forward is the stage's loss, with the right parameters frozen."""
        raise NotImplementedError(f"{type(self).__name__} must build the module whose forward is its loss")

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Group parameters by learning rate (mixers, body) and weight decay (matrices only)."""
        if self.optimizer is None:
            module: Any = model if model is not None else self.model
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, module)
            self.optimizer = optimizer_class(self.parameter_groups(module), **options)
        return self.optimizer

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the optimizer's groups; parameters of `self_attn` are the mixers', kept layers included.

        [`decays`] says which get weight decay.
        """
        body = self.args.body_learning_rate
        rates = {True: self.args.learning_rate, False: self.args.learning_rate if body is None else body}
        groups = {
            (mixer, decayed): {"params": [], "lr": rates[mixer], "weight_decay": self.args.weight_decay * decayed}
            for mixer in (True, False)
            for decayed in (True, False)
        }
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                groups["self_attn" in name, decays(name, parameter)]["params"].append(parameter)
        return [group for group in groups.values() if group["params"]]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as Trainer does, and add tokens per second and the seconds that are left."""
        super().log(logs, start_time)
        done = self.state.global_step - self._step_before
        if start_time is not None and done > 0 and "train_runtime" in logs:
            left = self.state.max_steps - self.state.global_step
            logs["eta_seconds"] = round(logs["train_runtime"] / done * left, 1)
            self.state.log_history[-1]["eta_seconds"] = logs["eta_seconds"]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        folder = output_dir if output_dir is not None else self.args.output_dir
        if state_dict is not None:
            named = {name.removeprefix("student."): tensor for name, tensor in state_dict.items()}
            # Gathered from shards, tied weights are no longer one tensor: write the one that the others are tied to.
            state_dict = {name: t for name, t in named.items() if name not in self.student.all_tied_weights_keys}
        if not self.args.should_save:
            return
        self.student.save_pretrained(folder, state_dict=state_dict)
        if isinstance(self.processing_class, PreTrainedTokenizerBase):
            self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        pair: Any = type(self.student).from_pretrained(
            resume_from_checkpoint, dtype=self.student.dtype, output_loading_info=True
        )
        loaded, info = pair
        wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys") if info[kind]}
        if wrong or config_hash(loaded.config) != config_hash(self.student.config):
            raise StageError(f"Checkpoint {resume_from_checkpoint!r} is not of this student: {wrong or 'config'}.")
        load_weights(self.student, loaded.state_dict(), resume_from_checkpoint)

    def add_to_checkpoint(self, folder: Path) -> None:
        """Write where the data go on, and of which texts they are."""
        state, data = {}, self.train_dataset
        if hasattr(data, "state_dict") and self.args.dataloader_num_workers == 0:
            steps = self.state.global_step - self._step_before
            state = data.state_dict(self._rows_before + steps * self.args.rows_per_step)  # type: ignore[union-attr]
        if hasattr(data, "texts_hash"):
            state = {**state, "texts": data.texts_hash}  # type: ignore[union-attr]
        if state:
            (folder / DATA_STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def _take_up_data(self, checkpoint: Path) -> None:
        """Set the data to the row after a checkpoint, if both can tell it; other data are read up to there."""
        file, data = checkpoint / DATA_STATE_FILE, self.train_dataset
        state = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if state.get("texts", there := getattr(data, "texts_hash", None)) != there:
            raise StageError(
                f"The texts are not those that {checkpoint} was trained on: their hash was {state['texts'][:16]}, it "
                f"is {str(there)[:16]}. Restore them to go on, or remove {checkpoint.parent} to begin the stage anew."
            )
        if "rows" in state and hasattr(data, "load_state_dict"):
            data.load_state_dict(state)  # type: ignore[union-attr]
            progress = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            self._rows_before, self._step_before = state["rows"], progress["global_step"]
            self.args.ignore_data_skip = True

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; with `resume_from_checkpoint=True` or a checkpoint's folder, go on as if never interrupted.

        Data with a `state_dict` (`PackedDataset`) are set to the next row; other data are read up to there.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no checkpoint in {self.args.output_dir!r} to resume from.")
        skip_before = self.args.ignore_data_skip
        if resume_from_checkpoint:
            self._resumed_from = str(resume_from_checkpoint)
            self._take_up_data(Path(str(resume_from_checkpoint)))
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.ignore_data_skip = skip_before

    def train_or_resume(self) -> Any:
        """Train, from the last checkpoint in `output_dir` if an interrupted run left one."""
        folder = Path(self.args.output_dir)
        last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        return self.train(resume_from_checkpoint=last)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of a step; after a resume, set the random state again, which starting a loader moves."""
        samples = super().get_batch_samples(*args, **kwargs)
        if self._resumed_from is not None:
            self._load_rng_state(self._resumed_from)
            self._resumed_from = None
        return samples

    def record(self, metrics: Mapping[str, Any] | None = None) -> StageRecord:
        """Describe the student as this stage leaves it."""
        tokens = int(self.state.num_input_tokens_seen)
        return StageRecord.of(
            self.stage, self.student.config, self.previous, tokens_seen=tokens, metrics=dict(metrics or {})
        )

    def save_stage(self, folder: str | Path, metrics: Mapping[str, Any] | None = None) -> StageRecord:
        """Write student, tokenizer and `stage.json`, the whole folder or nothing.

        Args:
            folder (`str` or `Path`): Where to; replaced if it holds something.
            metrics (mapping, *optional*): Numbers to keep in the record.

        Returns:
            `StageRecord`: What was written, and what the next stage wants as `previous`.

        Raises:
            ValueError: Trained weights that are not finite; nothing is written.
        """
        check_finite(self.student, self.accelerator, str(self.args.output_dir))
        record = self.record(metrics)
        with shared_folder(folder) as unfinished:
            # All processes: sharded weights are gathered. The main one writes.
            self.save_model(str(unfinished or folder), _internal_call=True)
            if unfinished is not None:
                record.save(unfinished)
                history = json.dumps(self.state.log_history, indent=1)
                (unfinished / "log_history.json").write_text(history, encoding="utf-8")
        return record
