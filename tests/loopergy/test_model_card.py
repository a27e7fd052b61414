# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""A card says what the files in the folder say, and nothing else."""

import html
import json
import os
import re
from dataclasses import asdict

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from typer.testing import CliRunner

import loopergy
from loopergy import cli
from loopergy.card_facts import CardFacts, kept_files
from loopergy.conversion.report import ConversionReport, TensorRecord
from loopergy.distill.report import Report
from loopergy.distill.select import Selection
from loopergy.distill.stage import StageRecord
from loopergy.energy_trace import EnergyTrace
from loopergy.evaluation import Evaluation
from loopergy.model_card import hub_results, is_edited, write_card
from loopergy.tasks.training import History

BUILD = {
    "ouro": lambda **fields: loopergy.OuroForCausalLM(loopergy.OuroConfig.from_preset("tiny", **fields)),
    "lt2": lambda **fields: loopergy.LT2ForCausalLM(
        loopergy.LT2Config.from_preset("tiny", layer_mixers="gdn,full", **fields)
    ),
    "cem_llama": lambda **fields: loopergy.CEMLlamaForCausalLM(
        loopergy.CEMLlamaConfig.from_preset("tiny", num_steps=2, **fields)
    ),
    "nrgpt": lambda **fields: loopergy.NRGPTForCausalLM(loopergy.NRGPTConfig.from_preset("tiny", **fields)),
    "gpt_baseline": lambda **fields: loopergy.GPTBaselineForCausalLM(
        loopergy.GPTBaselineConfig.from_preset("tiny", **fields)
    ),
    "classifier": lambda **fields: loopergy.LT2ForSequenceClassification(
        loopergy.LT2Config.from_preset("tiny", num_labels=3, **fields)
    ),
}


def save(kind, folder, **fields):
    torch.manual_seed(0)
    model = BUILD[kind](**fields)
    model.save_pretrained(folder)
    return model


def task(value, metric="acc", examples=100, of=100, **dataset):
    entry = {"metrics": {metric: value}, "stderr": {metric: 0.01}, "higher_is_better": {metric: True}}
    return {**entry, "examples": examples, "of": of, "few_shot": 0, "version": 1.0, "dataset": dataset}


def result(tasks, date="2026-01-02T03:04:05+00:00", **settings):
    versions = {"loopergy": "0", "lm-eval": "0.4", "transformers": "5", "torch": "2"}
    return Evaluation("model", tasks, {"dtype": "float32", **settings}, versions, date, 1.0)


def text_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def pictures_of(text):
    return re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)


@pytest.mark.parametrize("kind", BUILD)
def test_every_family_gets_a_card_that_the_hubs_client_reads(kind, tmp_path):
    model = save(kind, tmp_path / "small")
    card = ModelCard.load(write_card(tmp_path / "small", license="mit"))
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == ("text-classification" if kind == "classifier" else "text-generation")
    assert {"loopergy", model.config.model_type} <= set(card.data.tags)
    assert card.data.license == "mit"
    assert f"{model.num_parameters():,}" in card.text
    assert re.search(r"eprint +=", card.text)
    assert card.text.count("\n## Limits\n") == 1
    assert all((tmp_path / "small" / path).is_file() for path in pictures_of(card.text))
    assert "None" not in card.text
    assert str(tmp_path) not in card.content


def test_the_code_that_a_card_shows_runs(tmp_path, topics_tokenizer):
    model = BUILD["lt2"](vocab_size=len(topics_tokenizer))
    loopergy.export(model, tmp_path / "small", topics_tokenizer)
    code = re.search(r"```python\n(.*?)```", text_of(tmp_path / "small"), re.S).group(1)
    assert "import loopergy" not in code
    assert "role" in code, "the tokenizer has a chat template"
    code = code.replace("USER/small", str(tmp_path / "small")).replace("print(pipe(", "answer = (pipe(")
    session = {}
    exec(code.replace("}]))", "}], max_new_tokens=3))"), session)
    assert len(session["answer"][0]["generated_text"]) == 2


def test_results_reach_table_and_metadata_and_the_hubs_files(tmp_path):
    save("lt2", tmp_path)
    mmlu = {"id": "cais/mmlu", "split": "test"}
    tasks = {
        "mmlu": {**task(0.3, **mmlu), "members": ["mmlu_stem"]},
        "mmlu_stem": task(0.25, **mmlu, config="stem"),
        "part": task(0.9, examples=10, id="some/part"),
        "mine": task(0.8, file="mine.jsonl", sha256="0" * 64),
    }
    result(tasks, num_loops=2).save(tmp_path / "evaluation" / "a.json")
    write_card(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    values = {(one.dataset_name, one.dataset_type): one.metric_value for one in card.data.eval_results}
    assert values == {("mmlu", "cais/mmlu"): 0.3, ("mine", "mine.jsonl"): 0.8}
    assert "| mmlu | acc | 0.3000 ± 0.0100 | 100 | 0 | num_loops=2, dtype=float32 |" in card.text
    assert "| part | acc | 0.9000 ± 0.0100 | first 10 of 100 | 0 |" in card.text
    folded = card.text.partition("All subtasks")[2]
    assert "| mmlu_stem | acc | 0.2500" in folded
    assert "mmlu_stem" not in card.text.partition("All subtasks")[0]
    assert os.listdir(tmp_path / ".eval_results") == ["mmlu-num_loops=2.yaml"]
    written = (tmp_path / ".eval_results" / "mmlu-num_loops=2.yaml").read_text()
    (entry,) = parse_eval_result_entries(yaml.safe_load(written))
    assert (entry.dataset_id, entry.task_id, entry.value, entry.date) == ("cais/mmlu", "mmlu", 0.3, "2026-01-02")
    assert "num_loops=2" in entry.notes


def test_a_later_result_counts_and_files_of_results_that_are_gone_are_removed(tmp_path):
    save("nrgpt", tmp_path)
    for name, value, date in (("b", 0.4, "2026-01-01"), ("a", 0.6, "2026-02-01")):
        result({"arc": task(value, id="allenai/arc")}, date=date).save(tmp_path / "evaluation" / f"{name}.json")
    facts = CardFacts.of(tmp_path)
    assert hub_results(facts.evaluations)["arc"].value == 0.6
    write_card(tmp_path)
    assert "0.6000" in text_of(tmp_path)
    assert "0.4000" not in text_of(tmp_path)
    theirs = tmp_path / ".eval_results" / "theirs.yaml"
    theirs.write_text("- dataset: {id: a/b, task_id: c}\n  value: 1\n")
    for file in (tmp_path / "evaluation").iterdir():
        file.unlink()
    write_card(tmp_path)
    assert os.listdir(tmp_path / ".eval_results") == ["theirs.yaml"]
    assert ModelCard.load(tmp_path / "README.md").data.eval_results is None


def test_a_card_edited_by_hand_is_kept_until_it_is_asked_for(tmp_path):
    save("ouro", tmp_path)
    write_card(tmp_path, license="apache-2.0", base_model="some/parent")
    assert not is_edited(tmp_path / "README.md")
    write_card(tmp_path)
    edited = text_of(tmp_path).replace("## Limits", "## Limits, as I see them")
    (tmp_path / "README.md").write_text(edited)
    with pytest.raises(FileExistsError, match="edited by hand"):
        write_card(tmp_path)
    assert text_of(tmp_path) == edited
    done = CliRunner().invoke(cli.app, ["card", str(tmp_path), "--overwrite", "--repo-id", "user/small"])
    assert done.exit_code == 0, done.output
    card = ModelCard.load(tmp_path / "README.md")
    assert "as I see them" not in card.text
    assert '"user/small"' in card.text
    assert (card.data.license, card.data.base_model) == ("apache-2.0", "some/parent")


def test_export_carries_results_and_keeps_a_card_that_was_edited(tmp_path):
    save("ouro", tmp_path / "model")
    result({"arc": task(0.5, id="allenai/arc")}).save(tmp_path / "model" / "evaluation" / "arc.json")
    write_card(tmp_path / "model", license="mit")
    once = loopergy.export(tmp_path / "model", tmp_path / "once")
    assert "trust_remote_code=True" in text_of(once), "written anew for the exported folder"
    assert ModelCard.load(once / "README.md").data.license == "mit"
    assert (once / "evaluation" / "arc.json").is_file()
    assert (once / ".eval_results" / "arc.yaml").is_file()
    (once / "README.md").write_text("mine\n")
    assert text_of(loopergy.export(once, tmp_path / "twice")) == "mine\n"


TEACHER = {"source": "ByteDance/Ouro-1.4B", "model_type": "ouro", "class": "OuroForCausalLM", "parameters": 1234567}


def conversion(**teacher):
    tensors = [TensorRecord("a", "a", "copied", "the same tensor", [3, 4], "float32")]
    tensors += [TensorRecord("b", None, "fresh", "normal", [5], "float32")]
    return ConversionReport({**TEACHER, **teacher}, [1], 2, 2, "gdn", {}, 0, "float32", tensors, notes=["One note."])


def make_run(run):
    """Write what a run leaves: convert, align, select and distill, with a report of the last."""
    model = BUILD["lt2"]()
    heldout = {"kl": 2.0, "perplexity": 99.5, "teacher_perplexity": 12.25, "tokens": 4321}
    record = None
    for stage, kl in (("convert", 2.0), ("align", 1.0), ("select", None), ("distill", 0.125)):
        metrics = {} if kl is None else {"settings": {"length": 77}, "seconds": 5, "heldout": {**heldout, "kl": kl}}
        record = StageRecord.of(stage, model.config, record, tokens_seen=7000, metrics=metrics)
        (run / stage).mkdir(parents=True)
        record.save(run / stage)
        if stage != "select":
            model.save_pretrained(run / stage)
    conversion().to_json(run / "convert" / "conversion_report.json")
    selection = Selection([1], "oneshot", 2, scores={0: 0.1, 1: 0.5}, tokens=508)
    selection.to_json(run / "select" / "selection.json")
    report = Report("made", data="offline:prose", samples=[{"prompt": "Once", "teacher": "upon", "student": "a|time"}])
    report.decoding = [{"model": "student", "context": 256, "cache_bytes": 2048, "tokens_per_second": 31.5}]
    (run / "report.json").write_text(json.dumps(asdict(report)))
    (run / "report.html").write_text("<html>")


def test_a_stage_of_a_run_is_exported_with_its_whole_history(tmp_path):
    make_run(tmp_path / "run")
    folder = loopergy.export(tmp_path / "run" / "distill", tmp_path / "out")
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "ByteDance/Ouro-1.4B"
    assert "`ByteDance/Ouro-1.4B` (OuroForCausalLM, 1,234,567 parameters)" in card.text
    assert "1 tensors copied (12 parameters)" in card.text
    assert "One note." in card.text
    assert "| KL to the teacher | 0 | 2 | 1 | 0.125 |" in card.text
    assert "| perplexity | 12.25 |" in card.text
    assert "4,321 tokens" in card.text
    assert "`offline:prose`" in card.text
    assert "these keep full attention: 1; chosen by `oneshot` on 508 tokens" in card.text
    assert "| length | 77 |" in card.text
    assert "| student | 256 | 2.00 KiB | 31.5 |" in card.text
    assert "| student | a\\|time |" in card.text
    metrics = {one.metric_type: (one.metric_value, one.dataset_type) for one in card.data.eval_results}
    assert metrics == {"perplexity": (99.5, "offline:prose"), "kl": (0.125, "offline:prose")}
    assert {"pictures/plan.png", "pictures/quality.png"} <= set(pictures_of(card.text))
    again = loopergy.export(folder, tmp_path / "again")
    body = text_of(again).replace("again", "out").partition("<!-- loopergy card")[0]
    assert body == text_of(folder).partition("<!-- loopergy card")[0]


def test_an_earlier_stage_claims_nothing_of_the_later_ones(tmp_path):
    make_run(tmp_path / "run")
    files = kept_files(tmp_path / "run" / "align")
    assert "conversion_report.json" in files
    assert not {"report.json", "report.html", "selection.json"} & set(files)
    text = text_of(loopergy.export(tmp_path / "run" / "align", tmp_path / "out"))
    assert "| KL to the teacher | 0 | 2 | 1 |" in text
    assert "0.125" not in text
    assert "31.5" not in text


def test_no_path_of_the_machine_gets_into_a_card(tmp_path):
    model = save("lt2", tmp_path / "model")
    heldout = {"kl": 1.0, "perplexity": 9.0, "teacher_perplexity": 8.0, "tokens": 7}
    StageRecord.of("convert", model.config, metrics={"heldout": heldout}).save(tmp_path / "model")
    teacher = tmp_path / "secret" / "teacher.gguf"
    conversion(source=str(teacher)).to_json(tmp_path / "model" / "conversion_report.json")
    report = Report("made", data=str(tmp_path / "secret" / "text.jsonl"))
    (tmp_path / "model" / "report.json").write_text(json.dumps(asdict(report)))
    card = ModelCard.load(write_card(tmp_path / "model"))
    assert "`teacher.gguf`" in card.text
    assert "Source: `text.jsonl`." in card.text
    assert "secret" not in card.content
    assert card.data.base_model is None


def test_no_path_of_the_machine_gets_into_an_export(tmp_path, topics_tokenizer):
    run, secret = tmp_path / "run", tmp_path / "secret"
    make_run(run)
    topics_tokenizer.save_pretrained(run / "distill")
    teacher, data = str(secret / "döer" / "ouro"), str(secret / "text & more.jsonl")
    record = StageRecord.load(run / "distill")
    record.metrics["run"] = {"teacher": teacher, "data": data, "logging_dir": f"{secret}/logs"}
    record.parent["metrics"]["run"] = {"teacher": f"{teacher}-first"}
    record.save(run / "distill")
    conversion(source=teacher).to_json(run / "convert" / "conversion_report.json")
    samples = [{"prompt": "/usr/bin/env is", "teacher": "a file", "student": "/"}]
    report = Report(f"{teacher}, made", teacher={"name": teacher}, data=data, samples=samples)
    (run / "report.json").write_text(json.dumps(asdict(report)))
    (run / "report.html").write_text(f"<title>{teacher}, made</title><p>{html.escape(data)}")
    folder = loopergy.export(run / "distill", tmp_path / "out")
    for file in folder.rglob("*"):
        assert file.is_dir() or b"secret" not in file.read_bytes(), file
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes(), file
    written = json.loads((folder / "report.json").read_text())
    assert (written["title"], written["teacher"]["name"], written["data"]) == (
        "ouro, made",
        "ouro",
        "text & more.jsonl",
    )
    assert written["samples"] == samples
    assert (folder / "report.html").read_text() == "<title>ouro, made</title><p>text &amp; more.jsonl"
    record = StageRecord.load(folder)
    assert record.metrics["run"] == {"teacher": "ouro", "data": "text & more.jsonl", "logging_dir": "logs"}
    assert record.parent["metrics"]["run"] == {"teacher": "ouro-first"}
    assert not {"is_local", "local_files_only"} & set(json.loads((folder / "tokenizer_config.json").read_text()))


def test_a_report_that_is_no_json_is_not_exported(tmp_path):
    save("ouro", tmp_path / "model")
    (tmp_path / "model" / "report.json").write_text("{half")
    (tmp_path / "model" / "stage.json").write_text("[1]")
    folder = loopergy.export(tmp_path / "model", tmp_path / "out")
    assert not (folder / "report.json").exists()


def test_a_teacher_in_memory_has_no_name(tmp_path):
    save("lt2", tmp_path)
    conversion(source="memory").to_json(tmp_path / "conversion_report.json")
    card = ModelCard.load(write_card(tmp_path))
    assert "Made from a model in memory (OuroForCausalLM, 1,234,567 parameters)." in card.text
    assert card.data.base_model is None


def test_energies_are_those_of_the_trace(tmp_path):
    model = save("nrgpt", tmp_path)
    traced = loopergy.trace(model, [5, 9, 3, 7])
    traced.to_json(tmp_path / "energies.json")
    again = EnergyTrace.from_json(tmp_path / "energies.json")
    assert all(torch.equal(again.energies[part], values) for part, values in traced.energies.items())
    assert torch.equal(again.state_change, traced.state_change)
    assert again.conditions == traced.conditions
    text = text_of(write_card(tmp_path).parent)
    mean = traced.mean("total")[0]
    rising = 100 * float(traced.share_rising("total").max())
    assert f"| total | {mean[0]:.4g} | {mean[-1]:.4g} | {rising:.1f} % |" in text
    assert "One text of 4 tokens" in text
    assert "descent: not guaranteed" in text
    assert "pictures/energies.png" in pictures_of(text)


def test_a_training_on_a_task_is_told_with_its_test_metrics(tmp_path):
    save("lt2", tmp_path)
    options = {"task": "recall", "pairs": 4}
    settings = {"max_steps": 20, "output_dir": str(tmp_path)}
    history = History(options, "lt2", 10, settings, test={"accuracy": 0.4375}, steps=20)
    history.save(tmp_path)
    card = ModelCard.load(write_card(tmp_path))
    assert "Trained on `recall` for 20 steps" in card.text
    assert "| accuracy | 0.4375 |" in card.text
    assert "| pairs | 4 |" in card.text
    assert str(tmp_path) not in card.content
    (metric,) = card.data.eval_results
    assert (metric.metric_value, metric.dataset_split, metric.dataset_args) == (0.4375, "test", options)


def test_a_file_that_cannot_be_read_is_left_out_and_named(tmp_path, monkeypatch):
    from loopergy import card_facts

    warnings = []
    monkeypatch.setattr(card_facts.logger, "warning", warnings.append)
    save("ouro", tmp_path)
    (tmp_path / "conversion_report.json").write_text('{"format": 99}')
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "half.json").write_text('{"format": 1, "tasks"')
    (tmp_path / "evaluation" / "list.json").write_text('{"format": 1, "tasks": []}')
    names = ["report.json", "pretraining.json", "history.json", "selection.json", "energies.json", "stage.json"]
    for name in names:
        (tmp_path / name).write_text("[1]")
    (tmp_path / "tokenizer_config.json").write_text("{half")
    text = text_of(write_card(tmp_path).parent)
    assert "How it was made" not in text
    wrong = {"half.json", "list.json", "conversion_report.json", "tokenizer_config.json", *names}
    assert {warning.partition(" ")[0] for warning in warnings} == wrong
    (tmp_path / "stage.json").write_text("{half")
    assert "stage.json" not in kept_files(tmp_path) or write_card(tmp_path)


@pytest.mark.parametrize("content", [b"---\nlicense: [unclosed\n---\n", b"---\n- 1\n---\n", b"\xff\xfe card"])
def test_a_card_that_cannot_be_read_is_kept_or_replaced(content, tmp_path):
    save("ouro", tmp_path)
    card = tmp_path / "README.md"
    card.write_bytes(content)
    with pytest.raises(FileExistsError, match="edited by hand"):
        write_card(tmp_path)
    assert card.read_bytes() == content
    write_card(tmp_path, overwrite=True)
    assert not is_edited(card)


def test_a_name_that_the_hub_would_not_take_is_refused(tmp_path):
    save("ouro", tmp_path)
    with pytest.raises(ValueError, match="'oops oops'"):
        write_card(tmp_path, repo_id="oops oops")
    assert not (tmp_path / "README.md").exists()


def test_without_matplotlib_a_card_has_the_pictures_that_are_there(tmp_path, monkeypatch):
    from loopergy import model_card

    monkeypatch.setattr(model_card, "find_spec", lambda name: None)
    save("lt2", tmp_path)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "mine.png").write_bytes(b"png")
    assert pictures_of(text_of(write_card(tmp_path).parent)) == ["pictures/mine.png"]


def test_what_is_no_model_of_ours_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        write_card(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="none of loopergy's"):
        write_card(tmp_path)


def test_a_gate_whose_folder_holds_a_students_run_too_has_the_files_of_its_own(tmp_path):
    """`RUN/gate` is a teacher; `loopergy run` on the same folder puts `RUN/convert` beside it."""
    for name in ("pretrain", "gate", "convert"):
        (tmp_path / name).mkdir()
        StageRecord(name, [0], "0").save(tmp_path / name)
    (tmp_path / "convert" / "conversion_report.json").write_text("{}")
    (tmp_path / "pretraining.json").write_text("{}")
    assert set(kept_files(tmp_path / "gate")) == {"stage.json", "pretraining.json"}
    assert set(kept_files(tmp_path / "convert")) == {"stage.json", "conversion_report.json"}
