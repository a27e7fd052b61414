# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Training less than everything: what trains, at which rate, what is saved, and that runs go on as they were."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loopergy.configuration.configuration_ouro import OuroConfig
from loopergy.conversion import convert
from loopergy.distill.adapters import ADAPTER_FILE, adapted_layers, merge_adapters
from loopergy.distill.body import BODIES, BodyConfig, prepare_body
from loopergy.distill.distill import DistillConfig, DistillModule, DistillTrainer
from loopergy.distill.extend import ExtendConfig, ExtendTrainer
from loopergy.distill.report import evaluate_heldout
from loopergy.distill.stage import StageError, StageTrainer
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.modeling.modeling_ouro import OuroForCausalLM
from loopergy.training.data import PackedDataset

HERE = Path(__file__).parent
pytest.importorskip("peft")


def make_teacher(**options):
    """Return a random tiny Ouro in float32."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_loops": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2}
    return OuroForCausalLM(OuroConfig(**sizes, **options)).eval()


def make_trainer(stage, teacher, folder, data, **options):
    """Return a trainer with a fresh student that keeps layer 1."""
    trainer, config = {"distill": (DistillTrainer, DistillConfig), "extend": (ExtendTrainer, ExtendConfig)}[stage]
    values = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "length": 16, "disable_tqdm": True}
    args = config(str(folder), **{**values, "use_cpu": True, "require_previous": False, **options})
    return trainer(convert(teacher, keep_layers=[1]).model, teacher, args, data)


def history(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def rows(random_batch, count=8):
    return [{"input_ids": row, "labels": row} for row in random_batch(rows=count)["input_ids"]]


def trained(folder, data, body="lora", stage="distill", teacher=None, **options):
    """Return a trainer that has done some steps at high rates, so that its adapters are far from zero."""
    values = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "body_learning_rate": 1e-2}
    teacher = make_teacher() if teacher is None else teacher
    trainer = make_trainer(stage, teacher, folder, data, **{**values, "body": body, "lora_rank": 4, **options})
    trainer.train()
    return trainer


def is_mixer(name: str) -> bool:
    """Say whether a parameter is of a mixer that replaced attention; layer 1 keeps its own."""
    return name.startswith(("model.layers.0.self_attn", "model.layers.2.self_attn"))


@pytest.mark.parametrize("body", BODIES)
def test_new_mixers_train_and_of_the_rest_what_the_option_says(ouro, tmp_path, random_batch, body):
    """Guards H7, J1: every trained tensor gets a gradient, though all loops visit it."""
    student = convert(ouro, keep_layers=[1]).model
    trainer = make_trainer("distill", ouro, tmp_path, rows(random_batch), body=body, lora_rank=2)
    student = trainer.student
    for name, layer in adapted_layers(student).items():
        torch.nn.init.normal_(layer.lora_B["default"].weight), name
    trainer.model(**random_batch(), progress=0.0)["loss"].backward()
    for name, parameter in student.named_parameters():
        adapter = ".lora_" in name
        wanted = is_mixer(name) or adapter or (body == "full" and "early_exit_gate" not in name)
        assert parameter.requires_grad == wanted, name
        assert (parameter.grad is not None and parameter.grad.abs().max() > 0) == wanted, name
    adapted = {name.removeprefix("model.layers.") for name in adapted_layers(student)}
    mlps = {f"{layer}.mlp.{part}_proj" for layer in range(3) for part in ("gate", "up", "down")}
    assert adapted == (mlps | {f"1.self_attn.{part}_proj" for part in "qkvo"} if body == "lora" else set())


def test_fresh_adapters_change_no_output_and_the_same_seed_gives_the_same_ones(ouro, random_batch):
    student, ids = convert(ouro, keep_layers=[1]).model, random_batch()["input_ids"]
    before, state = student(ids).logits, torch.random.get_rng_state()
    other = copy.deepcopy(student)
    prepare_body(student, "lora", 4, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(student(ids).logits, before, rtol=0, atol=0)
    torch.manual_seed(99)
    prepare_body(other, "lora", 4, seed=3)
    for one, two in zip(student.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    # Once more, with another rank: the old adapters are merged, not stacked.
    prepare_body(student, "lora", 2, alpha=6.0)
    assert {layer.scaling["default"] for layer in adapted_layers(student).values()} == {3.0}
    assert {tuple(layer.lora_A["default"].weight.shape) for layer in adapted_layers(student).values()} == {
        (2, 32),
        (2, 48),
    }


def test_adapters_have_the_rate_of_what_they_are_on(ouro, tmp_path):
    """Guards H12."""
    options = {"body": "lora", "learning_rate": 1e-3, "body_learning_rate": 1e-4, "weight_decay": 0.1}
    trainer = make_trainer("distill", ouro, tmp_path, [], **options)
    groups = trainer.create_optimizer().param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    trainable = {name: p for name, p in trainer.student.named_parameters() if p.requires_grad}
    assert {id(p) for p in trainable.values()} == rates.keys()
    for name, parameter in trainable.items():
        assert rates[id(parameter)] == (1e-3 if "self_attn" in name else 1e-4), name


@pytest.mark.parametrize("body", BODIES)
def test_the_optimizer_keeps_two_moments_of_what_trains_and_of_nothing_else(tmp_path, random_batch, body):
    trainer = trained(tmp_path, rows(random_batch), body)
    moments = [tensor for state in trainer.optimizer.state.values() for tensor in state.values() if tensor.ndim > 0]
    wanted = sum(p.numel() for p in trainer.student.parameters() if p.requires_grad)
    assert sum(tensor.numel() for tensor in moments) == 2 * wanted


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", ["distill", "extend"])
def test_what_a_stage_leaves_is_a_plain_model_that_computes_the_same(tmp_path, random_batch, stage, tied):
    """Guards H12, J1: peft's own merge is the oracle."""
    teacher = make_teacher(tie_word_embeddings=tied)
    trainer = trained(tmp_path / "run", rows(random_batch), stage=stage, teacher=teacher)
    student, ids = trainer.student.eval(), random_batch(seed=7)["input_ids"]
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    trainer.save_stage(tmp_path / "done")
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())
    assert not (tmp_path / "done" / ADAPTER_FILE).exists()
    plain, info = LT2ForCausalLM.from_pretrained(tmp_path / "done", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tied
    unadapted = convert(teacher, keep_layers=[1]).model
    assert plain.state_dict().keys() == unadapted.state_dict().keys()
    with torch.no_grad():
        logits = student(ids).logits
        torch.testing.assert_close(plain.eval()(ids).logits, logits, rtol=0, atol=1e-4)
        for layer in adapted_layers(student).values():
            assert (layer.get_delta_weight("default")).abs().max() > 1e-3
            layer.merge()
    for name, layer in adapted_layers(student).items():
        torch.testing.assert_close(plain.get_submodule(name).weight, layer.weight, rtol=0, atol=1e-6, msg=name)
    batches = [random_batch(seed=5)]
    seen = [evaluate_heldout(model, teacher, batches)["kl"] for model in (student, plain)]
    assert seen[1] == pytest.approx(seen[0], rel=1e-4)


@pytest.mark.parametrize("body", ["lora", "frozen"])
@pytest.mark.parametrize("stage", ["distill", "extend"])
def test_an_interrupted_run_is_an_uninterrupted_one(stage, body, ouro, tmp_path, byte_tokenizer):
    """Guards I7: checkpoints hold merged weights to be used, and beside them the adapters to go on with."""
    texts = [f"document {index} " * (index % 5 + 1) for index in range(9)]
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 1}

    def run(folder, resume=None):
        data = PackedDataset(texts, byte_tokenizer, 16, split="all")
        settings = {"learning_rate": 1e-2, "body_learning_rate": 1e-2, "lora_rank": 4, "body": body}
        trainer = make_trainer(stage, ouro.float(), folder, data, **options, **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-6")
    resumed = run(tmp_path / "cut", resume=True)
    assert history(resumed) == pytest.approx(history(whole), rel=1e-6)
    for (name, one), other in zip(whole.student.named_parameters(), resumed.student.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=name)
        assert one.requires_grad or torch.equal(one, other), name
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    assert (checkpoint / ADAPTER_FILE).is_file() == (body == "lora")
    ids = torch.arange(3, 15)[None]
    merged = LT2ForCausalLM.from_pretrained(checkpoint).eval()
    torch.testing.assert_close(merged(ids).logits, whole.student.eval()(ids).logits, rtol=0, atol=1e-4)


def test_a_checkpoint_of_another_body_or_rank_is_refused(tmp_path, random_batch):
    """Guards H2."""
    data, options = rows(random_batch), {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    for body in ("lora", "frozen"):
        trained(tmp_path / body, data, body, **options)
    for body, other, message in (("lora", "frozen", "with `body='lora'`"), ("frozen", "lora", "without adapters")):
        with pytest.raises(StageError, match=f"of a run {message}"):
            make_trainer("distill", make_teacher(), tmp_path / body, data, body=other, max_steps=2).train_or_resume()
    with pytest.raises(ValueError, match=r"here \(5, 48\), there \(4, 48\).*`lora_rank`"):
        make_trainer(
            "distill", make_teacher(), tmp_path / "lora", data, body="lora", lora_rank=5, max_steps=2
        ).train_or_resume()


@pytest.mark.parametrize("body", ["lora", "frozen"])
def test_activation_checkpointing_changes_nothing_behind_frozen_embeddings(tmp_path, random_batch, body):
    """Guards I2: the input of the first layer asks for no gradient."""
    seen = [
        trained(tmp_path, rows(random_batch), body, activation_checkpointing=checkpointing)
        for checkpointing in (False, True)
    ]
    assert seen[1].student.model.gradient_checkpointing
    for key in ("loss", "grad_norm"):
        assert history(seen[1], key) == pytest.approx(history(seen[0], key), rel=1e-5)


def test_the_next_stage_merges_the_adapters_of_a_student_in_memory(tmp_path, random_batch):
    before = trained(tmp_path / "distill", rows(random_batch))
    student, ids = before.student.eval(), random_batch(seed=7)["input_ids"]
    logits = student(ids).logits
    args = ExtendConfig(str(tmp_path / "extend"), use_cpu=True, max_steps=1, length=12, body="frozen")
    trainer = ExtendTrainer(student, None, args, previous=before.record())
    assert not adapted_layers(trainer.student)
    assert not hasattr(student, "peft_config")
    torch.testing.assert_close(student(ids).logits, logits, rtol=0, atol=1e-4)


def test_adapters_are_merged_in_bfloat16_without_losing_what_bfloat16_can_hold(ouro):
    student = convert(ouro.to(torch.bfloat16), keep_layers=[1]).model
    prepare_body(student, "lora", 4)
    name, layer = next(iter(adapted_layers(student).items()))
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    product = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double() * 8
    exact = layer.get_base_layer().weight.double() + product
    merge_adapters(student)
    merged = student.get_submodule(name).weight
    assert merged.dtype is torch.bfloat16
    torch.testing.assert_close(merged.double(), exact, rtol=2**-8, atol=1e-6)


def test_what_cannot_be_is_refused_with_the_way_out(ouro, tmp_path, monkeypatch):
    for options, message in (
        ({"body": "adapters"}, r"`body` must be one of \('full', 'lora', 'frozen'\), got 'adapters'"),
        ({"lora_rank": 0}, "`lora_rank` must be at least 1, got 0"),
        ({"lora_alpha": 0.0}, r"`lora_alpha` must be above 0, got 0\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            BodyConfig(str(tmp_path), use_cpu=True, max_steps=1, **options)
    with pytest.raises(ValueError, match="this student has none"):
        prepare_body(convert(ouro, keep_layers="all").model, "frozen")
    student = convert(ouro, keep_layers=[1]).model
    student.is_quantized = True
    with pytest.raises(ValueError, match="without `quantization_config`"):
        prepare_body(student, "lora")
    original = StageTrainer.create_accelerator_and_postprocess
    for flag in ("is_fsdp_enabled", "is_deepspeed_enabled"):

        def create(self, flag=flag):
            original(self)
            setattr(self, flag, True)

        monkeypatch.setattr(StageTrainer, "create_accelerator_and_postprocess", create)
        with pytest.raises(ValueError, match=r"ddp\.yaml"):
            make_trainer("distill", ouro, tmp_path, [], body="lora")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        prepare_body(convert(ouro, keep_layers=[1]).model, "lora")


def test_one_student_serves_module_and_trainer_alike(ouro, tmp_path, random_batch):
    """The loss of a body is that of the whole student: nothing of the forward pass is left out."""
    batch, losses = random_batch(), []
    for body in BODIES:
        trainer = make_trainer("distill", ouro, tmp_path, [], body=body)
        assert isinstance(trainer, DistillTrainer)
        assert isinstance(trainer.model, DistillModule)
        losses.append(trainer.model(**batch, progress=0.5)["loss"].item())
    assert losses[1:] == [losses[0]] * 2


TWO = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from torch.distributed.tensor import DTensor
import two_processes as processes
from conftest import make_ouro
from test_stage import history, make_trainer

torch.set_num_threads(1)
ROWS = [torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(n)) for n in (12, 3, 7, 5) * 3]

def train(folder, body, resume):
    count, sharded = int(os.environ.get("WORLD_SIZE", "1")), os.environ["ACCELERATE_USE_CPU"] == "false"
    options = {"per_device_train_batch_size": 4 // count, "max_steps": 3, "train_sampling_strategy": "sequential"}
    options |= {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3, "body_learning_rate": 1e-3}
    options |= {"use_cpu": not sharded, "ddp_backend": "gloo" if count > 1 and not sharded else None}
    data = [{"input_ids": row} for row in ROWS]
    trainer = make_trainer("distill", make_ouro(torch.float32), folder, data, body=body, **options)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    trainer.save_stage(folder / "done")
    parts = [isinstance(p, DTensor) for p in trainer.student.parameters()]
    result = {"loss": history(trainer), "norm": history(trainer, "grad_norm"), "parts": parts}
    processes.write(folder / "result", result)

root = Path(sys.argv[2])
for body, sharded in (("lora", False), ("frozen", False), ("frozen", True)):
    name = f"{body}-{sharded}"
    assert processes.run(1, train, root / name / "one", body, False) == [0]
    assert processes.run(2, train, root / name / "two", body, False, sharded=sharded) == [0, 0]
    (root / name / "resumed").mkdir(parents=True)
    os.rename(root / name / "two" / "checkpoint-2", root / name / "resumed" / "checkpoint-2")
    assert processes.run(2, train, root / name / "resumed", body, True, sharded=sharded) == [0, 0]
"""


@pytest.mark.slow
def test_two_processes_train_like_one_and_a_frozen_body_may_be_sharded(tmp_path):
    """Guards H3, I5, I7."""
    from safetensors.torch import load_file

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TWO, str(HERE), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    for case in ("lora-False", "frozen-False", "frozen-True"):
        results = {n: json.loads((tmp_path / case / n / "result.json").read_text()) for n in ("one", "two", "resumed")}
        assert all(results["two"]["parts"]) == (case == "frozen-True")
        weights = {n: load_file(tmp_path / case / n / "done" / "model.safetensors") for n in results}
        for name in ("two", "resumed"):
            assert results[name]["loss"] == pytest.approx(results["one"]["loss"], rel=1e-5), case
            assert results[name]["norm"] == pytest.approx(results["one"]["norm"], rel=1e-4), case
            for key, tensor in weights["one"].items():
                torch.testing.assert_close(weights[name][key], tensor, rtol=0, atol=1e-5, msg=f"{case} {key}")
