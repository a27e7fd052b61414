# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Turn the facts about a model into what the card's template shows: tables, lists and sentences."""

import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from loopergy.card_facts import CardFacts
from loopergy.card_families import CARD_FAMILIES, family_limits
from loopergy.conversion.public_names import public_name
from loopergy.describe import describe_cost, format_bytes, model_cost, slot_table
from loopergy.distill.teacher import SMOLLM2
from loopergy.loading import auto_class
from loopergy.modeling.learned_positions import WindowedGenerationMixin

# Names of teachers that are no Hub ids, and what they are.
_KNOWN_TEACHERS = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct"}
_DONE = {
    "convert": "converted",
    "calibrate": "calibrated",
    "align": "aligned",
    "select": "selected",
    "distill": "distilled",
    "extend": "extended",
}
_TASKS = {
    AutoModel: "feature-extraction",
    AutoModelForCausalLM: "text-generation",
    AutoModelForSequenceClassification: "text-classification",
}
_CONTEXTS = (1024, 8192, 32768, 131072)
Table = list[list[Any]]


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Return rows, the head first, as a Markdown table."""
    lines = [[_cell(value) for value in row] for row in rows]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    elif isinstance(value, int) and not isinstance(value, bool):
        text = f"{value:,}"
    else:
        text = str(value)
    return " ".join(text.replace("|", "\\|").split())


def card_sections(
    facts: CardFacts, folder: Path, name: str, repo_id: str, license: str | None, pictures: dict[str, str]
) -> dict[str, Any]:
    """Return everything that the template uses.

    Args:
        facts ([`CardFacts`]): What is known.
        folder (`Path`): The model's.
        name, repo_id (`str`): Of the model, and where it will be.
        license (`str`, *optional*): Of the weights.
        pictures (`dict`): Section to path in the folder.

    Raises:
        ValueError: For a model type that is not ours.
    """
    config = facts.config
    if config.model_type not in CARD_FAMILIES:
        raise ValueError(f"model_type={config.model_type!r} is none of loopergy's: {', '.join(CARD_FAMILIES)}")
    family = CARD_FAMILIES[config.model_type]
    head = auto_class(config)
    generates = head is AutoModelForCausalLM
    standalone = "auto_map" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    teacher, parent = public_teacher(facts)
    if facts.conversion is not None:
        origin = facts.conversion.teacher
        teacher = f"`{teacher}`" if teacher else "a model in memory"
        teacher += f" ({origin['class']}, {origin['parameters']:,} parameters)"
    top, inside = _results(facts)
    return {
        "name": name,
        "family": family,
        "repo_id": repo_id,
        "task": _TASKS[head],
        "prompt": '[{"role": "user", "content": "Hello"}]' if generates and facts.chat else '"Once upon a time"',
        "standalone": standalone,
        "steps": family.steps if generates else None,
        "teacher": teacher,
        "pictures": {**dict.fromkeys(("plan", "quality", "losses", "energies")), **pictures},
        "other_pictures": [path for path in facts.pictures if path not in pictures.values()],
        "results": top,
        "subtasks": inside,
        "limits": [
            *family_limits(config),
            "Nothing but what stands above was measured: no bias, no toxicity, no factuality.",
        ],
        "licence": _licence(license, standalone, parent),
        "version": version("loopergy"),
        "table": table,
        **_made(facts),
        **_heldout(facts),
        **_pretraining(facts),
        **_task(facts),
        **_energies(facts),
        **(_costs(config) if generates else _size(config, head)),
    }


def public_teacher(facts: CardFacts) -> tuple[str | None, str | None]:
    """Return what the model was made from, as it may be published, and its Hub id if it has one."""
    names = [facts.report.get("teacher", {}).get("name"), facts.conversion and facts.conversion.teacher["source"]]
    known = [str(name) for name in names if name and name != "memory"]
    if not known:
        return None, None
    name = _KNOWN_TEACHERS.get(known[0], known[0])
    public = public_name(name)
    if public == name and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not name.endswith(".gguf"):
        return name, name
    return Path(public).name, None


def _licence(license: str | None, standalone: bool, parent: str | None) -> str:
    if license:
        weights = f"Weights: {license}."
    else:
        weights = "No licence of the weights is stated"
        weights += f"; that of {parent} may bind them." if parent else "."
    return f"{weights} Code in this folder: Apache-2.0." if standalone else weights


def _results(facts: CardFacts) -> tuple[Table, Table]:
    """Return the table of tasks and groups, and that of the members of groups; empty if there are none."""
    head = ["task", "metric", "value", "examples", "shots", "how"]
    tables: tuple[Table, Table] = ([], [])
    # A later run of the same task in the same way replaces an earlier one.
    rows: dict[tuple[str, ...], tuple[int, list[Any]]] = {}
    shown = ("num_loops", "num_steps", "apply_chat_template", "dtype", "max_length")
    for result in facts.evaluations:
        how = ", ".join(f"{key}={result.settings[key]}" for key in shown if key in result.settings)
        top = result.top_tasks()
        for task, entry in result.tasks.items():
            part = entry["examples"] != entry["of"]
            count = f"first {entry['examples']:,} of {entry['of']:,}" if part else f"{entry['of']:,}"
            for metric, value in entry["metrics"].items():
                error = entry["stderr"].get(metric)
                text = f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")
                row = [task, metric, text, count, entry["few_shot"], how]
                rows[task, metric, count, str(entry["few_shot"]), how] = (int(task not in top), row)
    for which, row in rows.values():
        tables[which].append(row)
    return tuple([head, *rows] if rows else [] for rows in tables)  # type: ignore[return-value]


def _made(facts: CardFacts) -> dict[str, Any]:
    """Say how the model came to be: conversion, selection, stages, speed and samples of the run."""
    conversion, selection, report = facts.conversion, facts.selection, facts.report
    made = []
    if conversion is not None:
        counts = [
            f"{count['tensors']} tensors {action} ({count['parameters']:,} parameters)"
            for action, count in conversion.counts().items()
        ]
        made.append(
            f"Conversion: {', '.join(counts)}, seed {conversion.seed}; one by one in `conversion_report.json`."
        )
        if conversion.verified is not None:
            made.append(
                f"Check: with all layers kept, the logits differ from the teacher's by at most "
                f"{conversion.verified['max_abs_difference']:.3g} on {conversion.verified['tokens']} random tokens."
            )
        made += conversion.notes
    if selection is not None:
        layers = ", ".join(map(str, selection.kept_layers)) or "none"
        where = f" on {selection.tokens:,} tokens" if selection.tokens else ""
        made.append(
            f"Selection: of {selection.num_layers} layers, these keep full attention: {layers}; chosen by "
            f"`{selection.strategy}`{where}."
        )
    stages = [[record.stage, record.tokens_seen, record.metrics.get("seconds", "")] for record in facts.stages]
    if selection is not None:  # the stages after it remember that it was done, and no more
        stages = [["select", selection.tokens, selection.seconds] if row[0] == "select" else row for row in stages]
    settings = [(record.stage, record.metrics.get("settings")) for record in facts.stages]
    decoding = [
        [row["model"], row["context"], format_bytes(row["cache_bytes"]), row["tokens_per_second"]]
        for row in report.get("decoding", ())
    ]
    return {
        "made": [*made, *report.get("notes", ())],
        "stages": [["stage", "tokens", "seconds"], *stages] if stages else [],
        "stage_settings": [
            (stage, [["setting", "value"], *map(list, values.items())]) for stage, values in settings if values
        ],
        "environment": ", ".join(f"{key} {value}" for key, value in report.get("environment", {}).items()),
        "decoding": [["model", "context", "cache", "tokens a second"], *decoding] if decoding else [],
        "samples": [
            [["prompt", sample["prompt"]], *([key, text] for key, text in sample.items() if key != "prompt")]
            for sample in report.get("samples", ())
        ],
    }


def _heldout(facts: CardFacts) -> dict[str, Any]:
    stages = facts.heldout
    if not stages:
        return {"heldout": [], "heldout_tokens": ""}
    last = list(stages.values())[-1]
    return {
        "heldout": [
            ["", "teacher", *(_DONE.get(stage, stage) for stage in stages)],
            ["KL to the teacher", 0, *(result["kl"] for result in stages.values())],
            ["perplexity", last["teacher_perplexity"], *(result["perplexity"] for result in stages.values())],
        ],
        "heldout_tokens": f"{int(last['tokens']):,}",
    }


def _pretraining(facts: CardFacts) -> dict[str, Any]:
    """Say what each loop knows, when the gate lets tokens go, and what the tasks in the text came to."""
    stages = facts.pretraining.get("stages")
    if not stages:
        return {"loops": [], "loops_tokens": "", "loops_mean": {}, "mixed_in": [], "data": public_data(facts)}
    last = stages[-1]["loops"]
    shares = [
        [f"share of tokens that leave, after {stage['stage']}", *stage["loops"]["exit_share"]] for stage in stages
    ]
    numbers = range(1, len(last["loop_perplexity"]) + 1)
    accuracy = stages[-1]["tasks"] or {}
    return {
        "loops": [["", *(f"loop {n}" for n in numbers)], ["perplexity", *last["loop_perplexity"]], *shares],
        "loops_tokens": f"{last['tokens']:,}",
        "loops_mean": {"perplexity": _cell(last["expected_perplexity"]), "exit": _cell(last["mean_exit"])},
        "mixed_in": [["task", "accuracy"], *map(list, accuracy.items())] if accuracy else [],
        "data": public_data(facts),
    }


def public_data(facts: CardFacts) -> str | None:
    """Return the source of the text, as it may be published."""
    data = facts.report.get("data") or facts.pretraining.get("data")
    return data and public_name(data)


def _task(facts: CardFacts) -> dict[str, Any]:
    history = facts.history
    if history is None:
        return {"history": None, "task_results": [], "task_settings": []}
    return {
        "history": history,
        "task_results": [["metric", "value"], *map(list, history.test.items())],
        "task_settings": [
            ["setting", "value"],
            *([key, value] for key, value in {**history.task, **history.settings}.items() if key != "output_dir"),
        ],
    }


def _energies(facts: CardFacts) -> dict[str, Any]:
    trace = facts.energies
    if trace is None:
        return {"energies": [], "energy_tokens": "", "energy_conditions": ""}
    rows: Table = [["part", "before", "after", "rising at most"]]
    for part in trace.energies:
        mean = trace.mean(part)
        low, high = mean.amin(0), mean.amax(0)
        spans = [f"{low[step]:.4g}" if len(mean) == 1 else f"{low[step]:.4g} to {high[step]:.4g}" for step in (0, -1)]
        rows.append([part.replace("_", " "), *spans, f"{100 * float(trace.share_rising(part).max()):.1f} %"])
    conditions = "" if trace.conditions is None else str(trace.conditions)
    return {"energies": rows, "energy_tokens": f"{len(trace.tokens):,}", "energy_conditions": conditions}


def _costs(config: Any) -> dict[str, Any]:
    """Compute sizes and cache from the config."""
    # A table of positions needs room for the token that is decoded.
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    longest = config.max_position_embeddings - issubclass(kind, WindowedGenerationMixin)
    contexts = sorted({*(context for context in _CONTEXTS if context < longest), longest})
    cost = model_cost(config, longest)
    depends = "nsa" in (getattr(config, "layer_mixers", None) or ())
    sizes = []
    for context in contexts:
        slots = (model_cost(config, context) if depends else cost).slots
        sizes.append(format_bytes(sum(slot.bytes_at(context) for slot in slots)))
    rows = [list(row) for row in describe_cost("", config, cost) if row[0] not in ("model", "cache", "arithmetic")]
    arithmetic = f"{cost.flops / 1e9:,.3g} GFLOP to decode one token at {longest:,} tokens"
    return {
        "overview": [["", ""], *rows, ["arithmetic", arithmetic]],
        "dtype": str(cost.dtype).removeprefix("torch."),
        "cache": [["context", *contexts], ["cache", *sizes]],
        "slots": "\n".join([f"at {longest:,} tokens:", *slot_table(config, cost)]),
    }


def _size(config: Any, head: Any) -> dict[str, Any]:
    with torch.device("meta"):
        model = head.from_config(config)
    rows = [["", ""], ["parameters", model.num_parameters()]]
    rows += [["labels", config.num_labels]] if head is AutoModelForSequenceClassification else []
    return {"overview": rows, "dtype": "", "cache": [], "slots": ""}


def model_index(facts: CardFacts, task: str) -> list[EvalResult]:
    """Return the results for the card's metadata: whole tasks, held-out text, and the test split of a task."""
    found = []
    for result in facts.evaluations:
        for name in result.top_tasks():
            entry = result.tasks[name]
            data = entry["dataset"]
            if entry["examples"] != entry["of"]:
                continue
            for metric, value in entry["metrics"].items():
                found.append(
                    EvalResult(
                        task_type=task,
                        dataset_type=data.get("id") or data.get("file") or name,
                        dataset_name=name,
                        metric_type=metric.partition(",")[0],
                        metric_value=value,
                        metric_name=metric,
                        dataset_config=data.get("config"),
                        dataset_split=data.get("split"),
                        dataset_revision=data.get("revision"),
                        dataset_args={
                            key: result.settings[key] for key in ("num_loops", "num_steps") if key in result.settings
                        }
                        or None,
                        source_name="lm-eval",
                        source_url="https://github.com/EleutherAI/lm-evaluation-harness",
                    )
                )
    if facts.heldout:
        last = list(facts.heldout.values())[-1]
        source = public_data(facts) or "held-out-text"
        names = {"perplexity": "perplexity", "kl": "KL to the teacher, nats a token"}
        found += [
            EvalResult(task, source, "held-out text", key, last[key], metric_name=text) for key, text in names.items()
        ]
    if facts.history is not None:
        name = f"loopergy {facts.history.task['task']}"
        found += [
            EvalResult(
                task, name.replace(" ", "-"), name, key, value, dataset_split="test", dataset_args=facts.history.task
            )
            for key, value in facts.history.test.items()
        ]
    return found
