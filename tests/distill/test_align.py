# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Stage 1: terms against a literal computation in float64, and what trains."""

import pytest
import torch

from loopergy.configuration.layer_patterns import MIXERS
from loopergy.conversion import convert
from loopergy.distill.align import AlignConfig, AlignModule, AlignTrainer, alignment_errors
from loopergy.distill.teacher import MixerCall, finish_block, loop_states, post_mixer_norm, watch_mixers


def literal_terms(student, teacher, batch, target="mixer", form="mse"):
    """Return the terms [loops, layers] from the teacher's hidden states, one mixer and one document at a time."""
    calls: list[MixerCall] = []
    with torch.no_grad(), watch_mixers(teacher, calls.append):
        loop_states(teacher, batch)
    loops = getattr(teacher.config, "num_loops", 1)
    table = torch.zeros(loops, len(teacher.base_model.layers), dtype=torch.float64)
    for call in calls:
        layer = teacher.base_model.layers[call.layer]
        wanted, got = call.output, student.model.layers[call.layer].self_attn(call.inputs)[0]
        if target == "residual" and hasattr(layer, "input_layernorm_2"):
            wanted, got = layer.input_layernorm_2(wanted), layer.input_layernorm_2(got)
        if target == "block":
            outputs = []
            for mixed in (wanted, got):
                if hasattr(layer, "input_layernorm_2"):
                    hidden = call.residual + layer.input_layernorm_2(mixed)
                    update = layer.mlp(layer.post_attention_layernorm(hidden))
                    outputs.append(hidden + layer.post_attention_layernorm_2(update))
                else:
                    hidden = call.residual + mixed
                    outputs.append(hidden + layer.mlp(layer.post_attention_layernorm(hidden)))
            wanted, got = outputs
        difference = (wanted - got)[:, :-1]
        squared = difference.square().sum(-1) / difference.shape[-1]
        table[call.loop, call.layer] = (squared if form == "mse" else squared.sqrt()).mean()
    return table


@pytest.mark.parametrize("form", ["mse", "l2norm"])
@pytest.mark.parametrize("target", ["residual", "mixer", "block"])
def test_loss_is_the_mean_of_a_term_for_each_loop_and_layer(teacher, student, random_batch, target, form):
    """Guards H14."""
    batch = random_batch()
    expected = literal_terms(student, teacher, batch, target, form)
    outputs = AlignModule(student, teacher, target=target, form=form)(**batch)
    assert outputs["terms"].shape == expected.shape
    torch.testing.assert_close(outputs["terms"], expected, rtol=1e-9, atol=1e-12)
    assert outputs["loss"].item() == pytest.approx(expected.mean().item(), rel=1e-9)


@pytest.mark.parametrize("target", ["residual", "block"])
def test_gradients_equal_those_of_the_literal_loss(teacher, student, random_batch, target):
    """Guards H14: gradients are taken visit by visit inside the forward, and must sum over the loops."""
    batch = random_batch()
    module = AlignModule(student, teacher, target=target)
    (2 * module(**batch)["loss"]).backward()
    ours = {name: parameter.grad for name, parameter in student.named_parameters()}
    student.zero_grad()
    (2 * literal_terms_with_gradient(student, teacher, batch, target)).backward()
    trained = [name for name, parameter in student.named_parameters() if parameter.requires_grad]
    assert trained
    for name in trained:
        expected = dict(student.named_parameters())[name].grad
        torch.testing.assert_close(ours[name], expected, rtol=1e-7, atol=1e-10, msg=name)


def literal_terms_with_gradient(student, teacher, batch, target):
    calls: list[MixerCall] = []
    with torch.no_grad(), watch_mixers(teacher, calls.append):
        loop_states(teacher, batch)
    total = 0.0
    for call in calls:
        layer = teacher.base_model.layers[call.layer]
        mixed = student.model.layers[call.layer].self_attn(call.inputs)[0]
        pair = [call.output, mixed]
        if target == "block":
            pair = [finish_block(layer, call.residual, value) for value in pair]
        else:
            pair = [post_mixer_norm(layer, value) for value in pair]
        total = total + (pair[0] - pair[1])[:, :-1].square().mean()
    return total / len(calls)


def test_residual_target_is_the_difference_of_the_residual_streams(ouro, random_batch):
    student = convert(ouro, keep_layers=[]).model
    calls = []
    with torch.no_grad(), watch_mixers(ouro, calls.append):
        loop_states(ouro, random_batch())
    call = calls[4]
    layer = ouro.model.layers[call.layer]
    mixed = student.model.layers[call.layer].self_attn(call.inputs)[0]
    streams = [call.residual + layer.input_layernorm_2(value) for value in (call.output, mixed)]
    expected = (streams[0] - streams[1])[:, :-1].square().mean()
    terms = AlignModule(student, ouro)(**random_batch())["terms"]
    assert terms.flatten()[4].item() == pytest.approx(expected.item(), rel=1e-9)


def test_every_visit_of_a_shared_mixer_is_watched_in_order(ouro, random_batch):
    """Guards H14."""
    calls = []
    with watch_mixers(ouro, calls.append):
        states = loop_states(ouro, random_batch())
    assert [(call.loop, call.layer) for call in calls] == [(t, n) for t in range(2) for n in range(3)]
    assert len(states) == 2
    assert not torch.equal(calls[0].output, calls[3].output)
    with watch_mixers(ouro, calls.append):
        pass
    loop_states(ouro, random_batch())
    assert len(calls) == 6


def test_weights_of_the_loops_scale_their_terms(ouro, random_batch):
    """Guards H14: leaving loop 1 out changes the loss by its term."""
    student = convert(ouro, keep_layers=[]).model
    terms = AlignModule(student, ouro)(**random_batch())["terms"].mean(-1)
    for weights, expected in (([1.0, 3.0], terms[0] / 4 + terms[1] * 3 / 4), ([0.0, 1.0], terms[1])):
        loss = AlignModule(student, ouro, loop_weights=weights)(**random_batch())["loss"]
        assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    with pytest.raises(ValueError, match="2 weights"):
        AlignModule(student, ouro, loop_weights=[1.0])


def test_a_student_that_is_the_teacher_has_no_loss(ouro, random_batch, monkeypatch):
    """Guards H14."""
    student = convert(ouro, keep_layers="all").model
    with pytest.raises(ValueError, match="nothing to align"):
        AlignModule(student, ouro)
    student.config.layer_mixers = ["window"] * 3
    student.config.sliding_window = 4096
    assert AlignModule(student, ouro)(**random_batch())["loss"].item() < 1e-20


def test_layers_learn_independently_of_each_other(ouro, random_batch):
    student = convert(ouro, keep_layers=[]).model
    module = AlignModule(student, ouro)
    module(**random_batch())["loss"].backward()
    before = student.model.layers[0].self_attn.q_proj.weight.grad.clone()
    student.zero_grad()
    with torch.no_grad():
        for parameter in student.model.layers[1].self_attn.parameters():
            parameter.mul_(1.7)
    module(**random_batch())["loss"].backward()
    assert torch.equal(before, student.model.layers[0].self_attn.q_proj.weight.grad)


def test_pads_change_no_term_on_either_side(teacher, student, random_batch):
    """Guards H4."""
    ids = random_batch(rows=2, length=10)["input_ids"]
    module = AlignModule(student, teacher).eval()
    plain = module(input_ids=ids)["terms"]
    pads = torch.randint(3, 200, (2, 10))
    for where, mask in (((ids, pads), [1] * 10 + [0] * 10), ((pads, ids), [0] * 10 + [1] * 10)):
        attention_mask = torch.tensor([mask, mask])
        padded = module(input_ids=torch.cat(where, dim=1), attention_mask=attention_mask)["terms"]
        # Llama's rotary angles are float32, and shift with left pads.
        torch.testing.assert_close(padded, plain, rtol=1e-6, atol=1e-7)


def test_a_batch_of_pads_gives_zero_and_zero_gradients(teacher, student):
    """Guards H4."""
    ids = torch.full((1, 6), 7)
    loss = AlignModule(student, teacher)(input_ids=ids, labels=torch.full((1, 6), -100))["loss"]
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in student.parameters())


def test_packed_documents_give_the_terms_of_separate_ones(teacher, student, random_batch):
    """Guards C4: borders reach the mixers of teacher and student in every loop."""
    ids = random_batch(rows=1, length=15)["input_ids"]
    module = AlignModule(student, teacher).eval()
    borders = torch.cat([torch.arange(6), torch.arange(9)])[None]
    labels = ids.masked_fill(borders == 0, -100)
    packed = module(input_ids=ids, position_ids=borders, labels=labels, num_items_in_batch=1)["terms"]
    parts = [module(input_ids=part, num_items_in_batch=1)["terms"] for part in (ids[:, :6], ids[:, 6:])]
    torch.testing.assert_close(packed, parts[0] + parts[1], rtol=1e-8, atol=1e-10)


def test_only_the_new_mixers_change_in_training(tmp_path, ouro, random_batch):
    """Guards H7."""
    teacher = ouro.float()
    student = convert(teacher, keep_layers=[1]).model
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    data = [{"input_ids": row} for row in random_batch(rows=6)["input_ids"]]
    args = AlignConfig(str(tmp_path), max_steps=3, per_device_train_batch_size=2, save_strategy="no", use_cpu=True)
    trainer = AlignTrainer(student, teacher, args, data)
    count = sum(p.numel() for layer in (0, 2) for p in student.model.layers[layer].self_attn.parameters())
    assert trainer.get_num_trainable_parameters() == count
    trainer.train()
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, before[name])}
    mixers = {name for name in before if "layers.0.self_attn" in name or "layers.2.self_attn" in name}
    assert changed == mixers


def test_decay_parameters_norms_and_biases_have_no_weight_decay(tmp_path, ouro):
    """Guards F15."""
    student = convert(ouro, keep_layers=[]).model
    args = AlignConfig(str(tmp_path), max_steps=1, weight_decay=0.1, use_cpu=True)
    groups = AlignTrainer(student, ouro, args).create_optimizer().param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] > 0 for p in group["params"]}
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            assert (id(parameter) in decayed) == name.endswith(".weight") * (parameter.ndim > 1), name
    assert all(group["lr"] == 1e-3 for group in groups)


def test_errors_of_the_layers_are_the_terms_averaged_over_tokens(teacher, student, random_batch):
    batches = [random_batch(seed=seed, length=length) for seed, length in ((0, 8), (1, 14))]
    errors = alignment_errors(student, teacher, batches)
    tables = [literal_terms(student, teacher, batch, "residual") for batch in batches]
    expected = (tables[0] * 14 + tables[1] * 26) / 40
    torch.testing.assert_close(errors.double(), expected, rtol=1e-6, atol=1e-9)
    assert all(parameter.requires_grad for parameter in student.parameters())


@pytest.mark.parametrize(
    ("option", "message"),
    [({"target": "logits"}, "residual"), ({"form": "l1"}, "l2norm"), ({"activation_checkpointing": True}, "Stage 1")],
)
def test_settings_that_cannot_be_are_refused(tmp_path, option, message):
    with pytest.raises(ValueError, match=message):
        AlignConfig(str(tmp_path), use_cpu=True, **option)


def test_a_window_student_is_aligned_with_its_own_masks(ouro, random_batch):
    student = convert(ouro, keep_layers=[], mixer="window", sliding_window=3).model
    ids = random_batch(rows=1, length=3)["input_ids"]
    assert AlignModule(student, ouro)(input_ids=ids)["loss"].item() < 1e-20
    assert AlignModule(student, ouro)(**random_batch(rows=1, length=8))["loss"].item() > 1e-6


OPTIONS = {
    "window": {"sliding_window": 4},
    "nsa": {"nsa_block_size": 4, "nsa_window": 4, "nsa_block_count": 3},
    "dsa": {"dsa_topk": 6},
}


@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "full"])
def test_every_mixer_comes_closer_to_the_attention_it_replaces(teacher, random_batch, mixer):
    student = convert(teacher, [1], mixer, **OPTIONS.get(mixer, {})).model
    module, batch, losses = AlignModule(student, teacher), random_batch(length=16), []
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.05 * torch.randn_like(parameter))  # a dsa student of one key head has nothing to learn
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
    for _ in range(5):
        losses.append(module(**batch)["loss"])
        optimizer.zero_grad()
        losses[-1].backward()
        assert all(parameter.grad is not None for parameter in trained)
        optimizer.step()
    assert losses[-1].item() < 0.9 * losses[0].item()


def mixed_student(teacher):
    mixers = ["retnet", "nsa", "dsa"]
    return convert(teacher, [], mixers, nsa_block_size=4, nsa_window=3, nsa_block_count=3, dsa_topk=3).model


def student_terms(student, teacher, batch):
    """Return the terms [loops, layers] with each mixer's arguments as the student's own forward makes them."""
    calls: list[MixerCall] = []
    seen: dict[tuple[int, int], dict] = {}
    with torch.no_grad(), watch_mixers(teacher, calls.append):
        loop_states(teacher, batch)
    with torch.no_grad(), watch_mixers(student, lambda call: seen.update({(call.loop, call.layer): call.arguments})):
        loop_states(student, batch)
    mask = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["input_ids"])
    mask = mask[:, :-1].bool() & mask[:, 1:].bool()
    table = torch.zeros(getattr(teacher.config, "num_loops", 1), 3, dtype=torch.float64)
    for call in calls:
        arguments = {**seen[call.loop, call.layer], "cache": None}
        mixed = student.model.layers[call.layer].self_attn(call.inputs, **arguments)[0]
        layer = teacher.base_model.layers[call.layer]
        difference = post_mixer_norm(layer, mixed) - post_mixer_norm(layer, call.output)
        table[call.loop, call.layer] = difference[:, :-1][mask].square().mean()
    return table


@pytest.mark.parametrize("batch", ["plain", "padded", "packed"])
def test_mixers_see_in_alignment_what_they_see_in_the_student(teacher, random_batch, batch):
    """Guards C4: masks, positions and borders of sparse, rotary and recurrent mixers alike."""
    inputs = random_batch(rows=2, length=11)
    if batch == "padded":
        inputs["attention_mask"] = torch.tensor([[0, 0, 0, *[1] * 8], [1] * 11])
    if batch == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(5), torch.arange(6)]).expand(2, -1)
    student = mixed_student(teacher)
    want = student_terms(student, teacher, inputs)
    labels = None if batch != "packed" else inputs["input_ids"]
    got = AlignModule(student, teacher)(**inputs, labels=labels)["terms"]
    # Llama's rotary angles, which a windowed or block-sparse mixer takes from the teacher, are float32.
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_an_indexer_learns_from_its_own_loss_alone_and_rests_without_one(ouro, random_batch):
    batch = random_batch(length=16)
    resting = convert(ouro, [0, 1], "dsa", dsa_topk=4).model
    AlignModule(resting, ouro)(**batch)["loss"].backward()
    sparse = resting.model.layers[2].self_attn
    assert sparse.kv_proj.weight.grad is not None
    assert sparse.q_score_proj.weight.grad is None
    assert not sparse.q_score_proj.weight.requires_grad
    student = convert(ouro, [0, 1], "dsa", dsa_topk=4, dsa_indexer_loss_weight=0.5).model
    module, losses = AlignModule(student, ouro), []
    sparse = student.model.layers[2].self_attn
    optimizer = torch.optim.SGD([sparse.q_score_proj.weight, sparse.k_score_proj.weight], lr=0.3)
    for _ in range(6):
        losses.append(module(**batch)["loss"])
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[0].item() > AlignModule(resting, ouro)(**batch)["loss"].item()
    assert sparse.q_score_proj.weight.grad.abs().max() > 0
    assert losses[-1].item() < losses[0].item()
