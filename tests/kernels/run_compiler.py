# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels ahead of time for one target, without a GPU; prints the generated code as JSON.

    python run_compiler.py cuda 90 [variant ...]

A process of its own, because a process that interprets kernels cannot compile them.
"""

import json
import sys

import torch
from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels.common import plan
from mxfp4_kernels.common.arguments import BothLengths, Lengths, MacroBytes, PackedPointers, RowBytes, Sides
from mxfp4_kernels.common.plan import PLAIN, Scheme, Side
from mxfp4_kernels.quantization.both import quantize_both_kernel
from mxfp4_kernels.quantization.dequantize import dequantize_kernel
from mxfp4_kernels.quantization.rows import quantize_kernel


FLAT, ROWS = plan._FLAT_TILE, plan._ROW_TILE
DEFAULT = Scheme("rceil", 128, "static", 0.5)
BOTH, BOTH_DEFAULT = plan.both_tile(Scheme()), plan.both_tile(DEFAULT)
SIGNS = torch.ones(1)
#: Name: kernel, dtype, scheme, tile, type of sizes, whether sizes are multiples of 16, and perhaps: what belongs to the
#: axis that blocks run along (`None` for columns alone), and in the kernels of `quantization/both.py` to the other one.
VARIANTS = {
    "plain": ("fake_quantize", torch.bfloat16, Scheme("rceil"), FLAT, "i32", True),
    "fallback": ("fake_quantize", torch.bfloat16, Scheme("even", outlier_fallback=0.3), FLAT, "i32", True),
    "default": ("fake_quantize", torch.bfloat16, DEFAULT, FLAT, "i32", True),
    "macro": ("fake_quantize", torch.bfloat16, Scheme("rceil", 128), FLAT, "i32", True),
    "float32 rows": ("fake_quantize", torch.float32, Scheme("floor", 256, "static", 0.5), ROWS, "i32", True),
    "float16 odd huge": ("fake_quantize", torch.float16, Scheme("even", 64), ROWS, "i64", False),
    "dynamic": ("fake_quantize", torch.bfloat16, Scheme("rceil", 128, "dynamic", 0.5), FLAT, "i32", True),
    "dynamic mse": ("fake_quantize", torch.float32, Scheme("mse", 256, "dynamic", 0.5), ROWS, "i32", True),
    "tiles": ("fake_quantize", torch.bfloat16, Scheme("mse", block_rows=32), (32, 128), "i32", True),
    "mse tiles": ("fake_quantize", torch.float32, Scheme("mse", 256, "dynamic", 1.0, 32), (32, 256), "i32", True),
    "quantize": ("quantize", torch.bfloat16, DEFAULT, FLAT, "i32", True),
    "quantize plain": ("quantize", torch.float16, Scheme("even"), FLAT, "i32", True),
    "quantize odd huge": ("quantize", torch.float32, Scheme("floor", 128, "blockwise", 0.5), ROWS, "i64", False),
    "quantize tiles": ("quantize", torch.bfloat16, Scheme("rceil", 128, "dynamic", 0.5, 32), (32, 128), "i32", True),
    "dequantize": ("dequantize", torch.bfloat16, DEFAULT, FLAT, "i32", True),
    "dequantize odd huge": ("dequantize", torch.float32, Scheme("rceil", 128, "blockwise", 0.5), ROWS, "i64", False),
    "stochastic": ("fake_quantize", torch.bfloat16, Scheme("rceil"), FLAT, "i32", True, Side(5)),
    "quantize stochastic": ("quantize", torch.bfloat16, DEFAULT, FLAT, "i32", True, Side(5)),
    "rotated": ("fake_quantize", torch.bfloat16, Scheme("rceil"), FLAT, "i32", True, Side(None, 16)),
    "rotated far": ("fake_quantize", torch.bfloat16, Scheme("rceil"), ROWS, "i32", True, Side(None, 128, SIGNS)),
    "quantize rotated": ("quantize", torch.bfloat16, Scheme("rceil"), FLAT, "i32", True, Side(5, 32)),
    "columns": ("fake_quantize_both", torch.bfloat16, Scheme("rceil"), BOTH, "i32", True, None, PLAIN),
    "quantize columns": ("quantize_both", torch.float32, Scheme("even"), BOTH, "i32", True, None, PLAIN),
    "both": ("fake_quantize_both", torch.bfloat16, Scheme("rceil"), BOTH, "i32", True, PLAIN, Side(5, 16)),
    "both default": ("fake_quantize_both", torch.bfloat16, DEFAULT, BOTH_DEFAULT, "i32", True, PLAIN, PLAIN),
    "quantize both": ("quantize_both", torch.bfloat16, Scheme("rceil", 128), BOTH, "i32", True, PLAIN, PLAIN),
    "quantize whole rows": ("quantize", torch.bfloat16, Scheme("rceil", 4096), (1, 4096), "i32", True),
    "dynamic with bytes": (
        "fake_quantize_with_macro",
        torch.bfloat16,
        Scheme("rceil", 128, "dynamic"),
        FLAT,
        "i32",
        True,
    ),
    "by bytes": ("fake_quantize_by_macro", torch.bfloat16, Scheme("rceil", 128, "given"), FLAT, "i32", True),
    "quantize with values": ("quantize_with_values", torch.bfloat16, Scheme("rceil", 128), FLAT, "i32", True),
    "both odd huge": ("fake_quantize_both", torch.float16, Scheme("even"), BOTH, "i64", False, PLAIN, PLAIN),
}
_INPUTS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*i16"}
_OUTPUTS = _INPUTS | {torch.bfloat16: "*bf16"}
_SMALL = ("col_tiles", "first_row", "seed_low", "seed_high", "seed_low_t", "seed_high_t")
#: What says how long rows are, here or in the output: at least multiples of 16 where anything is.
_LENGTHS = ("n_macros", "n_cols", "n_read", "n_codes", "out_cols", "out_cols_t", "x_row_stride", "x_stack_stride")


def compile_variant(
    target,
    name: str,
    dtype,
    scheme: Scheme,
    tile,
    size: str,
    aligned: bool,
    side: Side | None = PLAIN,
    side_t: Side = PLAIN,
) -> dict:
    both, packs = name.endswith("both"), name.startswith("quantize")
    kernel = quantize_both_kernel if both else dequantize_kernel if name == "dequantize" else quantize_kernel
    scheme_constants = plan.scheme_constants(dtype, scheme)
    sides = Sides((side or PLAIN).constants, side_t.constants)
    constants = {"SCHEME": scheme_constants, "SIDE": sides.rows, "SIDES": sides, "BY_ROWS": side is not None}
    constants |= dict(zip(("TILE", "STRIP") if both else ("ROWS", "COLS"), tile, strict=True))
    values = not packs or name.endswith("values")
    constants |= {} if values else {"alpha": None}
    packed = PackedPointers(
        codes="*u8",
        scale="*u8",
        macro=None if scheme.macro_block is None else "*u8",
        residual_codes=None if scheme.outlier_fallback is None else "*u8",
        residual_scale=None if scheme.outlier_fallback is None else "*u8",
    )
    row_bytes = RowBytes(*[size] * 3) if packs else None
    out = _OUTPUTS[dtype] if values else packed if both else None
    signs = tuple("*fp32" if one is not None and one.signs is not None else None for one in (side, side_t))
    types = dict.fromkeys(_SMALL, "i32") | {
        "x_ptr": _INPUTS[dtype],
        "macro": MacroBytes("*u8", size) if name.endswith(("macro", "values")) else None,
        "out_ptr": _OUTPUTS[dtype],
        "out": None if both and side is None else out,
        "out_t": out,
        "packed": packed if packs or name == "dequantize" else None,
        "signs_ptr": signs[0],
        "signs": signs,
        "n_rows": size,
        "lengths": BothLengths(*[size] * 6) if both else Lengths(size, size, size, row_bytes),
        "row_bytes": None if row_bytes is None else (row_bytes, row_bytes),
        "alpha": "fp32",
    }
    if name == "dequantize":
        types["lengths"] = Lengths(size, None, None, RowBytes(*[size] * 3))
    pointers = ("pointer", "x_ptr", "out_ptr", "out", "out_t", "signs_ptr", "signs", *PackedPointers._fields)
    multiples = [*pointers, *_LENGTHS * aligned, *["n_rows"] * (aligned and both)]
    return compile_kernel(target, kernel, types, constants, plan.options(*tile, scheme_constants), multiples)


if __name__ == "__main__":
    target = gpu_target(*sys.argv[1:3])
    names = sys.argv[3:] or list(VARIANTS)
    print(json.dumps({name: compile_variant(target, *VARIANTS[name]) for name in names}))
