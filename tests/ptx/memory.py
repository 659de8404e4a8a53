# SPDX-License-Identifier: Apache-2.0
"""Memory that refuses what a GPU would do wrong in silence: places outside, misalignment, shared bytes that nobody
wrote, and races between barriers."""

from collections.abc import Sequence

import numpy as np


class Fault(Exception):
    """A kernel does what it must not do."""


def _aligned(addresses: np.ndarray, width: int) -> None:
    if (addresses % width).any():
        raise Fault(f"address {int(addresses[addresses % width != 0][0]):#x} is not a multiple of {width}")


class GlobalMemory:
    """Buffers at their addresses: ``(address, bytes)``, each a uint8 array."""

    def __init__(self, buffers: Sequence[tuple[int, np.ndarray]]):
        self._buffers = sorted(buffers, key=lambda buffer: buffer[0])
        self._starts = np.array([start for start, _ in self._buffers], np.int64)
        self._ends = np.array([start + len(data) for start, data in self._buffers], np.int64)

    def _place(self, addresses: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of one buffer, and the offsets there of all addresses."""
        _aligned(addresses, width)
        numbers = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (numbers < 0) | (addresses + width > self._ends[numbers])
        if outside.any():
            near = numbers[outside][0]
            at, size = addresses[outside][0] - self._starts[near], self._ends[near] - self._starts[near]
            raise Fault(f"{width} bytes at {at} of buffer {near}, which has {size} bytes")
        if (numbers != numbers[0]).any():
            raise Fault("one instruction reaches into several buffers")
        data = self._buffers[numbers[0]][1]
        return data, (addresses - self._starts[numbers[0]])[:, None] + np.arange(width)

    def read(self, addresses: np.ndarray, width: int, threads: np.ndarray) -> np.ndarray:
        """Bytes ``[threads, width]``."""
        data, places = self._place(addresses, width)
        return data[places]

    def write(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray) -> None:
        data, places = self._place(addresses, values.shape[1])
        data[places] = values
        if (data[places] != values).any():
            raise Fault("threads write different values to one place")


class SharedMemory:
    """Bytes of a program from address 0 on, and who was there since the last barrier: of each byte the writer, the
    first and the last of the threads that read it, and how many barriers of warps there had been. Then what products
    need, which read past the other instructions: whether there was a fence since it was written, and the last product
    that reads it, and that nobody waited for."""

    def __init__(self, size: int):
        self.data = np.zeros(size, np.uint8)
        self.is_set, self.is_fenced = np.zeros((2, size), bool)
        self.taken = np.zeros(size, np.int32)
        self._step = 0
        self._writer, self._first, self._last = np.empty((3, size), np.int16)
        self._written, self._read = np.zeros((2, size), np.int32)
        self.barrier()

    def barrier(self) -> None:
        """All threads see what all wrote."""
        self._writer.fill(-1)
        self._first.fill(1024)
        self._last.fill(-1)

    def warp_barrier(self) -> None:
        """Threads of a warp see what those of the same warp wrote."""
        self._step += 1

    def _places(self, addresses: np.ndarray, width: int) -> np.ndarray:
        _aligned(addresses, width)
        outside = (addresses < 0) | (addresses + width > len(self.data))
        if outside.any():
            raise Fault(f"{width} bytes at {int(addresses[outside][0])} of {len(self.data)} shared bytes")
        return addresses[:, None] + np.arange(width)

    def _conflicts(self, first: np.ndarray, last: np.ndarray, steps: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Where another thread was, without a barrier since."""
        others = (last >= 0) & ((first != threads) | (last != threads))
        ordered = (first >> 5 == threads >> 5) & (last >> 5 == threads >> 5) & (steps < self._step)
        return others & ~ordered

    def read(self, addresses: np.ndarray, width: int, threads: np.ndarray) -> np.ndarray:
        """Bytes ``[threads, width]``. Threads ascend."""
        places, threads = self._places(addresses, width), threads[:, None].astype(np.int16)
        if not self.is_set[places].all():
            raise Fault(f"shared byte {int(places[~self.is_set[places]][0])} was never written, or is on its way")
        writer = self._writer[places]
        if self._conflicts(writer, writer, self._written[places], threads).any():
            raise Fault("a race: reads what another thread wrote since the last barrier")
        # Of several threads at one place the one that is assigned last stays.
        self._first[places[::-1]] = np.minimum(self._first[places], threads)[::-1]
        self._last[places] = np.maximum(self._last[places], threads)
        self._read[places] = self._step
        return self.data[places]

    def read_by_product(self, addresses: np.ndarray, width: int, product: int) -> np.ndarray:
        """Bytes ``[addresses, width]`` for a product of that number."""
        places = self._places(addresses, width)
        if not self.is_set[places].all():
            raise Fault("a matrix was not written whole, or is on its way")
        if (self._writer[places] >= 0).any() or not self.is_fenced[places].all():
            raise Fault("a race: a product reads what was written since the last barrier or fence")
        self.taken[places] = product
        return self.data[places]

    def write(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray, is_set: bool = True) -> None:
        """With ``is_set`` false, values are on their way: whoever reads them is wrong."""
        places, threads = self._places(addresses, values.shape[1]), threads[:, None].astype(np.int16)
        if self._conflicts(self._first[places], self._last[places], self._read[places], threads).any():
            raise Fault("a race: writes what another thread read since the last barrier")
        if self.taken[places].any():
            raise Fault("a race: writes what a product reads that nobody waited for")
        writer = self._writer[places]
        differs = (self.data[places] != values) | ~self.is_set[places]
        if (self._conflicts(writer, writer, self._written[places], threads) & differs).any():
            raise Fault("a race: writes what another thread wrote since the last barrier")
        self.is_set[places], self.is_fenced[places] = is_set, False
        self._writer[places] = threads
        self._written[places] = self._step
        if is_set:
            self.data[places] = values
            if (self.data[places] != values).any():
                raise Fault("threads write different values to one place")
