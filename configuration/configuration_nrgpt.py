# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""NRGPT: one block, applied T times, each time a step down the energy of every token.

Paper: NRGPT, arXiv 2512.16762. Code whose numbers are matched: github.com/bhoov/nrgpt.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging
from transformers.utils.type_validators import interval

from loopergy.configuration.adapter_targets import AdapterTargets
from loopergy.configuration.checked_fields import check_alias, check_choices, check_count, check_fields, preset_fields

logger = logging.get_logger(__name__)

FF_ENERGIES = ("ff1", "ff2", "ff2w")
ETA_TYPES = ("full", "scalar", "diag", "identity", "gamma")
NORM_TYPES = ("bare_layernorm", "layernorm", "rmsnorm", "none")

_LISTOPS = {
    "vocab_size": 20,
    "num_hidden_layers": 5,
    "num_attention_heads": 1,
    "max_position_embeddings": 128,
    "exclude_self": True,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_OPENWEBTEXT = {"vocab_size": 50304, "num_attention_heads": 12, "max_position_embeddings": 1024}
LISTOPS_WIDTHS = (8, 10, 12, 16, 20, 25, 32, 40, 50, 64, 80, 101, 128, 161, 203, 256)

NRGPT_PRESETS: dict[str, dict[str, Any]] = {
    **{f"listops-{width}": {**_LISTOPS, "hidden_size": width} for width in LISTOPS_WIDTHS},
    "shakespeare": {
        "vocab_size": 65,
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "dropout": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "90m": {**_OPENWEBTEXT, "hidden_size": 768, "num_hidden_layers": 12},
    "128m": {**_OPENWEBTEXT, "hidden_size": 1536, "num_hidden_layers": 6},
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}


@strict
class NRGPTConfig(AdapterTargets, PreTrainedConfig):
    r"""Describe an NRGPT. Defaults are those of the official code at the size of its 90M model.

    With g the normed state, a step is \(x \leftarrow x - \eta\,(\nabla E_{AT}(g) + s\,\nabla E_{FF}(g))\).

    Args:
        vocab_size (`int`): entries of the vocabulary.
        hidden_size (`int`): width D. Heads are D wide each; it need not be a multiple of their number.
        num_hidden_layers (`int`): steps T, at least 1. `num_steps` is the same field under the package's own name.
            The weights do not depend on it.
        num_attention_heads (`int`): heads H, each a full D x D matrix.
        intermediate_size (`int`, *optional*): width F of the feed-forward energy, 4 * D by default.
        ff_energy (`str`): with \(\sigma\) the exact GELU, `"ff1"` \(-|\sigma(W_1 g + b_1)|^2\); `"ff2"`
            \(-|\sigma(W_2 \sigma(W_1 g + b_1) + b_2)|^2\); `"ff2w"` \(-g^T (W_2 \sigma(W_1 g + b_1) + b_2)\).
        exclude_self (`bool`): a token attends to earlier tokens only (the paper, ListOps), not to itself as well (the
            Shakespeare and OpenWebText runs). Only then is each step a gradient of the token's energy.
        eta_type (`str`): the inference rate \(\eta\). `"full"`: a free D x D matrix, as published. `"scalar"`:
            \(w^2 I\). `"diag"`: \(\mathrm{diag}(w^2)\), squared like the scalar so that it is never negative.
            `"identity"`: I. `"gamma"`: \(w^2 \mathrm{diag}(\gamma)\) with the norm's scale, for which the energy
            provably goes down (paper, proposition 2.1).
        norm_type (`str`): `"bare_layernorm"` has a bias and no scale (as published); `"layernorm"`; `"rmsnorm"`;
            `"none"`.
        attention_beta (`float`): \(\beta\), the inverse temperature of the attention energy.
        learn_alpha (`bool`): give each head a learned weight \(\alpha_h\), started at 1, in the attention energy.
            Without it all are 1: a fixed other value would only rescale `eta` and the feed-forward.
        tangent_projection (`bool`): take from each update what the norm does not see (its part along the state, and
            for layer norms its mean). This changes no energy to first order and keeps the state from growing.
        stop_tolerance (`float`, *optional*): let a token rest once a step changes its g by at most this much (root
            mean square over D). See [`NRGPTModel`].
        dropout (`float`): dropout on attention probabilities and on the sum over heads, in training.
        max_position_embeddings (`int`): longest text in tokens; positions are learned.
        layer_norm_eps (`float`): epsilon of all norms.
        lm_head_bias (`bool`): bias of the head.
        initializer_range (`float`): standard deviation of all matrices at the start.

    The paper counts 90M parameters with both embeddings ("90m": 90 496 129) and 128M without the head ("128m":
    128 447 617, with it 205 714 561).

    Source: arXiv 2512.16762; its code for the defaults.
    """

    model_type = "nrgpt"
    # The one block has one matrix for queries, keys and values.
    adapter_targets = ["k_proj", "fc1", "fc2"]
    rescaling_targets = ["k_proj", "fc1"]
    rescaling_inputs = []
    attribute_map = {"num_steps": "num_hidden_layers"}
    keys_to_ignore_at_inference = ["cache", "energies"]

    vocab_size: int = interval(min=1)(default=50304)
    hidden_size: int = interval(min=1)(default=768)
    num_hidden_layers: int = interval(min=1)(default=12)
    num_attention_heads: int = interval(min=1)(default=12)
    intermediate_size: int | None = None
    ff_energy: str = "ff2w"
    exclude_self: bool = False
    eta_type: str = "full"
    norm_type: str = "bare_layernorm"
    attention_beta: int | float = 1.0
    learn_alpha: bool = False
    tangent_projection: bool = False
    stop_tolerance: int | float | None = None
    dropout: int | float = 0.0
    max_position_embeddings: int = interval(min=1)(default=1024)
    layer_norm_eps: float = 1e-5
    lm_head_bias: bool = True
    initializer_range: float = interval(min=0.0, max=1.0)(default=0.02)
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        check_alias(self, "num_steps", kwargs.get("num_steps"), "num_hidden_layers")
        super().__post_init__(**kwargs)

    @property
    def cache_widths(self) -> tuple[int, int, int]:
        """What a cache slot holds of a token: heads, and the widths of a head in its two halves."""
        return 1, self.hidden_size, 0

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "NRGPTConfig":
        """Build the config of a published size or of a `"tiny"` model for tests.

        `"listops-8"` to `"listops-256"` are the widths of the ListOps sweep, `"shakespeare"` one size of the character
        sweep, `"90m"` and `"128m"` the OpenWebText models. Fields given by keyword, such as `ff_energy="ff1"`, win.

        Raises:
            ValueError: for an unknown name, listing the known ones.
        """
        return cls(**preset_fields(cls, NRGPT_PRESETS, name, overrides, num_steps=("num_hidden_layers",)))

    def __setattr__(self, key: str, value: Any) -> None:
        # Set under the field's own name, so that the field's checks see it.
        super().__setattr__(self.attribute_map.get(key, key), value)

    def validate_architecture(self) -> None:
        """Check fields, and against each other; each error names the field, its value and what is allowed."""
        check_fields(self)
        check_choices(self, {"ff_energy": FF_ENERGIES, "eta_type": ETA_TYPES, "norm_type": NORM_TYPES})
        if self.tangent_projection and self.norm_type == "none":
            raise ValueError(
                "tangent_projection=True needs a norm: it takes away what the norm does not see, and norm_type='none' "
                "sees everything. Set tangent_projection=False."
            )


def resolve_num_steps(config: Any, num_steps: Any) -> int:
    """Return a step count given at call time; `None` means the config's.

    Raises:
        ValueError: if `num_steps` is not a whole number of at least 1.
    """
    if num_steps is None:
        return config.num_hidden_layers
    num_steps = check_count("num_steps", num_steps, f"the config's {config.num_hidden_layers}")
    if num_steps > config.num_hidden_layers and not torch.compiler.is_compiling():
        logger.warning_once(
            f"num_steps={num_steps} is more than the {config.num_hidden_layers} of the config. The energy may go on "
            "falling, but a head trained on the state after fewer steps usually predicts worse from later ones."
        )
    return num_steps


__all__ = ["LISTOPS_WIDTHS", "NRGPT_PRESETS", "NRGPTConfig", "resolve_num_steps"]
