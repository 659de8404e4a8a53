# SPDX-License-Identifier: Apache-2.0
"""Grouped products on dense operands: what is checked, tile shapes and launches. Nothing is read back from the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from ..common.autotune import choose, milliseconds
from ..common.plan import INTERPRETED
from .grouped_kernel import grouped_matmul_kernel, grouped_sum_kernel, grouped_wgrad_kernel
from .grouped_tiles import tile_slots
from .matmul import shared_memory


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Tiles (BM, BN, BK), warps and stages for 16-bit operands, largest first: each for at least so many rows per expert.
#: The last fits every GPU. Rows per expert are seldom alike, so tiles are at most as tall as the mean.
_MATMUL = (
    (128, (128, 256, 64, 8, 3)),
    (128, (128, 128, 64, 8, 3)),
    (128, (128, 128, 32, 8, 3)),
    (64, (64, 128, 64, 4, 4)),
    (64, (64, 128, 64, 4, 3)),
    (32, (32, 128, 64, 4, 4)),
    (32, (32, 64, 64, 4, 4)),
    (0, (16, 64, 128, 4, 4)),
    (0, (16, 128, 64, 4, 4)),
    (0, (16, 64, 64, 4, 3)),
)
#: Tiles (BM, BN, BK) of which BM is contracted.
_WGRAD = (
    (128, (64, 128, 256, 8, 3)),
    (64, (64, 128, 128, 8, 3)),
    (0, (32, 128, 128, 8, 3)),
    (0, (32, 64, 64, 4, 2)),
)
_SUM_TILE = (32, 128)


def grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Products of each expert's rows with its weight: ``x_e W_e^T + b_e``, summed in float32.

    Args:
        x: ``[S, K]`` bfloat16, float16 or float32, rows sorted by expert.
        weight: ``[E, N, K]`` in the dtype of ``x``, in any layout: ``W.transpose(1, 2)`` costs nothing.
        offsets: int32 ``[E]`` on the device of ``x``: where the rows of each expert end, in ascending order. Rows from
            the last one on belong to no expert; what they become is not defined.
        bias: ``[E, N]`` in the dtype of ``x``, or `None`.

    Returns:
        ``[S, N]``, contiguous, in the dtype of ``x``.

    Raises:
        TypeError: another dtype, or dtypes that differ.
        ValueError: shapes that do not fit together, or tensors on several devices, or not on a GPU.
    """
    check_operands("grouped_matmul", x=x, weight=weight, bias=bias)
    check_shape("weight", weight, (None, None, None))
    check_shape("x", x, (None, weight.shape[2]))
    check_offsets(offsets, x, weight.shape[0])
    n_experts, n, k = weight.shape
    if bias is not None:
        check_shape("bias", bias, (n_experts, n))
        bias = bias.contiguous()
    out = x.new_empty(x.shape[0], n)
    if out.numel() == 0:
        return out
    if n_experts == 0 or k == 0:
        raise ValueError(f"grouped_matmul needs experts and columns, got a weight of {list(weight.shape)}")
    x = unit_stride(x.detach())
    weight = weight.detach()

    def launch(config: Mapping[str, int], target: torch.Tensor) -> None:
        slots = tile_slots(x.shape[0], n_experts, config["BM"])
        run(
            grouped_matmul_kernel,
            slots * triton.cdiv(n, config["BN"]),
            x.device,
            *(bits(tensor) for tensor in (x, weight, bias, target)),
            offsets,
            n_experts,
            x.stride(0),
            *weight.stride(),
            N=n,
            K=k,
            EXPERTS=triton.next_power_of_2(n_experts),
            BF16=x.dtype == torch.bfloat16,
            INTERPRETED=INTERPRETED,
            **config,
        )

    configs = fitting(_MATMUL, x.shape[0], n_experts, x.element_size(), x.device, contracted=2)
    key = (x.dtype, rows_class(x.shape[0], n_experts), n, k)
    launch(tuned("grouped_matmul", key, configs, launch, out), out)
    return out


def grouped_wgrad(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The gradient of each expert's weight: ``left_e^T right_e`` over its rows, summed in float32.

    Args:
        left: ``[S, N]`` bfloat16, float16 or float32, rows sorted by expert, in any layout.
        right: ``[S, K]`` in the same dtype, in any layout.
        offsets: as in [`grouped_matmul`].
        dtype: of the result, one of the same three; by default that of ``left``.

    Returns:
        ``[E, N, K]``, contiguous; exactly zero for an expert without rows.

    Raises `TypeError` and `ValueError` as [`grouped_matmul`] does.
    """
    check_operands("grouped_wgrad", left=left, right=right)
    check_offsets(offsets, left)
    check_shape("left", left, (None, None))
    check_shape("right", right, (left.shape[0], None))
    dtype = check_result(dtype or left.dtype)
    n, k, n_experts = left.shape[1], right.shape[1], offsets.shape[0]
    out = left.new_empty(n_experts, n, k, dtype=dtype)
    if out.numel() == 0:
        return out
    left, right = left.detach(), right.detach()

    def launch(config: Mapping[str, int], target: torch.Tensor) -> None:
        run(
            grouped_wgrad_kernel,
            n_experts * triton.cdiv(n, config["BN"]) * triton.cdiv(k, config["BK"]),
            left.device,
            *(bits(tensor) for tensor in (left, right, target)),
            offsets,
            *left.stride(),
            *right.stride(),
            N=n,
            K=k,
            BF16=left.dtype == torch.bfloat16,
            INTERPRETED=INTERPRETED,
            **config,
        )

    configs = fitting(_WGRAD, left.shape[0], n_experts, left.element_size(), left.device, contracted=0)
    key = (left.dtype, dtype, rows_class(left.shape[0], n_experts), n, k)
    launch(tuned("grouped_wgrad", key, configs, launch, out), out)
    return out


def grouped_sum(x: torch.Tensor, offsets: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum of each expert's rows, in float32: the gradient of a bias.

    Args:
        x: ``[S, N]`` bfloat16, float16 or float32, rows sorted by expert.
        offsets: as in [`grouped_matmul`].
        dtype: of the result, one of the same three; by default that of ``x``.

    Returns:
        ``[E, N]``, contiguous; exactly zero for an expert without rows.

    Raises `TypeError` and `ValueError` as [`grouped_matmul`] does.
    """
    check_operands("grouped_sum", x=x)
    check_offsets(offsets, x)
    check_shape("x", x, (None, None))
    dtype = check_result(dtype or x.dtype)
    out = x.new_empty(offsets.shape[0], x.shape[1], dtype=dtype)
    if out.numel() == 0:
        return out
    x = unit_stride(x.detach())
    run(
        grouped_sum_kernel,
        offsets.shape[0] * triton.cdiv(x.shape[1], _SUM_TILE[1]),
        x.device,
        bits(x),
        bits(out),
        offsets,
        x.stride(0),
        N=x.shape[1],
        BM=_SUM_TILE[0],
        BN=_SUM_TILE[1],
        BF16=x.dtype == torch.bfloat16,
        INTERPRETED=INTERPRETED,
        num_warps=4,
    )
    return out


def check_operands(name: str, **tensors: torch.Tensor | None) -> None:
    """Raise unless all are floating-point tensors of one dtype and device that the kernels take."""
    first_name, first = next(iter(tensors.items()))
    for label, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {label} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name}: {label} is {tensor.dtype}; use {', '.join(map(str, DTYPES))}")
        if tensor.dtype != first.dtype:
            raise TypeError(f"{name}: {label} is {tensor.dtype} but {first_name} is {first.dtype}; convert one of them")
        if tensor.device != first.device:
            raise ValueError(f"{name}: {label} is on {tensor.device} but {first_name} is on {first.device}")
    if first.device.type == "cpu" and not INTERPRETED:
        raise ValueError(f"{name} needs tensors on a GPU, got them on the CPU")


def check_offsets(offsets: object, x: torch.Tensor, n_experts: int | None = None) -> None:
    """Raise unless ``offsets`` are row ends on the device of ``x``. Their values are there alone: not looked at."""
    if not isinstance(offsets, torch.Tensor) or offsets.dtype != torch.int32:
        found = offsets.dtype if isinstance(offsets, torch.Tensor) else type(offsets).__name__
        raise TypeError(f"offsets must be an int32 tensor, got {found}; use counts.cumsum(0, dtype=torch.int32)")
    if offsets.device != x.device:
        raise ValueError(f"offsets are on {offsets.device} but the rows are on {x.device}; move them there once")
    if offsets.dim() != 1 or not offsets.is_contiguous() or n_experts is not None and offsets.shape[0] != n_experts:
        expected = "experts" if n_experts is None else n_experts
        raise ValueError(f"offsets must be contiguous, of the shape [{expected}], got {list(offsets.shape)}")


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raise `ValueError` unless the tensor has the shape; `None` stands for any size."""
    fits = tensor.dim() == len(shape) and all(
        want in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has the shape {list(tensor.shape)}, expected [{wanted}]")


def check_result(dtype: torch.dtype) -> torch.dtype:
    """``dtype``; raises `TypeError` for one that no kernel writes."""
    if dtype not in DTYPES:
        raise TypeError(f"results cannot be {dtype}; use {', '.join(map(str, DTYPES))}")
    return dtype


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy when its last axis is not contiguous."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def bits(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Interpreted, bfloat16 passes as int16 bits."""
    return tensor.view(torch.int16) if INTERPRETED and tensor is not None and tensor.dtype == torch.bfloat16 else tensor


def rows_class(n_rows: int, n_experts: int) -> int:
    """Mean rows of the experts that can have any, as a power of two from 8 to 512: what tiles are chosen by."""
    mean = n_rows / max(1, min(n_rows, n_experts))
    return min(512, max(8, triton.next_power_of_2(int(mean))))


def fitting(
    table: Sequence[tuple[int, tuple]],
    n_rows: int,
    n_experts: int,
    element_size: int,
    device: torch.device,
    contracted: int,
) -> list[dict[str, int]]:
    """Configs of a table that the GPU has the shared memory for, the likeliest first.

    Args:
        table: least rows per expert, and tile (BM, BN, BK), warps, stages.
        contracted: the place in the tile of the side that is contracted.
    """
    if INTERPRETED:
        # Small, so that tests of several tiles are.
        return [{"BM": 16, "BN": 32, "BK": 32, "num_warps": 4, "num_stages": 1}]
    rows = rows_class(n_rows, n_experts)
    is_hip = torch.version.hip is not None
    limit = shared_memory(device)
    found = []
    for least, (*tile, warps, stages) in table:
        # Tables are for 16-bit elements; longer or shorter ones keep the bytes of a tile.
        tile[contracted] = max(16, tile[contracted] * 2 // element_size)
        stages = 2 if is_hip else stages
        sides = sum(tile) - tile[contracted]
        # AMD's pipeline keeps one stage in registers.
        needed = sides * tile[contracted] * element_size * (stages - 1 if is_hip else stages) + 4096
        if least <= rows and needed <= limit:
            found.append({**dict(zip(("BM", "BN", "BK"), tile, strict=True)), "num_warps": warps, "num_stages": stages})
    if not found:
        *tile, warps, _ = table[-1][1]
        tile[contracted] = max(16, tile[contracted] * 2 // element_size)
        found.append({**dict(zip(("BM", "BN", "BK"), tile, strict=True)), "num_warps": warps, "num_stages": 2})
    return found[:6]


def tuned(name: str, key: tuple, configs: list[dict[str, int]], launch: Any, out: torch.Tensor) -> Mapping[str, Any]:
    """The config to launch with; see [`mxfp4_kernels.common.autotune.choose`]."""

    def bench(config: Mapping[str, Any]) -> float:
        scratch = torch.empty_like(out)
        return milliseconds(lambda: launch(config, scratch))

    return choose(name, key, configs, bench, out.device)


def run(kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Launch on a device."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[(programs,)](*arguments, **constants)
