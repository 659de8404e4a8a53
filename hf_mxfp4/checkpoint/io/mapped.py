# SPDX-License-Identifier: Apache-2.0
"""Give back the memory of file contents that were read and are not needed any more.

transformers maps the files of a checkpoint into memory and keeps them mapped until all is loaded. What was read stays
counted as the process's memory, so that packing a checkpoint would seem to need its full size on top.
"""

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator

import torch


_DONTNEED = 4  # MADV_DONTNEED, the same on all Linux architectures that PyTorch runs on


def resolved(files: Iterable[str | os.PathLike]) -> frozenset[str]:
    """The files as the kernel names them, which follows links."""
    return frozenset(os.path.realpath(file) for file in files)


def release_mapped(tensor: torch.Tensor, files: frozenset[str]) -> int:
    """Drop the memory pages of a tensor that is a view of one of the mapped ``files`` ([`resolved`]); the number of
    bytes dropped, 0 for any other tensor and where the system cannot.

    Only for a tensor that nobody wrote to: pages are read from the file again when they are used again, without what
    was written.
    """
    if not files or not sys.platform.startswith("linux") or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return 0
    first = tensor.data_ptr()
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (first + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop <= start or not any(low <= start and stop <= high for low, high in _mappings(files)):
        return 0
    return _drop(start, stop)


def release_files(files: frozenset[str]) -> int:
    """Drop the memory pages of all mappings of ``files`` ([`resolved`]), for tensors whose own views are gone; the
    number of bytes of the mappings, 0 where the system cannot.

    Only while nobody has written to a tensor that is a view of them, as for [`release_mapped`].
    """
    if not files or not sys.platform.startswith("linux"):
        return 0
    return sum(_drop(low, high) for low, high in list(_mappings(files)))


def _drop(start: int, stop: int) -> int:
    return 0 if _madvise()(start, stop - start, _DONTNEED) else stop - start


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


def _mappings(files: frozenset[str]) -> Iterator[tuple[int, int]]:
    """First and last address of every mapping of the files."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5] in files:
                low, _, high = fields[0].partition("-")
                yield int(low, 16), int(high, 16)
