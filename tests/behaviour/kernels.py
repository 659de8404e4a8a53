# SPDX-License-Identifier: Apache-2.0
"""Sections ``kernels_sm90`` and ``kernels_sm100``: PTX, grids and arguments of the kernels that the public functions of
`mxfp4_kernels` launch, on a GPU that is not there: they are compiled, and do not run. Names of kernels and parameters
do not count; the number and order of parameters do."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.compiler.compiler import CompiledKernel

from ..compiled_launches import GPUS, compiled_for
from .interpreted import launches
from .record import Record, without_names


def record(record: Record, capability: int) -> None:
    """Record everything of this section."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    for name in launches("meta", small=False):
        with record.errors(name), fake_gpu(capability) as found:
            launches("cuda", small=False)[name]()
            record.value(f"{name}/launches", len(found))
            for number, launch in enumerate(found):
                record.text(f"{name}/{number}/ptx", launch.pop("ptx"))
                for part, value in launch.items():
                    record.value(f"{name}/{number}/{part}", value)


def _launch(kernel: CompiledKernel, grid: tuple[int, ...], arguments: list) -> dict[str, Any]:
    """One launch: names of kernels out of the PTX, tensors among the arguments of run time as dtype and shape."""
    data = kernel.metadata
    return {
        "ptx": without_names(kernel.asm["ptx"]),
        "grid": grid,
        "settings": {"warps": data.num_warps, "stages": data.num_stages, "shared": data.shared},
        "arguments": [
            f"{kind}: " + (f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value))
            for kind, value in arguments
        ],
    }


@contextlib.contextmanager
def fake_gpu(capability: int) -> Iterator[list[dict[str, Any]]]:
    """Within, tensors are made without storage, those on ``"cuda"`` seem to be on a GPU of a compute capability, and
    the list grows by each launch."""
    properties = SimpleNamespace(major=capability // 10, minor=0, gcnArchName="", name=f"sm_{capability}")
    properties.multi_processor_count, properties.shared_memory_per_block_optin = GPUS[capability]
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    found: list[dict[str, Any]] = []
    stand_ins = {
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiled_for(capability, lambda *launch: found.append(_launch(*launch))))
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", lambda tensor: 1 << 20))
        # Another thread would make real tensors.
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", _submit))
        stack.enter_context(FakeTensorMode())
        yield found


def _submit(pool: ThreadPoolExecutor, function: Any, *arguments: Any, **options: Any) -> Future:
    future: Future = Future()
    future.set_result(function(*arguments, **options))
    return future
