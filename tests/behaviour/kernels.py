# SPDX-License-Identifier: Apache-2.0
"""Sections ``kernels_sm90`` and ``kernels_sm100``: PTX, grids and arguments of the kernels that the public functions of
`mxfp4_kernels` launch. Names of kernels and parameters do not count; the number and order of parameters do."""

import importlib
import os
import pkgutil

import triton

import mxfp4_kernels

from .fake_gpu import Launch, fake_gpu
from .launches import launches
from .record import Record


def record(record: Record, capability: int) -> None:
    """Record everything of this section; says which kernels nothing launched."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    launched = set()
    for name in launches("meta", small=False):
        with record.errors(name), fake_gpu(capability) as found:
            launches("cuda", small=False)[name]()
            launched.update(launch.kernel for launch in found)
            record.value(f"{name}/launches", len(found))
            for number, launch in enumerate(found):
                _record_launch(record, f"{name}/{number}", launch)
    if missed := sorted(kernel_names() - launched):
        print(f"not launched, so not recorded: {', '.join(missed)}")


def _record_launch(record: Record, name: str, launch: Launch) -> None:
    record.text(f"{name}/ptx", launch.ptx)
    record.value(f"{name}/grid", launch.grid)
    record.value(f"{name}/settings", launch.settings)
    record.value(f"{name}/arguments", launch.arguments)


def kernel_names() -> set[str]:
    """The kernels of the package: Triton's functions whose name ends with ``_kernel``."""
    found = set()
    for module in pkgutil.walk_packages(mxfp4_kernels.__path__, "mxfp4_kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                found.add(name)
    return found
