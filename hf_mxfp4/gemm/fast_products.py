# SPDX-License-Identifier: Apache-2.0
"""The three products of a linear layer on the fast engines: operands straight from the kernels into tensor cores."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from ..backends.select import fake_quantize, is_torchs_own
from ..numerics import FP8, GEMM_OPERANDS, REUSE, GemmScheme, LinearScheme, OperandScheme, QuantScheme
from .layer_rng import Draws
from .operands import operand_seed, rotation_signs
from .select import Engine, checked, count_product, dtype_obstacle, engine_for, hardware_of, inexact_counter


#: Keeps an operand of a weight: called with the weight, a name for it, and a function that makes it.
Keep = Callable[[torch.Tensor, Callable[[], Any]], Any]


class ProductEngines:
    """Chooses the engines of the products of a layer, counts them, and makes their operands.

    Args:
        scheme: of the layer's products.
        requested: see [`engine_for`].
        draws: the layer's random numbers.
        keep_weight: keeps the forward operand of the weight for as long as the weight is the same; by default nothing
            is kept.

    Attributes:
        experts: whether products are those of all experts of a layer.
    """

    experts = False

    def __init__(self, scheme: LinearScheme, requested: str, draws: Draws, keep_weight: Keep | None = None):
        self.scheme, self.requested, self.draws = scheme, requested, draws
        self._keep = keep_weight or (lambda weight, compute: compute())

    @staticmethod
    def check(engine: str, device: torch.device) -> str | None:
        """What is wrong with an engine on a device; `None` when nothing is."""
        raise NotImplementedError

    def engine(self, gemm: str, *operands: torch.Tensor, dtype: torch.dtype) -> Engine:
        """The engine for these operands of a product, which is counted."""
        device = operands[0].device
        engine = engine_for(gemm, self.scheme, hardware_of(device), dtype, self.requested, self.experts)
        reasons = [reason for reason in map(_tensor_obstacle, operands) if reason is not None]
        if engine.name != "dense" and reasons:
            engine = Engine("dense", reasons[0])
        if self.requested == "auto":
            engine = checked(engine, device, self.check)
        count_product(gemm, engine.name)
        return engine

    def _operand(
        self, engine: str, matrix: torch.Tensor, gemm: str, name: str, whole: bool = False, axis: int = 1
    ) -> Any:
        """[`operand`] as the scheme has it under this name, rotated and rounded by the layer's random numbers."""
        treatment = _treatment(getattr(self.scheme, gemm), gemm, name)
        side = {} if treatment is FP8 else self._side(gemm, name, matrix, axis)
        return operand(engine, matrix, treatment, whole, axis, side)

    def _across(self, engine: str, matrix: torch.Tensor, gemm: str, name: str) -> Any:
        """The second operand of a gradient: ``matrix`` along its columns, quantized there or, of an operand that is
        reused, along the rows as in the forward product. (Quantizing its values again changes none.)"""
        import mxfp4_kernels

        if _treatment(getattr(self.scheme, gemm), gemm, name) is not REUSE:
            return self._operand(engine, matrix, gemm, name, axis=0)
        forward = _treatment(self.scheme.fprop, "fprop", name)
        seed = operand_seed(forward, "fprop", name, self.draws)
        return mxfp4_kernels.fold_e4m3_both(
            matrix,
            columns="reused",
            rounding=(forward.rounding, "nearest"),
            seed=(seed, None),
            counter=inexact_counter(matrix.device),
            **scheme_options(forward, tiles=False),
        )[1]

    def _side(self, gemm: str, name: str, matrix: torch.Tensor, axis: int = 1) -> dict[str, Any]:
        """Rounding and rotation of an operand along ``axis``, as arguments of the kernels."""
        product: GemmScheme = getattr(self.scheme, gemm)
        treatment, rotation = _treatment(product, gemm, name), product.rotation
        signs = None
        if rotation is not None:
            signs = rotation_signs(rotation, gemm, matrix.shape[axis], self.draws, matrix.device)
        return {
            "rounding": treatment.rounding,
            "seed": operand_seed(treatment, gemm, name, self.draws),
            "rotation": None if rotation is None else rotation.size,
            "signs": signs,
        }


class FastProducts(ProductEngines):
    """What [`hf_mxfp4.gemm.quantized_linear`] asks for products of one layer that need not be dense."""

    @staticmethod
    def check(engine: str, device: torch.device) -> str | None:
        return self_check(engine, device)

    def forward(
        self, engine: Engine, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """``Q(x) Q(W)^T + b``, ``[..., N]``."""
        whole = whole_rows(self.scheme.fprop)
        left = self._operand(engine.name, x.reshape(-1, x.shape[-1]), "fprop", "x", whole)
        right = self._keep(weight, lambda: self._operand(engine.name, weight.detach(), "fprop", "weight", whole))
        return multiply(engine.name, left, right, dtype, bias).view(*x.shape[:-1], weight.shape[0])

    def gradients(
        self, rows: torch.Tensor, weight: torch.Tensor, values: Callable[[], torch.Tensor], needs: tuple[bool, bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``dx [M, K]`` and ``dW [N, K]`` of what is needed and not dense; `None` for the others.

        Args:
            rows: the output gradient ``[M, N]``.
            weight: the master weight ``[N, K]`` as it is now.
            values: gives what was kept of the input, ``[M, K]``.
            needs: whether each gradient is needed.
        """
        dgrad = self.engine("dgrad", rows, weight, dtype=rows.dtype) if needs[0] else NOT_NEEDED
        wgrad = self.engine("wgrad", rows, dtype=rows.dtype) if needs[1] else NOT_NEEDED
        by_row, by_column = self._grad_operands(rows, dgrad.name, wgrad.name)
        grad_x = grad_weight = None
        if by_row is not None:
            right = self._across(dgrad.name, weight.detach(), "dgrad", "weight")
            grad_x = multiply(dgrad.name, by_row, right, rows.dtype)
        if by_column is not None:
            right = self._across(wgrad.name, values(), "wgrad", "x")
            grad_weight = multiply(wgrad.name, by_column, right, rows.dtype)
        return grad_x, grad_weight

    def _grad_operands(self, rows: torch.Tensor, dgrad: str, wgrad: str) -> tuple[Any, Any]:
        """The output gradient along N and along M, `None` where that product is dense."""
        import mxfp4_kernels

        left, right = self.scheme.dgrad.left, self.scheme.wgrad.left
        if dgrad == wgrad == "fp8" and FP8 not in (left, right):
            if replace(left, rounding="nearest") == replace(right, rounding="nearest"):
                sides = self._side("dgrad", "grad", rows), self._side("wgrad", "grad", rows, axis=0)
                pairs = {name: tuple(side[name] for side in sides) for name in sides[0]}
                counter = inexact_counter(rows.device)
                return mxfp4_kernels.fold_e4m3_both(rows, counter=counter, **pairs, **scheme_options(left, tiles=False))
        by_row = None if dgrad == "dense" else self._operand(dgrad, rows, "dgrad", "grad")
        return by_row, None if wgrad == "dense" else self._operand(wgrad, rows, "wgrad", "grad", axis=0)


#: In the place of an engine.
NOT_NEEDED = Engine("dense", "the gradient is not needed")


def whole_rows(product: GemmScheme) -> bool:
    """Whether a scale per row will do, so that sums of whole rows need no scale but one at their end."""
    return all(isinstance(side, QuantScheme) and side.macro_block is None for side in (product.left, product.right))


def _treatment(product: GemmScheme, gemm: str, name: str) -> OperandScheme:
    return product.left if name == GEMM_OPERANDS[gemm][0] else product.right


def operand(
    engine: str,
    matrix: torch.Tensor,
    treatment: OperandScheme,
    whole: bool = False,
    axis: int = 1,
    side: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A matrix quantized along ``axis``, which comes last, for an engine; with a scale per row where ``whole``.
    ``side`` holds arguments of the kernels for rounding and rotation; by default, to nearest and none."""
    import mxfp4_kernels

    if treatment is FP8:
        return mxfp4_kernels.quantize_e4m3(matrix, axis=axis)
    if engine == "mxfp4":
        rows = matrix if axis == 1 else matrix.t()
        return mxfp4_kernels.quantize(rows.contiguous(), **side, **scheme_options(treatment))
    counter = inexact_counter(matrix.device)
    group = "row" if whole else 128
    return mxfp4_kernels.fold_e4m3(matrix, group=group, axis=axis, counter=counter, **side, **scheme_options(treatment))


def multiply(engine: str, left: Any, right: Any, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``left right^T + bias`` of what [`operand`] made."""
    import mxfp4_kernels

    if engine == "mxfp4":
        macros = {"a_macro": left.macro, "b_macro": right.macro}
        parts = (left.codes, left.scale, right.codes, right.scale)
        return mxfp4_kernels.matmul_mxf4(*parts, **macros, out_dtype=dtype, bias=bias)
    parts = (left.elements, left.scale, right.elements, right.scale)
    return mxfp4_kernels.matmul_e4m3(*parts, out_dtype=dtype, bias=bias)


def self_check(engine: str, device: torch.device) -> str | None:
    """What is wrong with an engine on a device, by small products of all kinds; `None` when nothing is."""
    rng = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 300, generator=rng).to(device, torch.bfloat16) for rows in (33, 48))
    for scheme in (QuantScheme(), QuantScheme("rceil", 128)):
        product = GemmScheme(scheme, scheme)
        left, right = (operand(engine, side, scheme, whole_rows(product)) for side in (x, w))
        found = multiply(engine, left, right, torch.bfloat16)
        values = (fake_quantize(side.float(), scheme, "eager") for side in (x, w))
        error = product_error(found, *values)
        if not error < PRODUCT_BOUND:
            return f"is off by {error:.1e} of the sum of magnitudes ({scheme})"
    return None


#: Of [`product_error`] of a bfloat16 result.
PRODUCT_BOUND = 2.0**-8


def product_error(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest error of ``left right^T`` relative to the sum of the magnitudes of what is summed."""
    left, right = left.double(), right.double()
    magnitude = left.abs() @ right.abs().t()
    return float(((found.double() - left @ right.t()).abs() / magnitude.clamp(min=1e-30)).max())


def scheme_options(scheme: QuantScheme, tiles: bool = True) -> dict[str, Any]:
    """A scheme as arguments of the folding kernels; those for two directions know no ``tiles``."""
    options = {
        "scale_rule": scheme.scale_rule.value,
        "macro_block": scheme.macro_block,
        "macro_search": scheme.macro_search,
    }
    return options | {"block_rows": scheme.block_rows} if tiles else options


def _tensor_obstacle(x: torch.Tensor) -> str | None:
    if not is_torchs_own(x):
        return "kernels take no tensors of other kinds than torch's own"
    return dtype_obstacle(x.dtype)
