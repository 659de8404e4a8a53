# SPDX-License-Identifier: Apache-2.0
"""Products of a few bfloat16 rows with a packed weight, or with those of experts, whose codes are read once.

What it computes: ``x Q(W)^T + bias``. Every product is exact and summed in float32: scales and block mantissas are
exact in the bfloat16 operand, macro factors and the weight of the residual multiply float32 sums.

Tile: the weight is the left operand, whose ``BN`` rows are decoded in the registers that the tensor cores read, for
``BM`` rows of ``x``, ``BK`` columns at a time. Rows of experts are sorted by expert; tiles never straddle experts.

Launch: the first axis of the grid runs over tiles; where these are fewer than the GPU holds, several programs share
each along K (second axis). How many tiles experts have is known on the device alone, so the grid has the most that
there can be, and programs without a tile leave at once: nothing is read back, and one CUDA graph serves every routing.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import blocks
from ..common.arguments import PackedPointers, Partial, WeightConstants
from ..common.blocks import as_stored, to_float
from ..common.packed import Packed
from ..common.scheme import BLOCK, Scheme
from ..common.tensors import INTERPRETED, check_device, output_bits
from . import tile
from .config import STEP, Config, gpu_of, split_steps, tile_config
from .counters import Counters
from .tile import arrives_last, decoded_product, inverse_of_macro, load_inside, sum_of_splits


#: Mean rows per expert up to which most experts have 8 at most.
_FEW = 4
#: Bytes that the address of codes is a multiple of, so that a thread loads several words at once.
_ALIGNMENT = 16


@triton.jit
def _find_tile(offsets_ptr, slot, n_rows, n_experts, WEIGHT: tl.constexpr):
    """Expert, first row and end of the expert's rows of tile ``slot``; the expert is ``n_experts`` where there are
    fewer tiles."""
    BM: tl.constexpr = WEIGHT.BM
    if WEIGHT.EXPERTS == 0:
        expert, first, end = slot * 0, slot * BM, n_rows
    else:
        ids = tl.arange(0, WEIGHT.EXPERTS)
        # Past the last expert the counts are zero.
        ends = tl.load(offsets_ptr + tl.minimum(ids, n_experts - 1))
        starts = tl.load(offsets_ptr + tl.minimum(ids, n_experts) - 1, mask=ids > 0, other=0)
        tiles = (ends - starts + BM - 1) // BM
        done = tl.cumsum(tiles, 0) <= slot
        expert = tl.minimum(tl.sum(done.to(tl.int32), 0), n_experts)
        before = tl.sum(tl.where(done, tiles, 0), 0)
        own = tl.minimum(expert, n_experts - 1)
        start = tl.load(offsets_ptr + own - 1, mask=own > 0, other=0)
        first, end = start + (slot - before) * BM, tl.load(offsets_ptr + own)
    return expert, first, end


@triton.jit
def _accumulate(
    x_ptr, packed, places, rows, first, last, x_row_stride, alpha, WIDE: tl.constexpr, WEIGHT: tl.constexpr
):
    """Return sums ``[BN, BM]`` over columns ``first..last``, and the largest scale byte met: above `NARROW_BYTE`, they
    are right with ``WIDE`` alone. ``places`` are rows of the weights of all experts."""
    K: tl.constexpr = WEIGHT.K
    BM: tl.constexpr = WEIGHT.BM
    BN: tl.constexpr = WEIGHT.BN
    BK: tl.constexpr = WEIGHT.BK
    EVEN: tl.constexpr = K % BK == 0
    blocks_per_row: tl.constexpr = (K + 31) // 32
    macros_per_row: tl.constexpr = (K + WEIGHT.MACRO - 1) // WEIGHT.MACRO
    words_at, blocks_at, ks = tl.arange(0, BK // 8), tl.arange(0, BK // 32), tl.arange(0, BK)
    x_tile = x_ptr + rows.to(tl.int64)[:, None] * x_row_stride + ks[None, :]
    words_tile = places[:, None] * (K // 8) + words_at[None, :]
    blocks_tile = places[:, None] * blocks_per_row + blocks_at[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    largest = tl.zeros((BN, BK // 32), tl.int32)
    LAST: tl.constexpr = (K - 1) // BK * BK
    m8 = tl.zeros((BN,), tl.int32)
    if WEIGHT.SEARCH != blocks.NO_MACRO:
        m8 = tl.load(packed.macro + places * macros_per_row + first // WEIGHT.MACRO).to(tl.int32)
    for k in range(first, last, BK):
        has_words = (words_at < K // 8 - k // 8)[None, :]
        has_blocks = (blocks_at < blocks_per_row - k // 32)[None, :]
        x = load_inside(x_tile + k, (ks < K - k)[None, :], EVEN)
        byte = load_inside(packed.scale + blocks_tile + k // 32, has_blocks, EVEN).to(tl.int32)
        mantissa = byte
        if WEIGHT.SEARCH == blocks.BLOCK_MANTISSAS:
            # Two bits of the byte for each block, from the place of the first block's in both halves.
            mantissa = (m8 * 0x200020)[:, None] >> (2 * blocks_at)[None, :]
        words = load_inside(packed.codes + words_tile + k // 8, has_words, EVEN)
        largest = tl.maximum(largest, byte)
        part = decoded_product(x, words, byte, mantissa, WIDE, WEIGHT)
        if packed.residual_codes is not None:
            words = load_inside(packed.residual_codes + words_tile + k // 8, has_words, EVEN)
            byte = load_inside(packed.residual_scale + blocks_tile + k // 32, has_blocks, EVEN).to(tl.int32)
            largest = tl.maximum(largest, byte)
            part += alpha * decoded_product(x, words, byte, mantissa, WIDE, WEIGHT)
        if WEIGHT.SEARCH != blocks.NO_MACRO and WEIGHT.SEARCH != blocks.BLOCK_MANTISSAS:
            part *= inverse_of_macro(m8, WEIGHT)[:, None]
        total += part
        if WEIGHT.SEARCH != blocks.NO_MACRO:
            # Ahead of its use, so that nothing waits for it.
            following = tl.minimum(k + BK, LAST)
            m8 = tl.load(packed.macro + places * macros_per_row + following // WEIGHT.MACRO).to(tl.int32)
    return total, tl.max(tl.max(largest, axis=1), axis=0)


@triton.jit
def _store(out_ptr, bias_ptr, total, at, places, columns, inside, WEIGHT: tl.constexpr):
    """Store sums ``[BN, BM]``, and the bias, at their places ``at`` in ``out``."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + places, mask=columns < WEIGHT.N, other=0)
        total += to_float(bias, WEIGHT.INTERPRETED)[:, None]
    tl.store(out_ptr + at, as_stored(total, out_ptr, WEIGHT.INTERPRETED), mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_experts", "split_steps", "n_splits"])
def decode_kernel(
    x_ptr,
    packed,
    bias_ptr,
    out_ptr,
    partial,
    offsets_ptr,
    n_rows,
    n_experts,
    split_steps,
    n_splits,
    x_row_stride,
    alpha,
    WEIGHT: tl.constexpr,
):
    """``out[rows, N] = x[rows, K] weight[e, N, K]^T + bias[e, N]`` in bfloat16, with codes as int32 words: K is a
    multiple of 8. ``x`` has unit stride along K. ``BK`` is a multiple of 32 and a part of a macro block (all of one, of
    block mantissas).

    With several splits of ``split_steps`` times ``BK`` columns (``partial``) the last program of a tile to arrive adds
    up all of them; ``partial.sums`` is ``[n_splits, n_rows, N]`` float32, ``arrived`` one zero for each tile, and zero
    again afterwards."""
    N: tl.constexpr = WEIGHT.N
    BM: tl.constexpr = WEIGHT.BM
    BN: tl.constexpr = WEIGHT.BN
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    pid = tl.program_id(0)
    expert, first, end = _find_tile(offsets_ptr, pid // n_tiles, n_rows, n_experts, WEIGHT)
    if expert >= n_experts:
        return
    rows = first + tl.arange(0, BM)
    columns = (pid % n_tiles) * BN + tl.arange(0, BN)
    # Rows of the weights of all experts. What lies outside of the tile is computed from the last row, and not stored.
    places = expert.to(tl.int64) * N + tl.minimum(columns, N - 1)
    inner_rows = tl.minimum(rows, end - 1)
    first = 0
    last = WEIGHT.K
    if partial is not None:
        first = tl.program_id(1) * (split_steps * WEIGHT.BK)
        last = tl.minimum(first + split_steps * WEIGHT.BK, WEIGHT.K)
    total, largest = _accumulate(x_ptr, packed, places, inner_rows, first, last, x_row_stride, alpha, False, WEIGHT)
    if largest > tile.NARROW_BYTE:
        # Rare: a block with magnitudes of 12 and more, or NaN.
        total, _ = _accumulate(x_ptr, packed, places, inner_rows, first, last, x_row_stride, alpha, True, WEIGHT)
    inside = (columns < N)[:, None] & (rows < end)[None, :]
    at = rows.to(tl.int64)[None, :] * N + columns[:, None]
    if partial is None:
        _store(out_ptr, bias_ptr, total, at, places, columns, inside, WEIGHT)
    else:
        size = n_rows.to(tl.int64) * N
        tl.store(partial.sums + tl.program_id(1) * size + at, total, mask=inside)
        if arrives_last(partial.arrived + pid, n_splits, columns, WEIGHT):
            total = sum_of_splits(partial.sums + at, inside, size, n_splits)
            _store(out_ptr, bias_ptr, total, at, places, columns, inside, WEIGHT)
            tl.store(partial.arrived + pid, 0)


def unsupported_weight(dtype: torch.dtype, length: int) -> str | None:
    """Return why [`linear_w4a16`] does not multiply rows of a dtype with a packed weight ``[..., N, length]``; `None`
    when it does. Other products are ordinary ones with what `dequantize` returns."""
    if dtype != torch.bfloat16:
        return f"products with packed weights are in bfloat16, not {dtype}"
    if length % 8 or length == 0:
        return f"rows of {length} codes do not fill words of 32 bits"
    return None


def linear_w4a16(
    x: torch.Tensor,
    packed: Packed,
    length: int,
    scheme: Scheme,
    bias: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x Q(W)^T + bias`` for a packed weight ``[N, K]``, or for the rows of each expert of weights
    ``[E, N, K]``. No gradient flows, and nothing waits for the GPU, so that a CUDA graph can hold it.

    For few rows: from about 256 (128 for each expert) on, an ordinary product with what `dequantize` returns is faster.
    Sums are the same at every call.

    Args:
        x: bfloat16 ``[..., K]`` on a GPU; with ``offsets`` ``[S, K]``, rows sorted by expert.
        packed: codes and scales as `quantize` returns them.
        length: K.
        scheme: what the weight was quantized with.
        bias: bfloat16 ``[N]`` or ``[E, N]``, or `None`.
        offsets: int32 ``[E]`` on the device of ``x``: where the rows of each expert end, in ascending order. Rows from
            the last one on belong to no expert; what they become is not defined.

    Returns:
        bfloat16 ``[..., N]``, contiguous.

    Raises:
        TypeError: not tensors, or other dtypes.
        ValueError: [`unsupported_weight`] gives a reason, shapes that do not fit together, tensors on several devices,
            or on a CPU where kernels are not interpreted.
    """
    _check(x, packed, length, scheme, bias, offsets)
    n_experts = None
    if offsets is not None:
        n_experts = offsets.shape[0]
    product = _product_of(packed.codes.shape[-2], length, scheme, x.device, n_experts)
    if bias is not None:
        bias = bias.detach().contiguous()
    return product(x.detach(), packed.pointers(), bias, offsets)


class Launch(NamedTuple):
    """A launch of [`decode_kernel`] for some number of rows.

    Attributes:
        grid: tiles, and the programs that share each of them along K.
        split_steps: steps of ``BK`` columns of one such program.
        options: compile-time constants and options of the compiler.
    """

    grid: tuple[int, int]
    split_steps: int
    options: dict[str, Any]


class PackedProduct:
    """Multiply rows with packed weights of one shape and scheme on one device, as [`linear_w4a16`] does, unchecked.

    It holds no weight. Launches are planned once for each number of rows. A layer has one of its own, because launches
    of different layers may run at the same time, and those of one product share counters.

    Args:
        n: rows of a weight.
        k: its columns.
        scheme: what weights are quantized with.
        device: where they are.
        n_experts: experts of a weight ``[E, N, K]``; `None` for a weight ``[N, K]``.
    """

    def __init__(self, n: int, k: int, scheme: Scheme, device: torch.device, n_experts: int | None = None):
        self.n = n
        self.k = k
        self.n_experts = n_experts
        self.scheme = scheme
        self.device = device
        self._alpha = scheme.alpha
        self._has_neighbours = device.type == "cuda" and torch.cuda.device_count() > 1
        self._launches: dict[int, Launch] = {}
        self._counters = Counters()

    def __call__(
        self,
        x: torch.Tensor,
        packed: PackedPointers | Packed,
        bias: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the product. Arguments are those of [`linear_w4a16`], on the device, of the right shapes and dtypes;
        all but ``x`` are contiguous."""
        if self._has_neighbours and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self(x, packed, bias, offsets)
        out = x.new_empty(*x.shape[:-1], self.n)
        if not out.numel():
            return out
        n_rows = out.numel() // self.n
        if x.dim() != 2:
            x = x.reshape(n_rows, self.k)
        if x.stride(1) != 1:
            x = x.contiguous()
        launch = self._launches.get(n_rows)
        if launch is None:
            launch = self._launches[n_rows] = self._plan(n_rows)
        codes, scale, macro, residual_codes, residual_scale = packed
        if codes.data_ptr() % _ALIGNMENT:
            codes = codes.clone()
        words = codes.view(torch.int32)
        residual_words = None
        if residual_codes is not None:
            if residual_codes.data_ptr() % _ALIGNMENT:
                residual_codes = residual_codes.clone()
            residual_words = residual_codes.view(torch.int32)
        tiles, splits = launch.grid
        partial = None
        if splits > 1:
            sums = torch.empty((splits, n_rows, self.n), dtype=torch.float32, device=self.device)
            partial = Partial(sums, self._counters.zeros(tiles, self.device))
        result = out
        if INTERPRETED:
            x, bias, out = output_bits(x), output_bits(bias), output_bits(out)
        # Not `decode_kernel[grid](...)`, which makes a function for each launch.
        decode_kernel.run(
            x,
            PackedPointers(words, scale, macro, residual_words, residual_scale),
            bias,
            out,
            partial,
            offsets,
            n_rows,
            self.n_experts or 1,
            launch.split_steps,
            splits,
            x.stride(0),
            self._alpha,
            grid=launch.grid,
            warmup=False,
            **launch.options,
        )
        return result

    def _plan(self, n_rows: int) -> Launch:
        """Choose the tile for this many rows, and how many programs share one."""
        gpu = gpu_of(self.device)
        rows = n_rows
        n_experts = self.n_experts
        if n_experts is not None:
            # The mean of the experts that can have any.
            mean = n_rows / max(1, min(n_rows, n_experts))
            rows = 8 if mean <= _FEW else max(16, int(mean))
        config = tile_config(rows, self.scheme.outlier_fallback is not None, gpu)
        if INTERPRETED:
            config = config._replace(BN=32)  # small, so that tests of several tiles are
        if n_experts is None:
            slots = triton.cdiv(n_rows, config.BM)
        else:
            # Whatever the counts: at most one tile of each expert that has rows is not full, and each has a row.
            slots = min(n_rows // config.BM + min(n_rows, n_experts), n_rows)
        weight = weight_constants(self.n, self.k, n_experts or 0, self.scheme, config, self.device.type == "cuda")
        tiles = slots * triton.cdiv(self.n, config.BN)
        steps = triton.cdiv(self.k, weight.BK)
        of_split = split_steps(steps, tiles, config.num_warps, gpu.multiprocessors)
        options = {"WEIGHT": weight, "num_warps": config.num_warps, "num_stages": config.num_stages}
        return Launch((tiles, triton.cdiv(steps, of_split)), of_split, options)


#: For [`linear_w4a16`], whose callers have no product of their own.
_product_of = functools.lru_cache(maxsize=256)(PackedProduct)


def weight_constants(n: int, k: int, n_experts: int, scheme: Scheme, config: Config, on_gpu: bool) -> WeightConstants:
    """Return the compile-time arguments of [`decode_kernel`]."""
    return WeightConstants(
        N=n,
        K=k,
        EXPERTS=triton.next_power_of_2(n_experts) if n_experts else 0,
        MACRO=scheme.macro_block or BLOCK,
        SEARCH=scheme.search,
        BM=config.BM,
        BN=config.BN,
        BK=min(STEP, scheme.macro_block or STEP),
        CUDA=on_gpu and torch.version.hip is None,
        INTERPRETED=INTERPRETED,
    )


def _check(
    x: torch.Tensor,
    packed: Packed,
    length: int,
    scheme: Scheme,
    bias: torch.Tensor | None,
    offsets: torch.Tensor | None,
) -> None:
    """Raise as [`linear_w4a16`] says."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"linear_w4a16 needs a tensor, got {type(x).__name__}")
    if x.dtype != torch.bfloat16:
        raise TypeError(unsupported_weight(x.dtype, length))
    if (reason := unsupported_weight(x.dtype, length)) is not None:
        raise ValueError(reason)
    packed.check(length, scheme)
    axes = 2 if offsets is None else 3
    if packed.codes.dim() != axes:
        raise ValueError(f"codes need {axes} axes, got the shape {list(packed.codes.shape)}")
    if x.dim() == 0 or x.shape[-1] != length or (offsets is not None and x.dim() != 2):
        raise ValueError(f"x has the shape {list(x.shape)}; its last axis must be {length}, that of the weight")
    shape = packed.codes.shape[:-1]
    if bias is not None and bias.dtype != x.dtype:
        raise TypeError(f"the bias is {bias.dtype}, x is {x.dtype}; convert one of them")
    if bias is not None and bias.shape != shape:
        raise ValueError(f"the bias has the shape {list(bias.shape)}; the weight needs {list(shape)}")
    if offsets is not None and offsets.dtype != torch.int32:
        raise TypeError(f"offsets must be int32, got {offsets.dtype}; use counts.cumsum(0, dtype=torch.int32)")
    if offsets is not None and (offsets.shape != shape[:1] or not offsets.is_contiguous()):
        raise ValueError(f"offsets must be contiguous, of the shape [{shape[0]}], got {list(offsets.shape)}")
    for name, tensor in {"the weight": packed.codes, "the bias": bias, "offsets": offsets}.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} and x are on several devices: {tensor.device}, {x.device}; move them to one")
    check_device(x)
