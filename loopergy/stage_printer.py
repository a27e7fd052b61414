# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Report each stage of a run when it is done: in a recipe, in pre-training, in the demo."""

from typing import Any

import typer


def stage_numbers(record: Any) -> list[str]:
    """Return what a stage measured: tokens and seconds, padded to columns, then whatever else its record holds.

    Args:
        record (`StageRecord`): Of a stage that is done.
    """
    metrics = record.metrics
    parts = [f"{record.tokens_seen:>12,} tokens", f"{metrics.get('seconds', 0):>8,.0f} s"]
    if heldout := metrics.get("heldout"):
        parts.append(f"held-out KL {heldout['kl']:.3f}, perplexity {heldout['perplexity']:.2f}")
    if loops := metrics.get("loops"):
        perplexity = ", ".join(f"{value:.1f}" for value in loops["loop_perplexity"])
        parts.append(f"held-out perplexity by loop {perplexity}, mean exit after loop {loops['mean_exit']:.2f}")
    parts += [f"{task} {accuracy:.2f}" for task, accuracy in metrics.get("tasks", {}).items()]
    return parts + ([f"kept layers {record.kept_layers}"] if record.stage == "select" else [])


def print_stage(name: str, record: Any) -> None:
    """Print one line about a stage that is done.

    Args:
        name (`str`): The stage.
        record (`StageRecord`): Its record.
    """
    typer.echo("  ".join([f"{name:<8}", *stage_numbers(record)]))
