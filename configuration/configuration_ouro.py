# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Ouro: a Llama whose whole stack is applied T times.

Paper: Scaling Latent Reasoning via Looped Language Models, arXiv 2510.25741.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging
from transformers.utils.type_validators import interval

from loopergy.configuration.adapter_targets import AdapterTargets
from loopergy.configuration.checked_fields import check_alias, check_choices, check_fields, check_heads, preset_fields
from loopergy.configuration.looped_config import FULL, LoopedConfigMixin

logger = logging.get_logger(__name__)

_SHIPPED_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_CHAT_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

OURO_PRESETS: dict[str, dict[str, Any]] = {
    "ouro-1.4b": {"num_hidden_layers": 24},
    "ouro-2.6b": {"num_hidden_layers": 48},
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "total_ut_steps": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
}


def repair_special_tokens(holder: PreTrainedConfig | GenerationConfig) -> bool:
    """Replace the token ids of the published files, 0 for all three, by those of the chat format.

    `ByteDance/Ouro-*` ships bos = eos = pad = 0, so that generation never stops at `<|im_end|>` and a collator that
    masks pads hides every end of text. The chat template needs bos 1 `<|im_start|>`, eos 2 `<|im_end|>`, pad 0
    `<|endoftext|>`.

    Args:
        holder: a config or generation config, changed in place.

    Returns:
        `bool`: whether something was repaired. Any other set of ids is left alone.
    """
    if any(getattr(holder, name, None) != value for name, value in _SHIPPED_TOKENS.items()):
        return False
    for name, value in _CHAT_TOKENS.items():
        setattr(holder, name, value)
    logger.warning_once(
        "The checkpoint declares bos = eos = pad = 0; using bos 1, eos 2, pad 0, which its chat template needs. "
        "Set the ids on the config and generation_config after loading to choose others."
    )
    return True


@strict
class OuroConfig(AdapterTargets, LoopedConfigMixin, PreTrainedConfig):
    """Describe an Ouro model by the keys of its published `config.json`. Defaults are those of Ouro-1.4B.

    Args:
        vocab_size (`int`): entries of the vocabulary.
        hidden_size (`int`): width d.
        intermediate_size (`int`): width of the gated MLP.
        num_hidden_layers (`int`): physical layers N. Each is visited once per loop.
        total_ut_steps (`int`): loops T, at least 1. `num_loops` is the same field under the package's own name.
        early_exit_threshold (`float`): q, at least 0. A token leaves after the first loop at which its cumulative exit
            probability reaches q; q >= 1 means always the last loop.
        early_exit_step (`int`, *optional*): loop (counted from 0) after which every token leaves, whatever q says.
        training_loss (`str`): what the loss is taken of when labels are given: `"mixture"`, the logits averaged over
            loops with the exit probabilities (as published), or `"last_loop"`.
        kv_sharing (`str`): `"none"`, one cache slot per (loop, layer), or `"last"`: after the prompt every loop
            attends to the last loop's keys and values, one slot per layer (paper, table 14).
        num_attention_heads, num_key_value_heads, head_dim (`int`): attention heads, `hidden_size /
            num_attention_heads` wide by default.
        hidden_act (`str`): activation of the MLP.
        max_position_embeddings (`int`): trained context in tokens.
        rms_norm_eps (`float`): epsilon of all norms.
        rope_parameters (`dict`, *optional*): rotary settings; the old keys `rope_theta` and `rope_scaling` are read
            too, and written beside it, so that older readers understand the file.
        attention_dropout (`float`): dropout on attention probabilities in training.
        use_sliding_window, sliding_window, max_window_layers, layer_types: kept for the file format. Ouro has full
            attention in all layers; windows are for [`LT2Config`].

    Source: `config.json` of ByteDance/Ouro-1.4B and -2.6B; arXiv 2510.25741, section 3.
    """

    model_type = "ouro"
    attribute_map = {"num_loops": "total_ut_steps"}
    keys_to_ignore_at_inference = ["cache", "loop_hidden_states", "loop_logits", "exit_pdf"]
    default_theta = 1_000_000.0
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = interval(min=1)(default=24)
    total_ut_steps: int = interval(min=1)(default=4)
    early_exit_threshold: int | float = 1.0
    early_exit_step: int | None = None
    training_loss: str = "mixture"
    kv_sharing: str = "none"
    num_attention_heads: int = interval(min=1)(default=16)
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 65536
    initializer_range: float = interval(min=0.0, max=1.0)(default=0.02)
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    rope_parameters: dict | None = None
    attention_dropout: int | float = 0.0
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            self.layer_types = [FULL] * self.num_hidden_layers
        check_alias(self, "num_loops", kwargs.get("num_loops"), "total_ut_steps")
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "OuroConfig":
        """Build the config of a published size (`"ouro-1.4b"`, `"ouro-2.6b"`) or of a `"tiny"` model for tests.

        Raises:
            ValueError: for an unknown name, listing the known ones.
        """
        return cls(**preset_fields(cls, OURO_PRESETS, name, overrides, num_loops=("total_ut_steps",)))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a `config.json`; the shipped token ids 0/0/0 are repaired (see [`repair_special_tokens`])."""
        loaded = super().from_dict(config_dict, **kwargs)
        repair_special_tokens(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def to_dict(self) -> dict[str, Any]:
        """Serialise; `rope_theta` and `rope_scaling` are written beside `rope_parameters` for older readers."""
        output = super().to_dict()
        if isinstance(self.rope_parameters, dict) and "rope_theta" in self.rope_parameters:
            scaled = self.rope_parameters.get("rope_type", "default") != "default"
            output["rope_theta"] = self.rope_parameters["rope_theta"]
            output["rope_scaling"] = dict(self.rope_parameters) if scaled else None
        return output

    def visit(self, loop: int, layer: int) -> tuple[str, int | None]:
        """Every visit keeps the keys and values of all tokens."""
        return FULL, None

    def validate_architecture(self) -> None:
        """Check fields, and against each other; each error names the field, its value and what is allowed."""
        check_fields(self)
        check_heads(self)
        kinds = sorted(set(self.layer_types or ()))
        if self.use_sliding_window or kinds != [FULL]:
            raise ValueError(
                f"use_sliding_window={self.use_sliding_window}, layer_types={kinds}: Ouro has "
                'full attention in every layer. For windows use LT2Config(layer_mixers="window", ...).'
            )
        check_choices(self, {"training_loss": ("mixture", "last_loop"), "kv_sharing": ("none", "last")})
        if not self.early_exit_threshold >= 0:
            raise ValueError(
                f"early_exit_threshold={self.early_exit_threshold} must be a number of at least 0: with 0 every token "
                "leaves after the first loop, with 1 or more after the last."
            )
        if self.early_exit_step is not None and self.early_exit_step < 0:
            raise ValueError(f"early_exit_step={self.early_exit_step} counts loops from 0; use None to switch it off.")


__all__ = ["OURO_PRESETS", "OuroConfig", "repair_special_tokens"]
