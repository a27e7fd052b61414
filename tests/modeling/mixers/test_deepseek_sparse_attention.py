# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, StaticLayer

from loopergy import LT2Config
from loopergy.modeling.kernels import indexed_attention, sparse_attention
from loopergy.modeling.looped_cache import GrowingLayer
from loopergy.modeling.mixers.deepseek_sparse_attention import DeepseekSparseAttention

EXACT = {"rtol": 0, "atol": 1e-10}
SIZES = {"dsa_latent_dim": 10, "dsa_tail_dim": 4, "dsa_topk": 6, "dsa_index_heads": 3, "dsa_index_head_dim": 8}
KINDS = {
    "released": {},
    "released-with-positions": {"dsa_rope": True},
    "current": {"dsa_keep_current": True},
    "lightning": {"dsa_indexer": "deepseek"},
    "lightning-with-positions": {"dsa_indexer": "deepseek", "dsa_rope": True, "dsa_index_head_dim": 80},
}


def build(dtype=torch.float64, **fields) -> DeepseekSparseAttention:
    torch.manual_seed(0)
    mixer = DeepseekSparseAttention(LT2Config.from_preset("tiny", layer_mixers="dsa", **{**SIZES, **fields}))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return mixer.to(dtype).eval()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Make a few dozen tokens need several pieces."""
    monkeypatch.setattr(sparse_attention, "_PIECE_PER_THREAD", 500)


def rotated(vector: torch.Tensor, position: int, width: int) -> torch.Tensor:
    """Rotate the first `width` numbers of a vector, number i together with i + width / 2."""
    half = width // 2
    # transformers keeps the frequencies in float32.
    angles = position * (1 / 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)).double()
    first, second, rest = vector[:half], vector[half:width], vector[width:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest))


def scores_by_hand(mixer: DeepseekSparseAttention, x: torch.Tensor) -> torch.Tensor:
    """Compute I[t, j] of one row one pair of tokens at a time."""
    config, length = mixer.config, len(x)
    heads, width = config.dsa_index_heads, config.dsa_index_head_dim
    queries = F.linear(x, mixer.q_score_proj.weight).view(length, heads, width)
    keys = F.linear(x, mixer.k_score_proj.weight)
    scores = torch.zeros(length, length, dtype=x.dtype)
    if config.dsa_indexer == "deepseek":
        norm = mixer.k_score_norm
        keys = F.layer_norm(keys, (width,), norm.weight, norm.bias, 1e-6)
    for t in range(length):
        for j in range(t + 1):
            for head in range(heads):
                if config.dsa_indexer == "lt2":
                    scores[t, j] += queries[t, head] @ keys[j] / heads
                    continue
                query = rotated(queries[t, head], t, min(64, width))
                product = query @ rotated(keys[j], j, min(64, width)) * width**-0.5
                weight = mixer.w_score_proj.weight[head] @ x[t] * heads**-0.5
                scores[t, j] += weight * product.clamp(min=0)
    return scores


def by_hand(mixer: DeepseekSparseAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute output and divergence of one row one token at a time, from the formulas of the docstring."""
    config, length = mixer.config, len(x)
    heads, value, width = mixer.num_heads, config.dsa_latent_dim, config.dsa_latent_dim + config.dsa_tail_dim
    queries = F.linear(x, mixer.q_proj.weight).view(length, heads, width)
    latents, scores = F.linear(x, mixer.kv_proj.weight), scores_by_hand(mixer, x)
    if config.dsa_rope:
        tails = [rotated(latent[value:], t, config.dsa_tail_dim) for t, latent in enumerate(latents)]
        latents = torch.cat((latents[:, :value], torch.stack(tails)), dim=1)
    output = torch.zeros(length, heads * value, dtype=x.dtype)
    divergence = torch.zeros(length, dtype=x.dtype)
    for t in range(length):
        ranked = sorted(
            range(t + 1), key=lambda j: (not (config.dsa_keep_current and j == t), -scores[t, j].item(), j)
        )
        chosen = list(range(t + 1)) if config.dsa_dense_warmup else ranked[: config.dsa_topk]
        weights = []
        for head in range(heads):
            query = queries[t, head]
            if config.dsa_rope:
                query = torch.cat((query[:value], rotated(query[value:], t, config.dsa_tail_dim)))
            weights.append(torch.stack([query @ latents[j] / width**0.5 for j in chosen]).softmax(0))
            mixed = sum(weight * latents[j, :value] for weight, j in zip(weights[-1], chosen, strict=True))
            output[t, head * value : (head + 1) * value] = mixed
        target = sum(weights) / heads
        divergence[t] = (target * (target.log() - scores[t, chosen].log_softmax(0))).sum()
    return F.linear(output, mixer.o_proj.weight), divergence


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warm", [False, True])
@torch.no_grad()
def test_the_mixer_equals_its_formulas_written_out(kind, warm):
    """Guards F1; the divergence over the chosen tokens, and over all of them in the warm-up."""
    fields = {"dsa_dense_warmup": True, "dsa_indexer_loss_weight": 1.0} if warm else {}
    mixer = build(**KINDS[kind], **fields)
    x = torch.randn(2, 23, 64, dtype=torch.float64)
    output, divergence = mixer(x, output_divergence=True)
    torch.testing.assert_close(mixer(x)[0], output, **EXACT)
    for row in range(2):
        expected = by_hand(mixer, x[row])
        torch.testing.assert_close((output[row], divergence[row]), expected, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_while_everything_fits_it_is_full_attention_to_one_shared_key(kind):
    """Guards G3; property G8: the first difference is at the token that top-k is one too small for."""
    mixer, x = build(**KINDS[kind], dsa_topk=16), torch.randn(2, 17, 64, dtype=torch.float64)
    output = mixer(x)[0]
    query, latent = mixer._latents(x, torch.arange(17)[None])
    value = mixer.config.dsa_latent_dim
    dense = F.scaled_dot_product_attention(
        query.transpose(1, 2), latent[:, None], latent[:, None, :, :value], is_causal=True, enable_gqa=True
    )
    dense = mixer.o_proj(dense.transpose(1, 2).flatten(2))
    torch.testing.assert_close(output[:, :16], dense[:, :16], **EXACT)
    assert not torch.allclose(output[:, 16], dense[:, 16])
    mixer.config.dsa_topk = 17
    torch.testing.assert_close(mixer(x)[0], dense, **EXACT)
    for parameter in (mixer.q_score_proj.weight, mixer.k_score_proj.weight):
        parameter.mul_(-3.0)
    torch.testing.assert_close(mixer(x)[0], dense, **EXACT)


@torch.no_grad()
def test_released_scores_are_those_of_one_head_with_the_mean_query():
    """Property G8."""
    mixer, x = build(), torch.randn(2, 30, 64, dtype=torch.float64)
    one = build(dsa_index_heads=1)
    state = mixer.state_dict()
    state["q_score_proj.weight"] = state["q_score_proj.weight"].unflatten(0, (3, -1)).mean(0)
    one.load_state_dict(state)
    torch.testing.assert_close(mixer(x)[0], one(x)[0], **EXACT)


def chosen_by(mixer, x, monkeypatch) -> list[set[int]]:
    """Return the columns that each token of one row attends to."""
    found = {}
    attend_chosen, attend_all = indexed_attention._attend_chosen, indexed_attention._attend_all

    def seen(chosen, query, *others):
        found[len(found)] = chosen
        return attend_chosen(chosen, query, *others)

    def everything(query, keys, own, visible, *others):
        rows = torch.ones(1, 1, keys.shape[1]).bool() if visible is None else visible
        found[len(found)] = rows
        return attend_all(query, keys, own, visible, *others)

    monkeypatch.setattr(indexed_attention, "_attend_chosen", seen)
    monkeypatch.setattr(indexed_attention, "_attend_all", everything)
    mixer(x)
    sets = []
    for part in found.values():
        sets += [set((row.nonzero().flatten() if row.dtype == torch.bool else row).tolist()) for row in part[0]]
    return sets


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_chosen_are_earlier_tokens_as_many_as_there_are_up_to_top_k(kind, monkeypatch):
    """Guards G4: a planted key with the largest score among them, and the current one if asked for."""
    mixer, x = build(**KINDS[kind], dsa_topk=16), torch.randn(1, 48, 64, dtype=torch.float64)
    scores = scores_by_hand(mixer, x[0])
    sets = chosen_by(mixer, x, monkeypatch)
    assert [len(chosen) for chosen in sets] == [min(16, t + 1) for t in range(48)]
    for t, chosen in enumerate(sets):
        assert max(chosen) <= t
        assert int(scores[t, : t + 1].argmax()) in chosen
        assert t in chosen or kind != "current"


@torch.no_grad()
def test_equal_scores_are_taken_in_the_order_of_the_tokens(monkeypatch):
    mixer, x = build(dsa_indexer="deepseek"), torch.randn(1, 20, 64, dtype=torch.float64)
    mixer.w_score_proj.weight.zero_()
    sets = chosen_by(mixer, x, monkeypatch)
    assert sets[-1] == set(range(6))


@pytest.mark.parametrize("kind", ["released", "lightning"])
def test_only_the_divergence_teaches_the_indexer_and_it_teaches_nothing_else(kind):
    """Property G8."""
    mixer = build(**KINDS[kind]).train()
    x = torch.randn(2, 23, 64, dtype=torch.float64, requires_grad=True)
    mixer(x)[0].sum().backward()
    indexer = {name for name, _ in mixer.named_parameters() if "_score_" in name}
    assert {name for name, parameter in mixer.named_parameters() if parameter.grad is None} == indexer
    mixer.zero_grad()
    x.grad = None
    mixer(x, output_divergence=True)[1].sum().backward()
    moved = {name for name, p in mixer.named_parameters() if p.grad is not None and p.grad.ne(0).any()}
    assert moved == indexer
    assert x.grad is None or x.grad.eq(0).all()


@pytest.mark.parametrize("kind", ["released", "lightning-with-positions"])
def test_gradients_are_those_of_the_formulas_written_out(kind):
    mixer = build(**KINDS[kind]).train()
    x = torch.randn(1, 15, 64, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(15, 64, dtype=torch.float64)
    output, divergence = mixer(x, output_divergence=True)
    named = {name: p for name, p in mixer.named_parameters() if "_score_" not in name} | {"x": x}
    mine = torch.autograd.grad((output[0] * weight).sum(), list(named.values()), retain_graph=True)
    expected, _ = by_hand(mixer, x[0])
    torch.testing.assert_close(mine, torch.autograd.grad((expected * weight).sum(), list(named.values())), **EXACT)
    indexer = [p for name, p in mixer.named_parameters() if "_score_" in name]
    mine = torch.autograd.grad(divergence.sum(), indexer)
    # The written-out divergence also has a gradient through the attention, which the loss leaves out.
    _, teaching = by_hand_with_fixed_attention(mixer, x[0].detach())
    torch.testing.assert_close(mine, torch.autograd.grad(teaching.sum(), indexer), **EXACT)


def by_hand_with_fixed_attention(mixer, x):
    attention = [mixer.q_proj.weight, mixer.kv_proj.weight]
    for parameter in attention:
        parameter.requires_grad_(False)
    result = by_hand(mixer, x)
    for parameter in attention:
        parameter.requires_grad_(True)
    return result


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_anywhere_is_as_if_it_were_not_there(kind):
    """Guards B1, B2, also where fewer tokens than top-k are left, and for NaN at padding."""
    mixer = build(**KINDS[kind])
    mask = torch.tensor([[0] * 5 + [1] * 20, [1, 0] * 12 + [1], [1] * 20 + [0] * 5, [0] * 21 + [1] * 4])
    x = torch.randn(4, 25, 64, dtype=torch.float64)
    x[mask == 0] = torch.nan
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output, divergence = mixer(x, attention_mask=mask, position_ids=positions, output_divergence=True)
    assert divergence[mask == 0].eq(0).all()
    for row, real in enumerate(mask.bool()):
        alone, own = mixer(x[row : row + 1, real], output_divergence=True)
        torch.testing.assert_close(output[row : row + 1, real], alone, **EXACT)
        torch.testing.assert_close(divergence[row : row + 1, real], own, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_padded_rows_are_continued_as_if_alone(kind, static):
    """Guards A6, B3: padding may come in any piece, and a mask may end before a static cache does."""
    mixer, cache = build(**KINDS[kind]), Cache(layers=[StaticLayer(max_cache_len=30) if static else GrowingLayer()])
    mask = torch.tensor([[0] * 5 + [1] * 15, [1, 0] * 10, [1] * 17 + [0] * 3, [0] * 16 + [1] * 4])
    x, positions = torch.randn(4, 20, 64, dtype=torch.float64), (mask.cumsum(1) - 1).clamp(min=0)
    parts, start = [], 0
    for size in (4, 1, 8, 1, 1, 5):
        cut = slice(start, start + size)
        arguments = {"attention_mask": mask[:, : cut.stop], "position_ids": positions[:, cut], "cache": cache}
        parts.append(mixer(x[:, cut], **arguments)[0])
        start += size
    for row, real in enumerate(mask.bool()):
        alone, _ = mixer(x[row : row + 1, real])
        torch.testing.assert_close(torch.cat(parts, dim=1)[row : row + 1, real], alone, **EXACT)


@torch.no_grad()
def test_half_precision_scores_in_float32():
    mixer, x = build(torch.bfloat16), torch.randn(1, 12, 64).bfloat16()
    output, divergence = mixer(x, output_divergence=True)
    assert output.dtype == torch.bfloat16
    assert divergence.dtype == torch.float32
    assert mixer._indexer(x, torch.arange(12)[None]).scores().dtype == torch.float32


@pytest.mark.parametrize("weight", [0.5, 1.5])
def test_whether_the_indexer_learns_may_hang_on_a_float_that_a_compiler_takes_for_a_symbol(weight, monkeypatch):
    """As it does in a model, from a field; all else that is a float on the module becomes a symbol, too."""
    monkeypatch.setattr(sparse_attention, "_PIECE_PER_THREAD", 2**19)
    mixer, x = build().train(), torch.randn(2, 13, 64, dtype=torch.float64)

    def run(x, weight):
        return mixer(x, output_divergence=weight > 1)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight), run(x, weight), **EXACT)
