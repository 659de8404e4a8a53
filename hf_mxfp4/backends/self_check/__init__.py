# SPDX-License-Identifier: Apache-2.0
"""Whether Triton kernels do on a GPU what they are defined to do, found out once, before results depend on them.

[`problem`] is asked wherever ``"auto"`` takes a kernel. Kernels that are asked for by name are not checked.
"""

import torch

from .. import scaled_mm
from . import engines, products, quantizing, verdicts
from .verdicts import Family


def _has_fp8(device: torch.device) -> bool:
    import mxfp4_kernels

    return mxfp4_kernels.has_fp8(device)


def _has_mxfp4(device: torch.device) -> bool:
    import mxfp4_kernels

    return mxfp4_kernels.has_mxfp4(device)


def _has_e2m1(device: torch.device) -> bool:
    import mxfp4_kernels

    return mxfp4_kernels.has_e2m1(device)


_EAGER, _EACH, _DENSE = "the eager reference", "one product for each expert", "dense products"
_FP8, _MXFP4 = ("FP8 tensor cores", _has_fp8), ("MXFP4 tensor cores", _has_mxfp4)
_SCALED_MM = ("product of FP8 with scales of 128 elements in torch: sm_90, CUDA 12.9", scaled_mm.exists)
#: Kernels that stand or fall together, by name.
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("quantize", quantizing.check_quantize, _EAGER),
        Family("codes by instruction", quantizing.check_codes, "arithmetic", "instruction for E2M1", _has_e2m1),
        Family("dequantize", quantizing.check_dequantize, _EAGER),
        Family("decode", products.check_decode, "products with dequantized weights"),
        Family("experts", products.check_experts, _EACH),
        Family("packed experts", products.check_packed_experts, _EACH),
        Family("folds", quantizing.check_folds, _DENSE, *_FP8),
        Family("fp8 products", engines.check_fp8, _DENSE, *_FP8),
        Family("fp8 products of torch", engines.check_fp8_of_torch, "the Triton kernel", *_SCALED_MM),
        Family("fp8 products of experts", engines.check_fp8_experts, _DENSE, *_FP8),
        Family("mxfp4 products", engines.check_mxfp4, _DENSE, *_MXFP4),
    )
}


def problem(device: torch.device, *names: str) -> str | None:
    """What is wrong with the first of some families that does not work on a device; `None` when all do. See
    [`hf_mxfp4.backends.self_check.verdicts.problem`]."""
    for name in names:
        found = verdicts.problem(FAMILIES[name], device)
        if found is not None:
            return found
    return None


def states(device: torch.device) -> dict[str, str]:
    """What is known of each family on a device, in words, without checking anything now."""
    return {name: verdicts.state(family, device) for name, family in FAMILIES.items()}


def check_all(device: torch.device) -> dict[str, str]:
    """[`states`] after a check of every family that the device has hardware for."""
    for family in FAMILIES.values():
        if family.exists(device):
            verdicts.problem(family, device)
    return states(device)
