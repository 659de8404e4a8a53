# SPDX-License-Identifier: Apache-2.0
"""Compiles the folding kernels ahead of time for one target; prints the generated code as JSON.

python run_fold_compiler.py cuda 90 [variant ...]
"""

import json
import sys

import torch
from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels.common.arguments import (
    FoldBothLengths,
    FoldedPointers,
    FoldLengths,
    PackedPointers,
    RowBytes,
    Sides,
)
from mxfp4_kernels.common.plan import PLAIN, Scheme, Side, scheme_constants
from mxfp4_kernels.e4m3 import fold
from mxfp4_kernels.e4m3.both_kernel import fold_both_kernel
from mxfp4_kernels.e4m3.rows_kernel import fold_groups_kernel, fold_rows_kernel


INPUTS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*i16"}
KERNELS = {"fold_groups": fold_groups_kernel, "fold_rows": fold_rows_kernel, "fold_both": fold_both_kernel}
SEEDS = ("seed_low", "seed_high", "seed_low_t", "seed_high_t")
MBS, DYNAMIC = Scheme("rceil", 128), Scheme("mse", 128, "dynamic")
#: Name: kernel, dtype, scheme, plan, other constants, type of sizes.
VARIANTS = {
    "groups": ("fold_groups", torch.bfloat16, Scheme("rceil"), fold.groups_plan(True, False), {}, "i32"),
    "groups mbs": ("fold_groups", torch.bfloat16, MBS, fold.groups_plan(True, False), {}, "i32"),
    "groups mse dynamic": ("fold_groups", torch.float32, DYNAMIC, fold.groups_plan(True, False), {}, "i32"),
    "columns odd huge": ("fold_groups", torch.float16, MBS, fold.groups_plan(False, False), {}, "i64"),
    "tiles": ("fold_groups", torch.bfloat16, Scheme("rceil", block_rows=32), fold.groups_plan(True, True), {}, "i32"),
    "rows 4096": ("fold_rows", torch.bfloat16, Scheme("rceil"), fold.rows_plan(1, 4096, True, False), {}, "i32"),
    "rows 8192": ("fold_rows", torch.bfloat16, Scheme("even"), fold.rows_plan(1, 8192, True, False), {}, "i32"),
    "rows 14336": ("fold_rows", torch.bfloat16, Scheme("rceil"), fold.rows_plan(1, 14336, True, False), {}, "i32"),
    "fp8": ("fold_rows", torch.bfloat16, Scheme(), fold.rows_plan(1, 4096, True, False), {"FP8": True}, "i32"),
    "fp8 columns": (
        "fold_rows",
        torch.bfloat16,
        Scheme(),
        fold.rows_plan(1, 8192, False, False),
        {"FP8": True},
        "i32",
    ),
    "both": ("fold_both", torch.bfloat16, Scheme("rceil"), fold.both_plan(), {}, "i32"),
    "both mbs": ("fold_both", torch.bfloat16, MBS, fold.both_plan(), {}, "i32"),
    "rotated stochastic": (
        "fold_groups",
        torch.bfloat16,
        Scheme("rceil"),
        fold.groups_plan(True, False),
        {},
        "i32",
        Side(5, 16),
        PLAIN,
    ),
    "rotated row": (
        "fold_rows",
        torch.bfloat16,
        Scheme("rceil"),
        fold.rows_plan(1, 4096, True, False),
        {},
        "i32",
        Side(None, 64),
        PLAIN,
    ),
    "both wgrad": (
        "fold_both",
        torch.bfloat16,
        Scheme("floor"),
        fold.both_plan(PLAIN, Side(5, 16)),
        {},
        "i32",
        PLAIN,
        Side(5, 16),
    ),
    "groups pairs": (
        "fold_groups",
        torch.bfloat16,
        Scheme("rceil"),
        fold.groups_plan(True, False),
        {"PAIRS": True},
        "i32",
    ),
    "groups pairs mbs": ("fold_groups", torch.bfloat16, MBS, fold.groups_plan(True, False), {"PAIRS": True}, "i32"),
    "columns pairs": (
        "fold_groups",
        torch.bfloat16,
        MBS,
        fold.groups_plan(False, False),
        {"PAIRS": True, "COLUMNS": True},
        "i32",
    ),
    "both pairs": ("fold_both", torch.bfloat16, Scheme("rceil"), fold.both_plan(), {"PAIRS": True}, "i32"),
    "both pairs mbs": ("fold_both", torch.bfloat16, MBS, fold.both_plan(), {"PAIRS": True}, "i32"),
    "rows values": (
        "fold_rows",
        torch.bfloat16,
        Scheme("rceil"),
        fold.rows_plan(1, 4096, True, False),
        {"values": True},
        "i32",
    ),
    "groups mbs values": ("fold_groups", torch.bfloat16, MBS, fold.groups_plan(True, False), {"values": True}, "i32"),
    "both reused pairs": (
        "fold_both",
        torch.bfloat16,
        Scheme(),
        fold.both_plan(),
        {"REUSED": True, "PAIRS": True},
        "i32",
    ),
    "across pairs": (
        "fold_both",
        torch.bfloat16,
        Scheme(),
        fold.both_plan(),
        {"REUSED": True, "PAIRS": True, "out": None},
        "i32",
    ),
    "codes and across pairs": (
        "fold_both",
        torch.bfloat16,
        Scheme(),
        fold.both_plan(),
        {"REUSED": True, "PAIRS": True, "out": PackedPointers("*i32", "*u8", None, None, None)},
        "i32",
    ),
    "codes and across": (
        "fold_both",
        torch.bfloat16,
        Scheme(),
        fold.both_plan(),
        {"REUSED": True, "out": PackedPointers("*u8", "*u8", None, None, None)},
        "i32",
    ),
    "both reused": ("fold_both", torch.bfloat16, Scheme(), fold.both_plan(), {"REUSED": True}, "i32"),
}


def compile_variant(target, name: str, dtype, scheme: Scheme, plan, others: dict, size: str, *sides: Side) -> dict:
    sides = sides or (PLAIN, PLAIN)
    tile, options = plan
    native = target.backend == "cuda" and target.arch >= 89 or target.arch == "gfx950"
    scheme_constant = scheme_constants(dtype, scheme, native=native)
    both = Sides(*(side.constants for side in sides))
    constants = {
        "FP8": False,
        "REUSED": False,
        "PAIRS": False,
        "COLUMNS": False,
        "STEPS": 0,
        **tile,
        **others,
    }
    constants |= {"SCHEME": scheme_constant, "SIDE": both.rows, "SIDES": both}
    adjacent = tile.get("ROWS") != 32 or scheme_constant.TILES
    strides = {"x_row_stride": size, "x_col_stride": 1} if adjacent else {"x_row_stride": 1, "x_col_stride": size}
    signs = tuple(None if side.signs is None else "*fp32" for side in sides)
    out = FoldedPointers("*i32" if constants["PAIRS"] else "*u8", "*fp32")
    across = FoldedPointers("*u8", "*fp32") if constants["REUSED"] else out
    out = constants.pop("out", out)
    packs = isinstance(out, PackedPointers)
    lengths = FoldBothLengths(*[size] * 6, **strides) if name == "fold_both" else FoldLengths(*[size] * 3, **strides)
    types = dict.fromkeys(("col_tiles", *SEEDS), "i32") | {
        "x_ptr": INPUTS[dtype],
        "out": out,
        "out_t": across,
        "values_ptr": "*bf16" if constants.pop("values", False) else None,
        "macro_ptr": "*u8" if scheme.macro_search == "dynamic" else None,
        "counter_ptr": None if constants["FP8"] else "*i32",
        "signs_ptr": signs[0],
        "signs": signs,
        "n_rows": size,
        "lengths": lengths,
        "row_bytes": RowBytes(size, size, size) if packs else None,
    }
    aligned = ["x_ptr", "values_ptr", "macro_ptr", "counter_ptr", "signs_ptr", "signs", *FoldedPointers._fields]
    aligned += ["codes", "n_codes", "n_blocks"]
    if size == "i32":
        aligned += ["n_rows", *FoldBothLengths._fields]
    return compile_kernel(target, KERNELS[name], types, constants, {**options, "enable_fp_fusion": False}, aligned)


if __name__ == "__main__":
    target = gpu_target(*sys.argv[1:3])
    # Two elements an instruction are NVIDIA's.
    every = [name for name in VARIANTS if target.backend == "cuda" or "pairs" not in name]
    names = sys.argv[3:] or every
    print(json.dumps({name: compile_variant(target, *VARIANTS[name]) for name in names}))
