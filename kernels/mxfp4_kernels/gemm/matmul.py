# SPDX-License-Identifier: Apache-2.0
"""Products of quantized operands: checks, launch parameters, and the choice between our kernels and PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton

from ..common.arguments import FoldedPointers, PackedPointers, RowBytes
from ..common.plan import INTERPRETED, as_stored
from .configs import Config, fitting, launch_config, launch_tuned, named, shared_memory
from .matmul_kernel import matmul_e4m3_kernel, matmul_mxf4_kernel


_GROUP = 128
_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_NAMES = ("BM", "BN", "GROUP_M")
#: Tiles that may run, the largest first. Partial sums and totals are both in registers: 128 x 128 elements of each are
#: 128 registers of 256 threads.
CONFIGS = named(
    _NAMES,
    (
        (bm, bn, 8, warps, stages)
        for bm, bn, warps in (
            (128, 128, 8),
            (64, 256, 8),
            (128, 64, 8),
            (64, 128, 4),
            (64, 64, 4),
            (32, 64, 4),
            (16, 64, 4),
        )
        for stages in (4, 3, 2)
    ),
)
_INTERPRETED_CONFIGS = named(_NAMES, [(16, 16, 8, 4, 1)])


def matmul_e4m3(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a b^T + bias`` of operands that [`mxfp4_kernels.fold_e4m3`] and its kin make; nothing waits for the GPU.

    Products of 128 elements are summed by the tensor cores, and these sums in float32. Of folded MXFP4 on both sides
    the former are exact in nearly all cases, so that the error is that of float32 sums. With other E4M3 (gradients)
    sm_90, whose FP8 tensor cores keep about 14 bits of a sum, may lose about 2**-13 of the largest product at every 32
    elements: what a model of the hardware says, not measured. Scales of whole rows on both sides go through PyTorch's
    scaled product where that has one.

    Args:
        a: ``float8_e4m3fn [M, K]``, contiguous, K a multiple of 128 (pad with zeros).
        a_scale: float32 ``[M, 1]`` (a scale per row) or ``[M, K/128]``.
        b, b_scale: ``[N, K]``, and ``[N, 1]`` or ``[N, K/128]``.
        out_dtype: float32, bfloat16 or float16; larger sums become infinite.
        bias: ``[N]``, added in float32.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        TypeError: other dtypes.
        ValueError: shapes that do not fit together, strides, or tensors that are not on one GPU.
    """
    _check_e4m3(a, a_scale, b, b_scale, out_dtype, bias)
    bias = None if bias is None else bias.detach().contiguous()
    (m, k), n = a.shape, b.shape[0]
    per_group = a_scale.shape[1] != 1 or b_scale.shape[1] != 1
    if not per_group and m and n and k and _torch_takes(a.device, out_dtype, n, bias):
        row_wise = F.ScalingType.RowWise
        # Of one column torch looks at the stride too, and wants 1.
        scales = a_scale.flatten()[:, None], row_wise, b_scale.flatten()[None, :], row_wise
        # Fast accumulation would keep 14 bits of sums over all of K.
        return F.scaled_mm(a, b.t(), *scales, bias=bias, output_dtype=out_dtype, use_fast_accum=False)
    scales = [_group_scales(scale, k, per_group) for scale in (a_scale, b_scale)]
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    operands = [FoldedPointers(as_elements(x), scale) for x, scale in zip((a, b), scales, strict=True)]
    constants = {"PER_GROUP": per_group, **_steps(k)}
    key = ("group" if per_group else "row", triton.next_power_of_2(m), n, k)
    tiles = e4m3_tiles(per_group, has_tensor_memory(out.device))
    _launch(matmul_e4m3_kernel, "matmul_e4m3", key, (*operands, bias), out, (m, n, k), constants, tiles)
    return out


def matmul_mxf4(
    a_codes: torch.Tensor,
    a_scale: torch.Tensor,
    b_codes: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    a_macro: torch.Tensor | None = None,
    b_macro: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a b^T + bias`` of operands that [`mxfp4_kernels.quantize`] makes, along their last axis, by the instructions
    for MXFP4 where the GPU has them ([`has_mxfp4`]), otherwise by those for bfloat16.

    Args:
        a_codes, a_scale: uint8 ``[M, ceil(K/2)]`` and ``[M, ceil(K/32)]``.
        b_codes, b_scale: uint8 ``[N, ceil(K/2)]`` and ``[N, ceil(K/32)]``.
        a_macro, b_macro: uint8 ``[.., ceil(K/128)]``, factors ``1 + byte/256`` of 128 elements (not block mantissas);
            both or neither.
        out_dtype, bias: as in [`matmul_e4m3`].

    Returns and raises as [`matmul_e4m3`] does.
    """
    _check_mxf4(a_codes, a_scale, b_codes, b_scale, a_macro, b_macro, out_dtype, bias)
    bias = None if bias is None else bias.detach().contiguous()
    (m, n_codes), n = a_codes.shape, b_codes.shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=a_codes.device)
    if not out.numel():
        return out
    operands = [
        PackedPointers(*(None if part is None else part.contiguous() for part in parts), None, None)
        for parts in ((a_codes, a_scale, a_macro), (b_codes, b_scale, b_macro))
    ]
    row_bytes = RowBytes(n_codes, a_scale.shape[1], 0 if a_macro is None else a_macro.shape[1])
    native = has_mxfp4(out.device)
    tiles = mxf4_tiles(native, a_macro is not None, has_tensor_memory(out.device), multiplies_by_warps(out.device))
    constants = {"NATIVE": native, **_steps(2 * n_codes)}
    key = ("macro" if a_macro is not None else "plain", triton.next_power_of_2(m), n, n_codes)
    _launch(matmul_mxf4_kernel, "matmul_mxf4", key, (*operands, bias), out, (m, n, row_bytes), constants, tiles)
    return out


@functools.lru_cache(maxsize=64)
def has_mxfp4(device: torch.device) -> bool:
    """Whether the device multiplies MXFP4 by itself, and Triton compiles for that: compute capability 10.x and 12.x,
    and gfx950."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return "gfx95" in torch.cuda.get_device_properties(device).gcnArchName
    return torch.cuda.get_device_capability(device)[0] in (10, 12)


@functools.lru_cache(maxsize=64)
def has_tensor_memory(device: torch.device) -> bool:
    """Whether sums are in a memory of the tensor cores' own: compute capability 10.x."""
    is_nvidia = device.type == "cuda" and not torch.version.hip
    return is_nvidia and torch.cuda.get_device_capability(device)[0] == 10


@functools.lru_cache(maxsize=64)
def multiplies_by_warps(device: torch.device) -> bool:
    """Whether tensor cores work for one warp at a time, on operands in its registers: compute capability 8.x (and 12.x,
    which multiplies MXFP4 by itself)."""
    is_nvidia = device.type == "cuda" and not torch.version.hip
    return is_nvidia and torch.cuda.get_device_capability(device)[0] in (8, 12)


class Tiles(NamedTuple):
    """What tiles a product can have: ``row_bytes`` of shared memory per row of the operands' tiles and stage of the
    pipeline, ``largest`` elements, and elements of a thread (``sums``), without spilling registers, the ``least`` rows
    for its instruction, and the ``least_stages`` of the pipeline."""

    row_bytes: int = 128
    largest: int = 128 * 128
    sums: int = 64
    least: int = 16
    least_stages: int = 2


def e4m3_tiles(per_group: bool, tensor_memory: bool) -> Tiles:
    """Of [`matmul_e4m3_kernel`]; ``tensor_memory`` as in [`mxf4_tiles`]: from there partial sums of groups come back to
    registers, beside the totals."""
    return Tiles(sums=32 if per_group and tensor_memory else 64)


def mxf4_tiles(native: bool, macro: bool, tensor_memory: bool, by_warps: bool = False) -> Tiles:
    """Of [`matmul_mxf4_kernel`]; ``tensor_memory`` is that of [`has_tensor_memory`], where totals stay, and whose
    instructions for MXFP4 take 128 rows; ``by_warps`` that of [`multiplies_by_warps`]."""
    if not native:
        # Unpacked operands go through shared memory once more, as bfloat16, and take registers besides: with two stages
        # as many as there are, where tensor cores read them from registers and totals of macro blocks stand beside.
        return Tiles(row_bytes=320, largest=64 * 64, least_stages=3 if macro and by_warps else 2)
    return Tiles(row_bytes=72, sums=32 if macro else 64, least=128 if tensor_memory else 16)


def usual_configs(n_rows: int, tiles: Tiles, limit: int) -> Sequence[Config]:
    """Configs of a product with ``n_rows`` rows, the usual one first; ``limit`` is the shared memory of a program."""
    return _configs(min(128, max(16, triton.next_power_of_2(n_rows))), tiles, limit)


@functools.lru_cache(maxsize=256)
def _configs(height: int, tiles: Tiles, limit: int) -> Sequence[Config]:
    """[`usual_configs`] of products whose tiles are as high as this, at best."""
    possible = []
    for config in CONFIGS:
        elements = config["BM"] * config["BN"]
        in_registers = elements <= min(tiles.largest, tiles.sums * 32 * config["num_warps"])
        if in_registers and config["BM"] >= tiles.least and config["num_stages"] >= tiles.least_stages:
            possible.append(config)
    fits = fitting(possible, lambda c: (c["BM"] + c["BN"]) * tiles.row_bytes, limit, besides=0)
    # Tiles higher than the matrix are waste; of equal heights the first has the most stages.
    return sorted(fits, key=lambda c: (c["BM"] != height, abs(c["BM"] - height), c["BN"] > 128))


def _launch(
    kernel: Any,
    name: str,
    key: Sequence[object],
    operands: tuple,
    out: torch.Tensor,
    sizes: tuple,
    constants: Mapping[str, Any],
    tiles: Tiles,
) -> None:
    """``sizes`` begins with the shape of ``out``."""
    m, n = sizes[:2]
    on_cpu = out.device.type == "cpu"
    configs = _INTERPRETED_CONFIGS if on_cpu else usual_configs(m, tiles, shared_memory(out.device))

    def run(config: Config, target: torch.Tensor) -> None:
        grid = (triton.cdiv(m, config["BM"]) * triton.cdiv(n, config["BN"]),)
        launch_config(kernel, grid, out.device, (*operands, as_stored(target), *sizes), constants, config)

    launch_tuned(name, key, configs, run, out)


@functools.lru_cache(maxsize=64)
def _has_row_scaled(device: torch.device) -> bool:
    """Whether PyTorch's scaled product takes a scale per row there."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def _torch_takes(device: torch.device, out_dtype: torch.dtype, n: int, bias: torch.Tensor | None) -> bool:
    fits = out_dtype == torch.bfloat16 and n % 16 == 0 and (bias is None or bias.dtype == torch.bfloat16)
    return fits and _has_row_scaled(device)


def _group_scales(scale: torch.Tensor, k: int, per_group: bool) -> torch.Tensor:
    """``[groups, rows]``, contiguous."""
    if per_group and scale.shape[1] == 1:
        scale = scale.expand(-1, k // _GROUP)
    return scale.t().contiguous()


def _steps(length: int) -> dict[str, Any]:
    """What kernels want to know about being interpreted."""
    return {"INTERPRETED": INTERPRETED, "STEPS": triton.cdiv(length, _GROUP) if INTERPRETED else 0}


def as_elements(x: torch.Tensor) -> torch.Tensor:
    """Interpreted, E4M3 passes as bytes."""
    return x.view(torch.uint8) if INTERPRETED else x


def _check_e4m3(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> None:
    for name, elements, scale in (("a", a, a_scale), ("b", b, b_scale)):
        if elements.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
            raise TypeError(f"{name} must be float8_e4m3fn and its scale float32, got {elements.dtype}, {scale.dtype}")
        if elements.dim() != 2 or elements.shape[1] % _GROUP or not elements.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous matrix whose rows are a multiple of {_GROUP} long (pad them with zeros), "
                f"got {list(elements.shape)} with strides {elements.stride()}"
            )
        shapes = [elements.shape[0], 1], [elements.shape[0], elements.shape[1] // _GROUP]
        if list(scale.shape) not in shapes:
            raise ValueError(f"{name}_scale must be of the shape {shapes[0]} or {shapes[1]}, got {list(scale.shape)}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a has rows of {a.shape[1]} elements and b of {b.shape[1]}")
    _check_rest((a, a_scale, b, b_scale), b.shape[0], out_dtype, bias)


def _check_mxf4(
    a_codes: torch.Tensor,
    a_scale: torch.Tensor,
    b_codes: torch.Tensor,
    b_scale: torch.Tensor,
    a_macro: torch.Tensor | None,
    b_macro: torch.Tensor | None,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> None:
    if (a_macro is None) != (b_macro is None):
        raise ValueError("a_macro and b_macro must both be given or both be None; a factor of 1 has byte 0")
    codes, blocks = a_codes.shape[-1], a_scale.shape[-1]
    for name, tensor, rows, columns in (
        ("a_codes", a_codes, a_codes.shape[0], (codes,)),
        ("b_codes", b_codes, b_codes.shape[0], (codes,)),
        ("a_scale", a_scale, a_codes.shape[0], (-(-codes // 16),)),
        ("b_scale", b_scale, b_codes.shape[0], (blocks,)),
        ("a_macro", a_macro, a_codes.shape[0], (-(-blocks // 4),)),
        ("b_macro", b_macro, b_codes.shape[0], (-(-blocks // 4),)),
    ):
        if tensor is None:
            continue
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{name} must be uint8, got {tensor.dtype}")
        if tensor.dim() != 2 or tuple(tensor.shape) != (rows, *columns):
            raise ValueError(f"{name} must have the shape {[rows, *columns]}, got {list(tensor.shape)}")
    macros = () if a_macro is None else (a_macro, b_macro)
    _check_rest((a_codes, a_scale, b_codes, b_scale, *macros), b_codes.shape[0], out_dtype, bias)


def _check_rest(tensors: tuple[torch.Tensor, ...], n: int, out_dtype: torch.dtype, bias: torch.Tensor | None) -> None:
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"out_dtype={out_dtype} is not supported; choose one of {_OUT_DTYPES}")
    if bias is not None and (list(bias.shape) != [n] or bias.dtype not in _OUT_DTYPES):
        raise ValueError(f"bias must be a floating-point vector of {n} elements, got {bias.dtype} {list(bias.shape)}")
    devices = {tensor.device for tensor in (*tensors, *(() if bias is None else (bias,)))}
    if len(devices) != 1:
        raise ValueError(f"all operands must be on one device, got {sorted(map(str, devices))}")
    if devices.pop().type == "cpu" and not INTERPRETED:
        raise ValueError("the Triton kernel needs GPU tensors, got some on the CPU")
