# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Ouro's own training: the objective against its formula, the gate against what it should say, resumed runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loopergy.conversion import convert
from loopergy.distill.losses import linear_token_losses
from loopergy.distill.pretrain import (
    GateConfig,
    GateModule,
    GateTrainer,
    PretrainConfig,
    PretrainModule,
    PretrainTrainer,
    evaluate_loops,
    exit_entropy,
)
from loopergy.distill.stage import StageError
from loopergy.modeling.modeling_ouro import OuroForCausalLM
from loopergy.training.data import PackedDataset


@pytest.fixture
def lively(ouro):
    """Return an Ouro whose gate differs between tokens."""
    nn.init.normal_(ouro.model.early_exit_gate.weight, std=0.5)
    return ouro


def say(model, ids):
    """Return cross-entropy and exit probability of every target and loop, from full logits; [rows, length - 1, T]."""
    output = model(input_ids=ids, output_loop_logits=True)
    targets = ids[:, 1:]
    losses = [F.cross_entropy(z[:, :-1].transpose(1, 2), targets, reduction="none") for z in output.loop_logits]
    gates = [torch.sigmoid(model.model.early_exit_gate(h))[:, :-1, 0] for h in output.loop_hidden_states]
    stay, pdf = torch.ones_like(gates[0]), []
    for gate in gates[:-1]:
        pdf.append(stay * gate)
        stay = stay * (1 - gate)
    return torch.stack(losses, -1), torch.stack([*pdf, stay], -1), torch.stack(gates, -1)


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_the_objective_is_the_expected_loss_less_the_weighted_entropy_in_value_and_gradient(
    lively, random_batch, chunk_size
):
    ids = random_batch()["input_ids"]
    module = PretrainModule(lively, entropy_weight=0.3, chunk_size=chunk_size)
    result = module(input_ids=ids)
    result["loss"].backward()
    ours = gradients(module.student)
    lively.zero_grad()
    losses, pdf, _ = say(lively, ids)
    wanted = ((pdf * losses).sum(-1) + 0.3 * (pdf * pdf.log()).sum(-1)).mean()
    wanted.backward()
    theirs = gradients(lively)
    torch.testing.assert_close(result["loss"], wanted, rtol=1e-12, atol=0)
    assert set(ours) == set(theirs) == {name for name, _ in lively.named_parameters()}
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12)


def test_pads_and_the_cut_of_a_step_change_nothing(lively, random_batch):
    ids = random_batch(rows=3, length=9)["input_ids"]
    module = PretrainModule(lively)
    whole = module(input_ids=ids)["loss"]
    parts = [module(input_ids=row[None], num_items_in_batch=24)["loss"] for row in ids]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
    padded = {
        "input_ids": F.pad(ids, (0, 4)),
        "attention_mask": F.pad(torch.ones_like(ids), (0, 4)),
        "labels": F.pad(ids, (0, 4), value=-100),
    }
    torch.testing.assert_close(module(**padded)["loss"], whole, rtol=1e-12, atol=0)
    nothing = module(input_ids=ids, labels=torch.full_like(ids, -100))["loss"]
    assert nothing.item() == 0


def test_the_entropy_has_hand_numbers_and_a_finite_gradient_at_zero():
    logits = torch.tensor([[0.5, 0.5], [1.0, 0.0]], requires_grad=True)
    entropy = exit_entropy(logits)
    torch.testing.assert_close(entropy, torch.tensor([0.6931472, 0.0]))
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


def test_the_gate_learns_whether_the_next_loop_helps_this_token(lively, random_batch):
    """The target of the gate after loop t is the gain of loop t + 1; the last gate, which nothing reads, has none."""
    ids = random_batch()["input_ids"]
    module = GateModule(lively, steepness=3.0, worthwhile_gain=0.1)
    loss = module(input_ids=ids)["loss"]
    losses, _, gates = (value.detach() for value in say(lively, ids))
    go_on = torch.sigmoid(3.0 * ((losses[..., :-1] - losses[..., 1:]).clamp(min=0) - 0.1))
    wanted = F.binary_cross_entropy(1 - gates[..., :-1], go_on)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    loss.backward()
    trained = {name for name, p in lively.named_parameters() if p.grad is not None}
    assert trained == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}


def test_a_gate_trained_where_a_loop_never_helps_says_stop(tmp_path, byte_tokenizer, new_ouro):
    """With the identity as second loop there is no gain: the gate must come to leave after the first."""
    model = new_ouro(torch.float32, num_hidden_layers=1)
    layer = model.model.layers[0]
    nn.init.zeros_(layer.input_layernorm_2.weight)
    nn.init.zeros_(layer.post_attention_layernorm_2.weight)
    data = PackedDataset(["some text, again and again " * 20], byte_tokenizer, 16, split="all")
    args = GateConfig(
        str(tmp_path), max_steps=60, per_device_train_batch_size=2, length=16, learning_rate=0.1, use_cpu=True,
        require_previous=False, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    batches = [{"input_ids": next(iter(data))["input_ids"][None]}]
    before = evaluate_loops(model, batches)
    GateTrainer(model, None, args, data).train()
    after = evaluate_loops(model, batches)
    # sigmoid(-50 * 0.005) = 0.44 is what the target says where nothing is gained.
    assert after["exit_share"][0] == pytest.approx(0.56, abs=0.03)
    assert abs(before["exit_share"][0] - 0.56) > 0.03


def test_models_without_a_gate_or_loops_are_refused(llama, random_batch, new_ouro):
    with pytest.raises(ValueError, match="no exit gate"):
        PretrainModule(llama)(input_ids=random_batch()["input_ids"])
    with pytest.raises(ValueError, match="at least two loops"):
        GateModule(new_ouro(num_loops=1))
    with pytest.raises(ValueError, match="entropy_weight"):
        PretrainConfig("x", entropy_weight=-1.0, use_cpu=True)


def test_a_converted_student_can_have_its_gate_trained_again(lively, random_batch):
    student = convert(lively, keep_layers=[1]).model
    loss = GateModule(student)(input_ids=random_batch()["input_ids"])["loss"]
    loss.backward()
    assert student.model.early_exit_gate.weight.grad.abs().max() > 0
    assert {name for name, p in student.named_parameters() if p.requires_grad} == {
        "model.early_exit_gate.weight", "model.early_exit_gate.bias"
    }  # fmt: skip


def test_evaluation_weighs_tokens_alike_whatever_the_batches(lively, random_batch):
    ids = random_batch(rows=3, length=10)["input_ids"]
    labels = ids.clone()
    labels[0, 4:] = -100
    one = evaluate_loops(lively, [{"input_ids": ids, "labels": labels}])
    rows = [{"input_ids": ids[i : i + 1], "labels": labels[i : i + 1]} for i in range(3)]
    many = evaluate_loops(lively, rows)
    assert one["tokens"] == many["tokens"] == 3 + 9 + 9
    for name in ("loop_perplexity", "exit_share", "expected_perplexity", "mean_exit"):
        assert many[name] == pytest.approx(one[name])
    losses, pdf, _ = say(lively, ids[1:])
    both = evaluate_loops(lively, [{"input_ids": ids[1:]}])
    assert both["loop_perplexity"] == pytest.approx(losses.mean((0, 1)).exp().tolist())
    assert both["expected_perplexity"] == pytest.approx((pdf * losses).sum(-1).mean().exp().item())
    assert both["mean_exit"] == pytest.approx((pdf * torch.arange(1, pdf.shape[-1] + 1)).sum(-1).mean().item())
    assert sum(both["exit_share"]) == pytest.approx(1)
    with pytest.raises(ValueError, match="no position with a target"):
        evaluate_loops(lively, [{"input_ids": ids, "labels": torch.full_like(ids, -100)}])


def test_token_losses_equal_torch_and_are_zero_where_nothing_is_asked():
    torch.manual_seed(0)
    hidden = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (2, 7))
    targets[0, 2:5] = -100
    weights = torch.randn(2, 7, dtype=torch.float64)
    wanted = F.cross_entropy((hidden @ head.t()).transpose(1, 2), targets, reduction="none")
    for chunk_size in (None, 3):
        ours = linear_token_losses(hidden, head, targets, chunk_size=chunk_size)
        torch.testing.assert_close(ours, wanted)
        for a, b in zip(
            torch.autograd.grad((ours * weights).sum(), (hidden, head)),
            torch.autograd.grad((wanted * weights).sum(), (hidden, head), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def make_trainer(model, folder, data, **options):
    values = {"max_steps": 4, "per_device_train_batch_size": 2, "length": 16, "logging_steps": 1, "save_steps": 2}
    args = PretrainConfig(str(folder), **{**values, "use_cpu": True, "disable_tqdm": True, **options})
    return PretrainTrainer(model, None, args, data)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, byte_tokenizer, new_ouro):
    def data():
        return PackedDataset(["first text " * 9, "the second one " * 9], byte_tokenizer, 16, split="all")

    through = make_trainer(new_ouro(torch.float32), tmp_path / "through", data())
    through.train()
    make_trainer(new_ouro(torch.float32), tmp_path / "halves", data()).train()
    resumed = make_trainer(new_ouro(torch.float32), tmp_path / "halves", data())
    resumed.train(resume_from_checkpoint=str(tmp_path / "halves" / "checkpoint-2"))
    assert losses_of(resumed)[-2:] == losses_of(through)[-2:]
    record = resumed.save_stage(tmp_path / "model")
    assert (record.stage, record.kept_layers) == ("pretrain", [0, 1, 2])
    loaded = OuroForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.randint(3, loaded.config.vocab_size, (1, 8))
    torch.testing.assert_close(loaded(ids).logits, resumed.student(ids).logits)


def test_the_gate_stage_follows_a_trained_model_and_loads_it_from_its_folder(tmp_path, byte_tokenizer, new_ouro):
    data = PackedDataset(["some text, again and again " * 9], byte_tokenizer, 16, split="all")
    options = {"max_steps": 1, "per_device_train_batch_size": 1, "length": 16, "use_cpu": True, "disable_tqdm": True}
    with pytest.raises(StageError, match="'pretrain' or 'distill' or 'extend'"):
        GateTrainer(new_ouro(torch.float32), None, GateConfig(str(tmp_path / "a"), **options), data)
    first = make_trainer(new_ouro(torch.float32), tmp_path / "b", data, max_steps=1, save_strategy="no")
    first.train()
    first.save_stage(tmp_path / "pretrained")
    gate = GateTrainer(str(tmp_path / "pretrained"), None, GateConfig(str(tmp_path / "c"), **options), data)
    gate.train()
    record = gate.save_stage(tmp_path / "gated")
    assert (record.stage, record.parent["stage"]) == ("gate", "pretrain")
    assert gate.student.config.num_loops == first.student.config.num_loops
