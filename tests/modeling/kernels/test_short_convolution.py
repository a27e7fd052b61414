# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
from itertools import pairwise

import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from loopergy.modeling.kernels import short_convolution


def draw(batch=2, length=9, channels=5, width=4, columns=None, documents=None):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    state = normal(documents or batch, channels, width if columns is None else columns)
    return normal(batch, length, channels), normal(channels, width), normal(channels), state


def literal(x, weight, bias=None, state=None):
    """Walk token by token with a window of the last inputs."""
    width = weight.shape[1]
    window = [torch.zeros_like(x[:, 0])] * width
    if state is not None:
        window += list(state.unbind(-1))
    outputs = []
    for token in x.unbind(1):
        window = [*window, token][-width - 1 :]
        recent = torch.stack(window[-width:], -1)
        outputs.append((recent * weight).sum(-1) + (0 if bias is None else bias))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_convolution_equals_a_sliding_window(length, width):
    x, weight, bias, state = draw(length=length, width=width)
    for past in (None, state):
        expected = literal(x, weight, bias, past)
        found = short_convolution(x, weight, bias, past)
        assert torch.allclose(found, expected * expected.sigmoid(), atol=1e-12)


def test_transformers_own_function_gives_the_same():
    x, weight, bias, _ = draw()
    theirs = causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)
    assert torch.allclose(short_convolution(x, weight, bias), theirs, atol=1e-12)


@pytest.mark.parametrize("cuts", [(1,), (1, 2, 3), (4, 5), (8,)])
def test_a_sequence_in_pieces_through_transformers_cache_equals_the_whole(cuts):
    """Guards A1: several new tokens on a filled cache, and a first piece shorter than the filter."""
    x, weight, bias, _ = draw()
    cache, outputs = LinearAttentionLayer(), []
    for start, stop in pairwise((0, *cuts, 9)):
        piece = x[:, start:stop]
        state = cache.conv_states[0]
        outputs.append(short_convolution(piece, weight, bias, state=None if state is None else state.clone()))
        cache.update_conv_state(piece.transpose(1, 2), conv_kernel_size=4)
    assert torch.allclose(torch.cat(outputs, 1), short_convolution(x, weight, bias), atol=1e-12)


@pytest.mark.parametrize("columns", [3, 4, 7])
def test_only_the_last_columns_of_a_state_are_read(columns):
    x, weight, bias, state = draw(columns=columns)
    expected = short_convolution(x, weight, bias, state=state[..., -3:])
    assert torch.equal(short_convolution(x, weight, bias, state=state), expected)


@pytest.mark.parametrize("boundaries", [(0, 3, 7, 9), (0, 1, 2, 2, 9), (0, 0, 9), (0, 9)], ids=str)
@pytest.mark.parametrize("continued", [False, True])
def test_packed_documents_equal_separate_runs(boundaries, continued):
    """Guards C2: the first tokens of a document see nothing of the one before."""
    x, weight, bias, state = draw(1, documents=len(boundaries) - 1)
    packed = short_convolution(
        x, weight, bias, state=state if continued else None, cu_seqlens=torch.tensor(boundaries)
    )
    separate = [
        literal(x[:, start:stop], weight, bias, state[document : document + 1] if continued else None)
        for document, (start, stop) in enumerate(pairwise(boundaries))
        if stop > start
    ]
    assert torch.allclose(packed, torch.nn.functional.silu(torch.cat(separate, 1)), atol=1e-12)


def test_no_gradient_crosses_the_boundary_of_a_document():
    """Guards C2."""
    x, weight, bias, _ = draw(1)
    x.requires_grad_()
    output = short_convolution(x, weight, bias, cu_seqlens=torch.tensor([0, 4, 9]))
    (grad,) = torch.autograd.grad(output[:, 4:].sum(), x)
    assert grad[:, :4].count_nonzero() == 0


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_pass_gradcheck(length, packed):
    """Guards F7: the convolution state too, and pieces shorter than width - 1."""
    x, weight, bias, state = (t.requires_grad_() for t in draw(1, length, 2, documents=2 if packed else 1))
    boundaries = torch.tensor([0, 1, length]) if packed else None

    def run(x, weight, bias, state):
        return short_convolution(x, weight, bias, state=state, cu_seqlens=boundaries)

    assert torch.autograd.gradcheck(run, (x, weight, bias, state))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias, state))


def test_no_tokens_give_no_tokens():
    x, weight, bias, state = draw()
    assert short_convolution(x[:, :0], weight, bias, state=state).shape == (2, 0, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_output_has_the_dtype_of_the_input(dtype):
    x, weight, bias, state = draw()
    output = short_convolution(x.to(dtype), weight.float(), bias.float(), state=state.to(dtype))
    assert output.dtype == dtype
    assert torch.allclose(output.double(), short_convolution(x, weight, bias, state=state), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5, 1, 4)}, r"5 channels .* got \(5, 1, 4\).*squeeze"),
        ({"state": torch.zeros(2, 5, 2)}, r"`state` must be \(2, 5, at least 3\), got \(2, 5, 2\)"),
        ({"cu_seqlens": torch.tensor([0, 9])}, "batch size must be 1, got 2"),
    ],
    ids=["weight", "state", "packed batch"],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    x, weight, bias, state = draw()
    with pytest.raises(ValueError, match=message):
        short_convolution(**{"x": x, "weight": weight, "bias": bias, "state": state, **change})
