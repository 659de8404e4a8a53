# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels ahead of time for one target, without a GPU, as they are launched; prints the code as JSON.

    python run_compiler.py cuda 90 [variant ...]      or hip gfx950

A process of its own, because a process that interprets kernels cannot compile them.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mxfp4_kernels import Scheme, Side
from mxfp4_kernels.common.arguments import Lengths, PackedPointers, Partial, RowBytes, Sides
from mxfp4_kernels.common.scheme import has_bf16x2, scheme_constants
from mxfp4_kernels.decode.config import Gpu, tile_config
from mxfp4_kernels.decode.product import decode_kernel, weight_constants
from mxfp4_kernels.dequantization import dequantize_kernel
from mxfp4_kernels.fp4 import nvfp4_scales_kernel
from mxfp4_kernels.fp8 import from_fp8_kernel, to_fp8_kernel
from mxfp4_kernels.quantization import compile_options, quantize_kernel, tile_shape


#: What is read from machine code: instructions, which takes half of the time, and resources.
READ = ["-sass", "-res-usage"]


def compile_kernel(
    target: GPUTarget,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    multiples_of_16: Iterable[str] = (),
) -> dict[str, Any]:
    """Code of one variant of a kernel: ``llir``, ``ptx`` and ``sass`` (with resource usage) or ``amdgcn``, and bytes of
    ``shared`` memory.

    Args:
        types: Triton's type of every argument that is not constant; of a bundle, a tuple of types and constants.
        constants: values of compile-time arguments; `None` for a pointer that is not used.
        multiples_of_16: arguments, and parts of bundles, that are multiples of 16 (pointers: aligned to 16 bytes).
    """
    signature, values, attributes = {}, {}, {}

    def kind_of(name: str, path: tuple[int, ...], kind: Any) -> Any:
        if isinstance(kind, tuple):
            parts = getattr(kind, "_fields", [name] * len(kind))
            found = [kind_of(part, (*path, i), k) for i, (part, k) in enumerate(zip(parts, kind, strict=True))]
            return type(kind)(*found) if hasattr(kind, "_fields") else tuple(found)
        if not isinstance(kind, str):
            values[path] = kind
            return "constexpr"
        if name in multiples_of_16:
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        else:
            signature[name] = kind_of(name, (place,), types[name])
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=target, options=dict(options))
    report = {kind: compiled.asm[kind] for kind in ("llir", "ptx", "amdgcn") if kind in compiled.asm}
    if "cubin" in compiled.asm:
        report["sass"] = _disassemble(compiled.asm["cubin"])
    return report | {"shared": compiled.metadata.shared}


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, *READ, file.name]
        nvdisasm = triton.knobs.nvidia.nvdisasm.path
        environment = {"PATH": nvdisasm.rpartition("/")[0]}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


PLAIN, STATIC = Scheme(), Scheme("rceil", 128, "static", 0.5)
MANTISSAS = Scheme("even", 128, "block_mantissas", 1.0)
BOTH = Sides(Side(), Side())
ROWS, COLUMNS = Sides(Side(), None), Sides(None, Side())
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

#: Name: dtype, scheme, sides, whether codes are written, whether sizes are multiples of 16 (otherwise they are int64).
QUANTIZE = {
    "values": (BF16, PLAIN, ROWS, False, True),
    "values half": (F16, PLAIN, ROWS, False, True),
    "values with residual": (BF16, Scheme("even", outlier_fallback=0.3), ROWS, False, True),
    "values static": (F32, STATIC, ROWS, False, True),
    "values mantissas": (BF16, MANTISSAS, ROWS, False, True),
    "values tiles": (BF16, Scheme("mse", block_rows=32), ROWS, False, True),
    "values stochastic rotated": (BF16, PLAIN, Sides(Side(5, 128, torch.ones(1)), None), False, True),
    "values columns": (BF16, PLAIN, COLUMNS, False, True),
    "values both": (BF16, STATIC, BOTH, False, True),
    "codes": (BF16, STATIC, ROWS, True, True),
    "codes mantissas": (BF16, Scheme("even", 128, "block_mantissas"), ROWS, True, True),
    "codes three mantissas": (BF16, Scheme("even", 128, "block_mantissas_fp8"), ROWS, True, True),
    "codes odd": (F16, MANTISSAS, ROWS, True, False),
    "codes both": (F32, Scheme("even"), Sides(Side(), Side(5, 16)), True, True),
}

#: Name: rows, columns, scheme, experts.
DECODE = {
    "decode": (1, 4096, PLAIN, 0),
    "decode static": (1, 4096, Scheme("rceil", 128), 0),
    "decode mantissas": (8, 4096, MANTISSAS, 0),
    "decode 16 rows": (16, 4096, Scheme("rceil", 128), 0),
    "decode 64 rows": (64, 4096, Scheme("even", 128, "block_mantissas"), 0),
    "decode odd": (3, 1288, PLAIN, 0),
    "decode experts": (8, 2048, Scheme("even", 128, "block_mantissas"), 128),
    "decode experts residual": (64, 2048, STATIC, 128),
}

_INPUTS = {F32: "*fp32", F16: "*fp16", BF16: "*i16"}
_OUTPUTS = _INPUTS | {BF16: "*bf16"}
_GPUS = {"100": (148, 232448), "120": (170, 101376), "80": (108, 166912), "gfx942": (304, 65536)}
_POINTERS = ("pointer", "x_ptr", "out_ptr", "rows", "columns", "elements_ptr")
_POINTERS += PackedPointers._fields + Partial._fields


def _packed(scheme: Scheme, codes: str) -> PackedPointers:
    macro = None if scheme.macro_block is None else "*u8"
    residual = (None, None) if scheme.outlier_fallback is None else (codes, "*u8")
    return PackedPointers(codes, "*u8", macro, *residual)


def quantize_variant(target, dtype, scheme: Scheme, sides: Sides, packs: bool, aligned: bool) -> dict:
    size = "i32" if aligned else "i64"
    out = _packed(scheme, "*u8") if packs else _OUTPUTS[dtype]
    signs = Sides(*("*fp32" if side is not None and side.signs is not None else None for side in sides))
    types = {
        "x_ptr": _INPUTS[dtype],
        "out": Sides(*(None if side is None else out for side in sides)),
        "signs": signs,
        "lengths": Lengths(*[size] * 6),
        "row_bytes": Sides(*[RowBytes(*[size] * 3) if packs else None] * 2),
        "alpha": None if packs else "fp32",
        **dict.fromkeys(("col_tiles", "first_matrix", "seed_low", "seed_high", "seed_low_t", "seed_high_t"), "i32"),
    }
    tile = tile_shape(scheme, sides)
    pairs = aligned and target.backend == "cuda" and has_bf16x2(dtype, scheme, packs)
    constants = {
        "TILE": tile,
        "SCHEME": scheme_constants(dtype, scheme, dtype),
        "SIDES": Sides(*(None if side is None else side.constants(pairs) for side in sides)),
    }
    multiples = [*_POINTERS, *(Lengths._fields + RowBytes._fields) * aligned]
    return compile_kernel(target, quantize_kernel, types, constants, compile_options(tile), multiples)


def dequantize_variant(target, scheme: Scheme) -> dict:
    types = {
        "out_ptr": "*bf16",
        "packed": _packed(scheme, "*u8"),
        "row_bytes": RowBytes(*["i32"] * 3),
        "alpha": "fp32",
        **dict.fromkeys(("n_rows", "n_cols", "col_tiles"), "i32"),
    }
    constants = {"SCHEME": scheme_constants(BF16, scheme, BF16)}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return compile_kernel(target, dequantize_kernel, types, constants, options, [*_POINTERS, "n_cols", "n_codes"])


def fp8_variant(target, to: bool, columns: bool = False, matrices: bool = False) -> dict:
    numbers = dict.fromkeys(("n_rows", "n_cols", "row_stride", "col_stride", "col_tiles", "rows_per_top"), "i32")
    types = {"x_ptr": "*i16", "elements_ptr": "*u8", "scale_ptr": "*fp32", "byte_ptr": "*u8", "out_ptr": "*bf16"}
    types |= {"inexact_ptr": "*i32", "top_ptr": "*fp32" if matrices else None}
    rows, cols = (16, 256) if columns else (4, 1024 if to else 512)
    constants = {"ROWS": rows, "COLS": cols, "BF16": True, "LARGEST": 3e38, "INTERPRETED": False}
    constants |= {"row_stride" if columns else "col_stride": 1} if to else {}
    kernel = to_fp8_kernel if to else from_fp8_kernel
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return compile_kernel(target, kernel, types | numbers, constants, options, [*_POINTERS, "n_cols", "row_stride"])


def nvfp4_variant(target) -> dict:
    types = dict.fromkeys(("byte_ptr", "macro_ptr", "top_ptr", "out_ptr"), "*u8")
    types |= {"factor_ptr": "*i32", "misfits_ptr": "*i32", "n_rows": "i32", "n_blocks": "i32", "n_macros": "i32"}
    constants = {"BY_ROWS": False, "BLOCKS": 16}
    return compile_kernel(target, nvfp4_scales_kernel, types, constants, {"num_warps": 4}, _POINTERS)


def decode_variant(target, backend: str, arch: str, rows: int, k: int, scheme: Scheme, experts: int) -> dict:
    gpu = Gpu(arch, *_GPUS.get(arch, (132, 232448)))
    config = tile_config(rows, scheme.outlier_fallback is not None, gpu)
    weight = weight_constants(4096, k, experts, scheme, config, backend == "cuda")
    types = {
        "x_ptr": "*bf16",
        "packed": _packed(scheme, "*i32"),
        "bias_ptr": "*bf16",
        "out_ptr": "*bf16",
        "partial": Partial("*fp32", "*i32"),
        "offsets_ptr": "*i32" if experts else None,
        "alpha": "fp32",
        **dict.fromkeys(("n_rows", "n_experts", "split_steps", "n_splits", "x_row_stride"), "i32"),
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    constants = {"WEIGHT": weight._replace(CUDA=backend == "cuda", INTERPRETED=False)}
    multiples = [*_POINTERS, *["x_row_stride"] * (k % 16 == 0)]
    report = compile_kernel(target, decode_kernel, types, constants, options, multiples)
    weights = config.BN * weight.BK // (32 * config.num_warps) * (1 if scheme.outlier_fallback is None else 2)
    return report | {"weights_per_thread": weights, "config": config}


def compile_variant(target, backend: str, arch: str, name: str) -> dict:
    if name in QUANTIZE:
        return quantize_variant(target, *QUANTIZE[name])
    if name in DECODE:
        return decode_variant(target, backend, arch, *DECODE[name])
    if name.startswith("dequantize"):
        return dequantize_variant(target, MANTISSAS if name.endswith("mantissas") else STATIC)
    if name.startswith("nvfp4"):
        return nvfp4_variant(target)
    return fp8_variant(target, name.startswith("to_fp8"), name.endswith("columns"), name.endswith("matrices"))


OTHERS = ("dequantize", "dequantize mantissas", "to_fp8", "to_fp8 columns", "to_fp8 matrices", "from_fp8")
OTHERS += ("nvfp4_scales",)


if __name__ == "__main__":
    backend, arch, *names = sys.argv[1:]
    target = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)
    names = names or [*QUANTIZE, *OTHERS, *DECODE]
    print(json.dumps({name: compile_variant(target, backend, arch, name) for name in names}))
