# SPDX-License-Identifier: Apache-2.0
"""Runs the self-checks of kernels, interpreted, on the kernels as they are and on broken ones; prints JSON.

TRITON_INTERPRET=1 python run_self_checks.py few    of each family, one function broken
TRITON_INTERPRET=1 python run_self_checks.py all    every function broken
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from stubbed_scaled_mm import scaled_mm

import mxfp4_kernels
from hf_mxfp4.backends import scaled_mm as product_of_torch
from hf_mxfp4.backends.self_check import FAMILIES


CPU = torch.device("cpu")
#: Functions, of the kernels but for one, to the families whose checks must find them broken.
BROKEN = {
    "fake_quantize": "quantize",
    "quantize": "quantize",
    "fake_quantize_both": "quantize",
    "quantize_both": "quantize",
    "quantize_with_values": "quantize",
    "fake_quantize_with_macro": "quantize",
    "fake_quantize_by_macro": "quantize",
    "fake_quantize_e4m3": "quantize",
    "fake_quantize_e4m3_both": "quantize",
    "quantize_e4m3_rows": "quantize",
    "dequantize": "dequantize",
    "dequantize_e4m3": "dequantize",
    "linear_w4a16": "decode",
    "grouped_matmul": "experts",
    "grouped_wgrad": "experts",
    "grouped_sum": "experts",
    "grouped_matmul_packed": "packed experts",
    "grouped_fake_quantize_e4m3": "experts",
    "fold_e4m3": "folds",
    "grouped_fold_e4m3": "folds",
    "grouped_quantize_e4m3": "folds",
    "fold_e4m3_both": "folds",
    "quantize_e4m3": "folds",
    "quantize_e4m3_both": "folds",
    "matmul_e4m3": "fp8 products",
    "multiply": "fp8 products of torch",
    "grouped_matmul_e4m3": "fp8 products of experts",
    "grouped_wgrad_e4m3": "fp8 products of experts",
    "matmul_mxf4": "mxfp4 products",
}


def broken(function: Callable) -> Callable:
    """The same with one value wrong: of bytes and E4M3 the first by a bit, of integers the last, or the largest one."""

    def call(*arguments: Any, **options: Any) -> Any:
        found = function(*arguments, **options)
        last = found[-1] if isinstance(found, tuple) and not hasattr(found, "_fields") else found
        values = last if isinstance(last, torch.Tensor) else last[0]
        values = values if values.is_contiguous() else values.t()
        if values.element_size() == 1:
            values.view(torch.uint8).view(-1)[0] ^= 1
        elif not values.is_floating_point():
            values.view(-1)[-1] += 1
        else:
            values.view(-1)[values.flatten().nan_to_num(0, 0, 0).abs().argmax()] *= 1.5
        return found

    return call


def main() -> dict:
    F.scaled_mm = scaled_mm
    report = {"as they are": {name: family.check(CPU) for name, family in FAMILIES.items()}, "broken": {}}
    seen = set()
    for name, family in BROKEN.items():
        if sys.argv[1] == "few" and family in seen:
            continue
        seen.add(family)
        home = product_of_torch if name == "multiply" else mxfp4_kernels
        function = getattr(home, name)
        setattr(home, name, broken(function))
        report["broken"][name] = FAMILIES[family].check(CPU)
        setattr(home, name, function)
    return report


if __name__ == "__main__":
    print(json.dumps(main()))
