# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Students of the hybrid-distillation code: folders made in its format, from models whose numbers are known."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from loopergy import OuroConfig, OuroForCausalLM
from loopergy.cli import app
from loopergy.conversion import ConversionError, convert, lt2_from_student
from loopergy.conversion.hybrid_students import is_hybrid_student

IDS = torch.randint(64, (1, 17), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
# Our names to those of the student, a part of the name at a time.
RENAMED = {
    "embed_tokens": "embeddings",
    "self_attn": "attn",
    "post_attention_layernorm.": "mlp_norm.",
    "input_layernorm.": "attn_norm.",
}


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5)).eval()


@pytest.fixture
def save(tmp_path):
    def write(model, shards=1, drop=(), add=None, **changes):
        """Write one of our models as a student."""
        folder, config = tmp_path / "student", model.config
        folder.mkdir(exist_ok=True)
        state = {}
        for name, tensor in model.state_dict().items():
            for ours, theirs in RENAMED.items():
                name = name.replace(ours, theirs)
            state[name] = tensor.clone()
        state = {name: tensor for name, tensor in state.items() if name not in drop} | (add or {})
        names = sorted(state)
        files = {f"model-{part + 1:05}-of-{shards:05}.safetensors": names[part::shards] for part in range(shards)}
        if shards == 1:
            save_file(state, folder / "model.safetensors")
        else:
            for file, part in files.items():
                save_file({name: state[name] for name in part}, folder / file)
            index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        fields = {
            "model_type": "student",
            "architectures": ["StudentForCausalLM"],
            "num_hidden_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_parameters["rope_theta"],
            "max_position_embeddings": config.max_position_embeddings,
            "vocab_size": config.vocab_size,
            "student_name": "gdn_v4",
            "keep_full_attention_layers": [1],
        }
        (folder / "config.json").write_text(json.dumps(fields | changes))
        return folder

    return write


def same_logits(one, other) -> None:
    with torch.no_grad():
        torch.testing.assert_close(one(IDS).logits, other(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("student_name", "mixer", "options"),
    [
        ("gdn_v1", "gdn", {"gdn_use_gate": False, "gdn_use_short_conv": True}),
        ("gdn_v2", "gdn", {"gdn_use_gate": False, "gdn_use_short_conv": False}),
        ("gdn_v3", "gdn", {"gdn_use_gate": True, "gdn_use_short_conv": True}),
        ("gdn_v4", "gdn", {"gdn_use_gate": True, "gdn_use_short_conv": False}),
        ("gla_v1", "gla", {}),
    ],
)
def test_a_student_of_a_llama_computes_what_it_did(llama, save, student_name, mixer, options):
    made = convert(llama, [1], mixer, **options).model
    made.config.rms_norm_eps = 1e-5
    student = lt2_from_student(save(made, student_name=student_name))
    assert student.config.layer_mixers == [mixer, "full", mixer]
    assert student.config.num_loops == 1
    same_logits(student, made)


def test_with_all_layers_kept_it_is_the_llama(llama, save):
    """An oracle that is not ours: theta, epsilon, key heads and head are read right."""
    folder = save(llama, keep_full_attention_layers=[0, 1, 2], student_name=None)
    student = lt2_from_student(folder)
    assert student.config.layer_mixers == ["full"] * 3
    same_logits(student, llama)


def test_a_looped_student_keeps_loops_second_norms_and_gate(save):
    torch.manual_seed(0)
    sizes = SIZES | {"num_key_value_heads": 4}
    ouro = OuroForCausalLM(OuroConfig(**sizes, num_loops=3)).eval()
    made = convert(ouro, [1], "gdn").model
    student = lt2_from_student(save(made, total_ut_steps=3))
    assert (student.config.num_loops, student.config.block_style, student.config.early_exit_gate) == (
        3,
        "sandwich",
        True,
    )
    same_logits(student, made)
    config = lt2_from_student(save(made), num_loops=2).config
    assert (config.num_loops, config.num_trained_loops) == (2, 2)
    config = lt2_from_student(save(made, total_ut_steps=3), num_loops=4).config
    assert (config.num_loops, config.num_trained_loops) == (4, 3)


@pytest.mark.parametrize(
    ("changes", "mixers"),
    [
        ({"student_name": "swa_v1"}, ["window"] * 3),
        ({"force_window_on_all_layers": True}, ["window"] * 3),
        ({"keep_full_attention_layers": [0, 1, 2]}, ["window"] * 3),
    ],
)
def test_a_window_holds_for_kept_layers_too(llama, save, changes, mixers):
    made = convert(llama, [], "window", sliding_window=5).model
    student = lt2_from_student(save(made, window_size=5, **changes))
    assert student.config.layer_mixers == mixers
    same_logits(student, made)


def test_biases_of_queries_keys_and_values_stand_without_one_of_the_output(llama, save):
    made = convert(llama, "all").model
    generator = torch.Generator().manual_seed(1)
    biases = {
        f"model.layers.{layer}.attn.{part}_proj.bias": torch.randn(size, generator=generator)
        for layer in range(3)
        for part, size in (("q", 32), ("k", 16), ("v", 16))
    }
    student = lt2_from_student(save(made, add=biases, qkv_bias=True, keep_full_attention_layers=[0, 1, 2]))
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5, attention_bias=True)).eval()
    state = dict(llama.state_dict())
    state |= {name.replace("attn.", "self_attn."): bias for name, bias in biases.items()}
    state |= {f"model.layers.{layer}.self_attn.o_proj.bias": torch.zeros(32) for layer in range(3)}
    theirs.load_state_dict(state)
    same_logits(student, theirs)


def test_shards_a_tied_head_and_half_precision_load(save):
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=True)).eval().bfloat16()
    folder = save(
        tied, shards=2, drop=("lm_head.weight",), keep_full_attention_layers=[0, 1, 2], tie_word_embeddings=True
    )
    student = lt2_from_student(folder)
    assert student.dtype == torch.bfloat16
    assert student.lm_head.weight is student.model.embed_tokens.weight
    with torch.no_grad():  # the student's norms round once, behind the weight; Llama's round before it too
        torch.testing.assert_close(student(IDS).logits, tied(IDS).logits, rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"student_name": "gdn_v5"}, "student_name='gdn_v5' is not supported; supported are gdn_v1"),
        ({"student_name": None}, "student_name=None is not supported"),
        ({"qk_norm": True}, "norms of queries and keys"),
        ({"student_name": "swa_v1"}, "window_size is missing"),
        ({"student_name": "gla_v1"}, r"it lacks .*gk_proj.*it has, and LT2 has not, .*A_log"),
        ({"model_type": "llama"}, "is of type 'llama', not 'student'"),
        ({"num_heads": "four"}, "num_heads='four' must be a whole number"),
        ({"drop": ("model.norm.weight",)}, r"it lacks model\.norm\.weight"),
        (
            {"add": {"model.layers.0.attn_norm_2.weight": torch.ones(32)}},
            r"LT2 has not, model\.layers\.0\.attn_norm_2",
        ),
    ],
)
def test_what_does_not_fit_is_named(llama, save, changes, says):
    with pytest.raises(ConversionError, match=says):
        lt2_from_student(save(convert(llama, [1]).model, **changes))


def test_the_command_line_knows_such_a_folder(llama, save, tmp_path):
    folder = save(convert(llama, [1]).model)
    assert is_hybrid_student(folder)
    assert not is_hybrid_student(tmp_path)
    assert not is_hybrid_student("smollm2")
    with pytest.raises(ValueError, match="LT2Config has no field oops"):
        lt2_from_student(folder, oops=1)
    assert lt2_from_student(folder, dtype="bfloat16").dtype == torch.bfloat16
    done = CliRunner().invoke(app, ["convert", str(folder), "-o", str(tmp_path / "lt2")])
    assert done.exit_code == 0, done.output
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "lt2")
    same_logits(loaded, lt2_from_student(folder))
