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
from dataclasses import dataclass, field

from .compile import Compiled
from .gpus import BUSY_WARPS, GPU, ISSUE, LATENCY, PIPE, START
from .instructions import body, counted, loops_of, read_amdgcn, read_sass, weights_of
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
        flops: by kind of product.
    """

    seconds: float
    parts: dict[str, float]
    instructions: dict[str, float]
    programs_per_multiprocessor: int = 0
    flops: dict[str, float] = field(default_factory=dict)

    @property
    def bottleneck(self) -> str:
        """The longest part."""
        return max(self.parts, key=self.parts.__getitem__)


#: Pipes on which instructions run besides one another; float and integer products share one.
_PIPES = {"integer": ("integer",), "float": ("float", "multiply"), "special": ("special",)}
_AMD_PIPES = {"vector": ("integer", "multiply", "float", "special")}
_SCHEDULERS = 4


def executed(compiled: Compiled, gpu: GPU, work: Work) -> dict[str, float]:
    """Instructions that a warp of a program with work executes, by pipe, and its ``"lines"`` of memory.

    A product that the compiler has put before or behind the loop is a trip less of the loop.

    Raises `ValueError` for loops of a kernel that has no rule, or fewer loops than the rule says.
    """
    code = body((read_amdgcn if gpu.vendor == "amd" else read_sass)(compiled.code))
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
    found = executed(compiled, gpu, work)
    programs = resident(compiled, gpu)
    # The multiprocessor with the most programs is the last one.
    on_busiest = math.ceil(work.programs / gpu.multiprocessors)
    warps = compiled.warps * on_busiest / _SCHEDULERS
    together = min(programs, on_busiest)
    busy = min(1.0, together * compiled.warps / _SCHEDULERS / BUSY_WARPS)
    parts = {"memory": work.n_bytes / gpu.copy}
    lines = found.pop("lines")
    parts["loads"] = warps * lines * gpu.line_cycles / (PIPE * busy * gpu.clock)
    pipes = _AMD_PIPES if gpu.vendor == "amd" else _PIPES
    for name, kinds in pipes.items():
        cycles = sum(found.get(kind, 0.0) * gpu.cycles[kind] for kind in kinds)
        parts[name] = warps * cycles / (PIPE * busy * gpu.clock)
    if gpu.vendor == "nvidia":
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
    return Estimate(START + longest, parts, per_unit, programs, work.flops)


def estimate_operator(step: Operator, gpu: GPU) -> Estimate:
    """Of an operator of torch: products at the rate of the vendor's library, the rest at the bandwidth of a copy."""
    parts, flops = {"memory": step.n_bytes / gpu.copy}, {}
    if step.name in PRODUCTS:
        (first, size), (second, _) = step.inputs[PRODUCTS[step.name] :][:2]
        kind = "fp8" if size == 1 else "bf16"
        flops[kind] = 2.0 * math.prod(first) * second[-1]
        parts["tensor"] = flops[kind] / gpu.library(kind)
    longest = max(parts.values())
    return Estimate(START + longest, {**parts, "start": START}, {}, flops=flops)


#: Operators that multiply matrices: where the first of both is among their tensors.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "_scaled_mm": 0, "_scaled_mm_v2": 0}


def in_turn(estimates: Sequence[Estimate]) -> Estimate:
    """Of launches one after the other."""
    parts: dict[str, float] = {}
    flops: dict[str, float] = {}
    for one in estimates:
        for kind, count in one.flops.items():
            flops[kind] = flops.get(kind, 0.0) + count
        name = one.bottleneck
        parts[name] = parts.get(name, 0.0) + one.seconds - one.parts["start"]
        parts["start"] = parts.get("start", 0.0) + one.parts["start"]
    return Estimate(sum(one.seconds for one in estimates), parts, {}, flops=flops)
