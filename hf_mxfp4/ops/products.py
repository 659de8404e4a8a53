# SPDX-License-Identifier: Apache-2.0
"""The three products of a linear layer, a class for each way of multiplying.

* [`ValueProducts`]: ordinary products of the quantized values. Always possible, also of all experts.
* [`FP8Products`]: the same values on FP8 tensor cores.
* [`FP4Products`]: the forward product on FP4 tensor cores, of codes or of inputs in MXFP8.
* [`CodesProducts`]: the forward product with the codes of a weight that a cache keeps.

Fprop is ``y = Q(x) Q(W)^T + b``, with ``x [M, K]`` and ``W [N, K]``; Dgrad is ``dx = Q(g) Q(W)`` and Wgrad is ``dW =
Q(g)^T Q(x)``, with the output gradient ``g [M, N]``. A forward product returns `None` where it cannot multiply these
operands, and the next way of the plan ([`hf_mxfp4.ops.plan`]) takes them.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..numerics import FP8, FULL, GEMM_OPERANDS, REUSE, GemmScheme, MXFP4Tensor
from . import choice, fp4, quantization
from .codes import decodes, multiply_codes
from .fp4 import FP4Operand, MXFP8Rows
from .fp8 import FP8Operand, WeightConversion, fold_scales, gradient_operands, inexact, multiply_fp8, n_inexact, to_fp8
from .groups import Groups
from .inputs import Input
from .operands import gradient_operand, rotate_operand
from .rng import LayerRng
from .spec import GemmSpec
from .state import GemmState
from .values import matmul
from .weights import backend_of_codes, count_weight, fp4_weight, fp8_weight, keeps_fp8, weight_codes, weight_operand


_counts: Counter[tuple[str, str]] = Counter()


def matmul_counts() -> dict[str, dict[str, int] | int]:
    """Products of this process so far whose backend was chosen: by product and backend, as ``{"fprop": {"fp8": 12,
    "dense": 3}, ...}``, and under ``"inexact_elements"`` those that E4M3 rounded. Waits for the GPU."""
    counts: dict[str, Any] = {gemm: {} for gemm in GEMM_OPERANDS}
    for (gemm, name), count in sorted(_counts.items()):
        counts[gemm][name] = count
    counts["inexact_elements"] = n_inexact()
    return counts


def reset_matmul_counts() -> None:
    """Count from zero."""
    _counts.clear()
    n_inexact()  # so that nothing is counted later
    for count in inexact.values():
        count.zero_()  # in its memory, to which CUDA graphs add


class ValueProducts:
    """Ordinary products of quantized values, in the dtype of the layer."""

    def __init__(self, spec: GemmSpec):
        self.spec = spec

    def fprop(self, x: Input, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``Q(x) Q(W)^T + b`` and ``Q(W)``."""
        right = weight_operand(weight, x.dtype, x.state)
        return self._multiply("fprop", x.values(), right, bias, x.groups), right

    def dgrad(
        self, grad: torch.Tensor, weight: torch.Tensor, rng: LayerRng | None, quantized: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``Q(g) Q(W)``.

        Args:
            grad: ``[M, N]``.
            weight: ``[N, K]``: what the forward product used, or the master where Dgrad quantizes it in its own way.
            rng: the random numbers of the weight.
            quantized: ``Q(g)`` where it was made already.
        """
        product = self.spec.scheme.dgrad
        dtype = grad.dtype
        left = quantized
        if left is None:
            left = gradient_operand(grad, product, "dgrad", "grad", self.spec, rng, dtype)
        if quantizes_weight(product):
            count_weight(weight, "dgrad")
        right = gradient_operand(weight.t(), product, "dgrad", "weight", self.spec, rng, dtype)
        return self._multiply("dgrad", left, right)

    def wgrad(
        self,
        grad: torch.Tensor,
        x: torch.Tensor | FP8Operand,
        rng: LayerRng | None,
        quantized: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``Q(g)^T Q(x)``.

        Args:
            grad: transposed, ``[N, M]``.
            x: ``[M, K]``: what was saved of the input.
            rng: the random numbers of the weight.
            quantized: ``Q(g)^T`` where it was made already.
        """
        product = self.spec.scheme.wgrad
        dtype = grad.dtype
        left = quantized
        if left is None:
            left = gradient_operand(grad, product, "wgrad", "grad", self.spec, rng, dtype)
        if isinstance(x, FP8Operand):
            columns = x.transposed().values(dtype, self.spec.backend)
        else:
            columns = x.t()
        right = gradient_operand(columns, product, "wgrad", "x", self.spec, rng, dtype)
        return self._multiply("wgrad", left, right)

    def _multiply(
        self,
        gemm: str,
        left: torch.Tensor,
        right: torch.Tensor,
        bias: torch.Tensor | None = None,
        groups: Groups | None = None,
    ) -> torch.Tensor:
        if self.spec.matmul_backend != "dense":
            _counts[gemm, "dense"] += 1
        if groups is None:
            return F.linear(left, right, bias)
        return matmul(left, right, bias, groups)


class FP8Products:
    """Products on FP8 tensor cores: the values are E4M3 elements times a power of two for each row.

    Args:
        spec: of the layer.
        has_dgrad: whether Dgrad multiplies the transposed elements of the weight.
    """

    def __init__(self, spec: GemmSpec, has_dgrad: bool):
        self.spec = spec
        self.has_dgrad = has_dgrad
        self.conversion = WeightConversion()

    def fprop(
        self, x: Input, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, FP8Operand] | None:
        """Return ``Q(x) Q(W)^T + b`` and ``Q(W)``; `None` where E4M3 would round an element of ``Q(W)``, or there are
        no rows."""
        if not x.x.numel() or not quantization.has_plain_memory(x.x):
            return None
        is_kept = keeps_fp8(weight, x.dtype, x.state) or self._fits_into_input(x, weight)
        right = fp8_weight(weight, x.dtype, x.state, self.conversion, self.has_dgrad and is_kept)
        if right is None:
            return None
        return self._multiply("fprop", x.fp8(), right, x.dtype, bias, x.groups), right

    def dgrad_weight(self, weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> FP8Operand | None:
        """Return the weight as Dgrad takes it; see [`hf_mxfp4.ops.weights.fp8_weight`]."""
        return fp8_weight(weight, dtype, state, self.conversion, has_dgrad=True)

    def _fits_into_input(self, x: Input, weight: torch.Tensor) -> bool:
        """Whether the elements that are kept for the backward pass, of the input and of the weight, a byte each, take
        no more memory than an input in 16 bits: where there are as many tokens as outputs."""
        if weight.dim() != 2 or not x.is_saved or not self.spec.saves_fp8:
            return False
        return x.x.numel() // x.x.shape[-1] >= weight.shape[0]

    def dgrad(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor | FP8Operand,
        rng: LayerRng | None,
        quantized: torch.Tensor | None = None,
        groups: Groups | None = None,
    ) -> torch.Tensor:
        """Return ``Q(g) Q(W)``; see [`ValueProducts.dgrad`]. What the forward product used of the weight is an
        [`FP8Operand`] here, also of all experts, whose scales along N go into the gradient."""
        product = self.spec.scheme.dgrad
        dtype = grad.dtype
        if isinstance(weight, FP8Operand):
            right = weight.transposed()
            if weight.column_scale is None:
                grad, scale = fold_scales(grad, weight.scale, groups)
                right = FP8Operand(right.elements, scale)
        else:
            if quantizes_weight(product):
                count_weight(weight, "dgrad")
            right = self._operand(weight.t(), product, "dgrad", "weight", rng, dtype)
        if quantized is None:
            left = self._operand(grad, product, "dgrad", "grad", rng, dtype)
        else:
            left = to_fp8(quantized)
        return self._multiply("dgrad", left, right, dtype, groups=groups)

    def wgrad(
        self,
        grad: torch.Tensor,
        x: torch.Tensor | FP8Operand,
        rng: LayerRng | None,
        quantized: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``Q(g)^T Q(x)``; see [`ValueProducts.wgrad`]."""
        product = self.spec.scheme.wgrad
        dtype = grad.dtype
        if quantized is None:
            left = self._operand(grad, product, "wgrad", "grad", rng, dtype)
        else:
            left = to_fp8(quantized)
        if isinstance(x, FP8Operand):
            right = x.transposed()
        else:
            right = self._operand(x.t(), product, "wgrad", "x", rng, dtype)
        return self._multiply("wgrad", left, right, dtype)

    def dgrad_and_wgrad(
        self, grad: torch.Tensor, weight: FP8Operand, x: FP8Operand
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both products of a gradient ``[M, N]`` that is quantized to E4M3 without a rotation, with the elements
        of the forward product."""
        left, right, left_t, right_t = gradient_operands(grad, weight, x, self.spec.backend)
        grad_x = self._multiply("dgrad", left, right, grad.dtype)
        return grad_x, self._multiply("wgrad", left_t, right_t, grad.dtype)

    def _operand(
        self,
        values: torch.Tensor,
        product: GemmScheme,
        gemm: str,
        operand: str,
        rng: LayerRng | None,
        dtype: torch.dtype,
    ) -> FP8Operand:
        scheme = product.left if operand == "grad" else product.right
        if scheme is not FP8:
            return to_fp8(gradient_operand(values, product, gemm, operand, self.spec, rng, dtype))
        values = rotate_operand(values, product.rotation, gemm, rng, self.spec.backend)
        return FP8Operand(*quantization.quantize_e4m3(values, self.spec.backend, torch.float32))

    def _multiply(
        self,
        gemm: str,
        left: FP8Operand,
        right: FP8Operand,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        groups: Groups | None = None,
    ) -> torch.Tensor:
        _counts[gemm, "fp8"] += 1
        return multiply_fp8(left, right, bias, groups, dtype)


class FP4Products:
    """Forward products of one weight on FP4 tensor cores; gradients are products of values.

    Args:
        spec: of the layer.
        shape: N and K of the weight.
        recipes: those that may multiply its operands, the best first; see [`hf_mxfp4.ops.choice.fp4_recipes`].
        reason: why there is no recipe, where FP4 products were asked for by name.
    """

    def __init__(self, spec: GemmSpec, shape: Sequence[int], recipes: tuple[str, ...], reason: str | None):
        self.spec = spec
        self.shape = shape
        self.recipes = recipes
        self.reason = reason

    def fprop(self, x: Input, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, None] | None:
        """Return ``Q(x) Q(W)^T + b``; `None` where the recipes do not take these operands."""
        recipe = self.recipe_for(x.x)
        if recipe is None:
            return None
        out = self.multiply(x.packed(), fp4_weight(weight, x.state, recipe), recipe, bias, x.dtype)
        return None if out is None else (out, None)

    def recipe_for(self, x: torch.Tensor) -> str | None:
        """Return the recipe for an input ``[..., K]``; `None` where none takes it, with a warning of why if FP4
        products were asked for by name."""
        reason = self.reason or fp4.unsupported_operands(x, self.shape)
        if reason is None:
            for recipe in self.recipes:
                reason = fp4.problem(recipe, x.device)
                if reason is None:
                    return recipe
        if self.spec.matmul_backend == "fp4":
            warnings.warn(f"matmul_backend='fp4', but a product is not in FP4: {reason}", stacklevel=2)
        return None

    @staticmethod
    def multiply(
        packed: MXFP4Tensor | MXFP8Rows, weight: FP4Operand, recipe: str, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the product of an input ``[..., K]`` and a weight ``[N, K]``, plus ``bias``; `None` where the recipe
        holds the scales of the input neither with one factor nor with one for each row, or those of the weight not."""
        elements = packed.codes if isinstance(packed, MXFP4Tensor) else packed[0]
        for by_rows in (False, True):
            left = fp4.to_fp4(packed, recipe, by_rows)
            if fp4.fit(left, weight):
                _counts["fprop", "mxfp8" if recipe == "mxfp8" else "fp4"] += 1
                out = fp4.fp4_product(left, weight, dtype).view(*elements.shape[:-1], -1)
                return out if bias is None else out + bias
        return None


class CodesProducts:
    """Forward products with the codes that a cache keeps, of few rows on GPUs and of any on CPUs. Without gradients."""

    def __init__(self, spec: GemmSpec):
        self.spec = spec

    def fprop(self, x: Input, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, None] | None:
        """Return ``Q(x) Q(W)^T + b``; `None` where no codes are kept, or nothing multiplies so many rows with them."""
        backend = backend_of_codes(x.x, x.dtype, x.state)
        if backend is None or backend == "cpu" and self.spec.matmul_backend == "fp8":
            return None
        if backend != "cpu" and not decodes(x.x, x.dtype, backend, x.groups):
            return None
        codes = weight_codes(weight, x.state)
        return multiply_codes(x.values(), codes, bias, x.groups, backend), None


def fp4_products(spec: GemmSpec, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> FP4Products | None:
    """Return the way by which FP4 tensor cores may multiply with a weight of ``shape`` (N, K), which says why it does
    not where it was asked for by name; `None` where there is none."""
    hardware = choice.hardware_of(device)
    recipes, reason = choice.fp4_recipes(spec.scheme, hardware, dtype, spec.matmul_backend)
    return FP4Products(spec, shape, recipes, reason) if recipes or reason else None


def multiply_values(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, spec: GemmSpec) -> torch.Tensor:
    """Return the forward product of values ``[..., K]`` and ``[N, K]`` in their dtype, on FP8 tensor cores where they
    are chosen for it, which rounds elements that E4M3 does not hold, counted."""
    arguments = spec.scheme, x.device, x.dtype, spec.matmul_backend, weight.shape
    if x.numel() and quantization.has_plain_memory(x) and choice.runs_on_fp8("fprop", *arguments):
        _counts["fprop", "fp8"] += 1
        return multiply_fp8(to_fp8(x), to_fp8(weight), bias, None, x.dtype)
    if spec.matmul_backend != "dense":
        _counts["fprop", "dense"] += 1
    return F.linear(x, weight, bias)


def quantizes_weight(product: GemmScheme) -> bool:
    """Whether Dgrad takes another operand of the weight than the forward product does."""
    return product.rotation is not None or product.right not in (FULL, REUSE)
