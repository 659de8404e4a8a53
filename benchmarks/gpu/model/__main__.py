# SPDX-License-Identifier: Apache-2.0
"""Estimate what kernels and layers would reach on GPUs that are not there, from what the compiler made of them.

    python -m benchmarks.gpu.model --arch sm_90,sm_100,sm_120
    python -m benchmarks.gpu.model --arch sm_90 --only decode --kernels --out -

Each case of `benchmarks.gpu` runs on a stub of the GPU (`stub.py`), every launch is compiled ahead of time and its
instructions are counted (`code.py`) with what it has to do (`work.py`), and its time is estimated (`estimate.py`,
`gpus.py`). Records are marked as modelled and never stand among measured ones. No GPU is used; a minute or two for an
architecture, less a second time.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


#: In place of the hardware that was measured.
NO_GPU = "none: modelled from compiled code"


def parser() -> argparse.ArgumentParser:
    from ...records import MODELLED, RESULTS
    from .gpus import ARCHS

    made = argparse.ArgumentParser("python -m benchmarks.gpu.model", description=__doc__.splitlines()[0])
    made.add_argument("--arch", type=_archs(ARCHS), default=list(ARCHS), metavar="NAME[,NAME]",
                      help=f"any of {', '.join(ARCHS)}; all by default")  # fmt: skip
    made.add_argument("--only", nargs="+", metavar="SECTION", help="sections of benchmarks.gpu; all by default")
    made.add_argument("--kernels", action="store_true", help="a line for each launch of our kernels, too")
    made.add_argument("--out", default=str(RESULTS / f"{MODELLED}.json"),
                      help="file of records, whose others stay; - writes none")  # fmt: skip
    return made


def _archs(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not known; choose from {', '.join(known)}")
        return names

    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Model, print and write; return the exit code, 1 when a case could not be modelled."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("error: TRITON_INTERPRET=1 is set, and interpreted kernels are not compiled; unset it", file=sys.stderr)
        return 2
    options = parser().parse_args(argv)
    from ...records import made
    from ..cases import cases
    from .gpus import gpus_of

    chosen = [case for case in cases() if not options.only or case.section in options.only]
    if not chosen:
        print(f"error: no such section is modelled: {', '.join(options.only)}", file=sys.stderr)
        return 2
    command = f"python -m benchmarks.gpu.model --arch {','.join(options.arch)}"
    common, found = made(command, ("torch", "triton"), NO_GPU), []
    for gpu in (gpu for arch in options.arch for gpu in gpus_of(arch)):
        print(f"\n{gpu.name} ({gpu.arch}), modelled", flush=True)
        for case in chosen:
            record = modelled(case, gpu) | common
            found.append(record)
            print(row(record), *(map(kernel_row, record.get("kernels", ())) if options.kernels else ()), sep="\n")
    if options.out != "-":
        write_lines(Path(options.out), found)
    return int(any(record["status"] == "failed" for record in found))


def modelled(case: Any, gpu: Any) -> dict[str, Any]:
    """Return the record of a case on one GPU: as those of `benchmarks.gpu`, with ``"kind": "modelled"``."""
    from ..cases import BF16
    from .estimate import in_turn

    record = {"name": case.name, "shape": list(case.shape), "kind": "modelled", "gpu": gpu.name, "arch": gpu.arch}
    record |= {"status": "ok", "baseline": None, "ratio": None, "ceiling_fraction": None}
    try:
        kernels = _kernels(lambda device: case.build(device, "triton"), gpu, case.reached)
        plain = _kernels(case.peers[BF16], gpu, case.reached) if BF16 in case.peers else None
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return record | {"status": "failed", "value": "failed", "unit": "", "reason": reason}
    whole = in_turn([found for _, found in kernels])
    floor = case.floor({"copy": gpu.copy} | {kind: gpu.ceiling(kind) for kind in gpu.peaks})
    about, slowest = max(kernels, key=lambda kernel: kernel[1].seconds)
    record |= {
        "value": _digits(1e6 * whole.seconds),
        "unit": "us",
        "ceiling_fraction": _digits(floor / whole.seconds),
        "bottleneck": f"{slowest.bottleneck} of {about['name']}",
        "launches": len(kernels),
        "kernels": [about for about, _ in kernels if "pipes" in about],
    }
    if plain is not None:
        baseline = in_turn([found for _, found in plain])
        record |= {"baseline": BF16, "ratio": _digits(baseline.seconds / whole.seconds)}
    return record


def _kernels(build: Callable[[Any], Callable[[], Any]], gpu: Any, reached: float) -> list[tuple[dict[str, Any], Any]]:
    """Return what a call launches: what is recorded of each launch, and its estimate."""
    from .stub import cuda_of, stub_gpu

    with stub_gpu(gpu) as steps:
        call = build(cuda_of(gpu))
        call()
        # The second time, what is kept from the first one is there.
        steps.clear()
        call()
        launched = list(steps)
    return [_step(step, gpu, reached) for step in launched]


def _step(step: Any, gpu: Any, reached: float) -> tuple[dict[str, Any], Any]:
    """Return what is recorded of a launch, and its estimate."""
    from .code import compile_launch
    from .estimate import estimate, estimate_operator
    from .stub import Launch
    from .work import work_of

    if not isinstance(step, Launch):
        found = estimate_operator(step, gpu, reached)
        return {"name": f"torch {step.name}", "seconds": _digits(found.seconds), "bottleneck": found.bottleneck}, found
    with contextlib.redirect_stderr(io.StringIO()):
        compiled = compile_launch(step, gpu)
    work = work_of(step, reached)
    found = estimate(compiled, gpu, work)
    about = {"name": step.name, "seconds": _digits(found.seconds), "bottleneck": found.bottleneck}
    about |= {"programs": step.programs, "warps": compiled.warps, "resident": found.programs_per_multiprocessor}
    about |= {"registers": compiled.registers, "shared": compiled.shared, "spilled": compiled.spilled}
    pipes = {pipe: _digits(n) for pipe, n in found.instructions.items() if n >= 0.05}
    return about | {"per": work.unit, "instructions": _digits(sum(found.instructions.values())), "pipes": pipes}, found


def _digits(value: float) -> float:
    """Three that count."""
    return float(f"{value:.3g}")


def write_lines(path: Path, found: Sequence[dict]) -> None:
    """Write records into a file, one a line; records of other cases and GPUs that it has stay."""

    def key(record: dict) -> tuple:
        return record["gpu"], record["name"], tuple(record["shape"])

    old = json.loads(path.read_text()) if path.exists() else []
    new = {key(record) for record in found}
    kept = [record for record in old if key(record) not in new]
    path.write_text("[\n" + ",\n".join(json.dumps(record) for record in [*kept, *found]) + "\n]\n", encoding="utf-8")


def row(record: dict[str, Any]) -> str:
    """Return a record as a line."""
    what = f"  {record['name']} {'x'.join(map(str, record['shape']))}"
    if record["status"] == "failed":
        return f"{what:<66} failed: {record['reason']}"
    ratio = "" if record["ratio"] is None else f"{record['ratio']:.2f}x {record['baseline']}"
    cells = [f"{what:<66}", f"{record['value']:8.1f} us", f"{100 * record['ceiling_fraction']:4.0f} %", f"{ratio:<12}"]
    return "  ".join([*cells, f"{record['launches']} launches, {record['bottleneck']}"])


def kernel_row(kernel: dict[str, Any]) -> str:
    """Return a launch of one of our kernels as a line."""
    line = f"      {1e6 * kernel['seconds']:8.1f} us  {kernel['name']}, {kernel['bottleneck']}"
    pipes = ", ".join(f"{name} {count:g}" for name, count in kernel["pipes"].items())
    takes = f"{kernel['programs']} programs of {kernel['warps']} warps, {kernel['resident']} at once"
    memory = f"{kernel['registers']} registers, {kernel['shared']} bytes shared, {kernel['spilled']} spilled"
    return f"{line}: {takes}; {memory}; {kernel['instructions']:g} a {kernel['per']} ({pipes})"


if __name__ == "__main__":
    sys.exit(main())
