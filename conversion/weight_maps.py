# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Declare which teacher tensor becomes which student tensor, and how.

A map is data: one `Rule` per student tensor, made for one architecture (a list of mixers and a few facts). It is
complete in both directions: a teacher tensor that no rule reads and a student tensor that no rule writes are errors
that list names.

    teacher                                   layer kept or windowed   layer made `gdn`
    model.embed_tokens, model.norm, lm_head   copy                     copy
    model.early_exit_gate (Ouro)              copy                     copy
    layers.i.<norms>, layers.i.mlp.*          copy                     copy
    layers.i.self_attn.{q,o}_proj             copy                     copy
    layers.i.self_attn.{k,v}_proj             copy                     each key/value head repeated
    (none)                                    -                        a,b,g_proj, A_log, dt_bias, o_norm, convs
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from loopergy.configuration.configuration_lt2 import LT2Config


class ConversionError(ValueError):
    """A teacher cannot be converted; the text names what is not supported or which tensors do not fit."""


@dataclass(frozen=True)
class Rule:
    """One line of a weight map.

    Args:
        target (`str`): Name of the student's tensor.
        source (`str | None`): Name of the teacher's tensor; `None` for a fresh one.
        transform (`str`): A key of `TRANSFORMS` for tensors that come from the teacher, a key of `FRESH` for fresh
            ones.
    """

    target: str
    source: str | None
    transform: str = "copy"

    @property
    def fresh(self) -> bool:
        """Say whether the tensor is new rather than read from the teacher."""
        return self.source is None


@dataclass(frozen=True)
class MapFacts:
    """What the rules need to know about an architecture, read off the student's config.

    Args:
        mixers (`tuple[str, ...]`): Mixer of each physical layer.
        norms (`tuple[str, ...]`): Names of the norms of a layer.
        attention_bias (`bool`): Whether q, k, v, o have biases.
        mlp_bias (`bool`): Whether gate, up, down have biases.
        early_exit_gate (`bool`): Whether there is an exit gate.
        tied (`bool`): Whether the head is the embedding.
        num_key_value_groups (`int`): Query heads per key/value head.
        head_dim (`int`): Size of a head.
        gdn_use_gate (`bool`): Whether GDN layers have an output gate.
        gdn_use_short_conv (`bool`): Whether GDN layers have short convolutions.
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
    gdn_use_gate: bool
    gdn_use_short_conv: bool
    initializer_range: float

    @classmethod
    def from_config(cls, config: LT2Config) -> "MapFacts":
        """Read the facts off an `LT2Config`."""
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
            gdn_use_gate=config.gdn_use_gate,
            gdn_use_short_conv=config.gdn_use_short_conv,
            initializer_range=config.initializer_range,
        )


def repeat_heads(tensor: torch.Tensor, facts: MapFacts) -> torch.Tensor:
    """Give every query head its own copy of the key or value head that it shares.

    New head m is old head floor(m / g), as `transformers`' `repeat_kv` does to the activations.

    Args:
        tensor (`torch.Tensor` of shape `[kv_heads * head_dim, ...]`): Weight or bias of k_proj or v_proj.
        facts (`MapFacts`): Gives g = `num_key_value_groups` and `head_dim`.

    Returns:
        `torch.Tensor` of shape `[kv_heads * g * head_dim, ...]`.
    """
    heads = tensor.unflatten(0, (-1, facts.head_dim))
    return heads.repeat_interleave(facts.num_key_value_groups, dim=0).flatten(0, 1)


@dataclass(frozen=True)
class Transform:
    """How a teacher's tensor becomes the student's: `forward`, its inverse if there is one, and its name in words."""

    forward: Callable[[torch.Tensor, MapFacts], torch.Tensor]
    backward: Callable[[torch.Tensor, MapFacts], torch.Tensor] | None
    describe: Callable[[MapFacts], str]


TRANSFORMS: dict[str, Transform] = {
    "copy": Transform(lambda x, _: x, lambda x, _: x, lambda _: "the same tensor"),
    "tie": Transform(lambda x, _: x, lambda x, _: x, lambda _: "tied to model.embed_tokens.weight"),
    "repeat_heads": Transform(
        repeat_heads, None, lambda f: f"each key/value head repeated {f.num_key_value_groups} times, head by head"
    ),
}

# Fresh tensors are filled by the model's own `_init_weights`; these are the words for it. `identity_conv` is ours.
FRESH: dict[str, Callable[[MapFacts], str]] = {
    "normal": lambda f: f"normal(0, {f.initializer_range:g})",
    "decay": lambda _: "log of uniform(0, 16)",
    "time_step": lambda _: "inverse softplus of log-uniform(0.001, 0.1)",
    "ones": lambda _: "ones",
    "identity_conv": lambda _: "identity: last tap 1, earlier taps 0",
}

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def _with_bias(names: Iterable[str], bias: bool) -> Iterator[str]:
    for name in names:
        yield f"{name}.weight"
        if bias:
            yield f"{name}.bias"


def _attention_rules(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    for name in _with_bias(_ATTENTION, facts.attention_bias):
        yield Rule(prefix + name, prefix + name)


def _gdn_rules(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    for name in _with_bias(_ATTENTION, facts.attention_bias):
        shared_head = name[0] in "kv" and facts.num_key_value_groups > 1
        yield Rule(prefix + name, prefix + name, "repeat_heads" if shared_head else "copy")
    for name in ("a_proj.weight", "b_proj.weight", *(["g_proj.weight"] if facts.gdn_use_gate else [])):
        yield Rule(prefix + name, None, "normal")
    if facts.gdn_use_short_conv:
        for name in ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"):
            yield Rule(prefix + name, None, "identity_conv")
    yield Rule(prefix + "A_log", None, "decay")
    yield Rule(prefix + "dt_bias", None, "time_step")
    yield Rule(prefix + "o_norm.weight", None, "ones")


MIXER_RULES: dict[str, Callable[[str, MapFacts], Iterator[Rule]]] = {
    "full": _attention_rules,
    "window": _attention_rules,
    "gdn": _gdn_rules,
}


@dataclass(frozen=True)
class WeightMap:
    """All rules from one teacher architecture to one student architecture."""

    rules: tuple[Rule, ...]
    facts: MapFacts

    def check_teacher(self, names: Iterable[str]) -> None:
        """Raise `ConversionError` unless the rules read exactly these teacher tensors."""
        have, want = set(names), {rule.source for rule in self.rules if rule.source is not None}
        _raise_on_difference("teacher", "without a rule", have - want, "missing", want - have)

    def check_student(self, names: Iterable[str]) -> None:
        """Raise `ConversionError` unless the rules write exactly these student tensors."""
        have, want = set(names), {rule.target for rule in self.rules}
        _raise_on_difference("student", "that no rule fills", have - want, "it does not have", want - have)

    def describe(self, rule: Rule) -> str:
        """Say in words how `rule` makes its tensor."""
        return FRESH[rule.transform](self.facts) if rule.fresh else TRANSFORMS[rule.transform].describe(self.facts)

    def forward(self, rule: Rule, teacher: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Make the student's tensor of a rule that reads the teacher (it may share storage with the teacher's)."""
        if rule.source is None:
            raise ValueError(f"{rule.target} is fresh: no teacher tensor makes it")
        return TRANSFORMS[rule.transform].forward(teacher[rule.source], self.facts)

    def is_new(self, rule: Rule) -> bool:
        """Say whether a rule that reads the teacher makes a tensor of its own rather than the same one."""
        return not rule.fresh and rule.transform not in ("copy", "tie")

    @classmethod
    def identity(cls, names: Iterable[str], facts: MapFacts) -> "WeightMap":
        """Map each of the student's tensors from one of the same name."""
        tied = "lm_head.weight" if facts.tied else None
        return cls(tuple(Rule(name, name, "tie" if name == tied else "copy") for name in names), facts)

    def backward(self, student: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make the teacher's state dict from the student's, where every rule can be undone.

        Args:
            student (`Mapping[str, torch.Tensor]`): The student's state dict.

        Returns:
            `dict[str, torch.Tensor]`: Teacher names to tensors, which share storage with the student's.

        Raises:
            ConversionError: If a layer is not full or windowed attention any more; the text names the tensors.
        """
        one_way = [r.target for r in self.rules if r.source is None or TRANSFORMS[r.transform].backward is None]
        if one_way:
            raise ConversionError(
                "only students whose layers are all softmax attention can be turned back; "
                f"these tensors have no counterpart in the teacher: {list_names(one_way)}"
            )
        self.check_student(student)
        out = {}
        for rule in self.rules:
            undo = TRANSFORMS[rule.transform].backward
            if rule.source is not None and undo is not None:
                out[rule.source] = undo(student[rule.target], self.facts)
        return out


def weight_map(config: LT2Config) -> WeightMap:
    """Build the map from an Ouro or Llama-shaped teacher to the student that `config` describes.

    The two families differ in their norms and the exit gate, which the config tells; the names are the same.

    Args:
        config (`LT2Config`): The student's config.

    Returns:
        `WeightMap`: One rule per student tensor.

    Raises:
        ConversionError: If a layer's mixer has no rules.
    """
    facts = MapFacts.from_config(config)
    unknown = sorted(set(facts.mixers) - set(MIXER_RULES))
    if unknown:
        raise ConversionError(f"layer_mixers: no weight map for {unknown}; there is one for {sorted(MIXER_RULES)}")
    rules = [Rule("model.embed_tokens.weight", "model.embed_tokens.weight")]
    for index, mixer in enumerate(facts.mixers):
        layer = f"model.layers.{index}."
        rules += [Rule(f"{layer}{norm}.weight", f"{layer}{norm}.weight") for norm in facts.norms]
        rules += MIXER_RULES[mixer](f"{layer}self_attn.", facts)
        rules += [Rule(f"{layer}mlp.{name}", f"{layer}mlp.{name}") for name in _with_bias(_MLP, facts.mlp_bias)]
    rules.append(Rule("model.norm.weight", "model.norm.weight"))
    if facts.early_exit_gate:
        gate = ("model.early_exit_gate.weight", "model.early_exit_gate.bias")
        rules += [Rule(name, name) for name in gate]
    rules.append(Rule("lm_head.weight", "lm_head.weight", "tie" if facts.tied else "copy"))
    return WeightMap(tuple(rules), facts)


def layer_of(name: str) -> int | None:
    """Return the physical layer a tensor belongs to, `None` for embeddings, norm, gate and head."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match.group(1)) if match else None


def list_names(names: Iterable[str], limit: int = 12) -> str:
    """Write tensor names for an error text: all of them up to `limit`, then a count of the rest."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def _raise_on_difference(side: str, extra_is: str, extra: set[str], absent_is: str, absent: set[str]) -> None:
    found = [(extra_is, extra), (absent_is, absent)]
    parts = [f"{len(names)} tensor(s) {what}: {list_names(names)}" for what, names in found if names]
    if parts:
        raise ConversionError(f"the {side}'s tensors do not fit the weight map; " + "; ".join(parts))
