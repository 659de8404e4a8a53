# SPDX-License-Identifier: Apache-2.0
"""Cases of the GPU benchmark: checked, timed in turns with what they are compared with, and recorded, whatever
happens."""

import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from ..records import median_ratio, recorded, write
from .timed import RECORDS


Call = Callable[[], Any]
#: Returns seconds.
Sample = Callable[[], float]
Name = TypeVar("Name", bound=Hashable)

#: What records of interpreted runs have in place of a GPU. The documents refuse them.
INTERPRETER = "CPU, Triton interpreter"
NO_GPU = (
    "no GPU that torch can use. Without one, `TRITON_INTERPRET=1 python -m benchmarks.gpu.timed --tiny --out DIR` "
    "checks on tiny shapes that every item works (its times mean nothing)."
)
NOT_TINY = (
    "TRITON_INTERPRET=1 runs kernels in Triton's interpreter, thousands of times slower: add --tiny, or unset it."
)
#: Samples of each contender. A sample on a GPU is the median of calls within some milliseconds.
ROUNDS = 5
#: Milliseconds of calls before a sample, and of its own.
WARMUP = 3
REPEAT = 15
#: Calls of a sample of the host's time.
HOST_CALLS = 1000
#: Calls in a CUDA graph.
IN_GRAPH = 10
#: Kernels of a table, the longest first.
KERNELS = 20


class WrongResult(AssertionError):
    """A contender computes something else than it is measured for."""


class Absent(Exception):
    """A case or peer that cannot take part, for the reason given."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        section: with ``what`` and ``shape`` the name of the record.
        what: see ``section``.
        shape: see ``section``.
        build: makes tensors on a device, the same ones for each backend, and returns the call that is measured.
        n_bytes: bytes that the call has to move through device memory.
        flops: operations that the call cannot do without, by the kind of tensor core (``bf16`` or ``fp8``).
        peers: by name, what builds the call of another library; the first one is the baseline.
        tolerance: of the relative error to the eager backend; 0 asks for the same bits.
        timing: ``gpu`` for the time on the GPU, with launches; ``graph`` for calls so short that a GPU would wait for
            the host, in CUDA graphs; ``host`` for the time until a call returns; ``once`` for that of single calls.
        expected_on_cpu: compare with the eager backend on the CPU, which no kernel of a GPU can mislead.
        kernels: whether the record has a table of kernels.
    """

    section: str
    what: str
    shape: tuple[int, ...]
    build: Callable[[torch.device, str], Call]
    n_bytes: float = 0.0
    flops: Mapping[str, float] = field(default_factory=dict)
    peers: Mapping[str, Callable[[torch.device], Call]] = field(default_factory=dict)
    tolerance: float = 0.0
    timing: str = "gpu"
    expected_on_cpu: bool = False
    kernels: bool = False

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


# ---- samples --------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for all work on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(call: Call, device: torch.device, count: int = 1) -> float:
    """Return the mean time of so many calls, until the device has done their work."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - started) / count


def host_seconds(call: Call, device: torch.device, count: int = 1) -> float:
    """Return the mean time that so many calls keep the host busy."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    taken = time.perf_counter() - started
    synchronize(device)
    return taken / count


def gpu_seconds(call: Call, device: torch.device, count: int = 1) -> float:
    """Return the median time of a call: by CUDA events with an empty L2 cache; on the CPU by the clock."""
    if device.type != "cuda":
        return wall_seconds(call, device, count)
    from triton.testing import do_bench

    return do_bench(call, warmup=WARMUP, rep=REPEAT, return_mode="median") / 1e3


@lru_cache
def flush(device: torch.device) -> Call:
    """Return a call that empties the L2 cache: it writes more than any has room for."""
    return torch.empty(256 << 20, dtype=torch.uint8, device=device).zero_


def graph_of(calls: Sequence[Call], device: torch.device) -> Call:
    """Return what replays `IN_GRAPH` times these calls from a CUDA graph."""
    # Outside of the graph: compiles kernels, and makes what calls keep.
    for call in calls:
        call()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * IN_GRAPH:
            call()
    return graph.replay


def graph_samples(graphs: Mapping[str, Call], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Take samples of the time that calls keep a GPU busy, without what the host takes to launch them, with an empty
    L2 cache. Each graph is of `flush` and a call."""
    alone = graph_of([flush(device)], device)
    samples = {name: partial(gpu_seconds, graph, device) for name, graph in graphs.items()}
    *taken, flushes = interleaved({**samples, "": partial(gpu_seconds, alone, device)}, rounds).values()
    flush_seconds = statistics.median(flushes)
    return {
        name: [(seconds - flush_seconds) / IN_GRAPH for seconds in found]
        for name, found in zip(graphs, taken, strict=True)
    }


def interleaved(samples: Mapping[Name, Sample], rounds: int) -> dict[Name, list[float]]:
    """Take samples in turns, so that what changes over time meets all contenders."""
    taken: dict[Name, list[float]] = {name: [] for name in samples}
    for _ in range(rounds):
        for name, sample in samples.items():
            taken[name].append(sample())
    return taken


#: What takes a sample of the time of a call, by the name of the timing; ``graph`` is that of `graph_samples` on a GPU.
SAMPLES = {"gpu": gpu_seconds, "graph": wall_seconds, "host": host_seconds, "once": wall_seconds}


def kernels_of(call: Call, device: torch.device) -> dict[str, tuple[int, float]]:
    """Return number and seconds of the launches of each kernel in a call; on the CPU of PyTorch's operators.

    The call must have run before: what it compiles would count.
    """
    activity, kind = ProfilerActivity.CPU, DeviceType.CPU
    if device.type == "cuda":
        activity, kind = ProfilerActivity.CUDA, DeviceType.CUDA
    synchronize(device)
    with profile(activities=[activity]) as found:
        call()
        synchronize(device)
    kernels = {}
    for event in found.key_averages():
        if event.device_type == kind:
            microseconds = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
            kernels[event.key] = (event.count, microseconds / 1e6)
    return kernels


def kernel_table(kernels: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Return launches and seconds of all kernels, and those of the longest by name, for a record."""
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:KERNELS]
    return {
        "launches": sum(count for count, _ in kernels.values()),
        "gpu_seconds": sum(seconds for _, seconds in kernels.values()),
        "kernels": [{"name": name, "launches": count, "seconds": seconds} for name, (count, seconds) in longest],
    }


# ---- results --------------------------------------------------------------------------------------------------------


def expect_close(what: str, found: Any, expected: Any, tolerance: float) -> None:
    """Raise `WrongResult` unless all tensors in ``found`` are those in ``expected``, but for a relative error."""
    for out, reference in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if not isinstance(out, torch.Tensor):
            continue
        if out.shape != reference.shape:
            raise WrongResult(f"{what}: the result is {list(out.shape)}, not {list(reference.shape)}")
        reference = _numbers(reference)
        out = _numbers(out).to(reference.device)
        error = ((out - reference).norm() / reference.norm().clamp_min(1e-300)).item()
        if not error <= tolerance:
            raise WrongResult(f"{what}: relative error {error:.2e}, at most {tolerance:.0e} is right")


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64; of formats of one byte, the bytes."""
    x = x.detach()
    if x.element_size() == 1:
        x = x.view(torch.uint8)
    return x.double()


def reason_of(error: BaseException) -> str:
    """Return the first line of what an error says, with its kind."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class Bench:
    """Runs cases one after the other, and adds a record of each to a file at once.

    Args:
        device: what is measured.
        tiny: whether shapes are tiny, and samples few.
        out: folder of the records.
        common: what each record ends with.
        seconds: no case begins after that.

    Attributes:
        ceilings: ``copy`` in bytes, ``bf16`` and ``fp8`` in operations per second, as they are measured.
        records: those of this run, by earlier processes too.
    """

    def __init__(
        self, device: torch.device, tiny: bool, out: Path, common: dict[str, Any], seconds: float = float("inf")
    ):
        self.device = device
        self.tiny = tiny
        self.out = out
        self.rounds = 1 if tiny else ROUNDS
        self.records = recorded(out / RECORDS)
        self.ceilings = {
            record["ceiling"]: record["per_second"] for record in self.records if record.get("ceiling") is not None
        }
        self._end = time.perf_counter() + seconds
        self._common = {"tiny": tiny, **common}

    def run(self, case: Case) -> None:
        """Check and time a case."""
        self.record(case.section, case.what, list(case.shape), lambda: self._measured(case))

    def record(self, section: str, what: str, shape: list[int], measure: Callable[[], dict[str, Any]]) -> None:
        """Record what ``measure`` returns (``value``, ``unit`` and more), or why there is nothing.

        What breaks the GPU for this process, as a failed assertion in a kernel does, is raised once it is recorded.
        """
        record = empty_record(f"{section} / {what}", shape)
        try:
            if time.perf_counter() > self._end:
                raise Absent("no time left")
            print(f"{record['name']} {shape} ...", flush=True)
            record |= measure()
        except (Absent, torch.cuda.OutOfMemoryError) as reason:
            record |= {"status": "skipped", "reason": str(reason).partition("\n")[0]}
        except Exception as error:
            record |= {"status": "failed", "reason": reason_of(error), "traceback": traceback.format_exc()}
        self.records.append(record | self._common)
        write(self.records, self.out / RECORDS)
        print(row(record), flush=True)
        if self.device.type == "cuda":
            # The next case finds the memory of the GPU empty.
            gc.collect()
            synchronize(self.device)
            torch.cuda.empty_cache()

    def prepare(self, call: Call, timing: str) -> Call:
        """Return what samples are taken of: the call, which has compiled its kernels, or for ``graph`` a CUDA graph."""
        if timing == "graph" and self.device.type == "cuda":
            return graph_of([flush(self.device), call], self.device)
        call()
        return call

    def compare(self, calls: Mapping[str, Call], timing: str) -> dict[str, Any]:
        """Time calls in turns.

        Args:
            calls: what [`Bench.prepare`] returned; the first is measured, the second its baseline.
            timing: see [`Case`].

        Returns:
            See [`compared`].
        """
        if timing == "graph" and self.device.type == "cuda":
            return compared(graph_samples(calls, self.device, self.rounds))
        count = HOST_CALLS if timing == "host" and not self.tiny else 1
        sample = partial(SAMPLES[timing], device=self.device, count=count)
        return compared(interleaved({name: partial(sample, call) for name, call in calls.items()}, self.rounds))

    def _measured(self, case: Case) -> dict[str, Any]:
        """Check a case against the eager backend, and time it and its peers."""
        call = case.build(self.device, "triton")
        reference_device = torch.device("cpu") if case.expected_on_cpu else self.device
        expect_close(case.name, call(), case.build(reference_device, "eager")(), case.tolerance)
        calls = {"ours": self.prepare(call, case.timing)}
        absent: dict[str, dict[str, Any]] = {}
        for name, build in case.peers.items():
            # A peer may fail, for any reason, without an end of the case.
            try:
                calls[name] = self.prepare(build(self.device), case.timing)
            except Exception as error:
                absent[name] = {"reason": reason_of(error)}
        found = self.compare(calls, case.timing)
        found["peers"] |= absent
        if case.kernels:
            found["kernels"] = {name: kernel_table(kernels_of(call, self.device)) for name, call in calls.items()}
        seconds = found["seconds"]
        flops = sum(case.flops.values())
        if flops:
            found |= {"value": flops / 1e12 / seconds, "unit": "TFLOP/s"}
        elif case.n_bytes:
            found |= {"value": case.n_bytes / 1e9 / seconds, "unit": "GB/s"}
        else:
            found |= {"value": 1e6 * seconds, "unit": "us"}
        floor = case.floor(self.ceilings)
        if floor:
            found["ceiling_fraction"] = floor / seconds
        return found

    def measure_ceilings(self) -> None:
        """Measure what this GPU reaches at best: a device copy, and the vendor's products on random data."""
        n_bytes = 1 << 30
        n = 8192
        if self.tiny:
            n_bytes = 1 << 16
            n = 128

        def ceiling(kind: str, work: float, call: Call) -> dict[str, Any]:
            seconds = interleaved({kind: partial(gpu_seconds, call, self.device)}, self.rounds)
            self.ceilings[kind] = work / statistics.median(seconds[kind])
            return {"ceiling": kind, "per_second": self.ceilings[kind], "samples": seconds}

        def copy() -> dict[str, Any]:
            source = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            # A copy reads and writes each byte.
            found = ceiling("copy", 2 * n_bytes, lambda: target.copy_(source))
            return found | {"value": self.ceilings["copy"] / 1e9, "unit": "GB/s"}

        def product(kind: str) -> dict[str, Any]:
            a = torch.randn(n, n, device=self.device).bfloat16()
            b = torch.randn(n, n, device=self.device).bfloat16()
            call = fp8_product(a, b) if kind == "fp8" else lambda: a @ b.t()
            expect_close(kind, call(), a.float() @ b.float().t(), 6e-2)
            found = ceiling(kind, 2 * n**3, call)
            return found | {"value": self.ceilings[kind] / 1e12, "unit": "TFLOP/s"}

        self.record("ceilings", "device copy", [n_bytes], copy)
        for kind in ("bf16", "fp8"):
            self.record("ceilings", f"{kind} product", [n, n, n], partial(product, kind))


def compared(samples: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return medians and ratios of samples that were taken in turns, for a record: of the first contender, of its
    baseline, the second one, and of all others; and the samples."""
    (_, ours), *others = samples.items()
    peers = {}
    for name, found in others:
        peers[name] = {"seconds": statistics.median(found), "ratio": median_ratio(found, ours)}
    baseline = next(iter(peers), None)
    ratio = None
    if baseline is not None:
        ratio = peers[baseline]["ratio"]
    return {
        "seconds": statistics.median(ours),
        "baseline": baseline,
        "ratio": ratio,
        "peers": peers,
        "samples": dict(samples),
    }


def empty_record(name: str, shape: list[int]) -> dict[str, Any]:
    """Return a record whose value is not known yet."""
    return {
        "name": name,
        "shape": shape,
        "status": "ok",
        "value": "none",
        "unit": "",
        "baseline": None,
        "ratio": None,
        "ceiling_fraction": None,
    }


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
