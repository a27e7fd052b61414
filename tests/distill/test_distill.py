# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Stage 2: the loss against full logits in float64, what trains at which rate, and who may enter."""

import pytest
import torch

from loopergy.conversion import convert
from loopergy.distill.align import AlignConfig, AlignTrainer
from loopergy.distill.distill import DistillConfig, DistillModule, DistillTrainer, prepare_student
from loopergy.distill.losses import divergence
from loopergy.distill.report import evaluate_heldout
from loopergy.distill.stage import StageError, StageRecord
from loopergy.distill.teacher import loop_states
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM


def settings(folder, **options):
    values = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", "use_cpu": True, "length": 12}
    return DistillConfig(str(folder), **{**values, "disable_tqdm": True, **options})


def literal_loss(student, teacher, batch, weights, **options):
    """Return the weighted KL from all logits of every loop."""
    total = 0.0
    for weight, s, t in zip(weights, loop_states(student, batch), loop_states(teacher, batch), strict=True):
        logits = student.lm_head(s)[:, :-1], teacher.lm_head(t)[:, :-1]
        total = total + weight * divergence(logits[0].flatten(0, 1), logits[1].flatten(0, 1), **options).mean()
    return total


@pytest.mark.parametrize(("progress", "weights"), [(0.1, [0.5, 0.5]), (0.35, [0.25, 0.75]), (0.9, [0.0, 1.0])])
def test_loss_and_gradients_equal_those_of_full_logits_in_each_phase(ouro, tmp_path, random_batch, progress, weights):
    student = convert(ouro, keep_layers=[1]).model
    batch = random_batch()
    loss = DistillModule(student, ouro, settings(tmp_path))(**batch, progress=progress)["loss"]
    loss.backward()
    ours = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    expected = literal_loss(student, ouro, batch, weights)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    for name, parameter in student.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-8, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"direction": "reverse"},
        {"direction": "js"},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_k": 5, "tail_bucket": False},
    ],
)
def test_each_setting_of_the_divergence_reaches_the_loss(teacher, student, tmp_path, random_batch, options):
    """Guards H8."""
    batch = random_batch()
    loss = DistillModule(student, teacher, settings(tmp_path, **options))(**batch)["loss"]
    weights = [0.0] * (len(loop_states(teacher, batch)) - 1) + [1.0]
    assert loss.item() == pytest.approx(literal_loss(student, teacher, batch, weights, **options).item(), rel=1e-9)
    assert loss.item() != pytest.approx(literal_loss(student, teacher, batch, weights).item(), rel=1e-6)


def test_liger_kernel_trains_as_we_do(teacher, student, tmp_path, random_batch, monkeypatch):
    liger = pytest.importorskip("liger_kernel.chunked_loss", reason="pip install --no-deps liger-kernel")
    batch, results, made = random_batch(), [], []
    original = liger.LigerFusedLinearJSDLoss
    monkeypatch.setattr(liger, "LigerFusedLinearJSDLoss", lambda **options: made.append(1) or original(**options))
    for backend in ("torch", "liger"):
        student.zero_grad()
        loss = DistillModule(student, teacher, settings(tmp_path, kl_backend=backend))(**batch)["loss"]
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
        results.append((loss.item(), gradients, len(made)))
    (ours, expected, before), (theirs, found, after) = results
    assert before == 0 < after
    assert theirs == pytest.approx(ours, rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_with_one_loop_it_is_ordinary_distillation(llama, tmp_path, random_batch):
    teacher = llama
    student = convert(teacher, keep_layers=[]).model
    losses = [
        DistillModule(student, teacher, settings(tmp_path))(**random_batch(), progress=p)["loss"] for p in (0, 1)
    ]
    assert losses[0].item() == losses[1].item()


def test_a_student_with_all_layers_kept_has_no_loss(teacher, tmp_path, random_batch):
    student = convert(teacher, keep_layers="all").model
    assert abs(DistillModule(student, teacher, settings(tmp_path))(**random_batch())["loss"].item()) < 1e-12


def test_pads_change_nothing_on_either_side(teacher, student, tmp_path, random_batch):
    """Guards H4."""
    module = DistillModule(student, teacher, settings(tmp_path))
    ids, pads = random_batch(length=10)["input_ids"], torch.randint(3, 200, (2, 10))
    plain = module(input_ids=ids)["loss"].item()
    for where, mask in (((ids, pads), [1] * 10 + [0] * 10), ((pads, ids), [0] * 10 + [1] * 10)):
        padded = module(input_ids=torch.cat(where, dim=1), attention_mask=torch.tensor([mask, mask]))["loss"]
        assert padded.item() == pytest.approx(plain, rel=1e-6)
    nothing = module(input_ids=ids, labels=torch.full_like(ids, -100))["loss"]
    assert nothing.item() == 0.0
    nothing.backward()


def test_packed_documents_give_the_loss_of_separate_ones(teacher, student, tmp_path, random_batch):
    """Guards C4."""
    module = DistillModule(student, teacher, settings(tmp_path))
    ids = random_batch(rows=1, length=15)["input_ids"]
    borders = torch.cat([torch.arange(6), torch.arange(9)])[None]
    labels = ids.masked_fill(borders == 0, -100)
    packed = module(input_ids=ids, position_ids=borders, labels=labels, num_items_in_batch=1)["loss"]
    parts = [module(input_ids=part, num_items_in_batch=1)["loss"].item() for part in (ids[:, :6], ids[:, 6:])]
    assert packed.item() == pytest.approx(sum(parts), rel=1e-9)


def test_everything_trains_but_the_exit_gate_the_indexers_and_the_teacher(ouro, tmp_path, random_batch):
    """Guards H7 and H12."""
    student = convert(ouro, [1], "gdn,dsa", dsa_indexer="deepseek").model
    module = DistillModule(student, ouro.requires_grad_(False), settings(tmp_path))
    module(**random_batch(), progress=0.0)["loss"].backward()
    for name, parameter in student.named_parameters():
        unreached = "early_exit_gate" in name or "_score_" in name
        assert (parameter.grad is None) == unreached, name
        assert parameter.requires_grad != unreached, name
    assert all(parameter.grad is None for parameter in ouro.parameters())
    assert {id(p) for p in module.parameters()}.isdisjoint(id(p) for p in ouro.parameters())
    assert not any(name.startswith("_outside") or "teacher" in name for name in module.state_dict())


def test_mixers_and_body_have_their_own_rates_and_vectors_no_decay(ouro, tmp_path):
    """Guards F15 and H12."""
    student = convert(ouro, keep_layers=[1]).model
    trainer = DistillTrainer(student, ouro, settings(tmp_path, require_previous=False, weight_decay=0.1))
    groups = trainer.create_optimizer().param_groups
    where = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    teacher = {id(p) for p in ouro.parameters()}
    assert teacher.isdisjoint(where)
    for name, parameter in student.named_parameters():
        if "early_exit_gate" in name:
            assert id(parameter) not in where
            continue
        rate = 1e-4 if "self_attn" in name else 7e-6
        assert where[id(parameter)] == (rate, 0.1 if parameter.ndim > 1 else 0.0), name


def test_a_student_without_the_stage_before_is_refused(ouro, tmp_path):
    """Guards H2."""
    student = convert(ouro, keep_layers=[1]).model
    with pytest.raises(StageError, match=r"no stage\.json"):
        DistillTrainer(student, ouro, settings(tmp_path))
    record = StageRecord.of("align", student.config)
    DistillTrainer(student, ouro, settings(tmp_path), previous=record)
    with pytest.raises(StageError, match=r"'align' or 'select' or 'distill'.*'convert'"):
        DistillTrainer(student, ouro, settings(tmp_path), previous=StageRecord.of("convert", student.config))
    other = convert(ouro, keep_layers=[0, 2]).model
    with pytest.raises(StageError, match=r"only in the student \[0, 2\], only in the record \[1\]"):
        DistillTrainer(other, ouro, settings(tmp_path), previous=record)
    with pytest.raises(StageError, match=r"does not keep: \[2\].*does not name: \[\]"):
        DistillTrainer(student, ouro, settings(tmp_path, kept_layers=[1, 2]), previous=record)
    student.config.gdn_norm_eps = 1e-3
    with pytest.raises(StageError, match="config has changed"):
        DistillTrainer(student, ouro, settings(tmp_path), previous=record)


def test_stages_follow_each_other_through_folders(ouro, tmp_path, random_batch, byte_tokenizer):
    """Guards H2, H12 and H15."""
    teacher = ouro.float()
    student = convert(teacher, keep_layers=[]).model
    data = [{"input_ids": row, "labels": row} for row in random_batch(rows=8)["input_ids"]]
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "save_strategy": "no", "use_cpu": True}
    first = AlignTrainer(student, teacher, AlignConfig(str(tmp_path / "a"), **options, disable_tqdm=True), data)
    first.train()
    first.save_stage(tmp_path / "aligned")
    record = StageRecord.load(tmp_path / "aligned")
    assert (record.stage, record.kept_layers, record.tokens_seen) == ("align", [], 3 * 2 * 12)

    restored, record = prepare_student(tmp_path / "aligned", teacher, [1])
    for name, tensor in restored.state_dict().items():
        expected = teacher.state_dict()[name] if "layers.1.self_attn" in name else student.state_dict()[name]
        assert torch.equal(tensor, expected), name
    trainer = DistillTrainer(restored, teacher, settings(tmp_path / "d"), data, None, byte_tokenizer, previous=record)
    batches = [random_batch(seed=5)]
    first_loss = trainer.evaluate([{"input_ids": r, "labels": r} for r in batches[0]["input_ids"]])["eval_loss"]
    assert first_loss == pytest.approx(evaluate_heldout(restored, teacher, batches)["kl"], rel=1e-5)
    trainer.train()
    done = trainer.save_stage(tmp_path / "distilled", {"note": 1})
    assert [done.stage, done.parent["stage"], done.parent["parent"]["stage"]] == ["distill", "select", "align"]

    folder = tmp_path / "distilled"
    size = (folder / "model.safetensors").stat().st_size
    assert size == pytest.approx(sum(p.numel() * p.element_size() for p in restored.parameters()), rel=0.05)
    loaded, info = LT2ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    inputs = random_batch(rows=1)["input_ids"]
    torch.testing.assert_close(loaded.eval()(inputs).logits, restored.eval()(inputs).logits, rtol=0, atol=1e-6)
    assert loaded.generate(inputs, max_new_tokens=3, do_sample=False).shape == (1, 15)
    assert (folder / "tokenizer.json").is_file()
    assert loaded.config.use_cache


def test_rows_longer_than_the_declared_positions_are_refused(ouro, tmp_path, random_batch):
    """Guards H16."""
    ouro.config.max_position_embeddings = 10
    student = convert(ouro, keep_layers=[1]).model
    with pytest.raises(ValueError, match=r"12 tokens.*10.*extend_to=12"):
        DistillModule(student, ouro, settings(tmp_path))(**random_batch())


def test_target_tokens_set_the_number_of_steps(tmp_path):
    args = settings(tmp_path, max_steps=-1, target_tokens=1000, gradient_accumulation_steps=3)
    assert args.max_steps == 14  # 2 rows, 3 batches, 12 tokens: 72 tokens a step
    with pytest.raises(ValueError, match="not both"):
        settings(tmp_path, max_steps=5, target_tokens=1000)


def test_every_field_of_the_settings_says_what_it_does(tmp_path):
    for name, entry in DistillConfig.__dataclass_fields__.items():
        if name in DistillConfig.__annotations__:
            assert entry.metadata["help"].endswith("."), name
