# SPDX-License-Identifier: Apache-2.0
"""Seconds that `from_pretrained` takes, as it is, with dithered masters, smoothed, and with both, which is the default.

    python -m benchmarks.loading --model SmolLM2-135M-Instruct

Each load is in a new process on two threads, which has imported the packages and loaded a small part of the model once,
so that imports do not count. The four ways take turns; a record has the median of them all.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig

from .records import made, median_ratio, option_parser, write


THREADS, ROUNDS = 2, 5
WAYS = {
    "neither": {"dither_ties": False, "smooth": False},
    "dithered": {"smooth": False},
    "smoothed": {"dither_ties": False},
    "dithered and smoothed": {},
}


def load(model: str, way: str) -> float:
    """Return the seconds of one load, in this process."""
    torch.set_num_threads(THREADS)
    scheme = MXFP4RLConfig(**WAYS[way])
    small = AutoConfig.from_pretrained(model, num_hidden_layers=1)
    AutoModelForCausalLM.from_pretrained(model, config=small, dtype=torch.float32, quantization_config=scheme)
    started = time.perf_counter()
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, quantization_config=scheme)
    return time.perf_counter() - started


def main() -> None:
    parser = option_parser(__doc__, "loading")
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--one", choices=WAYS, help="load in this way once and print the seconds")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(load(options.model, options.one)))
        return
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, found in seconds.items():
            command = [sys.executable, "-m", "benchmarks.loading", "--model", options.model, "--one", way]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
            found.append(json.loads(done.stdout.splitlines()[-1]))
    name = os.path.basename(options.model.rstrip("/"))
    common = made(f"python -m benchmarks.loading --model {name}", ("torch", "transformers"))
    found = [
        {
            "name": f"{name} / {way}",
            "shape": [ROUNDS],
            "value": statistics.median(times),
            "unit": "s",
            "baseline": statistics.median(seconds["neither"]),
            "ratio": median_ratio(times, seconds["neither"]),
            "ceiling_fraction": None,
            **common,
        }
        for way, times in seconds.items()
    ]
    for record in found:
        print(f"{record['name']}: {record['value']:.2f} s, {record['ratio']:.2f}")
    write(found, options.out)


if __name__ == "__main__":
    main()
