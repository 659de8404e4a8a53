# SPDX-License-Identifier: Apache-2.0
"""Measure kernels, layers and whole runs on this machine's GPU until a deadline, the most important first.

    python -m benchmarks.gpu.timed --deadline 560 --out DIR
    python -m benchmarks.gpu.timed --out DIR --only decode products
    TRITON_INTERPRET=1 python -m benchmarks.gpu.timed --tiny --out DIR      # no GPU: does every item work?

Each item is a process of its own with a time limit, its share of the time that is left: a crash or a hang costs that
item alone. DIR/gpu_timed.json has a record of each case, written when the case ends. Nothing is timed before its
result was found right. Samples of ours and of BF16 are taken in turns. bitsandbytes, torchao and TRL take part where
they are installed.

Kernels are compiled before samples are taken. While the first item runs, idle processors compile those of packed
products, the most by far, into Triton's cache (TRITON_CACHE_DIR). This can be done beforehand, without a GPU:

    TRITON_CACHE_DIR=/tmp/kernels python -m benchmarks.gpu.timed --compile-only --arch 90

Triton finds them on another machine only if Triton's wheel (its version, and that of Python), ptxas, the sources and
the path of the folder are the same. Exit code 1 when something failed (raised, was wrong, or took too long), or when
nothing was measured.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
# A checkout that is not installed works as well.
if importlib.util.find_spec("mxfp4_kernels") is None:
    sys.path.insert(0, str(ROOT / "kernels"))

#: File of all records in the folder of a run.
RECORDS = "gpu_timed.json"

#: Items in order of importance, and seconds of each where all fit; others are scaled by the time that is left.
SECONDS = {
    "experts": 45,
    "host": 15,
    "generate": 130,
    "training": 60,
    "decode": 70,
    "products": 90,
    "grpo_step": 120,
    "generate_batch": 60,
    "schemes": 20,
}
#: Seconds that kernels may still take to compile when the first item has ended. Others wait: they time the host.
COMPILING = 30
#: Part of an item's time in which it begins cases. The rest is for the last one to end.
BEGINS = 0.8


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m benchmarks.gpu.timed", description=__doc__.splitlines()[0])
    made.add_argument("--out", type=Path, help="folder of the records, made if needed")
    made.add_argument("--deadline", type=float, default=560, metavar="SECONDS", help="everything ends by then (560)")
    made.add_argument("--only", nargs="+", choices=SECONDS, default=[*SECONDS], metavar="NAME", help=", ".join(SECONDS))
    made.add_argument("--tiny", action="store_true", help="tiny shapes, to see that everything runs")
    made.add_argument("--commit", help="commit of this checkout, where git cannot say")
    made.add_argument("--compile-only", action="store_true", help="compile kernels into Triton's cache, with no GPU")
    made.add_argument("--arch", help="architecture to compile for, as 80, 90 or 100 (that of the GPU here)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return the exit code."""
    options = parser().parse_args(argv)
    # Before libraries are imported that would ask the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.compile_only:
        from .precompile import precompile

        return precompile(options.arch)
    if options.out is None:
        parser().error("--out is required: the folder of the records")
    if (options.out / RECORDS).exists():
        parser().error(f"{options.out / RECORDS} exists: choose another folder")
    words = sys.argv[1:] if argv is None else argv
    # A command that is ended ends its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run(options, " ".join(["python -m benchmarks.gpu.timed", *words]))


def run(options: argparse.Namespace, command: str) -> int:
    """Run items one after the other until the deadline, and return the exit code."""
    deadline = time.monotonic() + options.deadline
    names = [name for name in SECONDS if name in options.only]
    with contextlib.ExitStack() as started:
        items = (Item(name, options, started) for name in names)
        following = next(items)
        # Imported while the first item imports as much.
        from .bench import find_device

        try:
            device = find_device(options.tiny)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        compiler = None
        if device.type == "cuda":
            compiler = _start(started, "timed", "--compile-only")
        else:
            command = f"TRITON_INTERPRET=1 {command}"
        for index, name in enumerate(names):
            item = following
            following = next(items, None)
            share = 1.0  # how long items take in the interpreter is not known
            if not options.tiny:
                share = SECONDS[name] / sum(SECONDS[later] for later in names[index:])
            reason = item.measure(share * (deadline - time.monotonic()), command)
            if reason is not None:
                _record(options, device, command, name, reason)
            if index == 0 and compiler is not None:
                _wait(compiler, COMPILING)
    return _report(options.out)


def _report(out: Path) -> int:
    """Print how many cases were measured, and return the exit code."""
    from ..records import recorded

    statuses = [record["status"] for record in recorded(out / RECORDS)]
    n_ok, n_skipped, n_failed = (statuses.count(status) for status in ("ok", "skipped", "failed"))
    print(f"{n_ok} measured, {n_skipped} skipped, {n_failed} failed")
    return int(n_failed > 0 or n_ok == 0)


def _record(options: argparse.Namespace, device: "torch.device", command: str, name: str, reason: str) -> None:
    """Add a record that says why an item did not come to its end."""
    import torch

    from .bench import Bench
    from .item import common

    def fail() -> dict[str, Any]:
        raise RuntimeError(reason)

    # It does not wait for the GPU, which may no longer answer.
    bench = Bench(torch.device("cpu"), options.tiny, options.out, common(device, command, options.commit))
    bench.record(name, "whole item", [], fail)


class Item:
    """Process of an item. It imports what it needs while another one measures, and then waits.

    Args:
        name: which item.
        options: those of the command.
        started: ends the process when it is closed.
    """

    def __init__(self, name: str, options: argparse.Namespace, started: contextlib.ExitStack):
        words = [name, "--out", str(options.out.resolve())]
        if options.tiny:
            words.append("--tiny")
        if options.commit:
            words += ["--commit", options.commit]
        self._process = _start(started, "item", *words)

    def measure(self, seconds: float, command: str) -> str | None:
        """Let it measure for so long at most. Return why it did not come to its end; `None` if it did.

        Args:
            seconds: its time.
            command: what its records say that made them.
        """
        with contextlib.suppress(BrokenPipeError):
            json.dump({"seconds": BEGINS * seconds, "command": command}, self._process.stdin)
            self._process.stdin.close()
        code = _wait(self._process, seconds)
        if code is None:
            return f"stopped after {seconds:.0f} s"
        if code:
            return f"its process ended with exit code {code}"
        return None


def _start(started: contextlib.ExitStack, module: str, *words: str) -> subprocess.Popen:
    """Start a module of this package as a process, which ends with ``started``."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.gpu.{module}", *words],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        text=True,
        # So that what it has started can be ended with it.
        start_new_session=True,
    )
    started.callback(_wait, process, 0)
    return process


def _wait(process: subprocess.Popen, seconds: float) -> int | None:
    """Return the exit code of a process; `None` if it has not ended after so long. Then it is killed, with all that it
    has started."""
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


if __name__ == "__main__":
    sys.exit(main())
