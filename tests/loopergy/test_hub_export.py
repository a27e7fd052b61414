# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""An exported folder stands alone: another process, without loopergy, computes the same numbers from it."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import loopergy
from loopergy.hub_export import check_export, export, push

MODELS = {
    "ouro": lambda: loopergy.OuroForCausalLM(loopergy.OuroConfig.from_preset("tiny")),
    "lt2": lambda: loopergy.LT2ForCausalLM(loopergy.LT2Config.from_preset("tiny", layer_mixers="gdn,full,window")),
    "cem_llama": lambda: loopergy.CEMLlamaForCausalLM(loopergy.CEMLlamaConfig.from_preset("tiny", num_steps=2)),
    "nrgpt": lambda: loopergy.NRGPTForCausalLM(loopergy.NRGPTConfig.from_preset("tiny")),
    "classifier": lambda: loopergy.LT2ForSequenceClassification(loopergy.LT2Config.from_preset("tiny", num_labels=3)),
}

# Runs where `import loopergy` fails; prints one line a folder.
STRANGER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "loopergy":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
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


def test_a_process_without_loopergy_computes_the_same(exported, tmp_path):
    """Guards E8."""
    script = tmp_path / "stranger.py"
    script.write_text(STRANGER)
    done = subprocess.run(
        [sys.executable, script, *(str(exported / name) for name in MODELS)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["same transformers_modules"] * len(MODELS)


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


def test_push_refuses_what_would_not_load(exported, tmp_path):
    with pytest.raises(ValueError, match="no exported model"):
        push(tmp_path, "user/name")
    folder = export(exported / "lt2", tmp_path / "lt2")
    (folder / "looped_cache.py").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks looped_cache\.py, model\.safetensors"):
        push(folder, "user/name")


def test_a_tokenizer_that_cannot_be_read_is_an_error_and_not_left_out(tmp_path):
    MODELS["ouro"]().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{ half")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(Exception, match=r"line 1|expected|key must be"):
        export(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
