# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of packed products into Triton's cache, on a GPU that is not there.

They are most of what the GPU benchmark compiles: one for each shape of a weight and size of a tile.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.ops import triton as kernels
from mxfp4_kernels import Packed

from .cases import QWEN, ROWS, shapes_of_qwen
from .timed import ROOT


#: ``(n, k, rows, has_bias)``.
Product = tuple[int, int, int, bool]


def products() -> Iterator[Product]:
    """Yield products in the order in which they are measured; those of attention have biases in models."""
    for size in ("1.5B", "7B"):
        hidden, _, keys = QWEN[size]
        for n in (hidden, keys, hidden + 2 * keys):
            for rows in ROWS[0]:
                yield n, hidden, rows, True
    for group in ROWS:
        for n, k in shapes_of_qwen():
            for rows in group:
                yield n, k, rows, False


def precompile(arch: str | None) -> int:
    """Compile all of them, on all processors but one, and return the exit code.

    Args:
        arch: architecture of the GPU; `None` for that of the GPU here.
    """
    if arch is None:
        if not torch.cuda.is_available():
            print("error: without a GPU, --arch has to say for which to compile", file=sys.stderr)
            return 2
        arch = "".join(map(str, torch.cuda.get_device_capability()))
    # Fake tensors would make room on a real GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Not forked: a process that has asked a GPU cannot be.
    workers = ProcessPoolExecutor(
        max(1, (os.cpu_count() or 2) - 1), multiprocessing.get_context("spawn"), os.nice, (19,)
    )
    with workers:
        found = set(workers.map(partial(compiled, arch), products()))
    print(f"{len(found)} kernels are compiled for sm_{arch}")
    return 0


def compiled(arch: str, product: Product) -> str:
    """Compile the kernel of a product, and return its name in the cache."""
    sys.path.append(str(ROOT / "tests"))
    from compiled_launches import fake_gpu

    n, k, rows, has_bias = product
    scheme = MXFP4RLConfig(mode="packed").weight_scheme
    device = torch.device("cuda", 0)
    with fake_gpu(arch, machine_code=True) as launches:
        multiply = kernels.packed_product(n, k, scheme, device)
        packed = Packed.empty(device, (n, k), multiply.scheme)
        bias = None
        if has_bias:
            bias = torch.empty(n, dtype=torch.bfloat16, device=device)
        multiply(torch.empty(rows, k, dtype=torch.bfloat16, device=device), packed, bias)
    (launch,) = launches
    return launch.kernel.hash
