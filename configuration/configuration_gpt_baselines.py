# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The transformers that NRGPT is compared with: a GPT, and the same with one block applied T times.

Paper: NRGPT, arXiv 2512.16762. Code whose numbers are matched: github.com/bhoov/nrgpt.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils.type_validators import interval

from loopergy.configuration.adapter_targets import AdapterTargets
from loopergy.configuration.checked_fields import check_choices, check_fields, preset_fields

RECURRENCES = ("none", "sequential", "parallel")

GPT_BASELINE_PRESETS: dict[str, dict[str, Any]] = {
    "listops-64": {
        "vocab_size": 20,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 1,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": 0,
    },
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
    "openwebtext": {},
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
class GPTBaselineConfig(AdapterTargets, PreTrainedConfig):
    """Describe one of NRGPT's baselines. Defaults are the OpenWebText size, with one block.

    Args:
        recurrence (`str`): `"none"`, a GPT with its own weights in each layer; `"sequential"`, one such layer applied
            T times (`GPT_Rec`); `"parallel"`, one layer applied T times whose attention and MLP read the same state
            (`GPT_Rec_parallel`, the paper's recurrent baseline).
        vocab_size (`int`): entries of the vocabulary.
        hidden_size (`int`): width D.
        num_hidden_layers (`int`): T, layers or applications of the one layer; the cache has one slot for each.
        num_attention_heads (`int`): heads, each `floor(D / heads)` wide.
        intermediate_size (`int`, *optional*): width of the MLP, 4 * D by default.
        hidden_act (`str`): activation of the MLP.
        dropout (`float`): dropout on attention probabilities, on the attention output and on the MLP output.
        max_position_embeddings (`int`): longest text in tokens; positions are learned.
        layer_norm_eps (`float`): epsilon of all norms.
        lm_head_bias (`bool`): bias of the head.
        initializer_range (`float`): standard deviation of all matrices at the start.

    Source: arXiv 2512.16762, the baselines of its code.
    """

    model_type = "gpt_baseline"
    rescaling_targets = ["k_proj", "v_proj", "fc2"]
    rescaling_inputs = ["fc2"]
    keys_to_ignore_at_inference = ["cache"]

    recurrence: str = "parallel"
    vocab_size: int = interval(min=1)(default=50304)
    hidden_size: int = interval(min=1)(default=768)
    num_hidden_layers: int = interval(min=1)(default=12)
    num_attention_heads: int = interval(min=1)(default=12)
    intermediate_size: int | None = None
    hidden_act: str = "relu"
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
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Width of a head; what does not divide evenly is left out, as in the official code."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "GPTBaselineConfig":
        """Build the config of a size of the paper's comparisons; fields given by keyword win.

        Raises:
            ValueError: for an unknown name, listing the known ones.
        """
        return cls(**preset_fields(cls, GPT_BASELINE_PRESETS, name, overrides))

    def validate_architecture(self) -> None:
        """Check fields, and against each other; each error names the field, its value and what is allowed."""
        check_fields(self)
        check_choices(self, {"recurrence": RECURRENCES})
        if self.num_attention_heads > self.hidden_size:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is more than hidden_size={self.hidden_size}: heads "
                "would have no width."
            )


__all__ = ["GPT_BASELINE_PRESETS", "GPTBaselineConfig"]
