# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Decays inside a chunk of tokens, for any log decay from 0 down to minus infinity.

With `g_t <= 0` the log decay of token t, what token j wrote counts `D_ij = exp(g_{j+1} + ... + g_i)` for token i.
Nothing is divided by a decay that could be tiny, and no sum of log decays is the difference of two large ones: every
exponent below is a sum of numbers <= 0, so that nothing overflows and no digit is lost.

For one decay per head that is a table [C, C]. For one per channel there is no such table, as it would have K layers;
[`channel_chunks`] cuts the chunk in halves instead: when i lies in the later half and j in the earlier one,
`D_ij = exp(g_{mid+1} + ... + g_i) exp(g_{j+1} + ... + g_mid)`, one factor for the reading and one for the writing row.
Each half is then a smaller chunk of the same kind. Where decays are mild, so that keys may be divided by the
cumulative decay of a whole chunk without harm, one product takes the place of all these.

Shape letters: s chunks of a segment, p (row, head) pairs, n = s * p, C tokens of a chunk, K channels, R kinds of
reading rows.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from loopergy.modeling.kernels.segments import Call, Space
from loopergy.modeling.kernels.tracing import is_traced

# Decays below exp(-floor) count as zero. That is far below the rounding error of the sums they would enter, and far
# above the denormal numbers that make processors a hundred times slower.
LOG_DECAY_FLOOR = {torch.float32: 35.0, torch.float64: 80.0}
# Down to exp(-this) one may divide by a cumulative decay; a gradient divides twice, and exp(80) is still a number.
_INVERTIBLE = {torch.float32: 40.0, torch.float64: 300.0}
# On a CPU, exp2 is three times as fast as exp.
_LOG2_E = math.log2(math.e)


def decay(log_decay: Tensor, out: Tensor | None = None) -> Tensor:
    """Return exp(log_decay), exactly 0 below the floor of the dtype, in `out` if given."""
    floor = LOG_DECAY_FLOOR[log_decay.dtype]
    # exp(-inf) is 35 times as slow as exp of a number on a CPU, hence the clamp before and the threshold after.
    if out is None:
        return without_negligible(log_decay.clamp(min=-floor).exp())
    return without_negligible_(torch.clamp(log_decay, min=-floor, out=out).mul_(_LOG2_E).exp2_())


def without_negligible(factor: Tensor) -> Tensor:
    """Return decays with those below the floor of the dtype replaced by 0."""
    return torch.threshold(factor, _smallest(factor.dtype), 0.0)


def without_negligible_(factor: Tensor) -> Tensor:
    """Replace decays below the floor of the dtype by 0, in place."""
    return torch.threshold_(factor, _smallest(factor.dtype), 0.0)


def _smallest(dtype: torch.dtype) -> float:
    return 1.001 * math.exp(-LOG_DECAY_FLOOR[dtype])


def running_sums(g: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of log decays [..., C] over the tokens so far.

    Summed in float64, where the device has it: differences of long float32 sums would lose three digits. What lies
    beyond the floor of `dtype` is cut off there, as differences of -inf are no numbers.

    Returns:
        The sums; the same in `dtype`; and what rounding to `dtype` took away.
    """
    total = g.to(dtype if g.device.type == "mps" else torch.float64)
    total = total.clamp(min=-LOG_DECAY_FLOOR[dtype] - 1).cumsum(-1)
    rounded = total.to(dtype)
    return total, rounded, (total - rounded).to(dtype)


def channel_chunk_size(call: Call, asked: int | None, default: int) -> int:
    """Return the chunk size for decays per channel: the one asked for, checked, or one that suits the length.

    Raises:
        ValueError: it is no power of two.
    """
    if asked is None:
        return 1 << (call.chunk_size(None, default) - 1).bit_length()
    if asked < 1 or asked & (asked - 1):
        raise ValueError(f"`chunk_size` must be a power of two, as chunks are cut in halves, got {asked}.")
    return asked


class ChannelChunks(NamedTuple):
    """What chunks with one log decay per token and channel compute without looking at a state.

    Args:
        scores: [n, R, C, C], `sum_c rows_ic D_ijc keys_jc` for j <= i, and 0 for later j.
        read: [n, R, C, K], rows times the decay from the chunk's start.
        write: [n, C, K], keys times the decay to the chunk's end; if `divided`, over the decay from its start.
        carry: [n, K], decay of the whole chunk.
        divided: whether keys were divided by the cumulative decay; the chunk's decay is then still to be put on what
            they write, see [`pass_on`].
    """

    scores: Tensor
    read: Tensor
    write: Tensor
    carry: Tensor
    divided: bool


def channel_chunks(space: Space, rows: Sequence[Tensor], keys: Tensor, g: Tensor) -> ChannelChunks:
    """Read and write with a decay per channel.

    Args:
        space: where results go.
        rows: R times [s, p, C, K], what reads; C a power of two.
        keys: [s, p, C, K], what is written.
        g: [s, p, C, K], log decays.
    """
    (s, p, size, width), kinds, n = g.shape, len(rows), g.shape[0] * g.shape[1]
    # In the place of the outputs, which come when these decays are done with.
    decays = mild_decays(g, space.take("out", *g.shape))
    if decays is None:
        together, keys = torch.stack(list(rows), 2).flatten(0, 1), keys.reshape(n, size, width)
        scores, since, until = _in_halves(together, keys, g.reshape(n, size, width))
        read = torch.mul(together, since[:, None], out=space.over(together))
        return ChannelChunks(scores, read, keys * until, since[:, -1], False)
    carry = decays[:, :, -1].flatten(0, 1)
    read = space.take("read", s, p, kinds, size, width)
    if read is None:
        read = torch.stack([x * decays for x in rows], 2)
    else:
        for place, x in zip(read.unbind(2), rows, strict=True):
            torch.mul(x, decays, out=place)
    read = read.view(n, kinds * size, width)
    write = torch.div(keys, decays, out=space.take("write", *g.shape)).reshape(n, size, width)
    scores = torch.bmm(read, write.mT, out=space.take("scores", n, kinds * size, size))
    scores = scores.view(n, kinds, size, size)
    read = read.view(n, kinds, size, width)
    if space.reuse:
        # A copy, as the decays give way to the outputs.
        return ChannelChunks(scores.tril_(), read, write, carry.clone(), True)
    return ChannelChunks(scores.tril(), read, write * carry[:, None], without_negligible(carry), False)


def mild_decays(g: Tensor, out: Tensor | None = None) -> Tensor | None:
    """Return the decays from the chunk's start [s, p, C, K] if one may divide by all of them, else None."""
    if is_traced() or g.device.type != "cpu":
        # A decision by the numbers is not for tracers, and would make an accelerator wait.
        return None
    total = torch.cumsum(g * _LOG2_E, 2) if out is None else _sums(g, _LOG2_E, out)
    if float(total[:, :, -1].detach().amin()) < -_INVERTIBLE[g.dtype] * _LOG2_E:
        return None
    return torch.exp2(total, out=out)


def _sums(x: Tensor, factor: float, out: Tensor) -> Tensor:
    """Write the sums of x [s, p, C, K] over the tokens so far, times a factor, to `out`.

    In blocks of tokens and whole rows at a time: `torch.cumsum` goes down the columns and takes twice as long.
    """
    parts, places = (y.unflatten(2, (min(4, x.shape[2]), -1)) for y in (x, out))
    tokens = places.unbind(3)
    torch.mul(parts[:, :, :, 0], factor, out=tokens[0])
    for (before, place), part in zip(pairwise(tokens), parts.unbind(3)[1:], strict=True):
        torch.add(before, part, alpha=factor, out=place)
    for before, block in pairwise(places.unbind(2)):
        block.add_(before[:, :, -1:])
    return out


def _in_halves(rows: Tensor, keys: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores [n, R, C, C], and the decays from the start and to the end of the chunk, both [n, C, K].

    Chunks that are not mild are cut in two, down to single tokens. Of two halves, the decay from the start to a token
    of the second is that of the first half times its own, and so on; no exponent is ever positive.
    """
    n, kinds, size, width = rows.shape
    if size == 1:
        return (rows * keys[:, None]).sum(-1, keepdim=True), decay(g), torch.ones_like(g)
    since = mild_decays(g[None])
    if since is not None:
        since = since[0]
        scores = (rows * since[:, None]) @ (keys / since)[:, None].mT
        return scores.tril(), without_negligible(since), without_negligible(since[:, -1:] / since)
    half = size // 2
    parts = rows.unflatten(2, (2, half)).transpose(1, 2)
    scores, since, until = _in_halves(
        parts.reshape(2 * n, kinds, half, width), keys.reshape(2 * n, half, width), g.reshape(2 * n, half, width)
    )
    first, second = scores.unflatten(0, (n, 2)).unbind(1)
    (since_1, since_2), (until_1, until_2) = (x.unflatten(0, (n, 2)).unbind(1) for x in (since, until))
    corner = (parts[:, 1] * since_2[:, None]) @ (keys[:, :half] * until_1)[:, None].mT
    upper = torch.cat([first, torch.zeros_like(first)], -1)
    scores = torch.cat([upper, torch.cat([corner, second], -1)], -2)
    since = torch.cat([since_1, without_negligible(since_2 * since_1[:, -1:])], 1)
    until = torch.cat([without_negligible(until_1 * since_2[:, -1:]), until_2], 1)
    return scores, since, until


class HeadDecay:
    """The decays of n chunks with one log decay per token.

    Args:
        space: where results go.
        g: [n, C], log decays.

    Attributes:
        since: [n, C, 1], decay from the chunk's start to each token.
        until: [n, C, 1], decay from each token to the chunk's end.
        between: [n, C, C], D, and 0 above the diagonal.
    """

    def __init__(self, space: Space, g: Tensor):
        n, size, dtype = *g.shape, space.dtype
        total, high, rest = running_sums(g, dtype)
        self.since = decay(high)[..., None]
        self.until = decay((total[..., -1:] - total).to(dtype))[..., None]
        future = space.constant(_future, size)
        between = torch.sub(high[..., :, None], high[..., None, :], out=space.take("between", n, size, size))
        if space.reuse:
            between.add_(rest[..., :, None]).sub_(rest[..., None, :]).sub_(future)
        else:
            between = between + rest[..., :, None] - rest[..., None, :] - future
        self.between = decay(between, between if space.reuse else None)


def _future(size: int, like: Tensor) -> Tensor:
    """Return [C, C], a large number where a token would read what a later one writes."""
    return torch.full((size, size), 1e30, device=like.device).triu(1)


def pass_on(
    state: Tensor, keys: Tensor, values: Tensor, carry: Tensor | None, divided: bool, out: Tensor | None = None
) -> Tensor:
    """Return the state after a chunk: `carry S + W^T V`, or `carry (S + W^T V)` for divided keys.

    Args:
        state: [p, K, V].
        keys: [p, K, C], W^T.
        values: [p, C, V].
        carry: [p, K or 1, 1]; None for one.
        divided: as in [`ChannelChunks`]; saves a product with every key.
        out: where the result goes, which may be `state`; None for a new tensor.
    """
    if carry is None:
        return torch.baddbmm(state, keys, values, out=out)
    if divided:
        state = torch.baddbmm(state, keys, values, out=out)
        return torch.mul(state, carry, out=out)
    state = torch.mul(state, carry, out=out)
    return torch.baddbmm(state, keys, values, out=out)


def pass_state(
    space: Space,
    scores: Tensor,
    read: Tensor,
    write: Tensor,
    v: Tensor,
    carry: Tensor | None,
    state: Tensor,
    divided: bool = False,
) -> tuple[Tensor, Tensor]:
    """Let chunks read from a state, `O = A V + R S`, and write to it as [`pass_on`] does.

    Args:
        space: where results go.
        scores: [s, p, C, C], A, what tokens of a chunk take from each other.
        read, write: [s, p, C, K], rows that read and keys that write, decays included.
        v: [s, p, C, V], values.
        carry: [s, p, K or 1, 1], decay of each chunk; None for none.
        state: [b, h, K, V] with b h = p.
        divided: as in [`ChannelChunks`]; in buffers alone.

    Returns:
        The outputs, and the state after the last chunk.
    """
    memory, out = space.take("state", *state.flatten(0, 1).shape), space.take("out", *v.shape)
    if memory is None or out is None:
        before, after = scan(space, carry, write.mT @ v, state.flatten(0, 1))
        return scores @ v + read @ before, after.view_as(state)
    # One chunk after the other, so that the state stays in the cache and those in between are never written out.
    if memory.data_ptr() != state.data_ptr():
        memory.view(state.shape).copy_(state)
    carries = [None] * len(v) if carry is None else carry.unbind(0)
    parts = (x.unbind(0) for x in (scores, read, write.mT, v, out))
    for weights, rows, keys, values, target, factor in zip(*parts, carries, strict=True):
        torch.bmm(weights, values, out=target).baddbmm_(rows, memory)
        pass_on(memory, keys, values, factor, divided, out=memory)
    return out, memory.view_as(state)


def scan(space: Space, carry: Tensor | None, writes: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Carry a state over chunks whose writes do not depend on it: `S <- carry S + write`.

    Args:
        space: where results go.
        carry: [s, p, K or 1, V or 1], or None for one.
        writes: [s, p, K, V].
        state: [p, K, V].

    Returns:
        The states before the chunks [s, p, K, V], and the state after the last.
    """
    carries = [None] * len(writes) if carry is None else carry.unbind(0)
    room = space.take("states", len(writes), *state.shape)
    states = [] if room is None else list(room.unbind(0))
    if room is not None:
        state = states[0].copy_(state)
    for i, (factor, write) in enumerate(zip(carries, writes.unbind(0), strict=True)):
        if room is None:
            states.append(state)
            target = None
        else:
            target = states[i + 1] if i + 1 < len(states) else space.take("after", *state.shape)
        if factor is None:
            state = torch.add(write, state, out=target)
        else:
            state = torch.addcmul(write, state, factor, out=target)
    return torch.stack(states) if room is None else room, state
