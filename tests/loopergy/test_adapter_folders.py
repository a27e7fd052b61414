# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Adapters saved beside or apart from their model load again, with and without loopergy, and merge into a model."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from without_loopergy import WITHOUT_LOOPERGY

import loopergy
from loopergy.hub_export import export

peft = pytest.importorskip("peft")

FAMILIES = {
    "ouro": lambda: loopergy.OuroForCausalLM(loopergy.OuroConfig.from_preset("tiny")),
    "lt2": lambda: loopergy.LT2ForCausalLM(loopergy.LT2Config.from_preset("tiny", layer_mixers="gdn,full,hgrn2,dsa")),
    "cem_llama": lambda: loopergy.CEMLlamaForCausalLM(loopergy.CEMLlamaConfig.from_preset("tiny", num_steps=2)),
    "nrgpt": lambda: loopergy.NRGPTForCausalLM(loopergy.NRGPTConfig.from_preset("tiny")),
    "gpt_baseline": lambda: loopergy.GPTBaselineForCausalLM(loopergy.GPTBaselineConfig.from_preset("tiny")),
}

# Runs where `import loopergy` fails: (base, adapter, result) folders, three at a time.
STRANGER = (
    WITHOUT_LOOPERGY
    + """
import torch
from transformers import AutoModelForCausalLM

torch.set_grad_enabled(False)
ids = torch.arange(3, 20)[None]
for base, adapter, result in zip(*(sys.argv[start::3] for start in (1, 2, 3))):
    model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True).eval()
    import peft  # only now: the defaults do not hang on the order

    fresh = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))
    assert fresh.targeted_module_names
    model = peft.AutoPeftModelForCausalLM.from_pretrained(adapter, trust_remote_code=True).eval()
    expected = torch.load(adapter + ".pt", weights_only=True)
    assert torch.equal(model(ids).logits, expected), base
    merged = model.merge_and_unload()
    merged.save_pretrained(result)
    again = AutoModelForCausalLM.from_pretrained(result, trust_remote_code=True).eval()
    torch.testing.assert_close(again(ids).logits, expected, rtol=0, atol=1e-4)
    print("same", type(again).__name__)
"""
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Export a model of each family, and save an adapter on it with what it computes."""
    place, ids = tmp_path_factory.mktemp("adapters"), torch.arange(3, 20)[None]
    for name, build in FAMILIES.items():
        torch.manual_seed(0)
        export(build(), place / name)
        base = AutoModelForCausalLM.from_pretrained(place / name)
        config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)
        model = peft.get_peft_model(base, config).eval()
        model.save_pretrained(place / f"{name}-adapter")
        with torch.no_grad():
            torch.save(model(ids).logits, place / f"{name}-adapter.pt")
    return place


def expected(folders, name):
    return torch.load(folders / f"{name}-adapter.pt", weights_only=True)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_an_adapter_loads_by_each_way_that_there_is(folders, name):
    ids, folder = torch.arange(3, 20)[None], folders / f"{name}-adapter"
    base = AutoModelForCausalLM.from_pretrained(folders / name).eval()
    plain = base(ids).logits
    assert (plain - expected(folders, name)).abs().max() > 1e-4
    on_top = peft.PeftModel.from_pretrained(base, folder).eval()
    by_auto_peft = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    by_transformers = AutoModelForCausalLM.from_pretrained(folder).eval()
    for model in (on_top, by_auto_peft, by_transformers):
        assert torch.equal(model(ids).logits, expected(folders, name))
    assert {file.name for file in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_transformers_loads_an_adapter_into_a_model_and_exchanges_it_in_place(folders, name, tmp_path, monkeypatch):
    # transformers may ask for a newer peft than there is; what is used here is older.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", importlib.metadata.version("peft"))
    ids, folder = torch.arange(3, 20)[None], folders / f"{name}-adapter"
    other = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    for key, parameter in other.named_parameters():
        if "lora_B" in key:
            parameter.neg_()
    other.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folders / name).eval()
    plain = model(ids).logits
    model.load_adapter(str(folder))
    assert torch.equal(model(ids).logits, expected(folders, name))
    model.load_adapter(str(tmp_path), adapter_name="default", hotswap=True)
    assert torch.equal(model(ids).logits, other.eval()(ids).logits)
    model.disable_adapters()
    assert torch.equal(model(ids).logits, plain)


def test_a_process_without_loopergy_loads_trains_and_merges_the_same(folders, tmp_path):
    """Guards E14, J4."""
    names = [str(folders / name) for name in FAMILIES]
    arguments = [part for name in names for part in (name, f"{name}-adapter", f"{name}-merged")]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", STRANGER, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same") == len(FAMILIES)


def test_a_merged_model_is_ours_again(folders, tmp_path):
    """Guards E14: after training as before, the folder names our classes and holds their code."""
    ids = torch.arange(3, 20)[None]
    model = peft.AutoPeftModelForCausalLM.from_pretrained(folders / "lt2-adapter", is_trainable=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="merge_and_unload"):
        export(model, tmp_path / "refused")
    merged = model.eval().merge_and_unload()
    export(merged, tmp_path / "merged")
    entries = json.loads((tmp_path / "merged" / "config.json").read_text())["auto_map"]
    assert entries["AutoModelForCausalLM"] == "modeling_lt2.LT2ForCausalLM"
    assert not any("Peft" in entry for entry in entries.values())
    assert (tmp_path / "merged" / "modeling_lt2.py").is_file()
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert torch.equal(again(ids).logits, merged(ids).logits)
