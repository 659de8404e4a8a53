# SPDX-License-Identifier: Apache-2.0
"""How long a launch would take on a GPU, from the code that the compiler made: a model, not a measurement.

The time of a launch is `START` and the longest of: its bytes at the bandwidth of a copy; the same with no more bytes
under way than resident programs ask for (`LATENCY`); its instructions at the rate at which a multiprocessor issues
them; those of each pipe at the pipe's rate; its products at `PRODUCT` of the peak. Where a program is alone on a
multiprocessor its products and its instructions do not overlap; with n they do but for an n-th.

Left out: caches (each operand is read once, and nothing is found in one), conflicts of shared memory and uncoalesced
access, dependences between instructions other than by the number of warps, clocks that fall under load, the sums of
splits, and the host. A kernel can only be slower for these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .code import Compiled, body, counted, loops_of, read_sass, weights_of
from .gpus import BUSY_WARPS, GPU, ISSUE, LATENCY, PIPE, START
from .stub import Operator
from .work import Work


@dataclass(frozen=True)
class Estimate:
    """Of a launch, or of several one after the other.

    Attributes:
        seconds: in all.
        parts: seconds of each bound alone, the longest of which counts; with ``"start"``.
        instructions: of a thread per unit of work, by pipe.
        programs_per_multiprocessor: resident at once.
    """

    seconds: float
    parts: dict[str, float]
    instructions: dict[str, float]
    programs_per_multiprocessor: int = 0

    @property
    def bottleneck(self) -> str:
        """The longest part."""
        return max(self.parts, key=self.parts.__getitem__)


#: Pipes on which instructions run besides one another; float and integer products share one.
_PIPES = {"integer": ("integer",), "float": ("float", "multiply"), "special": ("special",)}
_SCHEDULERS = 4


def executed(compiled: Compiled, work: Work) -> dict[str, float]:
    """Instructions that a warp of a program with work executes, by pipe, and its ``"lines"`` of memory.

    A product that the compiler has put before or behind the loop is a trip less of the loop.

    Raises `ValueError` for loops of a kernel that has no rule, or fewer loops than the rule says.
    """
    code = body(read_sass(compiled.code))
    if not work.has_rule and loops_of(code):
        raise ValueError(
            "a kernel with loops needs a rule in benchmarks/gpu/model/work.py that says how often they run"
        )
    found = counted(code, weights_of(code, work.trips, work.finishing))
    if not work.product_in_loop or not work.trips:
        return found
    once = counted(code, weights_of(code, (1.0, *work.trips[1:]), work.finishing)).get("matrix", 0.0)
    twice = counted(code, weights_of(code, (2.0, *work.trips[1:]), work.finishing)).get("matrix", 0.0)
    in_loop = twice - once
    peeled = (once - in_loop) / in_loop if in_loop else 0.0
    trips = max(1.0, work.trips[0] - round(peeled))
    return counted(code, weights_of(code, (trips, *work.trips[1:]), work.finishing))


def resident(compiled: Compiled, gpu: GPU) -> int:
    """Programs that a multiprocessor holds at once, by registers, shared memory and warps."""
    threads = compiled.warps * gpu.warp
    # Registers are handed out to a warp, 8 to a thread at a time; a program takes 1 KiB of shared memory besides.
    per_thread = 8 * math.ceil(compiled.registers / 8)
    by_registers = gpu.registers // (per_thread * threads)
    by_shared = gpu.shared // (compiled.shared + 1024)
    return max(1, min(by_registers, by_shared, gpu.warps // compiled.warps, 32))


def estimate(compiled: Compiled, gpu: GPU, work: Work) -> Estimate:
    """Of one launch."""
    found = executed(compiled, work)
    programs = resident(compiled, gpu)
    # The multiprocessor with the most programs is the last one.
    on_busiest = math.ceil(work.programs / gpu.multiprocessors)
    warps = compiled.warps * on_busiest / _SCHEDULERS
    together = min(programs, on_busiest)
    busy = min(1.0, together * compiled.warps / _SCHEDULERS / BUSY_WARPS)
    parts = {"memory": work.n_bytes / gpu.copy}
    lines = found.pop("lines")
    parts["loads"] = warps * lines * gpu.line_cycles / (PIPE * busy * gpu.clock)
    for name, kinds in _PIPES.items():
        cycles = sum(found.get(kind, 0.0) * gpu.cycles[kind] for kind in kinds)
        parts[name] = warps * cycles / (PIPE * busy * gpu.clock)
    parts["issue"] = warps * sum(found.values()) / (ISSUE * busy * gpu.clock)
    under_way = gpu.multiprocessors * together * work.n_bytes / work.programs
    parts["latency"] = work.n_bytes * LATENCY / min(under_way, work.n_bytes)
    instructing = max(parts[name] for name in parts if name not in ("memory", "latency"))
    parts["tensor"] = sum(flops / gpu.ceiling(kind) for kind, flops in work.flops.items())
    waves = math.ceil(work.programs / gpu.multiprocessors) * gpu.multiprocessors / work.programs
    parts["tensor"] *= waves
    longest = max(parts.values())
    if parts["tensor"]:
        longest = max(longest, max(parts["tensor"], instructing) + min(parts["tensor"], instructing) / together)
    parts["start"] = START
    per_unit = {kind: n * gpu.warp * compiled.warps * work.programs / work.elements for kind, n in found.items()}
    return Estimate(START + longest, parts, per_unit, programs)


def estimate_operator(step: Operator, gpu: GPU, reached: float = 1.0) -> Estimate:
    """Return that of an operator of torch: products at the rate of the vendor's library, others at that of a copy. Of
    the weights of experts the part ``reached`` is read."""
    n_bytes, parts = step.n_bytes, {}
    if step.name in PRODUCTS:
        (first, dtype), (second, second_dtype) = step.inputs[PRODUCTS[step.name] :][:2]
        kind = KINDS.get(dtype, "bf16")
        packed = 2 if kind == "fp4" else 1
        parts["tensor"] = 2.0 * packed * math.prod(first) * second[-1] / gpu.library(kind)
        if len(second) > len(first):
            n_bytes -= (1 - reached) * math.prod(second) * second_dtype.itemsize
    parts["memory"] = n_bytes / gpu.copy
    longest = max(parts.values())
    return Estimate(START + longest, {**parts, "start": START}, {})


#: Operators that multiply matrices: where the first of both is among their tensors.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "_scaled_mm": 0, "_scaled_mm_v2": 0}
PRODUCTS |= {"_grouped_mm": 0, "_scaled_grouped_mm": 0}
#: Kind of tensor cores by the dtype of the operands; two numbers of fp4 are one element.
KINDS = {torch.float8_e4m3fn: "fp8", torch.float4_e2m1fn_x2: "fp4"}


def in_turn(estimates: Sequence[Estimate]) -> Estimate:
    """Return that of launches one after the other."""
    parts: dict[str, float] = {}
    for one in estimates:
        parts[one.bottleneck] = parts.get(one.bottleneck, 0.0) + one.seconds - one.parts["start"]
        parts["start"] = parts.get("start", 0.0) + one.parts["start"]
    return Estimate(sum(one.seconds for one in estimates), parts, {})
