# SPDX-License-Identifier: Apache-2.0
"""Launches compiled for NVIDIA GPUs that are not there, and the instructions of their code, counted by pipe.

A loop is what lies between a branch back and its target. The caller says how often each runs, in the order in which
loops begin; what runs once counts once. A loop that does not run takes the branch around it along: the largest part of
the code that some branch skips and that has no loop which runs. Of two ways that a branch chooses between, the one that
divides more by the slow way does not run. Code behind the last exit (slow divisions, waiting) does not count.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
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
        code: SASS with its addresses.
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
        self._target = GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], gpu.warp)
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
    if made.hash not in _compiled:
        code = _disassemble(made.asm["cubin"])
        registers, spilled = resources(code)
        _compiled[made.hash] = Compiled(code, registers, made.metadata.shared, spilled, made.metadata.num_warps)
    return _compiled[made.hash]


@contextlib.contextmanager
def _driven_by(gpu: GPU) -> Iterator[None]:
    driver = triton.runtime.driver
    with mock.patch.object(type(driver), "active", property(lambda _: _Driver(gpu))):
        yield


def resources(sass: str) -> tuple[int, int]:
    """Return registers, and bytes of stack and local memory, from what `cuobjdump -res-usage` prints."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", sass)
    if found is None:
        raise ValueError("cuobjdump printed no line of resources")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tools = triton.knobs.nvidia
        command: list[Any] = [tools.cuobjdump.path, "-sass", "-res-usage", file.name]
        environment = {"PATH": tools.nvdisasm.path.rpartition("/")[0]}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One line of machine code.

    Attributes:
        at: its place; only the order counts.
        name: with its suffixes, ``"LDG.E.128"``.
        target: of a branch.
        conditional: it has a predicate, or is a conditional branch.
    """

    at: int
    name: str
    target: int | None = None
    conditional: bool = False


@dataclass(frozen=True)
class Loop:
    """From the first to the last instruction, both included."""

    start: int
    end: int

    def holds(self, at: int) -> bool:
        return self.start <= at <= self.end


#: Instructions that a loop has at least; shorter ones wait.
LEAST_LOOP = 9
_SASS = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
#: Some disassemblers write behind it what the instruction waits for: ``&req={3} ?trans11``.
_SASS_TARGET = re.compile(r"0x([0-9a-f]+)\s*(?:[&?].*)?$")


def read_sass(text: str) -> list[Instruction]:
    """Of what cuobjdump prints; padding left out."""
    found = []
    for at, predicate, name, rest in _SASS.findall(text):
        target = _SASS_TARGET.search(rest) if name.partition(".")[0] == "BRA" else None
        conditional = bool(predicate) or bool(re.match(r"\s*!?U?P\d", rest)) and name.startswith("BRA")
        if name != "NOP":
            found.append(Instruction(int(at, 16), name, int(target[1], 16) if target else None, conditional))
    return found


def is_exit(instruction: Instruction) -> bool:
    return instruction.name == "EXIT"


def body(code: Sequence[Instruction]) -> list[Instruction]:
    """Up to the last exit of all threads."""
    last = max((i for i, one in enumerate(code) if is_exit(one) and not one.conditional), default=len(code) - 1)
    return list(code[: last + 1])


def loops_of(code: Sequence[Instruction]) -> list[Loop]:
    """In the order in which they begin, outer ones first."""
    ends: dict[int, int] = {}
    for one in code:
        if one.target is not None and one.target <= one.at:
            ends[one.target] = max(one.at, ends.get(one.target, 0))
    loops = [Loop(start, end) for start, end in sorted(ends.items())]
    return [loop for loop in loops if sum(loop.holds(one.at) for one in code) >= LEAST_LOOP]


def weights_of(code: Sequence[Instruction], trips: Sequence[float], finishing: float = 1.0) -> list[float]:
    """How often a warp executes each instruction.

    Args:
        code: a kernel's [`body`].
        trips: of its first loops; the others do not run.
        finishing: the part of programs that goes on behind the first exit that is not for all.

    Raises:
        ValueError: fewer loops than trips.
    """
    loops = loops_of(code)
    if len(loops) < len(trips):
        raise ValueError(f"the code has {len(loops)} loops, and trips are given for {len(trips)}")
    times = dict(zip(loops, [*trips, *[0.0] * (len(loops) - len(trips))], strict=True))
    idle = [loop for loop, count in times.items() if not count]
    running = [loop for loop, count in times.items() if count]
    skipped = [*(_around(loop, code, running) for loop in idle), *_slower_ways(code)]
    first_exit = next((one.at for one in code if is_exit(one) and one.conditional), None)
    weights = []
    for one in code:
        weight = 1.0
        for loop in running:
            if loop.holds(one.at):
                weight *= times[loop]
        if any(part.holds(one.at) for part in skipped):
            weight = 0.0
        if first_exit is not None and one.at > first_exit:
            weight *= finishing
        weights.append(weight)
    return weights


def _around(loop: Loop, code: Sequence[Instruction], running: Sequence[Loop]) -> Loop:
    """Return the largest part that a branch skips with the loop, and with none that runs."""
    best = loop
    for one in code:
        if one.target is None or not one.conditional or not one.at < loop.start <= loop.end < one.target:
            continue
        if one.target > code[-1].at:
            # To where it waits, behind the last exit, and back.
            continue
        part = Loop(one.at + 1, one.target - 1)
        if not any(part.holds(other.start) for other in running) and part.start < best.start:
            best = part
    return best


def _slower_ways(code: Sequence[Instruction]) -> list[Loop]:
    """Of each branch with two ways that meet again, the one with more slow divisions."""
    places = {one.at: i for i, one in enumerate(code)}
    found = []
    for i, one in enumerate(code):
        middle = places.get(one.target) if one.conditional and one.target is not None else None
        if middle is None or middle <= i + 1:
            continue
        jump = code[middle - 1]
        end = places.get(jump.target) if jump.target is not None and not jump.conditional else None
        if end is None or end <= middle:
            continue
        ways = code[i + 1 : middle], code[middle:end]
        if not all(pipe_of(x.name) in _ARITHMETIC for way in ways for x in way):
            continue
        slow = [sum(_divides_slowly(x) for x in way) for way in ways]
        if slow[0] != slow[1]:
            way = ways[slow[1] > slow[0]]
            found.append(Loop(way[0].at, way[-1].at))
    return found


#: Pipes of what a way has that is an arithmetic detail: no products, no memory.
_ARITHMETIC = ("special", "float", "multiply", "integer", "scalar", "other")


def _divides_slowly(one: Instruction) -> bool:
    return one.name.startswith("CALL")


# ---- pipes ----------------------------------------------------------------------------------------------------------

_SASS_PIPES = {
    "matrix": "HMMA QMMA OMMA IMMA HGMMA QGMMA UTCHMMA UTCQMMA UTCOMMA",
    "special": "MUFU I2F F2I F2F FRND POPC FLO BREV",
    "loads": "LD LDG LDS LDSM LDL ST STG STS STSM STL LDGSTS ATOM ATOMG ATOMS RED REDG REDUX SHFL LDTM STTM",
    "float": "FFMA FADD FMUL HFMA2 HADD2 HMUL2 FFMA2 FADD2 FMUL2",
    "multiply": "IMAD IMUL IDP XMAD",
    "integer": "LOP3 PLOP3 LOP SHF SHL SHR PRMT IADD3 IADD VIADD LEA IABS BMSK SGXT ISETP FSETP FSET HSET2 HSETP2 SEL "
    "FSEL IMNMX VIMNMX VIMNMX3 VIADDMNMX FMNMX FMNMX3 HMNMX2 VHMNMX VABSDIFF VABSDIFF4 I2FP F2FP I2IP FCHK P2R R2P "
    "VOTE MOV CS2R",
}
_PIPE_OF_SASS = {name: pipe for pipe, names in _SASS_PIPES.items() for name in names.split()}


def pipe_of(name: str) -> str:
    """Return what takes an instruction: ``"matrix"``, ``"special"``, ``"loads"`` (and stores, and what goes between
    threads), ``"float"``, ``"multiply"`` (of integers), ``"integer"`` (and logic, comparisons, most conversions),
    ``"scalar"`` (one for a warp), or ``"other"``."""
    first = name.partition(".")[0]
    if first in _PIPE_OF_SASS:
        return _PIPE_OF_SASS[first]
    return "scalar" if first.startswith("U") or first in ("LDC", "R2UR", "S2UR", "LDCU") else "other"


_WIDTH = re.compile(r"\.(?:(128|M88\.4)|(64|M88\.2))\b")


def lines_of(name: str) -> float:
    """4 bytes for each thread that a load or store moves; 0 of other instructions."""
    if pipe_of(name) != "loads":
        return 0.0
    width = _WIDTH.search(name)
    return 1.0 if width is None else 4.0 if width[1] else 2.0


def counted(code: Sequence[Instruction], weights: Sequence[float]) -> dict[str, float]:
    """Instructions that a warp executes, by pipe; and ``"lines"``, what its loads and stores move."""
    found: dict[str, float] = {"lines": 0.0}
    for one, weight in zip(code, weights, strict=True):
        pipe = pipe_of(one.name)
        found[pipe] = found.get(pipe, 0.0) + weight
        found["lines"] += weight * lines_of(one.name)
    return found
