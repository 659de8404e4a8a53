# SPDX-License-Identifier: Apache-2.0
"""Speed of the C++ functions on the CPU: quantization, and products with packed weights.

    python -m benchmarks.cpu_speed quantize          # beside torchao and compressed-tensors, if they are installed
    python -m benchmarks.cpu_speed product           # `MXFP4PackedLinear` beside `nn.Linear` in bfloat16
    python -m benchmarks.cpu_speed product --shapes 256x512 --rows 1 --rounds 2 --out -

In every round each contender runs once, one after the other; ``value`` is the median over the rounds, and ``ratio`` the
median of the ratio to the baseline's time in the same round. What a contender computes is checked first. Before each
run the processor's caches are filled with something else, since the weights of a model do not fit into them.
``HF_MXFP4_CPU=avx2`` (or ``portable``) in front of the command measures another instruction set.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import MXFP4PackedLinear

from .records import RESULTS, hardware, made, median_ratio, write


Run = Callable[[], object]
PACKAGES = ("torch", "hf-mxfp4", "torchao", "compressed-tensors")
OURS = "ours"
BFLOAT16 = "torch bfloat16"
#: Options of packed layers by their names in the records.
SCHEMES = {
    "rceil": {"scale_rule": "rceil", "macro_block": None},
    "rceil, macro static": {"scale_rule": "rceil", "macro_search": "static"},
    "even, macro blockwise": {"macro_search": "block_mantissas"},
    "rceil, fallback": {"scale_rule": "rceil", "macro_block": None, "outlier_fallback": 0.5},
}
#: Largest relative error of a product against one with the values that the codes stand for.
TOLERANCE = 0.01


def measure(runs: dict[str, Run], rounds: int, before: Run = lambda: None) -> dict[str, list[float]]:
    """Return seconds by contender and round; ``before`` runs before each call and is not timed."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            before()
            time.sleep(0.02)  # the threads of OpenMP spin for a while
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return times


def cache_filler() -> Run:
    """Return what fills the processor's caches with something else."""
    size = 0
    if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names:
        size = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    other = torch.zeros(max(2 * size, 1 << 26), dtype=torch.uint8)
    return lambda: other.add_(1)


def check(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> None:
    """Raise `RuntimeError` if the relative error of a result is above ``tolerance``."""
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= tolerance:
        raise RuntimeError(f"{name} does not compute what it is measured for: relative error {error:.3g}")


# ---- quantization ---------------------------------------------------------------------------------------------------


def quantizers(x: torch.Tensor) -> dict[str, Run]:
    """Return what fake-quantizes and packs a matrix, by ``"operation / contender"``; checked."""
    factors = {"scale_rule": "rceil", "macro_block": 128, "outlier_fallback": 0.5}
    runs: dict[str, Run] = {
        f"fake_quantize / {OURS}": lambda: hf_mxfp4.fake_quantize(x),
        "fake_quantize / ours, eager": lambda: hf_mxfp4.fake_quantize(x, backend="eager"),
        "fake_quantize / ours, macro 128 + fallback": lambda: hf_mxfp4.fake_quantize(x, **factors),
        f"quantize / {OURS}": lambda: hf_mxfp4.quantize(x),
    }
    for library in (_torchao, _compressed_tensors):
        try:
            runs |= library(x)
        except ImportError as error:
            print(f"left out: {error}")
    packed = hf_mxfp4.quantize(x)
    return runs | {f"dequantize / {OURS}": packed.dequantize}


def _torchao(x: torch.Tensor) -> dict[str, Run]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    def quantize() -> tuple[torch.Tensor, torch.Tensor]:
        return to_mx(x, torch.float4_e2m1fn_x2, block_size=32, scaling_mode=ScaleCalculationMode("rceil"))

    # The library is written to be compiled; that is outside of the timing.
    compiled = torch.compile(quantize, dynamic=False)
    scale, codes = compiled()
    values = to_dtype(codes, scale, torch.float4_e2m1fn_x2, 32, torch.bfloat16).view(x.shape)
    check("torchao", values, hf_mxfp4.fake_quantize(x, scale_rule="rceil"))
    return {"quantize / torchao, compiled": compiled}


def _compressed_tensors(x: torch.Tensor) -> dict[str, Run]:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    options = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    arguments = QuantizationArgs(**options, scale_dtype=torch.uint8)

    def fake() -> torch.Tensor:
        blocks = x.view(x.shape[0], -1, 32)
        scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments)
        return fake_quantize(x, scale, zero_point, arguments)

    check("compressed-tensors", fake(), hf_mxfp4.fake_quantize(x, scale_rule="even"))
    return {"fake_quantize / compressed-tensors (even)": fake}


def quantize_records(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the records of quantization: GB/s of the bfloat16 matrix, counted once."""
    for size in options.sizes:
        x = torch.randn(size, size, generator=torch.Generator().manual_seed(size)).bfloat16()
        times = measure(quantizers(x), options.rounds)
        for name, seconds in times.items():
            ratio = median_ratio(seconds, times[f"{name.split(' / ')[0]} / {OURS}"])
            value = 2 * x.numel() / statistics.median(seconds) / 1e9
            yield {
                "name": name,
                "shape": [size, size],
                "value": value,
                "unit": "GB/s",
                "baseline": OURS,
                "ratio": ratio,
            }


# ---- products -------------------------------------------------------------------------------------------------------


def layers(n: int, k: int) -> dict[str, nn.Module]:
    """Return a layer of a random weight ``[N, K]`` with outliers in bfloat16, and packed under each scheme."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).mul_(0.02)
    weight[:, ::97] *= 4
    plain = nn.Linear(k, n, bias=False, device="meta")
    plain.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
    contenders = {BFLOAT16: plain}
    for name, options in SCHEMES.items():
        contenders[name] = MXFP4PackedLinear.from_linear(plain, MXFP4RLConfig(mode="packed", **options))
    return contenders


@torch.no_grad()
def product_records(options: argparse.Namespace) -> Iterator[dict]:
    """Yield the records of products: milliseconds, and bfloat16's time over the contender's."""
    fill = cache_filler()
    variant = os.environ.get("HF_MXFP4_CPU", "native")
    for shape in options.shapes:
        n, k = map(int, shape.split("x"))
        contenders = layers(n, k)
        for m in options.rows:
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
            for name in SCHEMES:
                layer = contenders[name]
                expected = nn.functional.linear(x, layer.dequantized_weight(x.dtype))
                check(name, layer(x), expected, TOLERANCE)
            runs = {name: lambda layer=layer, x=x: layer(x) for name, layer in contenders.items()}
            times = measure(runs, options.rounds, fill)
            for name, seconds in times.items():
                yield {
                    "name": name,
                    "shape": [m, n, k],
                    "value": 1e3 * statistics.median(seconds),
                    "unit": "ms",
                    "baseline": BFLOAT16,
                    "ratio": median_ratio(times[BFLOAT16], seconds),
                    "threads": torch.get_num_threads(),
                    "variant": variant,
                }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["quantize", "product"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096], help="of matrices to quantize")
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "4096x14336"], metavar="NxK", help="of weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 512], help="tokens of an input")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", help="file of the records; - writes none")
    options = parser.parse_args(arguments)
    if options.what == "quantize":
        name = "quantize_cpu"
        measured = quantize_records(options)
    else:
        name = "packed_product_cpu"
        measured = product_records(options)
    common = made(f"python -m benchmarks.cpu_speed {options.what}", PACKAGES, hardware(torch.get_num_threads()))
    records = []
    for record in measured:
        records.append({**record, "ceiling_fraction": None, "rounds": options.rounds, **common})
        shape = "x".join(map(str, record["shape"]))
        print(f"{record['name']} {shape}: {record['value']:.3g} {record['unit']} ({record['ratio']:.2f}x)", flush=True)
        write(records, options.out or RESULTS / f"{name}.json")  # what is measured so far, should the rest be cut off


if __name__ == "__main__":
    main()
