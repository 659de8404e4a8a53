# SPDX-License-Identifier: Apache-2.0
"""Measure the kernels, the layers and whole runs on this machine's GPU, in less than eight minutes.

    python -m benchmarks.gpu --out DIR
    python -m benchmarks.gpu --out DIR --only decode_w4a16 train_linear_w4a4
    TRITON_INTERPRET=1 python -m benchmarks.gpu --tiny --out DIR      # no GPU: does every section work?

Ceilings of the machine first, then every section; one JSON file of records per section in DIR, and a table last.
Libraries beside ours take part where they are installed (bitsandbytes, gemlite, torchao, the hub's triton_kernels as a
folder), and are named with the reason where not. Exit code 1 when something failed (raised, or was wrong), or when
nothing was measured.
"""

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


_ROOT = Path(__file__).resolve().parents[2]
# A checkout that is not installed works as well.
if importlib.util.find_spec("mxfp4_kernels") is None:
    sys.path.insert(0, str(_ROOT / "kernels"))

#: In order of importance: what comes last is skipped first when time runs out.
SECTIONS = (
    "quantize_pack",
    "decode_w4a16",
    "train_linear_w4a4",
    "quantize_dual_e4m3",
    "grouped_experts",
    "generate_e2e",
    "grpo_step_e2e",
)
TIME_LIMIT = 480.0
#: Of the time limit, kept for the table.
_RESERVE = 5.0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    made.add_argument("--out", type=Path, required=True, help="folder of the records, made if needed")
    made.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    made.add_argument("--tiny", action="store_true", help="tiny shapes, to see that everything runs")
    made.add_argument("--time-limit", type=float, default=TIME_LIMIT, metavar="SECONDS", help="of the whole run (480)")
    made.add_argument(
        "--triton-kernels", type=Path, metavar="DIR", help="folder that holds the hub's triton_kernels package"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    started = time.perf_counter()
    options = parser().parse_args(argv)
    # Before libraries are imported that would ask the network, which nothing here needs.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from .bench import Bench
    from .machine import Machine
    from .report import report

    try:
        machine = Machine.find(options.tiny)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bench = Bench(machine, options.out, _command(sys.argv[1:] if argv is None else argv), options.triton_kernels)
    print(machine.hardware, flush=True)
    end = started + options.time_limit - _RESERVE
    with stopped_after(bench, end - time.perf_counter()):
        run_sections(bench, ["ceilings", *(name for name in SECTIONS if name in options.only)], end)
    print(report(bench, time.perf_counter() - started))
    if bench.failed:
        return 1
    if not any(record["status"] == "ok" for name in options.only for record in bench.records[name]):
        print("error: nothing was measured; the reasons are above, under skipped", file=sys.stderr)
        return 1
    return 0


def run_sections(bench, names: Sequence[str], end: float) -> None:
    """Each section gets its share of the time that is left until ``end`` of `time.perf_counter`, so that what one does
    not need goes to the next ones."""
    left = list(names)
    shares = {}
    for name in names:
        # A section whose import fails is one that failed; the others go on.
        try:
            shares[name] = importlib.import_module(f".sections.{name}", __package__)
        except Exception as error:
            shares[name] = error
    for name in names:
        total = sum(getattr(shares[other], "SHARE", 1) for other in left)
        share = getattr(shares[name], "SHARE", 1) / total
        bench.section(name, _runner(shares[name]), max(0.0, (end - time.perf_counter()) * share))
        left.remove(name)


@contextlib.contextmanager
def stopped_after(bench, seconds: float) -> Iterator[None]:
    """Raise [`OutOfTime`] in what runs within when its time is up. Cases ask for the time that is left before they
    begin; this is for one that takes much longer than thought."""
    from .bench import OutOfTime

    def stop(*_: object) -> None:
        bench.stopped = True
        raise OutOfTime("stopped at the time limit")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _runner(module):
    if not isinstance(module, Exception):
        return module.run

    def fail(bench) -> None:
        raise module

    return fail


def _command(argv: Sequence[str]) -> str:
    """What repeats the run, with the settings of the environment that count."""
    names = ("TRITON_INTERPRET", "HF_MXFP4_AUTOTUNE")
    settings = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    return " ".join([*settings, "python -m benchmarks.gpu", *argv])


if __name__ == "__main__":
    sys.exit(main())
