# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What a weight map is made of: its rules, the facts that they are made for, and how a rule makes its tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loopergy.configuration.configuration_lt2 import LT2Config

WITH_SHORT_CONV = ("gdn", "kda", "deltanet")


@dataclass(frozen=True)
class Rule:
    """One line of a weight map.

    Args:
        target (`str`): Name of the student's tensor.
        source (`str`, `tuple[str, ...]` or `None`): Name of the teacher's tensor, or names of several that it is made
            of; `None` for a fresh one.
        transform (`str`): A key of `TRANSFORMS` (`mixer_starts.py`) for tensors that come from the teacher, a key of
            `FRESH` for fresh ones.
    """

    target: str
    source: str | tuple[str, ...] | None
    transform: str = "copy"

    @property
    def fresh(self) -> bool:
        """Say whether the tensor is new rather than read from the teacher."""
        return self.source is None

    @property
    def sources(self) -> tuple[str, ...]:
        """Name all tensors of the teacher that it is made of."""
        return () if self.source is None else (self.source,) if isinstance(self.source, str) else self.source


@dataclass(frozen=True)
class MapFacts:
    """What the rules need to know about an architecture, read from the student's config.

    Args:
        mixers (`tuple[str, ...]`): Mixer of each physical layer.
        norms (`tuple[str, ...]`): Names of the norms of a layer.
        attention_bias (`bool`): Whether q, k, v, o have biases.
        mlp_bias (`bool`): Whether gate, up, down have biases.
        early_exit_gate (`bool`): Whether there is an exit gate.
        tied (`bool`): Whether the head is the embedding.
        num_key_value_groups (`int`): Query heads per key/value head.
        head_dim (`int`): Size of a head.
        short_convs (`frozenset[str]`): Mixers that have short convolutions.
        gdn_use_gate (`bool`): Whether GDN layers have an output gate.
        lightning_indexer (`bool`): Whether DSA layers have DeepSeek's indexer.
        dsa_latent_dim (`int`): Width of the latent of DSA layers.
        initializer_range (`float`): Standard deviation of fresh projections.
    """

    mixers: tuple[str, ...]
    norms: tuple[str, ...]
    attention_bias: bool
    mlp_bias: bool
    early_exit_gate: bool
    tied: bool
    num_key_value_groups: int
    head_dim: int
    short_convs: frozenset[str]
    gdn_use_gate: bool
    lightning_indexer: bool
    dsa_latent_dim: int
    initializer_range: float

    @classmethod
    def from_config(cls, config: LT2Config) -> "MapFacts":
        """Read the facts from an `LT2Config`."""
        pre = ("input_layernorm", "post_attention_layernorm")
        sandwich = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
        return cls(
            mixers=tuple(config.layer_mixers),
            norms=sandwich if config.block_style == "sandwich" else pre,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
            early_exit_gate=config.early_exit_gate,
            tied=config.tie_word_embeddings,
            num_key_value_groups=config.num_attention_heads // (config.num_key_value_heads or 1),
            head_dim=config.head_dim or 0,
            short_convs=frozenset(name for name in WITH_SHORT_CONV if getattr(config, f"{name}_use_short_conv")),
            gdn_use_gate=config.gdn_use_gate,
            lightning_indexer=config.dsa_indexer == "deepseek",
            dsa_latent_dim=config.dsa_latent_dim,
            initializer_range=config.initializer_range,
        )


@dataclass(frozen=True)
class Transform:
    """How tensors of the teacher become one tensor of the student.

    Args:
        forward (callable): From the teacher's tensors, as `common` leaves them, and the facts.
        backward (callable or `None`): Its inverse, if there is one, from the student's tensor.
        describe (callable): Its name in words.
        on_fresh (`bool`): Whether it fills a drawn tensor in part; that one then comes first among the tensors.
        common (callable or `None`): Makes what rules with the same last two tensors share, from these two and the
            facts; `forward` then gets it in their place.
    """

    forward: Callable[[Sequence[Any], MapFacts], torch.Tensor]
    backward: Callable[[torch.Tensor, MapFacts], torch.Tensor] | None
    describe: Callable[[MapFacts], str]
    on_fresh: bool = False
    common: Callable[[torch.Tensor, torch.Tensor, MapFacts], Any] | None = None
