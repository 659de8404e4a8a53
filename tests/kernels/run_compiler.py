# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels ahead of time for one GPU, which need not be there, as the public functions launch them; prints
the code as JSON: ``llir``, ``ptx`` and ``sass`` (with resource usage) or ``amdgcn``, and bytes of ``shared`` memory.

    python run_compiler.py 90 [variant ...]      or gfx950

A process of its own, because a process that interprets kernels cannot compile them.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compiled_launches import fake_gpu

import mxfp4_kernels
from mxfp4_kernels import Packed, Scheme, Side, linear_w4a16


BF16 = torch.bfloat16
F16 = torch.float16
F32 = torch.float32
PLAIN = Scheme()
STATIC = Scheme("rceil", 128, "static", 0.5)
MANTISSAS = Scheme("even", 128, "block_mantissas")
MANTISSAS_AND_RESIDUAL = Scheme("even", 128, "block_mantissas", 1.0)


def matrix(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape or (1024, 1024), dtype=dtype, device="cuda")


def values(dtype: torch.dtype, scheme: Scheme = PLAIN, side: Side | None = None) -> None:
    mxfp4_kernels.fake_quantize(matrix(dtype), scheme, side or Side())


def codes(dtype: torch.dtype, scheme: Scheme) -> None:
    mxfp4_kernels.quantize(matrix(dtype), scheme)


def dequantize(scheme: Scheme) -> None:
    packed = Packed.empty(torch.device("cuda"), (1024, 1024), scheme)
    mxfp4_kernels.dequantize(packed, 1024, scheme, BF16)


def from_fp8() -> None:
    byte = matrix(torch.uint8, 1024, 1)
    mxfp4_kernels.from_fp8(matrix(torch.float8_e4m3fn), byte, BF16)


def to_fp8(x: torch.Tensor, top: torch.Tensor | None = None) -> None:
    inexact = torch.empty((), dtype=torch.int32, device="cuda")
    mxfp4_kernels.to_fp8(x, inexact=inexact, top=top)


def gradient(x: torch.Tensor, is_folded: bool = False) -> None:
    scales = (matrix(F32, x.shape[0]), matrix(F32, x.shape[1])) if is_folded else ()
    mxfp4_kernels.gradient_to_fp8(x, *scales)


def decode(n_rows: int, length: int, scheme: Scheme, n_experts: int = 0) -> None:
    # So few rows of the weight that several programs share a tile.
    leading = (n_experts, 1024) if n_experts else (1024,)
    packed = Packed.empty(torch.device("cuda"), (*leading, length), scheme)
    offsets = matrix(torch.int32, n_experts) if n_experts else None
    linear_w4a16(matrix(BF16, n_rows, length), packed, length, scheme, matrix(BF16, *leading), offsets)


#: Those that are looked at in a kernel other than the last one.
LAUNCHES = {"gradient maxima": 1}
VARIANTS = {
    "values": lambda: values(BF16),
    "values half": lambda: values(F16),
    "values with residual": lambda: values(BF16, Scheme("even", outlier_fallback=0.3)),
    "values static": lambda: values(F32, STATIC),
    "values mantissas": lambda: values(BF16, MANTISSAS_AND_RESIDUAL),
    "values tiles": lambda: values(BF16, Scheme("mse", block_rows=32)),
    "values stochastic rotated": lambda: values(BF16, PLAIN, Side(5, 128, matrix(F32, 1024))),
    "values columns": lambda: mxfp4_kernels.fake_quantize(matrix(BF16).mT),
    "values both": lambda: mxfp4_kernels.fake_quantize_rows_and_columns(matrix(BF16), STATIC),
    "codes": lambda: codes(BF16, STATIC),
    "codes mantissas": lambda: codes(BF16, MANTISSAS),
    "codes three mantissas": lambda: codes(BF16, Scheme("even", 128, "block_mantissas_fp8")),
    # Sizes of more than 32 bits, which nothing divides.
    "codes odd": lambda: mxfp4_kernels.quantize(matrix(F16, 3, 2**31 + 33), MANTISSAS_AND_RESIDUAL),
    "codes both": lambda: mxfp4_kernels.quantize_rows_and_columns(
        matrix(F32), Scheme("even"), columns=Side(seed=5, rotation=16)
    ),
    "dequantize": lambda: dequantize(STATIC),
    "dequantize mantissas": lambda: dequantize(MANTISSAS_AND_RESIDUAL),
    "to_fp8": lambda: to_fp8(matrix(BF16)),
    "to_fp8 columns": lambda: to_fp8(matrix(BF16).mT),
    "to_fp8 matrices": lambda: to_fp8(matrix(BF16, 4, 64, 1024), matrix(F32, 4)),
    "to_fp8 both": lambda: mxfp4_kernels.to_fp8_rows_and_columns(matrix(BF16)),
    "to_fp8 both matrices": lambda: mxfp4_kernels.to_fp8_rows_and_columns(matrix(F32, 4, 64, 1024), top=matrix(F32, 4)),
    "from_fp8": from_fp8,
    "transpose_fp8": lambda: mxfp4_kernels.transpose_fp8(matrix(torch.float8_e4m3fn)),
    "gradient": lambda: gradient(matrix(BF16)),
    "gradient maxima": lambda: gradient(matrix(BF16), is_folded=True),
    "gradient folded": lambda: gradient(matrix(BF16), is_folded=True),
    "gradient half columns": lambda: gradient(matrix(F16).mT, is_folded=True),
    "nvfp4_scales": lambda: mxfp4_kernels.nvfp4_scales(matrix(torch.uint8), matrix(torch.uint8, 1024, 256)),
    "decode": lambda: decode(1, 4096, PLAIN),
    "decode static": lambda: decode(1, 4096, Scheme("rceil", 128)),
    "decode mantissas": lambda: decode(8, 4096, MANTISSAS_AND_RESIDUAL),
    "decode 16 rows": lambda: decode(16, 4096, Scheme("rceil", 128)),
    "decode 64 rows": lambda: decode(64, 4096, MANTISSAS),
    "decode odd": lambda: decode(3, 1288, PLAIN),
    "decode experts": lambda: decode(8, 2048, MANTISSAS, 2),
    "decode experts residual": lambda: decode(64, 2048, STATIC, 2),
}


def compiled(arch: str, name: str) -> dict:
    """Code of one variant: of the last kernel that it starts, unless `LAUNCHES` has another."""
    with fake_gpu(arch, machine_code=True) as launches:
        VARIANTS[name]()
    kernel = launches[LAUNCHES.get(name, -1)].kernel
    report = {kind: kernel.asm[kind] for kind in ("llir", "ptx", "amdgcn") if kind in kernel.asm}
    if "cubin" in kernel.asm:
        report["sass"] = disassembled(kernel.asm["cubin"])
    return report | {"shared": kernel.metadata.shared}


def disassembled(cubin: bytes) -> str:
    """Instructions, and resources."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        nvdisasm = triton.knobs.nvidia.nvdisasm.path
        environment = {"PATH": nvdisasm.rpartition("/")[0]}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


if __name__ == "__main__":
    arch, *names = sys.argv[1:]
    print(json.dumps({name: compiled(arch, name) for name in names or VARIANTS}))
