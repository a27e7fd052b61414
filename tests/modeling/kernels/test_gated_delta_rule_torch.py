# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import importlib
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from loopergy.modeling.kernels import chunk_gated_delta_rule, recurrent_gated_delta_rule

module = importlib.import_module("loopergy.modeling.kernels.gated_delta_rule_torch")
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 129]
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def draw(batch=2, length=17, heads=3, width=4, values=6, dtype=torch.float64, documents=None, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = normal(batch, length, heads, width), normal(batch, length, heads, width) / width**0.5
    g = -3 * torch.rand(batch, length, heads, generator=generator, dtype=torch.float64)
    beta = torch.rand(batch, length, heads, generator=generator, dtype=torch.float64)
    tensors = q, k, normal(batch, length, heads, values), g, beta, normal(documents or batch, heads, width, values)
    return dict(zip(NAMES, (x.to(dtype) for x in tensors), strict=True))


def literal(q, k, v, g, beta, initial_state=None, scale=None, normalize=False):
    """The recurrence as written, one token, one row and one head at a time, in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    rows, states = [], []
    for b in range(v.shape[0]):
        heads = []
        for h in range(v.shape[2]):
            zero = v.new_zeros(q.shape[3], v.shape[3])
            state, outputs = zero if initial_state is None else initial_state[b, h].double(), []
            for t in range(v.shape[1]):
                query, key = q[b, t, h], k[b, t, h]
                if normalize:
                    query, key = (x / (x.square().sum() + 1e-6).sqrt() for x in (query, key))
                state = g[b, t, h].exp() * state
                state = state + torch.outer(key, beta[b, t, h] * (v[b, t, h] - state.T @ key))
                outputs.append(state.T @ (scale * query))
            heads.append(torch.stack(outputs) if outputs else v[b, :, h])
            states.append(state)
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows), torch.stack(states).view(v.shape[0], v.shape[2], q.shape[3], v.shape[3])


def gradients(outputs, inputs, weights):
    loss = sum((out.double() * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, list(inputs.values()))


def leaves(inputs):
    return {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}


def distance(left, right):
    return max(((x - y).abs().max().item() for x, y in zip(left, right, strict=True) if x.numel()), default=0.0)


@pytest.fixture(params=["hand-written", "traced"])
def form(request, monkeypatch):
    """Run a test on the hand-written pair and on the expression for tracers."""
    if request.param == "traced":
        monkeypatch.setattr(module, "is_traced", lambda: True)
    return request.param


@pytest.mark.parametrize("chunk_size", [None, 1, 7, 16, 64])
@pytest.mark.parametrize("length", LENGTHS)
def test_sequence_form_equals_the_recurrence(length, chunk_size, form):
    """Guards F1."""
    inputs = draw(length=length, heads=5)
    expected = literal(**inputs)
    actual = chunk_gated_delta_rule(**inputs, output_final_state=True, chunk_size=chunk_size)
    assert actual[0].shape == expected[0].shape
    assert actual[1].shape == (2, 5, 4, 6)
    assert distance(actual, expected) < 1e-10


@pytest.mark.parametrize("length", LENGTHS)
def test_step_form_equals_the_recurrence(length):
    """Guards F1."""
    inputs = draw(length=length)
    actual = recurrent_gated_delta_rule(**inputs, output_final_state=True)
    assert distance(actual, literal(**inputs)) < 1e-12


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    heads=st.integers(1, 5),
    width=st.integers(1, 9),
    values=st.integers(1, 9),
    chunk_size=st.integers(1, 20),
    pairs=st.integers(1, 6),
    numbers=st.integers(1, 3000),
    normalize=st.booleans(),
)
def test_no_way_of_cutting_the_work_changes_the_result(
    batch, length, heads, width, values, chunk_size, pairs, numbers, normalize
):
    inputs = leaves(draw(batch, length, heads, width, values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_PAIRS", pairs)
        patch.setattr(module, "_CACHED_NUMBERS", numbers)
        patch.setattr(module, "_FEWEST_CHUNKS", 1)
        actual = chunk_gated_delta_rule(
            **inputs, output_final_state=True, chunk_size=chunk_size, use_qk_l2norm_in_kernel=normalize
        )
        weights = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape) for x in actual]
        actual_gradients = gradients(actual, inputs, weights)
    expected = recurrent_gated_delta_rule(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=normalize)
    assert distance(actual, expected) < 1e-10
    assert distance(actual_gradients, gradients(expected, inputs, weights)) < 1e-9


@pytest.mark.parametrize("normalize", [False, True])
def test_scale_and_normalisation_act_as_written(normalize, form):
    inputs = draw(length=21)
    expected = literal(**inputs, scale=0.3, normalize=normalize)
    for rule in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
        actual = rule(**inputs, scale=0.3, output_final_state=True, use_qk_l2norm_in_kernel=normalize)
        assert distance(actual, expected) < 1e-12


def test_state_is_returned_only_on_request():
    inputs = draw(length=5)
    for rule in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
        assert rule(**inputs)[1] is None


def test_given_state_is_left_as_it_is():
    inputs = draw(length=40)
    before = inputs["initial_state"].clone()
    for rule in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
        rule(**inputs, output_final_state=True)
        assert torch.equal(inputs["initial_state"], before)


@pytest.mark.parametrize("cuts", [(1,), (16, 17), (5, 40, 41), (64,)])
def test_a_sequence_in_pieces_equals_the_whole(cuts, form):
    inputs = draw(length=70)
    whole = chunk_gated_delta_rule(**inputs, output_final_state=True)
    state, outputs = inputs.pop("initial_state"), []
    for start, stop in pairwise((0, *cuts, 70)):
        piece = {name: x[:, start:stop] for name, x in inputs.items()}
        rule = recurrent_gated_delta_rule if stop - start == 1 else chunk_gated_delta_rule
        output, state = rule(**piece, initial_state=state, output_final_state=True)
        outputs.append(output)
    assert distance((torch.cat(outputs, 1), state), whole) < 1e-12


@pytest.mark.parametrize("chunk_size", [16, 256])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_gradients_equal_those_of_the_recurrence(length, chunk_size, form):
    """Guards F4 and F7: any length against any chunk size, head counts 3 and 5, with an initial state."""
    for heads in (3, 5):
        inputs = leaves(draw(length=length, heads=heads))
        actual = chunk_gated_delta_rule(**inputs, output_final_state=True, chunk_size=chunk_size)
        weights = [torch.randn_like(x) for x in actual]
        expected = gradients(literal(**inputs), inputs, weights)
        assert distance(gradients(actual, inputs, weights), expected) < 1e-10


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_gradients_pass_gradcheck(length, form):
    """Guards F7."""
    inputs = leaves(draw(1, length, 2, 3, 2))

    def run(*tensors):
        arguments = dict(zip(NAMES, tensors, strict=True))
        return chunk_gated_delta_rule(**arguments, output_final_state=True, use_qk_l2norm_in_kernel=True, chunk_size=2)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


def test_gradients_exist_without_an_initial_state_and_for_the_state_alone():
    """Guards F7."""
    inputs = leaves(draw(length=20))
    inputs.pop("initial_state")
    for part in (0, 1):
        actual = chunk_gated_delta_rule(**inputs, output_final_state=True, chunk_size=8)[part]
        expected = literal(**inputs)[part]
        weight = [torch.randn_like(actual)]
        used = inputs if part == 0 else {name: x for name, x in inputs.items() if name != "q"}
        assert distance(gradients([actual], used, weight), gradients([expected], used, weight)) < 1e-11


def test_the_layout_of_inputs_and_gradients_does_not_matter():
    """Guards F7: an expanded gradient, a transposed one, and inputs that are slices of one projection."""
    inputs = leaves(draw(length=19))
    expected = literal(**inputs)[0]
    actual = chunk_gated_delta_rule(**inputs)[0]
    tensors = list(inputs.values())
    for weight in (
        torch.ones(()).double().expand(expected.shape),
        torch.randn(expected.shape[::-1]).double().permute(3, 2, 1, 0),
    ):
        left = torch.autograd.grad(actual, tensors, weight, retain_graph=True)
        right = torch.autograd.grad(expected, tensors, weight, retain_graph=True)
        assert distance(left, right) < 1e-11
    fused = torch.randn(2, 19, 3 * (4 + 4 + 6)).double()
    q, k, v = fused.split((12, 12, 18), -1)
    q, k, v = q.unflatten(-1, (3, 4)), k.unflatten(-1, (3, 4)), v.unflatten(-1, (3, 6))
    gates = inputs["g"].detach(), inputs["beta"].detach()
    copies = chunk_gated_delta_rule(q.clone(), k.clone(), v.clone(), *gates, chunk_size=8)[0]
    assert torch.equal(chunk_gated_delta_rule(q, k, v, *gates, chunk_size=8)[0], copies)


def test_gradients_can_be_taken_of_some_inputs_only():
    inputs = draw(length=19)
    inputs["v"].requires_grad_()
    (actual,) = torch.autograd.grad(chunk_gated_delta_rule(**inputs)[0].sum(), inputs["v"])
    (expected,) = torch.autograd.grad(literal(**inputs)[0].sum(), inputs["v"])
    assert distance([actual], [expected]) < 1e-12


@pytest.mark.parametrize("rule", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
def test_second_derivatives_are_exact(rule):
    inputs = leaves(draw(1, 3, 1, 2, 2))

    def run(*tensors):
        return rule(**dict(zip(NAMES, tensors, strict=True)), output_final_state=True, use_qk_l2norm_in_kernel=True)

    assert torch.autograd.gradgradcheck(run, tuple(inputs.values()))


def test_no_tokens_hand_the_state_and_its_gradient_through():
    inputs = leaves(draw(length=0))
    output, state = chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert output.shape == (2, 0, 3, 6)
    weight = torch.randn_like(state)
    (grad,) = torch.autograd.grad((state * weight).sum() + output.sum(), inputs["initial_state"])
    assert torch.equal(state, inputs["initial_state"])
    assert torch.equal(grad, weight)


STRONG = [0.0, -1e-6, -1.0, -20.0, -88.0, -1000.0, -torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("decay", [*STRONG, "mixed"])
def test_any_log_decay_down_to_minus_infinity_gives_the_recurrence(decay, chunk_size, dtype, form):
    """Guards F2."""
    inputs = draw(length=130, heads=2, dtype=dtype)
    if decay == "mixed":
        index = torch.randint(len(STRONG), inputs["g"].shape, generator=torch.Generator().manual_seed(1))
        inputs["g"] = torch.tensor(STRONG, dtype=dtype)[index]
    else:
        inputs["g"].fill_(decay)
    inputs = leaves(inputs)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-10
    expected = recurrent_gated_delta_rule(
        **{name: x.double() for name, x in inputs.items()}, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    actual = chunk_gated_delta_rule(
        **inputs, output_final_state=True, use_qk_l2norm_in_kernel=True, chunk_size=chunk_size
    )
    assert all(x.isfinite().all() for x in actual)
    assert distance(actual, expected) < tolerance
    weights = [torch.randn_like(x) for x in expected]
    left, right = gradients(actual, inputs, weights), gradients(expected, inputs, weights)
    assert all(x.isfinite().all() for x in left)
    for name, x, y in zip(NAMES, left, right, strict=True):
        assert (x - y).abs().max() <= 10 * tolerance * max(1.0, y.abs().max().item()), name


def test_minus_infinity_forgets_exactly():
    inputs = leaves(draw(length=40))
    g = inputs["g"].detach().clone()
    g[:, 20] = -torch.inf
    g.requires_grad_()
    output, _ = chunk_gated_delta_rule(**{**inputs, "g": g}, chunk_size=16)
    grad_v, grad_g = torch.autograd.grad(output[:, 20:].sum(), (inputs["v"], g))
    assert grad_v[:, :20].count_nonzero() == 0
    assert grad_v[:, 20:].count_nonzero() > 0
    assert grad_g[:, 20].count_nonzero() == 0


def test_weak_decay_after_strong_decay_keeps_float32_accuracy():
    """Guards F2: in float32 the sum of log decays alone would lose what the weak ones add."""
    inputs = draw(length=64, heads=2, width=16, values=16, dtype=torch.float32)
    inputs["g"][:, :48], inputs["g"][:, 48:] = -30.0, -0.01
    actual = chunk_gated_delta_rule(**inputs, chunk_size=64)[0]
    expected = literal(**inputs)[0]
    assert (actual - expected).abs().max() < 1e-6 * expected.abs().max()


BOUNDARIES = [(0, 11, 18, 32), (0, 16, 32), (0, 1, 2, 2, 3, 32), (0, 0, 32, 32), (0, 32)]


@pytest.mark.parametrize("boundaries", BOUNDARIES, ids=str)
@pytest.mark.parametrize("chunk_size", [None, 4, 16])
def test_packed_documents_equal_separate_runs(boundaries, chunk_size, form):
    """Guards C1 and C3: outputs, states and gradients."""
    inputs = leaves(draw(1, 32, documents=len(boundaries) - 1))
    packed = {"cu_seqlens": torch.tensor(boundaries), "output_final_state": True}
    separate = []
    for document, (start, stop) in enumerate(pairwise(boundaries)):
        piece = {name: x[:, start:stop] for name, x in inputs.items()}
        piece["initial_state"] = inputs["initial_state"][document : document + 1]
        separate.append(recurrent_gated_delta_rule(**piece, output_final_state=True))
    expected = torch.cat([out for out, _ in separate], 1), torch.cat([state for _, state in separate])
    weights = [torch.randn_like(x) for x in expected]
    expected_gradients = gradients(expected, inputs, weights)
    for actual in (
        chunk_gated_delta_rule(**inputs, **packed, chunk_size=chunk_size),
        recurrent_gated_delta_rule(**inputs, **packed),
    ):
        assert distance(actual, expected) < 1e-10
        assert distance(gradients(actual, inputs, weights), expected_gradients) < 1e-10


def test_no_gradient_at_all_crosses_the_boundary_of_a_document():
    """Guards C1."""
    for boundaries in BOUNDARIES:
        if len(boundaries) == 2:
            continue
        inputs = leaves(draw(1, 32, documents=len(boundaries) - 1))
        output, _ = chunk_gated_delta_rule(**inputs, cu_seqlens=torch.tensor(boundaries), chunk_size=8)
        for start, stop in pairwise(boundaries):
            loss = output[:, start:stop].square().sum()
            for grad in torch.autograd.grad(loss, [inputs[name] for name in NAMES[:5]], retain_graph=True):
                assert grad[:, :start].count_nonzero() == 0
                assert grad[:, stop:].count_nonzero() == 0


def test_tokens_with_zero_gates_change_nothing():
    """Padding with g = 0 and beta = 0 leaves state and neighbours alone, wherever it stands."""
    inputs = draw(length=30)
    expected = chunk_gated_delta_rule(**inputs, output_final_state=True)
    padded = {name: inputs[name] for name in NAMES}
    for name in NAMES[:5]:
        x = inputs[name]
        noise = torch.zeros_like(x[:, :7]) if name in ("g", "beta") else torch.randn_like(x[:, :7])
        padded[name] = torch.cat([noise, x[:, :11], noise, x[:, 11:], noise], 1)
    output, state = chunk_gated_delta_rule(**padded, output_final_state=True, chunk_size=8)
    real = torch.cat([output[:, 7:18], output[:, 25:44]], 1)
    assert distance((real, state), expected) < 1e-12


def test_grouped_heads_equal_repeated_ones():
    inputs = leaves(draw(length=19, heads=6))
    narrow = {**inputs, "q": inputs["q"][:, :, :2], "k": inputs["k"][:, :, :2]}
    wide = {**inputs, "q": narrow["q"].repeat_interleave(3, 2), "k": narrow["k"].repeat_interleave(3, 2)}
    for rule in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
        left, right = rule(**narrow, output_final_state=True), rule(**wide, output_final_state=True)
        assert distance(left, right) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)]
)
def test_low_precision_inputs_are_computed_in_float32(dtype, tolerance):
    """Guards F1 and F13."""
    inputs = draw(length=65, width=16, values=32, dtype=dtype)
    inputs["initial_state"] = inputs["initial_state"].float()
    inputs["g"] = inputs["g"].float()
    expected = literal(**inputs, normalize=True)
    for rule in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
        arguments = leaves(inputs)
        actual = rule(**arguments, output_final_state=True, use_qk_l2norm_in_kernel=True)
        assert actual[0].dtype == dtype
        assert actual[1].dtype == torch.float32
        for x, y in zip(actual, expected, strict=True):
            assert (x - y).norm() < tolerance * y.norm()
        grads = torch.autograd.grad(actual[0].sum(), list(arguments.values()))
        assert [x.dtype for x in grads] == [x.dtype for x in inputs.values()]


@pytest.mark.parametrize("rule", [chunk_gated_delta_rule, recurrent_gated_delta_rule])
def test_autocast_does_not_lower_the_precision(rule, form):
    """Guards F13."""
    inputs = leaves(draw(length=40, width=16, values=16, dtype=torch.float32))
    expected, _ = rule(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        actual, _ = rule(**inputs)
    assert distance([actual], [expected]) < 1e-6
    # Under autocast torch lowers the precision of its own backward formulas; only the hand-written one is exempt.
    with torch.autocast("cpu", torch.bfloat16, enabled=rule is chunk_gated_delta_rule and form == "hand-written"):
        grads = torch.autograd.grad(actual.sum(), list(inputs.values()))
    assert distance(grads, torch.autograd.grad(expected.sum(), list(inputs.values()))) < 1e-5


def test_autocast_does_not_lower_the_precision_of_a_single_step():
    inputs = draw(length=1, width=16, values=16, dtype=torch.float32) | {"output_final_state": True}
    expected = recurrent_gated_delta_rule(**inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert distance(recurrent_gated_delta_rule(**inputs), expected) == 0


def test_transformers_own_function_gives_the_same():
    inputs = draw(length=150, heads=4, width=16, values=32, dtype=torch.float32)
    theirs = torch_chunk_gated_delta_rule(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        g=inputs["g"],
        beta=inputs["beta"],
        initial_state=inputs["initial_state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    ours = chunk_gated_delta_rule(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    assert distance(ours, theirs) < 1e-5


def test_compiled_equals_eager():
    """Guards F12."""
    inputs = leaves(draw(1, 33, 2, dtype=torch.float32))
    compiled = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)
    left = compiled(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    right = chunk_gated_delta_rule(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    weights = [torch.randn(x.shape).double() for x in left]
    assert distance(left, right) < 1e-5
    assert distance(gradients(left, inputs, weights), gradients(right, inputs, weights)) < 1e-4


def test_function_transforms_see_through_it():
    inputs = draw(4, 9, 2)
    together = chunk_gated_delta_rule(**inputs)[0]

    def alone(*tensors):
        return chunk_gated_delta_rule(**dict(zip(NAMES, (x[None] for x in tensors), strict=True)))[0][0]

    assert distance([torch.func.vmap(alone)(*inputs.values())], [together]) < 1e-12


def test_calls_share_no_buffers():
    first, second = draw(length=40, seed=1), draw(length=40, seed=2)
    output = chunk_gated_delta_rule(**first)[0]
    before = output.clone()
    chunk_gated_delta_rule(**second)
    assert torch.equal(output, before)


@pytest.mark.parametrize("length", [256, 1024])
def test_backward_keeps_no_more_than_the_inputs_twice_over(length):
    """Memory is linear in the length: what autograd holds is counted, tensor by tensor."""
    inputs = leaves(draw(1, length, 8, 64, 64, dtype=torch.float32))
    inputs.pop("initial_state")
    held = {}

    def count(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        chunk_gated_delta_rule(**inputs, chunk_size=32)
    own = sum(x.untyped_storage().nbytes() for x in inputs.values())
    assert sum(held.values()) <= 2 * own


def test_buffers_of_a_short_call_are_smaller_than_its_inputs(monkeypatch):
    spaces = []
    for name in ("forward", "backward"):
        kernel = importlib.import_module(f"loopergy.modeling.kernels.gated_delta_rule_{name}")

        class Counted(kernel.Workspace):
            def __init__(self, *args):
                super().__init__(*args)
                spaces.append(self)

        monkeypatch.setattr(kernel, "Workspace", Counted)
    inputs = leaves(draw(1, 512, 8, 64, 64, dtype=torch.float32))
    chunk_gated_delta_rule(**inputs)[0].sum().backward()
    own = sum(inputs[name].numel() for name in "qkv")
    assert len(spaces) == 2
    assert all(sum(buffer.numel() for buffer in space.buffers.values()) < own for space in spaces)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 17, 3, 5)}, r"`q` and `k` must be .* got q \(2, 17, 3, 4\), k \(2, 17, 3, 5\)"),
        ({"v": torch.zeros(2, 16, 3, 6)}, "`v`"),
        ({"g": torch.zeros(2, 17, 2)}, r"`g` and `beta` must be \(2, 17, 3\)"),
        ({"initial_state": torch.zeros(2, 3, 6, 4)}, r"`initial_state` must be \(2, 3, 4, 6\)"),
        ({"cu_seqlens": torch.tensor([0, 17])}, "batch size must be 1, got 2"),
    ],
    ids=["k", "v", "g", "state", "packed batch"],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    for rule in (chunk_gated_delta_rule, recurrent_gated_delta_rule):
        with pytest.raises(ValueError, match=message):
            rule(**{**draw(), **change})


def test_chunk_size_below_one_is_refused():
    with pytest.raises(ValueError, match="`chunk_size` must be at least 1, got 0"):
        chunk_gated_delta_rule(**draw(), chunk_size=0)
