# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Train a small Ouro from nothing, from one YAML file: tokenizer, pre-training, exit gate, each resumable.

```yaml
data: offline
tokenizer: {vocab_size: 4096}
model: {hidden_size: 256, num_hidden_layers: 8, num_loops: 4}
tasks:
  - {task: recall, share: 0.1, length: 64}
pretrain: {target_tokens: 2_000_000, length: 512}
gate: {target_tokens: 50_000, length: 512}
```

A recipe that is run again skips the stages whose folder has a `stage.json` and resumes the one that was interrupted.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from loopergy.configuration.configuration_ouro import OuroConfig
from loopergy.conversion.config_fields import check_field_names
from loopergy.conversion.folders import replace_file
from loopergy.distill.pictures import draw_losses, to_svg
from loopergy.distill.pretrain import (
    GateConfig,
    GateTrainer,
    PretrainConfig,
    PretrainTrainer,
    check_loops,
    evaluate_loops,
)
from loopergy.distill.recipe_settings import EvaluateSettings, RecipeFile, naming, read_stage
from loopergy.distill.report import loss_curve
from loopergy.distill.stage import StageError, StageRecord
from loopergy.distill.staged_run import StagedRun
from loopergy.modeling.modeling_ouro import OuroForCausalLM
from loopergy.tasks.mixture import check_entries, task_shares
from loopergy.training.checks import check_least
from loopergy.training.fields import check_keys, differences, read_fields, read_part, read_value
from loopergy.training.new_tokenizer import documents_at_hand, train_tokenizer
from loopergy.training.processes import shared_folder

STAGES: dict[str, tuple[Any, Any]] = {"pretrain": (PretrainConfig, PretrainTrainer), "gate": (GateConfig, GateTrainer)}
REPORT_FILE, CURVE_FILE = "pretraining.json", "pretraining.svg"
# Beside a tokenizer that was trained here: on what.
TOKENIZER_FILE = "trained_on.json"
# The recipe's seed draws the weights and orders the data.
_BARRED = {"seed": "the recipe's own `seed` counts; set that"}


@dataclass
class Start:
    """How the weights begin, where a small model on a small budget wants other than Ouro's own scales.

    A normed branch adds a vector of the size of its norm's weight to the stream, twice a layer in every loop, and
    drowns embeddings of standard deviation `initializer_range`. Larger embeddings and smaller branches let a small
    model learn within minutes.

    Args:
        embedding_std (`float`): Standard deviation of the embeddings.
        branch_scale (`float`): Weight of the norms behind attention and MLP.

    Raises:
        ValueError: A value that is not a number, or a negative deviation.
    """

    embedding_std: float = field(default=1.0, metadata={"help": "Standard deviation of the embeddings."})
    branch_scale: float = field(default=0.35, metadata={"help": "Weight of the norms behind attention and MLP."})

    def __post_init__(self):
        read_fields(self)
        check_least("start", self, embedding_std=0)

    @torch.no_grad()
    def apply(self, model: OuroForCausalLM) -> None:
        """Set the weights of a fresh model."""
        model.model.embed_tokens.weight.normal_(0.0, self.embedding_std)
        for layer in model.model.layers:
            layer.input_layernorm_2.weight.fill_(self.branch_scale)  # type: ignore[union-attr, operator]
            layer.post_attention_layernorm_2.weight.fill_(self.branch_scale)  # type: ignore[union-attr, operator]


@dataclass
class PretrainRecipe(RecipeFile):
    """What to train on what.

    Args:
        pretrain (`dict`): Fields of `PretrainConfig`.
        data (`str`, defaults to `"offline"`): Source of text, see `loopergy.training.data`.
        tokenizer (`dict` or `str`): `{vocab_size: 4096}` trains one on the data; else a folder or Hub id.
        model (`dict`): Fields of `OuroConfig` over its smallest preset; the vocabulary comes from the tokenizer.
        start (`dict`, *optional*): Fields of [`Start`]; Ouro's own initialisation without it.
        tasks (`list[dict]`): `task` and `share` of the rows, `whole_rows`, and options of the task, see
            [`TextAndTasks`]. After training the accuracy on each is measured.
        gate (`dict`, *optional*): Fields of `GateConfig`; the gate is not trained alone without it.
        evaluate (`dict`): `num_tokens`, `length` and `batch_size` of the held-out text; 0 tokens: none.
        seed (`int`, defaults to 0): Of initialisation and data order.

    Raises:
        ValueError: An unknown key, or a value of another type, anywhere.
    """

    pretrain: dict[str, Any]
    data: str = "offline"
    tokenizer: dict[str, Any] | str = field(default_factory=lambda: {"vocab_size": 4096})
    model: dict[str, Any] = field(default_factory=dict)
    start: dict[str, float] | None = None
    tasks: list[dict[str, Any]] = field(default_factory=list)
    gate: dict[str, Any] | None = None
    evaluate: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        # What is null has the default; a gate or a start that is null is left out.
        self.tasks = [] if self.tasks is None else self.tasks
        self.evaluate = {} if self.evaluate is None else self.evaluate
        self.model = {} if self.model is None else self.model
        for name, (kind, _) in STAGES.items():
            if getattr(self, name) is not None or name == "pretrain":
                setattr(self, name, read_stage(name, getattr(self, name), kind, barred=_BARRED))
        for name, kind in (("start", Start), ("evaluate", EvaluateSettings)):
            if getattr(self, name) is not None:
                setattr(self, name, part := read_part(name, getattr(self, name), kind))
                kind(**part)
        read_fields(self)
        check_least("", self, seed=0)
        check_field_names(OuroConfig, self.model)
        if isinstance(self.tokenizer, Mapping):
            check_keys("tokenizer", self.tokenizer, ["vocab_size"])
            if "vocab_size" not in self.tokenizer:
                raise ValueError("tokenizer: `vocab_size` is missing; give it, or the name of a tokenizer.")
            vocab_size = read_value("tokenizer: `vocab_size`", self.tokenizer["vocab_size"], int)
            self.tokenizer = {"vocab_size": vocab_size}
        check_entries(self.tasks)


class PretrainRun(StagedRun):
    """Carry out a recipe in a folder.

    | below `output_dir`    | what                                                                          |
    |-----------------------|-------------------------------------------------------------------------------|
    | `tokenizer`           | the tokenizer, if it was trained here                                         |
    | `pretrain`, `gate`    | the finished stages: model, tokenizer, `stage.json`                           |
    | `checkpoints`         | the stage that is running                                                     |
    | `pretraining.json`    | held-out perplexity of each loop, exit shares, accuracy on the tasks, by stage |
    | `pretraining.svg`     | the learning curves                                                           |

    Args:
        recipe (`PretrainRecipe`): What to do.
        output_dir (`str` or `Path`): Where.
        on_stage (callable, *optional*): Called with name and record of every stage that is done, by the main process.
    """

    stages = tuple(STAGES)
    trainers = STAGES
    data_seeds = {"pretrain": 0, "gate": 1}
    row_limit = ("model", "`model.max_position_embeddings={length}`")
    config: OuroConfig

    def __init__(
        self,
        recipe: PretrainRecipe,
        output_dir: str | Path,
        on_stage: Callable[[str, StageRecord], None] = lambda name, record: None,
    ):
        super().__init__(recipe, output_dir, on_stage)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = self._tokenizer()
        self.config = self._config()
        self.tasks = task_shares(recipe.tasks, self.tokenizer)
        self.held_out = self._held_out()

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        asked = self.recipe.tokenizer
        if isinstance(asked, str):
            return AutoTokenizer.from_pretrained(asked)
        folder = self.folder / "tokenizer"
        missing = not (folder / "tokenizer_config.json").is_file()
        trained_on = {"data": self.recipe.data, "tokenizer": asked}
        if (folder / TOKENIZER_FILE).is_file():
            there = json.loads((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
            if changed := differences(there, trained_on):
                texts = [f"{name} was {old!r}, the recipe has {new!r}" for name, (old, new) in changed.items()]
                raise StageError(
                    f"The tokenizer in {folder} was trained with other settings: {'; '.join(texts)}. Restore them, or "
                    f"remove {self.folder} to begin anew, or give another output."
                )
        # No process writes before all have looked.
        self.processes.wait_for_everyone()
        if missing:
            trained = train_tokenizer(documents_at_hand(self.recipe.data), asked["vocab_size"])
            with shared_folder(folder) as unfinished:
                if unfinished is not None:
                    trained.save_pretrained(unfinished)
                    replace_file(unfinished / TOKENIZER_FILE, json.dumps(trained_on) + "\n")
        return AutoTokenizer.from_pretrained(str(folder))

    def _config(self) -> OuroConfig:
        """Return the config of the model, made for the tokenizer."""
        tokens = len(self.tokenizer)
        with naming("model"):
            config = OuroConfig.from_preset("tiny", **{"vocab_size": tokens, **self.recipe.model})
            if config.vocab_size < tokens:
                raise ValueError(
                    f"`vocab_size` must be at least {tokens}, the tokenizer's tokens, got {config.vocab_size}. Leave "
                    "it out, or give a smaller tokenizer."
                )
        return config

    def run(self) -> dict[str, Any]:
        """Run what is not done yet; return what `pretraining.json` holds."""
        self.run_stages()
        report = self.report()
        if self.is_main:
            replace_file(self.folder / REPORT_FILE, json.dumps(report, indent=1) + "\n")
            replace_file(self.folder / CURVE_FILE, to_svg(draw_losses(report["losses"])))
        return report

    def _settings(self, name: str) -> dict[str, Any]:
        names = ("data", "tokenizer", "model", "start", "tasks", "seed")
        return {**{each: getattr(self.recipe, each) for each in names}, **self.parts[name]}

    def _check_training(self, name: str, args: Any) -> None:
        super()._check_training(name, args)
        if name == "gate":
            check_loops(self.config.num_loops)
        self._check_rows(name, args.length)

    def _new_model(self) -> OuroForCausalLM:
        set_seed(self.recipe.seed)
        model = OuroForCausalLM(self._config())
        if self.recipe.start is not None:
            Start(**self.recipe.start).apply(model)
        return model

    def _perform(self, name: str) -> StageRecord:
        return self._train_stage(name, self._new_model() if name == "pretrain" else str(self.folder / "pretrain"))

    def _measure(self, model: PreTrainedModel) -> dict[str, Any]:
        return {} if self.held_out is None else {"loops": evaluate_loops(model, self.held_out)}

    def report(self) -> dict[str, Any]:
        """Collect the records of all finished stages: the losses of each, and what was measured on held-out text."""
        report: dict[str, Any] = {"data": self.recipe.data, "stages": [], "losses": {}}
        for name in STAGES:
            record = StageRecord.load(self.folder / name)
            if record is None:
                continue
            metrics = {key: record.metrics.get(key) for key in ("seconds", "loops", "tasks")}
            if metrics["loops"] is not None:
                report["stages"].append({"stage": name, "tokens": record.tokens_seen, **metrics})
            history = json.loads((self.folder / name / "log_history.json").read_text(encoding="utf-8"))
            report["losses"][name] = loss_curve(history)
        return report


def pretrain(recipe: PretrainRecipe | str | Path, output_dir: str | Path) -> Path:
    """Run the stages of a recipe that are not done yet, and return the folder of the model.

    Args:
        recipe (`PretrainRecipe`, `str` or `Path`): What to do, or its YAML file.
        output_dir (`str` or `Path`): Gets one folder a stage; see [`PretrainRun`].
    """
    recipe = recipe if isinstance(recipe, PretrainRecipe) else PretrainRecipe.from_yaml(recipe)
    job = PretrainRun(recipe, output_dir)
    job.run()
    return job.model_folder()
