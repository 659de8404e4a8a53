# SPDX-License-Identifier: Apache-2.0
"""Cases of the GPU benchmark: checked, timed beside what they are compared with, and recorded, whatever happens."""

import gc
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..records import made, write


Call = Callable[[], Any]

#: What records of interpreted runs have in place of a GPU. The documents refuse them.
INTERPRETER = "CPU, Triton interpreter"
NO_GPU = (
    "no GPU that torch can use. Without one, `TRITON_INTERPRET=1 python -m benchmarks.gpu --tiny --out DIR` checks on "
    "tiny shapes that every section works (its times mean nothing)."
)
NOT_TINY = (
    "TRITON_INTERPRET=1 runs kernels in Triton's interpreter, thousands of times slower: add --tiny, or unset it."
)
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "hf-mxfp4", "bitsandbytes", "torchao")


class WrongResult(AssertionError):
    """A contender computes something else than it is measured for."""


class Absent(Exception):
    """A case or peer that cannot take part, for the reason given."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        section, what, shape: name the record.
        build: makes tensors on a device, the same ones for each backend, and returns the call that is measured.
        n_bytes, flops: what the call cannot do without: bytes to move through device memory, operations by the kind of
            tensor core (``bf16`` or ``fp8``).
        peers: by name, what builds the call of another library; the first one is the baseline.
        tolerance: of the relative error to the eager backend; 0 asks for the same bits.
    """

    section: str
    what: str
    shape: tuple[int, ...]
    build: Callable[[torch.device, str], Call]
    n_bytes: float = 0.0
    flops: Mapping[str, float] = field(default_factory=dict)
    peers: Mapping[str, Callable[[torch.device], Call]] = field(default_factory=dict)
    tolerance: float = 0.0

    @property
    def graphs(self) -> bool:
        """Whether it is timed in CUDA graphs, as calls are that are so short that a GPU would wait for the host."""
        return self.section in ("quantize", "to_e4m3", "decode")

    @property
    def name(self) -> str:
        return f"{self.section} / {self.what}"

    def floor(self, ceilings: Mapping[str, float]) -> float | None:
        """Return the seconds that it takes at the ceilings; `None` where one of them is not known."""
        if not {"copy", *self.flops} <= ceilings.keys():
            return None
        return max(self.n_bytes / ceilings["copy"], *(n / ceilings[kind] for kind, n in self.flops.items()), 0.0)


def find_device(tiny: bool) -> torch.device:
    """Return the GPU, or the CPU where TRITON_INTERPRET=1 asks for the interpreter.

    Raises `RuntimeError` when there is neither, with what to do.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        if not tiny:
            raise RuntimeError(NOT_TINY)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(NO_GPU)
    return torch.device("cuda", 0)


def hardware(device: torch.device) -> str:
    """Name the device in records."""
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {runtime}"


def seconds_of(call: Call, device: torch.device) -> float:
    """Return the median time of a call: by CUDA events with an empty L2 cache; on the CPU once, by the clock."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=50, rep=200, return_mode="median") / 1e3
    return host_seconds(call, 1)


def gpu_seconds(call: Call, device: torch.device, count: int = 10) -> float:
    """Return the time that a call keeps a GPU busy: replayed from a CUDA graph, so without what the host takes to
    launch it, with an empty L2 cache."""
    if device.type != "cuda":
        return seconds_of(call, device)
    call()  # compiles
    # Larger than any L2 cache: writing it leaves nothing else there.
    cache = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def call_after_flush() -> None:
        cache.zero_()
        call()

    with_call = _replayed_seconds(call_after_flush, device, count)
    flush_alone = _replayed_seconds(cache.zero_, device, count)
    return with_call - flush_alone


def _replayed_seconds(call: Call, device: torch.device, count: int) -> float:
    """Return the time of a call in a CUDA graph of ``count`` of them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return seconds_of(graph.replay, device) / count


def host_seconds(call: Call, count: int) -> float:
    """Return the mean time that so many calls keep the host busy."""
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def expect_close(what: str, found: Any, expected: Any, tolerance: float) -> None:
    """Raise `WrongResult` unless all tensors in ``found`` are those in ``expected``, but for a relative error."""
    for out, reference in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if not isinstance(out, torch.Tensor):
            continue
        if out.shape != reference.shape:
            raise WrongResult(f"{what}: the result is {list(out.shape)}, not {list(reference.shape)}")
        reference = _numbers(reference)
        error = ((_numbers(out) - reference).norm() / reference.norm().clamp_min(1e-300)).item()
        if not error <= tolerance:
            raise WrongResult(f"{what}: relative error {error:.2e}, at most {tolerance:.0e} is right")


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64; of formats of one byte, the bytes."""
    x = x.detach()
    if x.element_size() == 1:
        x = x.view(torch.uint8)
    return x.double()


class Bench:
    """Runs cases one after the other and keeps their records in ``<out>/gpu_<section>.json``, written after each.

    Attributes:
        ceilings: ``copy`` in bytes, ``bf16`` and ``fp8`` in operations per second, as they are measured.
        records: all of them, by section.
    """

    def __init__(self, device: torch.device, tiny: bool, out: Path, command: str, seconds: float = float("inf")):
        self.device = device
        self.tiny = tiny
        self.out = out
        self.ceilings: dict[str, float] = {}
        self.records: dict[str, list[dict]] = {}
        self._end = time.perf_counter() + seconds
        self._common = {"tiny": tiny, **made(command, PACKAGES, hardware(device))}

    def run(self, case: Case) -> None:
        """Check and time a case."""
        self.record(case.section, case.what, list(case.shape), lambda: self._measured(case))

    def record(self, section: str, what: str, shape: list[int], measure: Callable[[], dict[str, Any]]) -> None:
        """Record what ``measure`` returns (``value``, ``unit`` and more), or why there is nothing."""
        record = {
            "name": f"{section} / {what}",
            "shape": shape,
            "status": "ok",
            "value": "none",
            "unit": "",
            "baseline": None,
            "ratio": None,
            "ceiling_fraction": None,
        }
        try:
            if time.perf_counter() > self._end:
                raise Absent("no time left")
            record |= measure()
        except (Absent, torch.cuda.OutOfMemoryError) as reason:
            record |= {"status": "skipped", "reason": str(reason).partition("\n")[0]}
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            record |= {"status": "failed", "reason": reason, "traceback": traceback.format_exc()}
        self.records.setdefault(section, []).append(record | self._common)
        write(self.records[section], self.out / f"gpu_{section}.json")
        print(row(record), flush=True)
        # The next case finds the memory of the GPU empty.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measured(self, case: Case) -> dict[str, Any]:
        """Check a case against the eager backend, and time it and its peers."""
        call = case.build(self.device, "triton")
        expect_close(case.name, call(), case.build(self.device, "eager")(), case.tolerance)
        measure = gpu_seconds if case.graphs else seconds_of
        seconds = measure(call, self.device)
        peers = {name: self._peer(build, measure, seconds) for name, build in case.peers.items()}
        baseline = next(iter(peers), None)
        ratio = None
        if baseline is not None:
            ratio = peers[baseline].get("ratio")
        floor = case.floor(self.ceilings)
        ceiling_fraction = None
        if floor is not None:
            ceiling_fraction = floor / seconds
        flops = sum(case.flops.values())
        if flops:
            value = flops / 1e12 / seconds
            unit = "TFLOP/s"
        else:
            value = case.n_bytes / 1e9 / seconds
            unit = "GB/s"
        return {
            "value": value,
            "unit": unit,
            "seconds": seconds,
            "host": self._host_seconds(call),
            "baseline": baseline,
            "ratio": ratio,
            "ceiling_fraction": ceiling_fraction,
            "peers": peers,
        }

    def _host_seconds(self, call: Call) -> float:
        return host_seconds(call, 1 if self.tiny else 50)

    def _peer(self, build: Callable[[torch.device], Call], measure: Callable, seconds: float) -> dict[str, Any]:
        """Time another library. It may fail, for any reason, without an end of the case."""
        try:
            call = build(self.device)
            other = measure(call, self.device)
            return {"seconds": other, "ratio": other / seconds, "host": self._host_seconds(call)}
        except Exception as error:
            return {"reason": f"{type(error).__name__}: {error}".partition("\n")[0]}

    def measure_ceilings(self) -> None:
        """Measure what this GPU reaches at best: a device copy, and the vendor's products on random data."""
        n_bytes = 1 << 30
        n = 8192
        if self.tiny:
            n_bytes = 1 << 16
            n = 128

        def copy() -> dict[str, Any]:
            source = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            # A copy reads and writes each byte.
            self.ceilings["copy"] = 2 * n_bytes / seconds_of(lambda: target.copy_(source), self.device)
            return {"value": self.ceilings["copy"] / 1e9, "unit": "GB/s"}

        def product(kind: str) -> dict[str, Any]:
            a = torch.randn(n, n, device=self.device).bfloat16()
            b = torch.randn(n, n, device=self.device).bfloat16()
            if kind == "fp8":
                call = fp8_product(a, b)
            else:
                call = lambda: a @ b.t()  # noqa: E731
            expect_close(kind, call(), a.float() @ b.float().t(), 6e-2)
            self.ceilings[kind] = 2 * n**3 / seconds_of(call, self.device)
            return {"value": self.ceilings[kind] / 1e12, "unit": "TFLOP/s"}

        self.record("ceilings", "device copy", [n_bytes], copy)
        for kind in ("bf16", "fp8"):
            self.record("ceilings", f"{kind} product", [n, n, n], lambda kind=kind: product(kind))


def fp8_product(a: torch.Tensor, b: torch.Tensor) -> Call:
    """Return ``a b^T`` on E4M3 operands with a scale for each row, quantized before."""
    left, left_scale = _to_fp8(a)
    right, right_scale = _to_fp8(b)
    return lambda: torch._scaled_mm(left, right.t(), left_scale, right_scale.t(), out_dtype=torch.bfloat16)


def _to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 elements and float32 scales that bring the largest of each row to 448, the largest E4M3 value."""
    scale = x.abs().amax(dim=-1, keepdim=True).float().clamp_min(1e-12) / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def row(record: dict[str, Any]) -> str:
    """Return a record as a line for the terminal."""
    what = f"{record['name']} {'x'.join(map(str, record['shape']))}"
    if record["status"] != "ok":
        return f"{what}: {record['status']}: {record['reason']}"
    cells = [f"{what}: {record['value']:.4g} {record['unit']}"]
    if record["ceiling_fraction"] is not None:
        cells.append(f"{100 * record['ceiling_fraction']:.0f} % of ceiling")
    for name, peer in record.get("peers", {}).items():
        if "ratio" in peer:
            cells.append(f"{peer['ratio']:.2f}x {name}")
        else:
            cells.append(f"{name}: {peer['reason']}")
    return ", ".join(cells)
