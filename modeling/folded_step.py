# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
r"""NRGPT's steps with consecutive matrices multiplied together, for decoding token by token.

All that a step multiplies with g (the heads' queries, \(W_1\), \(W_2^T\)) is one matrix, and all that it multiplies
with \(\eta\) in the end is another, \(\eta\) and the factor of the feed-forward included. A step is then two products
and the attention between them, whatever the number of heads.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache

from loopergy.modeling.token_energies import Neighbours, is_plain

FOLD_AFTER = 8  # single tokens; folding costs about as much as decoding a few of them


class FoldedSteps:
    """Take all steps of one new token per row, once enough single tokens have come to make folding pay off.

    It holds products of the block's weights and so must not outlive a change of them. Each `generate` call makes its
    own and hands it to every forward of that call, so nothing is kept on the model and calls in several threads do
    not meet.

    Args:
        block ([`NRGPTBlock`]): the block.
    """

    def __init__(self, block: Any):
        self.block = block
        self.calls = 0
        self.into: tuple[torch.Tensor, torch.Tensor] | None = None
        self.out_of: tuple[torch.Tensor, torch.Tensor] | None = None

    def __deepcopy__(self, memo: dict) -> "FoldedSteps":
        """Return one of the same block: transformers copies the arguments of a call for a draft model."""
        return FoldedSteps(self.block)

    def fold_for(self, cache: Any) -> None:
        """Fold now if the cache has a fixed size: its forward may be compiled, and cannot count tokens then."""
        wanted = self.into is None and getattr(cache, "is_compileable", False) and not self.block.training
        if wanted and _foldable(self.block):
            self._fold()

    def apply_to(self, hidden_states: torch.Tensor) -> bool:
        """Whether to take the steps folded; folds the weights when it is time."""
        if hidden_states.shape[1] != 1 or self.block.training or torch.is_grad_enabled():
            return False
        if torch.compiler.is_compiling():  # counting calls would make each of them a new program
            return self.into is not None
        self.calls += 1
        if self.calls < FOLD_AFTER or not _foldable(self.block):
            return False
        if self.into is None:
            self._fold()
        return True

    def _fold(self) -> None:
        block, attn = self.block, self.block.attn
        heads = attn.k_proj.weight.unflatten(0, (attn.num_heads, -1)).transpose(1, 2)
        pulled = heads if attn.alpha is None else heads * attn.alpha[:, None, None]
        matrix, bias, out_of, constant = block.ff.folded()
        heads = heads.flatten(0, 1)
        into = torch.cat((heads * attn.beta, matrix)).t().contiguous()
        out_of = torch.cat((-pulled.flatten(0, 1), block.scale_ff * out_of))
        self.out_of = -block.scaled(block.scale_ff * constant), -block.scaled(out_of)
        self.into = torch.cat((bias.new_zeros(len(heads)), bias)), into

    def descend(
        self, hidden_states: torch.Tensor, neighbours: Neighbours, cache: Cache | None, steps: int
    ) -> torch.Tensor:
        """Take the steps and return the last state.

        Args:
            hidden_states (`torch.Tensor` of shape (B, 1, D)): state of the new token.
            neighbours ([`Neighbours`]): who attends to whom.
            cache (`Cache`, *optional*): one slot per step.
            steps (`int`): how many steps.
        """
        block, x = self.block, hidden_states[:, 0]
        nothing = x[:, None, None, :0]
        for step in range(steps):
            g = block.norm(x)
            memory = g[:, None]
            if cache is not None:
                memory = cache.update(memory[:, None], nothing, step)[0][:, 0]
            update = self._update(g, memory, neighbours)
            x = x + (block.tangent(update, x) if block.tangent_projection else update)
        return x[:, None]

    def _update(self, g: torch.Tensor, memory: torch.Tensor, neighbours: Neighbours) -> torch.Tensor:
        """Return what a step adds to the state (B, D), before any projection; `memory` is (B, L, D)."""
        assert self.into is not None
        assert self.out_of is not None
        (batch, size), heads = g.shape, self.block.attn.num_heads
        if neighbours.visible is None and neighbours.exclude_self:
            memory = memory[:, :-1]
        mapped = torch.addmm(self.into[0], g, self.into[1])
        queries = mapped[:, : heads * size].view(batch, heads, size)
        scores = torch.bmm(queries, memory.transpose(1, 2))
        if neighbours.visible is not None:
            scores = scores.masked_fill(~neighbours.visible[:, 0], -torch.inf)
        pulled = torch.bmm(scores.softmax(dim=-1), memory)
        if neighbours.lonely is not None:
            pulled = pulled.masked_fill(neighbours.lonely[:, 0], 0)
        hidden = self.block.ff.hidden(mapped[:, heads * size :])
        return torch.addmm(self.out_of[0], torch.cat((pulled.view(batch, -1), *hidden), dim=-1), self.out_of[1])


def _foldable(block: Any) -> bool:
    """Whether multiplying the weights together loses no precision and skips no hook or adapter."""
    if block.config._attn_implementation != "sdpa" or block.scale_ff.dtype not in (torch.float32, torch.float64):
        return False
    linears = [block.attn.k_proj, *block.ff.children()]
    linears += [block.eta] if block.config.eta_type == "full" else []
    parts = (block, block.attn, block.ff, block.eta)
    watched = any(module._forward_hooks or module._forward_pre_hooks for module in parts)
    return all(map(is_plain, linears)) and not watched


__all__ = ["FoldedSteps"]
