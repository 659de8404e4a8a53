# SPDX-License-Identifier: Apache-2.0
"""Cases of a section: built, checked, timed beside their peers, and written down, whatever becomes of them."""

import datetime
import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_mxfp4.files import write_json

from .machine import Machine, versions
from .timing import Call, Timing, compare


#: Seconds that a case needs at least; with less left it is skipped.
SHORTEST_CASE = 2.0


class Absent(Exception):
    """A peer that cannot take part, for the reason given: not installed, or not for this GPU or shape."""


class OutOfTime(Absent):
    """The whole run's time is up, whatever it is at."""


@dataclass(frozen=True)
class Work:
    """What a call cannot do without.

    Attributes:
        n_bytes: to move through device memory: each input read once, each output written once.
        flops: multiplications and additions, each counted, by the ceiling that they go by, ``bf16`` or ``fp8``.
    """

    n_bytes: int
    flops: dict[str, int] = field(default_factory=dict)

    def floor(self, ceilings: dict[str, float]) -> float | None:
        """Seconds at the ceilings; `None` where one of them was not measured."""
        if not {"copy", *self.flops} <= ceilings.keys():
            return None
        return max(self.n_bytes / ceilings["copy"], sum(n / ceilings[rate] for rate, n in self.flops.items()))


@dataclass(frozen=True)
class Aim:
    """What is to be reached.

    Attributes:
        what: of the measured value, in words, such as ``"of the copy ceiling"``.
        least: its least value.
        reached: its value; `None` when it was not measured.
        unit: ``"x"`` or ``"%"`` (then values are fractions).
    """

    what: str
    least: float
    reached: float | None
    unit: str = "x"

    def __str__(self) -> str:
        shown = [f"{100 * v:.0f} %" if self.unit == "%" else f"{v:.2f}x" for v in (self.least, self.reached or 0.0)]
        met = self.reached is not None and self.reached >= self.least
        found = "not measured" if self.reached is None else f"{shown[1]} {'ok' if met else 'short'}"
        return f"aim >= {shown[0]} {self.what}: {found}"


@dataclass
class Measured:
    """What a case found; the fields that every record has, and ``details``."""

    value: float
    unit: str
    baseline: str | None = None
    ratio: float | None = None
    ceiling_fraction: float | None = None
    aims: Sequence[Aim] = ()
    details: dict[str, Any] = field(default_factory=dict)


class Bench:
    """Runs sections one after the other and keeps their records in ``<out>/gpu_<section>.json``, written after each
    case.

    Attributes:
        machine: what is measured.
        ceilings: ``copy`` in bytes, ``bf16`` and ``fp8`` in operations per second; measured first.
        records: all of them, by section.
        triton_kernels: folder that holds the hub's package of that name, or `None`.
        stopped: whether the time of the whole run is up, so that what was measured was interrupted.
    """

    def __init__(self, machine: Machine, out: Path, command: str, triton_kernels: Path | None = None):
        self.machine, self.out, self.command, self.triton_kernels = machine, out, command, triton_kernels
        self.ceilings: dict[str, float] = {}
        self.records: dict[str, list[dict]] = {}
        self.stopped = False
        self._section = ""
        self._deadline = float("inf")
        self._common = {
            "hardware": machine.hardware,
            "versions": versions(),
            "command": command,
            "tiny": machine.tiny,
            # Otherwise launch parameters are those that the package ships, or was told to measure before.
            "autotuned": os.environ.get("HF_MXFP4_AUTOTUNE") == "1",
        }

    @property
    def seconds_left(self) -> float:
        """Of the section."""
        return self._deadline - time.perf_counter()

    @property
    def failed(self) -> list[dict]:
        return [r for records in self.records.values() for r in records if r["status"] == "failed"]

    def section(self, name: str, run: Callable[["Bench"], None], seconds: float) -> None:
        """Run a section in the time given; what raises outside of its cases is one failed record."""
        self._section, self._deadline = name, time.perf_counter() + seconds
        self.records[name] = []
        if seconds < SHORTEST_CASE:
            self._skip(name, "no time left for the section")
            return
        try:
            run(self)
        except Absent as reason:
            self._skip(name, str(reason))
        except Exception as error:
            self._fail(name, "all", error)

    def case(self, what: str, shape: Any, measure: Callable[[], Measured], needs: float = SHORTEST_CASE) -> None:
        """Measure a case, or record that it failed or that less than the seconds that it ``needs`` were left."""
        if self.seconds_left < needs:
            self._skip(what, "no time left", shape)
            return
        try:
            found = measure()
        except Absent as reason:
            self._skip(what, str(reason), shape)
        except torch.cuda.OutOfMemoryError as error:
            self._skip(what, f"not enough memory on this GPU ({error})".splitlines()[0], shape)
        except Exception as error:
            self._fail(what, shape, error)
        else:
            aims = [{**asdict(aim), "text": str(aim)} for aim in found.aims]
            self._write(
                what, shape, "ok", value=found.value, unit=found.unit, baseline=found.baseline, ratio=found.ratio,
                ceiling_fraction=found.ceiling_fraction, aims=aims, **found.details,
            )  # fmt: skip
        finally:
            gc.collect()
            self.machine.free_memory()

    def _skip(self, what: str, reason: str, shape: Any = "all") -> None:
        self._write(what, shape, "skipped", value="skipped", reason=reason)

    def _fail(self, what: str, shape: Any, error: Exception) -> None:
        if self.stopped:
            # Libraries wrap what they do not know in exceptions of their own.
            self._skip(what, "stopped at the time limit", shape)
            return
        trace = "".join(traceback.format_exception(error))
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._write(what, shape, "failed", value="failed", reason=reason, traceback=trace)

    def _write(self, what: str, shape: Any, status: str, **fields: Any) -> None:
        record = {
            "name": f"{self._section} / {what}", "shape": shape, "status": status, "unit": "", "baseline": None,
            "ratio": None, "ceiling_fraction": None, **fields, **self._common,
            "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        self.records[self._section].append(record)
        write_json(self.out / f"gpu_{self._section}.json", self.records[self._section])
        shown = record["reason"] if status != "ok" else f"{record['value']:.4g} {record['unit']}"
        print(f"[{self._section}] {what} {shape}: {shown}", flush=True)

    def contest(
        self,
        ours: Sequence[Call],
        peers: dict[str, Callable[[], Sequence[Call]]],
        work: Work,
        unit: str,
        amount: float,
        *,
        baseline: str | None = None,
        graph: bool = True,
    ) -> Measured:
        """Time ``ours`` beside the peers.

        Args:
            ours: calls on different inputs, checked already.
            peers: by name, what builds and checks a peer's calls; it raises [`Absent`] when there is none. Whatever
                else it raises is noted too, and leaves that peer alone out.
            work: of one call.
            unit, amount: the value is ``amount`` of one call, in ``unit`` times seconds, over the time of one.
            baseline: the peer whose ratio is the record's.
        """
        contenders: dict[str, Sequence[Call]] = {"ours": ours}
        notes: dict[str, dict] = {}
        for name, build in peers.items():
            try:
                if self.seconds_left < SHORTEST_CASE:
                    raise Absent("no time left")
                calls = build()
                # On all inputs, here where what it raises is its own failure.
                for call in calls:
                    call()
                self.machine.synchronize()
                contenders[name] = calls
            except Absent as reason:
                notes[name] = {"status": "absent", "reason": str(reason)}
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                notes[name] = {"status": "failed", "reason": reason, "traceback": traceback.format_exc()}
        timings = compare(self.machine, contenders, graph)
        mine = timings["ours"]
        for name in contenders:
            if name != "ours":
                notes[name] = {**times_of(timings[name]), "ratio": timings[name].ratio_to(mine), "status": "ok"}
        floor = work.floor(self.ceilings)
        ratio = notes.get(baseline, {}).get("ratio") if baseline else None
        details = {**times_of(mine), "bytes": work.n_bytes, "flops": work.flops, "floor_seconds": floor, "peers": notes}
        fraction = None if floor is None else floor / mine.seconds
        return Measured(amount / mine.seconds, unit, baseline, ratio, fraction, details=details)


def times_of(timing: Timing) -> dict[str, Any]:
    return {
        "seconds": timing.seconds,
        "fastest": min(timing.samples),
        "slowest": max(timing.samples),
        "rounds": len(timing.samples),
        "launch": timing.launch,
        "no_graph": timing.why,
    }
