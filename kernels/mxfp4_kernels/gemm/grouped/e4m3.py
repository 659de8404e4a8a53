# SPDX-License-Identifier: Apache-2.0
"""Grouped products of operands that [`mxfp4_kernels.fold_e4m3`] and its kin make: checks, tiles and launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton

from ...common.arguments import ExpertsShape, FoldedPointers, Strides
from ...common.plan import INTERPRETED, as_stored
from ..configs import Config, fitting, launch_config, launch_tuned, named, shared_memory
from ..matmul import as_elements
from .e4m3_kernel import grouped_matmul_e4m3_kernel, grouped_wgrad_e4m3_kernel
from .matmul import check_offsets, check_result, check_shape, rows_class
from .tiles import tile_slots


_GROUP = 128
#: Tiles, warps and stages, each for at least so many rows per expert. Partial sums and totals are both in registers.
_MATMUL = (
    (128, (128, 128, 8, 4)),
    (128, (128, 128, 8, 3)),
    (128, (64, 256, 8, 3)),
    (64, (64, 128, 4, 4)),
    (64, (64, 128, 4, 3)),
    (32, (32, 128, 4, 4)),
    (0, (16, 128, 4, 4)),
    (0, (16, 64, 4, 3)),
)
_WGRAD = ((0, (128, 128, 8, 4)), (0, (128, 128, 8, 3)), (0, (64, 128, 4, 3)), (0, (64, 64, 4, 2)))


def grouped_matmul_e4m3(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rows: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Products of each expert's rows with its weight, ``x_e W_e^T + b_e``, of E4M3 operands.

    Args:
        x: ``float8_e4m3fn [S, K]``, contiguous, rows sorted by expert, K a multiple of 128 (pad with zeros).
        x_scale: float32 ``[S, 1]`` (a scale per row) or ``[S, K/128]``.
        weight: ``float8_e4m3fn [E, N, K]`` with unit stride along K, other strides multiples of 128: also a view of
            what ``fold_e4m3(axis=0)`` makes of ``[E * K, N]``, ``.view(N, E, K).transpose(0, 1)``.
        weight_scale: float32 ``[E * N, 1]`` or ``[E * N, K/128]``, as of ``fold_e4m3`` of the stack; or with E and N
            apart.
        offsets: as in [`mxfp4_kernels.grouped_matmul`].
        bias: ``[E, N]`` in ``out_dtype``, or `None`.
        rows: int64 ``[S']``: the row of ``x`` that each row of the result takes, which are then the rows that
            ``offsets`` counts; by default its own. Not checked: reading them would wait for the GPU.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[S, N]`` (``[S', N]``), contiguous.

    Raises:
        TypeError: other dtypes.
        ValueError: shapes that do not fit together, strides, or tensors that are not on one GPU.
    """
    check_shape("weight", weight, (None, None, None))
    n_experts, n, k = weight.shape
    check_shape("x", x, (None, k))
    if weight_scale.dim() == 2 and weight_scale.shape[0] == n_experts * n:
        weight_scale = weight_scale.unflatten(0, (n_experts, n))
    _check("x", x, x_scale, (x.shape[0],), k)
    _check("weight", weight, weight_scale, (n_experts, n), k)
    check_offsets(offsets, x, n_experts)
    _check_devices(x, x_scale, weight, weight_scale, bias, rows)
    check_result(out_dtype)
    if bias is not None:
        check_shape("bias", bias, (n_experts, n))
        if bias.dtype != out_dtype:
            raise TypeError(f"bias is {bias.dtype} but the result is {out_dtype}; convert one of them")
        bias = bias.detach().contiguous()
    if rows is not None and (rows.dtype != torch.int64 or rows.dim() != 1 or not rows.is_contiguous()):
        raise ValueError(f"rows must be a contiguous int64 vector, got {rows.dtype} {list(rows.shape)}")
    n_rows = x.shape[0] if rows is None else rows.shape[0]
    out = torch.empty(n_rows, n, dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out

    constants = {
        "SHAPE": ExpertsShape(n, k, triton.next_power_of_2(n_experts)),
        "OUT_BF16": out_dtype == torch.bfloat16,
        "INTERPRETED": INTERPRETED,
    }
    operands = FoldedPointers(as_elements(x), x_scale), FoldedPointers(as_elements(weight), weight_scale)
    strides = (
        _scale_strides(x_scale),
        Strides(*weight.stride()[:2], None),
        _scale_strides(weight_scale)._replace(matrices=weight_scale.stride(0)),
    )

    def run(config: Config, target: torch.Tensor) -> None:
        tiles = tile_slots(n_rows, n_experts, config["BM"]) * triton.cdiv(n, config["BN"])
        arguments = (*operands, as_stored(bias), as_stored(target), offsets, rows, n_experts, *strides)
        launch_config(grouped_matmul_e4m3_kernel, (tiles,), x.device, arguments, constants, config)

    many = rows_class(n_rows, n_experts)
    configs = _configs_of(_MATMUL, many, ("BM", "BN"), x.device)
    launch_tuned("grouped_matmul_e4m3", (many, n, k, out_dtype), configs, run, out)
    return out


def grouped_wgrad_e4m3(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    offsets: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The gradient of each expert's weight from E4M3 operands that are quantized along the tokens.

    Args:
        left: ``float8_e4m3fn [N, T]`` with unit stride along the tokens T, which are sorted by expert; the tokens of an
            expert begin and end at multiples of 128 (pad each expert's with zeros).
        left_scale: float32 ``[N, T/128]``.
        right, right_scale: ``[K, T]`` and ``[K, T/128]``.
        offsets: int32 ``[E]``: where the tokens of each expert end, padding included.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[E, N, K]``, contiguous; exactly zero for an expert without tokens.

    Raises `TypeError` and `ValueError` as [`grouped_matmul_e4m3`] does.
    """
    check_shape("left", left, (None, None))
    tokens = left.shape[1]
    check_shape("right", right, (None, tokens))
    for name, elements, scale in (("left", left, left_scale), ("right", right, right_scale)):
        _check(name, elements, scale, elements.shape[:1], tokens)
    check_offsets(offsets, left)
    _check_devices(left, left_scale, right, right_scale)
    check_result(out_dtype)
    n, k, n_experts = left.shape[0], right.shape[0], offsets.shape[0]
    out = torch.empty(n_experts, n, k, dtype=out_dtype, device=left.device)
    if out.numel() == 0:
        return out

    constants = {"SHAPE": ExpertsShape(n, k), "INTERPRETED": INTERPRETED}
    operands = FoldedPointers(as_elements(left), left_scale), FoldedPointers(as_elements(right), right_scale)
    strides = (left.stride(0), right.stride(0)), _scale_strides(left_scale), _scale_strides(right_scale)

    def run(config: Config, target: torch.Tensor) -> None:
        tiles = n_experts * triton.cdiv(n, config["BN"]) * triton.cdiv(k, config["BK"])
        arguments = (*operands, as_stored(target), offsets, *strides)
        launch_config(grouped_wgrad_e4m3_kernel, (tiles,), left.device, arguments, constants, config)

    rows = rows_class(tokens, n_experts)
    configs = _configs_of(_WGRAD, rows, ("BN", "BK"), left.device)
    launch_tuned("grouped_wgrad_e4m3", (rows, n, k, out_dtype), configs, run, out)
    return out


def _check(name: str, elements: torch.Tensor, scale: torch.Tensor, rows: tuple[int, ...], length: int) -> None:
    if elements.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        raise TypeError(f"{name} must be float8_e4m3fn and its scale float32, got {elements.dtype}, {scale.dtype}")
    fits = elements.is_contiguous()
    if len(rows) > 1:
        fits = fits or elements.stride(-1) == 1 and not any(stride % _GROUP for stride in elements.stride()[:-1])
    if length % _GROUP or not fits:
        raise ValueError(
            f"{name} must be contiguous, with rows of a multiple of {_GROUP} (pad them with zeros), got "
            f"{list(elements.shape)} with strides {elements.stride()}"
        )
    if tuple(scale.shape) not in ((*rows, 1), (*rows, length // _GROUP)):
        sizes = ", ".join(map(str, rows))
        raise ValueError(
            f"the scale of {name} must have the shape [{sizes}, 1] or [{sizes}, {length // _GROUP}], "
            f"got {list(scale.shape)}"
        )


def _check_devices(first: torch.Tensor, *others: torch.Tensor | None) -> None:
    devices = {str(tensor.device) for tensor in (first, *others) if tensor is not None}
    if len(devices) != 1:
        raise ValueError(f"all operands must be on one device, got {sorted(devices)}")
    if first.device.type == "cpu" and not INTERPRETED:
        raise ValueError("the Triton kernel needs GPU tensors, got some on the CPU")


def _scale_strides(scale: torch.Tensor) -> Strides:
    """Of rows and groups; a scale of the whole row is there for every group."""
    return Strides(None, scale.stride(-2), 0 if scale.shape[-1] == 1 else scale.stride(-1))


def _configs_of(table: tuple, rows: int, names: tuple[str, str], device: torch.device) -> Sequence[Config]:
    """Configs of a table for so many rows per expert that the GPU has the shared memory for, the likeliest first."""
    if INTERPRETED:
        return named(names, [(16, 32, 4, 1)])
    return _configs_within(shared_memory(device), table, rows, names)


@functools.lru_cache(maxsize=256)
def _configs_within(limit: int, table: tuple, rows: int, names: tuple[str, str]) -> Sequence[Config]:
    found = named(names, (tile for least, tile in table if least <= rows))
    return fitting(found, lambda config: (config[names[0]] + config[names[1]]) * _GROUP, limit)
