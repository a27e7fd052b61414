# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Declare which teacher tensor becomes which student tensor, and how.

A map is data: one `Rule` (`weight_rules.py`) per student tensor, made for one architecture: a list of mixers and a few
facts. It is complete in both directions: a teacher tensor that no rule reads and a student tensor that no rule writes
are errors that list names.

    teacher                                   layer kept or windowed   layer with another mixer
    model.embed_tokens, model.norm, lm_head   copy                     copy
    model.early_exit_gate (Ouro)              copy                     copy
    layers.i.<norms>, layers.i.mlp.*          copy                     copy
    layers.i.self_attn.*                      copy                     the table in `mixer_starts.py`
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.conversion.errors import ConversionError, list_names
from loopergy.conversion.mixer_starts import FRESH, MIXER_RULES, TRANSFORMS, with_bias
from loopergy.conversion.weight_rules import MapFacts, Rule

_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class WeightMap:
    """All rules from one teacher architecture to one student architecture."""

    rules: tuple[Rule, ...]
    facts: MapFacts

    def check_teacher(self, names: Iterable[str]) -> None:
        """Raise `ConversionError` unless the rules read exactly these teacher tensors."""
        have, want = set(names), {source for rule in self.rules for source in rule.sources}
        _raise_on_difference("teacher", "without a rule", have - want, "missing", want - have)

    def check_student(self, names: Iterable[str]) -> None:
        """Raise `ConversionError` unless the rules write exactly these student tensors."""
        have, want = set(names), {rule.target for rule in self.rules}
        _raise_on_difference("student", "that no rule fills", have - want, "it does not have", want - have)

    def describe(self, rule: Rule) -> str:
        """Say in words how `rule` makes its tensor."""
        return FRESH[rule.transform](self.facts) if rule.fresh else TRANSFORMS[rule.transform].describe(self.facts)

    def forward(
        self,
        rule: Rule,
        teacher: Mapping[str, torch.Tensor],
        fresh: torch.Tensor | None = None,
        made: dict[tuple[str, ...], Any] | None = None,
    ) -> torch.Tensor:
        """Make the student's tensor of a rule that reads the teacher (it may share storage with the teacher's).

        Args:
            rule (`Rule`): One of the map's.
            teacher (`Mapping[str, torch.Tensor]`): The teacher's state dict.
            fresh (`torch.Tensor`, *optional*): A drawn tensor, for rules that fill one in part.
            made (`dict`, *optional*): Holds what rules with the same last two tensors share, from one call to the
                next; without it each call makes that anew.

        Raises:
            ValueError: For a rule that is fresh, or one that is fresh in part without `fresh`.
        """
        if rule.source is None:
            raise ValueError(f"{rule.target} is fresh: no teacher tensor makes it")
        transform = TRANSFORMS[rule.transform]
        if transform.on_fresh and fresh is None:
            raise ValueError(f"{rule.target} is fresh in part: pass a drawn tensor as `fresh`")
        tensors: list[Any] = [teacher[source] for source in rule.sources]
        if transform.common is not None:
            made, key = {} if made is None else made, rule.sources[-2:]
            if key not in made:
                made.clear()  # what belonged to the layer before
                made[key] = transform.common(tensors[-2], tensors[-1], self.facts)
            tensors[-2:] = [made[key]]
        return transform.forward([fresh, *tensors] if fresh is not None else tensors, self.facts)

    def is_drawn(self, rule: Rule) -> bool:
        """Say whether the tensor of a rule, or a part of it, has to be drawn."""
        return rule.fresh or TRANSFORMS[rule.transform].on_fresh

    def is_new(self, rule: Rule) -> bool:
        """Say whether a rule that reads the teacher makes a new tensor rather than passing on the teacher's."""
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
            for source in rule.sources if undo is not None else ():
                out[source] = undo(student[rule.target], self.facts)  # pyright: ignore[reportOptionalCall]
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
        rules += [Rule(f"{layer}mlp.{name}", f"{layer}mlp.{name}") for name in with_bias(_MLP, facts.mlp_bias)]
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


def _raise_on_difference(side: str, extra_is: str, extra: set[str], absent_is: str, absent: set[str]) -> None:
    found = [(extra_is, extra), (absent_is, absent)]
    parts = [f"{len(names)} tensor(s) {what}: {list_names(names)}" for what, names in found if names]
    if parts:
        raise ConversionError(f"the {side}'s tensors do not fit the weight map; " + "; ".join(parts))
