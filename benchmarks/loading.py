# SPDX-License-Identifier: Apache-2.0
"""Seconds that `from_pretrained` takes, as it is, with dithered masters, smoothed, and with both, which is the default.

    python -m benchmarks.loading --model SmolLM2-135M-Instruct

Each way is in a new process on two threads, which loads the model twice: the first load has imports of its own, the
second has none. The four ways take turns; a record has the median of the rounds, and all of them.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import torch
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig

from .records import made, median_ratio, option_parser, write


THREADS = 2
ROUNDS = 5
LOADS = ("first load", "second load")
WAYS = {
    "neither": {"dither_ties": False, "smooth": False},
    "dithered": {"smooth": False},
    "smoothed": {"dither_ties": False},
    "dithered and smoothed": {},
}


def load(model: str, way: str) -> dict[str, float]:
    """Return the seconds of the first load in this process, and of another."""
    torch.set_num_threads(THREADS)
    seconds = {}
    for which in LOADS:
        started = time.perf_counter()
        scheme = MXFP4RLConfig(**WAYS[way])
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, quantization_config=scheme)
        seconds[which] = time.perf_counter() - started
    return seconds


def main() -> None:
    parser = option_parser(__doc__, "loading")
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--one", choices=WAYS, help="load in this way once and print the seconds")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(load(options.model, options.one)))
        return
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, found in rounds.items():
            command = [sys.executable, "-m", "benchmarks.loading", "--model", options.model, "--one", way]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
            found.append(json.loads(done.stdout.splitlines()[-1]))
    name = os.path.basename(options.model.rstrip("/"))
    common = made(f"python -m benchmarks.loading --model {name}", ("torch", "transformers"))
    records = []
    for which in LOADS:
        seconds = {way: [one[which] for one in found] for way, found in rounds.items()}
        for way, times in seconds.items():
            record = {
                "name": f"{name} / {which} / {way}",
                "shape": [ROUNDS],
                "value": statistics.median(times),
                "unit": "s",
                "baseline": statistics.median(seconds["neither"]),
                "ratio": median_ratio(times, seconds["neither"]),
                "ceiling_fraction": None,
                "samples": times,
            }
            records.append({**record, **common})
            print(f"{record['name']}: {record['value']:.2f} s, {record['ratio']:.2f}", flush=True)
    write(records, options.out)


if __name__ == "__main__":
    main()
