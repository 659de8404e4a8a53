# SPDX-License-Identifier: Apache-2.0
"""Launches compiled for GPUs that are not there, as Triton itself compiles them: their code, and what they take."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from .gpus import GPU
from .stub import Launch


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel.

    Attributes:
        code: SASS with its addresses, or amdgcn assembly.
        registers: of a thread.
        shared: bytes of a program.
        spilled: bytes of a thread that do not fit into registers.
        warps: of a program.
    """

    code: str
    registers: int
    shared: int
    spilled: int
    warps: int


_compiled: dict[str, Compiled] = {}


class _Driver:
    """What Triton asks about a GPU before it compiles."""

    def __init__(self, gpu: GPU):
        arch = gpu.arch if gpu.vendor == "amd" else 10 * gpu.capability[0] + gpu.capability[1]
        self._target = GPUTarget("hip" if gpu.vendor == "amd" else "cuda", arch, gpu.warp)
        self._number = gpu.number

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def compile_launch(launch: Launch, gpu: GPU) -> Compiled:
    """Compile what a launch needs, specialized by its arguments as Triton does it. A second time it comes from Triton's
    cache."""
    with _driven_by(gpu):
        made = launch.kernel.run(*launch.arguments, grid=launch.grid, warmup=True, **launch.constants)
    if made.hash in _compiled:
        return _compiled[made.hash]
    metadata = made.metadata
    if gpu.vendor == "amd":
        code = made.asm["amdgcn"]
        registers, spilled = amd_resources(code)
    else:
        code = _disassemble(made.asm["cubin"])
        registers, spilled = nvidia_resources(code)
    found = _compiled[made.hash] = Compiled(code, registers, metadata.shared, spilled, metadata.num_warps)
    return found


@contextlib.contextmanager
def _driven_by(gpu: GPU) -> Iterator[None]:
    driver = triton.runtime.driver
    with mock.patch.object(type(driver), "active", property(lambda _: _Driver(gpu))):
        yield


def nvidia_resources(sass: str) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of what `cuobjdump -res-usage` prints."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", sass)
    if found is None:
        raise ValueError("cuobjdump printed no line of resources")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def amd_resources(code: str) -> tuple[int, int]:
    """Vector registers, those for matrix products among them, and bytes of scratch memory, of amdgcn assembly."""
    count = re.search(r"^\s*\.vgpr_count:\s*(\d+)", code, re.MULTILINE)
    scratch = re.search(r"ScratchSize: (\d+)", code)
    if count is None or scratch is None:
        raise ValueError("the assembly does not say what registers and scratch memory it takes")
    return int(count[1]), int(scratch[1])


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tools = triton.knobs.nvidia
        command: list[Any] = [tools.cuobjdump.path, "-sass", "-res-usage", file.name]
        environment = {"PATH": tools.nvdisasm.path.rpartition("/")[0]}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
