# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What a model costs, from its config alone: parameters, cache bytes per loop and layer, arithmetic per token.

The model is built without memory for its weights and run on shapes, so that the numbers are those of the code.
"""

from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

import loopergy
from loopergy.conversion.report import number_ranges
from loopergy.loading import auto_class, model_config
from loopergy.modeling.learned_positions import WindowedGenerationMixin


@dataclass(frozen=True)
class SlotCost:
    """What one cache slot holds.

    Args:
        loop (`int`): pass of the stack that it belongs to, from 1; in a model of one repeated block, the step.
        layer (`int`): physical layer, from 0.
        mixer (`str`): what mixes tokens there.
        bytes_per_token (`int`): bytes that each cached token takes in the whole batch, as far as `window`.
        window (`int`, *optional*): tokens it keeps at most; all of them if None.
        fixed_bytes (`int`): bytes besides: a recurrent state, or averages of the blocks of the context asked for.
    """

    loop: int
    layer: int
    mixer: str
    bytes_per_token: int
    window: int | None
    fixed_bytes: int

    def bytes_at(self, context: int) -> int:
        """Return the bytes that it holds when `context` tokens are cached."""
        held = context if self.window is None else min(context, self.window)
        return self.fixed_bytes + self.bytes_per_token * held


@dataclass(frozen=True)
class ModelCost:
    """What a model costs at one context length and batch size.

    Args:
        parameters (`int`): in all, shared ones once.
        embedding_parameters (`int`): those of the token embedding and of a head of its own.
        slots (`list[SlotCost]`): the cache.
        context, batch (`int`): tokens per sequence, sequences.
        dtype (`torch.dtype`): type of weights, keys and values.
        flops (`int`): multiplications and additions of the matrix products that decode one token of one sequence at
            this context.
    """

    parameters: int
    embedding_parameters: int
    slots: list[SlotCost]
    context: int
    batch: int
    dtype: torch.dtype
    flops: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.parameters * self.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache of the whole batch."""
        return sum(slot.bytes_at(self.context) for slot in self.slots)


def find_config(name: str) -> Any:
    """Return the config of a preset of ours, a folder, a `config.json` or a Hub id.

    Raises:
        ValueError, OSError: for a name that is none of these, or as [`model_config`].
    """
    if not Path(name).exists():
        for family, *_ in loopergy.FAMILIES:
            with suppress(ValueError):
                return family.from_preset(name)
    return model_config(name)


def model_cost(
    config: Any, context: int | None = None, batch: int = 1, dtype: torch.dtype | None = None, **run: Any
) -> ModelCost:
    """Compute what a language model costs, with the head that its config was saved with.

    Args:
        config: any config of a causal language model, of one without a head, or of a sequence classifier.
        context (`int`, *optional*): cached tokens per sequence; by default 4,096, or all but one of the positions of
            a model that has learned fewer.
        batch (`int`): sequences.
        dtype (*optional*): type of weights and cache; the config's, or bfloat16 where it names none.
        **run: arguments of the forward, such as `num_loops`.

    Returns:
        [`ModelCost`].

    Raises:
        ValueError: if `context` or `batch` is below 1, or learned positions end before `context`.
    """
    if (context is not None and context < 1) or batch < 1:
        raise ValueError(f"context={context}, batch={batch}: both must be at least 1.")
    dtype = getattr(config, "dtype", None) if dtype is None else dtype
    dtype = torch.bfloat16 if dtype is None else dtype
    with torch.device("meta"), torch.no_grad():
        model = auto_class(config).from_config(config, dtype=dtype).eval()
        # A classifier has no cache of its own.
        decoder = model if model.can_generate() else model.base_model
        context = _context(config, context)
        token = torch.zeros(batch, 1, dtype=torch.long)
        cache = decoder(token, use_cache=True, **run).cache
        slots = _slots(config, cache.layers, context)
        flops = _decode_flops(decoder, token, cache, context, run) // batch
    heads = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = {id(part.weight): part for part in heads if part is not None}
    return ModelCost(
        parameters=model.num_parameters(),
        embedding_parameters=sum(part.weight.numel() for part in embeddings.values()),
        slots=slots,
        context=context,
        batch=batch,
        dtype=dtype,
        flops=flops,
    )


def _context(config: Any, asked: int | None) -> int:
    """Return the context to compute for, with room for one token more in a table of positions."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    room = config.max_position_embeddings - 1 if issubclass(kind, WindowedGenerationMixin) else None
    if asked is None:
        return 4096 if room is None else min(room, 4096)
    if room is not None and asked > room:
        raise ValueError(
            f"context={asked}: the learned positions of this model end at max_position_embeddings={room + 1}, so that "
            f"one token more can be decoded behind at most {room}."
        )
    return asked


def _slots(config: Any, layers: list[Any], context: int) -> list[SlotCost]:
    """Measure the slots of a cache that holds one token."""
    visits = [(1, layer) for layer in range(len(layers))]
    if hasattr(config, "slot_plan"):
        table = config.slot_plan(-(-len(layers) // config.num_hidden_layers)).table
        first = {}
        for loop, row in enumerate(table):
            for layer, slot in enumerate(row):
                first.setdefault(slot, (loop + 1, layer))
        visits = [first[slot] for slot in range(len(layers))]
    elif config.model_type == "nrgpt":
        visits = [(slot + 1, 0) for slot in range(len(layers))]
    mixers = getattr(config, "layer_mixers", None)
    costs = []
    for (loop, index), layer in zip(visits, layers, strict=True):
        per_token = _size([getattr(layer, "keys", None), getattr(layer, "values", None)])
        states = [
            tensor for kind in ("conv_states", "recurrent_states") for tensor in getattr(layer, kind, {}).values()
        ]
        pooling = getattr(layer, "pooling", None)
        fixed = _size(states) if pooling is None else pooling.complete(context) * per_token
        mixer = mixers[index] if mixers else _only_mixer(config)
        costs.append(SlotCost(loop, index, mixer, per_token, getattr(layer, "sliding_window", None), fixed))
    return costs


def _only_mixer(config: Any) -> str:
    """Name the mixer of a family whose layers are all alike."""
    return "energy" if config.model_type in ("cem_llama", "nrgpt") else "full"


def _size(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


def _decode_flops(model: Any, token: torch.Tensor, cache: Any, context: int, run: dict) -> int:
    """Count the arithmetic of decoding one more token, with the one cached token repeated `context` times."""
    from torch.utils.flop_counter import FlopCounterMode

    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            window = getattr(layer, "sliding_window", None)
            held = context if window is None else min(context, max(window - 1, 1))
            layer.keys, layer.values = (part.expand(-1, -1, held, -1) for part in (layer.keys, layer.values))
            if window is not None:
                layer.cumulative_length = context
    with FlopCounterMode(display=False) as counter:
        model(token, cache=cache, use_cache=True, **run)
    return counter.get_total_flops()


def describe_cost(name: str, config: Any, cost: ModelCost) -> list[tuple[str, str]]:
    """Return (name, value) rows: sizes, layout, cache and arithmetic."""
    loops = getattr(config, "num_loops", 1)
    mixers = getattr(config, "layer_mixers", None) or [_only_mixer(config)] * config.num_hidden_layers
    kind = ", ".join([config.model_type, *(config.architectures or ())[:1]])
    runs = [(mixer, len(list(group))) for mixer, group in groupby(mixers)]
    layers = f"{config.num_hidden_layers}, applied in {loops} loop{'s' if loops > 1 else ''}"
    if config.model_type == "nrgpt":
        layers = f"1 block, applied {config.num_hidden_layers} times"
    packed = "" if getattr(config, "quantization_config", None) is None else " before packing; on disk they are packed"
    rows = [
        ("model", f"{name} ({kind})"),
        ("parameters", f"{cost.parameters:,}, of which embeddings {cost.embedding_parameters:,}"),
        ("layers", layers),
        ("mixers", ", ".join(mixer if count == 1 else f"{mixer} x {count}" for mixer, count in runs)),
        ("trained context", f"{config.max_position_embeddings:,} tokens"),
        ("weights", f"{format_bytes(cost.weight_bytes)} in {str(cost.dtype).removeprefix('torch.')}{packed}"),
        ("cache", f"{format_bytes(cost.cache_bytes)} at {cost.context:,} tokens, batch {cost.batch}"),
        ("arithmetic", f"{cost.flops / 1e9:,.3g} GFLOP to decode one token there"),
    ]
    return rows


def slot_table(config: Any, cost: ModelCost) -> list[str]:
    """Return one line for each set of equal cache slots: which loops and layers, mixer, bytes."""
    word = "steps" if config.model_type == "nrgpt" else "loops"
    layers: dict[tuple, list[int]] = {}
    for slot in cost.slots:
        kind = (slot.mixer, slot.bytes_per_token, slot.window, slot.fixed_bytes)
        layers.setdefault((slot.loop, *kind), []).append(slot.layer)
    loops: dict[tuple, list[int]] = {}
    for (loop, *kind), members in layers.items():
        loops.setdefault((*kind, tuple(members)), []).append(loop)
    lines = []
    for (mixer, per_token, window, fixed, members), passes in loops.items():
        slot = SlotCost(passes[0], members[0], mixer, per_token, window, fixed)
        note = f"window {window:,}" if window else "whatever the length" if fixed and not per_token else ""
        each, count = slot.bytes_at(cost.context), len(passes) * len(members)
        lines.append(
            f"  {word} {number_ranges(passes):<8} layers {number_ranges(members):<24} {mixer:<9}"
            f"{format_bytes(each):>12} each, {format_bytes(each * count)} in all{', ' if note else ''}{note}"
        )
    return lines


def format_bytes(count: int) -> str:
    """Write a number of bytes in the largest unit that it fills at least once."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} bytes"


def describe_installation() -> list[tuple[str, str]]:
    """Return (name, value) rows: versions, device, kernels."""

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    names = ("torch", "transformers", "flash-linear-attention", "triton", "accelerate", "peft", "datasets")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return [
        ("loopergy", loopergy.__version__),
        *((name, installed(name)) for name in names),
        ("device", device),
        ("kernels", str(loopergy.kernel_backend())),
    ]
