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


def compile_product(target, arch: str, kernel, operand: tuple, config: dict, constants: dict) -> dict:
    limit, config = SHARED_MEMORY[arch] * 1024, dict(config)
    options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"INTERPRETED": False, "STEPS": 0, **constants, "TILE": ProductTile(**config)}
    report = compile_kernel(target, kernel, {**TYPES, "a": operand, "b": operand}, constants, options, ALIGNED)
    return report | {"limit": limit, "config": config | options}


def products(arch: str) -> dict[str, tuple]:
    """By name: the kernel, its operands, what tiles it can have, and constants."""
    found = {}
    if arch in FP8:
        for name, per_group in (("row", False), ("group", True)):
            tiles = matmul.e4m3_tiles(per_group, arch == "100")
            found[f"e4m3 {name}"] = matmul_kernel.matmul_e4m3_kernel, E4M3, tiles, {"PER_GROUP": per_group}
    for name, has_macro in (("plain", False), ("macro", True)):
        operand = BYTES if has_macro else BYTES._replace(macro=None)
        tiles = matmul.mxf4_tiles(arch in NATIVE, has_macro, arch == "100", arch in ("80", "89", "120"))
        found[f"mxf4 {name}"] = matmul_kernel.matmul_mxf4_kernel, operand, tiles, {"NATIVE": arch in NATIVE}
    return found


def compile_all(target, arch: str, heights: list[int]) -> dict:
    found, limit = {}, SHARED_MEMORY[arch] * 1024
    for n_rows in heights:
        for name, (kernel, operand, tiles, constants) in products(arch).items():
            config = matmul.usual_configs(n_rows, tiles, limit)[0]
            found[f"{name} {n_rows}"] = compile_product(target, arch, kernel, operand, config, constants)
    return found


if __name__ == "__main__":
    backend, arch, *rows = sys.argv[1:]
    print(json.dumps(compile_all(gpu_target(backend, arch), arch, [int(n) for n in rows] or [16, 4096])))
