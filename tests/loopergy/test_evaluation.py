# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Results of lm-eval are those of the model, whatever the batch, and are written whole or not at all."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import loopergy
from loopergy import cli, evaluation
from loopergy.evaluation import Evaluation, evaluate
from loopergy.tasks.vocabulary import word_tokenizer

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")

BUILD = {
    "ouro": lambda vocab: loopergy.OuroForCausalLM(loopergy.OuroConfig.from_preset("tiny", vocab_size=vocab)),
    "lt2": lambda vocab: loopergy.LT2ForCausalLM(
        loopergy.LT2Config.from_preset("tiny", vocab_size=vocab, layer_mixers="gdn,full", initializer_range=0.2)
    ),
    "cem_llama": lambda vocab: loopergy.CEMLlamaForCausalLM(
        loopergy.CEMLlamaConfig.from_preset("tiny", vocab_size=vocab, num_steps=2)
    ),
    "nrgpt": lambda vocab: loopergy.NRGPTForCausalLM(loopergy.NRGPTConfig.from_preset("tiny", vocab_size=vocab)),
}
TEXTS = (
    "The import statement finds a module and binds a name.",
    "Short.",
    "A class definition is an executable statement," + " and it defines a class object" * 12,
    "Numbers",
)


@pytest.fixture
def save(tmp_path, topics_tokenizer):
    """Save a model of a kind with a tokenizer; `change` is called with it first."""

    def saved(kind, change=lambda model: None, dtype=torch.float64):
        torch.manual_seed(0)
        model = BUILD[kind](len(topics_tokenizer)).to(dtype)
        with torch.no_grad():
            change(model)
        model.save_pretrained(tmp_path / kind)
        topics_tokenizer.save_pretrained(tmp_path / kind)
        return tmp_path / kind

    return saved


def indifferent(model):
    """Make all tokens equally likely everywhere."""
    model.get_output_embeddings().weight.zero_()
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        model.get_output_embeddings().bias.zero_()


def write_rows(file, *rows):
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(file)


def tokens(tokenizer, text):
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def example(**settings):
    entry = {"metrics": {"acc": 0.5}, "stderr": {"acc": 0.1}, "examples": 3, "of": 4, "few_shot": 0}
    return Evaluation("m", {"a/b": entry}, {"limit": 3, **settings}, {"torch": "2"}, "2026-01-02", 1.0)


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "loopergy\[eval\]"'):
        evaluate(tmp_path, "mmlu")


def test_results_are_read_as_they_were_written(tmp_path):
    result = example()
    file = result.save(tmp_path / "evaluation" / result.file_name())
    assert file.name == "a-b-limit=3.json"
    assert Evaluation.load(file) == result
    assert os.listdir(file.parent) == [file.name]
    assert result.lines() == ["a/b  acc                0.5000 ± 0.1000   4 examples, the first 3"]
    file.write_text('{"results": {}}')
    with pytest.raises(ValueError, match="no result of"):
        Evaluation.load(file)
    file.write_text('{"format": 1, "tasks": []}')
    with pytest.raises(ValueError, match=r"`tasks` must hold the results by task, got \[\]"):
        Evaluation.load(file)


def test_runs_with_other_settings_have_other_names():
    assert len({example(**settings).file_name() for settings in ({}, {"num_loops": 2}, {"num_steps": 2})}) == 3


@needs_lm_eval
@pytest.mark.parametrize(("kind", "option"), [("lt2", "num_steps"), ("ouro", "num_steps"), ("nrgpt", "num_loops")])
def test_loops_and_steps_that_a_model_does_not_have_are_refused_before_it_is_loaded(save, tmp_path, kind, option):
    folder = save(kind)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"type '{kind}' has no such setting"):
        evaluate(folder, write_rows(tmp_path / "task.jsonl", {"text": "a"}), **{option: 2})


@needs_lm_eval
def test_an_indifferent_model_scores_what_can_be_worked_out_by_hand(save, tmp_path, topics_tokenizer):
    """Every token costs log V, so the choice of fewest tokens wins, and a text costs its tokens."""
    folder = save("lt2", indifferent)
    size, (text, short) = len(topics_tokenizer), TEXTS[:2]
    long, brief = "a much longer answer than the other one", "no"
    rows = [{"context": "Which?", "choices": [long, brief], "answer": right} for right in (1, 1, 0, 1)]
    (tmp_path / "mine").mkdir()
    write_rows(tmp_path / "mine" / "choice.jsonl", *rows)
    write_rows(tmp_path / "mine" / "next.jsonl", {"context": "import", "continuation": "statement"})
    write_rows(tmp_path / "mine" / "text.jsonl", {"text": text}, {"text": short})
    result = evaluate(folder, str(tmp_path / "mine"), device="cpu")
    assert result.tasks["choice"]["metrics"]["acc"] == 0.75
    assert result.tasks["choice"]["metrics"]["acc_norm"] != 0.75, "per character the longer one is cheaper"
    assert result.tasks["choice"]["examples"] == result.tasks["choice"]["of"] == 4
    count = tokens(topics_tokenizer, " statement")
    assert result.tasks["next"]["metrics"]["perplexity"] == pytest.approx(size**count, rel=1e-9)
    bits = math.log2(size) * (tokens(topics_tokenizer, text) + tokens(topics_tokenizer, short))
    measured = result.tasks["text"]["metrics"]["bits_per_byte"]
    assert measured == pytest.approx(bits / len((text + short).encode()), rel=1e-9)
    assert result.tasks["text"]["dataset"]["file"] == "text.jsonl"
    assert result.settings == {"batch_size": 8, "max_length": 512, "device": "cpu", "dtype": "float64"}
    assert str(tmp_path) not in json.dumps(result.tasks) + result.model


@needs_lm_eval
def test_the_command_writes_results_that_reach_the_card_and_nothing_when_it_fails(save, tmp_path, monkeypatch):
    folder = save("nrgpt", dtype=torch.float32)
    rows = write_rows(tmp_path / "choice.jsonl", *[{"context": "a", "choices": ["b", "c d"], "answer": 0}] * 3)
    line = ["eval", str(folder), "--tasks", rows, "--limit", "2", "--num-steps", "1", "--device", "cpu"]
    with monkeypatch.context() as broken:
        broken.setattr("lm_eval.evaluator.simple_evaluate", lambda *args, **kwargs: 1 / 0)
        assert isinstance(CliRunner().invoke(cli.app, line).exception, ZeroDivisionError)
    assert not (folder / "evaluation").exists()
    done = CliRunner().invoke(cli.app, line)
    assert done.exit_code == 0, done.output
    assert "3 examples, the first 2" in done.output
    assert os.listdir(folder / "evaluation") == ["choice-limit=2-num_steps=1.json"]
    out = loopergy.export(folder, tmp_path / "out")
    value = Evaluation.load(out / "evaluation" / "choice-limit=2-num_steps=1.json").tasks["choice"]["metrics"]["acc"]
    card = (out / "README.md").read_text()
    assert f"| choice | acc | {value:.4f} ±" in card
    assert "first 2 of 3 | 0 | num_steps=1, dtype=float32, max_length=64 |" in card


def likelihoods(folder, batch_size, pairs, **run):
    from lm_eval.api.instance import Instance

    network = evaluation._language_model(folder, None, batch_size, None, "cpu", run)
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    return network, network.loglikelihood(asked, disable_tqdm=True)


@pytest.mark.slow
@needs_lm_eval
@pytest.mark.parametrize("kind", BUILD)
def test_likelihoods_are_the_models_own_in_every_batch(kind, save, topics_tokenizer):
    """Guards K1; lengths differ, and the longest context does not fit into NRGPT's positions: its end counts."""
    folder = save(kind)
    pairs = [(context, continuation) for context in TEXTS for continuation in (" a name", " x", " is an expression")]
    network, alone = likelihoods(folder, 1, pairs)
    model, longest = network.model, network.model.config.max_position_embeddings
    assert network.max_length == longest
    for (context, continuation), (value, greedy) in zip(pairs, alone, strict=True):
        whole, end = (topics_tokenizer(part, return_tensors="pt").input_ids[0] for part in (context, continuation))
        ids = torch.cat((whole, end))[-longest - 1 :]
        with torch.no_grad():
            scores = model(ids[None, :-1]).logits[0, -len(end) :].log_softmax(-1)
        assert value == pytest.approx(float(scores.gather(1, end[:, None]).sum()), abs=1e-9)
        assert greedy == bool((scores.argmax(-1) == end).all())
    for batch_size in (3, 5, 12):
        _, together = likelihoods(folder, batch_size, pairs)
        assert [one[1] for one in together] == [one[1] for one in alone]
        assert [one[0] for one in together] == pytest.approx([one[0] for one in alone], abs=1e-9)


@pytest.mark.slow
@needs_lm_eval
def test_a_model_in_memory_scores_what_its_folder_scores_and_takes_no_loading_options(save, tmp_path):
    """Guards K3."""
    folder = save("ouro")
    rows = write_rows(tmp_path / "next.jsonl", {"context": TEXTS[0], "continuation": TEXTS[1]})
    named = evaluate(folder, rows, num_loops=1, device="cpu")
    model = loopergy.OuroForCausalLM.from_pretrained(folder, num_loops=1)
    held = evaluate(model, rows)
    assert held.tasks == named.tasks
    assert model.config.use_cache
    assert evaluate(folder, rows, device="cpu").tasks != named.tasks
    with pytest.raises(ValueError, match="from_pretrained"):
        evaluate(model, rows, num_loops=2)


@pytest.mark.slow
@needs_lm_eval
def test_what_cannot_be_measured_is_refused_before_the_model_is_loaded(tmp_path):
    nowhere = tmp_path / "no-model"
    with pytest.raises(FileNotFoundError, match="no-model"):
        evaluate(nowhere, "mmlu")
    loopergy.OuroForCausalLM(loopergy.OuroConfig.from_preset("tiny")).save_pretrained(nowhere)
    with pytest.raises(ValueError, match=r"no task 'hellaswagg'.*hellaswag"):
        evaluate(nowhere, "hellaswagg")
    with pytest.raises(ValueError, match="no task file"):
        evaluate(nowhere, str(tmp_path / "x.jsonl"))
    with pytest.raises(ValueError, match="no tasks"):
        evaluate(nowhere, "")
    for limit in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"limit={limit} must be a whole number"):
            evaluate(nowhere, "mmlu", limit=limit)
    for option, value in (("device", "oops"), ("device", "cuda:99"), ("dtype", "oops")):
        with pytest.raises(ValueError, match=f"{option}='{value}'"):
            evaluate(nowhere, "mmlu", **{option: value})
    rows = write_rows(tmp_path / "text.jsonl", {"text": "a"})
    with pytest.raises(ValueError, match="no tokenizer beside"):
        evaluate(nowhere, rows)


@needs_lm_eval
def test_a_checkpoint_that_lacks_a_tensor_is_not_measured(save, tmp_path):
    folder = save("lt2", dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 tensor\(s\) missing: lm_head\.weight"):
        evaluate(folder, write_rows(tmp_path / "text.jsonl", {"text": "a"}), device="cpu")


@needs_lm_eval
def test_words_that_a_tokenizer_does_not_have_are_named_and_git_is_not_asked(tmp_path, capfd, monkeypatch):
    tokenizer = word_tokenizer(["a", "b", "."], eos_token=".")
    BUILD["nrgpt"](3).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert evaluate("model", write_rows(tmp_path / "known.jsonl", {"text": "a b"}), device="cpu").tasks
    assert "git" not in capfd.readouterr().err
    with pytest.raises(ValueError, match="The text holds 'hello', which the tokenizer's vocabulary of 3"):
        evaluate("model", write_rows(tmp_path / "unknown.jsonl", {"text": "a"}, {"text": "b hello"}), device="cpu")


YAML_TASK = """
task: by_yaml
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


@pytest.mark.slow
@needs_lm_eval
def test_the_plain_command_of_lm_eval_gives_the_same_on_an_exported_folder(save, tmp_path):
    folder = loopergy.export(save("lt2", dtype=torch.float32), tmp_path / "out")
    rows = [{"context": TEXTS[i % 4], "choices": ["a name", "x y", "is"], "answer": i % 3} for i in range(20)]
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "by_yaml.yaml").write_text(YAML_TASK.format(file=file))
    script = "import sys; sys.modules['loopergy'] = None; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    line = ["--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True,num_loops=1", "--tasks"]
    line += ["by_yaml", "--include_path", tmp_path / "yaml", "--device", "cpu", "--output_path", tmp_path / "theirs"]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, line)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(written.read_text())["results"]["by_yaml"]["acc,none"]
    ours = evaluate(folder, file, num_loops=1, device="cpu").tasks["rows"]["metrics"]["acc"]
    assert theirs == ours
    assert 0 < ours < 1
