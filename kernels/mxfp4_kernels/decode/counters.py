# SPDX-License-Identifier: Apache-2.0
"""Zeroed int32 counters for launches whose programs count arrivals, and leave the counters at zero.

Clearing them before each launch would be a launch of its own. Launches of one stream follow each other, so they share
counters; a captured graph may run beside any stream, so each launch captured has counters that no other one uses.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


#: (device, stream) -> counters.
_of_stream: dict[tuple[torch.device, int], torch.Tensor] = {}
#: Device -> counters for captured launches, of which so many are given away.
_for_graphs: dict[torch.device, tuple[torch.Tensor, int]] = {}
_GRAPH_COUNTERS = 1 << 18
_LEAST = 1 << 12
# Counters of different launches shall not share a cache line.
_LINE = 32


def zeros_of_a_launch(count: int, device: torch.device) -> torch.Tensor:
    """At least ``count`` int32 zeros for a launch on the current stream of ``device``, which must leave them zero."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        return _captured(count, device)
    stream = torch.cuda.current_stream(device)
    if device not in _for_graphs:
        _for_graphs[device] = _kept_zeros(_GRAPH_COUNTERS, device, stream), 0
        # Once per device: a graph may run on any stream, and nothing orders that after this one.
        stream.synchronize()
    place = device, stream.cuda_stream
    counters = _of_stream.get(place)
    if counters is None or counters.numel() < count:
        counters = _of_stream[place] = _kept_zeros(max(count, _LEAST), device, stream)
    return counters


def _kept_zeros(count: int, device: torch.device, stream: torch.cuda.Stream) -> torch.Tensor:
    """Zeros that outlive the caller's allocations, cleared on ``stream``.

    What a thread allocates may go to a pool that others take over: inductor warms up its CUDA graphs in their pool, and
    refuses, or overwrites, what is left there but outputs. Pools belong to a thread, so another one allocates.
    """

    def allocate() -> torch.Tensor:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return torch.zeros(count, dtype=torch.int32, device=device)

    with ThreadPoolExecutor(1) as other:
        return other.submit(allocate).result()


def _captured(count: int, device: torch.device) -> torch.Tensor:
    counters, used = _for_graphs.get(device, (None, 0))
    if counters is None or used + count > counters.numel():
        # Cleared by the graph itself: right, and one more node.
        return torch.zeros(count, dtype=torch.int32, device=device)
    _for_graphs[device] = counters, used + -(-count // _LINE) * _LINE
    return counters[used : used + count]
