# SPDX-License-Identifier: Apache-2.0
"""What to do to blocks, packed tensors, what the kernels support of both, and where they run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from ..scale_rules import SCALE_RULES, ScaleRule
from . import blocks
from .arguments import PackedPointers, RowBytes, SchemeConstants, SideConstants


#: Whether TRITON_INTERPRET=1 was set when the kernels were defined, which is what counts.
INTERPRETED = not isinstance(blocks.clamp, triton.JITFunction)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 32
_SEARCH = {name: getattr(blocks, name.upper()).value for name in ("static", "dynamic", "block_mantissas")}
_SEARCH["block_mantissas_fp8"] = _SEARCH["block_mantissas"]
_ROTATIONS = (16, 32, 64, 128)


def unsupported_dtype(dtype: object) -> str | None:
    """Return why the kernels do not read and write a dtype; `None` when they do."""
    if dtype in DTYPES:
        return None
    return f"{dtype} is not supported by the Triton kernels; use {', '.join(map(str, DTYPES))}"


def unsupported_scheme(
    scale_rule: Any, macro_block: Any, macro_search: Any, outlier_fallback: Any, block_rows: Any = 1
) -> str | None:
    """Return why the kernels do not have a scheme, given the fields of [`Scheme`]; `None` when they do."""
    for name, value, known in (
        ("scale_rule", scale_rule, SCALE_RULES),
        ("macro_block", macro_block, (None, 32, 64, 128, 256)),
        ("macro_search", macro_search, tuple(_SEARCH) if macro_block else (macro_search,)),
        ("block_rows", block_rows, (1, 32)),
    ):
        if isinstance(value, bool) or value not in known:
            return f"{name}={value!r} is not supported by the Triton kernels; use {', '.join(map(str, known))}"
    if macro_block not in (None, 128) and _SEARCH[macro_search] == blocks.BLOCK_MANTISSAS.value:
        return f"macro_search={macro_search!r} needs macro_block=128, got macro_block={macro_block!r}"
    if outlier_fallback is None:
        return None
    is_number = isinstance(outlier_fallback, (int, float)) and not isinstance(outlier_fallback, bool)
    if not is_number or not math.isfinite(outlier_fallback) or not 0 < outlier_fallback <= 1:
        return f"outlier_fallback={outlier_fallback!r} must be None or a number in (0, 1]"
    return None


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How blocks of 32 elements are quantized. Raises `ValueError` for what the kernels do not have.

    Attributes:
        scale_rule: the name of a [`ScaleRule`].
        macro_block: 32, 64, 128 or 256 elements that share a macro byte, or `None`.
        macro_search: ``"static"`` factors, ``"dynamic"`` ones (the best of 16 by squared error), or
            ``"block_mantissas"``: two mantissa bits for each block's scale (``macro_block`` 128), or
            ``"block_mantissas_fp8"``: the same without 1.75, so that values are E4M3 numbers times powers of two.
            Without macro blocks it has no effect.
        outlier_fallback: weight in (0, 1] of the quantized residual, or `None` for one pass only.
        block_rows: rows that share blocks: 1, or 32 for tiles of 32 x 32 over the last two axes.
    """

    scale_rule: str = "rceil"
    macro_block: int | None = None
    macro_search: str = "static"
    outlier_fallback: float | None = None
    block_rows: int = 1

    def __post_init__(self):
        if (reason := unsupported_scheme(*dataclasses.astuple(self))) is not None:
            raise ValueError(reason)

    @functools.cached_property
    def alpha(self) -> float:
        """The factor of the residual."""
        return 1.0 if self.outlier_fallback is None else float(self.outlier_fallback)

    @functools.cached_property
    def search(self) -> int:
        """The compile-time constant of the macro search."""
        return blocks.NO_MACRO.value if self.macro_block is None else _SEARCH[self.macro_search]


class Side(NamedTuple):
    """What blocks along one axis have of their own.

    Attributes:
        seed: an integer in 0..2**64 - 1 for stochastic rounding; `None` rounds to nearest, ties to even. Random numbers
            depend on the seed and an element's place alone. A captured CUDA graph repeats those of its seed.
        rotation: 16, 32, 64 or 128 to multiply that many neighbours each by Sylvester's matrix over its root before;
            the axis is then padded with zeros to a multiple. `None` rotates nothing.
        signs: ``[K']`` of 1 and -1 (K' is the padded length) to multiply the columns by before the rotation, or `None`.
    """

    seed: int | None = None
    rotation: int | None = None
    signs: torch.Tensor | None = None

    def checked(self, x: torch.Tensor, length: int) -> Side:
        """Return this side with signs as the kernels read them, for an axis of ``length`` of ``x``. Raises `TypeError`
        or `ValueError` for values that are not supported."""
        seed, rotation, signs = self
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"stochastic rounding needs an integer as its seed, got {seed!r}")
        if seed is not None and not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed} must be in 0..2**64 - 1")
        if rotation is not None and (isinstance(rotation, bool) or rotation not in _ROTATIONS):
            raise ValueError(f"rotation={rotation!r} must be None or one of {', '.join(map(str, _ROTATIONS))}")
        if signs is None:
            return self
        padded = self.padded(length)
        if rotation is None:
            raise ValueError("signs have no effect without a rotation")
        if tuple(signs.shape) != (padded,):
            raise ValueError(f"signs has the shape {list(signs.shape)}; the rotated axis has {padded} elements")
        if signs.device != x.device:
            raise ValueError(f"signs are on {signs.device}, the tensor is on {x.device}; move them there")
        return self._replace(signs=signs.detach().float().contiguous())

    def padded(self, length: int) -> int:
        """Return the elements of an axis of ``length`` after the rotation."""
        return length + -length % (self.rotation or 1)

    def constants(self, bf16x2: bool) -> SideConstants:
        """Return compile-time arguments; ``bf16x2`` tells whether `common/bf16x2_blocks.py` has what is asked for when
        it is rounded to nearest, and not rotated."""
        rotation = self.rotation or 0
        bf16x2 = bf16x2 and self.seed is None and not rotation
        return SideConstants(self.seed is not None, rotation, (rotation or 1) ** -0.5, self.signs is not None, bf16x2)

    @property
    def halves(self) -> tuple[int, int]:
        """The seed as the bits of two int32 numbers."""
        seed = self.seed or 0
        low, high = seed & 0xFFFFFFFF, seed >> 32
        return low - (low >> 31 << 32), high - (high >> 31 << 32)


#: Blocks of 32 without macro bytes and residual; an axis that is rounded to nearest and not rotated.
PLAIN, NEAREST = Scheme(), Side()


class Packed(NamedTuple):
    """Contiguous uint8 tensors of a quantized tensor ``[..., K]``. Where rows share blocks, each row has bytes.

    Attributes:
        codes: ``[..., ceil(K/2)]``, two E2M1 codes per byte, even index in the low nibble.
        scale: ``[..., ceil(K/32)]``, E8M0.
        macro: ``[..., ceil(K/macro_block)]``, or `None`.
        residual_codes, residual_scale: as the first two, or `None`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    macro: torch.Tensor | None = None
    residual_codes: torch.Tensor | None = None
    residual_scale: torch.Tensor | None = None

    @classmethod
    def empty(cls, device: torch.device, shape: tuple[int, ...], scheme: Scheme) -> Packed:
        """Return uninitialized tensors for values of a shape."""
        parts = []
        for per_byte in _elements_per_byte(scheme):
            size = None if per_byte is None else (*shape[:-1], -(-shape[-1] // per_byte))
            parts.append(None if size is None else torch.empty(size, dtype=torch.uint8, device=device))
        return cls(*parts)

    def check(self, length: int, scheme: Scheme) -> None:
        """Raise `TypeError` or `ValueError` for tensors that do not fit together, ``length`` K or the scheme."""
        for (name, tensor), per_byte in zip(self._asdict().items(), _elements_per_byte(scheme), strict=True):
            if (tensor is None) != (per_byte is None):
                found = "missing" if tensor is None else "given"
                raise ValueError(f"{name} is {found} for {scheme}")
            if tensor is None:
                continue
            if tensor.dtype != torch.uint8:
                raise TypeError(f"{name} must be uint8, got {tensor.dtype}")
            if tensor.device != self.codes.device:
                raise ValueError(f"{name} is on {tensor.device}, codes are on {self.codes.device}")
            shape = [*self.codes.shape[:-1], -(-length // per_byte)]
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} has the shape {list(tensor.shape)}; {length} elements need {shape}")

    def pointers(self) -> PackedPointers:
        """Return the tensors as a kernel takes them, contiguous."""
        return PackedPointers(*(None if part is None else part.contiguous() for part in self))


def _elements_per_byte(scheme: Scheme) -> tuple[int | None, ...]:
    residual = (None, None) if scheme.outlier_fallback is None else (2, BLOCK)
    return 2, BLOCK, scheme.macro_block, *residual


@functools.lru_cache(maxsize=1024)
def row_bytes(length: int, scheme: Scheme) -> RowBytes:
    """Return the bytes in a packed row of ``length`` elements."""
    return RowBytes(*(-(-length // per_byte) for per_byte in (2, BLOCK, scheme.macro_block or BLOCK)))


@functools.lru_cache(maxsize=1024)
def scheme_constants(dtype: torch.dtype, scheme: Scheme, out: torch.dtype) -> SchemeConstants:
    """Return the compile-time arguments of a scheme, for the dtypes of input and output."""
    rule = ScaleRule(scheme.scale_rule)
    return SchemeConstants(
        MACRO=scheme.macro_block or BLOCK,
        SEARCH=scheme.search,
        MANTISSAS=3 if scheme.macro_search == "block_mantissas_fp8" else 4,
        HAS_FALLBACK=scheme.outlier_fallback is not None,
        CARRY=rule.carry,
        CLIPS=rule.clips,
        LEAST_SQUARES=rule.least_squares,
        # Only scales above E - 2 reach byte 253, and only beyond float16.
        LIMITED=dtype != torch.float16 and (rule.carry > 0 or rule.least_squares),
        LARGEST=torch.finfo(out).max,
        BF16=dtype == torch.bfloat16,
        TILES=scheme.block_rows != 1,
        INTERPRETED=INTERPRETED,
    )


def has_bf16x2(dtype: torch.dtype, scheme: Scheme, packs: bool) -> bool:
    """Return whether `common/bf16x2_blocks.py` has a scheme, for input and output of a dtype: codes, or values, whose
    residual it adds whole."""
    if dtype != torch.bfloat16 or scheme.block_rows != 1 or not (packs or scheme.alpha == 1):
        return False
    rule = ScaleRule(scheme.scale_rule)
    if scheme.search == blocks.BLOCK_MANTISSAS.value:
        return rule is ScaleRule.EVEN
    # Without a carry magnitudes are cut to the grid. With one they are not, so they must stay below 7 scales; and the
    # smallest blocks are computed as one of 1.5 * 2**-125, which must not be rounded up.
    has_rule = rule.carry == 0 or ScaleRule.EVEN.carry <= rule.carry <= ScaleRule.RCEIL.carry
    return has_rule and not rule.least_squares and scheme.search == blocks.NO_MACRO.value


def check_input(name: str, x: object, axes: int = 1) -> None:
    """Raise `TypeError` or `ValueError` unless ``x`` is a tensor with at least ``axes`` axes that the kernels read."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} needs a tensor, got {type(x).__name__}")
    if (reason := unsupported_dtype(x.dtype)) is not None:
        raise TypeError(reason)
    if x.dim() < axes:
        raise ValueError(f"{name} needs at least {axes} axes, got {x.dim()}")
    check_device(x)


def check_output(dtype: object) -> None:
    """Raise `TypeError` for an output dtype that the kernels do not write."""
    if (reason := unsupported_dtype(dtype)) is not None:
        raise TypeError(reason)


def check_device(x: torch.Tensor) -> None:
    """Raise `ValueError` for a tensor on a CPU where kernels are not interpreted."""
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError("the Triton kernel needs a GPU tensor, got one on the CPU")


# ---- outputs --------------------------------------------------------------------------------------------------------


def output_tensor(
    out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device, name: str = "out"
) -> torch.Tensor:
    """Return the contiguous tensor that a kernel writes: ``out``, or a new one.

    Raises `TypeError` for an ``out`` of another dtype, and `ValueError` for another shape, device or layout.
    """
    if out is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if out.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {out.dtype}")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{name} has the shape {list(out.shape)}; the result has {list(shape)}")
    if out.device != device:
        raise ValueError(f"{name} is on {out.device}, the input is on {device}")
    if not out.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got the strides {list(out.stride())}")
    return out


def output_packed(out: Packed | None, shape: Sequence[int], scheme: Scheme, device: torch.device) -> Packed:
    """Return codes and scales that a kernel writes for values of a shape: ``out``, or new ones. Raises as
    [`output_tensor`]."""
    if out is None:
        return Packed.empty(device, tuple(shape), scheme)
    out.check(shape[-1], scheme)
    for name, part in out._asdict().items():
        if part is not None:
            output_tensor(part, (*shape[:-1], part.shape[-1]), torch.uint8, device, f"{name} of out")
    return out


# ---- launches -------------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels read it: bfloat16 as int16 bits."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def output_bits(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return an output as kernels write it: interpreted, bfloat16 passes as int16 bits."""
    return bits(tensor) if INTERPRETED and tensor is not None else tensor


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which kernels start on a device."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else contextlib.nullcontext()
