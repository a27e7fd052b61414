# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Every mixer with a recurrent state against its recurrence, written out one token and one head at a time."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch.nn import functional as F
from transformers import DynamicCache

from loopergy import LT2Config
from loopergy.configuration.linear_fields import LINEAR_MIXERS
from loopergy.modeling.looped_cache import make_cache
from loopergy.modeling.modeling_lt2 import MIXER_CLASSES

# Sizes that differ wherever they may: K != V, K * H != hidden size.
FIELDS = {
    "kda": {"kda_num_heads": 3, "kda_head_dim": 5, "kda_expand_v": 2, "kda_conv_size": 3},
    "deltanet": {"deltanet_num_heads": 3, "deltanet_head_dim": 5, "deltanet_expand_v": 2},
    "mamba2": {"mamba2_num_heads": 8, "mamba2_state_size": 6, "mamba2_conv_size": 3},
    "hgrn2": {"hgrn2_num_heads": 3, "hgrn2_head_dim": 5, "hgrn2_expand_v": 2},
    "retnet": {"retnet_num_heads": 3, "retnet_head_dim": 6},
    "gla": {"gla_num_heads": 3, "gla_head_dim": 5, "gla_gate_rank": 4, "gla_gate_logit_normalizer": 2},
    "la": {"la_num_heads": 3, "la_head_dim": 5, "la_expand_v": 2},
}
VARIANTS = [
    *((mixer, {}) for mixer in FIELDS),
    *((mixer, {"attention_bias": True}) for mixer in FIELDS if mixer != "mamba2"),
    ("kda", {"kda_use_short_conv": False, "kda_allow_neg_eigval": True}),
    ("deltanet", {"deltanet_use_short_conv": False, "deltanet_allow_neg_eigval": True}),
]


def build(name, dtype=torch.float64, **fields):
    torch.manual_seed(0)
    config = LT2Config.from_preset("tiny", layer_mixers=name, **FIELDS[name], **fields)
    mixer = MIXER_CLASSES[name](config)
    with torch.no_grad():
        for key, parameter in mixer.named_parameters():
            if key not in ("A_log", "dt_bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape) + ("norm" in key or key == "D"))
    return mixer.to(dtype).eval(), config


def convolved(x, module, size):
    """Convolve (S, C) causally, channel by channel, and apply SiLU."""
    padded = F.pad(x, (0, 0, size - 1, 0))
    out = sum(padded[tap : tap + len(x)] * module.weight[:, 0, tap] for tap in range(size))
    return F.silu(out if module.bias is None else out + module.bias)


def rms(x, norm):
    return x / torch.sqrt((x * x).mean() + norm.variance_epsilon) * norm.weight


def unit(x):
    return x / torch.sqrt(x @ x + 1e-6)


def rotated(x, position):
    """Turn the pairs (i, i + K / 2) of a vector by position * 10000^(-2 i / K)."""
    half = len(x) // 2
    pairs = torch.complex(x[:half], x[half:])
    angle = position * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag))


def recurrence(q, k, v, g=None, beta=None, scale=None):
    """Run one head over q, k (S, K), v (S, V), g (S, 1 or K), beta (S)."""
    state, outputs = q.new_zeros(q.shape[1], v.shape[1]), []
    for t in range(len(q)):
        if g is not None:
            state = g[t].exp()[:, None] * state
        value = v[t] if beta is None else beta[t] * (v[t] - state.T @ k[t])
        state = state + torch.outer(k[t], value)
        outputs.append(state.T @ q[t] * (q.shape[1] ** -0.5 if scale is None else scale))
    return torch.stack(outputs)


def by_head(x, heads):
    return x.unflatten(-1, (heads, -1)).unbind(-2)


def qkv(mixer, x):
    parts = [getattr(mixer, f"{name}_proj")(x) for name in "qkv"]
    if mixer.conv_size:
        parts = [
            convolved(p, getattr(mixer, f"{n}_conv1d"), mixer.conv_size) for n, p in zip("qkv", parts, strict=True)
        ]
    else:
        parts = [F.silu(part) for part in parts]
    return [by_head(part, mixer.num_heads) for part in parts]


def kda(mixer, x, config):
    step = F.softplus(mixer.f_proj(x) + mixer.dt_bias)
    beta = mixer.max_beta * mixer.b_proj(x).sigmoid()
    outputs = []
    for h, (q, k, v, s) in enumerate(zip(*qkv(mixer, x), by_head(step, mixer.num_heads), strict=True)):
        q, k = (torch.stack([unit(row) for row in part]) for part in (q, k))
        outputs.append(recurrence(q, k, v, -mixer.A_log[h].exp() * s, beta[:, h]))
    normed = torch.cat([torch.stack([rms(row, mixer.o_norm) for row in out]) for out in outputs], -1)
    return mixer.o_proj(normed * mixer.g_proj(x).sigmoid())


def deltanet(mixer, x, config):
    beta = mixer.max_beta * mixer.b_proj(x).sigmoid()
    outputs = []
    for h, (q, k, v) in enumerate(zip(*qkv(mixer, x), strict=True)):
        q, k = (torch.stack([unit(row) for row in part]) for part in (q, k))
        outputs.append(recurrence(q, k, v, None, beta[:, h]))
    return mixer.o_proj(torch.cat([torch.stack([rms(row, mixer.o_norm) for row in out]) for out in outputs], -1))


def mamba2(mixer, x, config):
    inner, n = 2 * config.hidden_size, config.mamba2_state_size
    z, xbc, raw = mixer.in_proj(x).split((inner, inner + 2 * n, mixer.num_heads), -1)
    values, b, c = convolved(xbc, mixer.conv1d, mixer.conv_size).split((inner, n, n), -1)
    step = F.softplus(raw + mixer.dt_bias)
    outputs = []
    for h, value in enumerate(by_head(values, mixer.num_heads)):
        delta = step[:, h : h + 1]
        out = recurrence(c, b, delta * value, -mixer.A_log[h].exp() * delta, scale=1.0)
        outputs.append(out + mixer.D[h] * value)
    gated = torch.cat(outputs, -1) * F.silu(z)
    return mixer.out_proj(torch.stack([rms(row, mixer.norm) for row in gated]))


def hgrn2(mixer, x, config):
    forget = mixer.f_proj(x).sigmoid()
    parts = F.silu(mixer.q_proj(x)), 1 - forget, mixer.i_proj(x), forget.log()
    outputs = [recurrence(*part) for part in zip(*(by_head(p, mixer.num_heads) for p in parts), strict=True)]
    return mixer.o_proj(torch.stack([rms(row, mixer.g_norm) for row in torch.cat(outputs, -1)]))


def retnet(mixer, x, config):
    parts = [by_head(getattr(mixer, f"{name}_proj")(x), mixer.num_heads) for name in "qkv"]
    outputs = []
    for h, (q, k, v) in enumerate(zip(*parts, strict=True)):
        q, k = (torch.stack([rotated(row, t) for t, row in enumerate(part)]) for part in (q, k))
        gamma = torch.full((len(x), 1), 1 - 2.0 ** (-5 - h), dtype=x.dtype)
        outputs.append(recurrence(q, k, v, gamma.log()))
    normed = torch.cat([torch.stack([rms(row, mixer.g_norm_swish_gate) for row in out]) for out in outputs], -1)
    return mixer.o_proj(normed * F.silu(mixer.g_proj(x)))


def gla(mixer, x, config):
    g = mixer.gk_proj(x).sigmoid().log() / config.gla_gate_logit_normalizer
    parts = [by_head(part, mixer.num_heads) for part in (mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x), g)]
    outputs = [recurrence(*part) for part in zip(*parts, strict=True)]
    normed = torch.cat([torch.stack([rms(row, mixer.g_norm_swish_gate) for row in out]) for out in outputs], -1)
    return mixer.o_proj(normed * F.silu(mixer.g_proj(x)))


def la(mixer, x, config):
    q, k, v = (by_head(getattr(mixer, f"{name}_proj")(x), mixer.num_heads) for name in "qkv")
    maps = mixer.feature_map_q, mixer.feature_map_k
    outputs = []
    for parts in zip(q, k, v, strict=True):
        mapped = [m.layer1(part) * m.layer2(part) for m, part in zip(maps, parts, strict=False)]
        outputs.append(recurrence(*mapped, parts[2]))
    return mixer.o_proj(torch.cat([torch.stack([rms(row, mixer.norm) for row in out]) for out in outputs], -1))


BY_HAND = {"kda": kda, "deltanet": deltanet, "mamba2": mamba2, "hgrn2": hgrn2, "retnet": retnet, "gla": gla, "la": la}


def positions(length, start=0):
    return torch.arange(start, start + length)[None]


def cache_for(config):
    return DynamicCache(config=config)


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
@pytest.mark.parametrize("length", [1, 17, 65])
@torch.no_grad()
def test_each_mixer_equals_its_recurrence_written_out(name, fields, length):
    """Guards F1."""
    mixer, config = build(name, **fields)
    x = torch.randn(2, length, 64, dtype=torch.float64)
    expected = torch.stack([BY_HAND[name](mixer, row, config) for row in x])
    torch.testing.assert_close(mixer(x)[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", FIELDS)
@torch.no_grad()
def test_a_mixer_alone_continues_from_its_cache_in_pieces_of_any_length(name):
    """Guards A1, A15; property G2: one token, several, one again."""
    mixer, config = build(name)
    x = torch.randn(2, 12, 64, dtype=torch.float64)
    whole, cache, pieces, start = mixer(x)[0], cache_for(config), [], 0
    for length in (1, 4, 1, 1, 5):
        piece = mixer(x[:, start : start + length], cache=cache, slot=1, position_ids=positions(length, start))[0]
        pieces.append(piece)
        start += length
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", FIELDS)
@torch.no_grad()
def test_padding_anywhere_reaches_neither_real_tokens_nor_the_state(name):
    """Guards B1, B2: pads hold NaN, which times a mask of 0 would still be NaN."""
    mixer, config = build(name, **({} if name == "mamba2" else {"attention_bias": True}))
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 0]])
    real, x = mask[0].bool(), torch.randn(1, 9, 64, dtype=torch.float64)
    following = torch.randn(1, 1, 64, dtype=torch.float64)
    caches = cache_for(config), cache_for(config)
    expected = mixer(x[:, real], cache=caches[0], position_ids=positions(4))[0]
    x[:, ~real] = torch.nan
    actual = mixer(x, attention_mask=mask, cache=caches[1], position_ids=(mask.cumsum(-1) - 1).clamp(min=0))[0]
    torch.testing.assert_close(actual[:, real], expected, rtol=0, atol=1e-12)
    left, right = (mixer(following, cache=cache, position_ids=positions(1, 4))[0] for cache in caches)
    torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FIELDS)
@torch.no_grad()
def test_nothing_of_a_mixer_computes_in_less_than_its_dtype(name):
    """Guards E13: float64 in, float64 all the way, decays included."""
    mixer, _ = build(name)
    x = torch.randn(1, 9, 64, dtype=torch.float64)
    single = build(name, dtype=torch.float32)[0](x.float())[0]
    difference = (single - mixer(x)[0]).abs().max()
    assert 1e-9 < difference < 1e-3


@pytest.mark.parametrize("name", FIELDS)
def test_bfloat16_models_stay_close_and_keep_their_states_in_float32(name):
    """Guards F6."""
    mixer, config = build(name)
    x = torch.randn(2, 20, 64, dtype=torch.float64)
    expected = mixer(x)[0]
    half, cache = mixer.to(torch.bfloat16), cache_for(config)
    with torch.no_grad():
        first = half(x[:, :19].bfloat16(), cache=cache, position_ids=positions(19))[0]
        last = half(x[:, 19:].bfloat16(), cache=cache, position_ids=positions(1, 19))[0]
    actual = torch.cat((first, last), dim=1)
    assert actual.dtype == torch.bfloat16
    assert cache.layers[0].recurrent_states[0].dtype == torch.float32
    assert (actual - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", ["kda", "mamba2"])
def test_decays_built_under_half_precision_are_finite_and_those_of_a_model(name):
    """Guards F5, F14."""
    fields = {"kda": {"kda_num_heads": 64, "kda_head_dim": 1}, "mamba2": {"mamba2_num_heads": 64}}[name]
    config = LT2Config.from_preset("tiny", layer_mixers=name, **fields)
    torch.set_default_dtype(torch.bfloat16)
    try:
        mixer = MIXER_CLASSES[name](config)
    finally:
        torch.set_default_dtype(torch.float32)
    step = F.softplus(mixer.dt_bias)
    assert mixer.A_log.dtype == torch.float32
    assert (1 if name == "kda" else 0) <= mixer.A_log.exp().min() < 4 < 12 < mixer.A_log.exp().max() <= 16.001
    assert 0.999e-3 <= step.min() < step.max() <= 0.1001


def test_retnet_with_a_cache_asks_for_positions():
    mixer, config = build("retnet")
    with pytest.raises(ValueError, match="with a cache, pass position_ids"):
        mixer(torch.randn(1, 3, 64, dtype=torch.float64), cache=cache_for(config))


def test_every_recurrent_mixer_is_covered_here_or_in_its_own_file():
    assert set(LINEAR_MIXERS) == {"gdn", *FIELDS} == {"gdn", *BY_HAND}


@pytest.mark.parametrize(
    ("mixer", "fields", "message"),
    [
        ("kda", {"kda_num_heads": 0}, "kda_num_heads=0 and kda_head_dim=64 must be at least 1"),
        ("kda", {"kda_head_dim": 5, "kda_expand_v": 1.5}, "kda_expand_v=1.5 times kda_head_dim=5 must be a whole"),
        ("mamba2", {"mamba2_num_heads": 5}, "mamba2_num_heads=5 must divide mamba2_expand"),
        ("retnet", {"retnet_head_dim": 5}, "retnet_head_dim=5 must be even"),
        ("gla", {"gla_gate_logit_normalizer": 0}, "gla_gate_logit_normalizer=0 must be positive"),
    ],
)
def test_fields_that_do_not_fit_are_refused_where_the_mixer_is_used(mixer, fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        LT2Config.from_preset("tiny", layer_mixers=f"{mixer},full", **fields)
    LT2Config.from_preset("tiny", layer_mixers="gdn,full", **fields)


@pytest.mark.parametrize("loops", [1, 2, 3, 6])
@pytest.mark.parametrize("name", ["gdn", "deltanet", "kda"])
@torch.no_grad()
def test_composed_transitions_of_the_loops_have_rank_one_per_loop(name, loops):
    """Property G5: the state's way through T loops differs from plain decay by a matrix of rank T."""
    torch.manual_seed(loops)
    kernel = "chunk_kda" if name == "kda" else "chunk_gated_delta_rule"
    from loopergy.modeling import kernels

    width, decays = 8, []
    state = torch.eye(width, dtype=torch.float64)[None, None]
    for _ in range(loops):
        log_decay = torch.tensor(0.0 if name == "deltanet" else -0.3, dtype=torch.float64)
        shape = (1, 1, 1, width) if name == "kda" else (1, 1, 1)
        key = F.normalize(torch.randn(1, 1, 1, width, dtype=torch.float64), dim=-1)
        # Without a value to write, one token applies its transition to the state: here, to the identity.
        _, state = getattr(kernels, kernel)(
            key,
            key,
            torch.zeros(1, 1, 1, width, dtype=torch.float64),
            g=log_decay.expand(shape),
            beta=torch.full((1, 1, 1), 0.9, dtype=torch.float64),
            initial_state=state,
            output_final_state=True,
        )
        decays.append(log_decay.exp())
    rest = state[0, 0] - torch.stack(decays).prod() * torch.eye(width, dtype=torch.float64)
    assert torch.linalg.matrix_rank(rest, atol=1e-9) == loops
    determinant = torch.stack(decays).prod() ** width * (1 - 0.9) ** loops
    torch.testing.assert_close(torch.linalg.det(state[0, 0]), determinant, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", FIELDS)
def test_autocast_does_not_lower_the_precision_of_the_state_of_a_step(name, monkeypatch):
    mixer, config = build(name, torch.float32)
    x, position_ids = torch.randn(1, 3, config.hidden_size), torch.arange(3)[None]
    cache, given, seen = make_cache(config), mixer.step, []
    monkeypatch.setattr(
        mixer, "step", lambda *args, **rest: seen.append(torch.is_autocast_enabled("cpu")) or given(*args, **rest)
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mixer(x[:, :2], cache=cache, position_ids=position_ids[:, :2])
        mixer(x[:, 2:], cache=cache, position_ids=position_ids[:, 2:])
    assert seen == [False]
    assert cache.get_recurrent_state(0).dtype == torch.float32
