# SPDX-License-Identifier: Apache-2.0
"""Compiles the grouped kernels ahead of time for one target, without a GPU; prints the generated code as JSON.

python run_grouped_compiler.py cuda 90 [variant ...]
"""

import json
import sys

from ahead_of_time import compile_kernel, gpu_target

from mxfp4_kernels.common import blocks
from mxfp4_kernels.common.arguments import (
    DecodeConstants,
    ExpertsShape,
    FoldedPointers,
    PackedPointers,
    Partial,
    ProductTile,
    Strides,
)
from mxfp4_kernels.gemm.decode_plan import order_of
from mxfp4_kernels.gemm.grouped import e4m3 as grouped_e4m3
from mxfp4_kernels.gemm.grouped import e4m3_kernel, matmul, matmul_kernel, packed_kernel
from mxfp4_kernels.gemm.grouped import packed as grouped_packed


# Qwen3-30B-A3B: gate and up projections of 128 experts.
N, K, EXPERTS = 1536, 2048, 128
_ELEMENTS = {"bf16": "*bf16", "fp32": "*fp32", "e4m3": "*fp8e4nv"}


def named(table) -> dict[str, dict]:
    """Configs of a table of tiles, by their numbers."""
    names = ("BM", "BN", "BK", "num_warps", "num_stages")
    configs = [dict(zip(names, config, strict=True)) for _, config in table]
    return {"x".join(map(str, config.values())): config for config in configs}


MATMUL, WGRAD = named(matmul._MATMUL), named(matmul._WGRAD)
PACKED = [
    dict(zip(("BM", "BN", "num_warps", "num_stages"), t, strict=True)) for _, ts in grouped_packed._TILES for t in ts
]


def dense(name: str, config: dict, element: str = "bf16", **changes) -> tuple:
    return matmul_kernel, f"{name}_kernel", config, element, changes


def packed(config: dict, macro: int = 32, search: int = 0, fallback: bool = False, **sizes) -> tuple:
    residual = ("*i32", "*u8") if fallback else (None, None)
    pointers = PackedPointers("*i32", "*u8", "*u8" if search else None, *residual)
    changes = {"BK": 128, "MACRO": macro, "SEARCH": search, "packed": pointers, **sizes}
    return packed_kernel, "grouped_packed_kernel", config, "bf16", changes


def e4m3(name: str, tile: tuple, sides: tuple[str, str]) -> tuple:
    config = dict(zip((*sides, "num_warps", "num_stages"), tile, strict=True))
    return e4m3_kernel, f"grouped_{name}_e4m3_kernel", config, "e4m3", {}


#: The usual one on AMD.
EVERYWHERE = {"BM": 16, "BN": 64, "num_warps": 4, "num_stages": 3}
STATIC = {"macro": 128, "search": blocks.STATIC.value}
VARIANTS = {
    **{f"matmul {name}": dense("grouped_matmul", config) for name, config in MATMUL.items()},
    **{f"wgrad {name}": dense("grouped_wgrad", config) for name, config in WGRAD.items()},
    **{f"packed {'x'.join(map(str, config.values()))}": packed(config) for config in PACKED},
    "packed static": packed(EVERYWHERE, **STATIC),
    "packed blockwise": packed(EVERYWHERE, macro=128, search=blocks.BLOCKWISE.value),
    "packed fallback": packed(EVERYWHERE, fallback=True, **STATIC),
    "packed few fallback": packed(PACKED[0], fallback=True, **STATIC),
    "packed whole": packed(EVERYWHERE, partial=None),
    "packed odd": packed(EVERYWHERE, N=1531, K=2040, **STATIC),
    **{f"e4m3 {'x'.join(map(str, t))}": e4m3("matmul", t, ("BM", "BN")) for _, t in grouped_e4m3._MATMUL},
    **{f"e4m3 wgrad {'x'.join(map(str, t))}": e4m3("wgrad", t, ("BN", "BK")) for _, t in grouped_e4m3._WGRAD},
    "dgrad": dense("grouped_matmul", MATMUL["128x128x64x8x3"], transposed=True),
    "odd": dense("grouped_matmul", MATMUL["16x64x64x4x3"], N=1531, K=2041),
    "fp32": dense("grouped_matmul", {"BM": 64, "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 3}, "fp32"),
    "sum": dense("grouped_sum", {"BM": 32, "BN": 128, "num_warps": 4}),
}


def compile_variant(target, module, kernel_name: str, config: dict, element: str, changes: dict) -> dict:
    kernel = getattr(module, kernel_name)
    config = dict(config)
    options = {key: config.pop(key) for key in ("num_warps", "num_stages") if key in config}
    if target.backend == "hip":
        options["num_stages"] = 2
    sizes = {"N": N, "K": K} | {key: changes[key] for key in ("N", "K") if key in changes}
    transposed = changes.get("transposed", False)
    if transposed:
        sizes = {"N": sizes["K"], "K": sizes["N"]}
    step = {"BK": changes["BK"]} if "BK" in changes else {}
    tile = ProductTile(**config, **step)
    is_even = "packed" in changes and sizes["K"] % tile.BK == 0
    is_cuda = target.backend == "cuda"
    constants = {
        "N": sizes["N"],
        "SHAPE": ExpertsShape(**sizes, EXPERTS=EXPERTS),
        "TILE": tile,
        "BF16": element == "bf16",
        "OUT_BF16": element != "fp32",
        "INTERPRETED": False,
        "WEIGHT": DecodeConstants(
            changes.get("MACRO"),
            changes.get("SEARCH"),
            is_cuda,
            False,
            EVEN=is_even,
            ORDER=order_of(str(target.arch), options.get("num_warps", 4)),
        ),
    }
    if transposed or element == "e4m3":
        constants["bias_ptr"] = None
    types = {name: _ELEMENTS[element] if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {
        "offsets_ptr": "*i32",
        "rows_ptr": "*i64",
        "alpha": "fp32",
        "packed": changes.get("packed"),
        "partial": changes.get("partial", Partial("*fp32", "*i32")),
        "weight_strides": Strides("i32", 1, "i32") if transposed else Strides("i32", "i32", 1),
        **dict.fromkeys(("left_strides", "right_strides"), Strides(None, "i32", 1)),
    }
    if element == "e4m3":
        types |= dict.fromkeys(("x", "weight", "left", "right"), FoldedPointers("*fp8e4nv", "*fp32"))
        types |= dict.fromkeys(
            ("x_scale_strides", "left_scale_strides", "right_scale_strides"), Strides(None, 1, "i32")
        )
        types |= {
            "out_ptr": "*bf16",
            "weight_strides": Strides("i32", "i32", None),
            "weight_scale_strides": Strides("i32", 1, "i32"),
            "row_strides": ("i32", "i32"),
        }
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr")]
    aligned += [*PackedPointers._fields, *FoldedPointers._fields, *Partial._fields]
    if not any(size % 8 for size in sizes.values()):
        aligned += ["x_row_stride", "row_strides", *Strides._fields]
    return compile_kernel(target, kernel, types, constants, options, aligned)


if __name__ == "__main__":
    target = gpu_target(*sys.argv[1:3])
    names = sys.argv[3:] or list(VARIANTS)
    print(json.dumps({name: compile_variant(target, *VARIANTS[name]) for name in names}))
