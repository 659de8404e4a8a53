# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernel of products with packed weights for one target, as it is launched; prints the code as JSON.

python run_decode_compiler.py cuda 90 [variants]
"""

import json
import sys

import torch
from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels import plan_linear_w4a16
from mxfp4_kernels.gemm import decode
from mxfp4_kernels.gemm.decode_kernel import linear_kernel
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


def compile_variant(backend: str, arch: str, n_tokens: int, n_cols: int, scheme: Scheme, dtype: torch.dtype) -> dict:
    options = {name: getattr(scheme, name) for name in ("macro_block", "macro_search", "outlier_fallback")}
    name = str(dtype).removeprefix("torch.")
    config = plan_linear_w4a16(n_tokens, 4096, n_cols, arch, **options, dtype=name).configs[0]
    constants = decode.constants(dtype, scheme, n_cols, config, True, n_tokens > 16) | config
    constants |= {"SPLIT": True, "CUDA": backend == "cuda", "INTERPRETED": False}
    unused = ["macro"] * (scheme.macro_block is None)
    unused += ["residual_codes", "residual_scale"] * (scheme.outlier_fallback is None)
    constants |= {f"{name}_ptr": None for name in unused}
    pointers = {name: "*u8" for name in linear_kernel.arg_names if name.endswith("_ptr")} | {
        "x_ptr": _INPUTS[dtype],
        "codes_ptr": "*i32",
        "residual_codes_ptr": "*i32",
        "bias_ptr": _OUTPUTS[dtype],
        "out_ptr": _OUTPUTS[dtype],
        "partial_ptr": "*fp32",
        "arrived_ptr": "*i32",
    }
    sizes = ("n_tokens", "n_rows", "n_cols", "x_row_stride", "split_steps", "n_splits")
    types = pointers | dict.fromkeys(sizes, "i32") | {"alpha": "fp32"}
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    del constants["split_steps"]
    multiples = [*pointers, *["n_cols", "x_row_stride"] * (n_cols % 16 == 0)]
    report = compile_kernel(gpu_target(backend, arch), linear_kernel, types, constants, options, multiples)
    weights = config["BN"] * config["BK"] // (32 * config["num_warps"])
    return report | {"weights_per_thread": weights * (2 if scheme.outlier_fallback else 1)}


if __name__ == "__main__":
    backend, arch, *names = sys.argv[1:]
    print(json.dumps({name: compile_variant(backend, arch, *VARIANTS[name]) for name in names or VARIANTS}))
