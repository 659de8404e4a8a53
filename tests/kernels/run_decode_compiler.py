# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel of products with packed weights for one target, as it is launched; prints the code as JSON.

python run_decode_compiler.py cuda 90 [variants]
"""

import json
import sys

import torch
from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels import plan_linear_w4a16
from mxfp4_kernels.common.arguments import PackedPointers, Partial, ProductTile
from mxfp4_kernels.gemm import decode
from mxfp4_kernels.gemm.decode_kernel import linear_kernel
from mxfp4_kernels.gemm.decode_plan import order_of
from mxfp4_kernels.quantization.launch import Scheme


#: Name: tokens, columns, scheme, dtype.
VARIANTS = {
    "plain": (1, 4096, Scheme(), torch.bfloat16),
    "macro": (1, 4096, Scheme(macro_block=128), torch.bfloat16),
    "mantissas": (4, 4096, Scheme(macro_block=128, macro_search="blockwise"), torch.bfloat16),
    "fallback": (8, 4096, Scheme(macro_block=128, outlier_fallback=0.5), torch.bfloat16),
    "16 tokens": (16, 4096, Scheme(macro_block=128), torch.bfloat16),
    "64 tokens": (64, 4096, Scheme(macro_block=128), torch.bfloat16),
    "odd": (3, 1288, Scheme(), torch.float16),
    "float32": (2, 4096, Scheme(), torch.float32),
}
_INPUTS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*i16"}
_OUTPUTS = _INPUTS | {torch.bfloat16: "*bf16"}


def compile_variant(
    backend: str,
    arch: str,
    n_tokens: int,
    n_cols: int,
    scheme: Scheme,
    dtype: torch.dtype,
    config: dict | None = None,
) -> dict:
    """Code of a product of a config; by default of the one that is launched."""
    options = {name: getattr(scheme, name) for name in ("macro_block", "macro_search", "outlier_fallback")}
    name = str(dtype).removeprefix("torch.")
    config = config or plan_linear_w4a16(n_tokens, 4096, n_cols, arch, **options, dtype=name).configs[0]
    order = order_of(arch, config["num_warps"])
    weight = decode.constants(dtype, scheme, n_cols, config["BK"], n_tokens > 16, order)
    constants = {"TILE": ProductTile(config["BM"], config["BN"], config["BK"])}
    constants["WEIGHT"] = weight._replace(CUDA=backend == "cuda", INTERPRETED=False)
    has_residual = scheme.outlier_fallback is not None
    types = {
        "x_ptr": _INPUTS[dtype],
        "packed": PackedPointers(
            codes="*i32",
            scale="*u8",
            macro=None if scheme.macro_block is None else "*u8",
            residual_codes="*i32" if has_residual else None,
            residual_scale="*u8" if has_residual else None,
        ),
        "bias_ptr": _OUTPUTS[dtype],
        "out_ptr": _OUTPUTS[dtype],
        "partial": Partial("*fp32", "*i32"),
        "alpha": "fp32",
        **dict.fromkeys(("n_tokens", "n_rows", "n_cols", "x_row_stride", "split_steps", "n_splits"), "i32"),
    }
    options = {name: config[name] for name in ("num_warps", "num_stages")}
    multiples = ["x_ptr", "bias_ptr", "out_ptr", *PackedPointers._fields, *Partial._fields]
    multiples += ["n_cols", "x_row_stride"] * (n_cols % 16 == 0)
    report = compile_kernel(gpu_target(backend, arch), linear_kernel, types, constants, options, multiples)
    weights = config["BN"] * config["BK"] // (32 * config["num_warps"])
    return report | {"weights_per_thread": weights * (2 if scheme.outlier_fallback else 1)}


if __name__ == "__main__":
    backend, arch, *names = sys.argv[1:]
    print(json.dumps({name: compile_variant(backend, arch, *VARIANTS[name]) for name in names or VARIANTS}))
