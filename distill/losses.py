# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Every loss of the three stages, as pure functions that return tensors.

| function                   | stage  | formula                                                                     |
|----------------------------|--------|-----------------------------------------------------------------------------|
| ``alignment_loss``         | align  | mean over tokens of ``||t - s||^2 / d``, or of ``||t - s|| / sqrt(d)``       |
| ``linear_kl``              | distil | ``theta^2 * mean KL(softmax(z_t / theta), softmax(z_s / theta))``            |
| ``linear_cross_entropy``   | extend | mean of ``-log softmax(z_s)[next token]``                                   |
| ``linear_token_losses``    | gate   | ``-log softmax(z)[next token]`` of every token, to be weighed               |
| ``loop_weights``           | distil | the share of every loop in the sum of the per-loop KLs                      |

The ``linear_*`` losses take hidden states and head weights instead of logits. They visit the tokens in chunks and
compute the gradient of a chunk while its logits are still there (``linear_token_losses`` computes them again), so no
``[batch, length, vocabulary]`` tensor ever exists and memory does not grow with the number of tokens.

**One counting rule.** A position counts if it has a target: its next token's label is not -100 (`shift_targets`). Pads
never have one. A loss is the sum over counting positions divided by ``num_items``: the number of counting positions of
the *whole* optimizer step, over all accumulated micro batches and processes. So the way a step is cut does not matter.

Source: forward KL, full vocabulary, temperature 1 and the unsquared alignment loss follow arXiv 2512.20569 (hybrid
distillation); the loop schedule follows the three-stage conversion of LT2 (arXiv 2605.20670).
"""

import math
from typing import Literal, get_args

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.utils import is_liger_kernel_available

from loopergy.modeling.building_blocks import at_least_float32
from loopergy.training.data import IGNORE

# Elements of one chunk of logits: 64 MiB in float32, large enough for full-speed matrix products.
CHUNK_ELEMENTS = 2**24

Direction = Literal["forward", "reverse", "js"]
KLBackend = Literal["torch", "liger"]
AlignmentForm = Literal["mse", "l2norm"]


def shift_targets(labels: torch.Tensor) -> torch.Tensor:
    """Return for every position the token it must predict.

    Args:
        labels (`torch.Tensor` of shape `[batch, length]`): Token ids, -100 where a token is no target.

    Returns:
        `torch.Tensor` of shape `[batch, length]`: `labels` moved one to the left; the last position has -100.
    """
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def _denominator(count: int, num_items: int | float | torch.Tensor | None) -> int | float | torch.Tensor:
    """Divide by what the caller counted over the whole step, else by this batch's own count, never by zero."""
    if num_items is None:
        return max(count, 1)
    return num_items.clamp(min=1) if torch.is_tensor(num_items) else max(num_items, 1)


def alignment_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    mask: torch.Tensor | None = None,
    form: AlignmentForm = "mse",
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Compare two hidden states token by token.

    `mse`: mean over tokens of `||t - s||^2 / d`. `l2norm`: mean over tokens of `||t - s|| / sqrt(d)`, not squared.

    Args:
        student (`torch.Tensor` of shape `[batch, length, hidden]`): Gets the gradient.
        teacher (`torch.Tensor` of shape `[batch, length, hidden]`): Constant.
        mask (`torch.Tensor` of shape `[batch, length]`, *optional*): True where a token counts. Default: everywhere.
        form (`str`, defaults to `"mse"`): `"mse"` or `"l2norm"`.
        num_items (`int`, *optional*): Divisor. Default: the number of tokens that count here.

    Returns:
        `torch.Tensor`: A scalar, at least float32; 0 if no token counts.

    Source: mean squared error as in the first stage of LT2's conversion; `l2norm` as in arXiv 2512.20569.
    """
    if form not in get_args(AlignmentForm):
        raise ValueError(f"`form` must be one of {get_args(AlignmentForm)}, got {form!r}.")
    difference = at_least_float32(student) - at_least_float32(teacher.detach())
    if mask is not None:
        difference = difference[mask]
    squared = difference.square().mean(-1)
    if form == "l2norm":
        # The square root has no gradient at 0, where student and teacher agree: leave those tokens out of the graph.
        positive = squared > 0
        squared = torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), squared)
    return squared.sum() / _denominator(squared.numel(), num_items)


def _outcomes(
    student: torch.Tensor, teacher: torch.Tensor, top_k: int | None, tail_bucket: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits `[tokens, vocabulary]` into log-probabilities of the outcomes that are compared."""
    if top_k is None or top_k >= teacher.shape[-1]:
        return student.log_softmax(-1), teacher.log_softmax(-1)
    index = teacher.topk(top_k, dim=-1).indices
    chosen = [logits.gather(-1, index) for logits in (student, teacher)]
    if tail_bucket:
        tails = [logits.scatter(-1, index, -math.inf).logsumexp(-1, keepdim=True) for logits in (student, teacher)]
        chosen = [torch.cat(pair, dim=-1) for pair in zip(chosen, tails, strict=True)]
    return chosen[0].log_softmax(-1), chosen[1].log_softmax(-1)


def divergence(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    direction: Direction = "forward",
    temperature: float = 1.0,
    top_k: int | None = None,
    tail_bucket: bool = True,
) -> torch.Tensor:
    """Compute the divergence of each token from logits; the plain form that the chunked one is tested against.

    With `p` the teacher's and `q` the student's distribution at the given temperature and `m = (p + q) / 2`:
    `forward` is `KL(p || q) = sum p log(p / q)`, `reverse` is `KL(q || p)`, `js` is `KL(p || m) / 2 + KL(q || m) / 2`.
    The value is multiplied by `temperature^2`, so that gradients keep their size.

    Args:
        student_logits (`torch.Tensor` of shape `[tokens, vocabulary]`): Gets the gradient.
        teacher_logits (`torch.Tensor` of shape `[tokens, vocabulary]`): Same vocabulary.
        direction (`str`, defaults to `"forward"`): `"forward"`, `"reverse"` or `"js"`.
        temperature (`float`, defaults to 1.0): Divides both logits.
        top_k (`int`, *optional*): Compare only the teacher's `k` likeliest tokens. Default: the full vocabulary.
        tail_bucket (`bool`, defaults to `True`): With `top_k`, put all other tokens into one more outcome. Without it
            both distributions are renormalised over the `k` tokens, and what the student does elsewhere is free.

    Returns:
        `torch.Tensor` of shape `[tokens]`.
    """
    student, teacher = (at_least_float32(logits) / temperature for logits in (student_logits, teacher_logits))
    log_q, log_p = _outcomes(student, teacher, top_k, tail_bucket)
    if direction == "forward":
        value = (log_p.exp() * (log_p - log_q)).sum(-1)
    elif direction == "reverse":
        value = (log_q.exp() * (log_q - log_p)).sum(-1)
    else:
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        value = 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1)
    return value * temperature**2


def _forward_kl_with_gradient(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the full-vocabulary forward KL and give its gradient `theta * (q - p)`, with three buffers of logits."""
    log_q = (student_logits / temperature).log_softmax(-1)
    log_ratio = (teacher_logits / temperature).log_softmax(-1)
    p = log_ratio.exp()
    log_ratio.sub_(log_q)
    total = torch.dot(log_ratio.flatten(), p.flatten()) * temperature**2
    return total, log_q.exp_().sub_(p).mul_(temperature)


class _ChunkedHead(torch.autograd.Function):
    """Sum a loss of `hidden @ head^T` over tokens, chunk by chunk, with the gradient computed on the way."""

    @staticmethod
    def forward(ctx, hidden, head, chunk_loss, chunk_size, grad_enabled):  # type: ignore[override]
        wants_hidden, wants_head = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        wide = torch.promote_types(head.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_head = torch.zeros_like(head, dtype=wide) if wants_head else None
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            logits = at_least_float32(hidden[rows] @ head.t())
            value, gradient = chunk_loss(logits, rows, wants_hidden or wants_head)
            total += value
            if gradient is None:
                continue
            gradient = gradient.to(head.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ head
            if grad_head is not None and grad_head.dtype == head.dtype:
                grad_head.addmm_(gradient.t(), hidden[rows])
            elif grad_head is not None:
                grad_head += gradient.t() @ hidden[rows]
        ctx.grads = (grad_hidden, grad_head.to(head.dtype) if grad_head is not None else None)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):  # type: ignore[override]
        grads = tuple(g if g is None else g * grad_output.to(g.dtype) for g in ctx.grads)
        ctx.grads = None
        return (*grads, None, None, None)


def _check_vocabulary(student_head: torch.Tensor, teacher_head: torch.Tensor, truncate: bool) -> torch.Tensor:
    """Return the teacher's head over the student's vocabulary, or say why there is none."""
    student, teacher = student_head.shape[0], teacher_head.shape[0]
    if student == teacher:
        return teacher_head
    if teacher < student:
        raise ValueError(
            f"The teacher's vocabulary ({teacher}) is smaller than the student's ({student}): the teacher says "
            f"nothing about the last {student - teacher} tokens. Resize the student with "
            f"`resize_token_embeddings({teacher})`."
        )
    if not truncate:
        raise ValueError(
            f"The teacher has {teacher} tokens, the student {student}. If the teacher's last {teacher - student} rows "
            f"are padding, pass `truncate_vocabulary=True`: they are cut off and the teacher is renormalised."
        )
    return teacher_head[:student]


def _rows(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return hidden.flatten(0, -2) if mask is None else hidden[mask]


def default_chunk_size(vocab_size: int) -> int:
    """Return how many tokens share one chunk of logits, so that the chunk has about 2^24 elements."""
    return max(16, CHUNK_ELEMENTS // vocab_size)


def check_kl_options(direction: str, temperature: float, top_k: int | None, backend: str = "torch") -> None:
    """Raise `ValueError` for options that [`linear_kl`] does not take, `ImportError` for a missing liger-kernel."""
    if direction not in get_args(Direction):
        raise ValueError(f"`direction` must be one of {get_args(Direction)}, got {direction!r}.")
    if temperature <= 0:
        raise ValueError(f"`temperature` must be above 0, got {temperature}.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"`top_k` must be at least 1, or None for the full vocabulary; got {top_k}.")
    if backend not in get_args(KLBackend):
        raise ValueError(f"The KL's backend must be one of {get_args(KLBackend)}, got {backend!r}.")
    if backend == "liger" and top_k is not None:
        raise ValueError(f"liger-kernel compares the full vocabulary: take top_k=None, not {top_k}, or backend torch.")
    if backend == "liger" and not is_liger_kernel_available():
        raise ImportError(
            "The KL's backend 'liger' needs liger-kernel: pip install liger-kernel (without a GPU: add --no-deps)."
        )


def _liger_divergence(
    student_rows: torch.Tensor,
    student_head: torch.Tensor,
    teacher_rows: torch.Tensor,
    teacher_head: torch.Tensor,
    direction: str,
    temperature: float,
    chunk_size: int,
) -> torch.Tensor:
    """Sum `divergence` over the tokens by liger-kernel's fused form; arguments as in [`linear_kl`]."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta={"forward": 0.0, "js": 0.5, "reverse": 1.0}[direction],
        temperature=temperature,
        compiled=student_rows.is_cuda,
        chunk_size=chunk_size,
    )
    # Its mean runs over the targets that are not -100, of which it uses nothing else.
    every = torch.zeros(len(student_rows), dtype=torch.long, device=student_rows.device)
    mean = loss(student_rows, student_head, teacher_rows, teacher_head, every)
    return mean * len(student_rows) * temperature**2


def linear_kl(
    student_hidden: torch.Tensor,
    student_head: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_head: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    direction: Direction = "forward",
    temperature: float = 1.0,
    top_k: int | None = None,
    tail_bucket: bool = True,
    truncate_vocabulary: bool = False,
    num_items: int | float | torch.Tensor | None = None,
    chunk_size: int | None = None,
    backend: KLBackend = "torch",
) -> torch.Tensor:
    """Compute the divergence between teacher and student from hidden states, without ever holding all logits.

    Equal to `divergence(student_hidden @ student_head^T, teacher_hidden @ teacher_head^T).sum() / num_items`, value
    and gradient, for any chunk size. Its gradient with respect to the student's logits is
    `theta * (q - p) / num_items` for the default direction. The gradient is computed in the forward pass; there is no
    second derivative.

    Args:
        student_hidden (`torch.Tensor` of shape `[..., hidden]`): Last hidden states after the final norm.
        student_head (`torch.Tensor` of shape `[vocabulary, hidden]`): Weight of the student's head.
        teacher_hidden (`torch.Tensor` of shape `[..., teacher hidden]`): Constant; its hidden size may differ.
        teacher_head (`torch.Tensor` of shape `[vocabulary, teacher hidden]`): Constant.
        mask (`torch.Tensor` of shape `[...]`, *optional*): True where a token counts. Default: everywhere.
        direction (`str`, defaults to `"forward"`): `"forward"`, `"reverse"` or `"js"`, see `divergence`.
        temperature (`float`, defaults to 1.0): Divides both logits; the value is multiplied by its square.
        top_k (`int`, *optional*): Compare only the teacher's `k` likeliest tokens. Default: the full vocabulary.
        tail_bucket (`bool`, defaults to `True`): With `top_k`, keep one more outcome for all other tokens.
        truncate_vocabulary (`bool`, defaults to `False`): Cut a larger teacher vocabulary to the student's.
        num_items (`int`, *optional*): Divisor. Default: the number of tokens that count here. 1 gives the plain sum.
        chunk_size (`int`, *optional*): Tokens a chunk. Default: about 2^24 logits a chunk.
        backend (`str`, defaults to `"torch"`): `"liger"` trains with liger-kernel's fused form, compiled on a GPU. It
            takes the full vocabulary alone, and its softmax is in the dtype of the states where autocast is off.

    Returns:
        `torch.Tensor`: A scalar, at least float32; 0 if no token counts.

    Raises:
        ValueError: An unknown direction or backend, a temperature or `top_k` that is not positive, or vocabularies
            that differ.
        ImportError: Backend `"liger"` without liger-kernel.
    """
    check_kl_options(direction, temperature, top_k, backend)
    teacher_head = _check_vocabulary(student_head, teacher_head, truncate_vocabulary).detach()
    student_rows, teacher_rows = _rows(student_hidden, mask), _rows(teacher_hidden.detach(), mask)
    chunk_size = chunk_size or default_chunk_size(student_head.shape[0])
    count = _denominator(student_rows.shape[0], num_items)
    trains = torch.is_grad_enabled() and (student_rows.requires_grad or student_head.requires_grad)
    if backend == "liger" and trains:
        pair = (student_rows, student_head, teacher_rows, teacher_head)
        return _liger_divergence(*pair, direction, temperature, chunk_size) / count
    analytic = direction == "forward" and (top_k is None or top_k >= student_head.shape[0])

    def chunk_loss(logits: torch.Tensor, rows: slice, wants_gradient: bool):
        teacher_logits = at_least_float32(teacher_rows[rows] @ teacher_head.t())
        if analytic and wants_gradient:
            return _forward_kl_with_gradient(logits, teacher_logits, temperature)
        with torch.set_grad_enabled(wants_gradient):
            logits.requires_grad_(wants_gradient)
            value = divergence(logits, teacher_logits, direction, temperature, top_k, tail_bucket).sum()
        return value.detach(), torch.autograd.grad(value, logits)[0] if wants_gradient else None

    total = _ChunkedHead.apply(student_rows, student_head, chunk_loss, chunk_size, torch.is_grad_enabled())
    return total / count


def linear_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    *,
    num_items: int | float | torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute the cross-entropy from hidden states, without ever holding all logits.

    Args:
        hidden (`torch.Tensor` of shape `[..., hidden]`): Last hidden states after the final norm.
        head (`torch.Tensor` of shape `[vocabulary, hidden]`): Weight of the head.
        targets (`torch.Tensor` of shape `[...]`): The token each position must predict, -100 for none.
        num_items (`int`, *optional*): Divisor. Default: the number of targets here. 1 gives the plain sum.
        chunk_size (`int`, *optional*): Tokens a chunk. Default: about 2^24 logits a chunk.

    Returns:
        `torch.Tensor`: A scalar, at least float32; 0 if there is no target.
    """
    mask = targets != IGNORE
    rows, wanted = hidden[mask], targets[mask]

    def chunk_loss(logits: torch.Tensor, part: slice, wants_gradient: bool):
        index = wanted[part, None]
        log_q = logits.log_softmax(-1)
        value = -log_q.gather(-1, index).sum()
        if not wants_gradient:
            return value, None
        gradient = log_q.exp_()
        return value, gradient.scatter_add_(-1, index, gradient.new_full(index.shape, -1.0))

    chunk_size = chunk_size or default_chunk_size(head.shape[0])
    total = _ChunkedHead.apply(rows, head, chunk_loss, chunk_size, torch.is_grad_enabled())
    return total / _denominator(rows.shape[0], num_items)


def linear_token_losses(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, *, chunk_size: int | None = None
) -> torch.Tensor:
    """Compute the cross-entropy of every token from hidden states, without ever holding all logits.

    For losses that weigh tokens by something that is trained too. The backward pass computes the logits of a chunk a
    second time.

    Args:
        hidden (`torch.Tensor` of shape `[..., hidden]`): Last hidden states after the final norm.
        head (`torch.Tensor` of shape `[vocabulary, hidden]`): Weight of the head.
        targets (`torch.Tensor` of shape `[...]`): The token each position must predict, -100 for none.
        chunk_size (`int`, *optional*): Tokens a chunk. Default: about 2^24 logits a chunk.

    Returns:
        `torch.Tensor` of shape `[...]`, at least float32: in nats, 0 where there is no target.
    """

    def of_chunk(rows: torch.Tensor, head: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(at_least_float32(rows @ head.t()), wanted, reduction="none")

    mask = targets != IGNORE
    chunk_size = chunk_size or default_chunk_size(head.shape[0])
    pairs = zip(hidden[mask].split(chunk_size), targets[mask].split(chunk_size), strict=True)
    parts = [checkpoint(of_chunk, rows, head, wanted, use_reentrant=False) for rows, wanted in pairs]
    losses = hidden.new_zeros(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    return losses.masked_scatter(mask, torch.cat(parts))


def loop_weights(
    progress: float,
    num_loops: int,
    *,
    uniform_frac: float = 0.3,
    anneal_frac: float = 0.1,
    final_mass: float = 1.0,
    ramp_frac: float = 0.0,
) -> list[float]:
    """Return the share of every loop's KL at one moment of the training; the shares always sum to 1.

    | progress                       | weights                                                           |
    |--------------------------------|-------------------------------------------------------------------|
    | `< ramp_frac`                  | from the first loop alone linearly to uniform                     |
    | `< uniform_frac`               | uniform, `1 / num_loops`                                          |
    | `< uniform_frac + anneal_frac` | linearly from uniform to the last row                             |
    | after                          | `final_mass` on the last loop, the rest shared by the other loops |

    Args:
        progress (`float`): Share of the training steps done, 0 to 1.
        num_loops (`int`): Number of loops. With one loop the only weight is 1.
        uniform_frac (`float`, defaults to 0.3): Progress at which the weights begin to move to the last loop.
        anneal_frac (`float`, defaults to 0.1): Progress this move takes.
        final_mass (`float`, defaults to 1.0): Weight of the last loop at the end; 1 makes it the only one.
        ramp_frac (`float`, defaults to 0.0): Progress of the start that grows from the first loop to all loops.

    Returns:
        `list[float]`: One weight a loop.

    Source: LT2's conversion trains on every loop first, on the final loop after.
    """
    if num_loops < 1:
        raise ValueError(f"`num_loops` must be at least 1, got {num_loops}.")
    if min(uniform_frac, anneal_frac, ramp_frac) < 0 or not ramp_frac <= uniform_frac <= 1 - anneal_frac + 1e-9:
        raise ValueError(
            "`loop_weights` needs 0 <= ramp_frac <= uniform_frac and uniform_frac + anneal_frac <= 1, got "
            f"ramp_frac={ramp_frac}, uniform_frac={uniform_frac}, anneal_frac={anneal_frac}."
        )
    if num_loops == 1:
        return [1.0]
    if not 1.0 / num_loops - 1e-9 <= final_mass <= 1.0:
        raise ValueError(f"`final_mass` must lie between 1 / num_loops = {1 / num_loops:.4g} and 1, got {final_mass}.")
    uniform = [1.0 / num_loops] * num_loops
    first = [1.0] + [0.0] * (num_loops - 1)
    last = [(1.0 - final_mass) / (num_loops - 1)] * (num_loops - 1) + [final_mass]
    if progress < ramp_frac:
        start, end, share = first, uniform, progress / ramp_frac
    elif progress < uniform_frac:
        return uniform
    elif progress < uniform_frac + anneal_frac:
        start, end, share = uniform, last, (progress - uniform_frac) / anneal_frac
    else:
        return last
    return [a + (b - a) * share for a, b in zip(start, end, strict=True)]
