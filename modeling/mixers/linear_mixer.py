# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What all mixers with a recurrent state share: padding, packed documents, the short convolution and the cache.

A mixer says by five small methods what is its own: what enters the convolution (`streams`), what the recurrence gets
(`arguments`), the recurrence over sequences (`run`) and for one token (`step`), and how its outputs are projected back
(`project`).

Shapes: B batch, S new tokens, D hidden size, H heads, K key width, V value width, C channels of the convolution.
"""

import math
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks

from loopergy.modeling.kernels.precision import own_precision
from loopergy.modeling.kernels.short_convolution import short_convolution

Arguments = dict[str, torch.Tensor | None]


class LinearMixer(nn.Module):
    """Mix tokens by a recurrent state of fixed size, in time linear in the length.

    Attributes:
        convolutions (`tuple[str, ...]`): names of the depthwise convolutions whose channels, in this order, are the
            streams.
        conv_size (`int`): their width, 0 without.
        silu_streams (`bool`): whether streams go through SiLU, with or without convolution.
    """

    convolutions: ClassVar[tuple[str, ...]] = ("q_conv1d", "k_conv1d", "v_conv1d")
    silu_streams: ClassVar[bool] = True
    conv_size: int = 0

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        # The weights are used without calling the modules that hold them, which offloading has to be told.
        hooked = force_accelerate_hooks(list(cls.convolutions))
        # Wrapped once: what a subclass of a subclass inherits has been wrapped already.
        cls._convolve, cls._convolve_step = hooked(LinearMixer._convolve), hooked(LinearMixer._convolve_step)

    def streams(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Project the input (..., D); return the streams (..., C), and anything else the other methods need."""
        raise NotImplementedError

    def arguments(
        self, streams: torch.Tensor, rest: Any, x: torch.Tensor, position_ids: torch.Tensor | None
    ) -> Arguments:
        """Return what `run` gets by name: q, k, v, gates; heads in the second to last dimension of q, k, v.

        Args:
            streams: (..., C), after convolution and SiLU.
            rest: as `streams` returned it.
            x: (..., D), the input.
            position_ids: (...), where the caller gave them.
        """
        raise NotImplementedError

    def run(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the recurrence to sequences; arguments and results as in `loopergy.modeling.kernels`."""
        raise NotImplementedError

    def step(self, state: torch.Tensor, streams: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Advance the state (B, H, K, V) by one token, in place; return the output (B, H, V)."""
        raise NotImplementedError

    def project(self, output: torch.Tensor, streams: torch.Tensor, rest: Any, x: torch.Tensor) -> torch.Tensor:
        """Norm, gate and project the heads' outputs (..., H, V) to (..., D)."""
        raise NotImplementedError

    def init_bare_parameters(self) -> None:
        """Initialise the parameters that lie in no submodule."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        slot: int = 0,
        cu_seqlens: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Mix the new tokens with each other and with the cached state.

        Args:
            hidden_states (`torch.Tensor` of shape (B, S, D)).
            attention_mask (`torch.Tensor` of shape (B, S), *optional*): 0 at padding, wherever it lies. Real tokens
                then see, and the state then holds, what they would without the padding.
            cache, slot: where the state of this visit is kept.
            cu_seqlens (`torch.LongTensor` of shape (documents + 1,), *optional*): document boundaries in the
                flattened batch; each document starts from a zero state.
            position_ids (`torch.LongTensor` of shape (B or 1, S), *optional*): for mixers with rotary positions.

        Returns:
            output of shape (B, S, D), and `None` in the place of attention weights.
        """
        batch, length, _ = hidden_states.shape
        state = None if cache is None else cache.get_recurrent_state(slot)
        if position_ids is not None:
            position_ids = position_ids.expand(batch, length)
        if cache is not None and state is not None and length == 1 and attention_mask is None and in_place(state):
            return self._one_token(hidden_states, cache, slot, state, position_ids), None
        real = order = None
        if attention_mask is not None:
            real = attention_mask.to(torch.bool)
            hidden_states = hidden_states.masked_fill(~real[..., None], 0)
        if cu_seqlens is not None:
            hidden_states = hidden_states.reshape(1, batch * length, -1)
            real = None if real is None else real.reshape(1, -1)
            position_ids = None if position_ids is None else position_ids.reshape(1, -1)
        elif real is not None:
            hidden_states, real, order = real_tokens_first(hidden_states, real)
            position_ids = None if position_ids is None else position_ids.gather(1, order)

        streams, rest = self.streams(hidden_states)
        if self.conv_size:
            streams = self._convolve(streams, real, cache, slot, cu_seqlens)
        elif self.silu_streams:
            streams = nn.functional.silu(streams)
        arguments = self.arguments(streams, rest, hidden_states, position_ids)
        if real is not None:
            arguments = _neutral_at_padding(arguments, real)
        output, state = self.run(
            **arguments, initial_state=state, output_final_state=cache is not None, cu_seqlens=cu_seqlens
        )
        if cache is not None and state is not None:
            cache.update_recurrent_state(state, slot, num_tokens=length)

        output = self.project(output, streams, rest, hidden_states)
        if order is not None:
            output = torch.empty_like(output).scatter_(1, order[..., None].expand_as(output), output)
        return output.reshape(batch, length, -1), None

    def _one_token(
        self,
        hidden_states: torch.Tensor,
        cache: Cache,
        slot: int,
        state: torch.Tensor,
        position_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Do what `forward` does, for one token (B, 1, D) on a filled cache, in few operations."""
        x = hidden_states[:, 0]
        streams, rest = self.streams(x)
        streams = self._convolve_step(streams, cache, slot) if self.conv_size else streams
        streams = nn.functional.silu(streams, inplace=True) if self.silu_streams else streams
        arguments = self.arguments(streams, rest, x, None if position_ids is None else position_ids[:, 0])
        with own_precision(state):
            output = self.step(state, streams, **arguments)
        cache.update_recurrent_state(state, slot, num_tokens=1)
        return self.project(output.to(x.dtype), streams, rest, x)[:, None]

    def _filter(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight (C, width) and the bias (C,) of all convolutions together."""
        modules = [getattr(self, name) for name in self.convolutions]
        if len(modules) == 1:
            return modules[0].weight.squeeze(1), modules[0].bias
        return torch.cat([module.weight for module in modules]).squeeze(1), None

    def _convolve_step(self, streams: torch.Tensor, cache: Cache, slot: int) -> torch.Tensor:
        """Convolve one token (B, C) with the cached columns, and update them."""
        weight, bias = self._filter()
        cache.update_conv_state(streams[..., None], slot, conv_kernel_size=self.conv_size)
        # Read from where they are kept: what the update returns is a column wider, and no longer lies together.
        columns: Any = cache.get_conv_state(slot)
        output = (columns[..., -self.conv_size :] * weight).sum(-1)
        return output if bias is None else output + bias

    def _convolve(
        self,
        streams: torch.Tensor,
        real: torch.Tensor | None,
        cache: Cache | None,
        slot: int,
        cu_seqlens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Convolve (B, S, C) and apply SiLU, continuing from the cached columns and updating them."""
        weight, bias = self._filter()
        past = None if cache is None else cache.get_conv_state(slot)
        output = short_convolution(streams, weight, bias, past, cu_seqlens)
        if cache is not None:
            columns = streams.transpose(1, 2)
            left = columns.new_zeros(*columns.shape[:2], self.conv_size) if past is None else past
            columns = torch.cat((left, columns), dim=-1)
            if real is None:
                columns = columns[..., -self.conv_size :]
            else:
                last = real.sum(dim=1)[:, None] + torch.arange(self.conv_size, device=streams.device)
                columns = columns.gather(-1, last[:, None].expand(-1, columns.shape[1], -1))
            cache.update_conv_state(columns, slot)
        return output


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return (..., heads * width) as (..., heads, width)."""
    return x.unflatten(-1, (count, -1))


def gated_output(output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return the heads' normed outputs (..., H, V) times the SiLU of a gate (..., H * V), as (..., H * V)."""
    return (output * nn.functional.silu(heads(gate, output.shape[-2]))).flatten(-2)


def depthwise(channels: int, size: int, bias: bool = False) -> nn.Conv1d:
    """Build a convolution with one filter per channel."""
    return nn.Conv1d(channels, channels, size, groups=channels, bias=bias)


def in_place(state: torch.Tensor) -> bool:
    """Whether the state may be written in place: not tracked, not locked, and no better kernel on the device."""
    tracked = torch.is_grad_enabled() or torch.compiler.is_compiling()
    return not tracked and state.device.type != "cuda" and state.is_inference() == torch.is_inference_mode_enabled()


def real_tokens_first(
    hidden_states: torch.Tensor, real: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Move padding after the real tokens of each row, so that nothing lies between them or before the state.

    Returns the reordered states, the mask in the new order, and the old index of each new place.
    """
    order = real.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    hidden_states = hidden_states.gather(1, order[..., None].expand_as(hidden_states))
    return hidden_states, real.gather(1, order), order


def _neutral_at_padding(arguments: Arguments, real: torch.Tensor) -> Arguments:
    """Let padding neither decay the state nor write to it: log decays and keys are 0 there."""
    neutral = dict(arguments)
    for name in ("g", "k"):
        value = arguments.get(name)
        if value is not None:
            neutral[name] = value.masked_fill(~real.view(*real.shape, *[1] * (value.dim() - 2)), 0)
    return neutral


@torch.no_grad()
def draw_log_rates(parameter: nn.Parameter, low: float, high: float) -> None:
    """Draw `log U(low, high)`, in float32, so that it is finite under any default type."""
    rates = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
    init.copy_(parameter, rates.uniform_(max(low, 1e-4), high).log())


@torch.no_grad()
def draw_time_steps(parameter: nn.Parameter) -> None:
    """Draw `softplus^-1` of steps log-uniform in [0.001, 0.1], in float32."""
    step = torch.empty(parameter.shape, device=parameter.device, dtype=torch.float32)
    step = step.uniform_(math.log(1e-3), math.log(1e-1)).exp().clamp(min=1e-4)
    init.copy_(parameter, step + torch.log(-torch.expm1(-step)))
