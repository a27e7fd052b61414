# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import json
import logging

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GenerationConfig

from loopergy import OuroConfig, OuroForCausalLM, OuroModel
from loopergy.modeling.looped_outputs import exit_distribution, mix_loops

EXACT = {"rtol": 0, "atol": 1e-10}


def norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def ouro_by_hand(model: OuroForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    """Compute the normed state after each loop, token by token and head by head, from the weights and the paper."""
    weights, config = model.state_dict(), model.config
    heads, width, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
    frequency = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def turn(x, position):
        angle = (position * frequency).repeat(2)
        first, second = x[..., : width // 2], x[..., width // 2 :]
        return x * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()

    states = []
    stream = weights["model.embed_tokens.weight"][ids]
    for _ in range(config.num_loops):
        for layer in range(config.num_hidden_layers):
            part = {
                key.split(f"layers.{layer}.")[1]: value for key, value in weights.items() if f"layers.{layer}." in key
            }
            x = norm(stream, part["input_layernorm.weight"], eps)
            q, k, v = (F.linear(x, part[f"self_attn.{name}_proj.weight"]) for name in "qkv")
            mixed = torch.zeros_like(q)
            for row in range(len(ids)):
                for head in range(heads):
                    cut = slice(head * width, (head + 1) * width)
                    for t in range(ids.shape[1]):
                        query = turn(q[row, t, cut], t)
                        scores = torch.stack([query @ turn(k[row, j, cut], j) for j in range(t + 1)]) / width**0.5
                        mixed[row, t, cut] = scores.softmax(-1) @ v[row, : t + 1, cut]
            mixed = F.linear(mixed, part["self_attn.o_proj.weight"])
            stream = stream + norm(mixed, part["input_layernorm_2.weight"], eps)
            x = norm(stream, part["post_attention_layernorm.weight"], eps)
            gate, up = (F.linear(x, part[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            mixed = F.linear(F.silu(gate) * up, part["mlp.down_proj.weight"])
            stream = stream + norm(mixed, part["post_attention_layernorm_2.weight"], eps)
        stream = norm(stream, weights["model.norm.weight"], eps)
        states.append(stream)
    return states


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_every_loop_equals_the_paper_written_out(make_ouro, make_ids, attention):
    model = make_ouro()
    model.set_attn_implementation(attention)
    ids = make_ids(2, 7)
    outputs = model(ids, output_loop_logits=True)
    for mine, states, logits in zip(
        ouro_by_hand(model, ids), outputs.loop_hidden_states, outputs.loop_logits, strict=True
    ):
        # The rotary table is built from float32 frequencies.
        torch.testing.assert_close(states, mine, rtol=0, atol=1e-5)
        torch.testing.assert_close(logits, model.lm_head(states), **EXACT)
    torch.testing.assert_close(outputs.logits, outputs.loop_logits[-1], **EXACT)


@pytest.mark.parametrize(("preset", "count"), [("ouro-1.4b", 1_434_652_673), ("ouro-2.6b", 2_667_974_657)])
def test_published_sizes_have_the_published_number_of_parameters(preset, count):
    with torch.device("meta"):
        model = OuroForCausalLM(OuroConfig.from_preset(preset))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_state_dict_has_the_official_keys(make_ouro):
    """Guards K4."""
    layer = {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "input_layernorm.weight",
        "input_layernorm_2.weight",
        "post_attention_layernorm.weight",
        "post_attention_layernorm_2.weight",
    }
    keys = {f"model.layers.{index}.{name}" for index in range(2) for name in layer}
    keys |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    keys |= {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    assert set(make_ouro().state_dict()) == keys


@torch.no_grad()
def test_loops_continue_where_fewer_loops_stop(make_ouro, make_ids):
    """Property G15."""
    model, ids = make_ouro(num_loops=4), make_ids(2, 7)
    four = model.model(ids, output_loop_hidden_states=True).loop_hidden_states
    two = model.model(ids, num_loops=2).last_hidden_state
    assert torch.equal(two, four[1])
    assert torch.equal(model.model(inputs_embeds=two, num_loops=2).last_hidden_state, four[3])


@torch.no_grad()
def test_the_scale_of_a_branch_is_normed_away(make_ouro, make_ids):
    """Property G30."""
    model, ids = make_ouro(rms_norm_eps=1e-12), make_ids(2, 7)
    before = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= 3.0
        layer.mlp.down_proj.weight *= 0.5
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_exit_distribution_sums_to_one_and_gives_the_last_loop_the_rest():
    """Guards D2, property G28."""
    logits = 4 * torch.randn(50, 4, dtype=torch.float64)
    pdf = exit_distribution(logits)
    leave = logits.sigmoid()
    torch.testing.assert_close(pdf.sum(-1), torch.ones(50, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(pdf[:, 1], leave[:, 1] * (1 - leave[:, 0]))
    torch.testing.assert_close(pdf[:, 3], (1 - leave[:, :3]).prod(-1))
    assert exit_distribution(torch.zeros(2, 1)).eq(1).all()
    assert exit_distribution(logits.bfloat16()).dtype == torch.float32


@torch.no_grad()
def test_a_threshold_of_one_is_the_last_loop_even_where_bfloat16_would_round_to_it(make_ouro, make_ids):
    """Guards D2: gates so large that a bfloat16 sum reaches 1 in the first loop."""
    model, ids = make_ouro(dtype=torch.bfloat16), make_ids(2, 9)
    model.model.early_exit_gate.bias.fill_(20.0)
    last = model(ids, output_loop_logits=True).loop_logits[-1]
    for threshold in (1.0, 1, 1.5):
        assert torch.equal(model(ids, exit_threshold=threshold).logits, last)


@torch.no_grad()
def test_exits_choose_the_loop_that_speaks(make_ouro, make_ids):
    """Property G28."""
    model, ids = make_ouro(), make_ids(2, 9)
    every = model(ids, output_loop_logits=True)
    for step in range(3):
        torch.testing.assert_close(model(ids, exit_at_step=step).logits, every.loop_logits[step], **EXACT)
        # A fixed step outranks a threshold, as published.
        assert torch.equal(
            model(ids, exit_at_step=step, exit_threshold=0.5).logits, model(ids, exit_at_step=step).logits
        )
    assert torch.equal(model(ids, exit_threshold=0.0).logits, every.loop_logits[0])
    mixture = sum(every.exit_pdf[..., t, None] * every.loop_logits[t] for t in range(3))
    torch.testing.assert_close(model(ids, use_weighted_exit=True).logits, mixture, **EXACT)
    with pytest.raises(ValueError, match="exit_at_step=3 must be between 0 and 2"):
        model(ids, exit_at_step=3)


@torch.no_grad()
def test_exit_fields_of_the_config_are_the_defaults(make_ouro, make_ids):
    ids = make_ids(2, 9)
    plain = make_ouro()
    assert torch.equal(make_ouro(early_exit_step=1)(ids).logits, plain(ids, exit_at_step=1).logits)
    early = make_ouro(early_exit_threshold=0.6)
    assert torch.equal(early(ids).logits, plain(ids, exit_threshold=0.6).logits)
    assert not torch.equal(early(ids).logits, plain(ids).logits)
    assert torch.equal(early(ids, exit_threshold=1.0).logits, plain(ids).logits)


def early_exit_by_hand(model, ids, threshold):
    """Compute early exit from its rule, one token at a time, and the loops that each token took.

    Each token's keys and values of the loops that it left out are those of its last one.
    """
    loops, layers = model.config.num_loops, model.config.num_hidden_layers
    cache, logits, taken = None, [], []
    for t in range(ids.shape[1]):
        token = ids[:, t : t + 1]
        full = model(token, cache=cache, use_cache=True, exit_threshold=1.0, output_loop_logits=True)
        cache = full.cache
        cdf = full.exit_pdf[0, 0].cumsum(-1)
        loop = next((loop for loop in range(loops - 1) if cdf[loop] >= threshold), loops - 1)
        logits.append(full.loop_logits[loop])
        taken.append(loop + 1)
        for later in range(loop + 1, loops):
            for layer in range(layers):
                source, target = (cache.layers[at * layers + layer] for at in (loop, later))
                target.keys[..., -1, :] = source.keys[..., -1, :]
                target.values[..., -1, :] = source.values[..., -1, :]
    return torch.cat(logits, dim=1), taken


@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.9])
@torch.no_grad()
def test_early_exit_follows_its_rule_and_computes_no_loop_that_is_left_out(make_ouro, make_ids, threshold):
    """Guards D2: saved compute is counted in tokens that pass through a layer."""
    model, ids = make_ouro(num_loops=4), make_ids(1, 14)
    expected, taken = early_exit_by_hand(model, ids, threshold)
    passed = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *call: passed.append(call[-1].shape[:2].numel()))
    logits = model(ids, exit_threshold=threshold, use_cache=False).logits
    hook.remove()
    torch.testing.assert_close(logits, expected, **EXACT)
    assert sum(passed) == sum(taken)
    assert 14 < sum(taken) < 4 * 14


@pytest.mark.parametrize("kind", ["dynamic", "static", "shared"])
@torch.no_grad()
def test_early_exit_with_a_cache_padding_and_chunks_equals_the_full_pass(make_ouro, make_ids, kind):
    model = make_ouro(early_exit_threshold=0.6, num_loops=4)
    ids = make_ids(3, 12)
    mask = (torch.arange(12)[None] >= torch.tensor([[0], [3], [6]])).long()
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    cache, pieces = None, []
    if kind == "static":
        from transformers import StaticCache

        cache = StaticCache(config=model.config, max_cache_len=12)
    for start, end in ((0, 8), (8, 9), (9, 12)):
        outputs = model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache, use_cache=True)
        cache = outputs.cache
        pieces.append(outputs.logits)
    if kind == "shared":
        model.config.kv_sharing = "last"
        outputs = model(ids, attention_mask=mask, use_cache=True)
        assert len(outputs.cache) == 2
        pieces = [outputs.logits]
    real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[real], whole[real], **EXACT)
    for row, start in enumerate((0, 3, 6)):
        alone = model(ids[row : row + 1, start:], use_cache=False).logits
        torch.testing.assert_close(whole[row : row + 1, start:], alone, **EXACT)


@torch.no_grad()
def test_more_loops_are_taken_for_a_higher_threshold(make_ouro, make_ids):
    """Guards D2."""
    model, ids = make_ouro(num_loops=4), make_ids(2, 16)
    passed, means = [], []
    model.model.layers[0].mlp.register_forward_hook(lambda *call: passed.append(call[-1].shape[:2].numel()))
    for threshold in (0.0, 0.2, 0.5, 0.8, 1.0):
        passed.clear()
        model(ids, exit_threshold=threshold)
        means.append(sum(passed) / ids.numel())
    assert means == sorted(means)
    assert (means[0], means[-1]) == (1.0, 4.0)


@torch.no_grad()
def test_padding_takes_no_part_in_the_later_loops_of_early_exit(make_ouro, make_ids):
    model, mask = make_ouro(num_loops=4), torch.tensor([[0] * 5 + [1] * 7])
    model.model.early_exit_gate.bias.fill_(-50.0)
    passed = []
    model.model.layers[0].mlp.register_forward_hook(lambda *call: passed.append(call[-1].shape[:2].numel()))
    model(make_ids(1, 12), attention_mask=mask, exit_threshold=0.9)
    assert passed == [12, 7, 7, 7]


@torch.no_grad()
def test_early_exit_generates_the_same_with_and_without_cache(make_ouro, make_ids):
    model, ids = make_ouro(early_exit_threshold=0.5), make_ids(2, 6)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, **settings)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **settings))
    assert torch.equal(cached, model.generate(ids, cache_implementation="static", **settings))


def test_the_loss_is_of_the_mixture_or_of_the_last_loop(make_ouro, make_ids):
    ids = make_ids(2, 9)
    for kind in ("mixture", "last_loop"):
        model = make_ouro(training_loss=kind)
        every = model(ids, output_loop_logits=True)
        logits = every.logits
        if kind == "mixture":
            logits = sum(every.exit_pdf[..., t, None] * every.loop_logits[t] for t in range(3))
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        outputs = model(ids, labels=ids, exit_at_step=0, exit_threshold=0.1)
        torch.testing.assert_close(outputs.loss.double(), expected, rtol=0, atol=1e-6)
        outputs.loss.backward()
        assert (model.model.early_exit_gate.weight.grad is not None) == (kind == "mixture")


def test_no_logits_but_one_are_made_for_the_loss(make_ouro, make_ids):
    """Guards H6, I4."""
    model, ids = make_ouro(), make_ids(2, 9)
    calls = []
    model.lm_head.register_forward_hook(lambda *call: calls.append(call[-1].shape))
    model(ids, labels=ids)
    assert calls == [(2, 9, 128)]
    outputs = model(ids)
    assert outputs.loop_logits is None
    assert outputs.loop_hidden_states is None


def test_mixing_states_equals_mixing_logits(make_ouro):
    states = tuple(torch.randn(2, 3, 64, dtype=torch.float64) for _ in range(3))
    pdf = exit_distribution(torch.randn(2, 3, 3, dtype=torch.float64))
    head = torch.randn(128, 64, dtype=torch.float64)
    expected = sum(pdf[..., t, None] * (states[t] @ head.T) for t in range(3))
    torch.testing.assert_close(mix_loops(states, pdf) @ head.T, expected)


@torch.no_grad()
def test_hidden_states_are_one_per_visit_and_one_more(make_ouro, make_ids):
    """Guards D8."""
    model, ids = make_ouro(), make_ids(2, 5)
    outputs = model(ids, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3 * 2 + 1
    torch.testing.assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits, **EXACT)
    assert isinstance(model(ids, return_dict=False), tuple)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, outputs.logits[:, -2:], **EXACT)


@torch.no_grad()
def test_the_shipped_token_ids_are_repaired_once_with_a_warning(tmp_path, make_ouro, caplog):
    """Guards D1: a folder with 0/0/0 everywhere generates up to id 2."""
    model = make_ouro(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / name).read_text())
        content.update(bos_token_id=0, eos_token_id=0, pad_token_id=0)
        (tmp_path / name).write_text(json.dumps(content))
    logging.getLogger("transformers").propagate = True
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded.generation_config, GenerationConfig)
    for holder in (loaded.config, loaded.generation_config):
        assert (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id) == (1, 2, 0)
    loaded.lm_head.weight.zero_()
    loaded.lm_head.weight[2] = 1.0
    loaded.lm_head.weight[3] = -1.0
    with torch.no_grad():
        generated = loaded.generate(torch.tensor([[5, 6]]), max_new_tokens=5, do_sample=False)
    assert generated[0, 2] in (2, 0, 3)
    loaded.lm_head.weight[3] = 0.0
    assert OuroForCausalLM.from_pretrained(tmp_path, bos_token_id=0).generation_config.eos_token_id == 2


def test_exactly_one_input_is_wanted(make_ouro, make_ids):
    model = make_ouro()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(make_ids(1, 3), inputs_embeds=torch.zeros(1, 3, 64))


@pytest.mark.parametrize("loops", [0, -1, 2.5, True])
def test_a_loop_count_that_is_none_is_refused_at_the_call(make_ouro, make_ids, loops):
    """Guards D4."""
    with pytest.raises(ValueError, match="num_loops="):
        make_ouro()(make_ids(1, 3), num_loops=loops)


@torch.no_grad()
def test_loops_given_at_load_equal_those_given_at_the_call(make_ouro, make_ids, tmp_path):
    """Guards D4."""
    model, ids = make_ouro(dtype=torch.float32), make_ids(1, 6)
    model.save_pretrained(tmp_path)
    for loops in (1, 2, 3, 6):
        loaded = OuroForCausalLM.from_pretrained(tmp_path, num_loops=loops).eval()
        assert torch.equal(loaded(ids).logits, model(ids, num_loops=loops).logits)
    assert OuroModel.from_pretrained(tmp_path, total_ut_steps=2).config.num_loops == 2


def test_early_exit_refuses_what_it_cannot_record_or_compute_twice(make_ouro, make_ids):
    model, ids = make_ouro(), make_ids(2, 6)
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name}=True.*exit_threshold"):
            model(ids, exit_threshold=0.5, **{name: True})
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="take 'sdpa' or 'eager'"):
        model(ids, exit_threshold=0.5)
    model.set_attn_implementation("sdpa")
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        model(ids, exit_threshold=0.5)
    model(ids, labels=ids, exit_threshold=0.5).loss.backward()
    with torch.no_grad():
        model(ids, exit_threshold=0.5)
