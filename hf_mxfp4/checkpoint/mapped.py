# SPDX-License-Identifier: Apache-2.0
"""Give back the memory of file contents that were read and are not needed any more.

transformers maps the files of a checkpoint into memory and keeps them mapped until all is loaded. What was read stays
counted as the process's memory, so that packing a checkpoint would seem to need its full size on top.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable

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
    if stop <= start or _mapped_file(start, stop) not in files:
        return 0
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return 0 if advise(start, stop - start, _DONTNEED) else stop - start


def _mapped_file(start: int, stop: int) -> str | None:
    """The file of the mapping that holds these addresses."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            low, _, high = fields[0].partition("-")
            if int(low, 16) <= start and stop <= int(high, 16):
                return fields[5] if len(fields) == 6 else None
    return None
