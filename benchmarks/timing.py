# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""How the scripts beside this file time what they compare: in one process, turn by turn, by medians."""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


def in_turn(runs: Mapping[str, Callable[[], Any]], turns: int, unmeasured: int = 1) -> dict[str, list[float]]:
    """Call each function once a turn, one after the other, so that what slows the machine down slows all alike.

    Args:
        runs (mapping): Name to function.
        turns (`int`): Turns that count.
        unmeasured (`int`, defaults to 1): Turns before them that do not.

    Returns:
        `dict[str, list[float]]`: Seconds of every turn: of CPU time on one thread, of wall time on more.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(unmeasured + turns):
        for name, run in runs.items():
            start = clock()
            run()
            if turn >= unmeasured:
                taken[name].append(clock() - start)
    return taken


def medians(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of every list."""
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def median_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the median over the turns of one time divided by the other."""
    return statistics.median(one / other for one, other in zip(slow, fast, strict=True))


def peak_bytes() -> int:
    """Return the most memory that this process has held so far (Linux)."""
    import resource  # Windows has no such module

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(work: Callable[..., Any], *args: Any) -> Any:
    """Do a piece of work in a process of its own, which has imported everything; return what it returns."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(work(*args)))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result
