# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels for block mantissas, of two elements an instruction, ahead of time for one target; prints the
code as JSON.

python run_mantissas_compiler.py 90 [variant ...]
"""

import json
import sys

import torch
from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels.common.arguments import PackedPointers
from mxfp4_kernels.common.plan import MANTISSAS_TILE, PAIRS_OPTIONS, Scheme, scheme_constants
from mxfp4_kernels.quantization.mantissas import fake_mantissas_kernel, quantize_mantissas_kernel


VARIANTS = "codes", "codes fallback", "values", "values fallback"


def compile_variant(arch: str, name: str) -> dict:
    fallback = name.endswith("fallback")
    scheme = Scheme("even", 128, "blockwise", 1.0 if fallback else None)
    constants = {"MACROS": MANTISSAS_TILE // 128, "SCHEME": scheme_constants(torch.bfloat16, scheme)}
    types = {"x_ptr": "*i32", "out_ptr": "*i32", "n_blocks": "i32"}
    types["out"] = PackedPointers("*i32", "*u8", "*u8", *(("*i32", "*u8") if fallback else (None, None)))
    kernel = quantize_mantissas_kernel if name.startswith("codes") else fake_mantissas_kernel
    aligned = ("x_ptr", "out_ptr", *PackedPointers._fields)
    return compile_kernel(gpu_target("cuda", arch), kernel, types, constants, PAIRS_OPTIONS, aligned)


if __name__ == "__main__":
    arch, *names = sys.argv[1:]
    print(json.dumps({name: compile_variant(arch, name) for name in names or VARIANTS}))
