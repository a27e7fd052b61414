# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Fields of the sparse mixers, `nsa_*` and `dsa_*`: derived defaults and checks."""

from typing import Any

from loopergy.configuration.checked_fields import check_choices, check_heads


def fill_sparse_fields(config: Any) -> None:
    """Fill fields left at `None`: averages over the selected blocks, as many index heads as attention heads."""
    if config.nsa_pool_size is None:
        config.nsa_pool_size = config.nsa_block_size
    if config.nsa_pool_stride is None:
        config.nsa_pool_stride = config.nsa_pool_size
    if config.dsa_index_heads is None:
        config.dsa_index_heads = config.num_attention_heads


def validate_nsa(config: Any) -> None:
    """Check the fields of Native Sparse Attention.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    check_heads(config, "nsa_num_key_value_heads")
    stride = config.nsa_pool_stride
    for field in ("nsa_pool_size", "nsa_block_size"):
        if stride < 1 or getattr(config, field) < 1 or getattr(config, field) % stride:
            raise ValueError(
                f"{field}={getattr(config, field)} must be a positive multiple of nsa_pool_stride={stride}: the score "
                "of a block is the sum over its strides."
            )


def validate_dsa(config: Any) -> None:
    """Check the fields of DeepSeek Sparse Attention.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    check_choices(config, {"dsa_indexer": ("lt2", "deepseek")})
    if config.dsa_index_heads < 1:
        raise ValueError(f"dsa_index_heads={config.dsa_index_heads} must be at least 1.")
    if config.dsa_rope and (config.dsa_tail_dim < 2 or config.dsa_tail_dim % 2):
        raise ValueError(
            f"dsa_rope=True turns pairs of the tail: dsa_tail_dim={config.dsa_tail_dim} must be even and at least 2."
        )
    if config.dsa_indexer == "deepseek" and min(64, config.dsa_index_head_dim) % 2:
        raise ValueError(
            f"dsa_index_head_dim={config.dsa_index_head_dim} must be even: the lightning indexer turns pairs of it."
        )
    if config.dsa_dense_warmup and config.dsa_indexer_loss_weight == 0:
        raise ValueError(
            "dsa_dense_warmup=True attends to all tokens while the indexer learns, but dsa_indexer_loss_weight=0 "
            "teaches it nothing: give the loss a weight, or leave the warm-up out."
        )
