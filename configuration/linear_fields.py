# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Fields of the mixers with a recurrent state: derived defaults and checks."""

from typing import Any

from loopergy.configuration.checked_fields import check_even

# Mixers that keep a recurrent state, and so no keys and values.
LINEAR_MIXERS = ("gdn", "kda", "deltanet", "mamba2", "hgrn2", "retnet", "gla", "la")
_WITH_HEADS = ("kda", "deltanet", "hgrn2", "retnet", "gla", "la")


def fill_linear_fields(config: Any) -> None:
    """Fill fields left at `None`: as many heads as attention has, and heads that span the hidden size.

    The head width of Gated DeltaNet has a default of its own, which the config derives.
    """
    for mixer in (*_WITH_HEADS, "mamba2"):
        _fill(config, f"{mixer}_num_heads", config.num_attention_heads)
    for mixer in _WITH_HEADS:
        # The keys of Gated Linear Attention are half as wide as the hidden size.
        width = config.hidden_size // (2 if mixer == "gla" else 1)
        _fill(config, f"{mixer}_head_dim", width // max(1, getattr(config, f"{mixer}_num_heads")))
    for mixer in ("kda", "mamba2"):
        _fill(config, f"{mixer}_norm_eps", config.rms_norm_eps)


def validate_linear(config: Any, mixer: str) -> None:
    """Check the fields of one linear mixer, `"gdn"` and `"mamba2"` included.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    if mixer == "mamba2":
        _validate_mamba2(config)
        return
    heads, head_dim = getattr(config, f"{mixer}_num_heads") or 0, getattr(config, f"{mixer}_head_dim") or 0
    if heads < 1 or head_dim < 1:
        raise ValueError(f"{mixer}_num_heads={heads} and {mixer}_head_dim={head_dim} must be at least 1.")
    expand = getattr(config, f"{mixer}_expand_v")
    if int(head_dim * expand) != head_dim * expand or head_dim * expand < 1:
        raise ValueError(
            f"{mixer}_expand_v={expand} times {mixer}_head_dim={head_dim} must be a whole number of at least 1: it is "
            "the width of a value head."
        )
    if mixer == "retnet":
        check_even("retnet_head_dim", head_dim)
    if mixer == "gla" and config.gla_gate_logit_normalizer <= 0:
        raise ValueError(f"gla_gate_logit_normalizer={config.gla_gate_logit_normalizer} must be positive.")


def _validate_mamba2(config: Any) -> None:
    heads, inner = config.mamba2_num_heads, config.mamba2_expand * config.hidden_size
    if heads < 1 or inner < 1 or int(inner) != inner or inner % heads:
        raise ValueError(
            f"mamba2_num_heads={heads} must divide mamba2_expand * hidden_size = {config.mamba2_expand} * "
            f"{config.hidden_size}, the width of all heads together."
        )


def _fill(config: Any, field: str, value: Any) -> None:
    if getattr(config, field) is None:
        setattr(config, field, value)
