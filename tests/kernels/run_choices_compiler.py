# SPDX-License-Identifier: Apache-2.0
"""Compiles products with every config that can be chosen on a GPU; prints their resources as JSON.

python run_choices_compiler.py cuda 90 KERNEL [choice ...]

KERNEL is one of `CHOICES`; without names of choices all of its configs.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterator

import ahead_of_time
import torch
from ahead_of_time import gpu_target
from run_decode_compiler import compile_variant as compile_decode
from run_grouped_compiler import STATIC, dense, e4m3, packed
from run_grouped_compiler import compile_variant as compile_grouped
from run_matmul_compiler import SHARED_MEMORY, compile_product, products

from mxfp4_kernels.gemm import decode, matmul
from mxfp4_kernels.gemm.grouped import e4m3 as grouped_e4m3
from mxfp4_kernels.gemm.grouped import matmul as grouped
from mxfp4_kernels.gemm.grouped import packed as grouped_packed
from mxfp4_kernels.quantization.launch import Scheme


ahead_of_time.READ = ["-res-usage"]
BACKEND, ARCH = sys.argv[1:3]
TARGET, LIMIT = gpu_target(BACKEND, ARCH), SHARED_MEMORY[ARCH] * 1024
MULTIPROCESSORS = {"80": 108, "90": 132, "100": 148, "120": 170}
HEIGHTS = (16, 32, 64, 128)
CLASSES = (8, 16, 32, 64, 128, 512)
#: Of packed weights: macro blocks, block mantissas and residuals take registers.
SCHEMES = {
    "plain": Scheme(),
    "macro": Scheme(macro_block=128),
    "mantissas": Scheme(macro_block=128, macro_search="blockwise"),
    "fallback": Scheme(macro_block=128, outlier_fallback=0.5),
}


def product_choices() -> Iterator[tuple]:
    for name, (kernel, operand, tiles, constants) in products(ARCH).items():
        for config in {tuple(c.items()) for rows in HEIGHTS for c in matmul.usual_configs(rows, tiles, LIMIT)}:
            yield name, config, compile_product, (TARGET, ARCH, kernel, operand, dict(config), constants)


def decode_choices() -> Iterator[tuple]:
    sizes = itertools.product((1, 16, 32, 64), SCHEMES, (torch.bfloat16, torch.float32))
    for n_tokens, scheme, dtype in sizes:
        shape = n_tokens, 4096, 4096, SCHEMES[scheme], dtype
        plan = decode._plan_cached(*shape, ARCH, MULTIPROCESSORS[ARCH], LIMIT)
        for config in plan.configs:
            # How many steps a program has is no constant.
            key = tuple((name, value) for name, value in config.items() if name != "split_steps")
            arguments = BACKEND, ARCH, n_tokens, 4096, SCHEMES[scheme], dtype, config
            yield f"{scheme} {str(dtype).removeprefix('torch.')}", key, compile_decode, arguments


def packed_choices() -> Iterator[tuple]:
    for rows, fallback in itertools.product((4, 16, 32, 64), (False, True)):
        for config in grouped_packed.configs_within(LIMIT, rows, fallback, ARCH):
            variant = packed(config, fallback=fallback, **(STATIC if fallback else {}))
            yield f"packed{' fallback' * fallback}", tuple(config.items()), compile_grouped, (TARGET, *variant)


def grouped_choices() -> Iterator[tuple]:
    tables = (("grouped_matmul", grouped._MATMUL, "BK"), ("grouped_wgrad", grouped._WGRAD, "BM"))
    for (name, table, contracted), rows, (element, size) in itertools.product(
        tables, CLASSES, (("bf16", 2), ("fp32", 4))
    ):
        for config in grouped.configs_within(LIMIT, table, rows, size, contracted):
            yield f"{name} {element}", tuple(config.items()), compile_grouped, (TARGET, *dense(name, config, element))


def grouped_e4m3_choices() -> Iterator[tuple]:
    tables = (("matmul", grouped_e4m3._MATMUL, ("BM", "BN")), ("wgrad", grouped_e4m3._WGRAD, ("BN", "BK")))
    for (name, table, sides), rows in itertools.product(tables, CLASSES):
        for config in grouped_e4m3._configs_within(LIMIT, table, rows, sides):
            variant = e4m3(name, tuple(config.values()), sides)
            yield f"e4m3 {name}", tuple(config.items()), compile_grouped, (TARGET, *variant)


CHOICES = {
    "products": product_choices,
    "decode": decode_choices,
    "packed": packed_choices,
    "grouped": grouped_choices,
    "grouped e4m3": grouped_e4m3_choices,
}


def compiled(kernel: str, names: list[str]) -> dict[str, dict]:
    found = {}
    for name, config, compile, arguments in CHOICES[kernel]():
        label = f"{name} {'x'.join(str(value) for _, value in config)}"
        if label not in found and (not names or label in names):
            report = compile(*arguments)
            spilled = sum(map(int, re.findall(r"\b(?:STACK|LOCAL):(\d+)", report["sass"])))
            registers = max(map(int, re.findall(r"\bREG:(\d+)", report["sass"])))
            found[label] = {"shared": report["shared"], "limit": LIMIT, "spilled": spilled, "registers": registers}
    return found


if __name__ == "__main__":
    print(json.dumps(compiled(sys.argv[3], sys.argv[4:])))
