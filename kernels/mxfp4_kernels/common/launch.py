# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels on tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton

from . import blocks


#: Whether TRITON_INTERPRET=1 was set when the kernels were defined, which is what counts.
INTERPRETED = not isinstance(blocks.clamp, triton.JITFunction)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels read it: bfloat16 as int16 bits."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def as_stored(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return an output as kernels write it: interpreted, bfloat16 passes as int16 bits."""
    return bits(tensor) if INTERPRETED and tensor is not None else tensor


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Start a kernel on a device."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*arguments, **constants)
