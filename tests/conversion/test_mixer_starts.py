# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What every mixer takes over from attention, from its computation where that says more than its tensors."""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from loopergy.configuration.layer_patterns import MIXERS
from loopergy.configuration.linear_fields import LINEAR_MIXERS
from loopergy.conversion import ConversionError, convert, mixer_starts, restore_layers, shared_latents, student_config
from loopergy.conversion.families import MIXER_OPTIONS, parse_mixers
from loopergy.conversion.mixer_starts import MIXER_RULES, repeat_heads
from loopergy.conversion.weight_maps import weight_map

OTHERS = [name for name in MIXERS if name != "full"]
OPTIONS = {
    "window": {"sliding_window": 8},
    "kda": {"kda_use_short_conv": True},
    "deltanet": {"deltanet_use_short_conv": True},
    "nsa": {"nsa_block_size": 4, "nsa_window": 4, "nsa_block_count": 3},
    "dsa": {"dsa_topk": 6, "dsa_indexer": "deepseek"},
}


@pytest.fixture(params=["ouro", "llama"])
def teacher(request, make_ouro, make_llama):
    if request.param == "ouro":
        return make_ouro(2, num_hidden_layers=2)
    return make_llama(num_hidden_layers=2)


def test_every_mixer_has_rules_and_options():
    assert set(MIXER_RULES) == set(MIXERS)
    assert set(MIXER_OPTIONS) == set(OTHERS)


@pytest.mark.parametrize("mixer", OTHERS)
def test_every_mixer_converts_accounts_for_all_tensors_and_survives_a_folder(teacher, ids, tmp_path, mixer):
    """Guards H1, E13, H15."""
    result = convert(teacher, [1], mixer, **OPTIONS.get(mixer, {}))
    records, state = result.report.tensors, result.model.state_dict()
    assert {record.name for record in records} == state.keys()
    used = {source for record in records if record.source for source in record.source.split(" + ")}
    assert used == teacher.state_dict().keys()
    assert all((record.source is None) == (record.action == "fresh") for record in records)
    assert f"{mixer} in the other 1" in result.report.summary()
    folder = result.save_pretrained(tmp_path / "student")
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        want = result.model(ids).logits
        assert torch.equal(loaded(ids).logits, want)
        assert torch.isfinite(want).all()
        assert not torch.allclose(want, teacher(ids).logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mixer", [name for name in OTHERS if name not in ("mamba2", "hgrn2", "dsa")])
def test_projections_are_the_teachers_with_shared_heads_repeated_where_each_needs_its_own(make_llama, mixer):
    """Guards H1: biases too."""
    teacher = make_llama(attention_bias=True)
    student = convert(teacher, [], mixer, **OPTIONS.get(mixer, {})).model
    facts = weight_map(student.config).facts
    for theirs, ours in zip(teacher.model.layers, student.model.layers, strict=True):
        for name in (f"{letter}_proj.{kind}" for letter in "qkvo" for kind in ("weight", "bias")):
            want = theirs.self_attn.get_parameter(name)
            if mixer in LINEAR_MIXERS and name[0] in "kv":
                want = repeat_heads(want, facts)
            assert torch.equal(ours.self_attn.get_parameter(name), want), name


def test_mamba2_starts_with_the_teachers_values_and_mean_keys_and_queries(make_llama):
    teacher = make_llama()
    student = convert(teacher, [], "mamba2").model
    theirs, ours = teacher.model.layers[1].self_attn, student.model.layers[1].self_attn
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    streams, (z, step) = ours.streams(x)
    values, key, query = streams.split((64, 16, 16), dim=-1)
    own = theirs.v_proj(x).unflatten(-1, (2, 16)).repeat_interleave(2, dim=-2)
    torch.testing.assert_close(values.unflatten(-1, (4, 16)), own)
    torch.testing.assert_close(key, theirs.k_proj(x).unflatten(-1, (2, 16)).mean(-2))
    torch.testing.assert_close(query, theirs.q_proj(x).unflatten(-1, (4, 16)).mean(-2))
    assert torch.equal(ours.out_proj.weight, theirs.o_proj.weight)
    assert z.std() > 0
    assert step.std() > 0


def test_the_key_of_hgrn2_is_the_sigmoid_of_the_teachers(make_llama):
    teacher = make_llama(attention_bias=True)
    student = convert(teacher, [], "hgrn2").model
    theirs, ours = teacher.model.layers[0].self_attn, student.model.layers[0].self_attn
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    arguments = ours.arguments(ours.streams(x)[0], None, x, None)
    own = [proj(x).unflatten(-1, (2, 16)).repeat_interleave(2, dim=-2) for proj in (theirs.k_proj, theirs.v_proj)]
    torch.testing.assert_close(arguments["k"], own[0].sigmoid())
    torch.testing.assert_close(arguments["v"], own[1])


def test_feature_maps_of_linear_attention_start_as_the_identity(make_llama):
    student = convert(make_llama(), [], "la").model
    x = torch.randn(5, 16)
    torch.testing.assert_close(student.model.layers[0].self_attn.feature_map_k(x), x)


@pytest.mark.parametrize("loops", [0, 2])
def test_a_dsa_student_of_one_key_value_head_equals_the_teacher_while_all_tokens_fit(
    make_ouro, make_llama, ids, loops
):
    fields = {"num_key_value_heads": 1, "dtype": torch.float64}
    teacher = make_ouro(loops, **fields) if loops else make_llama(**fields)
    whole, cut = (convert(teacher, [], "dsa", dsa_topk=topk).model for topk in (17, 8))
    # Llama's rotary angles are float32.
    close = {"rtol": 1e-8, "atol": 1e-8} if loops else {"rtol": 1e-4, "atol": 1e-4}
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        want = teacher(ids, attention_mask=mask).logits[mask.bool()]
        torch.testing.assert_close(whole(ids, attention_mask=mask).logits[mask.bool()], want, **close)
        assert not torch.allclose(cut(ids).logits, teacher(ids).logits, rtol=1e-2, atol=1e-2)
        tokens = whole.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(tokens[:, :17], ids)


def test_a_layers_latents_are_found_once_and_nothing_of_them_or_the_teacher_outlives_the_conversion(
    make_ouro, monkeypatch
):
    found, find = [], shared_latents.find_latents

    def watched(*given):
        latents = find(*given)
        found.append(weakref.ref(latents))
        return latents

    for file in (mixer_starts, shared_latents):
        monkeypatch.setattr(file, "find_latents", watched, raising=False)
    teacher = make_ouro()
    keys = StorageWeakRef(teacher.model.layers[-1].self_attn.k_proj.weight.untyped_storage())
    student = convert(teacher, [1], "dsa").model
    del teacher
    gc.collect()
    assert student.config.layer_mixers == ["dsa", "full", "dsa"]
    assert [latents() for latents in found] == [None, None]
    assert keys.expired()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_dsa_mixer_of_full_width_equals_attention_without_positions(make_ouro, kv_heads):
    """Only the positions of the keys beside the first are lost."""
    teacher = make_ouro(num_key_value_heads=kv_heads, dtype=torch.float64)
    student = convert(teacher, [], "dsa", dsa_latent_dim=64).model
    x = torch.randn(2, 9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    still = torch.ones(1, 9, 16, dtype=torch.float64), torch.zeros(1, 9, 16, dtype=torch.float64)
    with torch.no_grad():
        want, _ = teacher.model.layers[1].self_attn(x, position_embeddings=still)
        got, _ = student.model.layers[1].self_attn(x, position_ids=torch.zeros(1, 9, dtype=torch.long))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_the_tail_of_a_dsa_mixer_turns_as_the_keys_it_holds_do(make_ouro):
    """Keys that all lie in one direction over the heads need no other head: rotated attention comes out exactly."""
    teacher = make_ouro(num_key_value_heads=2, dtype=torch.float64)
    with torch.no_grad():
        for layer in teacher.model.layers:
            first, second = layer.self_attn.k_proj.weight.chunk(2)
            second.copy_(-0.6 * first)
    student = convert(teacher, [], "dsa", dsa_latent_dim=64).model
    ids = torch.arange(12)[None] + 5
    with torch.no_grad():
        torch.testing.assert_close(student(ids).logits, teacher(ids).logits, rtol=1e-7, atol=1e-7)


def test_a_wider_latent_comes_closer_to_the_teachers_attention(make_ouro):
    teacher = make_ouro(num_key_value_heads=4, dtype=torch.float64)
    x = torch.randn(2, 9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    still = torch.ones(1, 9, 16, dtype=torch.float64), torch.zeros(1, 9, 16, dtype=torch.float64)
    errors = []
    with torch.no_grad():
        want, _ = teacher.model.layers[0].self_attn(x, position_embeddings=still)
        for width in (8, 24, 48, 64):
            mixer = convert(teacher, [], "dsa", dsa_latent_dim=width).model.model.layers[0].self_attn
            got, _ = mixer(x, position_ids=torch.zeros(1, 9, dtype=torch.long))
            errors.append((got - want).square().mean().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-16
    with pytest.raises(ValueError, match=r"dsa_latent_dim=65 is more than hidden_size=64"):
        convert(teacher, [], "dsa", dsa_latent_dim=65)


def test_the_latent_spans_the_best_directions_of_keys_and_values(make_ouro):
    """Keys and values that depend on five directions of the input alone need five numbers."""
    teacher = make_ouro(num_key_value_heads=4, dtype=torch.float64)
    theirs = teacher.model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(5, 64, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        for projection in (theirs.k_proj, theirs.v_proj):
            projection.weight.copy_(torch.randn(64, 5, dtype=torch.float64, generator=generator) @ directions / 4)
        x = torch.randn(1, 9, 64, dtype=torch.float64, generator=generator)
        still = torch.ones(1, 9, 16, dtype=torch.float64), torch.zeros(1, 9, 16, dtype=torch.float64)
        ours = convert(teacher, [], "dsa", dsa_latent_dim=5).model.model.layers[0].self_attn
        got, _ = ours(x, position_ids=torch.zeros(1, 9, dtype=torch.long))
        torch.testing.assert_close(got, theirs(x, position_embeddings=still)[0], rtol=1e-7, atol=1e-7)


def test_an_nsa_student_whose_window_holds_all_tokens_gates_the_teachers_attention(make_ouro):
    """Window and selection see everything: with gates of a half each they add up to attention."""
    teacher = make_ouro(dtype=torch.float64)
    student = convert(teacher, [], "nsa", nsa_window=64, nsa_block_size=64).model
    theirs, ours = teacher.model.layers[0].self_attn, student.model.layers[0].self_attn
    with torch.no_grad():
        ours.g_proj.weight.zero_()
        x = torch.randn(1, 9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        positions = teacher.model.rotary_emb(x, torch.arange(9)[None])
        # No block of 64 ends among nine tokens, so the averages give nothing.
        torch.testing.assert_close(ours(x, positions)[0], theirs(x, positions)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("mixer", "want"),
    [
        ("kda", ["kda", "full", "kda", "kda", "full", "kda"]),
        ("gdn*3,dsa", ["gdn", "full", "gdn", "gdn", "full", "dsa"]),
        ("gdn,dsa", ["gdn", "full", "dsa", "gdn", "full", "dsa"]),
        (["la", "gla", "nsa", "dsa"], ["la", "full", "gla", "nsa", "full", "dsa"]),
        ({0: "la", 5: "gdn", 2: "dsa", 3: "dsa"}, ["la", "full", "dsa", "dsa", "full", "gdn"]),
    ],
)
def test_mixers_of_the_layers_that_are_not_kept_can_be_spelt_in_many_ways(mixer, want):
    assert parse_mixers(mixer, [1, 4], 6) == want
    assert parse_mixers("gdn*3,dsa", range(6), 6) == ["full"] * 6


@pytest.mark.parametrize(
    ("mixer", "says"),
    [
        ("gdn*x,dsa", "is not a number of layers"),
        ("full", r"mixer='full' is unknown for a layer that is not kept"),
        ("bookend:1:gdn", r"mixer='full' is unknown for a layer that is not kept"),
        (["gdn"], r"mixer has 1 names, but 4 layers are not kept: \[0, 2, 3, 5\]"),
        ({0: "gdn"}, r"name a mixer for each layer that is not kept, \[0, 2, 3, 5\]"),
        (["gdn", "gdn", "gdn", "rwkv"], "'rwkv' is unknown.*allowed: gdn, window"),
    ],
)
def test_wrong_mixers_are_refused_with_what_is_allowed(mixer, says):
    with pytest.raises(ValueError, match=says):
        parse_mixers(mixer, [1, 4], 6)


def test_a_mixed_student_takes_the_options_of_its_mixers_and_says_where_each_is(make_ouro, ids, tmp_path):
    teacher = make_ouro(num_hidden_layers=5)
    result = convert(teacher, [4], "gdn*3,dsa", gdn_use_short_conv=True, dsa_topk=8)
    assert result.model.config.layer_mixers == ["gdn", "gdn", "gdn", "dsa", "full"]
    assert "full attention kept in 1: 4; gdn in 3: 0-2, dsa in 1: 3" in result.report.summary()
    assert result.report.mixer == "gdn, dsa"
    assert result.report.layer_mixers == result.model.config.layer_mixers
    with pytest.raises(ValueError, match=r"unknown option\(s\) \['top_k'\] for mixer 'gdn, dsa'"):
        convert(teacher, [4], "gdn*3,dsa", top_k=8)
    with pytest.raises(ValueError, match=r"no layer gets the mixer of \['dsa_topk'\], dsa; they get gdn$"):
        convert(teacher, [3, 4], "gdn*3,dsa", dsa_topk=8)
    with pytest.raises(ValueError, match="they get none, as all are kept"):
        convert(teacher, "all", "gdn*3,dsa", gdn_conv_size=4)
    restored = restore_layers(result.model, teacher, [0, 3])
    assert restored.config.layer_mixers == ["full", "gdn", "gdn", "full", "full"]
    with torch.no_grad():
        whole = restore_layers(restored, teacher, [1, 2])
        assert torch.equal(whole(ids).logits, teacher(ids).logits)


@pytest.mark.parametrize("mixer", ["mamba2", "dsa"])
def test_biases_that_a_mixer_has_no_place_for_are_refused(make_llama, mixer):
    """Guards H1: nothing of the teacher is lost quietly."""
    teacher = make_llama(attention_bias=True)
    with pytest.raises(ConversionError, match=rf"attention_bias=True\), which {mixer} layers do not"):
        convert(teacher, [0], mixer)
    with torch.no_grad():
        got = convert(teacher, "all", mixer).model(torch.arange(9)[None]).logits
        assert torch.equal(got, teacher(torch.arange(9)[None]).logits)


@pytest.mark.parametrize("mixer", ["mamba2", "dsa"])
def test_a_layer_gets_the_same_fresh_numbers_whatever_the_others_are(make_ouro, mixer):
    """Guards E12."""
    teacher = make_ouro()
    one, other = convert(teacher, [], mixer), convert(teacher, [0], f"gdn,{mixer}")
    prefix = "model.layers.2.self_attn."
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    names = [name for name in ours if name.startswith(prefix)]
    assert names
    assert all(torch.equal(ours[name], theirs[name]) for name in names)


@pytest.mark.parametrize("mixer", OTHERS)
def test_every_mixer_converts_on_the_meta_device_with_the_parameters_of_its_config(make_ouro, mixer):
    options = OPTIONS.get(mixer, {})
    teacher = make_ouro()
    report = convert(teacher.to("meta"), [0], mixer, **options).report
    config = student_config(teacher.config, [0], mixer, **options)
    with torch.device("meta"):
        assert report.num_parameters == AutoModelForCausalLM.from_config(config).num_parameters()


def test_queries_of_a_dsa_mixer_make_up_for_its_wider_scale(make_ouro):
    """Scores are divided by the root of latent and tail together, attention's by that of a head."""
    teacher = make_ouro(num_key_value_heads=1, dtype=torch.float64)
    ours = convert(teacher, [], "dsa").model.model.layers[0].self_attn
    theirs = teacher.model.layers[0].self_attn
    x = torch.randn(1, 4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, latent = ours._latents(x, torch.zeros(1, 4, dtype=torch.long))
    scores = torch.einsum("bthk,bsk->bhts", query, latent) * ours.scaling
    q = linear(x, theirs.q_proj.weight).unflatten(-1, (4, 16))
    want = torch.einsum("bthk,bsk->bhts", q, linear(x, theirs.k_proj.weight)) / 4
    torch.testing.assert_close(scores, want, rtol=1e-10, atol=1e-10)
