# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Measure a causal language model with lm-eval: its tasks by name, your own from local files.

A task is a name of lm-eval (`mmlu`, `arc_easy`, `mmlu_*`), an lm-eval `.yaml` file, a `.jsonl` file, or a folder of
`.jsonl` files. The fields of a JSONL file's rows say what is measured; context and answer are joined by one space:

| fields                         | what is measured                                     | metrics              |
|--------------------------------|------------------------------------------------------|----------------------|
| `text`                         | how likely the text is                               | perplexities, bits   |
| `context`, `continuation`      | is the continuation the greedy one; how likely is it | `acc`, `perplexity`  |
| `context`, `choices`, `answer` | is `choices[answer]` the likeliest choice            | `acc`, `acc_norm`    |

Results are written to the folder `evaluation` beside the weights, one file a run, where the model card finds them.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from loopergy.conversion.folders import replace_file, saved_tokenizer
from loopergy.conversion.public_names import public_name
from loopergy.conversion.whole_loading import checked_dtype
from loopergy.evaluation_tasks import load_tasks
from loopergy.loading import check_run_options, check_whole, checked_device, found_model
from loopergy.tasks.vocabulary import encode, lacks_a_word

RESULTS_FOLDER = "evaluation"


@dataclass
class Evaluation:
    """What a model scored.

    Args:
        model (`str`): Hub id, or the name of the folder (not where it is).
        tasks (`dict`): Task or group to `metrics` and `stderr` (by metric), `higher_is_better`, `examples` measured
            and `of` how many, `few_shot`, `version`, `dataset` (`id`, `config`, `split`, `revision` on the Hub, or
            `file` and `sha256`), and for a group its `members`.
        settings (`dict`): How it was measured; what was left at its default and says nothing is not in it.
        versions (`dict`): Libraries.
        date (`str`): ISO 8601, UTC, when it ended.
        seconds (`float`): Wall time, loading included.
    """

    model: str
    tasks: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    versions: dict[str, str]
    date: str
    seconds: float

    def top_tasks(self) -> list[str]:
        """Return the tasks and groups that are not members of another one."""
        inside = {member for entry in self.tasks.values() for member in entry.get("members", ())}
        return [name for name in self.tasks if name not in inside]

    def lines(self) -> list[str]:
        """Return what to print: a line for each metric of each task."""
        width = max((len(name) for name in self.tasks), default=0)
        rows = []
        for name, entry in self.tasks.items():
            part = "" if entry["examples"] == entry["of"] else f", the first {entry['examples']:,}"
            for metric, value in entry["metrics"].items():
                error = entry["stderr"].get(metric)
                sure = "" if error is None else f" ± {error:.4f}"
                rows.append(f"{name:<{width}}  {metric:<18} {value:.4f}{sure}   {entry['of']:,} examples{part}")
        return rows

    def file_name(self) -> str:
        """Return a file name that tells tasks and settings: another run with the same ones replaces it."""
        words = ["+".join(self.top_tasks())[:80]]
        shown = ("limit", "num_fewshot", "num_loops", "num_steps", "apply_chat_template")
        words += [f"{name}={self.settings[name]}" for name in shown if name in self.settings]
        return re.sub(r"[^\w.+=-]", "-", "-".join(words)) + ".json"

    def save(self, file: str | Path) -> Path:
        """Write everything as JSON, replacing an old file in one step."""
        return replace_file(file, json.dumps({"format": 1, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> "Evaluation":
        """Read what `save` wrote.

        Raises:
            ValueError: For a file of another kind or format.
        """
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.pop("format", None) != 1:
            raise ValueError(f"{file} is no result of `loopergy eval` in a format that this version reads (1)")
        tasks = values.get("tasks")
        if not isinstance(tasks, dict) or not all(isinstance(entry, dict) for entry in tasks.values()):
            raise ValueError(f"{file}: `tasks` must hold the results by task, got {tasks!r}")
        return cls(**values)


def evaluate(
    model: Any,
    tasks: str | Sequence[str],
    *,
    tokenizer: Any = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    num_loops: int | None = None,
    num_steps: int | None = None,
    apply_chat_template: bool = False,
    include_path: str | Path | None = None,
    dtype: str | None = None,
    device: str | None = None,
) -> Evaluation | None:
    """Measure a model on tasks of lm-eval or on local files.

    Names and files are checked, and all data fetched, before the model is loaded. Likelihoods do not depend on the
    batch size (up to rounding): rows are padded on the right, where no position that counts looks. What does not fit
    into the model's `max_position_embeddings` is cut on the left.

    Args:
        model: Folder or Hub id of any causal language model, or one in memory.
        tasks (`str` or sequence of `str`): See the head of this file.
        tokenizer (*optional*): For a model in memory; by default the one it was loaded with.
        limit (`int` or share below 1, *optional*): Only the first examples of each task.
        num_fewshot (`int`, *optional*): Solved examples in front of each question; by default the task's.
        batch_size (`int`): Rows at once.
        num_loops, num_steps (`int`, *optional*): Loops (Ouro, LT2) or steps (CEM-Llama, NRGPT) to run; by default the
            config's. For a model in memory, load it with them.
        apply_chat_template (`bool`): Ask as the user of a chat.
        include_path (*optional*): Folder of further lm-eval YAML tasks.
        dtype (`str`, *optional*): Type to load the weights in; by default the one they have.
        device (`str`, *optional*): `"cpu"`, `"cuda"`, ...; by default a GPU if there is one.

    Returns:
        [`Evaluation`], not yet saved; None in all processes but the first of a distributed run.

    Raises:
        ImportError: Without lm-eval.
        ValueError: For an unknown task, a file that is no task, a model without a usable tokenizer, loops or steps
            that the model does not have, a dtype or device that cannot be used, a checkpoint with other tensors than
            its config describes, or words that the tokenizer does not have.
        FileNotFoundError: For a model that is neither here nor on the Hub.
        OSError: For data that cannot be fetched.
    """
    if find_spec("lm_eval") is None:
        raise ImportError('Evaluation needs lm-eval: pip install "loopergy[eval]"')

    began = time.perf_counter()
    limit = _checked_limit(limit)
    run = {name: value for name, value in (("num_loops", num_loops), ("num_steps", num_steps)) if value is not None}
    if isinstance(model, str | Path):
        model = found_model(model)
        check_run_options(model, num_loops, num_steps)
        checked_dtype(dtype)
        checked_device(device)
    names = [name.strip() for name in (tasks.split(",") if isinstance(tasks, str) else tasks) if name.strip()]
    loaded, files, manager = load_tasks(names, include_path)
    network = _language_model(model, tokenizer, batch_size, dtype, device, run)
    given = {"limit": limit, "num_fewshot": num_fewshot, "apply_chat_template": apply_chat_template}
    raw = _measure(network, loaded, manager, batch_size=batch_size, **given)
    if raw is None:
        return None
    settings = {name: value for name, value in {**given, **run}.items() if value is not None and value is not False}
    settings |= {"batch_size": batch_size, "max_length": network.max_length, "device": network.device.type}
    settings["dtype"] = str(network.model.dtype).removeprefix("torch.")
    return Evaluation(
        model=_name(model),
        tasks=_task_entries(raw, files),
        settings=settings,
        versions={name: version(name) for name in ("loopergy", "lm-eval", "transformers", "torch")},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - began, 2),
    )


def _measure(network: Any, tasks: list[Any], manager: Any, **options: Any) -> Any:
    """Run lm-eval; None in all processes but the first of a distributed run."""
    from lm_eval.evaluator import simple_evaluate

    with_cache, network.model.config.use_cache = network.model.config.use_cache, False  # scoring needs none
    try:
        with _no_git(), _named_words(tasks, network.tokenizer):
            return simple_evaluate(network, tasks=tasks, log_samples=False, task_manager=manager, **options)
    finally:
        network.model.config.use_cache = with_cache


def _checked_limit(limit: float | None) -> float | None:
    if limit is None or 0 < limit < 1:
        return limit
    if limit < 1 or limit != int(limit):
        raise ValueError(f"limit={limit} must be a whole number of examples, or a share above 0 and below 1")
    return int(limit)


def _name(model: Any) -> str:
    """Name a model without saying where on this machine it is."""
    source = model if isinstance(model, str | Path) else model.name_or_path
    return public_name(source) or type(model).__name__


@contextmanager
def _no_git() -> Iterator[None]:
    """Keep lm-eval from asking git, which complains outside a repository, for a commit that we do not keep."""
    from lm_eval import evaluator

    asks: Any = getattr(evaluator, "get_git_commit_hash", None)
    if asks is None:  # this version of lm-eval does not ask
        yield
        return
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = asks


@contextmanager
def _named_words(tasks: Sequence[Any], tokenizer: Any) -> Iterator[None]:
    """Name the words of the tasks that a tokenizer without an unknown token does not have."""
    try:
        yield
    except Exception as error:  # the tokenizers library raises nothing more special
        if not lacks_a_word(error):
            raise
        groups = [task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task] for task in tasks]
        requests = [request for group in groups for leaf in group for request in leaf.instances or ()]
        for text in (part for request in requests for part in request.args):
            if isinstance(text, str) and text.strip():
                encode(tokenizer, text)
        raise


def _language_model(
    model: Any, tokenizer: Any, batch_size: int, dtype: str | None, device: str | None, run: dict[str, int]
) -> Any:
    """Wrap a model for lm-eval."""
    from lm_eval.models.huggingface import HFLM

    named = isinstance(model, str | Path)
    # lm-eval silently uses another device in place of one that it does not know.
    place = str(checked_device(device))
    if not named and (run or dtype or device):
        raise ValueError(
            "num_loops, num_steps, dtype and device are for loading; a model in memory is measured as it is: load it "
            "with AutoModelForCausalLM.from_pretrained(..., num_loops=2), or move it, first."
        )
    tokenizer = tokenizer or saved_tokenizer(model if named else model.name_or_path)
    if tokenizer is None:
        raise ValueError(f"there is no tokenizer beside {_name(model)}: lm-eval measures texts, not ids")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {_name(model)} has neither bos_token nor eos_token, one of which lm-eval puts "
            "where nothing precedes a text. Models trained on our tasks are measured by `loopergy task eval`"
        )
    wrapper: Any = HFLM  # its decorator hides the constructor from type checkers
    options: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": batch_size, "backend": "causal"}
    if named:
        check_whole(str(model))
        network = wrapper(str(model), dtype=checked_dtype(dtype) or "auto", device=place, **options, **run)
    else:
        network = wrapper(model, **options)
    # Sums of many logarithms, so that bfloat16 weights do not make the result depend on the batch.
    network.softmax_dtype = torch.promote_types(network.model.dtype, torch.float32)
    return network


def _task_entries(raw: Any, files: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Pick from lm-eval's results what a reader wants to know."""
    entries = {}
    groups = raw.get("groups", {})
    for name, values in {**groups, **raw["results"]}.items():
        metrics, stderr = {}, {}
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            plain = metric.removesuffix("_stderr")
            place = stderr if metric.endswith("_stderr") else metrics
            if math.isfinite(value):
                place[plain if kind == "none" else f"{plain}, {kind}"] = value
        members = raw["group_subtasks"].get(name, []) if name in groups else []
        if not metrics:
            continue
        leaves = _leaves(name, raw["group_subtasks"]) if members else [name]
        counts = [raw["n-samples"][leaf] for leaf in leaves]
        entry = {
            "metrics": metrics,
            "stderr": stderr,
            "higher_is_better": raw["higher_is_better"].get(name, {}),
            "examples": sum(count["effective"] for count in counts),
            "of": sum(count["original"] for count in counts),
            "few_shot": raw["n-shot"].get(leaves[0], 0),
            "version": raw["versions"].get(name),
            "dataset": files.get(name) or _dataset([raw["configs"][leaf] for leaf in leaves]),
        }
        entries[name] = {**entry, **({"members": members} if members else {})}
    return entries


def _leaves(name: str, members: dict[str, list[str]]) -> list[str]:
    inside = members.get(name) or []
    return [leaf for member in inside for leaf in _leaves(member, members)] if inside else [name]


def _dataset(configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Describe the Hub data set of a task, or the one that all tasks of a group share; nothing for local data."""
    paths = {str(config.get("dataset_path")) for config in configs}
    if len(paths) != 1 or not re.fullmatch(r"[\w.-]+/[\w.-]+", path := paths.pop()) or Path(path).exists():
        return {}
    config = configs[0]
    split = config.get("test_split") or config.get("validation_split") or config.get("training_split")
    fields = {"id": path, "split": split, "revision": (config.get("dataset_kwargs") or {}).get("revision")}
    if len(configs) == 1:
        fields["config"] = config.get("dataset_name")
    return {key: value for key, value in fields.items() if value is not None}
