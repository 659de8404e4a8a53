# SPDX-License-Identifier: Apache-2.0
"""Compiles the folding kernels ahead of time for one target; prints the generated code as JSON.

python run_fold_compiler.py cuda 90 [variant ...]
"""

import json
import sys

import torch
from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels.common.plan import PLAIN, Scheme, Side, compile_constants
from mxfp4_kernels.e4m3 import both_kernel as _fold_both_kernel
from mxfp4_kernels.e4m3 import fold as _fold
from mxfp4_kernels.e4m3 import rows_kernel as _fold_kernel


INPUTS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*i16"}
SIZES = ("n_rows", "n_cols", "length", "length_t", "padded_rows", "padded_cols", "x_row_stride", "x_col_stride")
SEEDS = ("seed_low", "seed_high", "seed_low_t", "seed_high_t")
MBS, DYNAMIC = Scheme("rceil", 128), Scheme("mse", 128, "dynamic")
#: Name: kernel, dtype, scheme, plan, other constants, type of sizes.
VARIANTS = {
    "groups": ("fold_groups", torch.bfloat16, Scheme("rceil"), _fold.groups_plan(True, False), {}, "i32"),
    "groups mbs": ("fold_groups", torch.bfloat16, MBS, _fold.groups_plan(True, False), {}, "i32"),
    "groups mse dynamic": ("fold_groups", torch.float32, DYNAMIC, _fold.groups_plan(True, False), {}, "i32"),
    "columns odd huge": ("fold_groups", torch.float16, MBS, _fold.groups_plan(False, False), {}, "i64"),
    "tiles": ("fold_groups", torch.bfloat16, Scheme("rceil", block_rows=32), _fold.groups_plan(True, True), {}, "i32"),
    "rows 4096": ("fold_rows", torch.bfloat16, Scheme("rceil"), _fold.rows_plan(1, 4096, True, False), {}, "i32"),
    "rows 8192": ("fold_rows", torch.bfloat16, Scheme("even"), _fold.rows_plan(1, 8192, True, False), {}, "i32"),
    "rows 14336": ("fold_rows", torch.bfloat16, Scheme("rceil"), _fold.rows_plan(1, 14336, True, False), {}, "i32"),
    "fp8": ("fold_rows", torch.bfloat16, Scheme(), _fold.rows_plan(1, 4096, True, False), {"FP8": True}, "i32"),
    "fp8 columns": (
        "fold_rows",
        torch.bfloat16,
        Scheme(),
        _fold.rows_plan(1, 8192, False, False),
        {"FP8": True},
        "i32",
    ),
    "both": ("fold_both", torch.bfloat16, Scheme("rceil"), _fold.both_plan(), {}, "i32"),
    "both mbs": ("fold_both", torch.bfloat16, MBS, _fold.both_plan(), {}, "i32"),
    "rotated stochastic": (
        "fold_groups",
        torch.bfloat16,
        Scheme("rceil"),
        _fold.groups_plan(True, False),
        {},
        "i32",
        Side(5, 16),
        PLAIN,
    ),
    "rotated row": (
        "fold_rows",
        torch.bfloat16,
        Scheme("rceil"),
        _fold.rows_plan(1, 4096, True, False),
        {},
        "i32",
        Side(None, 64),
        PLAIN,
    ),
    "both wgrad": (
        "fold_both",
        torch.bfloat16,
        Scheme("floor"),
        _fold.both_plan(PLAIN, Side(5, 16)),
        {},
        "i32",
        PLAIN,
        Side(5, 16),
    ),
    "both reused": ("fold_both", torch.bfloat16, Scheme(), _fold.both_plan(), {"REUSED": True}, "i32"),
}


def compile_variant(target, name: str, dtype, scheme: Scheme, plan, others: dict, size: str, *sides: Side) -> dict:
    kernel = getattr(_fold_both_kernel if name == "fold_both" else _fold_kernel, f"{name}_kernel")
    sides = sides or (PLAIN, PLAIN)
    tile, options = plan
    native = target.backend == "cuda" and target.arch >= 89 or target.arch == "gfx950"
    defaults = {"FP8": False, "REUSED": False, "NATIVE": native, "STEPS": 0}
    constants = compile_constants(dtype, scheme, *sides) | defaults | tile | others
    adjacent = tile.get("ROWS") != 32 or constants["TILES"]
    constants["x_col_stride" if adjacent else "x_row_stride"] = 1
    if constants["FP8"]:
        constants["counter_ptr"] = None
    for pointer, side in zip(("signs_ptr", "signs_t_ptr"), sides, strict=True):
        if side.signs is None:
            constants[pointer] = None
    pointers = {name: "*u8" for name in kernel.arg_names if name.endswith("_ptr")} | {
        "x_ptr": INPUTS[dtype],
        "scale_ptr": "*fp32",
        "scale_t_ptr": "*fp32",
        "signs_ptr": "*fp32",
        "signs_t_ptr": "*fp32",
        "counter_ptr": "*i32",
    }
    types = pointers | dict.fromkeys(SIZES, size) | dict.fromkeys(("col_tiles", *SEEDS), "i32")
    aligned = [*pointers, *(SIZES if size == "i32" else ())]
    return compile_kernel(target, kernel, types, constants, {**options, "enable_fp_fusion": False}, aligned)


if __name__ == "__main__":
    target = gpu_target(*sys.argv[1:3])
    names = sys.argv[3:] or list(VARIANTS)
    print(json.dumps({name: compile_variant(target, *VARIANTS[name]) for name in names}))
