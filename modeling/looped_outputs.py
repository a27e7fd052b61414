# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What looped models return beside the usual: the state after every loop, and the distribution over exits."""

from dataclasses import dataclass

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from loopergy.modeling.building_blocks import at_least_float32


@dataclass
class LoopedModelOutputWithPast(BaseModelOutputWithPast):
    """Outputs of a looped base model.

    Args:
        last_hidden_state (`torch.Tensor` of shape (batch, length, hidden_size)): normed state after the last loop, or
            of the loop at which each token left.
        loop_hidden_states (`tuple(torch.Tensor)`, with `output_loop_hidden_states=True`): normed state after each
            loop.
        exit_pdf (`torch.Tensor` of shape (batch, length, loops), with `output_loop_hidden_states=True` and an exit
            gate): probability of leaving after each loop, in float32 at least.
    """

    loop_hidden_states: tuple[torch.Tensor, ...] | None = None
    exit_pdf: torch.Tensor | None = None


@dataclass
class LoopedCausalLMOutputWithPast(CausalLMOutputWithPast):
    """Outputs of a looped language model.

    Args:
        loss (`torch.Tensor`, with `labels`): next-token cross-entropy.
        logits (`torch.Tensor` of shape (batch, length, vocab_size)): of the loop, or mixture of loops, that was asked
            for.
        loop_hidden_states (`tuple(torch.Tensor)`): as in [`LoopedModelOutputWithPast`].
        loop_logits (`tuple(torch.Tensor)`, with `output_loop_logits=True`): logits after each loop.
        exit_pdf (`torch.Tensor` of shape (batch, length, loops)): as in [`LoopedModelOutputWithPast`].
    """

    loop_hidden_states: tuple[torch.Tensor, ...] | None = None
    loop_logits: tuple[torch.Tensor, ...] | None = None
    exit_pdf: torch.Tensor | None = None


@dataclass
class LT2ModelOutputWithPast(LoopedModelOutputWithPast):
    """Outputs of the LT2 base model: those of a looped model, and the indexers' divergence.

    Args:
        indexer_divergence (`torch.Tensor` of shape (batch, length), in training with a loss on the indexer, or when
            asked for): KL(attention || indexer) per token, mean over the visits of `dsa` layers, 0 at padding.
    """

    indexer_divergence: torch.Tensor | None = None


@dataclass
class LT2CausalLMOutputWithPast(LoopedCausalLMOutputWithPast):
    """Outputs of the LT2 language model: those of a looped language model, and the indexers' divergence.

    Args:
        indexer_divergence (`torch.Tensor` of shape (batch, length)): as in [`LT2ModelOutputWithPast`]; its mean over
            the tokens that predict a label, times `dsa_indexer_loss_weight`, is part of the loss.
    """

    indexer_divergence: torch.Tensor | None = None


def exit_distribution(gate_logits: torch.Tensor) -> torch.Tensor:
    r"""Turn the exit gate's logits into a distribution over loops.

    With \(\lambda_t = \sigma(z_t)\): \(p_t = \lambda_t \prod_{s<t} (1 - \lambda_s)\) for all but the last loop, which
    takes the rest, so that the probabilities sum to one.

    Args:
        gate_logits (`torch.Tensor` of shape (..., loops)): z, one per loop.

    Returns:
        `torch.Tensor` of shape (..., loops), in float32 at least: in bfloat16 a cumulated probability can round to 1
        loops too early.

    Source: Ouro, arXiv 2510.25741, section 3.2.
    """
    leave = at_least_float32(gate_logits).sigmoid()
    stay = torch.cumprod(1 - leave[..., :-1], dim=-1)
    stay = torch.cat((torch.ones_like(leave[..., :1]), stay), dim=-1)
    return torch.cat((leave[..., :-1] * stay[..., :-1], stay[..., -1:]), dim=-1)


def mix_loops(loop_hidden_states: tuple[torch.Tensor, ...], exit_pdf: torch.Tensor) -> torch.Tensor:
    r"""Average the states after each loop by exit probability: \(\sum_t p_t h_t\).

    The head is linear, so its output on this is the mixture of the loops' logits, without ever holding those.

    Args:
        loop_hidden_states: T tensors of shape (batch, length, hidden_size).
        exit_pdf (`torch.Tensor` of shape (batch, length, T)).

    Returns:
        `torch.Tensor` of shape (batch, length, hidden_size), in the type of the states.
    """
    mixed = torch.zeros_like(loop_hidden_states[0], dtype=exit_pdf.dtype)
    for loop, hidden_states in enumerate(loop_hidden_states):
        mixed = torch.addcmul(mixed, exit_pdf[..., loop, None], hidden_states.to(exit_pdf.dtype))
    return mixed.to(loop_hidden_states[0].dtype)


def mean_divergence(
    divergence: torch.Tensor, counted: torch.Tensor, items: torch.Tensor | int | None, per_row: bool = False
) -> torch.Tensor:
    """Average the indexers' divergence over what the loss beside it averages over.

    A sum over this batch, divided by the items of the whole step: those of the parts of a batch then add up to that of
    the batch, however it was cut. So sum and count must be of the same things, which are tokens that predict a label
    for a language model (a prompt without labels takes no part), and sequences for a classifier.

    Args:
        divergence (`torch.Tensor` of shape (batch, length)).
        counted (`torch.BoolTensor` of shape (batch, length)): which tokens take part.
        items (`torch.Tensor` or `int`, *optional*): tokens that take part, or sequences, in the whole step; those of
            this batch by default.
        per_row (`bool`): average over the tokens of each row first, and count rows.

    Returns:
        `torch.Tensor` without dimensions.
    """
    counted = counted.to(divergence.device)
    sums, counts = divergence.masked_fill(~counted, 0).sum(dim=-1), counted.sum(dim=-1)
    if per_row:
        sums, counts = sums / counts.clamp(min=1), torch.ones_like(counts)
    if items is None:
        items = counts.sum()
    return sums.sum() / (items.to(divergence.device) if isinstance(items, torch.Tensor) else items)
