# SPDX-License-Identifier: Apache-2.0
"""Grouped products on dense operands: what is checked, tile shapes and launches. Nothing is read back from the GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton

from ...common.arguments import ExpertsShape, ProductTile, Strides
from ...common.plan import INTERPRETED, as_stored, launch
from ..configs import Config, fitting, launch_config, launch_tuned, named, shared_memory
from .matmul_kernel import grouped_matmul_kernel, grouped_sum_kernel, grouped_wgrad_kernel
from .tiles import tile_slots


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
_SUM_TILE = ProductTile(BM=32, BN=128)
#: Small, so that tests of several tiles are.
_INTERPRETED_CONFIGS = named(("BM", "BN", "BK"), [(16, 32, 32, 4, 1)])


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

    shape = ExpertsShape(n, k, triton.next_power_of_2(n_experts))
    constants = {"SHAPE": shape, "BF16": x.dtype == torch.bfloat16, "INTERPRETED": INTERPRETED}

    def run(config: Config, target: torch.Tensor) -> None:
        tiles = tile_slots(x.shape[0], n_experts, config["BM"]) * triton.cdiv(n, config["BN"])
        arguments = (
            *map(as_stored, (x, weight, bias, target)),
            offsets,
            n_experts,
            x.stride(0),
            Strides(*weight.stride()),
        )
        launch_config(grouped_matmul_kernel, (tiles,), x.device, arguments, constants, config)

    rows = rows_class(x.shape[0], n_experts)
    configs = configs_of(_MATMUL, rows, x.element_size(), x.device, "BK")
    launch_tuned("grouped_matmul", (x.dtype, rows, n, k), configs, run, out)
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

    constants = {"SHAPE": ExpertsShape(n, k), "BF16": left.dtype == torch.bfloat16, "INTERPRETED": INTERPRETED}

    def run(config: Config, target: torch.Tensor) -> None:
        tiles = n_experts * triton.cdiv(n, config["BN"]) * triton.cdiv(k, config["BK"])
        strides = Strides(None, *left.stride()), Strides(None, *right.stride())
        arguments = (*map(as_stored, (left, right, target)), offsets, *strides)
        launch_config(grouped_wgrad_kernel, (tiles,), left.device, arguments, constants, config)

    rows = rows_class(left.shape[0], n_experts)
    configs = configs_of(_WGRAD, rows, left.element_size(), left.device, "BM")
    launch_tuned("grouped_wgrad", (left.dtype, dtype, rows, n, k), configs, run, out)
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
    n_experts, n = out.shape
    launch(
        grouped_sum_kernel,
        (n_experts * triton.cdiv(n, _SUM_TILE.BN),),
        x.device,
        as_stored(x),
        as_stored(out),
        offsets,
        x.stride(0),
        N=n,
        TILE=_SUM_TILE,
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
    fits = tensor.dim() == len(shape)
    for want, size in zip(shape, tensor.shape, strict=False):
        fits = fits and want in (None, size)
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


def rows_class(n_rows: int, n_experts: int) -> int:
    """Mean rows of the experts that can have any, as a power of two from 8 to 512: what tiles are chosen by."""
    mean = n_rows / max(1, min(n_rows, n_experts))
    return min(512, max(8, triton.next_power_of_2(int(mean))))


def configs_of(table: tuple, rows: int, element_size: int, device: torch.device, contracted: str) -> Sequence[Config]:
    """Configs of a table for so many rows per expert that the GPU has the shared memory for, the likeliest first.
    ``contracted`` names the side of the tile that is."""
    if INTERPRETED:
        return _INTERPRETED_CONFIGS
    return configs_within(shared_memory(device), table, rows, element_size, contracted)


@functools.lru_cache(maxsize=256)
def configs_within(limit: int, table: tuple, rows: int, element_size: int, contracted: str) -> Sequence[Config]:
    """[`configs_of`] a GPU with so many bytes of shared memory for a program."""
    is_hip = torch.version.hip is not None
    found = named(("BM", "BN", "BK"), (tile for least, tile in table if least <= rows))
    for config in found:
        # Tables are for 16-bit elements; longer or shorter ones keep the bytes of a tile.
        config[contracted] = max(16, config[contracted] * 2 // element_size)
        config["num_stages"] = 2 if is_hip else config["num_stages"]
    # More float32 sums than 64 in a thread are spilled where operands are float32 too.
    most = 64 if element_size == 4 else 128
    found = [c for c in found if c["BM"] * c["BN"] * c["BK"] // c[contracted] <= most * 32 * c["num_warps"]]

    def stage_bytes(config: Config) -> int:
        sides = config["BM"] + config["BN"] + config["BK"] - config[contracted]
        return sides * config[contracted] * element_size

    # AMD's pipeline keeps one stage in registers.
    return fitting(found, stage_bytes, limit, in_registers=int(is_hip))[:6]
