# SPDX-License-Identifier: Apache-2.0
"""Zeroed int32 counters for launches whose programs count arrivals, and leave the counters at zero.

Clearing them before each launch would be a launch of its own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from triton.runtime import driver


#: The least that is reserved: more tiles than a GPU shares among several programs.
_LEAST = 1 << 10


class Counters:
    """Counters of one product, such as that of a layer.

    Launches of one stream follow each other, so they share counters. Captured launches have others, because a graph may
    run beside any stream; all graphs share them, so graphs with the same layer must not run at the same time.
    """

    def __init__(self) -> None:
        self._of_streams: dict[int, torch.Tensor] = {}
        self._of_graphs: torch.Tensor | None = None

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        """Return at least ``count`` zeros for a launch on the current stream of ``device``, the current device."""
        if device.type != "cuda":
            return torch.zeros(count, dtype=torch.int32, device=device)
        if torch.cuda.is_current_stream_capturing():
            counters = self._of_graphs
            if counters is None or counters.numel() < count:
                # Nothing outside of the graph can be reserved now. The graph clears these itself, one more node.
                return torch.zeros(count, dtype=torch.int32, device=device)
            return counters
        stream = driver.active.get_current_stream(device.index)
        counters = self._of_streams.get(stream)
        if counters is None or counters.numel() < count:
            both = _kept_zeros(2 * max(count, _LEAST), device)
            counters, of_graphs = both.chunk(2)
            self._of_streams[stream] = counters
            if self._of_graphs is None:
                self._of_graphs = of_graphs
        return counters


def _kept_zeros(count: int, device: torch.device) -> torch.Tensor:
    """Return zeros that outlive the caller's allocations, cleared when this returns.

    What a thread allocates may go to a pool that others take over: inductor warms up its CUDA graphs in their pool, and
    refuses, or overwrites, what is left there but outputs. Pools belong to a thread, so another one allocates. It
    waits, because nothing orders a graph, which may run on any stream, after the stream that clears.
    """

    def allocate() -> torch.Tensor:
        with torch.cuda.device(device):
            zeros = torch.zeros(count, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()
        return zeros

    with ThreadPoolExecutor(1) as other:
        return other.submit(allocate).result()
