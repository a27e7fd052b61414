# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from torch.nn import functional as F

from loopergy import LT2Config
from loopergy.modeling.building_blocks import RotaryEmbedding
from loopergy.modeling.kernels import sparse_attention
from loopergy.modeling.kernels.block_sparse_attention import Pooling, pool_blocks
from loopergy.modeling.looped_cache import PooledLayer, StaticPooledLayer
from loopergy.modeling.mixers.native_sparse_attention import NativeSparseAttention

EXACT = {"rtol": 0, "atol": 1e-10}
SIZES = {"nsa_num_key_value_heads": 2, "nsa_block_size": 4, "nsa_block_count": 4, "nsa_window": 3}
KINDS = {
    "plain": {},
    "one-group": {"nsa_num_key_value_heads": 1, "nsa_window": 5, "nsa_block_count": 5},
    "no-choice": {"nsa_block_count": 3},
    "smaller-averages": {"nsa_block_size": 8, "nsa_pool_size": 4},
    "larger-averages": {"nsa_pool_size": 8, "nsa_pool_stride": 4},
    "overlap": {"nsa_pool_size": 4, "nsa_pool_stride": 2},
    "all-different": {"nsa_block_size": 6, "nsa_pool_size": 4, "nsa_pool_stride": 2},
    "single-tokens": {"nsa_block_size": 1, "nsa_pool_size": 1, "nsa_block_count": 5},
}


def build(dtype=torch.float64, **fields) -> NativeSparseAttention:
    torch.manual_seed(0)
    mixer = NativeSparseAttention(config_of(**fields))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return mixer.to(dtype).eval()


def config_of(**fields) -> LT2Config:
    return LT2Config.from_preset("tiny", layer_mixers="nsa", **{**SIZES, **fields})


def rotary(positions: torch.Tensor, dtype=torch.float64):
    return RotaryEmbedding(config_of())(torch.zeros(1, dtype=dtype), positions)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Make a few dozen tokens need several pieces."""
    monkeypatch.setattr(sparse_attention, "_PIECE_PER_THREAD", 2000)


def attend(query, keys, values) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with one query to lists of keys and values; nothing to see gives 0."""
    if not keys:
        return torch.zeros_like(query), torch.zeros(0, dtype=query.dtype)
    weights = torch.stack([query @ key / len(query) ** 0.5 for key in keys]).softmax(0)
    return sum(weight * value for weight, value in zip(weights, values, strict=True)), weights


def by_hand(mixer: NativeSparseAttention, x: torch.Tensor) -> torch.Tensor:
    """Compute one row one token and one head at a time, from the formulas of the docstring."""
    (size, stride), block_size, block_count, window = mixer.branches
    length, width, heads = len(x), mixer.head_dim, mixer.num_heads
    query, key, value = (
        F.linear(x, projection.weight).view(length, -1, width)
        for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    cos, sin = (part[0, :, None] for part in rotary(torch.arange(length)[None]))
    query, key = (
        z * cos + torch.cat((-z[..., width // 2 :], z[..., : width // 2]), dim=-1) * sin for z in (query, key)
    )
    gates = F.linear(x, mixer.g_proj.weight).sigmoid().view(length, heads, 3)
    output = torch.zeros(length, heads, width, dtype=x.dtype)
    for t in range(length):
        for group in range(key.shape[1]):
            members = range(group * heads // key.shape[1], (group + 1) * heads // key.shape[1])
            starts = [start for start in range(0, length, stride) if start + size - 1 <= t]
            mean_keys, mean_values = (
                [part[start : start + size, group].mean(0) for start in starts] for part in (key, value)
            )
            scores = torch.zeros(length, dtype=torch.float64)
            for head in members:
                output_0, weights = attend(query[t, head], mean_keys, mean_values)
                output[t, head] += gates[t, head, 0] * output_0
                for start, weight in zip(starts, weights, strict=True):
                    for token in range(start, start + size):
                        scores[token // block_size] += weight.item() / stride
            current = t // block_size
            always = {0, current, max(current - 1, 0)}
            rest = sorted(set(range(current + 1)) - always, key=lambda block: (-scores[block].item(), block))
            blocks = sorted([*always, *rest[: block_count - len(always)]])
            chosen = [j for block in blocks for j in range(block * block_size, (block + 1) * block_size) if j <= t]
            recent = range(max(0, t - window + 1), t + 1)
            for head in members:
                for branch, tokens in ((1, chosen), (2, recent)):
                    seen, _ = attend(query[t, head], *([part[j, group] for j in tokens] for part in (key, value)))
                    output[t, head] += gates[t, head, branch] * seen
    return F.linear(output.flatten(1), mixer.o_proj.weight)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_mixer_equals_its_formulas_written_out(kind):
    """Guards F1, G2: blocks of one size, of different sizes, and averages that overlap."""
    mixer, x = build(**KINDS[kind]), torch.randn(2, 41, 64, dtype=torch.float64)
    output, _ = mixer(x, rotary(torch.arange(41)[None]))
    for row in range(2):
        torch.testing.assert_close(output[row], by_hand(mixer, x[row]), **EXACT)


@pytest.mark.parametrize("kind", ["plain", "overlap"])
def test_gradients_are_those_of_the_formulas_written_out(kind):
    mixer = build(**KINDS[kind]).train()
    x = torch.randn(1, 21, 64, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(21, 64, dtype=torch.float64)
    wanted = [x, *mixer.parameters()]
    mine = torch.autograd.grad((mixer(x, rotary(torch.arange(21)[None]))[0][0] * weight).sum(), wanted)
    expected = torch.autograd.grad((by_hand(mixer, x[0]) * weight).sum(), wanted)
    torch.testing.assert_close(mine, expected, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_decoding_from_the_first_token_on_equals_one_pass(kind, static, make_cache_of):
    """Guards G2: lengths 1 to 40, one token at a time and in uneven pieces."""
    mixer, x = build(**KINDS[kind]), torch.randn(2, 40, 64, dtype=torch.float64)
    angles = rotary(torch.arange(40)[None])
    whole, _ = mixer(x, angles)
    for sizes in ([1] * 40, [3, 1, 1, 10, 2, 1, 1, 1, 20]):
        cache, start = make_cache_of(static), 0
        for size in sizes:
            cut = slice(start, start + size)
            output, _ = mixer(x[:, cut], tuple(part[:, cut] for part in angles), cache=cache)
            torch.testing.assert_close(output, whole[:, cut], **EXACT)
            start += size


@pytest.fixture
def make_cache_of():
    """Build a cache of one slot, dynamic or static."""
    from transformers.cache_utils import Cache

    return lambda static: Cache(layers=[StaticPooledLayer(max_cache_len=44) if static else PooledLayer()])


MASKS = torch.tensor([[0] * 5 + [1] * 20, [1, 0] * 12 + [1], [1] * 20 + [0] * 5, [0] * 21 + [1] * 4])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_anywhere_is_as_if_it_were_not_there(kind):
    """Guards B1, B2: blocks do not move, and NaN at padding does not spread."""
    mixer, x = build(**KINDS[kind]), torch.randn(4, 25, 64, dtype=torch.float64)
    x[MASKS == 0] = torch.nan
    output, _ = mixer(x, rotary((MASKS.cumsum(1) - 1).clamp(min=0)), attention_mask=MASKS)
    for row, real in enumerate(MASKS.bool()):
        alone, _ = mixer(x[row : row + 1, real], rotary(torch.arange(int(real.sum()))[None]))
        torch.testing.assert_close(output[row : row + 1, real], alone, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_padded_rows_are_continued_as_if_alone(kind, static, make_cache_of):
    """Guards A6, B3: rows complete their blocks at different times, and padding may come in any piece."""
    mixer, x = build(**KINDS[kind]), torch.randn(4, 25, 64, dtype=torch.float64)
    angles = rotary((MASKS.cumsum(1) - 1).clamp(min=0))
    cache, pieces, start = make_cache_of(static), [], 0
    for size in (4, 1, 1, 1, 9, 1, 6, 1, 1):
        cut = slice(start, start + size)
        mask = MASKS[:, : cut.stop]
        pieces.append(mixer(x[:, cut], tuple(part[:, cut] for part in angles), attention_mask=mask, cache=cache)[0])
        start += size
    output = torch.cat(pieces, dim=1)
    for row, real in enumerate(MASKS.bool()):
        alone, _ = mixer(x[row : row + 1, real], rotary(torch.arange(int(real.sum()))[None]))
        torch.testing.assert_close(output[row : row + 1, real], alone, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_cropped_cache_continues_as_if_the_removed_had_not_been(kind, static, padded, make_cache_of):
    """Guards A8: also where a row's last complete block reaches into what is removed."""
    mixer, x = build(**KINDS[kind]), torch.randn(4, 20, 64, dtype=torch.float64)
    mask = MASKS[:, :20] if padded else torch.ones_like(MASKS[:, :20])
    angles = rotary((mask.cumsum(1) - 1).clamp(min=0))
    start, end = (mask[:, :16], mask) if padded else (None, None)
    whole, _ = mixer(x, angles, attention_mask=end)
    for removed in (1, 3, 7):
        cache, kept = make_cache_of(static), 16 - removed
        wrong = torch.cat((x[:, :kept], torch.randn(4, removed, 64, dtype=torch.float64)), dim=1)
        mixer(wrong, tuple(part[:, :16] for part in angles), attention_mask=start, cache=cache)
        cache.layers[0].crop(-removed)
        rest = tuple(part[:, kept:] for part in angles)
        output, _ = mixer(x[:, kept:], rest, attention_mask=end, cache=cache)
        real = mask[:, kept:].bool()
        torch.testing.assert_close(output[real], whole[:, kept:][real], **EXACT)


@torch.no_grad()
def test_reading_every_block_is_full_attention():
    """Property G9, of the second branch alone."""
    mixer = build(nsa_block_count=10)
    x, angles = torch.randn(2, 33, 64, dtype=torch.float64), rotary(torch.arange(33)[None])
    everything = build(nsa_window=33)
    for one, branch in ((mixer, 1), (everything, 2)):
        only_branch(one, branch)
    torch.testing.assert_close(mixer(x, angles)[0], everything(x, angles)[0], **EXACT)
    few = build()
    only_branch(few, 1)
    torch.testing.assert_close(few(x[:, :12], (angles[0][:, :12], angles[1][:, :12]))[0], mixer(x, angles)[0][:, :12])
    assert not torch.allclose(few(x, angles)[0][:, 13:], mixer(x, angles)[0][:, 13:])


def only_branch(mixer: NativeSparseAttention, branch: int) -> None:
    """Open the gate of one branch and close the others, whatever the token."""
    mixer.g_proj.weight.zero_()
    bias = torch.full((mixer.num_heads, 3), -torch.inf, dtype=torch.float64)
    bias[:, branch] = torch.inf
    mixer.g_proj.register_forward_hook(lambda module, args, output: output + bias.flatten())


@torch.no_grad()
def test_before_the_first_block_is_complete_the_averages_give_nothing():
    """Property G9."""
    mixer = build()
    only_branch(mixer, 0)
    output, _ = mixer(torch.randn(1, 9, 64, dtype=torch.float64), rotary(torch.arange(9)[None]))
    assert output[:, :3].eq(0).all()
    assert output[:, 3:].ne(0).any(-1).all()


@torch.no_grad()
def test_zero_gate_weights_halve_every_branch():
    """Property G9."""
    mixer, x = build(), torch.randn(1, 30, 64, dtype=torch.float64)
    angles = rotary(torch.arange(30)[None])
    branches = []
    for branch in range(3):
        one = build()
        only_branch(one, branch)
        branches.append(one(x, angles)[0])
    mixer.g_proj.weight.zero_()
    torch.testing.assert_close(mixer(x, angles)[0], sum(branches) / 2, **EXACT)


@torch.no_grad()
def test_averages_are_appended_block_by_block():
    tokens = torch.randn(2, 3, 21, 5, dtype=torch.float64)
    for pooling in (Pooling(4, 4), Pooling(4, 2), Pooling(3, 1)):
        starts = range(0, 21 - pooling.size + 1, pooling.stride)
        expected = torch.stack([tokens[:, :, s : s + pooling.size].mean(2) for s in starts], dim=2)
        blocks, past = None, 0
        for new in (1, 6, 2, 1, 1, 10):
            blocks = pool_blocks(tokens[:, :, : past + new], blocks, pooling, past, new)
            past += new
            assert blocks.shape[2] == pooling.complete(past)
        torch.testing.assert_close(blocks, expected, **EXACT)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_averages_made_under_autocast_are_continued_in_the_type_of_the_tokens(padded):
    tokens, pooling = torch.randn(2, 3, 12, 5), Pooling(4, 2)
    real = torch.ones(2, 12, dtype=torch.bool)
    real[0, :2] = not padded
    masks = (real[:, :7], real) if padded else (None, None)
    first = pool_blocks(tokens[:, :, :7].bfloat16(), None, pooling, 0, 7, masks[0])
    blocks = pool_blocks(tokens, first, pooling, 7, 5, masks[1])
    expected = pool_blocks(tokens, None, pooling, 0, 12, masks[1])
    assert blocks.dtype == torch.float32
    complete = pooling.complete(10 if padded else 12)
    torch.testing.assert_close(blocks[:, :, :complete], expected[:, :, :complete], rtol=0, atol=0.02)
