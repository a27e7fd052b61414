# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""A stage that is done says what was measured, in one line."""

import pytest

from loopergy.distill.stage import StageRecord
from loopergy.stage_printer import print_stage, stage_numbers


def record(stage, tokens=0, kept_layers=(), **metrics):
    return StageRecord(stage, list(kept_layers), "", tokens_seen=tokens, metrics=metrics)


@pytest.mark.parametrize(
    ("done", "says"),
    [
        (record("convert"), ["0 tokens", "0 s"]),
        (record("align", 4096, seconds=12.4), ["4,096 tokens", "12 s"]),
        (record("select", 64, [1, 3], seconds=1200), ["64 tokens", "1,200 s", "kept layers [1, 3]"]),
        (
            record("distill", 64, [1, 3], heldout={"kl": 0.1234, "perplexity": 20}),
            ["held-out KL 0.123, perplexity 20.00"],
        ),
        (
            record("gate", 64, loops={"loop_perplexity": [17.44, 14.0], "mean_exit": 1.5}, tasks={"recall": 0.5}),
            ["held-out perplexity by loop 17.4, 14.0, mean exit after loop 1.50", "recall 0.50"],
        ),
    ],
)
def test_a_stage_tells_tokens_seconds_and_what_was_measured(done, says, capsys):
    numbers = [number.strip() for number in stage_numbers(done)]
    assert numbers[-len(says) :] == says
    print_stage(done.stage, done)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split() == [done.stage, *" ".join(numbers).split()]


def test_the_lines_of_a_run_stand_in_columns(capsys):
    print_stage("align", record("align", 7, seconds=3))
    print_stage("distill", record("distill", 1_000_000, seconds=4000))
    short, long = capsys.readouterr().out.splitlines()
    assert short.index(" tokens") == long.index(" tokens")
    assert short.endswith(" s")
    assert len(short) == len(long)
