# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of `quantization/producers.py` ahead of time for one target; prints the generated code as JSON.

python run_producer_compiler.py cuda 90
"""

import json
import sys

import torch
from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels.common import plan as _plan
from mxfp4_kernels.common.plan import PLAIN, Scheme, Side
from mxfp4_kernels.quantization import producer_kernels as _producer_kernels
from mxfp4_kernels.quantization import producers as _producers


DEFAULT = Scheme("rceil", 128, "static", 0.5)
HALF = torch.bfloat16
#: Name: kernel, dtype, weight's dtype, length, scheme, what belongs to its axis, outputs, and what else there is.
VARIANTS = {
    "norm": ("rms_norm", HALF, HALF, 4096, Scheme("rceil"), PLAIN, ("PACKED",), ()),
    "norm values": ("rms_norm", HALF, HALF, 5120, Scheme("even"), PLAIN, ("VALUES",), ("HAS_SKIP",)),
    "norm everything": (
        "rms_norm",
        torch.float16,
        torch.float32,
        2048,
        DEFAULT,
        Side(5, 16),
        ("VALUES", "PACKED", "NORMED"),
        ("HAS_SKIP", "NOISY"),
    ),
    "norm long": ("rms_norm", torch.float32, torch.float32, 12288, DEFAULT, PLAIN, ("PACKED",), ("NOISY",)),
    "swiglu": ("swiglu", HALF, None, 18944, Scheme("rceil"), PLAIN, ("PACKED",), ()),
    "swiglu values": ("swiglu", torch.float16, None, 768, Scheme("even"), Side(None, 16), ("VALUES",), ()),
    "swiglu everything": ("swiglu", torch.float32, None, 512, DEFAULT, PLAIN, ("VALUES", "PACKED", "PRODUCT"), ()),
}
_INPUTS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*i16", None: "*i16"}
_OUTPUTS = _INPUTS | {torch.bfloat16: "*bf16"}
_FLAGS = ("PACKED", "VALUES", "NORMED", "PRODUCT", "HAS_SKIP", "NOISY")
#: What needs a pointer.
_NEEDED = {
    "out_ptr": "VALUES",
    "codes_ptr": "PACKED",
    "scale_ptr": "PACKED",
    "normed_ptr": "NORMED",
    "product_ptr": "PRODUCT",
    "skip_ptr": "HAS_SKIP",
    "hidden_ptr": "HAS_SKIP",
    "noise_ptr": "NOISY",
}


def compile_variant(target, name: str, dtype, weight, length: int, scheme: Scheme, side: Side, outputs, given) -> dict:
    kernel = getattr(_producer_kernels, f"{name}_kernel")
    computed = dtype if weight is None else torch.promote_types(dtype, weight)
    constants = _plan.compile_constants(computed, scheme, side) | {flag: flag in (*outputs, *given) for flag in _FLAGS}
    constants |= {
        "DTYPE": _producers.TRITON_DTYPES[dtype],
        "NORMED_DTYPE": _producers.TRITON_DTYPES[computed],
        "PTX": target.backend == "cuda",
        "WEIGHT_BF16": weight == torch.bfloat16,
    }
    unit = _plan.unit_of(scheme, side)
    if name == "rms_norm":
        rows, cols, constants["STEPS"] = _producers.norm_tile(length, unit)
    else:
        at = _plan.plan(4096, length, length, unit)
        rows, cols = at.tile_rows, at.tile_cols
    constants |= {"ROWS": rows, "COLS": cols}
    absent = [pointer for pointer, flag in _NEEDED.items() if not constants[flag]] + ["signs_ptr"]
    absent += ["macro_ptr"] * (scheme.macro_block is None or not constants["PACKED"])
    if scheme.outlier_fallback is None or not constants["PACKED"]:
        absent += ["residual_codes_ptr", "residual_scale_ptr"]
    constants |= dict.fromkeys(absent)
    pointers = dict.fromkeys((one for one in kernel.arg_names if one.endswith("_ptr")), "*u8")
    pointers |= dict.fromkeys(("x_ptr", "skip_ptr", "gate_ptr", "up_ptr"), _INPUTS[dtype])
    pointers |= {
        "hidden_ptr": _OUTPUTS[dtype],
        "weight_ptr": _INPUTS[weight],
        "noise_ptr": "*fp32",
        "rstd_ptr": "*fp32",
    }
    pointers |= dict.fromkeys(("normed_ptr", "product_ptr", "out_ptr"), _OUTPUTS[computed])
    types = dict.fromkeys(kernel.arg_names, "i32") | pointers | dict.fromkeys(("alpha", "eps", "length"), "fp32")
    multiples = [*pointers, "n_cols", "n_read", "n_codes", *(one for one in types if one.endswith("_stride"))]
    options = _plan.options(rows, cols, constants)
    return compile_kernel(target, kernel, types, constants, options, multiples)


if __name__ == "__main__":
    target = gpu_target(*sys.argv[1:])
    print(json.dumps({name: compile_variant(target, *variant) for name, variant in VARIANTS.items()}))
