# SPDX-License-Identifier: Apache-2.0
"""Times of contenders that take turns, on a GPU by CUDA events and on the CPU by the clock."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .machine import Machine


Call = Callable[[], object]

#: Seconds of measuring for one comparison, warm-up and graph capture apart.
PATIENCE = 1.2
MAX_ROUNDS, MIN_ROUNDS = 40, 5
_FLUSH_BYTES = 256 << 20
#: Writes of the flush buffer before a region that is launched kernel by kernel: about two milliseconds of work on an
#: H200, in which the host gets ahead of the device.
_LEAD = 30


@dataclass(frozen=True)
class Timing:
    """
    Attributes:
        samples: seconds of one call, by round.
        launch: ``"graph"`` (replayed CUDA graph), ``"stream"`` (launched from Python) or ``"cpu"``.
        why: why there is no graph, where one was wanted.
    """

    samples: tuple[float, ...]
    launch: str
    why: str | None = None

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)

    def ratio_to(self, other: "Timing") -> float:
        """How many times faster ``other`` is, the median over rounds."""
        return statistics.median(a / b for a, b in zip(self.samples, other.samples, strict=True))


def compare(
    machine: Machine, contenders: dict[str, Sequence[Call]], graph: bool = True, patience: float = PATIENCE
) -> dict[str, Timing]:
    """Time of one call of each contender. In every round each runs once, one after the other, in an order that rotates.

    Args:
        contenders: by name, calls that do the same on different inputs; together they should touch several times what
            the last-level cache holds. All of them are one sample.
        graph: replay CUDA graphs, which take the launch gaps out; a contender that cannot be captured is launched from
            Python, and its timing says so.
        patience: seconds after which no further round begins, if there were `MIN_ROUNDS`.
    """
    if machine.interpreted:
        return _compare_on_cpu(contenders)
    runs = {name: _prepare(machine, calls, graph) for name, calls in contenders.items()}
    flush = torch.empty(max(_FLUSH_BYTES, 2 * machine.l2_bytes), dtype=torch.uint8, device=machine.device)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    started = time.perf_counter()
    for turn in range(MAX_ROUNDS):
        if turn >= MIN_ROUNDS and time.perf_counter() - started > patience:
            break
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            run, launch, _ = runs[name]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(1 if launch == "graph" else _LEAD):
                flush.zero_()
            begin.record()
            run()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / 1e3 / len(contenders[name]))
    return {name: Timing(tuple(samples[name]), *runs[name][1:]) for name in names}


def take_turns(machine: Machine, contenders: dict[str, Call], seconds: float, most: int = 5) -> dict[str, Timing]:
    """As [`compare`] for calls that take seconds and read results back: by the clock, begun and ended with an idle
    device. One warm-up each, then at least one round, and more while they fit into ``seconds`` in all."""

    def seconds_of(call: Call) -> float:
        machine.synchronize()
        begun = time.perf_counter()
        call()
        machine.synchronize()
        return time.perf_counter() - begun

    started = time.perf_counter()
    for call in contenders.values():
        seconds_of(call)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(most):
        spent = time.perf_counter() - started
        if turn and spent * (turn + 2) / (turn + 1) > seconds:
            break
        for name, call in contenders.items():
            samples[name].append(seconds_of(call))
    return {name: Timing(tuple(times), "cpu" if machine.interpreted else "stream") for name, times in samples.items()}


def rotated(machine: Machine, n_bytes: int, most: int = 16) -> int:
    """How many sets of inputs of ``n_bytes`` each make a contender read from memory and not from the cache."""
    return 1 if machine.tiny else max(1, min(most, -(-4 * machine.l2_bytes // max(1, n_bytes))))


def _prepare(machine: Machine, calls: Sequence[Call], graph: bool) -> tuple[Call, str, str | None]:
    def run() -> None:
        for call in calls:
            call()

    stream = torch.cuda.Stream(machine.device)
    stream.wait_stream(torch.cuda.current_stream(machine.device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream(machine.device).wait_stream(stream)
    machine.synchronize()
    if not graph:
        return run, "stream", None
    captured = torch.cuda.CUDAGraph()
    try:
        # What waits for the device cannot be captured. Found out here, where nothing is left half captured.
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.cuda.graph(captured):
            run()
    except Exception as error:
        machine.synchronize()
        return run, "stream", f"{type(error).__name__}: {error}".splitlines()[0][:200]
    captured.replay()
    machine.synchronize()
    return captured.replay, "graph", None


def _compare_on_cpu(contenders: dict[str, Sequence[Call]]) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(2):
        for name, calls in contenders.items():
            started = time.perf_counter()
            for call in calls:
                call()
            samples[name].append((time.perf_counter() - started) / len(calls))
    return {name: Timing(tuple(times), "cpu") for name, times in samples.items()}
