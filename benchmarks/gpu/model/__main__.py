# SPDX-License-Identifier: Apache-2.0
"""What kernels and layers would reach on GPUs that are not there, by a model of what the compiler made of them.

    python -m benchmarks.gpu.model --arch sm_90,sm_100,sm_120,gfx950
    python -m benchmarks.gpu.model --arch sm_90 --only decode_w4a16 --out -

Each case of `benchmarks.gpu` goes its way on a stub of the GPU (`stub.py`), every launch is compiled ahead of time
(`compile.py`), its instructions are counted (`instructions.py`) with what it has to do (`work.py`), and its time is
estimated (`estimate.py`, `gpus.py`). Records are marked as modelled and never stand among measured ones. No GPU is
used; a minute or two for an architecture, less a second time.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


DEFAULT_ARCHS = "sm_90,sm_100,sm_120,gfx950"


def parser() -> argparse.ArgumentParser:
    from ...records import MODELLED, RESULTS
    from .gpus import ARCHS

    made = argparse.ArgumentParser("python -m benchmarks.gpu.model", description=__doc__.splitlines()[0])
    made.add_argument("--arch", type=_archs(ARCHS), default=_archs(ARCHS)(DEFAULT_ARCHS), metavar="NAME[,NAME]",
                      help=f"any of {', '.join(ARCHS)}; all by default")  # fmt: skip
    made.add_argument("--only", nargs="+", metavar="SECTION", help="sections of benchmarks.gpu; all that are modelled")
    made.add_argument("--kernels", action="store_true", help="a line for each launch, too")
    made.add_argument("--state", default="now", help="of the kernels, as the records name it (now): before")
    made.add_argument("--out", default=str(RESULTS / f"{MODELLED}.json"),
                      help="file of records, whose others stay; - writes none")  # fmt: skip
    return made


def _archs(known: Sequence[str]):
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not known; choose from {', '.join(known)}")
        return names

    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Model, print and write; the exit code, 1 when a launch could not be modelled."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("error: TRITON_INTERPRET=1 is set, and interpreted kernels are not compiled; unset it", file=sys.stderr)
        return 2
    options = parser().parse_args(argv)
    from ... import records
    from .cases import cases
    from .gpus import gpus_of
    from .run import kernel_row, modelled, row

    chosen = [case for case in cases() if not options.only or case.section in options.only]
    if not chosen:
        print(f"error: no such section is modelled: {', '.join(options.only)}", file=sys.stderr)
        return 2
    made = records.made(_command(sys.argv[1:] if argv is None else argv), ("torch", "triton"), NO_GPU)
    found: list[dict[str, Any]] = []
    for gpu in (gpu for arch in options.arch for gpu in gpus_of(arch)):
        print(f"\n{gpu.name} ({gpu.arch}), modelled", flush=True)
        for case in chosen:
            record = modelled(case, gpu) | {"state": options.state} | made
            found.append(record)
            print(
                "\n".join([row(record), *(map(kernel_row, record.get("kernels", ())) if options.kernels else ())]),
                flush=True,
            )
    if options.out != "-":
        write_lines(Path(options.out), _kept(Path(options.out), found) + found)
    return int(any(record["status"] == "failed" for record in found))


#: In place of the hardware that was measured.
NO_GPU = "none: modelled from compiled code"


def _kept(path: Path, found: Sequence[dict]) -> list[dict]:
    """Records of the file that these do not replace."""
    if not path.exists():
        return []
    keys = {key_of(record) for record in found}
    return [record for record in json.loads(path.read_text()) if key_of(record) not in keys]


def write_lines(path: Path, found: Sequence[dict]) -> None:
    """Write a list of records, one a line."""
    lines = ",\n".join(json.dumps(record) for record in found)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def key_of(record: dict) -> tuple:
    """What tells modelled records apart."""
    return record["state"], record["gpu"], record["name"], tuple(record["shape"])


def _command(argv: Sequence[str]) -> str:
    return " ".join(["python -m benchmarks.gpu.model", *argv])


if __name__ == "__main__":
    sys.exit(main())
