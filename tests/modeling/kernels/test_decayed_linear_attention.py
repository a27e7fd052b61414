# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopergy.modeling.kernels import (
    chunk_gla,
    chunk_kda,
    chunk_simple_gla,
    recurrent_gla,
    recurrent_kda,
    recurrent_simple_gla,
    segments,
)
from loopergy.modeling.kernels.linear_attention_step import kda_step, linear_attention_step

LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 129]
KINDS = ("none", "head", "channel", "kda")
DECAYS = torch.tensor([0.0, -0.05, -5.0, -50.0, -torch.inf], dtype=torch.float64)


def draw(
    kind, batch=2, length=17, heads=3, width=4, values=6, dtype=torch.float64, documents=None, seed=0, mild=False
):
    """Draw the inputs of a kind of kernel; log decays are mixed of 0, -0.05, -5, -50 and -inf unless `mild`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def log_decay(*shape):
        if mild:
            return (-torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)
        return DECAYS[torch.randint(5, shape, generator=generator)].to(dtype)

    # Heads share queries and keys where the kernel allows it.
    groups = 1 if kind in ("none", "head") else heads
    inputs = {"q": normal(batch, length, groups, width), "k": normal(batch, length, groups, width) / width**0.5}
    inputs["v"] = normal(batch, length, heads, values)
    if kind == "head":
        inputs["g"] = log_decay(batch, length, heads)
    elif kind != "none":
        inputs["g"] = log_decay(batch, length, heads, width)
    if kind == "kda":
        inputs["k"] = torch.nn.functional.normalize(inputs["k"], dim=-1)
        inputs["beta"] = 2 * torch.rand(batch, length, heads, generator=generator, dtype=torch.float64).to(dtype)
    return inputs | {"initial_state": normal(documents or batch, heads, width, values)}


def kernels(kind):
    """Return the sequence form and the step form of a kind."""
    if kind == "kda":
        return chunk_kda, recurrent_kda
    return (chunk_gla, recurrent_gla) if kind == "channel" else (chunk_simple_gla, recurrent_simple_gla)


def literal(q, k, v, g=None, beta=None, initial_state=None, scale=None):
    """The recurrences as written, one token, one row and one head at a time, in float64."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    share = v.shape[2] // q.shape[2]
    rows, states = [], []
    for b in range(v.shape[0]):
        heads = []
        for h in range(v.shape[2]):
            zero = v.new_zeros(q.shape[3], v.shape[3], dtype=torch.float64)
            state, outputs = zero if initial_state is None else initial_state[b, h].double(), []
            for t in range(v.shape[1]):
                query, key, value = (x.double() for x in (q[b, t, h // share], k[b, t, h // share], v[b, t, h]))
                if g is not None:
                    state = g[b, t, h].double().exp().reshape(-1, 1) * state
                if beta is not None:
                    value = beta[b, t, h].double() * (value - state.T @ key)
                state = state + torch.outer(key, value)
                outputs.append(state.T @ (scale * query))
            heads.append(torch.stack(outputs) if outputs else v[b, :, h].double())
            states.append(state)
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows), torch.stack(states).view(v.shape[0], v.shape[2], q.shape[3], v.shape[3])


def leaves(inputs):
    return {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}


def gradients(outputs, inputs, weights):
    loss = sum((out.double() * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)


def distance(left, right):
    return max(((x - y).abs().max().item() for x, y in zip(left, right, strict=True) if x.numel()), default=0.0)


@pytest.fixture(params=["segments", "whole", "traced"])
def form(request, monkeypatch):
    """Run a test segment by segment, as the one expression of short inputs, and as tracers see it."""
    if request.param != "whole":
        monkeypatch.setattr(segments, "_SHORT_NUMBERS", 0)
    if request.param == "traced":
        for module in (segments, "loopergy.modeling.kernels.kimi_delta_rule"):
            target = module if isinstance(module, str) else module.__name__
            monkeypatch.setattr(f"{target}.is_traced", lambda: True)
        for module in ("decay", "decayed_linear_attention"):
            monkeypatch.setattr(f"loopergy.modeling.kernels.{module}.mild_decays", lambda g, out=None: None)
    return request.param


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
@torch.no_grad()
def test_sequence_and_step_form_equal_the_recurrence_for_any_decay(length, kind, form):
    """Guards F1, F2: decays of 1, nearly 1, e^-5, e^-50 and 0 side by side."""
    inputs = draw(kind, length=length)
    expected = literal(**inputs)
    for kernel in kernels(kind):
        actual = kernel(**inputs, output_final_state=True)
        assert actual[0].shape == expected[0].shape
        assert distance(actual, expected) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [1, 8, 32, 128])
@torch.no_grad()
def test_the_chunk_size_changes_nothing(chunk_size, kind):
    inputs = draw(kind, length=70, mild=True)
    actual = kernels(kind)[0](**inputs, output_final_state=True, chunk_size=chunk_size)
    assert distance(actual, literal(**inputs)) < 1e-11


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    heads=st.integers(1, 5),
    width=st.integers(1, 9),
    values=st.integers(1, 9),
    numbers=st.integers(1, 3000),
    mild=st.booleans(),
)
def test_no_way_of_cutting_the_work_changes_the_result(kind, batch, length, heads, width, values, numbers, mild):
    inputs = leaves(draw(kind, batch, length, heads, width, values, mild=mild))
    chunk, step = kernels(kind)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_SEGMENT_NUMBERS", "_STATE_NUMBERS"):
            patch.setattr(segments, name, numbers)
        patch.setattr(segments, "_SHORT_NUMBERS", 0)
        actual = chunk(**inputs, output_final_state=True, chunk_size=4)
        weights = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape) for x in actual]
        actual_gradients = gradients(actual, inputs, weights)
    expected = step(**inputs, output_final_state=True)
    assert distance(actual, expected) < 1e-10
    assert distance(actual_gradients, gradients(expected, inputs, weights)) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_gradients_equal_those_of_the_recurrence_for_any_decay(length, kind, form):
    """Guards F2, F4, F7: any length against the chunk size, head counts 3 and 5, with an initial state."""
    for heads in (3, 5):
        inputs = leaves(draw(kind, length=length, heads=heads))
        actual = kernels(kind)[0](**inputs, output_final_state=True)
        weights = [torch.randn_like(x) for x in actual]
        expected = gradients(literal(**inputs), inputs, weights)
        found = gradients(actual, inputs, weights)
        assert all(x.isfinite().all() for x in found)
        assert distance(found, expected) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_pass_gradgradcheck(kind, form):
    inputs = leaves(draw(kind, 1, 3, 2, 2, 2, mild=True))

    def run(*tensors):
        arguments = dict(zip(inputs, tensors, strict=True))
        return kernels(kind)[0](**arguments, output_final_state=True, chunk_size=2)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))
    assert torch.autograd.gradgradcheck(run, tuple(inputs.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_exist_without_an_initial_state_and_for_odd_strides(kind, form):
    """Guards F7: an expanded gradient, a transposed one, and inputs that are slices of one projection."""
    inputs = draw(kind, length=19)
    inputs.pop("initial_state")
    for name in ("q", "v"):
        inputs[name] = torch.cat([inputs[name]] * 2, -1)[..., : inputs[name].shape[-1]]
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    out = kernels(kind)[0](**inputs)[0]
    expected = literal(**inputs)[0]
    transposed = torch.randn(out.shape[::-1], dtype=torch.float64).permute(3, 2, 1, 0)
    for weight in (torch.ones((), dtype=torch.float64).expand(out.shape), transposed):
        found = torch.autograd.grad(out, list(inputs.values()), weight, retain_graph=True)
        right = torch.autograd.grad(expected, list(inputs.values()), weight, retain_graph=True)
        assert distance(found, right) < 1e-11


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(1,), (16, 17), (5, 40, 41), (64,)])
@torch.no_grad()
def test_a_sequence_in_pieces_equals_the_whole(cuts, kind):
    inputs = draw(kind, length=70)
    chunk, step = kernels(kind)
    whole = chunk(**inputs, output_final_state=True)
    state, outputs = inputs.pop("initial_state"), []
    for start, stop in pairwise((0, *cuts, 70)):
        piece = {name: x[:, start:stop] for name, x in inputs.items()}
        rule = step if stop - start == 1 else chunk
        output, state = rule(**piece, initial_state=state, output_final_state=True)
        outputs.append(output)
    assert distance((torch.cat(outputs, 1), state), whole) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_documents_alone(kind, form):
    """Guards C1: lengths around the chunk size, an empty one, and one token."""
    boundaries = [0, 16, 16, 17, 50, 65]
    inputs = leaves(draw(kind, 1, 65, documents=5))
    actual = kernels(kind)[0](**inputs, output_final_state=True, cu_seqlens=torch.tensor(boundaries))
    outputs, states = [], []
    for document, (start, stop) in enumerate(pairwise(boundaries)):
        piece = {name: x[:, start:stop] for name, x in inputs.items()}
        piece["initial_state"] = inputs["initial_state"][document : document + 1]
        output, state = kernels(kind)[1](**piece, output_final_state=True)
        outputs.append(output)
        states.append(state)
    expected = torch.cat(outputs, 1), torch.cat(states)
    assert distance(actual, expected) < 1e-11
    weights = [torch.randn_like(x) for x in actual]
    assert distance(gradients(actual, inputs, weights), gradients(expected, inputs, weights)) < 1e-10
    by_step = kernels(kind)[1](**inputs, output_final_state=True, cu_seqlens=torch.tensor(boundaries))
    assert distance(by_step, expected) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mild", [True, False])
def test_low_precision_inputs_are_computed_in_float32(dtype, tolerance, kind, mild):
    """Guards F1, F2 and F13."""
    inputs = draw(kind, length=65, width=16, values=32, dtype=dtype, mild=mild)
    inputs = {name: x.float() if name in ("g", "initial_state") else x for name, x in inputs.items()}
    expected = literal(**inputs)
    for kernel in kernels(kind):
        arguments = leaves(inputs)
        actual = kernel(**arguments, output_final_state=True)
        assert actual[0].dtype == dtype
        assert actual[1].dtype == torch.float32
        for x, y in zip(actual, expected, strict=True):
            assert (x - y).norm() < tolerance * y.norm()
        grads = torch.autograd.grad(actual[0].sum(), list(arguments.values()))
        assert [x.dtype for x in grads] == [x.dtype for x in inputs.values()]
        assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("kind", ["channel", "kda"])
@pytest.mark.parametrize("log_decay", [-1.2, -1.3, -2.4, -2.6, -80.0])
@pytest.mark.parametrize("batch", [1, 2])
def test_both_sides_of_what_counts_as_mild_are_exact(batch, log_decay, kind, monkeypatch):
    """Guards F2: chunks of 32 and 16 tokens whose decays one may just, and may just not, divide by in float32."""
    monkeypatch.setattr(segments, "_SHORT_NUMBERS", 0)
    inputs = draw(kind, batch, length=65, width=16, values=8, mild=True)
    inputs["g"] = torch.full_like(inputs["g"], log_decay)
    exact, single = leaves(inputs), leaves({name: x.float() for name, x in inputs.items()})
    expected, actual = literal(**exact), kernels(kind)[0](**single, output_final_state=True)
    weights = [torch.randn_like(x) for x in expected]
    right, left = gradients(expected, exact, weights), gradients(actual, single, weights)
    for x, y in zip((*actual, *left), (*expected, *right), strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm() + 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_lower_the_precision(kind, monkeypatch):
    """Guards F13."""
    monkeypatch.setattr(segments, "_SHORT_NUMBERS", 0)
    inputs = draw(kind, length=40, width=16, values=16, dtype=torch.float32, mild=True)
    for kernel in kernels(kind):
        expected, _ = kernel(**inputs)
        with torch.autocast("cpu", torch.bfloat16):
            actual, _ = kernel(**inputs)
        assert distance([actual], [expected]) < 1e-6
    tracked = leaves(inputs)
    output, _ = kernels(kind)[0](**tracked)
    weight = [torch.ones_like(output, dtype=torch.float64)]
    expected = gradients([output], tracked, weight)
    output, _ = kernels(kind)[0](**tracked)
    with torch.autocast("cpu", torch.bfloat16):
        assert distance(gradients([output], tracked, weight), expected) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_shapes_can_be_worked_out_without_numbers(kind):
    """`loopergy info` describes a model on the meta device."""
    inputs = {name: x.to("meta") for name, x in draw(kind, length=33).items()}
    for kernel in kernels(kind):
        out, state = kernel(**inputs, output_final_state=True)
        assert out.shape == inputs["v"].shape
        assert state.shape == inputs["initial_state"].shape


@pytest.mark.parametrize("kind", ["head", "channel", "kda"])
def test_compiled_equals_eager(kind):
    """Guards F12."""
    inputs = leaves(draw(kind, 1, 33, 2, dtype=torch.float32, mild=True))
    chunk = kernels(kind)[0]
    compiled = torch.compile(chunk, backend="aot_eager", fullgraph=True)
    left, right = (rule(**inputs, output_final_state=True) for rule in (compiled, chunk))
    weights = [torch.randn(x.shape).double() for x in left]
    assert distance(left, right) < 1e-5
    assert distance(gradients(left, inputs, weights), gradients(right, inputs, weights)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_function_transforms_see_through_it(kind):
    inputs = draw(kind, 4, 9, 2)
    chunk = kernels(kind)[0]
    together = chunk(**inputs)[0]

    def alone(*tensors):
        return chunk(**dict(zip(inputs, (x[None] for x in tensors), strict=True)))[0][0]

    assert distance([torch.func.vmap(alone)(*inputs.values())], [together]) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_calls_share_no_buffers_and_leave_their_inputs_alone(kind):
    first, second = draw(kind, length=40, seed=1), draw(kind, length=40, seed=2)
    copies = {name: x.clone() for name, x in first.items()}
    output, state = kernels(kind)[0](**first, output_final_state=True)
    before = output.clone(), state.clone()
    kernels(kind)[0](**second, output_final_state=True)
    assert torch.equal(output, before[0])
    assert torch.equal(state, before[1])
    assert all(torch.equal(first[name], x) for name, x in copies.items())


@pytest.mark.parametrize("kind", KINDS)
def test_backward_keeps_no_more_than_the_inputs_twice_over(kind):
    """Memory is linear in the length: what autograd holds is counted, tensor by tensor."""
    inputs = leaves(draw(kind, 1, 2048, 8, 64, 64, dtype=torch.float32, mild=True))
    inputs.pop("initial_state")
    held = {}

    def count(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        kernels(kind)[0](**inputs)
    own = sum(x.untyped_storage().nbytes() for x in inputs.values())
    assert sum(held.values()) <= 2 * own


@pytest.mark.parametrize("kind", ["none", "head", "channel", "kda"])
@torch.no_grad()
def test_the_step_in_place_equals_the_recurrence(kind):
    inputs = draw(kind, length=4)
    state = inputs["initial_state"].clone()
    outputs = []
    for t in range(4):
        token = {name: x[:, t] for name, x in inputs.items() if name != "initial_state"}
        step = kda_step if kind == "kda" else linear_attention_step
        outputs.append(step(**token, state=state))
    expected = kernels(kind)[1](
        **inputs, output_final_state=True, **({"use_qk_l2norm_in_kernel": True} if kind == "kda" else {})
    )
    assert distance((torch.stack(outputs, 1), state), expected) < 1e-12


@torch.no_grad()
def test_the_delta_rule_with_one_decay_for_all_channels_is_the_gated_delta_rule():
    """Property G3."""
    from loopergy.modeling.kernels import chunk_gated_delta_rule

    inputs = draw("kda", length=40, mild=True)
    inputs["g"] = inputs["g"][..., :1].expand_as(inputs["g"])
    expected = chunk_gated_delta_rule(**{**inputs, "g": inputs["g"][..., 0]}, output_final_state=True)
    assert distance(chunk_kda(**inputs, output_final_state=True), expected) < 1e-12


@torch.no_grad()
def test_the_decay_comes_before_the_delta_step():
    """Property G4: for a decay per channel the order matters."""
    inputs = draw("kda", 1, 1, 1, mild=True)
    state, key, decay = inputs["initial_state"][0, 0], inputs["k"][0, 0, 0], inputs["g"][0, 0, 0].exp()[:, None]
    beta, value = inputs["beta"][0, 0, 0], inputs["v"][0, 0, 0]
    after = chunk_kda(**inputs, output_final_state=True)[1][0, 0]
    first = decay * state
    first = first + torch.outer(key, beta * (value - first.T @ key))
    last = decay * (state + torch.outer(key, beta * (value - state.T @ key)))
    assert torch.allclose(after, first, rtol=0, atol=1e-12)
    assert not torch.allclose(after, last, rtol=0, atol=1e-3)


@torch.no_grad()
def test_linear_attention_is_masked_attention_without_softmax():
    """Property G6: o_t = sum_{j <= t} (q_t . D_tj k_j) v_j."""
    inputs = draw("channel", 1, 20, 2, mild=True)
    inputs.pop("initial_state")
    total = inputs["g"].cumsum(1)
    decay = (total[:, :, None] - total[:, None]).exp()
    scores = torch.einsum("bihk,bijhk,bjhk->bhij", inputs["q"], decay, inputs["k"]).tril() / 2
    expected = torch.einsum("bhij,bjhv->bihv", scores, inputs["v"])
    assert distance([chunk_gla(**inputs)[0]], [expected]) < 1e-12


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("head", {"k": torch.zeros(2, 17, 1, 5)}, "`q` and `k` must be"),
        ("head", {"g": torch.zeros(2, 17, 2)}, r"`g` must be \(2, 17, 3\) like `v`, got \(2, 17, 2\)"),
        ("channel", {"g": torch.zeros(2, 17, 3)}, "`q`, `k` and `g` must be"),
        ("kda", {"g": torch.zeros(2, 17, 3)}, r"`g` must be \(2, 17, 3, 4\)"),
        ("kda", {"beta": torch.zeros(2, 17, 2)}, r"`beta` \(2, 17, 3\)"),
        *((kind, {"initial_state": torch.zeros(2, 3, 6, 4)}, "`initial_state` must be") for kind in KINDS),
        *((kind, {"cu_seqlens": torch.tensor([0, 17])}, "batch size must be 1, got 2") for kind in KINDS),
    ],
)
def test_shapes_that_do_not_fit_are_named(kind, change, message):
    for kernel in kernels(kind):
        with pytest.raises(ValueError, match=message):
            kernel(**{**draw(kind), **change})


@pytest.mark.parametrize(("kind", "size"), [("none", 0), ("channel", 12), ("kda", 0)])
def test_chunk_sizes_that_do_not_work_are_refused(kind, size):
    with pytest.raises(ValueError, match=f"`chunk_size` must be .* got {size}"):
        kernels(kind)[0](**draw(kind), chunk_size=size)


def test_queries_and_keys_of_almost_no_length_are_divided_by_no_less_than_the_epsilon():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = 1e-4 * q, 1e-4 * k
    g, beta = -torch.rand(1, 20, 2, 8, generator=generator), torch.rand(1, 20, 2, generator=generator)
    results = [rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0] for rule in (chunk_kda, recurrent_kda)]
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
