# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel ahead of time for one target, without a GPU; prints the generated code as JSON.

    python run_compiler.py cuda 90

A process of its own, because a process that interprets kernels cannot compile them.
"""

import json
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mxfp4_kernels import _launch
from mxfp4_kernels._kernel import fake_quantize_kernel


FLAT, ROWS = _launch._FLAT_TILE, _launch._ROW_TILE
#: Name: dtype, scale rule, macro block, outlier fallback, tile, type of sizes, whether sizes are multiples of 16.
VARIANTS = {
    "plain": (torch.bfloat16, "rceil", None, None, FLAT, "i32", True),
    "fallback": (torch.bfloat16, "even", None, 0.3, FLAT, "i32", True),
    "default": (torch.bfloat16, "rceil", 128, 0.5, FLAT, "i32", True),
    "float32 rows": (torch.float32, "floor", 256, 0.5, ROWS, "i32", True),
    "float16 odd huge": (torch.float16, "even", 64, None, ROWS, "i64", False),
}
_POINTERS = {torch.float32: ("*fp32", "*fp32"), torch.float16: ("*fp16", "*fp16"), torch.bfloat16: ("*i16", "*bf16")}


def compile_variant(target: GPUTarget, dtype, scale_rule, macro_block, alpha, tile, size, aligned):
    constants = _launch.compile_constants(dtype, scale_rule, macro_block, alpha)
    constants |= {"ROWS": tile[0], "COLS": tile[1]}
    types = dict(zip(("x_ptr", "out_ptr"), _POINTERS[dtype], strict=True))
    types |= {"n_rows": size, "n_cols": size, "x_row_stride": size, "col_tiles": "i32", "alpha": "fp32"}
    names = fake_quantize_kernel.arg_names
    multiples = ["x_ptr", "out_ptr"] + ["n_cols", "x_row_stride"] * aligned
    source = ASTSource(
        fake_quantize_kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    return triton.compile(source, target=target, options=_launch.LAUNCH_OPTIONS)


def disassemble(cubin: bytes) -> str:
    """Machine code and resource usage of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        nvdisasm = triton.knobs.nvidia.nvdisasm.path
        environment = {"PATH": nvdisasm.rpartition("/")[0]}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


if __name__ == "__main__":
    backend, arch = sys.argv[1:]
    target = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)
    report = {}
    for name, variant in VARIANTS.items():
        asm = compile_variant(target, *variant).asm
        kept = {kind: asm[kind] for kind in ("llir", "ptx", "amdgcn") if kind in asm}
        if "cubin" in asm:
            kept["sass"] = disassemble(asm["cubin"])
        report[name] = kept
    print(json.dumps(report))
