# SPDX-License-Identifier: Apache-2.0
"""Sections ``kernels_sm90`` and ``kernels_sm100``: PTX, grids and arguments of the kernels that the public functions of
`mxfp4_kernels` launch, on a GPU that is not there: they are compiled, and do not run. Names of kernels and parameters
do not count; the number and order of parameters do."""

import os
from typing import Any

import torch

from ..compiled_launches import Compiled, fake_gpu
from .interpreted import launches
from .record import Record, without_names


def record(record: Record, capability: int) -> None:
    """Record everything of this section."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    for name in launches("meta", small=False):
        with record.errors(name), fake_gpu(str(capability)) as compiled:
            launches("cuda", small=False)[name]()
            record.value(f"{name}/launches", len(compiled))
            for number, launch in enumerate(map(_launch, compiled)):
                record.text(f"{name}/{number}/ptx", launch.pop("ptx"))
                for part, value in launch.items():
                    record.value(f"{name}/{number}/{part}", value)


def _launch(launch: Compiled) -> dict[str, Any]:
    """One launch: names of kernels out of the PTX, tensors among the arguments of run time as dtype and shape."""
    kernel, grid, arguments = launch
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
