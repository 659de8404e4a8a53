# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights on the CPU, beside torch in bfloat16.

    python -m benchmarks.packed_product_cpu                                    # about five minutes
    python -m benchmarks.packed_product_cpu --variants native avx2
    python -m benchmarks.packed_product_cpu --shapes 256x512 --rows 1 --rounds 2 --out -

A product is ``x W^T`` of ``rows`` tokens with a weight ``N x K``: the forward pass of `MXFP4PackedLinear` without
gradients, by scheme, and that of `nn.Linear` in bfloat16. In every round each contender runs once, one after the other,
and before each run the processor's caches are filled with something else: a model's weights do not fit into them.
`value` is the median of its times, `ratio` the median over the rounds of bfloat16's time over its own of the same
round. What a contender computes is checked first.

A variant is the instruction set that our library is compiled for, chosen by HF_MXFP4_CPU: ``native`` leaves it unset.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import MXFP4PackedLinear
from recipes.common.records import hardware

from .records import made, median_ratio, option_parser, write


NAME = "packed_product_cpu"
COMMAND = f"python -m benchmarks.{NAME}"
VARIABLE = "HF_MXFP4_CPU"
NATIVE = "native"
BASELINE = "torch bfloat16"
SCHEMES = {
    "rceil": {"scale_rule": "rceil", "macro_block": None},
    "rceil, macro static": {"scale_rule": "rceil", "macro_search": "static"},
    "even, macro blockwise": {"scale_rule": "even", "macro_search": "blockwise"},
    "rceil, fallback": {"scale_rule": "rceil", "macro_block": None, "outlier_fallback": 0.5},
}
SHAPES = ("4096x4096", "4096x14336", "14336x4096")
#: Largest relative error of a product against the one with the values that it stands for.
_TOLERANCE = 0.01

Run = Callable[[], object]


def weight_of(n: int, k: int) -> torch.Tensor:
    """A random weight ``[N, K]`` in bfloat16 with a few columns of outliers, as trained ones have."""
    generator = torch.Generator().manual_seed(n + k)
    weight = torch.randn(n, k, generator=generator).mul_(0.02)
    weight[:, ::97] *= 4
    return weight.bfloat16()


def our_layers(weight: torch.Tensor) -> dict[str, nn.Module]:
    """By name, the baseline first."""
    plain = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    found: dict[str, nn.Module] = {BASELINE: plain}
    for name, options in SCHEMES.items():
        found[name] = MXFP4PackedLinear.from_linear(plain, MXFP4RLConfig(mode="packed", **options))
    return found


def check(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Raise `RuntimeError` where the relative error of a product is above ``tolerance``."""
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= tolerance:
        raise RuntimeError(f"{name} does not compute the product: relative error {error:.3g}")


def cache_filler() -> Run:
    """Return what fills the processor's caches with something else."""
    size = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    other = torch.zeros(max(2 * size, 1 << 26), dtype=torch.uint8)
    return lambda: other.add_(1)


def measure(runs: dict[str, Run], rounds: int, fill: Run) -> dict[str, list[float]]:
    """Seconds by contender and round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            fill()
            time.sleep(0.02)  # OpenMP's threads go on turning for a while
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return times


class Bench:
    """All measurements of one process.

    Args:
        rounds: as of [`measure`].
    """

    def __init__(self, rounds: int):
        self._rounds, self._fill = rounds, cache_filler()
        self._load = os.getloadavg()[0]

    @torch.no_grad()
    def shape(self, n: int, k: int, rows: Sequence[int], threads: Sequence[int]) -> list[dict]:
        """The records of one weight ``[N, K]``."""
        weight, records = weight_of(n, k), []
        layers = our_layers(weight)
        for m in rows:
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
            self._check(layers, x)
            runs: dict[str, Run] = {name: lambda layer=layer, x=x: layer(x) for name, layer in layers.items()}
            for count in threads:
                torch.set_num_threads(count)
                records += self._records(measure(runs, self._rounds, self._fill), [m, n, k], count)
        return records

    def _check(self, layers: dict[str, nn.Module], x: torch.Tensor) -> None:
        for name, layer in layers.items():
            if name != BASELINE:
                check(name, layer(x), nn.functional.linear(x, layer.dequantized_weight(x.dtype)), _TOLERANCE)

    def _records(self, times: dict[str, list[float]], shape: list[int], threads: int) -> list[dict]:
        records = []
        for name, seconds in times.items():
            record = {
                "name": name,
                "shape": shape,
                "value": 1e3 * statistics.median(seconds),
                "unit": "ms",
                "baseline": BASELINE,
                "ratio": median_ratio(times[BASELINE], seconds),
                "ceiling_fraction": None,
                "threads": threads,
                "variant": os.environ.get(VARIABLE, NATIVE),
                "rounds": self._rounds,
                **made(
                    COMMAND,
                    ("torch", "hf-mxfp4"),
                    f"{hardware(threads)}, load average {self._load:.1f} as it began",
                ),
            }
            records.append(record)
            print(described(record), flush=True)
        return records


def described(record: dict) -> str:
    m, n, k = record["shape"]
    return (
        f"{record['variant']}, {record['threads']} threads, {m} rows, {n} x {k}, {record['name']}: "
        f"{record['value']:.2f} ms ({record['ratio']:.2f}x)"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = option_parser(__doc__, NAME)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxK", help="of weights, a multiple of 32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 512], help="tokens of an input")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--variants", nargs="+", default=[NATIVE], help="native, avx2 or portable")
    options = parser.parse_args(arguments)
    if options.variants != [os.environ.get(VARIABLE, NATIVE)]:
        write(each_variant(options.variants, sys.argv[1:] if arguments is None else arguments), options.out)
        return
    bench, before, records = Bench(options.rounds), torch.get_num_threads(), []
    try:
        for shape in options.shapes:
            n, k = map(int, shape.split("x"))
            records += bench.shape(n, k, options.rows, options.threads)
            write(records, options.out)  # what is measured so far, should the rest be cut off
    finally:
        torch.set_num_threads(before)


def each_variant(variants: Sequence[str], arguments: list[str]) -> list[dict]:
    """The records of several variants, each in a process of its own: the library is loaded once in each."""
    records = []
    for variant in variants:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        if variant != NATIVE:
            environment[VARIABLE] = variant
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "records.json")
            command = [sys.executable, "-m", f"benchmarks.{NAME}", *arguments, "--variants", variant, "--out", str(out)]
            subprocess.run(command, env=environment, check=True)
            records += json.loads(out.read_text())
    return records


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s in all")
