# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Hold NRGPT against the official numbers, its caches against full runs, and its options against literal loops."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.modeling_utils import PreTrainedModel

from loopergy import NRGPTConfig, NRGPTForCausalLM, NRGPTForSequenceClassification, nrgpt_from_official
from loopergy.modeling.token_energies import Neighbours

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "nrgpt"
VARIANTS = [f"NRGPT_H_{form}_{mask}" for form in ("FF1", "FF2", "FF2W") for mask in ("self", "strict")]
# Every option once, in combinations that touch each other.
KINDS = {
    "official": {},
    "strict-ff1": {"ff_energy": "ff1", "exclude_self": True},
    "ff2-gamma": {"ff_energy": "ff2", "exclude_self": True, "eta_type": "gamma", "norm_type": "layernorm"},
    "rms-diag": {"norm_type": "rmsnorm", "eta_type": "diag", "attention_beta": 0.5, "learn_alpha": True},
    "no-norm": {"norm_type": "none", "eta_type": "scalar", "initializer_range": 0.05},
    "tangent": {"tangent_projection": True, "exclude_self": True, "eta_type": "identity"},
}


def build(dtype=torch.float64, implementation="sdpa", **fields) -> NRGPTForCausalLM:
    torch.manual_seed(0)
    config = NRGPTConfig.from_preset("tiny", **{"initializer_range": 0.2, **fields})
    model = NRGPTForCausalLM._from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if (parameter == parameter.flatten()[0]).all():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype).eval()


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(seed))


def golden(name: str) -> dict[str, torch.Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def load(name: str, dtype: torch.dtype, implementation: str = "sdpa") -> tuple[NRGPTForCausalLM, dict]:
    data = golden(name)
    tensors = {key.removeprefix("param/"): value for key, value in data.items() if key.startswith("param/")}
    model = nrgpt_from_official(tensors, num_hidden_layers=3, exclude_self=name.endswith("strict"))
    model.set_attn_implementation(implementation)
    return model.to(dtype), data


@pytest.fixture(params=list(KINDS))
def model(request):
    return build(**KINDS[request.param])


# The official numbers.


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_logits_and_parameter_gradients_are_the_official_ones(name, implementation, dtype, tolerance):
    model, data = load(name, dtype, implementation)
    logits = model(data["input_ids"]).logits
    torch.testing.assert_close(logits.double(), data["logits_f64"], rtol=0, atol=tolerance)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data["targets"].flatten())
    assert abs(float(loss.detach()) - float(data["loss_f64"])) < tolerance
    loss.backward()
    block = model.model.block
    ours = {
        "blocks.ffwd.net.0.weight": block.ff.fc1.weight,
        "blocks.ffwd.net.0.bias": block.ff.fc1.bias,
        "blocks.ln.bias": block.norm.bias,
        "blocks.proj.weight": block.eta.weight,
        "blocks.scale_ff": block.scale_ff,
        "token_embedding_table.weight": model.model.embed_tokens.weight,
        "position_embedding_table.weight": model.model.embed_positions.weight,
        "ln_f.weight": model.model.norm.weight,
        "ln_f.bias": model.model.norm.bias,
        "lm_head.weight": model.lm_head.weight,
        "lm_head.bias": model.lm_head.bias,
    }
    if block.ff.form != "ff1":
        ours |= {"blocks.ffwd.net.2.weight": block.ff.fc2.weight, "blocks.ffwd.net.2.bias": block.ff.fc2.bias}
    found = {key: parameter.grad for key, parameter in ours.items()}
    heads = block.attn.k_proj.weight.grad.chunk(2)
    found |= {f"blocks.attn.heads.{head}.H.weight": part for head, part in enumerate(heads)}
    assert set(found) == {key.removeprefix("grad_f64/") for key in data if key.startswith("grad_f64/")}
    for key, gradient in found.items():
        # The file holds float32, so that in float64 the last digit of that is the limit.
        wanted = data[f"grad_f64/{key}"].double()
        torch.testing.assert_close(gradient.double(), wanted, rtol=1.2e-7, atol=tolerance, msg=key)


@pytest.mark.parametrize("name", VARIANTS)
def test_states_and_energies_of_every_step_are_the_official_ones(name):
    """Guards D7, D8: energies are outputs, and hidden states are counted as documented."""
    model, data = load(name, torch.float64)
    with torch.no_grad():
        outputs = model(data["input_ids"], output_energies=True, output_hidden_states=True)
    energies = outputs.energies
    assert energies.total.shape == (1, 4, 2, 12)
    torch.testing.assert_close(energies.attention[0], data["energy_attn_f64"], rtol=0, atol=1e-10)
    torch.testing.assert_close(energies.feed_forward[0], data["energy_ff_f64"], rtol=0, atol=1e-10)
    scale = model.model.block.scale_ff.detach()
    torch.testing.assert_close(energies.total, energies.attention + scale * energies.feed_forward)
    assert len(outputs.hidden_states) == 4
    for state, wanted in zip(outputs.hidden_states[:-1], data["states_f64"], strict=False):
        torch.testing.assert_close(state, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(outputs.hidden_states[-1], model.model.norm(data["states_f64"][-1]))
    torch.testing.assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_texts_within_and_beyond_the_position_table_are_the_official_ones(name, use_cache):
    model, data = load(name, torch.float64)
    options = {"do_sample": False, "use_cache": use_cache}
    short, long = data["greedy_ids"], data["greedy_ids_overflow"]
    assert model.generate(short[:, :5], max_new_tokens=8, **options).equal(short)
    assert model.generate(long[:, :10], max_new_tokens=12, recompute_window=True, **options).equal(long)


# Caches.


@pytest.mark.parametrize("chunks", [[1] * 14, [6, 1, 5, 2], [13, 1], [2, 12]])
def test_a_cached_run_equals_the_full_run(model, chunks):
    """Guards A1, A4: several new tokens on a filled cache, and one slot per step."""
    ids = draw(2, 14)
    with torch.no_grad():
        full = model(ids).logits
        cache = DynamicCache(config=model.config)
        parts = [model(part, cache=cache).logits for part in ids.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=0, atol=1e-10)


def test_the_cache_holds_one_vector_per_token_and_step_and_nothing_else(model):
    cache = model(draw(2, 9), use_cache=True).cache
    assert len(cache.layers) == model.config.num_hidden_layers
    assert [layer.keys.shape for layer in cache.layers] == [(2, 1, 9, 32)] * 3
    assert [layer.values.numel() for layer in cache.layers] == [0] * 3
    assert [cache.get_seq_length(slot) for slot in range(3)] == [9] * 3


def test_the_vectors_of_another_step_do_not_do():
    model, ids = build(), draw(1, 10)
    with torch.no_grad():
        full = model(ids).logits[:, -1]
        cache = model(ids[:, :-1], use_cache=True).cache
        cache.layers[1].keys = cache.layers[0].keys.clone()
        assert (model(ids[:, -1:], cache=cache).logits[:, -1] - full).abs().max() > 1e-3


@pytest.mark.parametrize("padding", [1, 4])
def test_left_padding_changes_nothing(model, padding):
    """Guards A6, B2, B7."""
    ids = draw(2, 8)
    mask = torch.ones(2, 8 + padding, dtype=torch.long)
    mask[:, :padding] = 0
    padded = torch.cat((draw(2, padding, seed=5), ids), dim=1)
    with torch.no_grad():
        alone = model(ids).logits
        together = model(padded, attention_mask=mask).logits
        cache = DynamicCache(config=model.config)
        cut = padding + 5
        first = model(padded[:, :cut], attention_mask=mask[:, :cut], cache=cache).logits
        second = model(padded[:, cut:], attention_mask=mask, cache=cache).logits
    torch.testing.assert_close(together[:, padding:], alone, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat((first, second), dim=1)[:, padding:], alone, rtol=0, atol=1e-10)
    assert together.isfinite().all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rows_without_any_real_token_stay_finite_and_give_finite_gradients(implementation):
    model = build(implementation=implementation, exclude_self=True)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0] = 0
    logits = model(draw(2, 6), attention_mask=mask).logits
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_batch_generates_what_each_row_generates_alone(model):
    """Guards B4."""
    rows = [draw(1, length, seed=length) for length in (4, 7, 11)]
    batch = torch.cat([torch.nn.functional.pad(row, (11 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (11 - row.shape[1], 0)) for row in rows])
    together = model.generate(batch, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    for row, text in zip(rows, together, strict=True):
        assert model.generate(row, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, row.shape[1] :].equal(
            text[11:]
        )


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"cache_implementation": "offloaded"},
        {"prompt_lookup_num_tokens": 3},
        {"num_steps": 2},
        {"num_steps": 5},
        {"stop_tolerance": 0.3},
        {"prefill_chunk_size": 3},
    ],
    ids=str,
)
def test_every_way_of_generating_gives_the_text_of_a_run_without_cache(model, options):
    """Guards A4, A7, A8, A12, D9."""
    ids = draw(1, 8)
    kept = {key: value for key, value in options.items() if key in ("num_beams", "num_steps", "stop_tolerance")}
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False, use_cache=False, pad_token_id=0, **kept)
    assert model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0, **options).equal(wanted)


def test_a_smaller_model_drafts_for_a_larger_one():
    model, assistant = build(), build(num_hidden_layers=1)
    ids = draw(1, 8)
    wanted = model.generate(ids, max_new_tokens=15, do_sample=False, pad_token_id=0)
    drafted = model.generate(ids, max_new_tokens=15, do_sample=False, pad_token_id=0, assistant_model=assistant)
    assert drafted.equal(wanted)


def test_a_cropped_and_a_reordered_cache_go_on_rightly(model):
    """Guards A7, A10."""
    ids = draw(2, 10)
    with torch.no_grad():
        cache = model(ids, use_cache=True).cache
        cache.crop(-4)
        again = model(ids[:, 6:], cache=cache).logits
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = model(draw(2, 1, seed=3), cache=cache).logits
        full = model(ids).logits
        wanted = model(torch.cat((ids.flip(0), draw(2, 1, seed=3)), dim=1)).logits[:, -1:]
    torch.testing.assert_close(again, full[:, 6:], rtol=0, atol=1e-10)
    torch.testing.assert_close(swapped, wanted, rtol=0, atol=1e-10)


def test_a_static_cache_of_the_users_own_serves(model):
    ids = draw(2, 9)
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        first, second = model(ids[:, :6], cache=cache).logits, model(ids[:, 6:], cache=cache).logits
        torch.testing.assert_close(torch.cat((first, second), dim=1), model(ids).logits, rtol=0, atol=1e-10)


def test_caches_that_cannot_hold_the_vectors_are_refused():
    model = build()
    with pytest.raises(ValueError, match="one tensor a token"):
        model.generate(draw(1, 4), max_new_tokens=2, cache_implementation="quantized")
    with pytest.raises(NotImplementedError, match="paged cache"):
        model.generate_batch([[1, 2]])


def test_a_cache_for_fewer_steps_is_refused():
    model, ids = build(), draw(1, 6)
    short = model(ids, use_cache=True, num_steps=2).cache
    with pytest.raises(ValueError, match="2 slots, but each of the 3 steps"):
        model(ids[:, :1], cache=short)
    for filled in (DynamicCache(config=model.config), DynamicCache()):
        model(ids, cache=filled, num_steps=2)
        with pytest.raises(ValueError, match=r"smaller num_steps.*6 tokens"):
            model(ids[:, :1], cache=filled)


# Steps and rest.


def test_steps_at_run_time_are_those_of_a_model_built_with_them(tmp_path):
    """Guards D4."""
    model, ids = build(), draw(2, 7)
    model.save_pretrained(tmp_path)
    for steps in (1, 2, 5):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, num_steps=steps, dtype=torch.float64)
        assert loaded.config.num_hidden_layers == steps
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, model(ids, num_steps=steps).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match="num_steps=0"):
        model(ids, num_steps=0)


def literal_rest(model: NRGPTForCausalLM, ids: torch.Tensor, steps: int, tolerance: float) -> torch.Tensor:
    """Take the steps of one text token by token, with an explicit list of what each token shows at each step."""
    base, block = model.model, model.model.block
    shown = [[] for _ in range(steps)]
    out = []
    for position, token in enumerate(ids):
        x = base.embed_tokens(token) + base.embed_positions.weight[position]
        resting = False
        for step in range(steps):
            g = block.norm(x)
            shown[step].append(g)
            if resting:
                continue
            memory = torch.stack(shown[step])[None]
            last = torch.ones(1, 1, 1, position + 1, dtype=torch.bool)
            last[..., -1] = not model.config.exclude_self
            gradient, _ = block.attn(g[None, None], memory, Neighbours.of(last, model.config.exclude_self))
            update = block.scaled(gradient + block.scale_ff * block.ff(g[None, None]))
            x = x - update[0, 0]
            resting = bool((block.norm(x) - g).square().mean().sqrt() <= tolerance)
        out.append(x)
    return model.lm_head(base.norm(torch.stack(out)))


@pytest.mark.parametrize("kind", ["official", "strict-ff1"])
@pytest.mark.parametrize("tolerance", [0.0, 0.25, 0.6, 10.0])
def test_resting_tokens_are_those_of_a_literal_loop(kind, tolerance):
    model, ids = build(**KINDS[kind]), draw(1, 9)
    with torch.no_grad():
        wanted = literal_rest(model, ids[0], 6, tolerance)
        full = model(ids, num_steps=6, stop_tolerance=tolerance).logits[0]
        cache, parts = None, []
        for part in ids.split([4, 1, 3, 1], dim=1):
            outputs = model(part, cache=cache, num_steps=6, stop_tolerance=tolerance, use_cache=True)
            cache = outputs.cache
            parts.append(outputs.logits)
    torch.testing.assert_close(full, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat(parts, dim=1)[0], wanted, rtol=0, atol=1e-10)


def test_the_loop_ends_when_all_tokens_rest():
    model, calls = build(), []
    model.model.block.attn.register_forward_hook(lambda *call: calls.append(1))
    outputs = model(draw(2, 5), stop_tolerance=100.0, output_energies=True)
    assert len(calls) == 1
    assert outputs.energies.total.shape == (1, 4, 2, 5)
    assert outputs.energies.total[0, 1].equal(outputs.energies.total[0, 3])


# Whole-model behaviour.


def test_a_token_changes_nothing_before_it(model):
    ids = draw(1, 10)
    other = ids.clone()
    other[0, 6] = (ids[0, 6] + 1) % 128
    for steps in (1, 3, 6):
        with torch.no_grad():
            before, after = model(ids, num_steps=steps).logits, model(other, num_steps=steps).logits
        assert before[:, :6].equal(after[:, :6])
        assert not before[:, 6:].equal(after[:, 6:])


def test_packed_documents_do_not_see_each_other(model):
    first, second = draw(1, 5), draw(1, 7, seed=2)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    ids = torch.cat((first, second), dim=1)
    with torch.no_grad():
        packed = model(ids, position_ids=positions).logits
        apart = torch.cat((model(first).logits, model(second).logits), dim=1)
    torch.testing.assert_close(packed, apart, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="packed documents"):
        model(ids, position_ids=positions, cache=DynamicCache(config=model.config))


def test_eager_and_sdpa_agree_and_eager_gives_the_weights(model):
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ids = draw(2, 9)
    with torch.no_grad():
        outputs = eager(ids, output_attentions=True)
        torch.testing.assert_close(outputs.logits, model(ids).logits, rtol=0, atol=1e-10)
    weights = outputs.attentions[0]
    assert (len(outputs.attentions), weights.shape) == (3, (2, 2, 9, 9))
    strict = model.config.exclude_self
    assert weights.triu(int(not strict)).count_nonzero() == 0
    rows = weights.sum(dim=-1)[..., int(strict) :]
    torch.testing.assert_close(rows, torch.ones_like(rows))
    assert not strict or weights[:, :, 0].count_nonzero() == 0


def test_a_ready_mask_decides_alone(model):
    ids = draw(2, 6)
    bare = torch.ones(6, 6, dtype=torch.bool).tril(-int(model.config.exclude_self)).expand(2, 1, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, attention_mask=bare).logits, model(ids).logits, rtol=0, atol=1e-10)


def test_energies_need_the_whole_text():
    model, ids = build(), draw(1, 6)
    cache = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match="whole"):
        model(ids[:, :1], cache=cache, output_energies=True)


def test_initial_values_are_the_official_ones():
    torch.manual_seed(0)
    model = NRGPTForCausalLM(NRGPTConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2))
    for name, parameter in model.named_parameters():
        if name == "model.block.scale_ff" or name == "model.norm.weight":
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert abs(float(parameter.detach().std()) - 0.02) < 1e-3, name
    assert not any("norm.weight" in name for name, _ in model.model.block.named_parameters())


@pytest.mark.parametrize(("form", "squares", "lines"), [("ff1", 4, 4), ("ff2", 5, 5), ("ff2w", 8, 5)])
def test_parameter_counts_follow_the_formula_and_not_the_steps(form, squares, lines):
    vocab, length, size, heads = 20, 128, 40, 3
    wanted = vocab * size * 2 + vocab + length * size + 2 * size
    wanted += (heads + 1 + squares) * size**2 + (lines + 1) * size + 1
    for steps in (1, 5):
        fields = {"hidden_size": size, "num_attention_heads": heads, "ff_energy": form, "num_hidden_layers": steps}
        model = NRGPTForCausalLM(NRGPTConfig.from_preset("listops-8", **fields))
        assert sum(parameter.numel() for parameter in model.parameters()) == wanted


def test_every_value_survives_saving_and_loading(tmp_path):
    """Guards E1, E2, E5."""
    model = build(**KINDS["rms-diag"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert all((parameter == 0.5).all() for parameter in loaded.parameters())
    assert loaded.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict()


def test_scalars_that_a_checkpoint_lacks_start_at_one(tmp_path):
    """Guards E12."""
    model = build(eta_type="diag", learn_alpha=True)
    new = ("scale_ff", "attn.alpha", "eta.weight")
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if not k.endswith(new)})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all((value == 1).all() for name, value in loaded.state_dict().items() if name.endswith(new))


def test_gradient_checkpointing_changes_no_gradient():
    """Guards I2."""
    ids, found = draw(2, 8), []
    for on in (False, True):
        model = build().train()
        if on:
            model.activation_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=0, atol=1e-12)


def test_dropout_acts_in_training_only():
    """Guards D6."""
    model, ids = build(dropout=0.3), draw(2, 8)
    assert model(ids).logits.equal(model(ids).logits)
    model.train()
    assert not model(ids).logits.equal(model(ids).logits)


@pytest.mark.parametrize("kind", ["official", "strict-ff1", "ff2-gamma"])
def test_adapters_on_every_layer_count_twice_where_the_layer_is_used_twice(kind):
    """Guards J1, J2, J3: the adapted model equals the merged one, also when it decodes from a cache."""
    peft = pytest.importorskip("peft")
    model, ids = build(**{**KINDS[kind], "eta_type": "full"}), draw(1, 8)
    targets = [name for name in ("k_proj", "fc1", "fc2", "eta") if name != "fc2" or kind != "strict-ff1"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    adapted = adapted.double()
    logits = adapted(ids).logits
    logits.sum().backward()
    assert all(p.grad.abs().max() > 0 for name, p in adapted.named_parameters() if "lora_" in name)
    text = adapted.generate(input_ids=ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    merged = adapted.eval().merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, logits, rtol=0, atol=1e-9)
    assert merged.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0).equal(text)


def test_bfloat16_training_by_autocast_gives_gradients_near_those_of_float32():
    ids, found = draw(2, 16), []
    for on in (False, True):
        model = build(torch.float32, initializer_range=0.05).train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            loss = model(ids, labels=ids).loss
        loss.backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.99


def test_the_classifier_reads_the_last_real_token():
    torch.manual_seed(0)
    config = NRGPTConfig.from_preset("tiny", num_labels=3, initializer_range=0.2, exclude_self=True)
    model: PreTrainedModel = NRGPTForSequenceClassification(config).double().eval()
    ids, mask = draw(1, 6), torch.ones(1, 9, dtype=torch.long)
    mask[:, 6:] = 0
    with torch.no_grad():
        alone = model(ids).logits
        padded = model(torch.cat((ids, draw(1, 3, seed=4)), dim=1), attention_mask=mask).logits
    torch.testing.assert_close(alone, padded, rtol=0, atol=1e-10)
