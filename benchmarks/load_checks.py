# SPDX-License-Identifier: Apache-2.0
"""What it costs to check a checkpoint as it is loaded; writes `benchmarks/results/load_checks.json`.

    python -m benchmarks.load_checks FOLDER...     # of plain checkpoints

Of each a checkpoint of master weights and a packed one are saved, and loaded with and without the check, in turns, and
asked for the logits of one token: on a CPU transformers only maps the files, and most of their bytes are first read
then. Once with the files in the system's cache, once without (`posix_fadvise`).
"""

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import pack_checkpoint, verify_folder
from hf_mxfp4.checkpoint.io.integrity import VARIABLE, check_data

from .records import made, median_ratio, option_parser, write


COMMAND = "python -m benchmarks.load_checks FOLDER..."
STATES = ("in the cache", "on the disk")
MEASURED = ("loading", "loading and first logits")


def save_both(model: Path, folder: Path) -> dict[str, Path]:
    """Checkpoints of master weights and of packed ones, by their names in the records."""
    master, packed = folder / "master", folder / "packed"
    loaded = AutoModelForCausalLM.from_pretrained(model, quantization_config=MXFP4RLConfig(), dtype="auto")
    loaded.save_pretrained(master)
    pack_checkpoint(master, packed)
    millions = sum(parameter.numel() for parameter in loaded.parameters()) / 1e6
    return {f"master, {millions:.0f} M": master, f"packed, {millions:.0f} M": packed}


def forget(folder: Path) -> None:
    """Have the system drop what it keeps in memory of the files."""
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def now() -> tuple[float, float]:
    """Seconds on the clock, and those of all the process's threads."""
    return time.perf_counter(), time.process_time()


def seconds_of(folder: Path, state: str, checked: bool) -> list[tuple[float, float]]:
    """Seconds until the model is loaded, and until it has computed the logits of a token, each on the clock and of the
    processor."""
    os.environ[VARIABLE] = str(int(checked))
    gc.collect()
    if state == STATES[1]:
        forget(folder)
    started = now()
    model = AutoModelForCausalLM.from_pretrained(folder)
    moments = [now()]
    with torch.no_grad():
        model(torch.ones(1, 1, dtype=torch.long))
    moments.append(now())
    return [(clock - started[0], processor - started[1]) for clock, processor in moments]


def median_seconds(action: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure(name: str, folder: Path, state: str, rounds: int) -> list[dict]:
    """A record for loading, and one for loading and the first logits."""
    for checked in (True, False):
        seconds_of(folder, STATES[0], checked)  # compiles, or loads, the fused functions
    # Each round the other one first, since what comes first may pay for both.
    times: dict[bool, list[list[tuple[float, float]]]] = {True: [], False: []}
    for i in range(rounds):
        for checked in (bool(i % 2), not i % 2):
            times[checked].append(seconds_of(folder, state, checked))
    os.environ[VARIABLE] = "1"
    alone = median_seconds(lambda: check_data(list(folder.glob("*.safetensors")), mapped=True), rounds)
    size, records = verify_folder(folder), []
    for part, what in enumerate(MEASURED):
        with_check, without = ([found[part][0] for found in times[checked]] for checked in (True, False))
        cpu_ratio = median_ratio(*([found[part][1] for found in times[checked]] for checked in (True, False)))
        records.append(
            {
                "name": f"{name} / {state} / {what}",
                "shape": [size.n_tensors],
                "value": statistics.median(with_check),
                "unit": "s",
                "baseline": statistics.median(without),
                "ratio": median_ratio(with_check, without),
                "ceiling_fraction": None,
                "cpu_ratio": cpu_ratio,
                "bytes": size.n_bytes,
                "check_alone": alone,
                "rounds": rounds,
                **made(COMMAND, ("torch", "transformers", "xxhash")),
            }
        )
    return records


def main() -> None:
    parser = option_parser(__doc__, "load_checks")
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints; default: a temporary folder")
    options = parser.parse_args()
    records = []
    for model in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
            for name, folder in save_both(model, Path(temporary)).items():
                for state in STATES:
                    records += measure(name, folder, state, options.rounds)
                    for record in records[-2:]:
                        values = f"{record['baseline']:.3f} s, checked {record['value']:.3f} s ({record['ratio']:.3f}x)"
                        values += f", CPU {record['cpu_ratio']:.3f}x"
                        print(f"{record['name']}: {values}, the check alone {record['check_alone']:.3f} s", flush=True)
    write(records, options.out)


if __name__ == "__main__":
    main()
