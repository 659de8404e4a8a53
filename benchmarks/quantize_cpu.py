# SPDX-License-Identifier: Apache-2.0
"""Quantize, fake-quantize and dequantize on the CPU, beside the libraries that do the same.

    pip install -e '.[bench]'
    python -m benchmarks.quantize_cpu                     # 1k^2 to 8k^2, about ten minutes
    python -m benchmarks.quantize_cpu --sizes 1024 --rounds 5

bfloat16 matrices, blocks of 32 along rows. In every round each contender runs once, one after the other; `value` is the
median of its times as GB/s of the bfloat16 matrix (counted once), `ratio` the median over the rounds of the
contender's time over ours. What a contender computes is checked against our values first, where it has the same rule.
Not installed contenders are left out, and named. fouroversix and microxcaling are no dependencies of ours:

    SKIP_CUDA_BUILD=1 pip install --no-deps --no-build-isolation fouroversix
    PYTHONPATH=<clone of github.com/microsoft/microxcaling> python -m benchmarks.quantize_cpu
"""

import statistics
import time
from collections.abc import Callable

import torch

import hf_mxfp4
from hf_mxfp4.backends import backend_for
from hf_mxfp4.numerics import QuantScheme

from .records import made, median_ratio, option_parser, write


COMMAND = "python -m benchmarks.quantize_cpu"
PACKAGES = ("torch", "hf-mxfp4", "torchao", "compressed-tensors", "fouroversix")
OURS = "ours"
CLONE = "clone"

Run = Callable[[torch.Tensor], object]


def ours() -> dict[str, dict[str, Run]]:
    scheme = {"macro_block": 128, "outlier_fallback": 0.5}
    return {
        "fake_quantize": {
            OURS: hf_mxfp4.fake_quantize,
            "ours, eager": lambda x: hf_mxfp4.fake_quantize(x, backend="eager"),
            "ours, macro 128": lambda x: hf_mxfp4.fake_quantize(x, macro_block=128),
            "ours, macro 128 + fallback": lambda x: hf_mxfp4.fake_quantize(x, **scheme),
            "ours, macro 128 searched + fallback": lambda x: hf_mxfp4.fake_quantize(
                x, macro_search="dynamic", **scheme
            ),
            CLONE: torch.clone,
        },
        "quantize": {OURS: hf_mxfp4.quantize, "ours, eager": lambda x: hf_mxfp4.quantize(x, backend="eager")},
        "dequantize": {OURS: lambda q: q.dequantize()},
    }


def torchao() -> dict[str, dict[str, Run]]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    def quantize(x, mode="rceil"):
        return to_mx(x, torch.float4_e2m1fn_x2, block_size=32, scaling_mode=ScaleCalculationMode(mode))

    def dequantize(packed):
        scale, codes = packed
        return to_dtype(codes, scale, torch.float4_e2m1fn_x2, 32, torch.bfloat16)

    def fake(x):
        return dequantize(quantize(x))

    # The library is written to be compiled; recompiled per shape, outside of the timing.
    compiled_quantize, compiled_fake = torch.compile(quantize, dynamic=False), torch.compile(fake, dynamic=False)
    return {
        "fake_quantize": {"torchao": fake, "torchao, compiled": compiled_fake},
        "quantize": {"torchao": quantize, "torchao, compiled": compiled_quantize},
        # torch 2.13 cannot compile a function of float8_e8m0fnu for the CPU.
        "dequantize": {"torchao": prepared(quantize, dequantize)},
    }


def compressed_tensors() -> dict[str, dict[str, Run]]:
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def parameters(x):
        blocks = x.view(x.shape[0], -1, 32)
        return calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)

    def quantize(x):
        return MXFP4PackedCompressor.compress({"weight": x, "weight_scale": parameters(x)[0]}, scheme)

    def dequantize(packed):
        return MXFP4PackedCompressor.decompress(dict(packed), scheme)["weight"]

    def fake(x):
        scale, zero_point = parameters(x)
        return fake_quantize(x, scale, zero_point, args)

    return {
        "fake_quantize": {"compressed-tensors (even)": fake},
        "quantize": {"compressed-tensors (even)": quantize},
        "dequantize": {"compressed-tensors": prepared(quantize, dequantize)},
    }


def fouroversix() -> dict[str, dict[str, Run]]:
    from fouroversix import QuantizationConfig, dequantize, quantize_to_fp4
    from fouroversix.utils import QuantizeBackend

    config = QuantizationConfig(backend="pytorch", dtype="mxfp4", scale_rule="static_6")

    def quantize(x):
        return quantize_to_fp4(x, config)

    def back(packed):
        return dequantize(packed, torch.bfloat16, backend=QuantizeBackend.pytorch, intermediate_dtype=torch.float32)

    return {
        "fake_quantize": {"fouroversix": lambda x: back(quantize(x))},
        "quantize": {"fouroversix": quantize},
        "dequantize": {"fouroversix": prepared(quantize, back)},
    }


def microxcaling() -> dict[str, dict[str, Run]]:
    from mx.mx_ops import _quantize_mx

    def fake(x):
        return _quantize_mx(
            x.float(), 8, "fp4_e2m1", block_size=32, axes=[-1], round="even", shared_exp_method="max"
        ).bfloat16()

    return {"fake_quantize": {"microxcaling (floor)": fake}}


def prepared(quantize: Run, dequantize: Run) -> Run:
    """A dequantizer that is given a matrix: it is quantized when the matrix is first seen, outside of the timing."""
    seen: dict[int, object] = {}

    def run(x):
        if x.data_ptr() not in seen:
            seen.clear()
            seen[x.data_ptr()] = quantize(x)
        return dequantize(seen[x.data_ptr()])

    return run


#: The rule of a contender, where its fake-quantized values are compared with ours.
RULES = {"compressed-tensors (even)": "even", "microxcaling (floor)": "floor"}


def contenders() -> dict[str, dict[str, Run]]:
    found = ours()
    found["dequantize"] = {OURS: prepared(hf_mxfp4.quantize, found["dequantize"][OURS])}
    for library in (torchao, compressed_tensors, fouroversix, microxcaling):
        try:
            theirs = library()
        except ImportError as error:
            print(f"left out: {library.__name__} ({error})")
            continue
        for operation, runs in theirs.items():
            found[operation].update(runs)
    return found


def check(name: str, run: Run) -> None:
    """Raises when a contender does not compute what it is measured for."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = hf_mxfp4.fake_quantize(x, scale_rule=RULES.get(name, "rceil"))
    if not torch.equal(run(x).view(x.shape), expected):
        raise RuntimeError(f"{name} does not give the values that it is compared for")


def measure(runs: dict[str, Run], x: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    for run in runs.values():
        run(x), run(x)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(0.02)  # OpenMP's threads go on turning for a while after the contender before
            started = time.perf_counter()
            run(x)
            times[name].append(time.perf_counter() - started)
    return times


def main() -> None:
    parser = option_parser(__doc__, "quantize_cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    name, reason = backend_for("cpu", torch.bfloat16, QuantScheme(), "auto")
    print(f"our backend: {name}{f' ({reason})' if reason else ''}; {torch.get_num_threads()} threads")
    found = contenders()
    for contender, run in found["fake_quantize"].items():
        if contender != CLONE and "macro" not in contender:
            check(contender, run)
    records = []
    for operation, runs in found.items():
        print(f"\n{operation}\n| contender | " + " | ".join(f"{size}²: GB/s (ratio)" for size in options.sizes) + " |")
        rows: dict[str, list[str]] = {contender: [] for contender in runs}
        for size in options.sizes:
            x = torch.randn(size, size, generator=torch.Generator().manual_seed(size)).bfloat16()
            times = measure(runs, x, options.rounds)
            for contender, seconds in times.items():
                ratio = median_ratio(seconds, times[OURS])
                speed = 2 * x.numel() / statistics.median(seconds) / 1e9
                rows[contender].append(f"{speed:.3f} ({ratio:.2f})")
                records.append(
                    {
                        "name": f"{operation} / {contender}",
                        "shape": list(x.shape),
                        "value": speed,
                        "unit": "GB/s of the bfloat16 matrix",
                        "baseline": OURS,
                        "ratio": ratio,
                        "ceiling_fraction": None,
                        "median_seconds": statistics.median(seconds),
                        "rounds": options.rounds,
                        **made(COMMAND, PACKAGES),
                    }
                )
        for contender, cells in rows.items():
            print(f"| {contender} | " + " | ".join(cells) + " |")
    write(records, options.out)


if __name__ == "__main__":
    main()
