# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, set_seed

from loopergy import LT2Config, LT2ForCausalLM
from loopergy.modeling.looped_cache import RecurrentLayer
from loopergy.modeling.mixers.gated_deltanet import GatedDeltaNet

EXACT = {"rtol": 0, "atol": 1e-10}


def embeddings(model, *shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, model.config.hidden_size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("preset", "fields", "count"),
    [
        ("lt2-0.6b-gdn", {}, 445_775_120),
        ("lt2-0.6b-gdn", {"use_loop_residual": False}, 445_771_024),
        ("lt2-0.6b-full", {}, 452_516_864),
        ("lt2-1.3b-gdn", {}, 1_578_953_312),
        ("lt2-1.3b-gdn", {"use_loop_residual": False}, 1_578_945_120),
        ("lt2-1.3b-hybrid-full-gdn", {}, 1_485_891_296),
        ("lt2-1.3b-hybrid-full-gdn", {"attn_output_gate": True}, 1_502_668_512),
        ("lt2-1.3b-hybrid-gdn-dsa", {}, 1_575_020_256),
        ("ouro-hybrid-1.4b", {}, 1_511_332_673),
    ],
)
def test_published_sizes_have_their_number_of_parameters(preset, fields, count):
    with torch.device("meta"):
        model = LT2ForCausalLM(LT2Config.from_preset(preset, **fields))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(
    ("mixer", "hidden", "heads", "count"),
    [
        ("full", 1024, 8, 4_194_304),
        ("full", 2048, 16, 16_777_216),
        ("gdn", 1024, 8, 6_320_336),
        ("gdn", 1024, 16, 6_336_640),
        ("gdn", 2048, 16, 25_256_160),
        ("kda", 1024, 8, 4_741_256),
        ("kda", 1024, 16, 4_487_248),
        ("kda", 2048, 16, 17_887_376),
        ("deltanet", 1024, 8, 4_214_912),
        ("deltanet", 1024, 16, 4_223_040),
        ("deltanet", 2048, 16, 16_834_688),
        ("mamba2", 1024, 8, 6_443_672),
        ("mamba2", 1024, 16, 6_451_888),
        ("mamba2", 2048, 16, 25_486_000),
        ("hgrn2", 1024, 8, 4_195_328),
        ("hgrn2", 1024, 16, 4_195_328),
        ("hgrn2", 2048, 16, 16_779_264),
        ("retnet", 1024, 8, 8_388_864),
        ("retnet", 1024, 16, 8_388_736),
        ("retnet", 2048, 16, 33_554_688),
        # 4 d^2 + 16 d + 16 d / 2 + d / 2 and the head norm; 4 d^2, two maps of two biased squares, and the head norm.
        ("gla", 1024, 8, 4_194_304 + 25_088 + 128),
        ("la", 1024, 8, 4_194_304 + 4 * (128 * 128 + 128) + 128),
        ("dsa", 1024, 8, 10_092_544),
        ("dsa", 1024, 16, 19_529_728),
        ("dsa", 2048, 16, 39_059_456),
        ("nsa", 1024, 8, 2_383_872),
        ("nsa", 1024, 16, 2_277_376),
        ("nsa", 2048, 16, 9_011_200),
    ],
)
def test_each_mixer_has_its_number_of_parameters(mixer, hidden, heads, count):
    config = LT2Config(
        vocab_size=8, hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=1, layer_mixers=mixer
    )
    with torch.device("meta"):
        model = LT2ForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.model.layers[0].self_attn.parameters()) == count


@torch.no_grad()
def test_no_token_sees_a_later_one(lt2):
    """Property G12, by perturbation of every position."""
    x = embeddings(lt2, 1, 9)
    before = lt2(inputs_embeds=x).logits
    for position in range(9):
        changed = x.clone()
        changed[:, position] += 1.0
        after = lt2(inputs_embeds=changed).logits
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.allclose(after[:, position], before[:, position])


def test_no_gradient_flows_from_later_tokens(lt2):
    """Property G12, by Jacobian."""
    x = embeddings(lt2, 1, 7).requires_grad_()
    logits = lt2(inputs_embeds=x, use_cache=False).logits
    for position in range(7):
        (gradient,) = torch.autograd.grad(logits[0, position].sum(), x, retain_graph=True)
        assert gradient[0, position + 1 :].eq(0).all()
        assert gradient[0, position].ne(0).any()


@torch.no_grad()
def test_a_state_carried_from_loop_to_loop_would_see_the_future(make_lt2, monkeypatch):
    """Property G19: the negative control of the two tests above."""
    model = make_lt2(layer_mixers="gdn", gdn_use_short_conv=False)
    x = embeddings(model, 1, 9)
    forward = GatedDeltaNet.forward

    def carrying(self, hidden_states, cache=None, **kwargs):
        if not hasattr(self, "carried"):
            object.__setattr__(self, "carried", DynamicCache(config=model.config))
        kwargs["slot"] = self.layer_idx
        return forward(self, hidden_states, cache=self.carried, **kwargs)

    monkeypatch.setattr(GatedDeltaNet, "forward", carrying)
    changed = x.clone()
    changed[:, -1] += 1.0
    first = model(inputs_embeds=x, use_cache=False).logits
    for layer in model.model.layers:
        del layer.self_attn.__dict__["carried"]
    second = model(inputs_embeds=changed, use_cache=False).logits
    assert not torch.allclose(first[:, :-1], second[:, :-1])


@torch.no_grad()
def test_masking_the_embeddings_once_would_not_be_enough(make_lt2, make_ids):
    """Property G23: the negative control of the padding tests."""
    model, ids = make_lt2(layer_mixers="gdn"), make_ids(1, 10)
    real = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1, 1, 1]).bool()
    alone = model(ids[:, real]).logits
    masked = model.model.embed_tokens(ids) * real[None, :, None]
    assert not torch.allclose(model(inputs_embeds=masked).logits[:, real], alone)
    torch.testing.assert_close(model(ids, attention_mask=real[None].long()).logits[:, real], alone, **EXACT)


@torch.no_grad()
def test_without_residual_loops_are_the_stack_applied_again(make_lt2):
    """Properties G13 and G14."""
    model = make_lt2(layer_mixers="gdn,full", use_loop_residual=False)
    x = embeddings(model, 2, 8)

    def stream_after(inputs_embeds, loops):
        """Return what goes into the final norm."""
        seen = []
        hook = model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        model.model(inputs_embeds=inputs_embeds, num_loops=loops)
        hook.remove()
        return seen[0]

    once = x
    for _ in range(3):
        once = stream_after(once, 1)
    torch.testing.assert_close(stream_after(x, 3), once, **EXACT)


@torch.no_grad()
def test_the_residual_alone_multiplies_the_embedding(make_lt2):
    """Property G14: with silent mixers and MLPs, h = prod_t (1 + rho[t]) * embedding."""
    model = make_lt2(layer_mixers="gdn,full")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    x = embeddings(model, 2, 5)
    stream = []
    model.model.norm.register_forward_pre_hook(lambda module, args: stream.append(args[0]))
    model(inputs_embeds=x)
    torch.testing.assert_close(stream[0], (1 + model.model.loop_residual).prod(0) * x, **EXACT)


def test_each_row_of_the_residual_belongs_to_its_loop(make_lt2, make_ids):
    """Property G18."""
    model, ids = make_lt2(), make_ids(2, 6)
    assert model.model.loop_residual.shape == (3, 64)
    model(ids, num_loops=2).logits.sum().backward()
    used = model.model.loop_residual.grad.ne(0).any(-1)
    assert used.tolist() == [True, True, False]


@pytest.mark.parametrize(("windows", "loops", "layers"), [([4, 4], 2, 2), ([3], 1, 4), ([2, 5, 3], 3, 1)])
def test_stacked_windows_reach_exactly_as_far_as_their_sum(make_lt2, windows, loops, layers):
    """Property G16: 1 + N * sum_t (w_t - 1) tokens."""
    model = make_lt2(layer_mixers="window", num_hidden_layers=layers, num_loops=loops, loop_windows=windows)
    x = embeddings(model, 1, 24).requires_grad_()
    model(inputs_embeds=x, use_cache=False).logits[0, -1].sum().backward()
    reached = x.grad[0].ne(0).any(-1).sum()
    assert reached == min(24, 1 + layers * sum(window - 1 for window in windows))


@torch.no_grad()
def test_windows_of_the_whole_text_are_full_attention_and_windows_of_one_are_none(make_lt2, make_ids):
    """Property G7."""
    ids = make_ids(2, 8)
    full = make_lt2(layer_mixers="full")
    wide = make_lt2(layer_mixers="window", sliding_window=8)
    torch.testing.assert_close(wide(ids).logits, full(ids).logits, **EXACT)
    one = make_lt2(layer_mixers="window", sliding_window=1)
    whole = one(ids).logits
    torch.testing.assert_close(whole, torch.cat([one(ids[:, t : t + 1]).logits for t in range(8)], dim=1), **EXACT)


@torch.no_grad()
def test_windows_are_exact_on_both_sides_of_their_edge(make_lt2, make_ids):
    """Guards G1, G6: lengths below, at and above the window, one token and three at a time, with padding."""
    model, ids = make_lt2(layer_mixers="window,gdn", sliding_window=8), make_ids(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    for step in (1, 3):
        cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).cache
        for start in range(5, 20 - step + 1, step):
            end = start + step
            logits = model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache).logits
            torch.testing.assert_close(logits, whole[:, start:end], **EXACT)


@torch.no_grad()
def test_an_output_gate_of_zero_halves_attention(make_lt2, make_ids):
    """Property G10: exactly the ungated layer with half the output projection."""
    gated = make_lt2(layer_mixers="full", attn_output_gate=True)
    plain = make_lt2(layer_mixers="full")
    state = {key: value for key, value in gated.state_dict().items() if ".self_attn.gate_proj" not in key}
    plain.load_state_dict(state)
    for one, other in zip(gated.model.layers, plain.model.layers, strict=True):
        one.self_attn.gate_proj.weight.zero_()
        other.self_attn.o_proj.weight *= 0.5
    torch.testing.assert_close(gated(make_ids(2, 6)).logits, plain(make_ids(2, 6)).logits, **EXACT)


def test_shared_weights_get_the_sum_of_the_loops_gradients(make_lt2, make_ids):
    """Property G17: an unrolled copy with N * T layers of its own has the gradients that add up to the shared ones."""
    model, ids = make_lt2(layer_mixers="gdn,full", use_loop_residual=False), make_ids(2, 6)
    model(ids, labels=ids).loss.backward()
    config = copy.deepcopy(model.config)
    unrolled = make_lt2(layer_mixers="gdn,full", use_loop_residual=False, num_hidden_layers=12, num_loops=1)
    assert unrolled.config.layer_mixers == list(config.layer_mixers) * 3
    unrolled.load_state_dict(
        {
            **{key: value for key, value in model.state_dict().items() if ".layers." not in key},
            **{
                key.replace(f".layers.{layer}.", f".layers.{loop * 4 + layer}."): value
                for key, value in model.state_dict().items()
                for layer in range(4)
                for loop in range(3)
                if f".layers.{layer}." in key
            },
        }
    )
    unrolled(ids, labels=ids).loss.backward()
    copies = dict(unrolled.named_parameters())
    for name, parameter in model.named_parameters():
        if ".layers." in name:
            layer = int(name.split(".")[2])
            names = [name.replace(f".layers.{layer}.", f".layers.{loop * 4 + layer}.") for loop in range(3)]
            expected = sum(copies[copied].grad for copied in names)
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("spelling", ["position_ids", "cu_seq_lens_q", "seq_idx"])
def test_packed_documents_do_not_see_each_other(any_model, make_ids, spelling):
    """Guards C1, C2, C3: logits per document, and no gradient from the third to the first."""
    lengths = [11, 7, 14]
    ids = make_ids(1, sum(lengths))
    if spelling == "cu_seq_lens_q":
        marks = torch.tensor([0, 11, 18, 32], dtype=torch.int32)
    elif spelling == "seq_idx":
        marks = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    else:
        marks = torch.cat([torch.arange(length) for length in lengths])[None]
    x = any_model.model.embed_tokens(ids).detach().requires_grad_()
    logits = any_model(inputs_embeds=x, **{spelling: marks}).logits
    alone = torch.cat([any_model(part, use_cache=False).logits for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(logits, alone, **EXACT)
    logits[:, 18:].sum().backward()
    assert x.grad[:, :18].eq(0).all()
    assert x.grad[:, 18:].ne(0).any()


@torch.no_grad()
def test_packed_rows_of_a_batch_and_padding_behind_them(any_model, make_ids):
    """Guards C6."""
    ids = make_ids(2, 16)
    positions = torch.tensor([[*range(4), *range(6), *[0] * 6], [*range(9), *range(7)]])
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 10:] = 0
    logits = any_model(ids, position_ids=positions, attention_mask=mask).logits
    for row, start, end in ((0, 0, 4), (0, 4, 10), (1, 0, 9), (1, 9, 16)):
        alone = any_model(ids[row : row + 1, start:end], use_cache=False).logits
        torch.testing.assert_close(logits[row : row + 1, start:end], alone, **EXACT)


def test_packed_documents_with_a_cache_are_refused(any_model, make_ids):
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with pytest.raises(ValueError, match="several packed documents"):
        any_model(make_ids(1, 5), position_ids=positions, cache=DynamicCache(config=any_model.config))
    with pytest.raises(ValueError, match="Flatten the batch to one row"):
        any_model(make_ids(2, 5), cu_seq_lens_q=torch.tensor([0, 5, 10]))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(any_model, make_ids, reentrant):
    """Guards I2."""
    ids = make_ids(2, 7)
    any_model.train()
    plain = any_model(ids, labels=ids).loss
    plain.backward()
    expected = {name: parameter.grad for name, parameter in any_model.named_parameters()}
    any_model.zero_grad()
    any_model.activation_checkpointing_enable({"use_reentrant": reentrant})
    loss = any_model(ids, labels=ids).loss
    loss.backward()
    assert torch.equal(loss, plain)
    for name, parameter in any_model.named_parameters():
        if expected[name] is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-10)


def test_the_loss_counts_items_however_the_batch_is_cut(any_model, make_ids):
    """Guards I1."""
    ids = make_ids(4, 9)
    labels = ids.clone()
    labels[0, 3:] = -100
    labels[1, 6:] = -100
    items = (labels[:, 1:] != -100).sum()
    whole = any_model(ids, labels=labels, num_items_in_batch=items).loss
    parts = sum(
        any_model(ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=items).loss for row in range(4)
    )
    torch.testing.assert_close(parts, whole, rtol=0, atol=4e-6)


def test_reloaded_weights_and_buffers_are_bitwise_those_saved(any_model, tmp_path):
    """Guards E1, E2, E5, E13."""
    model = any_model.float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    for _ in range(3):
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is type(model)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert all(parameter.eq(0.5).all() for parameter in loaded.parameters())
        for (name, mine), (_, theirs) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
            assert torch.equal(mine, theirs), name


def test_missing_keys_get_the_documented_start(make_lt2, tmp_path):
    """Guards E12, F5, F14."""
    model = make_lt2(dtype=torch.float32, gdn_num_heads=64, gdn_head_dim=1)
    state = {key: value for key, value in model.state_dict().items() if "A_log" not in key and "dt_bias" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    draws = []
    for seed in (0, 1):
        set_seed(seed)
        loaded, info = LT2ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert {key.rsplit(".", 1)[1] for key in info["missing_keys"]} == {"A_log", "dt_bias"}
        mixer = loaded.model.layers[0].self_attn
        decay, step = mixer.A_log.exp(), nn.functional.softplus(mixer.dt_bias)
        assert 0 < decay.min() < 4 < 12 < decay.max() <= 16
        assert 0.999e-3 <= step.min() < step.max() <= 0.1001
        draws.append(mixer.A_log)
    assert not torch.equal(*draws)


def test_decay_parameters_stay_in_float32_when_the_model_is_loaded_in_bfloat16(make_lt2, make_ids, tmp_path):
    """Guards F5, F6."""
    model = make_lt2(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = LT2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    mixer, original = loaded.model.layers[0].self_attn, model.model.layers[0].self_attn
    assert mixer.A_log.dtype == mixer.dt_bias.dtype == torch.float32
    assert mixer.q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(mixer.A_log, original.A_log)
    assert loaded(make_ids(1, 5)).logits.isfinite().all()
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        fresh = LT2ForCausalLM(model.config)
    finally:
        torch.set_default_dtype(old)
    assert all(layer.self_attn.A_log.isfinite().all() for layer in fresh.model.layers)


@torch.no_grad()
def test_loops_given_at_load_use_the_first_rows_of_the_residual(make_lt2, make_ids, tmp_path):
    model, ids = make_lt2(dtype=torch.float32), make_ids(1, 6)
    model.save_pretrained(tmp_path)
    for loops in (1, 2, 5):
        loaded = LT2ForCausalLM.from_pretrained(tmp_path, num_loops=loops).eval()
        assert torch.equal(loaded(ids).logits, model(ids, num_loops=loops).logits)


@torch.no_grad()
def test_loop_outputs_speak_for_their_loop(lt2, make_ids):
    ids = make_ids(2, 6)
    outputs = lt2(ids, output_loop_logits=True)
    assert len(outputs.loop_logits) == len(outputs.loop_hidden_states) == 3
    torch.testing.assert_close(outputs.loop_logits[-1], outputs.logits, **EXACT)
    if lt2.model.loop_residual is None:
        torch.testing.assert_close(outputs.loop_logits[1], lt2(ids, num_loops=2).logits, **EXACT)
    gated = lt2.config.early_exit_gate
    assert (outputs.exit_pdf is not None) == gated
    if gated:
        torch.testing.assert_close(outputs.exit_pdf.sum(-1), torch.ones(2, 6, dtype=torch.float64), **EXACT)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_forward_equals_eager(make_lt2, make_ids):
    """Guards F12."""
    model = make_lt2(dtype=torch.float32, layer_mixers="gdn,full", num_hidden_layers=2, num_loops=2)
    ids = make_ids(1, 33)
    compiled = torch.compile(model, backend="aot_eager")(ids, use_cache=False).logits
    torch.testing.assert_close(compiled, model(ids, use_cache=False).logits, rtol=0, atol=1e-4)


def test_the_recurrent_slots_are_ours(make_lt2, make_ids):
    cache = make_lt2(layer_mixers="gdn,full")(make_ids(1, 3), use_cache=True).cache
    assert [isinstance(layer, RecurrentLayer) for layer in cache.layers] == [True, False] * 6


@torch.no_grad()
def test_patterns_given_to_from_pretrained_are_read_like_those_of_a_config(make_lt2, make_ids, tmp_path):
    ids, model = make_ids(1, 12), make_lt2(layer_mixers="full")
    model.save_pretrained(tmp_path)
    read = {"dtype": torch.float64, "sliding_window": 3}
    windowed = LT2ForCausalLM.from_pretrained(tmp_path, layer_mixers="window", **read).eval()
    assert windowed.config.layer_mixers == ["window"] * model.config.num_hidden_layers
    assert not torch.equal(windowed(ids).logits, model(ids).logits)
    looped = LT2ForCausalLM.from_pretrained(tmp_path, loop_windows="full->5->3", **read).eval()
    assert looped.config.loop_windows == make_lt2(layer_mixers="full", loop_windows="full->5->3").config.loop_windows
    for wrong in ({"layer_mixers": "nonsense"}, {"layer_mixers": ["full"] * 7}, {"loop_windows": ["a", 2, 3]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LT2ForCausalLM.from_pretrained(tmp_path, **wrong)
    with pytest.raises(ValueError, match="kv_sharing='last'"):
        LT2ForCausalLM.from_pretrained(tmp_path, layer_mixers="window", kv_sharing="last", **read)


@pytest.mark.parametrize("mixer", ["gdn", "retnet", "mamba2,full"])
def test_a_mask_per_query_and_key_is_refused_by_recurrent_mixers(make_lt2, make_ids, mixer):
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"\(1, 1, 6, 6\).*recurrent mixer"):
        make_lt2(layer_mixers=mixer)(make_ids(1, 6), attention_mask=mask)
