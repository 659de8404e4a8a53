# SPDX-License-Identifier: Apache-2.0
"""Compiles the products of quantized operands ahead of time for one target; prints the generated code as JSON.

python run_matmul_compiler.py cuda 90 [rows ...]
"""

import json
import sys

from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels.common.arguments import FoldedPointers, PackedPointers, ProductTile, RowBytes
from mxfp4_kernels.gemm import matmul, matmul_kernel


#: Bytes of shared memory that a program may have.
SHARED_MEMORY = {"80": 163, "89": 99, "90": 227, "100": 227, "120": 99, "gfx942": 64, "gfx950": 160}
NATIVE = ("100", "120", "gfx950")
FP8 = ("89", "90", "100", "120", "gfx950")
BYTES = PackedPointers("*u8", "*u8", "*u8", None, None)
E4M3 = FoldedPointers("*fp8e4nv", "*fp32")
TYPES = {
    "bias_ptr": "*bf16",
    "out_ptr": "*bf16",
    **dict.fromkeys(("n_rows", "n_cols", "length"), "i32"),
    "row_bytes": RowBytes("i32", "i32", "i32"),
}
#: What is divisible by 16: not the rows, and with them the scales of groups, nor blocks and macro blocks.
ALIGNED = ["bias_ptr", "out_ptr", "n_cols", "length", "n_codes", *PackedPointers._fields, *FoldedPointers._fields]


def compile_product(target, arch: str, kernel, operand: tuple, n_rows: int, tiles, constants: dict) -> dict:
    limit = SHARED_MEMORY[arch] * 1024
    config = dict(matmul.usual_configs(n_rows, tiles, limit)[0])
    options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"INTERPRETED": False, "STEPS": 0, **constants, "TILE": ProductTile(**config)}
    report = compile_kernel(target, kernel, {**TYPES, "a": operand, "b": operand}, constants, options, ALIGNED)
    return report | {"limit": limit, "config": config | options}


def compile_all(target, arch: str, heights: list[int]) -> dict:
    found = {}
    for n_rows in heights:
        if arch in FP8:
            for name, per_group in (("row", False), ("group", True)):
                constants = {"PER_GROUP": per_group}
                kernel = matmul_kernel.matmul_e4m3_kernel
                found[f"e4m3 {name} {n_rows}"] = compile_product(
                    target, arch, kernel, E4M3, n_rows, matmul.Tiles(), constants
                )
        for name, has_macro in (("plain", False), ("macro", True)):
            constants = {"NATIVE": arch in NATIVE}
            operand = BYTES if has_macro else BYTES._replace(macro=None)
            kernel = matmul_kernel.matmul_mxf4_kernel
            tiles = matmul.mxf4_tiles(arch in NATIVE, has_macro, arch == "100")
            found[f"mxf4 {name} {n_rows}"] = compile_product(target, arch, kernel, operand, n_rows, tiles, constants)
    return found


if __name__ == "__main__":
    backend, arch, *rows = sys.argv[1:]
    print(json.dumps(compile_all(gpu_target(backend, arch), arch, [int(n) for n in rows] or [16, 4096])))
