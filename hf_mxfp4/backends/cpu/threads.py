# SPDX-License-Identifier: Apache-2.0
"""Rows shared out over threads that stay alive: starting one costs as much as quantizing a million elements."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


#: Work, in elements of plain quantization, that is worth waking a thread for.
WORTH_A_THREAD = 1 << 19

_pools: dict[int, ThreadPoolExecutor] = {}  # by process: a forked child has none of its parent's threads


def in_threads(work: Callable[[int, int], None], count: int, cost: int) -> None:
    """Call ``work(first, last)`` on consecutive ranges that make up ``0..count``, in as many threads as torch uses and
    ``cost`` justifies. ``work`` must release the interpreter lock to gain anything."""
    threads = max(1, min(torch.get_num_threads(), count, cost // WORTH_A_THREAD))
    bounds = [count * i // threads for i in range(threads + 1)]
    waiting = (
        [_pool().submit(work, *span) for span in zip(bounds[1:-1], bounds[2:], strict=True)] if threads > 1 else []
    )
    work(0, bounds[1])
    for future in waiting:
        future.result()


def _pool() -> ThreadPoolExecutor:
    process = os.getpid()
    if process not in _pools:
        _pools.clear()
        _pools[process] = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="mxfp4")
    return _pools[process]
