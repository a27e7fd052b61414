# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Losses: hand numbers, autograd of the plain form in float64, and memory that does not grow with the tokens."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loopergy.distill.distill import DistillConfig
from loopergy.distill.losses import (
    alignment_loss,
    divergence,
    linear_cross_entropy,
    linear_kl,
    loop_weights,
    shift_targets,
)

OPTIONS = {
    "forward": {},
    "forward-theta2": {"temperature": 2.0},
    "reverse": {"direction": "reverse"},
    "js": {"direction": "js", "temperature": 1.5},
    "topk-tail": {"top_k": 5},
    "topk": {"top_k": 5, "tail_bucket": False},
    "topk-tail-reverse": {"top_k": 4, "direction": "reverse"},
}


def _case(tokens=13, hidden=6, teacher_hidden=8, vocab=19, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return make(tokens, hidden), make(vocab, hidden), make(tokens, teacher_hidden), make(vocab, teacher_hidden)


def _logits(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_divergences_of_two_three_way_distributions_equal_the_hand_numbers():
    """Guards H8."""
    teacher, student = _logits(0.5, 0.25, 0.25), _logits(0.25, 0.25, 0.5)
    # forward: 0.5 ln 2 + 0 - 0.25 ln 2; the same pair mirrored gives the same reverse value, so use a skewed pair too.
    assert divergence(student, teacher).item() == pytest.approx(0.25 * math.log(2), abs=1e-12)
    student = _logits(0.8, 0.1, 0.1)
    forward = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.25 / 0.1)
    reverse = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.1 / 0.25)
    js = 0.5 * (0.5 * math.log(0.5 / 0.65) + 0.5 * math.log(0.25 / 0.175)) + 0.5 * (
        0.8 * math.log(0.8 / 0.65) + 0.2 * math.log(0.1 / 0.175)
    )
    assert divergence(student, teacher).item() == pytest.approx(forward, abs=1e-12)
    assert divergence(student, teacher, "reverse").item() == pytest.approx(reverse, abs=1e-12)
    assert divergence(student, teacher, "js").item() == pytest.approx(js, abs=1e-12)
    assert divergence(teacher, student, "js").item() == pytest.approx(js, abs=1e-12)
    assert divergence(teacher, student).item() == pytest.approx(reverse, abs=1e-12)


def test_temperature_divides_the_logits_and_multiplies_the_value_by_its_square():
    """Guards H8."""
    student, teacher = torch.randn(4, 7, dtype=torch.float64), torch.randn(4, 7, dtype=torch.float64)
    expected = 4 * divergence(student / 2, teacher / 2)
    torch.testing.assert_close(divergence(student, teacher, temperature=2.0), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk_size", [1, 7, 512])
def test_chunked_kl_equals_the_plain_form_in_value_and_gradients(chunk_size, options):
    """Guards H6."""
    student, head, teacher, teacher_head = _case()
    mask = torch.ones(13, dtype=torch.bool)
    mask[[2, 9]] = False
    plain_inputs = [student.clone().requires_grad_(), head.clone().requires_grad_()]
    logits = plain_inputs[0] @ plain_inputs[1].t()
    plain = divergence(logits[mask], (teacher @ teacher_head.t())[mask], **options).sum() / 5
    plain.backward()
    inputs = [student.clone().requires_grad_(), head.clone().requires_grad_()]
    value = linear_kl(*inputs, teacher, teacher_head, mask, num_items=5, chunk_size=chunk_size, **options)
    (3 * value).backward()
    torch.testing.assert_close(value, plain, rtol=0, atol=1e-10)
    for ours, theirs in zip(inputs, plain_inputs, strict=True):
        torch.testing.assert_close(ours.grad, 3 * theirs.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk_size", [4, 512])
@pytest.mark.parametrize("direction", ["forward", "reverse", "js"])
def test_the_kl_of_liger_kernel_equals_ours_in_value_and_gradients(direction, chunk_size):
    pytest.importorskip("liger_kernel", reason="pip install --no-deps liger-kernel")
    student, head, teacher, teacher_head = (x.float() for x in _case())
    mask = torch.ones(13, dtype=torch.bool)
    mask[[2, 9]] = False
    options = {"direction": direction, "temperature": 1.7, "num_items": 5, "chunk_size": chunk_size}
    results = []
    for backend in ("torch", "liger"):
        inputs = [student.clone().requires_grad_(), head.clone().requires_grad_()]
        value = linear_kl(*inputs, teacher, teacher_head, mask, backend=backend, **options)
        (3 * value).backward()
        with torch.no_grad():
            unlearnt = linear_kl(*inputs, teacher, teacher_head, mask, backend=backend, **options)
        results.append([value.detach(), unlearnt, *(x.grad for x in inputs)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    nothing = linear_kl(*inputs, teacher, teacher_head, torch.zeros_like(mask), backend="liger")
    nothing.backward()
    assert nothing == 0


def test_gradient_of_the_full_kl_is_student_minus_teacher_over_the_token_count():
    student = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, 9, dtype=torch.float64)
    identity = torch.eye(9, dtype=torch.float64)
    linear_kl(student, identity, teacher, identity).backward()
    torch.testing.assert_close(
        student.grad, (student.softmax(-1) - teacher.softmax(-1)).detach() / 6, atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_kl_is_zero_for_equal_logits_and_positive_otherwise_and_ignores_a_constant_per_token(options):
    student, teacher = torch.randn(8, 11, dtype=torch.float64), torch.randn(8, 11, dtype=torch.float64)
    shift = torch.randn(8, 1, dtype=torch.float64)
    assert divergence(teacher + shift, teacher, **options).abs().max() < 1e-12
    value = divergence(student, teacher, **options)
    assert (value > 0).all()
    torch.testing.assert_close(divergence(student + shift, teacher - shift, **options), value, rtol=0, atol=1e-12)


def test_top_k_over_the_whole_vocabulary_is_the_full_kl_and_otherwise_ignores_the_rest_unless_a_tail_is_kept():
    student, teacher = torch.randn(8, 11, dtype=torch.float64), torch.randn(8, 11, dtype=torch.float64)
    for tail in (True, False):
        full = divergence(student, teacher, top_k=11, tail_bucket=tail)
        torch.testing.assert_close(full, divergence(student, teacher), rtol=0, atol=0)
    outside = teacher < teacher.topk(3).values[:, -1:]
    moved = torch.where(outside, student + 2.0, student)
    kept = [divergence(s, teacher, top_k=3, tail_bucket=False) for s in (student, moved)]
    torch.testing.assert_close(kept[0], kept[1], rtol=0, atol=1e-12)
    tails = [divergence(s, teacher, top_k=3, tail_bucket=True) for s in (student, moved)]
    assert (tails[0] - tails[1]).abs().min() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_losses_run_in_the_wider_of_their_dtype_and_float32(dtype):
    student, head, teacher, teacher_head = _case(dtype=dtype)
    student.requires_grad_()
    value = linear_kl(student, head, teacher, teacher_head)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    value.backward()
    assert student.grad.dtype == dtype
    exact = divergence((student @ head.t()).detach().double(), (teacher @ teacher_head.t()).double()).mean()
    assert value.item() == pytest.approx(exact.item(), rel=1e-5)
    labels = torch.arange(13)
    assert linear_cross_entropy(student, head, labels).dtype == value.dtype
    assert alignment_loss(student, student.detach() + 1).dtype == value.dtype


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_chunked_cross_entropy_equals_torch_and_skips_minus_100(chunk_size):
    hidden, head, *_ = _case()
    targets = torch.randint(0, 19, (13,))
    targets[::3] = -100
    inputs = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    plain = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    value = linear_cross_entropy(*inputs, targets, chunk_size=chunk_size)
    expected = torch.nn.functional.cross_entropy(plain[0] @ plain[1].t(), targets, ignore_index=-100)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(inputs, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_two_micro_batches_of_one_and_three_tokens_give_the_mean_per_token_and_not_per_batch():
    """Guards H3: per-token KL 1 and 3, 3, 3 average to 2.5, not to 2."""
    # With two outcomes, logit pair (a, 0) against (b, 0): solve for the student that is 1 and 3 nats away.
    teacher = torch.tensor([[0.0, 0.0]], dtype=torch.float64)

    def student_at(nats):
        low, high = 0.0, 50.0
        for _ in range(200):
            middle = (low + high) / 2
            far = divergence(torch.tensor([[middle, 0.0]], dtype=torch.float64), teacher).item() > nats
            low, high = (low, middle) if far else (middle, high)
        return torch.tensor([[low, 0.0]], dtype=torch.float64)

    identity = torch.eye(2, dtype=torch.float64)
    batches = [(student_at(1.0), 1), (student_at(3.0).expand(3, 2), 3)]
    total = sum(linear_kl(s, identity, teacher.expand(n, 2), identity, num_items=4) for s, n in batches)
    assert total.item() == pytest.approx(2.5, abs=1e-9)
    tensor_count = torch.tensor(4)
    total = sum(linear_kl(s, identity, teacher.expand(n, 2), identity, num_items=tensor_count) for s, n in batches)
    assert total.item() == pytest.approx(2.5, abs=1e-9)


@pytest.mark.parametrize("form", ["mse", "l2norm"])
def test_pads_leave_every_loss_unchanged_and_a_batch_of_pads_gives_zero(form):
    """Guards H4."""
    student, head, teacher, teacher_head = _case(tokens=10)
    padded_student = torch.cat([student, 100 * torch.randn(10, 6, dtype=torch.float64)])
    padded_teacher = torch.cat([teacher, 100 * torch.randn(10, 8, dtype=torch.float64)])
    mask = torch.arange(20) < 10
    targets = torch.randint(0, 19, (20,)).masked_fill(~mask, -100)
    pairs = [
        (
            linear_kl(student, head, teacher, teacher_head),
            linear_kl(padded_student, head, padded_teacher, teacher_head, mask),
        ),
        (linear_cross_entropy(student, head, targets[:10]), linear_cross_entropy(padded_student, head, targets)),
        (
            alignment_loss(student, student * 2, form=form),
            alignment_loss(padded_student, padded_student * 2, mask, form),
        ),
    ]
    for plain, padded in pairs:
        torch.testing.assert_close(padded, plain, rtol=0, atol=1e-9)
    nothing = torch.zeros(20, dtype=torch.bool)
    padded_student.requires_grad_()
    losses = [
        linear_kl(padded_student, head, padded_teacher, teacher_head, nothing),
        linear_cross_entropy(padded_student, head, torch.full((20,), -100)),
        alignment_loss(padded_student, padded_student.detach() * 2, nothing, form),
    ]
    for loss in losses:
        assert loss.item() == 0.0
        (gradient,) = torch.autograd.grad(loss, padded_student)
        assert gradient.abs().max() == 0


def test_alignment_loss_has_hand_numbers_and_no_nan_gradient_where_both_agree():
    student = torch.tensor([[[3.0, 4.0], [1.0, 1.0]]], requires_grad=True)
    teacher = torch.tensor([[[0.0, 0.0], [1.0, 1.0]]])
    # Token 1 differs by (3, 4): squared norm 25, so 25 / 2 and 5 / sqrt(2); token 2 by 0; mean over 2 tokens.
    assert alignment_loss(student, teacher).item() == pytest.approx(6.25)
    value = alignment_loss(student, teacher, form="l2norm")
    assert value.item() == pytest.approx(2.5 / math.sqrt(2))
    value.backward()
    assert torch.isfinite(student.grad).all()
    with pytest.raises(ValueError, match=r"mse.*l2norm.*'huber'"):
        alignment_loss(student, teacher, form="huber")


def test_differing_vocabularies_are_an_error_and_truncation_renormalises():
    """Guards H5."""
    hidden = torch.randn(5, 6, dtype=torch.float64)
    teacher_head = torch.randn(104, 6, dtype=torch.float64)
    head = teacher_head[:96].clone()
    with pytest.raises(ValueError, match=r"104.*96.*truncate_vocabulary=True"):
        linear_kl(hidden, head, hidden, teacher_head)
    assert linear_kl(hidden, head, hidden, teacher_head, truncate_vocabulary=True).abs().item() < 1e-12
    with pytest.raises(ValueError, match=r"96.*smaller.*104"):
        linear_kl(hidden, teacher_head, hidden, head, truncate_vocabulary=True)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"direction": "up"}, "'up'"),
        ({"temperature": 0.0}, "above 0"),
        ({"top_k": 0}, "at least 1"),
        ({"backend": "cuda"}, "'torch', 'liger'.*'cuda'"),
        ({"backend": "liger", "top_k": 8}, "top_k=None"),
    ],
)
def test_unusable_options_of_the_kl_name_what_is_allowed(option, message):
    with pytest.raises(ValueError, match=message):
        linear_kl(*_case(), **option)


def test_a_missing_liger_kernel_is_named_before_anything_is_trained(monkeypatch, tmp_path):
    monkeypatch.setattr("loopergy.distill.losses.is_liger_kernel_available", lambda: False)
    with pytest.raises(ImportError, match="pip install liger-kernel"):
        DistillConfig(str(tmp_path), kl_backend="liger")


class _LargestTensor(TorchDispatchMode):
    """Record the largest tensor any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if torch.is_tensor(value):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_tensor_of_all_logits_is_ever_made(options):
    """Guards H6: nothing larger than a chunk of logits, the head or the hidden states."""
    tokens, vocab = 512, 256
    student, head, teacher, teacher_head = _case(tokens, 8, 8, vocab, torch.float32)
    student.requires_grad_()
    head.requires_grad_()
    with _LargestTensor() as largest:
        linear_kl(student, head, teacher, teacher_head, chunk_size=16, **options).backward()
        linear_cross_entropy(student, head, torch.randint(0, vocab, (tokens,)), chunk_size=16).backward()
    assert largest.elements <= max(16 * (vocab + 1), tokens * 8)


def test_targets_are_the_next_tokens_and_the_last_position_has_none():
    labels = torch.tensor([[1, 2, -100, 4]])
    assert shift_targets(labels).tolist() == [[2, -100, 4, -100]]


@pytest.mark.parametrize("final_mass", [1.0, 0.9])
@pytest.mark.parametrize("ramp_frac", [0.0, 0.1])
@pytest.mark.parametrize("num_loops", [1, 2, 4])
def test_loop_weights_sum_to_one_at_every_step(num_loops, ramp_frac, final_mass):
    for step in range(101):
        weights = loop_weights(step / 100, num_loops, ramp_frac=ramp_frac, final_mass=final_mass)
        assert sum(weights) == pytest.approx(1.0, abs=1e-12)
        assert min(weights) >= 0
        if num_loops == 1:
            assert weights == [1.0]


def test_loop_weights_go_from_uniform_to_the_final_loop_alone():
    assert loop_weights(0.0, 4) == [0.25] * 4
    assert loop_weights(0.29, 4) == [0.25] * 4
    assert loop_weights(0.35, 4) == pytest.approx([0.125, 0.125, 0.125, 0.625])
    assert loop_weights(0.4, 4) == [0.0, 0.0, 0.0, 1.0]
    assert loop_weights(1.0, 4, final_mass=0.7) == pytest.approx([0.1, 0.1, 0.1, 0.7])
    assert loop_weights(0.0, 4, ramp_frac=0.2) == [1.0, 0.0, 0.0, 0.0]
    assert loop_weights(0.1, 4, ramp_frac=0.2) == pytest.approx([0.625, 0.125, 0.125, 0.125])


@pytest.mark.parametrize(
    "wrong",
    [{"uniform_frac": 0.9, "anneal_frac": 0.2}, {"final_mass": 0.1}, {"ramp_frac": 0.5}, {"anneal_frac": -0.1}],
)
def test_schedules_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        loop_weights(0.5, 4, **wrong)
