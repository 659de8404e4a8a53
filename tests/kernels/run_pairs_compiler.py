# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel of two elements an instruction ahead of time for one target; prints the code as JSON.

python run_pairs_compiler.py 90 [--converts] [variant ...]       --converts: by the instruction that makes codes
"""

import json
import sys

import torch
from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels.common.arguments import PackedPointers
from mxfp4_kernels.common.plan import BLOCK, PAIRS_BOTH_STRIP, PAIRS_OPTIONS, PAIRS_TILE, Scheme, scheme_constants
from mxfp4_kernels.quantization.pairs import quantize_pairs_kernel
from mxfp4_kernels.quantization.pairs_both import quantize_pairs_both_kernel
from mxfp4_kernels.quantization.pairs_values import pairs_values_kernel


VARIANTS = {
    "plain": Scheme(),
    "floor": Scheme("floor"),
    "macro": Scheme("rceil", 128),
    "macro 32": Scheme("even", 32),
    "fallback": Scheme(outlier_fallback=0.5),
    "macro fallback": Scheme("rceil", 128, outlier_fallback=0.5),
    "both": Scheme(),
    "both macro": Scheme("rceil", 128),
    "columns": Scheme("even"),
    "values": Scheme(),
    "values macro": Scheme("rceil", 128),
}


def compile_variant(arch: str, name: str, converts: bool = False) -> dict:
    scheme = VARIANTS[name]
    macro = None if scheme.macro_block is None else "*u8"
    residual = (None, None) if scheme.outlier_fallback is None else ("*i32", "*u8")
    types = {"x_ptr": "*i32", "out": PackedPointers("*i32", "*u8", macro, *residual), "n_blocks": "i32"}
    constants = {
        "BLOCKS": PAIRS_TILE // (2 * BLOCK),
        "SCHEME": scheme_constants(torch.bfloat16, scheme, converts=converts),
    }
    aligned = ("x_ptr", *PackedPointers._fields)
    kernel = quantize_pairs_kernel
    if name.startswith("values"):
        kernel, types["values_ptr"], aligned = pairs_values_kernel, "*i32", (*aligned, "values_ptr")
    if name.startswith(("both", "columns")):
        sizes = ("n_rows", "n_cols", "row_stride")
        by_rows = name.startswith("both")
        kernel, aligned = quantize_pairs_both_kernel, (*aligned, *sizes)
        types |= {"x_ptr": "*i16", "out_t": types["out"], **dict.fromkeys((*sizes, "col_tiles"), "i32")}
        types |= {} if by_rows else {"out": None}
        constants |= {"STRIP": PAIRS_BOTH_STRIP, "BY_ROWS": by_rows}
    return compile_kernel(gpu_target("cuda", arch), kernel, types, constants, PAIRS_OPTIONS, aligned)


if __name__ == "__main__":
    arch, *names = sys.argv[1:]
    converts = "--converts" in names
    names = [name for name in names if name != "--converts"] or VARIANTS
    print(json.dumps({name: compile_variant(arch, name, converts) for name in names}))
