# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The short causal convolution in front of linear-attention mixers: one small filter per channel, in plain torch.

Shape letters: B batch, T length, C channels, K filter width, S columns of a state, D documents.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from loopergy.modeling.kernels.chunk_layout import document_boundaries


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Convolve every channel with its own causal filter: `y_t = silu(b + sum_j w_j x_{t - K + 1 + j})`.

    What came before the first token is read from `state`, so that a sequence in pieces gives the numbers of the whole.
    The state is what transformers' `LinearAttentionLayer.update_conv_state` keeps: the last inputs, oldest first. Any
    number of columns from K - 1 up will do; the last K - 1 are read. Keeping it is the caller's part:
    `cache.update_conv_state(x.transpose(1, 2), slot, conv_kernel_size=K)`.

    Args:
        x: [B, T, C], inputs.
        weight: [C, K], filters; the last column meets the present token.
        bias: [C], or None.
        state: [B, C, S] (with `cu_seqlens`: [D, C, S]), S >= K - 1, earlier inputs; zeros if None.
        cu_seqlens: [D + 1], boundaries of the documents packed into the single row, rising from 0 to T; None for
            one document per row.

    Returns:
        [B, T, C] in the dtype of `x`.

    Raises:
        ValueError: shapes that do not fit together, or `cu_seqlens` with more than one row.
    """
    batch, length, channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels:
        raise ValueError(
            f"`weight` must be [channels, width] with {channels} channels like `x`, got {tuple(weight.shape)}; "
            "the weight of an nn.Conv1d needs .squeeze(1)."
        )
    boundaries = document_boundaries(cu_seqlens, batch, length)
    past = weight.shape[1] - 1
    documents = batch if boundaries is None else len(boundaries) - 1
    if state is not None and (state.shape[:2] != (documents, channels) or state.shape[2] < past):
        raise ValueError(f"`state` must be ({documents}, {channels}, at least {past}), got {tuple(state.shape)}.")
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if state is None:
        left = x.new_zeros(documents, past, channels, dtype=dtype)
    else:
        left = state[..., state.shape[2] - past :].transpose(1, 2).to(dtype)
    if boundaries is None:
        out = _convolve(torch.cat([left, x.to(dtype)], 1), weight, bias)
    else:
        out = _convolve_packed(x.to(dtype), left, weight, bias, boundaries)
    return out.to(x.dtype)


def _convolve(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [B, T, C] for rows [B, K - 1 + T, C]."""
    # One pass per filter column over tokens as they lie: faster than transposing them for a convolution call, and so
    # is its gradient.
    width = weight.shape[1]
    length = rows.shape[1] - width + 1
    out = rows[:, :length] * weight[:, 0]
    for j in range(1, width):
        out.addcmul_(rows[:, j : j + length], weight[:, j])
    if bias is not None:
        out = out + bias
    return F.silu(out)


def _convolve_packed(x: Tensor, left: Tensor, weight: Tensor, bias: Tensor | None, boundaries: list[int]) -> Tensor:
    """Convolve a row [1, T, C] of documents, each after K - 1 earlier inputs of its own [D, K - 1, C]."""
    documents, past, _ = left.shape
    index = torch.arange(documents, device=x.device)
    starts = torch.tensor(boundaries, device=x.device)
    # Every document comes after its own earlier inputs and those of all documents before it.
    ends = torch.arange(x.shape[1], device=x.device) + torch.repeat_interleave(index, starts.diff()) * past
    pasts = ((starts[:-1] + index * past)[:, None] + torch.arange(past, device=x.device)).flatten()
    rows = x.new_zeros(1, x.shape[1] + documents * past, x.shape[2])
    rows = rows.index_copy(1, ends + past, x).index_copy(1, pasts, left.flatten(0, 1).unsqueeze(0))
    return _convolve(rows, weight, bias).index_select(1, ends)
