# SPDX-License-Identifier: Apache-2.0
"""The grouped product with packed weights: what is checked, which way it is computed, and launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton

from ...common.arguments import DecodeConstants, ExpertsShape, PackedPointers, Partial
from ...common.checks import check_packed
from ...common.counters import zeros_of_a_launch
from ...common.plan import INTERPRETED, Packed, Scheme, alpha, as_stored, scheme_constants
from ...quantization.launch import dequantize
from ..configs import Config, arch_of, fitting_packed, launch_config, launch_tuned, named, shared_memory
from ..decode_plan import IN_REGISTERS, in_registers, order_of, split_steps
from .matmul import check_offsets, check_operands, check_shape, grouped_matmul, rows_class
from .packed_kernel import grouped_packed_kernel
from .tiles import tile_slots


#: Mean rows per expert from which on weights are dequantized first, for all tiles of rows at once: a tile of 64 rows
#: takes longer to decode than to multiply.
DEQUANTIZED_FROM = 128
#: Mean rows per expert up to which most experts have 8 at most.
_FEW = 4
#: Tiles (BM, BN), warps and stages, for at most so many rows per expert. Of the first two, tensor cores that work for
#: one warp read the decoded weight from registers.
_TILES = (
    (4, ((8, 128, 4, 3), (8, 64, 2, 3), (8, 128, 4, 4), (8, 64, 4, 4), (16, 64, 2, 3), (16, 64, 4, 3))),
    (16, ((16, 64, 2, 3), (16, 64, 4, 3), (16, 64, 4, 4), (16, 128, 4, 3), (16, 32, 4, 4), (16, 128, 8, 3))),
    (32, ((32, 64, 4, 3), (32, 128, 4, 3), (32, 64, 8, 3), (16, 64, 4, 3))),
    (512, ((64, 64, 4, 3), (64, 128, 8, 3), (32, 64, 8, 3), (16, 64, 4, 3))),
)
#: Columns that are contracted at a time, at most.
_STEP = 128
#: Architectures without tensor cores that have to work for four warps at once.
_ONE_WARP = ("80", "86", "89", "90", "120", "121")
#: Warps that a multiprocessor holds at once, with the registers that the kernel takes.
_WARPS_PER_MULTIPROCESSOR = 12
_INTERPRETED_CONFIGS = named(("BM", "BN"), [(16, 32, 4, 1)])


def grouped_matmul_packed(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    length: int,
    macro: torch.Tensor | None = None,
    macro_block: int | None = None,
    macro_search: str = "static",
    residual_codes: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    outlier_fallback: float | None = None,
) -> torch.Tensor:
    """Products of each expert's rows with its packed weight: ``x_e Q(W_e)^T + b_e``, summed in float32.

    With few rows per expert codes are decoded on the way into the product (bfloat16, K a multiple of 8, macro blocks
    shorter than a row), and the values of macro blocks are not rounded to bfloat16 before it; otherwise all weights are
    dequantized first, which takes memory for ``[E, N, K]`` in the dtype of ``x``. Where tiles are fewer than what the
    GPU holds, several programs share each along K; sums are the same at every call.

    Args:
        x: ``[S, K]`` bfloat16, float16 or float32, rows sorted by expert.
        codes, scale, macro, residual_codes, residual_scale: as [`mxfp4_kernels.quantize`] returns them for a weight
            ``[E, N, K]``.
        offsets: as in [`mxfp4_kernels.grouped_matmul`].
        bias: ``[E, N]`` in the dtype of ``x``, or `None`.
        length: K.
        macro_block, macro_search, outlier_fallback: as given to [`mxfp4_kernels.quantize`].

    Returns:
        ``[S, N]``, contiguous, in the dtype of ``x``.

    Raises:
        TypeError: another dtype, or dtypes that differ.
        ValueError: shapes or options that do not fit together, or tensors on several devices, or not on a GPU.
    """
    check_operands("grouped_matmul_packed", x=x, bias=bias)
    check_shape("x", x, (None, length))
    check_shape("codes", codes, (None, None, None))
    check_packed(
        codes,
        scale,
        length=length,
        macro=macro,
        macro_block=macro_block,
        macro_search=macro_search,
        residual_codes=residual_codes,
        residual_scale=residual_scale,
        outlier_fallback=outlier_fallback,
    )
    n_experts, n = codes.shape[:2]
    check_offsets(offsets, x, n_experts)
    if bias is not None:
        check_shape("bias", bias, (n_experts, n))
    packed = Packed(codes, scale, macro, residual_codes, residual_scale)
    for name, part in packed._asdict().items():
        if part is not None and part.device != x.device:
            raise ValueError(f"grouped_matmul_packed: {name} is on {part.device} but x is on {x.device}")
    scheme = Scheme("rceil", macro_block, macro_search, outlier_fallback)
    out = x.new_empty(x.shape[0], n)
    if out.numel() == 0:
        return out
    if macro_block == "row" or decodes_first(x, n_experts):
        return grouped_matmul(x, dequantize(packed, length, scheme, x.dtype), offsets, bias)
    _multiply(x, packed, offsets, bias, out, scheme)
    return out


def decodes_first(x: torch.Tensor, n_experts: int) -> bool:
    """Whether weights are dequantized before the product and not on the way into it."""
    many = not INTERPRETED and rows_class(x.shape[0], n_experts) >= DEQUANTIZED_FROM
    return many or x.dtype != torch.bfloat16 or x.shape[1] % 8 != 0


def _multiply(
    x: torch.Tensor, packed: Packed, offsets: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, scheme: Scheme
) -> None:
    (_, k), (n_experts, n) = x.shape, packed.codes.shape[:2]
    x = x.detach() if x.stride(1) == 1 else x.detach().contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    codes, scale, macro, residual_codes, residual_scale = packed.contiguous()
    parts = PackedPointers(words(codes), scale, macro, words(residual_codes), residual_scale)
    of_scheme = scheme_constants(x.dtype, scheme)
    step = min(_STEP, of_scheme.MACRO) if of_scheme.SEARCH else _STEP
    # For so few rows there is a slot for each.
    shape = ExpertsShape(n, k, triton.next_power_of_2(n_experts), EACH_ROW=x.shape[0] <= n_experts)

    def run(config: Config, target: torch.Tensor) -> None:
        tiles = tile_slots(x.shape[0], n_experts, config["BM"]) * triton.cdiv(n, config["BN"])
        weight = DecodeConstants(
            MACRO=of_scheme.MACRO,
            SEARCH=of_scheme.SEARCH,
            CUDA=x.device.type == "cuda" and torch.version.hip is None,
            INTERPRETED=INTERPRETED,
            EVEN=k % step == 0,
            ORDER=0 if INTERPRETED else order_of(arch_of(x.device), config["num_warps"]),
        )
        steps = triton.cdiv(k, step)
        count, warps = _multiprocessors(x.device), config["num_warps"]
        of_split = split_steps(steps, tiles, _WARPS_PER_MULTIPROCESSOR * count // warps, count, warps)
        splits, partial = triton.cdiv(steps, of_split), None
        if splits > 1:
            sums = torch.empty((splits, x.shape[0], n), dtype=torch.float32, device=x.device)
            partial = Partial(sums, zeros_of_a_launch(tiles, x.device))
        pointers = (as_stored(x), parts, as_stored(bias), as_stored(target), partial, offsets)
        arguments = (*pointers, x.shape[0], n_experts, of_split, splits, x.stride(0), alpha(scheme))
        constants = {"SHAPE": shape, "WEIGHT": weight}
        launch_config(grouped_packed_kernel, (tiles, splits), x.device, arguments, constants, {**config, "BK": step})

    rows = rows_class(x.shape[0], n_experts)
    if x.shape[0] <= _FEW * min(x.shape[0], n_experts):
        rows = _FEW
    has_fallback = scheme.outlier_fallback is not None
    key = (rows, n, k, scheme.macro_block, has_fallback)
    configs = _INTERPRETED_CONFIGS
    if not INTERPRETED:
        configs = configs_within(shared_memory(x.device), rows, has_fallback, arch_of(x.device))
    launch_tuned("grouped_matmul_packed", key, configs, run, out)


@functools.lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    """Of a device; interpreted, so many as an H100 has."""
    return 132 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=256)
def configs_within(limit: int, rows: int, has_fallback: bool, arch: str = "90") -> Sequence[Config]:
    """Tiles for so many rows per expert, on a GPU of an architecture with so many bytes of shared memory for a program,
    the likeliest first."""
    is_hip = torch.version.hip is not None
    found = named(("BM", "BN"), next(tiles for most, tiles in _TILES if rows <= most))
    found = [c for c in found if c["num_warps"] >= 4 or IN_REGISTERS and arch in _ONE_WARP]
    if arch.startswith("gfx"):
        # AMD's smallest tile of the right operand has 16 columns.
        found = [c for c in found if c["BM"] >= 16]
    for config in found:
        config["num_stages"] = 2 if is_hip else config["num_stages"]
    found = [config for config in found if in_registers(config, _STEP, arch, has_fallback=has_fallback)]
    return fitting_packed(found, limit, _STEP, 2, has_fallback)


def words(codes: torch.Tensor | None) -> torch.Tensor | None:
    """Contiguous codes as int32 words of eight."""
    if codes is None:
        return None
    codes = codes.detach()
    if codes.data_ptr() % 16:
        codes = codes.clone()
    return codes.view(torch.int32)
