# SPDX-License-Identifier: Apache-2.0
"""Microseconds of Python and PyTorch in front of the product of one row, of a packed layer beside `nn.Linear`.

    python -m benchmarks.host_time

No GPU is needed, and none is measured: tensors are on the CPU, the layer multiplies as on an H100, and Triton compiles
the kernel and binds its arguments, but what would launch it does nothing. The plain layer is `nn.Linear(8, 8)`, whose
product takes next to no time. A packed layer of that size in C++, with its product, shows the same for CPUs.
"""

import contextlib
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import CompiledKernel

from hf_mxfp4 import MXFP4PackedLinear, MXFP4RLConfig
from hf_mxfp4.ops import quantization
from hf_mxfp4.recipes.common.reporting import source_commit
from mxfp4_kernels.decode import product

from .records import made, median_ratio, option_parser, write


ROUNDS = 201
CALLS = 50
#: A projection of a model with 1.5B parameters.
SIZE = 1536


@contextlib.contextmanager
def stubbed_launches() -> Iterator[None]:
    """Let Triton kernels run on tensors of the CPU up to their launch for an H100, which does nothing."""
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    constants = product.weight_constants
    stand_ins: list[tuple[Any, str, Any]] = [
        (product, "weight_constants", lambda *arguments: constants(*arguments[:-1], on_gpu=True)),
        (triton.runtime.driver, "_active", driver),
        (CompiledKernel, "run", lambda *arguments: None),
        (CompiledKernel, "_init_handles", lambda kernel: None),
        (CUDABackend, "make_cubin", lambda *arguments: b""),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def planned_for_gpu(layer: MXFP4PackedLinear, x: torch.Tensor) -> None:
    """Let a layer on the CPU plan its products with the Triton kernel."""
    with mock.patch.object(quantization, "choose_backend", lambda *_, **__: "triton"):
        layer(x)


def packed_layer(size: int) -> MXFP4PackedLinear:
    """Return a packed layer in bfloat16."""
    linear = nn.Linear(size, size, dtype=torch.bfloat16)
    return MXFP4PackedLinear.from_linear(linear, MXFP4RLConfig(mode="packed"))


def microseconds(call: Callable[[], Any]) -> float:
    """Return the mean of some calls, in the time of this thread, which other processes do not prolong."""
    return 1e6 * timeit.timeit(call, timer=time.thread_time, number=CALLS) / CALLS


@torch.no_grad()
def main() -> None:
    """Measure the layers in turns, print medians, and write records."""
    options = option_parser(__doc__, "host_time").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    row = torch.randn(1, SIZE).bfloat16()
    small_row = torch.randn(1, 8).bfloat16()
    plain = nn.Linear(8, 8, dtype=torch.bfloat16)
    on_gpu = packed_layer(SIZE)
    on_cpu = packed_layer(8)
    with stubbed_launches():
        planned_for_gpu(on_gpu, row)
        ways = {
            "nn.Linear(8, 8)": lambda: plain(small_row),
            f"packed {SIZE} x {SIZE}, launch stubbed": lambda: on_gpu(row),
            "packed 8 x 8 in C++, with the product": lambda: on_cpu(small_row),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, call in ways.items():
                times[name].append(microseconds(call))
    baseline, *_ = times.values()
    common = made("python -m benchmarks.host_time", ("torch", "triton")) | {"commit": source_commit()}
    records = []
    for name, found in times.items():
        record = {
            "name": f"host_time / {name}",
            "shape": [ROUNDS, CALLS],
            "value": round(statistics.median(found), 2),
            "unit": "us",
            "baseline": round(statistics.median(baseline), 2),
            "ratio": round(median_ratio(found, baseline), 2),
            "ceiling_fraction": None,
        }
        records.append({**record, **common})
        print(f"{name}: {record['value']:.1f} us, {record['ratio']:.2f}", flush=True)
    write(records, options.out)


if __name__ == "__main__":
    main()
