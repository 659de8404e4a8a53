# SPDX-License-Identifier: Apache-2.0
"""What the model knows about GPUs: one table, from public documents.

Sizes, clocks and peaks: data sheets and white papers of the H100 and H200 (SXM), of Blackwell (B200 in an HGX board,
RTX 5090); peaks are those of dense products with float32 sums. Instructions per clock: "Throughput of native arithmetic
instructions" of the CUDA programming guide, and the RTX Blackwell white paper (integers as fast as floats).

What is assumed, for all alike: a copy reaches `COPY` of the memory's bandwidth, the vendor's products `PRODUCT` of the
peak (FP8: 1.5 times that of BF16, in the middle of the 1.25 to 1.75 that NVIDIA states for cuBLAS 12.9 on Hopper; FP4:
twice that of FP8, of the up to 2.3 that it states for Blackwell), a multiprocessor issues in `ISSUE` of its slots, and
a pipe is busy for `PIPE` of the time at best.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


COPY, PRODUCT, ISSUE, PIPE = 0.9, 0.8, 0.7, 0.8
#: Products of the vendor's library over those in BF16.
_OVER_BF16 = {"bf16": 1.0, "fp8": 1.5, "fp4": 3.0}
#: Seconds from the start of a kernel to its first bytes and from its last ones to the next kernel, in a graph.
START = 2e-6
#: Seconds that a load from memory takes when many are under way.
LATENCY = 0.8e-6
#: Warps of a scheduler that it takes for all of `ISSUE`: one alone waits for its own results half of the time.
BUSY_WARPS = 2

#: Cycles in which a scheduler's part of a multiprocessor takes a warp's instruction, by pipe.
_CYCLES = {"integer": 2.0, "multiply": 2.0, "float": 1.0, "special": 8.0, "scalar": 1.0, "other": 1.0}
_KIB = 1 << 10


@dataclass(frozen=True)
class GPU:
    """One model of GPU.

    Attributes:
        name, arch: ``"H100"`` and ``"sm_90"``.
        number: of the device that stands for it; see [`benchmarks.gpu.model.stub.cuda_of`].
        capability: as torch gives it.
        clock: in Hz, under load.
        bandwidth: of the memory, bytes per second.
        peaks: operations per second of dense products, by kind.
        cycles: of a warp's instruction, by pipe.
        line_cycles: in which a scheduler's part of the multiprocessor moves 4 bytes for each thread of a warp.
        warp: its threads.
        registers, warps, shared: of a multiprocessor: registers of 32 bits, warps at most, bytes.
    """

    name: str
    arch: str
    number: int
    capability: tuple[int, int]
    multiprocessors: int
    clock: float
    bandwidth: float
    peaks: Mapping[str, float]
    cycles: Mapping[str, float] = field(default_factory=lambda: _CYCLES)
    line_cycles: float = 4.0
    warp: int = 32
    registers: int = 1 << 16
    warps: int = 64
    shared: int = 228 * _KIB

    @property
    def copy(self) -> float:
        """Bytes per second that a copy reaches, those read and those written."""
        return COPY * self.bandwidth

    @property
    def shared_of_program(self) -> int:
        """Bytes of shared memory that one program can have."""
        return self.shared - _KIB

    def ceiling(self, kind: str) -> float:
        """Operations per second that products reach at best."""
        return PRODUCT * self.peaks[kind]

    def library(self, kind: str) -> float:
        """Operations per second that products of the vendor's library reach."""
        return self.ceiling("bf16") * _OVER_BF16[kind]


_HOPPER_PEAKS = {"bf16": 989e12, "fp8": 1979e12}
_B200_PEAKS = {"bf16": 2250e12, "fp8": 4500e12, "fp4": 9000e12}
_RTX_PEAKS = {"bf16": 209.5e12, "fp8": 419e12, "fp4": 1676e12}
_RTX_SIZES = {"cycles": _CYCLES | {"integer": 1.0}, "warps": 48, "shared": 100 * _KIB}
GPUS = (
    GPU("H100", "sm_90", 90, (9, 0), 132, 1.7e9, 3.35e12, _HOPPER_PEAKS),
    GPU("H200", "sm_90", 91, (9, 0), 132, 1.7e9, 4.8e12, _HOPPER_PEAKS),
    GPU("B200", "sm_100", 100, (10, 0), 148, 1.7e9, 8e12, _B200_PEAKS),
    GPU("RTX 5090", "sm_120", 120, (12, 0), 170, 2.4e9, 1.792e12, _RTX_PEAKS, **_RTX_SIZES),
)
ARCHS = tuple(dict.fromkeys(gpu.arch for gpu in GPUS))


def gpus_of(arch: str) -> list[GPU]:
    """Return the GPUs of an architecture."""
    return [gpu for gpu in GPUS if gpu.arch == arch]
