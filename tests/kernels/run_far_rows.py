# SPDX-License-Identifier: Apache-2.0
"""Every function on matrices whose rows (or experts) lie so far apart that the third begins beyond 2**31 elements,
interpreted: 32-bit offsets would read elsewhere, or outside of memory. Prints JSON: the cases, those whose results
differ from near rows', those refused, since the function reads contiguous tensors alone, and what was accepted of
arguments on another device than the rest."""

import json
from typing import Any

import torch

import mxfp4_kernels as kernels


#: Elements between rows: the third row is beyond 2**31.
STRIDE = 2**30 + 64
rng = torch.Generator().manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=rng).to(dtype)


def far(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory of which only the pages of the rows exist."""
    strides = (STRIDE, *tensor[0].contiguous().stride())
    storage = torch.empty((len(tensor) - 1) * STRIDE + tensor[0].numel(), dtype=tensor.dtype)
    out = storage.as_strided(tensor.shape, strides)
    out.copy_(tensor)
    assert (out.shape[0] - 1) * out.stride(0) >= 2**31
    return out


def flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in flat(part)] if isinstance(result, tuple) else []


def cases() -> dict[str, tuple[Any, list, dict]]:
    """Name: function, tensors to move apart one by one, and its other arguments."""
    x, other = randn(4, 256), randn(5, 256)
    packed = kernels.quantize(other, macro_block=128, outlier_fallback=0.5)
    folded, folded_other = kernels.fold_e4m3(x), kernels.fold_e4m3(other)
    plain, plain_other = kernels.quantize(x), kernels.quantize(other)
    experts = [kernels.quantize(randn(8, 256)) for _ in range(3)]
    codes, scale = (torch.stack([getattr(expert, part) for expert in experts]) for part in ("codes", "scale"))
    weights, ends = randn(3, 8, 256), torch.tensor([1, 1, 4], dtype=torch.int32)
    found = {
        "fake_quantize": (kernels.fake_quantize, [x], {}),
        "fake_quantize of columns": (lambda x: kernels.fake_quantize(x.mT), [x], {}),
        "quantize": (kernels.quantize, [x], {"macro_block": 128}),
        "quantize_both": (kernels.quantize_both, [x], {}),
        "fake_quantize_both": (kernels.fake_quantize_both, [x], {}),
        "dequantize": (kernels.dequantize, [plain.codes, plain.scale], {"length": 256, "dtype": torch.float32}),
        "fold by 128": (kernels.fold_e4m3, [x], {}),
        "fold by rows": (kernels.fold_e4m3, [x], {"group": "row"}),
        "fold columns": (kernels.fold_e4m3, [x], {"axis": 0}),
        "fold both": (kernels.fold_e4m3_both, [x], {}),
        "fp8": (kernels.quantize_e4m3, [x], {}),
        "matmul_e4m3": (kernels.matmul_e4m3, [*folded[:2], *folded_other[:2]], {}),
        "matmul_mxf4": (kernels.matmul_mxf4, [plain.codes, plain.scale, plain_other.codes, plain_other.scale], {}),
        "linear_w4a16": (
            lambda x, codes, scale, macro, residual_codes, residual_scale: kernels.linear_w4a16(
                x,
                codes,
                scale,
                length=256,
                macro=macro,
                macro_block=128,
                residual_codes=residual_codes,
                residual_scale=residual_scale,
                outlier_fallback=0.5,
            ),
            [x, *packed],
            {},
        ),
        "grouped_matmul": (kernels.grouped_matmul, [x, weights], {"offsets": ends}),
        "grouped_matmul_packed": (
            lambda x, codes, scale: kernels.grouped_matmul_packed(x, codes, scale, ends, length=256),
            [x, codes, scale],
            {},
        ),
        "grouped_wgrad": (kernels.grouped_wgrad, [randn(4, 32), x], {"offsets": ends}),
        "grouped_sum": (kernels.grouped_sum, [x], {"offsets": ends}),
    }
    return found


def accepted_mixtures() -> list[str]:
    """Arguments that may be on another device than the rest, which none should."""
    accepted = []
    for name, (function, tensors, options) in cases().items():
        for index in range(len(tensors) if len(tensors) > 1 else 0):
            if tensors[index] is None:
                continue
            moved = [tensor.to("meta") if i == index else tensor for i, tensor in enumerate(tensors)]
            try:
                function(*moved, **options)
            except ValueError as error:
                if "meta" in str(error):
                    continue
            except Exception as error:
                accepted.append(f"{name}, argument {index}: {type(error).__name__}: {error}")
                continue
            accepted.append(f"{name}, argument {index}")
    return accepted


def run() -> dict[str, list[str]]:
    names, differing, refused = [], [], []
    for name, (function, tensors, options) in cases().items():
        expected = flat(function(*tensors, **options))
        for index, tensor in enumerate(tensors):
            if tensor is None or len(tensor) < 3:
                continue
            moved = [far(tensor) if i == index else other for i, other in enumerate(tensors)]
            label = f"{name}, argument {index}"
            names.append(label)
            try:
                found = flat(function(*moved, **options))
            except ValueError as error:
                assert "contiguous" in str(error), error
                refused.append(label)
                continue
            same = len(found) == len(expected) and all(
                torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True)
            )
            if not same:
                differing.append(label)
    return {"cases": names, "differing": differing, "refused": refused, "mixtures": accepted_mixtures()}


if __name__ == "__main__":
    print(json.dumps(run()))
