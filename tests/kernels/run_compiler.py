# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels ahead of time for one target, without a GPU; prints the generated code as JSON.

    python run_compiler.py cuda 90 [variant ...]

A process of its own, because a process that interprets kernels cannot compile them.
"""

import json
import sys

import torch
from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels.common import plan as _plan
from mxfp4_kernels.common.plan import PLAIN, Scheme, Side
from mxfp4_kernels.quantization import both as _both
from mxfp4_kernels.quantization import dequantize as _dequantize
from mxfp4_kernels.quantization import rows as _kernel


FLAT, ROWS = _plan._FLAT_TILE, _plan._ROW_TILE
DEFAULT = Scheme("rceil", 128, "static", 0.5)
BOTH, BOTH_DEFAULT = _plan.both_tile(Scheme()), _plan.both_tile(DEFAULT)
SIGNS = torch.ones(1)
#: Name: kernel, dtype, scheme, tile, type of sizes, whether sizes are multiples of 16, and perhaps: what belongs to the
#: axis that blocks run along (`None` for columns alone), and in the kernels of `quantization/both.py` to the other one.
VARIANTS = {
    "plain": ("fake_quantize", torch.bfloat16, Scheme("rceil"), FLAT, "i32", True),
    "fallback": ("fake_quantize", torch.bfloat16, Scheme("even", outlier_fallback=0.3), FLAT, "i32", True),
    "default": ("fake_quantize", torch.bfloat16, DEFAULT, FLAT, "i32", True),
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
    "both odd huge": ("fake_quantize_both", torch.float16, Scheme("even"), BOTH, "i64", False, PLAIN, PLAIN),
}
_INPUTS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*i16"}
_OUTPUTS = _INPUTS | {torch.bfloat16: "*bf16"}
_SMALL = ("col_tiles", "seed_low", "seed_high", "seed_low_t", "seed_high_t")
#: The arguments that say how long rows are, here or in the output: at least multiples of 16 where anything is.
_LENGTHS = ("n_cols", "n_read", "n_codes", "n_codes_t", "out_cols", "out_cols_t", "x_row_stride", "x_stack_stride")


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
    kernel = next(found for m in (_kernel, _both, _dequantize) if (found := getattr(m, f"{name}_kernel", None)))
    constants = _plan.compile_constants(dtype, scheme, side or PLAIN, side_t)
    names = ("TILE", "STRIP") if "TILE" in kernel.arg_names else ("ROWS", "COLS")
    constants |= {**dict(zip(names, tile, strict=True)), "BY_ROWS": side is not None}
    options = _plan.options(*tile, {name: value for name, value in constants.items() if name in kernel.arg_names})
    unused = {"macro": scheme.macro_block is None, "residual": scheme.outlier_fallback is None}
    unused |= {"signs_ptr": (side or PLAIN).signs is None, "signs_t_ptr": side_t.signs is None}
    for pointer in [name for name in kernel.arg_names if name.endswith("_ptr")]:
        of_rows = side is None and not pointer.endswith("_t_ptr") and pointer != "x_ptr"
        if of_rows or any(absent and pointer.startswith(start) for start, absent in unused.items()):
            constants[pointer] = None
    pointers = {name: "*u8" for name in kernel.arg_names if name.endswith("_ptr")} | {
        "x_ptr": _INPUTS[dtype],
        "out_ptr": _OUTPUTS[dtype],
        "out_t_ptr": _OUTPUTS[dtype],
        "signs_ptr": "*fp32",
        "signs_t_ptr": "*fp32",
    }
    types = dict.fromkeys(kernel.arg_names, size) | pointers | dict.fromkeys(_SMALL, "i32") | {"alpha": "fp32"}
    multiples = [*pointers, *_LENGTHS * aligned, *["n_rows"] * (aligned and "TILE" in names)]
    return compile_kernel(target, kernel, types, constants, options, multiples)


if __name__ == "__main__":
    target = gpu_target(*sys.argv[1:3])
    names = sys.argv[3:] or list(VARIANTS)
    print(json.dumps({name: compile_variant(target, *VARIANTS[name]) for name in names}))
