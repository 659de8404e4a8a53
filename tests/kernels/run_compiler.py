# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels ahead of time for one target, without a GPU; prints the generated code as JSON.

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

from mxfp4_kernels import _kernel, _launch
from mxfp4_kernels._launch import Scheme


FLAT, ROWS = _launch._FLAT_TILE, _launch._ROW_TILE
DEFAULT = Scheme("rceil", 128, "static", 0.5)
#: Name: kernel, dtype, scheme, tile, type of sizes, whether sizes are multiples of 16.
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
}
_INPUTS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*i16"}
_OUTPUTS = _INPUTS | {torch.bfloat16: "*bf16"}
_SIZES = ("n_rows", "n_cols", "n_codes", "n_blocks", "n_macros", "x_row_stride")


def compile_variant(target: GPUTarget, name: str, dtype, scheme: Scheme, tile, size: str, aligned: bool):
    kernel = getattr(_kernel, f"{name}_kernel")
    names = kernel.arg_names
    constants = _launch.compile_constants(dtype, scheme) | {"ROWS": tile[0], "COLS": tile[1]}
    constants = {name: value for name, value in constants.items() if name in names}
    if scheme.macro_block is None:
        constants["macro_ptr"] = None
    if scheme.outlier_fallback is None:
        constants |= {"residual_codes_ptr": None, "residual_scale_ptr": None}
    constants = {name: value for name, value in constants.items() if name in names}
    pointers = {name: "*u8" for name in names if name.endswith("_ptr")} | {
        "x_ptr": _INPUTS[dtype],
        "out_ptr": _OUTPUTS[dtype],
    }
    types = pointers | dict.fromkeys(_SIZES, size) | {"col_tiles": "i32", "alpha": "fp32"}
    multiples = [*pointers, *["n_cols", "n_codes", "x_row_stride"] * aligned]
    source = ASTSource(
        kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in multiples
            if name in names and name not in constants
        },
    )
    return triton.compile(source, target=target, options=_launch.options(*tile, constants))


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
        compiled = compile_variant(target, *variant)
        asm = compiled.asm
        kept = {kind: asm[kind] for kind in ("llir", "ptx", "amdgcn") if kind in asm}
        if "cubin" in asm:
            kept["sass"] = disassemble(asm["cubin"])
        report[name] = kept | {"shared": compiled.metadata.shared}
    print(json.dumps(report))
