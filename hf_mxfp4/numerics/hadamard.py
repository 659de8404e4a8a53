# SPDX-License-Identifier: Apache-2.0
"""Block-diagonal Hadamard rotation of an axis, to spread outliers over a block before it is quantized.

Applied along the contraction axis to both operands of a matrix product it leaves the product as it is, since
``H H^T = I``. arXiv 2605.09825 uses the deterministic form; random signs are the common variant.
"""

import torch

from .schemes import ROTATION_SIZES, one_of


def rotate(x: torch.Tensor, size: int, *, axis: int = -1, signs: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply every ``size`` consecutive elements of ``x`` along ``axis`` by Sylvester's ``H / sqrt(size)``.

    Args:
        x: floating-point tensor; computed on in float32 (float64 in float64), returned in its own dtype.
        size: 16, 32, 64 or 128; must divide the axis (pad with zeros: they change no product).
        signs: ``[K]`` of 1 and -1 along the axis, multiplied in before ``H``; see [`random_signs`]. `None` for the
            deterministic rotation.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: ``size`` is not supported or does not divide the axis, or ``signs`` has another length.
    """
    one_of("size", size, ROTATION_SIZES)
    if not x.is_floating_point():
        raise TypeError(f"a rotation needs a floating-point tensor, got {x.dtype}")
    length = x.shape[axis]
    if length % size:
        raise ValueError(f"size={size} does not divide the {length} elements along axis {axis}; pad them with zeros")
    if signs is not None and tuple(signs.shape) != (length,):
        raise ValueError(f"signs has shape {tuple(signs.shape)}; the rotated axis has {length} elements")
    rows = x.movedim(axis, -1)
    if x.dtype != torch.float64:
        rows = rows.float()
    if signs is not None:
        rows = rows * signs.to(rows)
    return _transform(rows, size).to(x.dtype).movedim(-1, axis)


def unrotate(x: torch.Tensor, size: int, *, signs: torch.Tensor | None = None) -> torch.Tensor:
    """Return the inverse of [`rotate`] along the last axis."""
    # Sylvester's matrix is its own inverse, and so are signs.
    rows = rotate(x, size)
    if signs is None:
        return rows
    return rows * signs.to(rows)


def random_signs(length: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return float32 ``[length]`` of 1 and -1 with equal chances, a function of ``seed`` alone (drawn on the CPU)."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (length,), generator=generator, device="cpu")
    return (1.0 - 2.0 * bits).to(device)


def _transform(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Compute the fast Walsh-Hadamard transform: sums and differences in a fixed order, the scale last."""
    shape = rows.shape
    rows = rows.reshape(*shape[:-1], shape[-1] // size, size)
    half = 1
    while half < size:
        pairs = rows.reshape(*rows.shape[:-1], size // (2 * half), 2, half)
        first, second = pairs.unbind(dim=-2)
        rows = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return rows.reshape(shape) * size**-0.5
