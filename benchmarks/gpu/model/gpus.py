# SPDX-License-Identifier: Apache-2.0
"""What the model knows about GPUs: one table, from public documents.

Sizes, clocks and peaks: data sheets and white papers of the H100 and H200 (SXM), of Blackwell (B200 in an HGX board,
RTX 5090) and of CDNA 4 (MI355X); peaks are those of dense products with float32 sums. Instructions per clock:
"Throughput of native arithmetic instructions" of the CUDA programming guide, the RTX Blackwell white paper (integers as
fast as floats), and the instruction set guide of CDNA 4 (16 lanes for a wave of 64).

What is assumed, for all alike: a copy reaches `COPY` of the memory's bandwidth, the vendor's products `PRODUCT` of the
peak (FP8: 1.5 times that of BF16, in the middle of the 1.25 to 1.75 that NVIDIA states for cuBLAS 12.9 on Hopper), a
multiprocessor issues in `ISSUE` of its slots, and a pipe is busy for `PIPE` of the time at best.
"""

from collections.abc import Mapping
from dataclasses import dataclass


COPY, PRODUCT, ISSUE, PIPE = 0.9, 0.8, 0.7, 0.8
#: FP8 products of the vendor's library over those in BF16.
FP8_OVER_BF16 = 1.5
#: Seconds from the start of a kernel to its first bytes and from its last ones to the next kernel, in a graph.
START = 2e-6
#: Seconds that a load from memory takes when many are under way.
LATENCY = 0.8e-6
#: Warps of a scheduler that it takes for all of `ISSUE`: one alone waits for its own results half of the time.
BUSY_WARPS = 2

#: Cycles in which a scheduler's part of a multiprocessor takes a warp's instruction, by pipe.
_NVIDIA = {"integer": 2.0, "multiply": 2.0, "float": 1.0, "special": 8.0, "scalar": 1.0, "other": 1.0}
_AMD = {"integer": 4.0, "multiply": 4.0, "float": 4.0, "special": 16.0, "scalar": 1.0, "other": 1.0}


@dataclass(frozen=True)
class GPU:
    """One model of GPU.

    Attributes:
        name, vendor, arch: ``"H100"``, ``"nvidia"`` or ``"amd"``, and ``"sm_90"`` or ``"gfx950"``.
        number: of the device that stands for it; see [`benchmarks.gpu.model.stub.cuda_of`].
        capability: as torch gives it.
        multiprocessors: or compute units.
        clock: in Hz, under load.
        bandwidth: of the memory, bytes per second.
        peaks: operations per second of dense products, by kind.
        cycles: of a warp's instruction, by pipe.
        line_cycles: in which a scheduler's part of the multiprocessor moves 4 bytes for each thread of a warp.
        warp: its threads.
        registers, warps, shared: of a multiprocessor: registers of 32 bits, warps at most, bytes.
        shared_of_program: bytes, at most.
        memory, l2: bytes.
    """

    name: str
    vendor: str
    arch: str
    number: int
    capability: tuple[int, int]
    multiprocessors: int
    clock: float
    bandwidth: float
    peaks: Mapping[str, float]
    cycles: Mapping[str, float]
    line_cycles: float
    warp: int
    registers: int
    warps: int
    shared: int
    shared_of_program: int
    memory: int
    l2: int

    @property
    def copy(self) -> float:
        """Bytes per second that a copy reaches, those read and those written."""
        return COPY * self.bandwidth

    def ceiling(self, kind: str) -> float:
        """Operations per second that products reach at best."""
        return PRODUCT * self.peaks[kind]

    def library(self, kind: str) -> float:
        """Those that products of the vendor's library reach, in ``"bf16"`` or ``"fp8"``."""
        return self.ceiling("bf16") * (FP8_OVER_BF16 if kind == "fp8" else 1.0)


_KIB, _GIB = 1 << 10, 1 << 30
_HOPPER = {
    "vendor": "nvidia",
    "arch": "sm_90",
    "capability": (9, 0),
    "multiprocessors": 132,
    "clock": 1.7e9,
    "peaks": {"bf16": 989e12, "fp8": 1979e12},
    "cycles": _NVIDIA,
    "line_cycles": 4.0,
    "warp": 32,
    "registers": 1 << 16,
    "warps": 64,
    "shared": 228 * _KIB,
    "shared_of_program": 227 * _KIB,
    "l2": 50 << 20,
}
GPUS = (
    GPU(name="H100", number=90, bandwidth=3.35e12, memory=80 * _GIB, **_HOPPER),
    GPU(name="H200", number=91, bandwidth=4.8e12, memory=141 * _GIB, **_HOPPER),
    GPU(
        name="B200",
        vendor="nvidia",
        arch="sm_100",
        number=100,
        capability=(10, 0),
        multiprocessors=148,
        clock=1.7e9,
        bandwidth=8e12,
        peaks={"bf16": 2250e12, "fp8": 4500e12, "mxfp4": 9000e12},
        cycles=_NVIDIA,
        line_cycles=4.0,
        warp=32,
        registers=1 << 16,
        warps=64,
        shared=228 * _KIB,
        shared_of_program=227 * _KIB,
        memory=180 * _GIB,
        l2=126 << 20,
    ),
    GPU(
        name="RTX 5090",
        vendor="nvidia",
        arch="sm_120",
        number=120,
        capability=(12, 0),
        multiprocessors=170,
        clock=2.4e9,
        bandwidth=1.792e12,
        peaks={"bf16": 209.5e12, "fp8": 419e12, "mxfp4": 1676e12},
        cycles=_NVIDIA | {"integer": 1.0},
        line_cycles=4.0,
        warp=32,
        registers=1 << 16,
        warps=48,
        shared=100 * _KIB,
        shared_of_program=99 * _KIB,
        memory=32 * _GIB,
        l2=96 << 20,
    ),
    GPU(
        name="MI355X",
        vendor="amd",
        arch="gfx950",
        number=95,
        capability=(9, 5),
        multiprocessors=256,
        clock=2.4e9,
        bandwidth=8e12,
        peaks={"bf16": 2500e12, "fp8": 5000e12, "mxfp4": 10000e12},
        cycles=_AMD,
        line_cycles=8.0,
        warp=64,
        registers=1 << 17,
        warps=32,
        shared=160 * _KIB,
        shared_of_program=160 * _KIB,
        memory=288 * _GIB,
        l2=256 << 20,
    ),
)
ARCHS = tuple(dict.fromkeys(gpu.arch for gpu in GPUS))


def gpus_of(arch: str) -> list[GPU]:
    """Those of an architecture."""
    return [gpu for gpu in GPUS if gpu.arch == arch]
