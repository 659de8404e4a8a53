# SPDX-License-Identifier: Apache-2.0
"""What the quantize kernels cover, and errors for what they do not. Imports nothing."""

from __future__ import annotations

import functools
import math
import typing


if typing.TYPE_CHECKING:
    import torch


DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")
SCALE_RULES = ("rceil", "floor", "even", "mse")
MACRO_BLOCKS = (32, 64, 128, 256, "row")
MACRO_SEARCHES = ("static", "dynamic", "blockwise")
BLOCK_ROWS = (1, 32)
ROUNDINGS = ("nearest", "stochastic")
ROTATIONS = (16, 32, 64, 128)


#: Longest rows that a program holds in registers, for ``macro_block="row"``: without a search, and with one.
_LONGEST_ROWS = 32768, 16384


def unsupported_row(scale_rule: object, macro_block: object, macro_search: object, length: int) -> str | None:
    """Why rows of ``length`` elements are not covered; `None` when they are."""
    longest = _LONGEST_ROWS[scale_rule == "mse" or macro_search != "static"]
    if macro_block != "row" or length <= longest:
        return None
    return f"macro_block='row' is covered up to {longest} elements, which registers hold; this row has {length}"


def unsupported_dtype(dtype: object) -> str | None:
    """Why a dtype is not covered; `None` when it is."""
    if str(dtype) in DTYPES:
        return None
    return f"{dtype} is not covered by the Triton kernels; they take {', '.join(DTYPES)}"


def unsupported_scheme(
    scale_rule: object,
    macro_block: object,
    macro_search: object,
    outlier_fallback: object,
    block_rows: object,
    rounding: object = "nearest",
) -> str | None:
    """Why a scheme is not covered; `None` when it is."""
    for name, value, known in (
        ("scale_rule", scale_rule, SCALE_RULES),
        ("macro_block", macro_block, (None, *MACRO_BLOCKS)),
        ("macro_search", macro_search, MACRO_SEARCHES),
        ("block_rows", block_rows, BLOCK_ROWS),
        ("rounding", rounding, ROUNDINGS),
    ):
        if isinstance(value, bool) or value not in known:
            return f"{name}={value!r} is not covered by the Triton kernels; they know {', '.join(map(str, known))}"
    if macro_search == "blockwise" and macro_block not in (None, 128):
        return f"macro_search='blockwise' needs macro_block=128, got macro_block={macro_block!r}"
    if macro_block == "row" and block_rows != 1:
        return f"macro_block='row' with block_rows={block_rows!r} is not covered by the Triton kernels"
    if outlier_fallback is None:
        return None
    is_number = isinstance(outlier_fallback, (int, float)) and not isinstance(outlier_fallback, bool)
    if not is_number or not math.isfinite(outlier_fallback) or not 0 < outlier_fallback <= 1:
        return f"outlier_fallback={outlier_fallback!r} must be None or a number in (0, 1]"
    return None


def check_scheme(*options: object) -> None:
    """Raise `ValueError` with what [`unsupported_scheme`] says of these options, if anything."""
    try:
        reason = _remembered_reason(*options)
    except TypeError:  # an option that cannot be a key is not one that is known
        reason = unsupported_scheme(*options)
    if reason is not None:
        raise ValueError(reason)


#: True and 1 are equal, but not the same option.
_remembered_reason = functools.lru_cache(maxsize=1024, typed=True)(unsupported_scheme)


def check_input(name: str, x: object, block_rows: int, axes: int = 1, dtype: object = None) -> None:
    """Raise `TypeError` or `ValueError` unless ``x`` is a tensor that the kernels read, with ``axes`` axes at least,
    and ``dtype``, if given, one that they write."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} needs a tensor, got {type(x).__name__}")
    if str(x.dtype) not in DTYPES:
        raise TypeError(unsupported_dtype(x.dtype))
    if x.dim() == 0:
        raise ValueError(f"{name} needs at least one axis, got a scalar tensor")
    if x.dim() < axes:
        raise ValueError(f"{name} needs at least {axes} axes, got {x.dim()}")
    if block_rows != 1 and x.dim() < 2:
        raise ValueError(f"blocks of {block_rows} rows need a tensor with at least two axes, got {x.dim()}")
    if dtype is not None:
        check_output(dtype)


def check_output(dtype: object) -> None:
    """Raise `TypeError` for an output dtype that the kernels do not write."""
    if (reason := unsupported_dtype(dtype)) is not None:
        raise TypeError(reason)


def check_seed(rounding: str, seed: object) -> None:
    """Raise `TypeError` or `ValueError` unless a seed is given exactly where one is needed, an integer of 64 bits."""
    if rounding == "nearest":
        if seed is not None:
            raise ValueError("seed has no effect on rounding='nearest'")
    elif isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"rounding='stochastic' needs an integer as its seed, got {seed!r}")
    elif not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed} must be in 0..2**64 - 1")


def check_rotation(x: torch.Tensor, length: int, rotation: object, signs: torch.Tensor | None) -> torch.Tensor | None:
    """The signs as the kernels read them. Raises `ValueError` for a size that there is not, or signs without one, of
    another length than the rotated axis (padded), or on another device than ``x``."""
    if rotation is None:
        if signs is not None:
            raise ValueError("signs have no effect without a rotation")
        return None
    if isinstance(rotation, bool) or rotation not in ROTATIONS:
        raise ValueError(f"rotation={rotation!r} must be None or one of {', '.join(map(str, ROTATIONS))}")
    if signs is None:
        return None
    padded = length + -length % rotation
    if tuple(signs.shape) != (padded,):
        raise ValueError(f"signs has the shape {list(signs.shape)}; the rotated axis has {padded} elements")
    if signs.device != x.device:
        raise ValueError(f"signs are on {signs.device}, the tensor is on {x.device}; move them there")
    return signs.detach().float().contiguous()


def check_packed(
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    length: int,
    macro: torch.Tensor | None,
    macro_block: int | str | None,
    macro_search: str,
    residual_codes: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    outlier_fallback: float | None,
) -> None:
    """Raise `TypeError` or `ValueError` for tensors of a packed matrix that do not fit together or their scheme."""
    check_scheme("rceil", macro_block, macro_search, outlier_fallback, 1)
    expected = {
        "codes": (codes, 2),
        "scale": (scale, 32),
        "macro": (macro, macro_block),
        "residual_codes": (residual_codes, None if outlier_fallback is None else 2),
        "residual_scale": (residual_scale, None if outlier_fallback is None else 32),
    }
    for name, (tensor, elements) in expected.items():
        if (tensor is None) != (elements is None):
            found = "missing" if tensor is None else "given"
            raise ValueError(f"{name} is {found} for {macro_block=}, {outlier_fallback=}")
        if tensor is None:
            continue
        if str(tensor.dtype) != "torch.uint8":
            raise TypeError(f"{name} must be uint8, got {tensor.dtype}")
        if tensor.device != codes.device:
            raise ValueError(f"{name} is on {tensor.device}, codes are on {codes.device}; move them to one device")
        shape = (*codes.shape[:-1], -(-length // (max(length, 1) if elements == "row" else elements)))
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}; {length} elements need {list(shape)}")
