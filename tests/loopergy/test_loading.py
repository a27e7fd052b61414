# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What a verb is given is looked at before anything is loaded, and no checkpoint is filled up with random numbers."""

import builtins
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import loopergy
from loopergy import cli
from loopergy.describe import describe_cost, model_cost
from loopergy.loading import auto_class, check_run_options, check_whole, checked_device, found_model, model_config

TENSOR = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, topics_tokenizer):
    """Save a small model with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "whole"
    config = loopergy.LT2Config.from_preset("tiny", vocab_size=len(topics_tokenizer), layer_mixers="gdn,full")
    loopergy.LT2ForCausalLM(config).save_pretrained(folder)
    topics_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def lacking(whole, tmp_path):
    """Copy the model without one tensor."""
    folder = shutil.copytree(whole, tmp_path / "lacking")
    tensors = load_file(folder / "model.safetensors")
    del tensors[TENSOR]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "line",
    [
        ("export", "{}", "-o", "{}-out"),
        ("generate", "{}", "hello", "--device", "cpu"),
        ("trace", "{}", "hello"),
        ("serve", "{}"),
    ],
    ids=lambda line: line[0],
)
def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_every_verb(lacking, shown_by_main, line):
    shown = shown_by_main(*(word.format(lacking) for word in line))
    assert shown.endswith(f"does not fit its own config: 1 tensor(s) missing: {TENSOR}")
    assert sorted(file.name for file in lacking.parent.iterdir()) == ["lacking"]


def test_a_checkpoint_with_a_tensor_too_many_is_refused(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "extra")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "other.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected: other\.weight"):
        check_whole(str(folder))
    check_whole(str(whole))


HEADS = {
    "LT2Model": (AutoModel, "feature-extraction"),
    "LT2ForCausalLM": (AutoModelForCausalLM, "text-generation"),
    "LT2ForSequenceClassification": (AutoModelForSequenceClassification, "text-classification"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_folder_is_described_and_exported_with_the_head_that_it_has(kind, tmp_path):
    model = getattr(loopergy, kind)(loopergy.LT2Config.from_preset("tiny", layer_mixers="gdn,full", num_labels=3))
    model.save_pretrained(tmp_path / "saved")
    config = model_config(tmp_path / "saved")
    auto, task = HEADS[kind]
    assert auto_class(config) is auto
    cost = model_cost(config)
    assert cost.parameters == model.num_parameters()
    assert dict(describe_cost("x", config, cost))["model"] == f"x (lt2, {kind})"
    out = loopergy.export(tmp_path / "saved", tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["architectures"] == [kind]
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", out))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert f"pipeline_tag: {task}\n" in (out / "README.md").read_text()


def test_learned_positions_end_the_context_of_a_model_without_a_head(tmp_path):
    model = loopergy.NRGPTModel(loopergy.NRGPTConfig.from_preset("tiny"))
    model.save_pretrained(tmp_path)
    assert model_cost(model_config(tmp_path)).context == model.config.max_position_embeddings - 1


def test_an_adapter_is_no_model_and_the_text_says_how_to_merge_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for look in (model_config, lambda folder: loopergy.export(folder, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"holds an adapter and no model: merge it first.*merge_and_unload"):
            look(tmp_path)


def test_code_beside_an_unknown_model_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda *question: pytest.fail("asked"))
    fields = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "own.py").write_text("raise SystemExit\n")
    for verb in (lambda: loopergy.export(tmp_path, tmp_path / "out"), lambda: loopergy.write_card(tmp_path)):
        with pytest.raises(ValueError, match="trust_remote_code"):
            verb()


@pytest.mark.parametrize("name", ["oops", "cuda:99", "meta", "", "cuda"])
def test_a_device_that_is_not_there_is_refused(name):
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(ValueError, match=rf"device='{name}' \(--device\) is not there: use cpu"):
        checked_device(name)


def test_a_device_that_is_there_is_returned():
    assert checked_device("cpu") == torch.device("cpu")
    assert checked_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("kind", "option"),
    [(loopergy.LT2Config, "num_steps"), (loopergy.OuroConfig, "num_steps"), (loopergy.NRGPTConfig, "num_loops")],
)
def test_loops_and_steps_that_a_model_does_not_have_are_refused_by_its_config_alone(tmp_path, kind, option):
    kind.from_preset("tiny").save_pretrained(tmp_path)
    other = {"num_steps": "num_loops", "num_loops": "num_steps"}[option]
    check_run_options(tmp_path, **{other: 1})
    said = rf"{option}=2 \(--{option.replace('_', '-')}\): .* type '{kind.model_type}'"
    with pytest.raises(ValueError, match=said):
        check_run_options(tmp_path, **{option: 2})


@pytest.mark.parametrize(
    "line",
    [
        ("generate", "{}", "hi", "--device", "oops"),
        ("serve", "{}", "--device", "oops"),
        ("serve", "{}", "--device=oops"),
        ("task", "eval", "recall", "{}", "--device", "oops"),
    ],
)
def test_every_verb_looks_at_its_device(shown_by_main, whole, line):
    assert "device='oops' (--device) is not there" in shown_by_main(*(word.format(whole) for word in line))


@pytest.mark.parametrize("line", [("generate", "{}", "hi"), ("info", "{}"), ("export", "{}", "-o", "out")])
def test_every_verb_looks_at_its_dtype(shown_by_main, whole, line):
    wanted = "dtype='float8_e4m3fn' is not one of float32, bfloat16, float16, float64"
    assert wanted in shown_by_main(*(word.format(whole) for word in line), "--dtype", "float8_e4m3fn")


@pytest.mark.parametrize(
    "line",
    [
        ("generate", "m/nope", "hi"),
        ("trace", "m/nope", "hi"),
        ("serve", "m/nope"),
        ("info", "m/nope"),
        ("export", "m/nope", "-o", "out"),
        ("task", "eval", "recall", "m/nope"),
    ],
)
def test_a_model_that_is_nowhere_is_named_in_one_line(shown_by_main, line):
    shown = shown_by_main(*line)
    assert shown.startswith("loopergy: 'm/nope' is no folder here, and the Hub did not give a model of that name: ")


def test_a_home_folder_is_found(monkeypatch, tmp_path, shown_by_main, whole):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(whole, tmp_path / "model")
    assert found_model("~/model") == str(tmp_path / "model")
    assert loopergy.export("~/model", "~/out") == tmp_path / "out"
    assert (tmp_path / "out" / "config.json").is_file()
    assert f"{tmp_path / 'nope'}" in shown_by_main("export", "~/nope", "-o", "~/other")
    assert cli.expanded("~/x") == f"{tmp_path}/x"
