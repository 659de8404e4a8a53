# SPDX-License-Identifier: Apache-2.0
"""Linear layers on packed weights: checks, and the launch of the fused kernel or the dequantization in its place."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ..common import blocks
from ..common.arguments import DecodeConstants, PackedPointers, Partial
from ..common.checks import check_packed
from ..common.counters import zeros_of_a_launch
from ..common.plan import INTERPRETED, Packed, Scheme, alpha, bits
from ..quantization.launch import dequantize
from .configs import Config, arch_of, fitting_packed, launch_config, launch_tuned, shared_memory
from .decode_kernel import linear_kernel
from .decode_plan import PIECES, LinearPlan, order_of, plan_linear_w4a16, steps_of, token_class


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SEARCH = {name: getattr(blocks, name.upper()).value for name in ("no_macro", "static", "dynamic", "blockwise")}
#: Elements between rows from which on offsets inside of a tile could leave 32 bits.
_FARTHEST_ROWS = 1 << 24


def linear_w4a16(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    length: int,
    macro: torch.Tensor | None = None,
    macro_block: int | None = None,
    macro_search: str = "static",
    residual_codes: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    outlier_fallback: float | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x Q(W)^T + bias`` for a packed weight ``[N, K]``, as [`mxfp4_kernels.quantize`] returns it. No gradient flows.

    Few rows of ``x`` are multiplied with the codes as they are read; many with a dequantized copy
    ([`mxfp4_kernels.plan_linear_w4a16`] says which). On the codes every product is exact and summed in float32, also
    for macro factors and residuals, which a 16-bit copy rounds; sums are the same at every call. Nothing waits for the
    GPU, so that a CUDA graph can hold it.

    Args:
        x: bfloat16, float16 or float32 ``[..., K]`` on a GPU.
        codes, scale, macro, residual_codes, residual_scale: uint8 tensors of two axes on the same GPU.
        length: K.
        macro_block, macro_search, outlier_fallback: what the weight was quantized with.
        bias: ``[N]`` in floating point, or `None`.
        out: where the result goes: contiguous ``[..., N]`` in the dtype of ``x``.

    Returns:
        ``[..., N]`` in the dtype of ``x``.

    Raises:
        TypeError: another dtype of ``x`` or ``out``, a bias that is not floating-point, or parts that are not uint8.
        ValueError: shapes that do not fit together, options without their tensors or the reverse, tensors of several
            devices, or on a CPU where kernels are not interpreted.
    """
    packed = Packed(codes, scale, macro, residual_codes, residual_scale)
    scheme = Scheme("rceil", macro_block, macro_search, outlier_fallback)
    _check(x, packed, length, scheme, bias, out)
    n_rows = codes.shape[0]
    x, bias = x.detach(), None if bias is None else bias.detach().contiguous()
    tokens = x.reshape(-1, length) if length else x.new_empty(x.numel(), 0)
    n_tokens = x.shape[:-1].numel()
    result = x.new_empty(*x.shape[:-1], n_rows) if out is None else out
    if n_tokens == 0 or n_rows == 0:
        return result
    if length == 0:
        return result.copy_(0 if bias is None else bias.expand_as(result))
    plan = _plan_for(n_tokens, n_rows, length, scheme, x)
    if plan.route == "fused" and _in_words(codes) and (residual_codes is None or _in_words(residual_codes)):
        _launch_fused(tokens, packed, scheme, bias, result.view(n_tokens, n_rows), plan)
        return result
    weight = dequantize(packed, length, scheme, x.dtype)
    product = F.linear(tokens, weight, None if bias is None else bias.to(x.dtype)).view(result.shape)
    return product if out is None else out.copy_(product)


def _launch_fused(
    x: torch.Tensor,
    packed: Packed,
    scheme: Scheme,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    plan: LinearPlan,
) -> None:
    """``out[M, N]`` (contiguous)."""
    (n_tokens, n_cols), n_rows = x.shape, out.shape[1]
    if n_cols > 1 and x.stride(1) != 1 or x.stride(0) > _FARTHEST_ROWS:
        x = x.contiguous()
    codes, scale, macro, residual_codes, residual_scale = packed.contiguous()
    parts = PackedPointers(_words(codes), scale, macro, _words(residual_codes), residual_scale)
    natural = n_tokens > 16
    # The interpreter does not round to bfloat16.
    target = out if not INTERPRETED else torch.empty(out.shape, dtype=torch.float32, device=out.device)

    def run(config: Config, target: torch.Tensor) -> None:
        splits = -(-steps_of(n_cols, config) // config["split_steps"])
        tiles = (-(-n_rows // config["BN"]), -(-n_tokens // config["BM"]))
        partial = None
        if splits > 1:
            sums = torch.empty((splits, n_tokens, n_rows), dtype=torch.float32, device=x.device)
            partial = Partial(sums, zeros_of_a_launch(tiles[0] * tiles[1], x.device))
        sizes = (n_tokens, n_rows, n_cols, x.stride(0), config["split_steps"], splits, alpha(scheme))
        # As bits, which the interpreter needs.
        arguments = (bits(x), parts, bias, target, partial, *sizes)
        order = 0 if INTERPRETED else order_of(arch_of(x.device), config["num_warps"])
        weight = constants(x.dtype, scheme, n_cols, config["BK"], natural, order)
        launch_config(linear_kernel, (tiles[0], splits, tiles[1]), x.device, arguments, {"WEIGHT": weight}, config)

    weight = (n_rows, n_cols, scheme.macro_block, scheme.macro_search, scheme.outlier_fallback is not None)
    key = (token_class(n_tokens), *weight, str(x.dtype), bias is not None)
    launch_tuned("linear_w4a16", key, plan.configs, run, target)
    if target is not out:
        out.copy_(target)


def constants(
    dtype: torch.dtype, scheme: Scheme, n_cols: int, step: int, natural: bool, order: int = 0
) -> DecodeConstants:
    """Compile-time arguments of the kernel for steps of so many columns."""
    return DecodeConstants(
        MACRO=scheme.macro_block or step,
        SEARCH=_SEARCH[scheme.macro_search if scheme.macro_block else "no_macro"],
        CUDA=torch.version.hip is None and not INTERPRETED,
        INTERPRETED=INTERPRETED,
        NATURAL=natural,
        PIECES=PIECES[str(dtype).removeprefix("torch.")],
        EVEN=n_cols % step == 0,
        COL_MULTIPLE=min(n_cols & -n_cols, 512),
        ORDER=order,
    )


def _plan_for(n_tokens: int, n_rows: int, n_cols: int, scheme: Scheme, x: torch.Tensor) -> LinearPlan:
    gpu = ("90", None, None) if x.device.type != "cuda" else _gpu(x.device)
    return _plan_cached(n_tokens, n_rows, n_cols, scheme, x.dtype, *gpu)


@functools.lru_cache(maxsize=4096)
def _plan_cached(
    n_tokens: int,
    n_rows: int,
    n_cols: int,
    scheme: Scheme,
    dtype: torch.dtype,
    arch: str,
    multiprocessors: int | None,
    limit: int | None,
) -> LinearPlan:
    """The plan, of configs that a GPU with so many bytes of shared memory for a program can run (`None`: of all)."""
    plan = plan_linear_w4a16(
        n_tokens,
        n_rows,
        n_cols,
        arch,
        macro_block=scheme.macro_block,
        macro_search=scheme.macro_search,
        outlier_fallback=scheme.outlier_fallback,
        dtype=str(dtype).removeprefix("torch."),
        multiprocessors=multiprocessors,
    )
    if limit is None or plan.route != "fused":
        return plan
    step = plan.configs[0]["BK"]
    fits = fitting_packed(plan.configs, limit, step, dtype.itemsize, scheme.outlier_fallback is not None)
    return plan._replace(configs=tuple(fits))


@functools.lru_cache(maxsize=64)
def _gpu(device: torch.device) -> tuple[str, int, int | None]:
    """Architecture, multiprocessors, and bytes of shared memory where configs may need too many."""
    properties = torch.cuda.get_device_properties(device)
    # AMD's pipeline is in registers alone.
    limit = None if torch.version.hip else shared_memory(device)
    return arch_of(device), properties.multi_processor_count, limit


def _in_words(codes: torch.Tensor) -> bool:
    return codes.storage_offset() % 4 == 0 or not codes.is_contiguous()


def _words(codes: torch.Tensor | None) -> torch.Tensor | None:
    return None if codes is None else codes.view(torch.int32)


def _check(
    x: torch.Tensor,
    packed: Packed,
    length: int,
    scheme: Scheme,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Raise as [`linear_w4a16`] says."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"linear_w4a16 needs a tensor, got {type(x).__name__}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"x is {x.dtype}; the kernel takes {', '.join(map(str, _DTYPES))}")
    if x.dim() == 0 or x.shape[-1] != length:
        raise ValueError(f"x has the shape {list(x.shape)}; its last axis must be {length}, that of the weight")
    if packed.codes.dim() != 2:
        raise ValueError(f"codes must be those of a matrix, got the shape {list(packed.codes.shape)}")
    if scheme.macro_block == "row":
        raise ValueError("macro_block='row' is not covered by linear_w4a16; multiply with what dequantize returns")
    check_packed(
        **packed._asdict(),
        length=length,
        macro_block=scheme.macro_block,
        macro_search=scheme.macro_search,
        outlier_fallback=scheme.outlier_fallback,
    )
    n_rows = packed.codes.shape[0]
    if bias is not None:
        if not bias.is_floating_point():
            raise TypeError(f"the bias must be floating-point, got {bias.dtype}")
        if tuple(bias.shape) != (n_rows,):
            raise ValueError(f"the bias has the shape {list(bias.shape)}; the weight has {n_rows} rows")
    if out is not None:
        if out.dtype != x.dtype:
            raise TypeError(f"out is {out.dtype}, x is {x.dtype}; they must be the same")
        if tuple(out.shape) != (*x.shape[:-1], n_rows) or not out.is_contiguous():
            raise ValueError(f"out must be contiguous {[*x.shape[:-1], n_rows]}, got {list(out.shape)}")
    devices = {x.device}
    for tensor in (*packed, bias, out):
        if tensor is not None:
            devices.add(tensor.device)
    if len(devices) > 1:
        raise ValueError(f"tensors are on several devices: {', '.join(sorted(map(str, devices)))}; move them to one")
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError("the Triton kernel needs GPU tensors, got some on the CPU")
