# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of FP8 with a power of two per row ahead of time for one target; prints the code as JSON.

python run_fp8_compiler.py cuda 90 [variant ...]
"""

import json
import sys

import torch
from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels.common.arguments import ExpertsShape, FoldedPointers, ProductTile
from mxfp4_kernels.common.plan import PLAIN, Scheme, scheme_constants
from mxfp4_kernels.e4m3 import experts_kernel, fp8, fp8_both, fp8_both_kernel, fp8_kernel
from mxfp4_kernels.e4m3.fold import rows_plan


ONE_TILE, LOOP = rows_plan(1, 4096, True, False), rows_plan(1, 14336, True, False)
COLUMNS = ({"PARTS": 16}, fp8._OPTIONS)
TILES = {"SHAPE": ExpertsShape(0, 0, 128), "TILE": ProductTile(BM=128)}
FOLD = TILES | {"STRIP": 32, "SIDE": PLAIN.constants}
BOTH = ({"COL_PARTS": 16, "ROW_PARTS": 32}, fp8_both.OPTIONS)
#: Name: kernel, compile-time arguments and options, elements of a thread.
VARIANTS = {
    "rows": ("fake_rows", *ONE_TILE),
    "long rows": ("fake_rows", *LOOP),
    "maxima": ("column_maxima", {}, fp8._OPTIONS),
    "values of columns": ("fake_columns", *COLUMNS),
    "columns": ("columns", *COLUMNS),
    "bytes": ("scale_bytes", {}, fp8_both.MAXIMA_OPTIONS),
    "both": ("elements_both", *BOTH),
    "values of both": ("values_both", *BOTH),
    "expert bytes": ("expert_bytes", TILES, fp8_both.MAXIMA_OPTIONS),
    "expert elements": ("expert_elements", TILES | {"COL_PARTS": 16}, fp8_both.OPTIONS),
    "expert values": ("expert_values", TILES, fp8_both.OPTIONS),
    "fold of experts": ("fold_experts", FOLD | {"PAIRS": False}, fp8_both.MAXIMA_OPTIONS),
    "fold of experts, pairs": ("fold_experts", FOLD | {"PAIRS": True}, fp8_both.MAXIMA_OPTIONS),
    "values of rows": ("values", dict(zip(("ROWS", "COLS"), fp8.VALUES_TILE, strict=True)), fp8._OPTIONS),
}


def compile_variant(backend: str, arch: str, name: str, constants: dict, options: dict) -> dict:
    native = backend == "cuda" and int(arch) >= 89 or arch == "gfx950"
    types = {
        "x_ptr": "*i16",
        "out_ptr": "*bf16",
        "out_t_ptr": "*bf16",
        "out": FoldedPointers("*u8", "*fp32"),
        "out_t": FoldedPointers("*u8", "*fp32"),
        "maxima_ptr": "*i32",
        **dict.fromkeys(("elements_ptr", "byte_ptr", "of_slots_ptr"), "*u8"),
        **dict.fromkeys(("offsets_ptr", "ends_ptr", "counter_ptr"), "*i32"),
        **dict.fromkeys(("of_rows_ptr", "of_columns_ptr"), "*u8"),
        **dict.fromkeys(("n_rows", "n_cols", "padded_rows", "padded_cols", "row_stride", "part_steps"), "i32"),
        **dict.fromkeys(("n_tokens", "n_experts"), "i32"),
        **dict.fromkeys(("n_parts", "n_col_parts", "n_row_parts", "col_tiles"), "i32"),
    }
    scheme = scheme_constants(torch.bfloat16, Scheme(), native=native)._replace(INTERPRETED=False)
    constants = {**constants, "STEPS": 0, "SCHEME": scheme}
    aligned = ("x_ptr", "out_ptr", "out_t_ptr", "maxima_ptr", "of_rows_ptr", "of_columns_ptr", *FoldedPointers._fields)
    aligned += ("elements_ptr", "byte_ptr", "n_cols", "row_stride", "padded_rows", "padded_cols")
    aligned += ("of_slots_ptr", "offsets_ptr", "ends_ptr", "counter_ptr", "n_tokens")
    homes = (fp8_kernel, fp8_both_kernel, experts_kernel)
    kernel = next(getattr(home, f"{name}_kernel") for home in homes if hasattr(home, f"{name}_kernel"))
    options = {**options, "enable_fp_fusion": False}
    return compile_kernel(gpu_target(backend, arch), kernel, types, constants, options, aligned)


if __name__ == "__main__":
    backend, arch, *names = sys.argv[1:]
    # Two elements an instruction are NVIDIA's.
    every = [name for name in VARIANTS if backend == "cuda" or "pairs" not in name]
    print(json.dumps({name: compile_variant(backend, arch, *VARIANTS[name]) for name in names or every}))
