# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""An exported folder stands alone: another process, without loopergy, computes the same numbers from it."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from transformers import Trainer, TrainingArguments
from without_loopergy import WITHOUT_LOOPERGY

import loopergy
from loopergy import hub_code
from loopergy.hub_export import check_export, export, push

MODELS = {
    "ouro": lambda: loopergy.OuroForCausalLM(loopergy.OuroConfig.from_preset("tiny")),
    "lt2": lambda: loopergy.LT2ForCausalLM(loopergy.LT2Config.from_preset("tiny", layer_mixers="gdn,full,window")),
    "cem_llama": lambda: loopergy.CEMLlamaForCausalLM(loopergy.CEMLlamaConfig.from_preset("tiny", num_steps=2)),
    "nrgpt": lambda: loopergy.NRGPTForCausalLM(loopergy.NRGPTConfig.from_preset("tiny")),
    "gpt": lambda: loopergy.GPTBaselineForCausalLM(loopergy.GPTBaselineConfig.from_preset("tiny")),
    "all-mixers": lambda: loopergy.LT2ForCausalLM(
        loopergy.LT2Config.from_preset("tiny", num_hidden_layers=12, layer_mixers=EVERY_MIXER)
    ),
    "classifier": lambda: loopergy.LT2ForSequenceClassification(loopergy.LT2Config.from_preset("tiny", num_labels=3)),
}

EVERY_MIXER = "gdn,full,window,kda,deltanet,mamba2,hgrn2,retnet,gla,la,nsa,dsa"
# Folders that nobody exported: a Trainer's checkpoint, and a model after its adapter was merged.
SAVED = ("checkpoint-1", "merged")

# Runs where `import loopergy` fails; prints one line a folder.
STRANGER = (
    WITHOUT_LOOPERGY
    + """
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

torch.set_grad_enabled(False)
ids = torch.arange(3, 20)[None]
for folder in sys.argv[1:]:
    auto = AutoModelForSequenceClassification if folder.endswith("classifier") else AutoModelForCausalLM
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    expected = torch.load(folder + ".pt", weights_only=True)
    assert torch.equal(model(ids).logits, expected["logits"]), folder
    if auto is AutoModelForCausalLM:
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(tokens, expected["tokens"]), folder
    assert AutoModel.from_pretrained(folder, trust_remote_code=True) is not None
    print("same", type(model).__module__.split(".")[0])
"""
)


def trained(model, folder, **settings):
    """Take one optimizer step in a Trainer, which writes `checkpoint-1` into the folder."""
    arguments = TrainingArguments(
        folder, max_steps=1, save_steps=1, learning_rate=0.1, report_to="none", use_cpu=True, **settings
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(3, 35).view(4, 8)]
    Trainer(model, arguments, train_dataset=rows).train()
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Export a model of each kind, with what it computes beside it."""
    place = tmp_path_factory.mktemp("exported")
    ids = torch.arange(3, 20)[None]
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model = build().eval()
        export(model, place / name)
        with torch.no_grad():
            expected = {"logits": model(ids).logits}
        if model.can_generate():
            expected["tokens"] = model.generate(ids, max_new_tokens=5, do_sample=False)
        torch.save(expected, f"{place / name}.pt")
    return place


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save without `export` what comes out of training, with its logits beside it."""
    from peft import LoraConfig, get_peft_model

    place = tmp_path_factory.mktemp("saved")
    checkpoint = trained(MODELS["nrgpt"](), place)
    adapted = get_peft_model(MODELS["lt2"](), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    merged = trained(adapted, place / "adapter", save_strategy="no").merge_and_unload()
    merged.save_pretrained(place / "merged")
    for name, model in zip(SAVED, (checkpoint, merged), strict=True):
        ids = torch.arange(3, 20)[None]
        with torch.no_grad():
            logits = model.eval()(ids).logits
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
        torch.save({"logits": logits, "tokens": tokens}, f"{place / name}.pt")
    return place


def test_a_process_without_loopergy_computes_the_same(exported, saved, tmp_path):
    """Guards E1, E8, E14: offline, from exports, a Trainer's checkpoint, and after an adapter was merged."""
    folders = [*(exported / name for name in MODELS), *(saved / name for name in SAVED)]
    script = tmp_path / "stranger.py"
    script.write_text(STRANGER)
    done = subprocess.run(
        [sys.executable, script, *map(str, folders)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["same transformers_modules"] * len(folders)


def test_a_checkpoint_of_a_trainer_is_exported_with_what_it_learned(saved, tmp_path):
    folder = export(saved / "checkpoint-1", tmp_path / "out")
    check_export(folder)
    assert "optimizer.pt" not in os.listdir(folder)
    model = loopergy.NRGPTForCausalLM.from_pretrained(folder).eval()
    expected = torch.load(saved / "checkpoint-1.pt", weights_only=True)
    with torch.no_grad():
        assert torch.equal(model(torch.arange(3, 20)[None]).logits, expected["logits"])


def test_a_merged_model_is_saved_as_a_model_of_ours_with_its_code(saved):
    """Guards E14."""
    check_export(saved / "merged")
    config = json.loads((saved / "merged" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_lt2.LT2ForCausalLM"
    assert config["architectures"] == ["LT2ForCausalLM"]


@pytest.mark.parametrize("name", MODELS)
def test_every_import_in_the_folder_is_flat(exported, name):
    code = sorted((exported / name).glob("*.py"))
    assert code
    for file in code:
        text = file.read_text()
        assert "from loopergy" not in text, file.name
        for module in re.findall(r"^\s*from \.(\S*) import", text, flags=re.MULTILINE):
            assert (exported / name / f"{module}.py").is_file(), (file.name, module)


def test_where_loopergy_is_installed_its_classes_are_used(exported):
    from transformers import AutoModelForCausalLM

    assert type(AutoModelForCausalLM.from_pretrained(exported / "lt2")) is loopergy.LT2ForCausalLM


def test_auto_map_names_every_head(exported):
    config = json.loads((exported / "classifier" / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_lt2.LT2Config",
        "AutoModel": "modeling_lt2.LT2Model",
        "AutoModelForCausalLM": "modeling_lt2.LT2ForCausalLM",
        "AutoModelForDecision": "modeling_lt2.LT2ForCausalLM",  # what `transformers serve` asks for
        "AutoModelForSequenceClassification": "modeling_lt2.LT2ForSequenceClassification",
    }


def test_a_folder_is_exported_with_its_tokenizer_and_reports(tmp_path, topics_tokenizer):
    source = tmp_path / "checkpoint-3"
    MODELS["ouro"]().save_pretrained(source)
    topics_tokenizer.save_pretrained(source)
    (source / "conversion_report.json").write_text("{}")
    folder = export(source, tmp_path / "out", dtype="bfloat16")
    assert {"tokenizer.json", "conversion_report.json", "README.md", "generation_config.json"} <= set(
        os.listdir(folder)
    )
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert "pipeline_tag: text-generation" in (folder / "README.md").read_text()


def test_a_second_export_of_an_export_still_stands_alone(exported, tmp_path):
    check_export(export(exported / "lt2", tmp_path / "again"))


def test_what_cannot_be_exported_is_refused(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ValueError, match="not a model of loopergy"):
        export(llama, tmp_path / "llama")
    adapted = get_peft_model(MODELS["ouro"](), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        export(adapted, tmp_path / "adapted")
    export(adapted.merge_and_unload(), tmp_path / "merged")
    with pytest.raises(ValueError, match="dtype"):
        export(MODELS["ouro"](), tmp_path / "typed", dtype="bfloat16")
    assert sorted(os.listdir(tmp_path)) == ["merged"]


class Changed(loopergy.OuroConfig):
    """A user's own config, whose code is in the user's file."""


def test_the_config_of_a_user_is_not_saved_with_our_code(tmp_path):
    config = Changed.from_preset("tiny")
    config.save_pretrained(tmp_path)
    assert os.listdir(tmp_path) == ["config.json"]
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_without_sources_the_weights_are_saved_and_export_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_code, "find_spec", lambda module: None)
    model = MODELS["ouro"]()
    monkeypatch.setitem(hub_code._FAMILIES, type(model.config), hub_code.FamilyCode({"AutoModel": type(model)}))
    model.save_pretrained(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == ["config.json", "generation_config.json", "model.safetensors"]
    with pytest.raises(ValueError, match="has no source file; install loopergy"):
        export(model, tmp_path / "out")


def test_push_refuses_what_would_not_load(exported, tmp_path):
    with pytest.raises(ValueError, match="no exported model"):
        push(tmp_path, "user/name")
    folder = export(exported / "lt2", tmp_path / "lt2")
    (folder / "looped_cache.py").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks looped_cache\.py, model\.safetensors"):
        push(folder, "user/name")


def test_push_refuses_weights_that_are_cut_or_that_the_index_misnames(exported, tmp_path):
    folder = export(exported / "nrgpt", tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        check_export(folder)
    folder = tmp_path / "sharded"
    MODELS["nrgpt"]().save_pretrained(folder, max_shard_size="40KB")
    check_export(folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["nobody.weight"] = next(iter(index["weight_map"].values()))
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks nobody\.weight of the index"):
        check_export(folder)
    file.write_text("{half")
    with pytest.raises(ValueError, match=r"index\.json is no JSON"):
        check_export(folder)


def test_packed_weights_are_refused_with_a_way_out(tmp_path):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    MODELS["nrgpt"]().save_pretrained(tmp_path / "full")
    packing = TorchAoConfig(Int8WeightOnlyConfig())
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "full", quantization_config=packing)
    check_export(export(small, tmp_path / "small"))
    for model in (tmp_path / "small", AutoModelForCausalLM.from_pretrained(tmp_path / "small")):
        with pytest.raises(ValueError, match=r"packed \(quant_method 'torchao'\).*copy the folder"):
            export(model, tmp_path / "again")
    assert sorted(os.listdir(tmp_path)) == ["full", "small"]


def test_a_tokenizer_that_cannot_be_read_is_an_error_and_not_left_out(tmp_path):
    MODELS["ouro"]().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{ half")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(Exception, match=r"line 1|expected|key must be"):
        export(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
