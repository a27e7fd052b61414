# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from causal_energies_by_hand import energy_by_hand, tables
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from loopergy import CEMLlamaConfig, CEMLlamaForCausalLM, CEMLlamaForSequenceClassification, CEMLlamaModel
from loopergy.modeling.causal_energies import potential
from loopergy.modeling.weight_decay import no_weight_decay

EXACT = {"rtol": 0, "atol": 1e-10}


def preconditioned(descent, gradient):
    p = descent.precond
    if p is None:
        return gradient
    matrix = torch.diag(F.softplus(p.d))
    return gradient @ (matrix if p.U is None else matrix + p.U @ p.V.T + p.V @ p.U.T)


def descend_by_hand(sublayer, norm, stream, energy, steps, config):
    """Follow the gradient of `energy(point)`, taken by autograd, for one row; return stream and energies."""
    features = norm(stream)
    x = features if config.cem_norm_mode == "once" else stream
    start, energies = x, []
    step_size = config.cem_step_size if sublayer.descent.step_size is None else sublayer.descent.step_size
    for _ in range(steps):
        x = x.detach().requires_grad_()
        point = x if config.cem_norm_mode == "once" else norm(x)
        values = energy(point, features)
        energies.append(values.detach())
        (gradient,) = torch.autograd.grad(values.sum(), x if config.cem_norm_mode == "exact_jacobian" else point)
        x = x - step_size / steps * preconditioned(sublayer.descent, gradient)
    energies.append(energy(x if config.cem_norm_mode == "once" else norm(x), features).detach())
    return (stream + x - start).detach(), torch.stack(energies)


def cem_by_hand(model, ids):
    """Run one row by nothing but energies as sums, autograd and norms; return logits and energies."""
    config, stream, energies = model.config, model.model.embed_tokens(ids).detach(), []
    cos, sin = (table[0] for table in tables(config.head_dim, len(ids)))
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        stream, of_attention = descend_by_hand(
            attention,
            layer.input_layernorm,
            stream,
            lambda x, u, attention=attention: energy_by_hand(attention, x, u, cos, sin),
            config.cem_attn_steps,
            config,
        )

        def elementwise(x, u, mlp=mlp):
            gate, z = mlp.gate_proj(u), mlp.up_proj(x)
            if config.cem_mlp_act_on == "gate":
                return -(F.silu(gate) * z * z / 2).sum(-1)
            return -(gate * potential(F.silu, z)).sum(-1)

        norm = layer.post_attention_layernorm
        stream, of_mlp = descend_by_hand(mlp, norm, stream, elementwise, config.cem_mlp_steps, config)
        energies.append((of_attention, of_mlp))
    return model.lm_head(model.model.norm(stream)), [torch.stack(part) for part in zip(*energies, strict=True)]


@pytest.mark.parametrize(
    "fields",
    [
        {"cem_diag": "none"},
        {"cem_diag": "shared", "num_steps": 2, "cem_precond": "dlr"},
        {"cem_diag": "per_head", "num_key_value_heads": 2, "num_steps": 2, "cem_norm_mode": "every_step"},
        {"num_steps": 2, "cem_norm_mode": "exact_jacobian", "cem_mlp_act_on": "gate", "cem_learn_step_size": True},
        {"attention_bias": True, "mlp_bias": True, "cem_precond": "diag", "cem_temperature": 2.5},
    ],
)
def test_the_whole_model_is_gradient_descent_on_its_energies(make_cem, make_ids, fields):
    """Guards D7."""
    model, ids = make_cem(**fields), make_ids(1, 6)
    width = model.config.head_dim
    # The model's own table has float32 frequencies.
    model.model.rotary_emb.inv_freq = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    logits, (attention, mlp) = cem_by_hand(model, ids[0])
    outputs = model(ids, output_energies=True)
    torch.testing.assert_close(outputs.logits[0], logits, rtol=1e-11, atol=1e-10)
    torch.testing.assert_close(outputs.energies.attention[:, :, 0], attention, rtol=1e-11, atol=1e-10)
    torch.testing.assert_close(outputs.energies.feed_forward[:, :, 0], mlp, rtol=1e-11, atol=1e-10)
    assert outputs.energies.total is None


@torch.no_grad()
def test_energies_are_those_of_the_new_tokens_whatever_the_cache(any_cem, make_ids):
    ids, c = make_ids(2, 9), any_cem.config
    whole = any_cem(ids, output_energies=True).energies
    has_attention = c.cem_attention and c.cem_tie_kv and c.cem_tie_qo and c.cem_rope_values == "exact"
    assert (whole.attention is not None) == has_attention
    assert (whole.feed_forward is not None) == (c.cem_mlp and c.cem_tie_mlp)
    cache = any_cem(ids[:, :5], use_cache=True).cache
    new = any_cem(ids[:, 5:], cache=cache, output_energies=True).energies
    any_cem.set_attn_implementation("eager")
    eager = any_cem(ids, output_energies=True).energies
    for part, steps in (("attention", c.cem_attn_steps), ("feed_forward", c.cem_mlp_steps)):
        all_tokens, new_tokens, by_weights = (getattr(energies, part) for energies in (whole, new, eager))
        if all_tokens is not None:
            assert all_tokens.shape == (c.num_hidden_layers, steps + 1, 2, 9)
            torch.testing.assert_close(new_tokens, all_tokens[..., 5:], rtol=1e-12, atol=1e-10)
            torch.testing.assert_close(by_weights, all_tokens, rtol=1e-12, atol=1e-10)
    assert any_cem(ids).energies is None


@torch.no_grad()
def test_interaction_energies_fall_at_every_step(make_cem, make_ids):
    """Guards D7: any step size, any number of steps."""
    for size in (0.1, 1.0, 30.0):
        model = make_cem(cem_step_size=size, cem_step_size_div_steps=False, num_steps=5)
        energies = model.model(make_ids(2, 9), output_energies=True).energies.attention
        assert bool((energies.diff(dim=1) < 0).all())
        assert energies.dtype == torch.float64


@torch.no_grad()
def test_stock_sublayers_are_llamas(make_cem, make_ids):
    fields = {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    model = make_cem(dtype=torch.float32, cem_attention=False, cem_mlp=False, **fields)
    keep = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    llama = LlamaForCausalLM(LlamaConfig(**{name: getattr(model.config, name) for name in keep}, **fields)).eval()
    llama.load_state_dict(model.state_dict())
    ids = make_ids(2, 9)
    torch.testing.assert_close(model(ids).logits, llama(ids).logits, rtol=0, atol=2e-5)


def count(**fields) -> int:
    with torch.device("meta"):
        model = CEMLlamaForCausalLM(CEMLlamaConfig.from_preset(**fields))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("fields", "small", "large"),
    [
        ({"cem_attention": False, "cem_mlp": False}, 85_552_640, 162_148_608),
        ({"cem_mlp": False, "cem_diag": "none"}, 80_309_760, 147_992_832),
        ({"cem_mlp": False}, 80_314_880, 148_002_048),
        ({"cem_attention": False}, 77_688_320, 143_274_240),
        ({"cem_diag": "none"}, 72_445_440, 129_118_464),
        ({}, 72_450_560, 129_127_680),
        ({"cem_diag": "per_head"}, 72_486_400, 129_229_056),
        ({"cem_precond": "diag"}, 72_460_800, 129_146_112),
        ({"cem_precond": "dlr"}, 72_624_640, 129_441_024),
        ({"cem_precond": "dlr", "cem_precond_rank": 32}, 73_116_160, 130_325_760),
    ],
)
def test_presets_have_the_documented_number_of_parameters(fields, small, large):
    assert count(name="cem-s512", **fields) == small
    assert count(name="cem-s768", **fields) == large


def test_parameters_follow_the_formula_and_a_learned_step_size_adds_one_per_sublayer(any_cem):
    c = any_cem.config
    d, f, width, kv = c.hidden_size, c.intermediate_size, 4 * c.head_dim, c.num_key_value_heads * c.head_dim
    precond = {"none": 0, "diag": d, "dlr": d + 2 * d * c.cem_precond_rank}[c.cem_precond] + c.cem_learn_step_size
    diagonal = {"none": 0, "shared": d, "per_head": 4 * d}[c.cem_diag]
    attention = 2 * d * width + 2 * d * kv
    if c.cem_attention:
        attention = d * (width + kv) + diagonal + precond
        attention += (not c.cem_tie_kv) * d * kv + (not c.cem_tie_qo) * d * width + c.attention_bias * (width + kv)
    mlp = 3 * d * f
    if c.cem_mlp:
        mlp = 2 * d * f + precond + (not c.cem_tie_mlp) * d * f
    elif c.mlp_bias:
        mlp += 2 * f + d
    expected = 2 * c.vocab_size * d + d + c.num_hidden_layers * (attention + mlp + 2 * d)
    assert sum(parameter.numel() for parameter in any_cem.parameters()) == expected


def test_state_dict_has_no_tied_second_matrices(make_cem):
    """Guards K4, E5."""
    layer = {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.diagonal"}
    layer |= {f"{part}.descent.precond.{name}" for part in ("self_attn", "mlp") for name in ("d", "U", "V")}
    layer |= {"mlp.up_proj.weight", "mlp.gate_proj.weight"}
    layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    layer |= {"self_attn.descent.step_size", "mlp.descent.step_size"}
    keys = {f"model.layers.{index}.{name}" for index in range(2) for name in layer}
    keys |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert set(make_cem(cem_precond="dlr", cem_learn_step_size=True).state_dict()) == keys


def test_fresh_models_start_where_the_config_says(make_cem):
    """Guards E12: also after loading a checkpoint that lacks them."""
    fields = {"cem_diag_init": 0.02, "cem_step_size": 0.7, "cem_learn_step_size": True, "cem_precond": "dlr"}
    model = CEMLlamaForCausalLM(CEMLlamaConfig.from_preset("tiny", **fields))
    for layer in model.model.layers:
        assert layer.self_attn.diagonal.eq(0.02).all()
        for part in (layer.self_attn, layer.mlp):
            assert part.descent.step_size.item() == pytest.approx(0.7)
            torch.testing.assert_close(part.descent.precond.dense(), torch.eye(64), rtol=0, atol=1e-6)
            assert part.descent.precond.U.std().item() == pytest.approx(1 / 8, rel=0.2)


@pytest.mark.parametrize("fill", [None, 0.5])
def test_saving_and_loading_keep_every_number(any_cem, make_ids, tmp_path, fill):
    """Guards E1, E2, E5, E6."""
    if fill is not None:
        for parameter in any_cem.parameters():
            torch.nn.init.constant_(parameter, fill)
    any_cem.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is CEMLlamaForCausalLM
    for name, value in any_cem.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    torch.testing.assert_close(loaded(make_ids(1, 5)).logits, any_cem(make_ids(1, 5)).logits, **EXACT)


def test_missing_parameters_of_the_design_start_fresh(make_cem, tmp_path):
    """Guards E12: a checkpoint without diagonal and preconditioner gets them, and computes as before."""
    plain = make_cem(cem_diag="none")
    plain.save_pretrained(tmp_path)
    loaded, report = CEMLlamaForCausalLM.from_pretrained(
        tmp_path, cem_diag="shared", cem_precond="dlr", dtype=torch.float64, output_loading_info=True
    )
    assert {name.rpartition(".")[2] for name in report["missing_keys"]} == {"diagonal", "d", "U", "V"}
    ids = torch.arange(3, 12)[None]
    torch.testing.assert_close(loaded(ids).logits, plain(ids).logits, rtol=0, atol=1e-6)


@torch.no_grad()
def test_steps_are_chosen_at_loading_at_call_and_in_generate(make_cem, make_ids, tmp_path):
    """Guards D4."""
    model, ids = make_cem(num_steps=1), make_ids(2, 7)
    model.save_pretrained(tmp_path)
    two = CEMLlamaForCausalLM.from_pretrained(tmp_path, num_steps=2, dtype=torch.float64)
    assert (two.config.cem_attn_steps, two.config.cem_mlp_steps) == (2, 2)
    torch.testing.assert_close(two(ids).logits, model(ids, num_steps=2).logits, **EXACT)
    assert (model(ids).logits - two(ids).logits).abs().max() > 1e-3
    torch.testing.assert_close(two(ids, num_steps=1).logits, model(ids).logits, **EXACT)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for kind in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        assert torch.equal(model.generate(ids, num_steps=2, **settings, **kind), two.generate(ids, **settings)), kind
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="num_steps"):
            model(ids, num_steps=wrong)


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
@torch.no_grad()
def test_without_diagonal_all_attention_implementations_agree(make_cem, make_ids, attention):
    model, ids = make_cem(dtype=torch.float32, cem_diag="none", num_key_value_heads=2, num_steps=2), make_ids(2, 16)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = model(ids, attention_mask=mask).logits
    if attention == "flex_attention" and torch.version.cuda is None:
        torch.compiler.reset()
    model.set_attn_implementation(attention)
    with torch.compiler.set_stance("force_eager"):
        logits = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=0, atol=2e-5)


def test_what_forms_no_weights_is_refused_for_diagonals_and_energies(make_cem, make_ids):
    with pytest.raises(ValueError, match="cem_diag='shared' needs"):
        make_cem().set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="'sdpa' or 'eager'"):
        CEMLlamaModel._from_config(CEMLlamaConfig.from_preset("tiny"), attn_implementation="flex_attention")
    model = make_cem(cem_diag="none")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="output_energies=True"):
        model(make_ids(1, 4), output_energies=True)


@torch.no_grad()
def test_attention_maps_are_those_of_the_last_step(any_cem, make_ids):
    any_cem.set_attn_implementation("eager")
    outputs = any_cem(make_ids(2, 7), output_attentions=True, output_hidden_states=True)
    assert [weights.shape for weights in outputs.attentions] == [(2, 4, 7, 7)] * 2
    for weights in outputs.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7).double())
        assert weights.triu(1).abs().max() == 0
    assert len(outputs.hidden_states) == 3
    torch.testing.assert_close(any_cem.lm_head(outputs.hidden_states[-1]), outputs.logits, **EXACT)


def test_a_layer_of_two_steps_passes_gradcheck(make_cem):
    model = make_cem(
        hidden_size=8, intermediate_size=6, num_attention_heads=2, num_hidden_layers=1, num_steps=2, cem_precond="dlr"
    ).train()
    names, parameters = zip(*model.model.layers.named_parameters(), strict=True)
    embeds = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)

    def run(embeds, *values):
        replaced = {f"model.layers.{name}": value for name, value in zip(names, values, strict=True)}
        return torch.func.functional_call(model, replaced, kwargs={"inputs_embeds": embeds}).logits

    assert torch.autograd.gradcheck(run, (embeds, *parameters), fast_mode=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(any_cem, make_ids, reentrant):
    """Guards I2, E6."""
    ids = make_ids(2, 9)
    gradients = []
    any_cem.train()
    for checkpointing in (False, True):
        if checkpointing:
            any_cem.activation_checkpointing_enable({"use_reentrant": reentrant})
            any_cem.model.embed_tokens.weight.requires_grad_(True)
        any_cem.zero_grad()
        any_cem(ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in any_cem.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-12)
    assert all(gradient.abs().max() > 0 for gradient in gradients[0].values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@torch.no_grad()
def test_low_precision_stays_near(any_cem, make_ids, dtype):
    ids = make_ids(2, 9)
    expected = any_cem(ids).logits
    low = any_cem.to(dtype)(ids)
    assert low.logits.dtype == dtype
    error = (low.logits.double() - expected).abs().max() / expected.abs().max()
    assert error < {torch.bfloat16: 0.15, torch.float16: 0.02, torch.float32: 1e-5}[dtype]
    assert any_cem(ids, output_energies=True).energies.feed_forward is None or (
        any_cem(ids, output_energies=True).energies.feed_forward.dtype == torch.float32
    )


@torch.no_grad()
def test_dropout_drops_attention_weights_in_training_alone(make_cem, make_ids):
    ids = make_ids(2, 9)
    for diagonal in ("none", "shared"):
        plain, dropping = make_cem(cem_diag=diagonal), make_cem(cem_diag=diagonal, attention_dropout=0.5)
        assert torch.equal(dropping(ids).logits, plain(ids).logits)
        first, second = (dropping.train()(ids).logits for _ in range(2))
        assert (first - second).abs().max() > 1e-3
        assert torch.equal(plain.train()(ids).logits, plain.eval()(ids).logits)


def test_weight_decay_is_for_matrices_alone(make_cem, tmp_path):
    """Guards F15."""
    model = make_cem(cem_precond="dlr", cem_learn_step_size=True, attention_bias=True, cem_diag="per_head")
    exempt = {name.rpartition(".")[2] for name in no_weight_decay(model)}
    assert exempt == {"diagonal", "d", "U", "V", "step_size", "bias", "weight"}
    norms = {name for name in no_weight_decay(model) if name.endswith("weight")}
    assert all("norm" in name for name in norms)
    decayed = {name.split(".")[-2] for name, _ in model.named_parameters() if name not in no_weight_decay(model)}
    assert decayed == {"q_proj", "k_proj", "up_proj", "gate_proj", "embed_tokens", "lm_head"}


def test_the_trainer_lowers_the_loss(make_cem, make_ids, tmp_path):
    """Guards I1, I3."""
    model = make_cem(dtype=torch.float32, num_steps=2, initializer_range=0.05, cem_precond="dlr").train()
    data = [{"input_ids": row, "labels": row} for row in make_ids(8, 12)]
    settings = {"max_steps": 12, "learning_rate": 3e-3, "logging_steps": 1, "report_to": "none", "use_cpu": True}
    settings |= {"save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": 4}
    trainer = Trainer(model, TrainingArguments(tmp_path, **settings), train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert trainer.predict(data).predictions.shape == (8, 12, 128)


def test_sequences_are_classified_at_their_last_token(make_ids):
    torch.manual_seed(0)
    model = CEMLlamaForSequenceClassification(CEMLlamaConfig.from_preset("tiny", num_labels=3, pad_token_id=0)).eval()
    ids = make_ids(2, 6)
    states = model.model(ids).last_hidden_state
    torch.testing.assert_close(model(ids).logits, model.score(states[:, -1]))
    assert model(ids, labels=torch.tensor([0, 2]), num_steps=2).loss.isfinite()


@torch.no_grad()
def test_steps_set_in_the_config_of_a_model_are_the_steps_it_takes(any_cem, make_ids):
    ids = make_ids(1, 6)
    expected = any_cem(ids, num_steps=3).logits
    any_cem.config.num_steps = 3
    torch.testing.assert_close(any_cem(ids).logits, expected, rtol=0, atol=0)


def test_the_first_layers_draft_for_the_whole_model(make_cem, make_ids):
    model, ids = make_cem(num_hidden_layers=3), make_ids(1, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_early_exit=1, **options), expected)
    assert torch.equal(model.generate(ids, **options), expected)
