# SPDX-License-Identifier: Apache-2.0
"""Threads of the fused C++ functions."""

import ctypes
import os

import pytest
import torch

from mxfp4_kernels import cpu as library


@pytest.fixture(params=["openmp", "no openmp"])
def threads(request):
    """A function that sets the number of threads: torch's OpenMP threads or, as in a forked process, new ones."""
    before = torch.get_num_threads()
    process = ctypes.c_int.in_dll(library.load()[0], "mxfp4_process")
    process.value = os.getpid() if request.param == "openmp" else 0
    yield torch.set_num_threads
    torch.set_num_threads(before)
    process.value = library._PROCESS
