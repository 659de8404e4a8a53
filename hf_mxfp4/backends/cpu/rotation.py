# SPDX-License-Identifier: Apache-2.0
"""The block rotation of CPU tensors by the fused library."""

import functools
from collections.abc import Callable

import torch

from ... import numerics
from ..._logging import get_logger
from .functions import TYPES, in_memory, library_problem, threads_for
from .library import load


#: What the library writes; other types are made of float32.
_WRITTEN = (torch.float32, torch.bfloat16)


def takes_rotation(x: torch.Tensor) -> bool:
    """Whether [`rotate`] takes a tensor of torch's own kind."""
    return x.is_cpu and x.dtype in TYPES and library_problem() is None and _agrees_with_the_reference()


def rotate(x: torch.Tensor, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[`hf_mxfp4.numerics.rotate`] of a CPU tensor in float32, bfloat16 or float16 along its last axis, which ``size``
    (16, 32, 64 or 128) divides: computed in float32, rounded to ``dtype`` once. It is its own inverse."""
    if size not in numerics.ROTATION_SIZES or x.shape[-1] % size:
        raise ValueError(f"rows of {x.shape[-1]} elements cannot be rotated in blocks of {size}")
    return _rotator(x.dtype, size, dtype)(x)


@functools.cache
def _agrees_with_the_reference() -> bool:
    """As with the other functions, a compiler that does not keep to the arithmetic as written must not go unnoticed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 256, generator=generator) * torch.exp2(torch.arange(-40.0, 40.0, 10.0))[:, None]
    agrees = all(torch.equal(rotate(x, size), numerics.rotate(x, size)) for size in numerics.ROTATION_SIZES)
    if not agrees:
        get_logger().warning("the fused CPU rotation was compiled wrongly here and is not used; CPU rotates eagerly")
    return agrees


@functools.cache
def _rotator(read: torch.dtype, size: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Constant arguments looked up once: for a single token that takes longer than the rotation."""
    written = dtype if dtype in _WRITTEN else torch.float32
    function, kinds, scale = load()[0].mxfp4_rotate, (TYPES[read], TYPES[written]), size**-0.5

    def run(x: torch.Tensor) -> torch.Tensor:
        rows = in_memory(x)
        out = torch.empty_like(rows, dtype=written)
        places, count = (rows.data_ptr(), kinds[0], out.data_ptr(), kinds[1]), rows.numel() // size
        function(*places, size, scale, count, threads_for(rows.numel()))
        return out if written is dtype else out.to(dtype)

    return run
