# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Write the card of a model from what lies in its folder: no number that is not in a file, nothing typed by hand.

One template, `model_card.md.j2`, serves all families; a section whose file is not there is left out. The metadata go
into the card's head, and results on data sets of the Hub also into `.eval_results/`, where the Hub reads them.
"""

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.utils import validate_repo_id
from transformers.utils import logging

from loopergy.card_facts import PICTURES_FOLDER, CardFacts
from loopergy.card_sections import card_sections, model_index, public_teacher
from loopergy.conversion.folders import replace_file
from loopergy.evaluation import Evaluation

logger = logging.get_logger(__name__)

CARD_FILE, RESULTS_FOLDER = "README.md", ".eval_results"
_MARK, _RESULTS_MARK = "<!-- loopergy card ", "# loopergy card"
# Metadata that no file tells: a new card takes them from the one that it replaces.
_TAKEN_OVER = ("license", "base_model", "language", "datasets")


def write_card(
    folder: str | Path,
    *,
    name: str | None = None,
    repo_id: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
    tags: Sequence[str] = (),
    overwrite: bool = False,
) -> Path:
    """Write `README.md`, its pictures and `.eval_results` into a model's folder.

    A card that this function wrote is replaced. One that was edited by hand is not, unless asked for.

    Args:
        folder: Folder of a model, exported or not.
        name (`str`, *optional*): Of the model; by default the folder's.
        repo_id (`str`, *optional*): Where it will be on the Hub, for the code that loads it.
        license (`str`, *optional*): The Hub's name of the licence of the weights, such as `"apache-2.0"`.
        base_model (`str`, *optional*): Hub id of the parent; by default what the provenance names.
        tags (sequence of `str`): Further tags.
        overwrite (`bool`): Replace a card that was edited by hand. Its licence, parent, language and data sets stay.

    Returns:
        `Path`: The card.

    Raises:
        ValueError: For a folder without a model of ours, or a `repo_id` that the Hub would not take.
        FileExistsError: For a card that was edited by hand.
    """
    place = Path(folder).expanduser()
    card = place / CARD_FILE
    if repo_id is not None:
        validate_repo_id(repo_id)
    if not overwrite and is_edited(card):
        raise FileExistsError(
            f"{card} was edited by hand and is kept; overwrite=True (loopergy card --overwrite) writes a new one"
        )
    name = name or place.resolve().name
    facts = CardFacts.of(place)
    known = _metadata(card)
    stated = {"license": license, "base_model": base_model or public_teacher(facts)[1]}
    data = {key: stated.get(key) or known.get(key) for key in _TAKEN_OVER}
    pictures = draw_pictures(facts, place)
    facts.pictures = sorted({*facts.pictures, *pictures.values()})
    content = card_sections(facts, place, name, repo_id or f"USER/{name}", data["license"], pictures)
    family = content["family"]
    more: dict[str, Any] = {key: value for key, value in data.items() if value}
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=content["task"],
        tags=list(dict.fromkeys(["loopergy", facts.config.model_type, *family.tags, *tags])),
        model_name=name,
        eval_results=model_index(facts, content["task"]) or None,
        **more,
    )
    body = _template().render(content).rstrip()
    _write_results(place / RESULTS_FOLDER, facts.evaluations)
    replace_file(card, _marked(f"---\n{metadata.to_yaml()}\n---\n\n{body}\n"))
    return card


def is_edited(card: Path) -> bool:
    """Say whether there is a card that is not, byte for byte, what `write_card` wrote."""
    if not card.is_file():
        return False
    try:
        body, mark, _ = (text := card.read_text(encoding="utf-8")).rpartition(f"\n{_MARK}")
    except UnicodeDecodeError:
        return True
    return not mark or _marked(body) != text


def _marked(text: str) -> str:
    """Close a card with a comment that tells later whether it has been edited."""
    return f"{text}\n{_MARK}{hashlib.sha256(text.encode()).hexdigest()[:16]} -->\n"


def _metadata(card: Path) -> dict[str, Any]:
    """Read the metadata of a card that is to be replaced; nothing if they cannot be read."""
    try:
        return ModelCard.load(card).data.to_dict() if card.is_file() else {}
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        logger.warning(f"{card} cannot be read, so nothing of it is taken over: {' '.join(str(error).split())}")
        return {}


def _template() -> Any:
    import jinja2  # comes with torch

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    return environment.from_string((files("loopergy") / "model_card.md.j2").read_text(encoding="utf-8"))


def draw_pictures(facts: CardFacts, folder: Path) -> dict[str, str]:
    """Draw what the files tell, as small PNG files in `pictures/`; without matplotlib take those that are there.

    Returns:
        `dict[str, str]`: Of `plan`, `quality`, `losses` and `energies` those that there are, to a path in the folder.
    """
    names = ("plan", "quality", "losses", "energies")
    paths = {name: f"{PICTURES_FOLDER}/{name}.png" for name in names}
    if find_spec("matplotlib") is None:
        return {name: path for name, path in paths.items() if (folder / path).is_file()}
    from loopergy.distill.pictures import draw_losses, draw_plan, draw_quality

    config, figures = facts.config, {}
    mixers = getattr(config, "layer_mixers", None)
    if mixers:
        kept = [layer for layer, mixer in enumerate(mixers) if mixer == "full"]
        scores = {"scores": facts.selection.scores, "meaning": facts.selection.meaning} if facts.selection else {}
        figures["plan"] = draw_plan(kept, len(mixers), config.num_loops, mixers=mixers, **scores)
    if facts.heldout:
        kl = {stage: result["kl"] for stage, result in facts.heldout.items()}
        first = next(iter(facts.heldout.values()))
        perplexity = {stage: result["perplexity"] for stage, result in facts.heldout.items()}
        figures["quality"] = draw_quality(kl, {"teacher": first["teacher_perplexity"], **perplexity})
    if any(facts.losses.values()):
        figures["losses"] = draw_losses(facts.losses)
    if facts.energies is not None:
        figures["energies"] = facts.energies.plot()
    for name, figure in figures.items():
        (folder / PICTURES_FOLDER).mkdir(exist_ok=True)
        figure.savefig(folder / paths[name], dpi=110, bbox_inches="tight", metadata={"Software": None})
    return {name: paths[name] for name in figures}


def hub_results(evaluations: Sequence[Evaluation]) -> dict[str, EvalResultEntry]:
    """Return the results that a leaderboard may show, by file name without ending.

    They are those of whole tasks or groups on one data set of the Hub; the later run counts. A run on the first
    examples only, or on a local file, is in the card alone.
    """
    entries = {}
    for result in evaluations:
        for task in result.top_tasks():
            entry = result.tasks[task]
            data = entry["dataset"]
            if "id" not in data or entry["examples"] != entry["of"]:
                continue
            metric, value = next(iter(entry["metrics"].items()))
            named = ("num_loops", "num_steps", "apply_chat_template")
            how = [f"{key}={result.settings[key]}" for key in named if key in result.settings]
            notes = [f"lm-eval {result.versions['lm-eval']}: {task}, {metric}", f"{entry['few_shot']}-shot", *how]
            entries["-".join([task, *how])] = EvalResultEntry(
                dataset_id=data["id"],
                task_id=data.get("config") or (task if "members" in entry else "default"),
                value=value,
                dataset_revision=data.get("revision"),
                date=result.date[:10],
                notes=", ".join(notes),
            )
    return entries


def _write_results(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write one YAML file per result, and remove those of results that are gone; files of others stay."""
    entries = hub_results(evaluations)
    for file in folder.glob("*.yaml"):
        if file.stem not in entries and file.read_text(encoding="utf-8").startswith(_RESULTS_MARK):
            file.unlink()
    for name, entry in entries.items():
        text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False)
        replace_file(folder / f"{name}.yaml", f"{_RESULTS_MARK}\n{text}")
