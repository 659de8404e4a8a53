# SPDX-License-Identifier: Apache-2.0
"""Measure kernels, layers and whole runs on this machine's GPU, and compare them with its ceilings and other libraries.

    python -m benchmarks.gpu --out DIR
    python -m benchmarks.gpu --out DIR --only decode linear
    TRITON_INTERPRET=1 python -m benchmarks.gpu --tiny --out DIR      # no GPU: does every section work?

One JSON file of records per section in DIR. Nothing is timed before its result was found right. bitsandbytes and
torchao take part where they are installed. Exit code 1 when something failed (raised, or was wrong), or when nothing
was measured.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path


# A checkout that is not installed works as well.
if importlib.util.find_spec("mxfp4_kernels") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

#: In order of importance: what comes last is skipped first when time runs out.
SECTIONS = ("quantize", "to_e4m3", "decode", "linear", "forward", "generate", "grpo_step")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    made.add_argument("--out", type=Path, required=True, help="folder of the records, made if needed")
    made.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    made.add_argument("--tiny", action="store_true", help="tiny shapes, to see that everything runs")
    made.add_argument(
        "--time-limit", type=float, default=480, metavar="SECONDS", help="no case begins after that (480)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return the exit code."""
    options = parser().parse_args(argv)
    # Before libraries are imported that would ask the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from .bench import Bench, find_device
    from .cases import cases
    from .end_to_end import generate, grpo_step

    try:
        device = find_device(options.tiny)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = " ".join(["python -m benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)])
    if device.type == "cpu":
        command = f"TRITON_INTERPRET=1 {command}"
    bench = Bench(device, options.tiny, options.out, command, options.time_limit)
    bench.measure_ceilings()
    for case in cases(options.tiny):
        if case.section in options.only:
            bench.run(case)
    for run in (generate, grpo_step):
        if run.__name__ in options.only:
            run(bench)
    found = [record for name in options.only for record in bench.records.get(name, ())]
    counts = {status: sum(r["status"] == status for r in found) for status in ("ok", "skipped", "failed")}
    print(f"{counts['ok']} measured, {counts['skipped']} skipped, {counts['failed']} failed")
    return int(counts["failed"] > 0 or not counts["ok"])


if __name__ == "__main__":
    sys.exit(main())
