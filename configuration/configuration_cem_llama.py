# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""CEM-Llama: a Llama whose layers are steps down causal energies.

Paper: Revisiting Transformer Layer Parameterization Through Causal Energy Minimization, arXiv 2605.07588.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging
from transformers.utils.type_validators import interval

from loopergy.configuration.adapter_targets import AdapterTargets
from loopergy.configuration.checked_fields import (
    check_alias,
    check_choices,
    check_count,
    check_fields,
    check_heads,
    preset_fields,
)

logger = logging.get_logger(__name__)

_S512 = {"vocab_size": 50257, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10}
_S512 |= {"num_attention_heads": 8, "bos_token_id": 50256, "eos_token_id": 50256}
_S768 = {"vocab_size": 50257, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
_S768 |= {"num_attention_heads": 12, "bos_token_id": 50256, "eos_token_id": 50256}
_PAPER_FULL = {"cem_attn_steps": 2, "cem_mlp_steps": 2, "cem_diag": "shared", "cem_precond": "dlr"}

CEM_LLAMA_PRESETS: dict[str, dict[str, Any]] = {
    "cem-s512": _S512,
    "cem-s768": _S768,
    "paper-full-s512": _S512 | _PAPER_FULL,
    "paper-full-s768": _S768 | _PAPER_FULL,
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
}

_CHOICES = {
    "cem_diag": ("none", "shared", "per_head"),
    "cem_rope_values": ("exact", "plain"),
    "cem_norm_mode": ("once", "every_step", "exact_jacobian"),
    "cem_precond": ("none", "diag", "dlr"),
    "cem_mlp_act_on": ("tied", "gate"),
}


@strict
class CEMLlamaConfig(AdapterTargets, PreTrainedConfig):
    r"""Describe a CEM-Llama by Llama's keys and the `cem_*` fields. Default sizes are those of `"cem-s768"`.

    Each CEM sub-layer starts at its normed input u and takes T steps \(x \leftarrow x - \eta P \nabla\varepsilon(x)\)
    down an energy that is conditioned on the tokens so far, instead of computing attention or a gated MLP.

    Args:
        vocab_size (`int`): entries of the vocabulary.
        hidden_size (`int`): width D.
        intermediate_size (`int`): width F of the MLP.
        num_hidden_layers (`int`): layers L.
        num_attention_heads (`int`): query heads H.
        num_key_value_heads (`int`, *optional*): key heads G, a divisor of H; H by default, as in the paper.
        head_dim (`int`, *optional*): width d of a head, `hidden_size / num_attention_heads` by default.
        hidden_act (`str`): activation of the MLP.
        max_position_embeddings (`int`): trained context in tokens.
        initializer_range (`float`): standard deviation of fresh matrices.
        rms_norm_eps (`float`): epsilon of all norms.
        use_cache (`bool`): return a cache by default.
        rope_parameters (`dict`, *optional*): rotary settings, of all types that transformers has.
        attention_bias (`bool`): biases on q_proj and k_proj. An output bias has no tied counterpart; a stock attention
            has all four.
        mlp_bias (`bool`): biases on up_proj and gate_proj (and on down_proj where there is one).
        attention_dropout (`float`): dropout on attention probabilities in training; the update is then no longer the
            gradient of the energy, which a warning says.
        tie_word_embeddings (`bool`): one matrix for embeddings and head.
        cem_attention, cem_mlp (`bool`): whether attention and MLP are energy steps, or stock Llama.
        cem_attn_steps, cem_mlp_steps (`int`): steps T of each, at least 1. `num_steps` sets both,
            and is refused beside others.
        cem_step_size (`float`): step size eta, above 0.
        cem_learn_step_size (`bool`): make eta a parameter of each sub-layer, started at `cem_step_size`.
        cem_step_size_div_steps (`bool`): take steps of eta / T, so that more steps go equally far.
        cem_diag (`str`): diagonal of the interaction matrix \(A_k = \mathrm{diag}(d_k) + W_Q^T W_K\): `"none"`,
            `"shared"` by all heads, or `"per_head"`. With one, the cache also holds u.
        cem_diag_init (`float`): value that all diagonals start from.
        cem_rope_values (`str`): `"exact"`: values are the rotated keys, and outputs are rotated back; the gradient of
            the energy. `"plain"`: values are the keys before rotation, as in a Llama with `v_proj = k_proj`; the
            gradient of no energy, and without diagonal only.
        cem_norm_mode (`str`): `"once"`: descend in the normed coordinates. `"every_step"`: descend in the stream and
            norm it before each step. `"exact_jacobian"`: the same with the gradient taken through the norm. `"once"`
            and `"every_step"` agree at T = 1.
        cem_precond (`str`): preconditioner P of each sub-layer: `"none"`, `"diag"` for diag(softplus(d)), or `"dlr"`
            for diag(softplus(d)) + U V^T + V U^T.
        cem_precond_rank (`int`): columns r of U and V.
        cem_mlp_act_on (`str`): where the MLP's activation is: `"tied"`, on the projection that is used twice (form A),
            or `"gate"`, on the other one (form B).
        cem_temperature (`float`, *optional*): tau, which divides the scores; sqrt(head_dim) by default.
        cem_tie_kv, cem_tie_qo, cem_tie_mlp (`bool`): set to `False` for control experiments: an own v_proj, o_proj or
            down_proj, and no energy.

    Source: arXiv 2605.07588; where its text leaves a choice open, the default is the one whose update is exactly the
    gradient of an energy.
    """

    model_type = "cem_llama"
    # v_proj and down_proj exist in untied models only.
    adapter_targets = ["q_proj", "k_proj", "v_proj"]
    rescaling_targets = ["k_proj", "v_proj", "up_proj", "down_proj"]
    keys_to_ignore_at_inference = ["cache", "energies"]

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = interval(min=1)(default=12)
    num_attention_heads: int = interval(min=1)(default=12)
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = interval(min=0.0, max=1.0)(default=0.02)
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: int | float = 0.0
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    cem_attention: bool = True
    cem_mlp: bool = True
    cem_attn_steps: int = interval(min=1)(default=1)
    cem_mlp_steps: int = interval(min=1)(default=1)
    cem_step_size: int | float = 1.0
    cem_learn_step_size: bool = False
    cem_step_size_div_steps: bool = True
    cem_diag: str = "shared"
    cem_diag_init: int | float = 0.0
    cem_rope_values: str = "exact"
    cem_norm_mode: str = "once"
    cem_precond: str = "none"
    cem_precond_rank: int = interval(min=1)(default=8)
    cem_mlp_act_on: str = "tied"
    cem_temperature: int | float | None = None
    cem_tie_kv: bool = True
    cem_tie_qo: bool = True
    cem_tie_mlp: bool = True

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        check_alias(self, "num_steps", kwargs.get("num_steps"), "cem_attn_steps", "cem_mlp_steps")
        super().__post_init__(**kwargs)
        if self.cem_attention and self.attention_dropout:
            logger.warning_once(
                f"attention_dropout={self.attention_dropout}: in training the attention update is then not the "
                "gradient of the energy. Set attention_dropout=0.0 to keep it exact."
            )

    @property
    def num_steps(self) -> int | None:
        """Steps T of both sub-layers, `None` where they differ. Setting it sets `cem_attn_steps` and `cem_mlp_steps`.

        So does `CEMLlamaConfig(num_steps=2)` and `from_pretrained(..., num_steps=2)`.
        """
        return self.cem_attn_steps if self.cem_attn_steps == self.cem_mlp_steps else None

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.cem_attn_steps = value
        self.cem_mlp_steps = value

    @property
    def has_diagonal(self) -> bool:
        """Whether attention scores have a diagonal part, which needs u of every token."""
        return self.cem_attention and self.cem_diag != "none"

    @property
    def cache_widths(self) -> tuple[int, int, int]:
        """What a cache slot holds of a token: heads, and the widths of a head in its two halves."""
        heads, width = self.num_key_value_heads or 1, self.head_dim or 0
        if self.has_diagonal:
            return heads, width, self.hidden_size // heads
        one_tensor = self.cem_attention and self.cem_tie_kv and self.cem_rope_values == "exact"
        return heads, width, 0 if one_tensor else width

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "CEMLlamaConfig":
        """Build the config of a named size.

        `"cem-s512"` and `"cem-s768"` have 72,450,560 and 129,127,680 parameters with both sub-layers of the CEM kind
        and a shared diagonal, against Llama's 85.6 and 162.1 million. `"paper-full-s512"` and `"paper-full-s768"` add
        two steps and the low-rank preconditioner. `"tiny"` is for tests. The paper does not state its shapes: these
        fit the sizes it names.

        Raises:
            ValueError: for an unknown name, listing the known ones.
        """
        steps = ("cem_attn_steps", "cem_mlp_steps")
        return cls(**preset_fields(cls, CEM_LLAMA_PRESETS, name, overrides, num_steps=steps))

    def validate_architecture(self) -> None:
        """Check fields, and against each other; each error names the field, its value and what is allowed."""
        check_fields(self)
        check_choices(self, _CHOICES)
        check_heads(self)
        turned = (self.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        if turned != 1.0:
            raise ValueError(f"rope_parameters: partial_rotary_factor={turned} must be 1.0: whole heads are rotated.")
        if self.cem_attention:
            self._validate_attention()

    def _validate_attention(self) -> None:
        diagonal = self.cem_diag != "none"
        if diagonal and self.hidden_size % (self.num_key_value_heads or 1):
            raise ValueError(
                f"cem_diag={self.cem_diag!r} caches u beside the keys, split over num_key_value_heads="
                f"{self.num_key_value_heads}, which must divide hidden_size={self.hidden_size}. Change one of them or "
                "set cem_diag='none'."
            )
        if diagonal and self.cem_rope_values == "plain":
            raise ValueError(
                f"cem_rope_values='plain' is the gradient of no energy, and cem_diag={self.cem_diag!r} is a part of "
                "one. Set cem_diag='none', or cem_rope_values='exact'."
            )
        if diagonal and not self.cem_tie_kv:
            raise ValueError(
                f"cem_tie_kv=False (a control without energy) works without diagonal only, got cem_diag="
                f"{self.cem_diag!r}. Set cem_diag='none'."
            )


def check_num_steps(num_steps: Any) -> int | None:
    """Return a step count given at call time; `None` means the config's.

    Raises:
        ValueError: if `num_steps` is not a whole number of at least 1.
    """
    if num_steps is None:
        return None
    return check_count("num_steps", num_steps, "the config's cem_attn_steps and cem_mlp_steps")


__all__ = ["CEM_LLAMA_PRESETS", "CEMLlamaConfig", "check_num_steps"]
