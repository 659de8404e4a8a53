# SPDX-License-Identifier: Apache-2.0
"""How one linear layer computes its three products on one device: chosen once, then called.

Fprop ``y = Q(x) Q(W)^T + b``. The quantizers are passed over by the gradient (straight-through estimator), and the
backward products take the operands of the forward one: Dgrad ``dx = g Q(W)``, Wgrad ``dW = g^T Q(x)``, ``db = sum g``
(arXiv 2605.20402, section 2: forward operands in MXFP4, output gradients in full precision), unless the scheme of the
layer gives them operands of their own (arXiv 2605.09825: all six in MXFP4, rotated).
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..numerics import FP8
from . import choice, quantization
from .fp8 import FP8Operand, fold_scales
from .groups import Groups, sum_rows
from .inputs import Input, SavedTensors, restored
from .operands import rotate_back, rows_and_columns
from .products import CodesProducts, FP4Products, FP8Products, ValueProducts, fp4_products
from .rng import LayerRng
from .spec import GemmSpec
from .state import GemmState
from .weights import rows_first, weight_operand


#: Gradients of the input, the weight and the bias.
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class LinearPlan:
    """The products of one weight matrix.

    Attributes:
        spec: of the layer.
        dtype: of the products, and of their results.
        fprop: ways of the forward product; the first that can multiplies.
        fprop_with_cache: those without a backward pass, where a cache may keep codes.
        values: the way of backward products that FP8 tensor cores do not compute.
        fp8: the other way of these.
        fp8_gemms: the products that may be computed in FP8.
    """

    def __init__(self, spec: GemmSpec, device: torch.device, dtype: torch.dtype, shape: torch.Size):
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.values = ValueProducts(spec)
        n, k = shape[-2:]
        if spec.transposed:
            n, k = k, n
        columns: dict[str, Sequence[int]] = {"fprop": (n, spec.padded_length(k)), "dgrad": (n, k), "wgrad": (k,)}
        if spec.reuses_weight:
            columns["dgrad"] = columns["fprop"]
        self.fp8_gemms = frozenset(gemm for gemm in columns if self._is_fp8(gemm, columns[gemm]))
        self.fp8 = FP8Products(spec, has_dgrad="dgrad" in self.fp8_gemms and spec.reuses_weight)
        ways: list[Any] = [self.values]
        if "fprop" in self.fp8_gemms:
            ways.insert(0, self.fp8)
        fp4_ways = self._fp4_ways(shape)
        self.fprop = (*fp4_ways, *ways)
        self.fprop_with_cache = self.fprop
        if spec.packs_weight:
            self.fprop_with_cache = (*fp4_ways, CodesProducts(spec), *ways)

    def _is_fp8(self, gemm: str, columns: Sequence[int]) -> bool:
        spec = self.spec
        return choice.runs_on_fp8(gemm, spec.scheme, self.device, self.dtype, spec.matmul_backend, columns)

    def _fp4_ways(self, shape: torch.Size) -> list[FP4Products]:
        way = fp4_products(self.spec, self.device, self.dtype, shape)
        return [] if way is None else [way]

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: GemmState,
        groups: Groups | None,
        has_backward: bool = False,
        weight_needs_grad: bool = False,
    ) -> tuple[torch.Tensor, SavedTensors, torch.Tensor | FP8Operand | None]:
        """Return the output, what is saved of the input if the weight needs a gradient, and ``Q(W)`` where its values
        or its E4M3 elements were multiplied. With groups for all experts."""
        if bias is not None and bias.dtype is not self.dtype:
            bias = bias.to(self.dtype)
        quantized = Input(x, self.dtype, state, groups, weight_needs_grad)
        ways = self.fprop
        if state.cache is not None and not has_backward:  # which takes values of the weight
            ways = self.fprop_with_cache
        for way in ways:
            result = way.fprop(quantized, weight, bias)
            if result is not None:
                break
        out, operand = result
        return out, quantized.saved() if weight_needs_grad else (), operand

    def backward(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor,
        saved: SavedTensors,
        operand: torch.Tensor | FP8Operand | None,
        state: GemmState,
        groups: Groups | None,
        needs: Sequence[bool],
    ) -> Gradients:
        """Return the gradients of the input, the weight and the bias; `None` for those that are not needed.

        Args:
            grad: ``[..., N]``, in the dtype of the output.
            weight: the master weight as it is now.
            saved, operand: from [`forward`]; without the operand the weight is quantized again.
            state, groups: as there.
            needs: which gradients are needed.
        """
        rows = grad.reshape(-1, grad.shape[-1])
        right = None
        x = None
        grad_bias = None
        if needs[0]:
            right = self.dgrad_operand(rows, weight, operand, state)
        if needs[1]:
            x = restored(saved, self.spec, rows.dtype, groups is not None)
            if isinstance(x, FP8Operand) and not rows.numel():
                x = x.values(rows.dtype, self.spec.backend)
        shape = rows_first(weight, self.spec).shape
        grad_x, grad_weight = self.products(rows, right, x, shape, state, groups)
        if grad_x is not None:
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
        if grad_weight is not None:
            grad_weight = rows_first(grad_weight, self.spec)
        if needs[2]:
            grad_bias = sum_rows(rows, groups)
        count_backward_pass(state, groups)
        return grad_x, grad_weight, grad_bias

    def dgrad_operand(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        operand: torch.Tensor | FP8Operand | None,
        state: GemmState,
    ) -> torch.Tensor | FP8Operand:
        """Return the weight as Dgrad takes it: the master, or what the forward product used."""
        spec = self.spec
        if not spec.reuses_weight:
            return rows_first(weight, spec)
        if self._runs_on_fp8("dgrad", rows):
            fp8 = operand if isinstance(operand, FP8Operand) else self.fp8.dgrad_weight(weight, rows.dtype, state)
            # Scales of rows would go into the gradient, whose blocks of MXFP4 would be others.
            if fp8 is not None and (fp8.column_scale is not None or spec.scheme.dgrad.left is FP8):
                return fp8
        if not isinstance(operand, torch.Tensor) or operand.dtype != rows.dtype:
            return weight_operand(weight, rows.dtype, state)
        return operand

    def products(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor | FP8Operand | None,
        x: torch.Tensor | FP8Operand | None,
        shape: torch.Size,
        state: GemmState,
        groups: Groups | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return Dgrad ``[M, K]`` and Wgrad ``[N, K]``, `None` for the one whose right operand is `None`.

        Args:
            rows: the output gradient ``[M, N]``.
            weight, x: the right operands of Dgrad and Wgrad.
            shape: N and K.
            state, groups: of the layer; one weight has no groups.
        """
        if self._quantizes_gradient_once(rows, weight, x):
            return self.fp8.dgrad_and_wgrad(rows, weight, x)
        columns, x = wgrad_operands(rows, x)
        return self.products_of_matrix(rows, columns, weight, x, shape[-1], state.rng)

    def products_of_matrix(
        self,
        rows: torch.Tensor,
        columns: torch.Tensor,
        weight: torch.Tensor | FP8Operand | None,
        x: torch.Tensor | FP8Operand | None,
        n_columns: int,
        rng: LayerRng | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return Dgrad and Wgrad of one weight matrix of ``n_columns`` columns; see [`products`]. ``columns`` is the
        output gradient ``[N, M]`` as Wgrad takes it."""
        spec = self.spec
        rotation = spec.scheme.fprop.rotation
        left = left_t = grad_x = grad_weight = None
        if weight is not None and x is not None and not spec.is_plain:
            left, left_t = rows_and_columns(rows, spec, rng)
        if weight is not None:
            if spec.reuses_weight and not isinstance(weight, FP8Operand):
                weight = rotate_back(weight, rotation, "fprop", n_columns, rng)
            grad_x = self._dgrad_way(rows, weight).dgrad(rows, weight, rng, left)
        if x is not None:
            if not spec.saves_raw_input and not isinstance(x, FP8Operand):
                x = rotate_back(x, rotation, "fprop", n_columns, rng)
            grad_weight = self._wgrad_way(columns).wgrad(columns, x, rng, left_t)
        return grad_x, grad_weight

    def _quantizes_gradient_once(
        self, rows: torch.Tensor, weight: torch.Tensor | FP8Operand | None, x: torch.Tensor | FP8Operand | None
    ) -> bool:
        """Whether both products take the output gradient as E4M3 elements, with the elements of the forward product."""
        if not isinstance(weight, FP8Operand) or not isinstance(x, FP8Operand):
            return False
        dgrad = self.spec.scheme.dgrad
        return dgrad.left is FP8 and dgrad.rotation is None and self._wgrad_way(rows.t()) is self.fp8

    def _dgrad_way(self, rows: torch.Tensor, weight: torch.Tensor | FP8Operand) -> Any:
        # A weight that the forward product used is an FP8Operand where FP8 tensor cores multiply.
        is_fp8 = isinstance(weight, FP8Operand) if self.spec.reuses_weight else self._runs_on_fp8("dgrad", rows)
        return self.fp8 if is_fp8 else self.values

    def _wgrad_way(self, columns: torch.Tensor) -> Any:
        # Wgrad sums over tokens, of which FP8 tensor cores take multiples of 16.
        is_fp8 = self._runs_on_fp8("wgrad", columns) and (columns.is_cpu or columns.shape[1] % 16 == 0)
        return self.fp8 if is_fp8 else self.values

    def _runs_on_fp8(self, gemm: str, grad: torch.Tensor) -> bool:
        return gemm in self.fp8_gemms and grad.numel() > 0 and quantization.has_plain_memory(grad)


def wgrad_operands(
    rows: torch.Tensor, x: torch.Tensor | FP8Operand | None
) -> tuple[torch.Tensor, torch.Tensor | FP8Operand | None]:
    """Return the gradient ``[N, M]`` and the input ``[M, K]`` as Wgrad takes them. Where the scales of tokens go into
    the gradient, the elements of the input are left."""
    columns = rows.t()
    if not isinstance(x, FP8Operand):
        return columns, x
    columns, scale = fold_scales(columns, x.scale)
    return columns, FP8Operand(x.elements, scale, x.columns)


def count_backward_pass(state: GemmState, groups: Groups | None) -> None:
    """Let the next backward pass of the step draw other numbers, of each expert that had rows in this one."""
    if not state.spec.is_random:
        return
    experts = [0] if groups is None else [expert for expert, _ in groups]
    for expert in experts:
        state.rngs[expert].n_backward += 1
