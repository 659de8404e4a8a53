# SPDX-License-Identifier: Apache-2.0
"""The products of all experts of a layer. Every expert's product, forward and backward, is the one that a linear layer
of its own would compute on its rows."""

from collections.abc import Sequence

import torch

from . import choice
from .fp8 import FP8Operand
from .groups import Groups
from .operands import quantize_operand
from .plan import LinearPlan, wgrad_operands
from .products import FP4Products
from .state import GemmState
from .values import matmul, matmul_tokens


class ExpertsPlan(LinearPlan):
    """The products of weights ``[E, N, K]``: at once where the hardware has such a product and the operands are at
    hand, otherwise one expert after the other. Rows are sorted by expert."""

    def _is_fp8(self, gemm: str, columns: Sequence[int]) -> bool:
        """Whether FP8 tensor cores multiply: in Fprop, and Dgrad with what that used, of all experts at once."""
        spec = self.spec
        at_once = gemm == "fprop" or gemm == "dgrad" and spec.reuses_weight
        arguments = gemm, spec.scheme, self.device, self.dtype, spec.matmul_backend, columns
        return choice.runs_on_fp8(*arguments, experts=at_once)

    def _fp4_ways(self, shape: torch.Size) -> list[FP4Products]:
        return []

    def products(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor | FP8Operand | None,
        x: torch.Tensor | FP8Operand | None,
        shape: torch.Size,
        state: GemmState,
        groups: Groups | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return Dgrad ``[S, K]`` and Wgrad ``[E, N, K]``; see [`LinearPlan.products`]. An expert without rows has
        zero gradients, and nothing random is drawn for it."""
        assert groups is not None
        if self.spec.is_plain:
            return self._plain_products(rows, weight, x, groups)
        columns, x = wgrad_operands(rows, x)
        grad_x = grad_weight = None
        is_grouped = isinstance(weight, FP8Operand)
        if is_grouped:
            grad_x = self._grouped_dgrad(rows, weight, state, groups)
        elif weight is not None:
            grad_x = rows.new_empty(rows.shape[0], shape[2])
        if x is not None:
            grad_weight = rows.new_zeros(shape)
        for expert, tokens in groups:
            right = None if weight is None or is_grouped else weight[expert]
            expert_x = None if x is None else _rows_of(x, tokens)
            arguments = rows[tokens], columns[:, tokens], right, expert_x, shape[2], state.rng_of(expert)
            expert_grad_x, expert_grad_weight = self.products_of_matrix(*arguments)
            if expert_grad_x is not None:
                grad_x[tokens] = expert_grad_x
            if expert_grad_weight is not None:
                grad_weight[expert] = expert_grad_weight
        return grad_x, grad_weight

    def _plain_products(
        self, rows: torch.Tensor, weight: torch.Tensor | None, x: torch.Tensor | None, groups: Groups
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the products of operands as they are at hand."""
        grad_x = None if weight is None else matmul(rows, weight.transpose(1, 2), groups=groups)
        grad_weight = None if x is None else matmul_tokens(rows, x.to(rows.dtype), groups)
        return grad_x, grad_weight

    def _grouped_dgrad(self, rows: torch.Tensor, weight: FP8Operand, state: GemmState, groups: Groups) -> torch.Tensor:
        """Return Dgrad of all experts on FP8 tensor cores, each with random numbers of its tokens where any are drawn.
        Products with a rotation are not in FP8."""
        dgrad = self.spec.scheme.dgrad
        backend = self.spec.backend
        left = None
        if dgrad.is_random:
            parts = [
                quantize_operand(rows[tokens], dgrad.left, "dgrad", "grad", state.rng_of(expert), backend)
                for expert, tokens in groups
            ]
            left = torch.cat(parts)
        return self.fp8.dgrad(rows, weight, None, left, groups)


def _rows_of(x: torch.Tensor | FP8Operand, tokens: slice) -> torch.Tensor | FP8Operand:
    if isinstance(x, FP8Operand):
        return FP8Operand(x.elements[tokens], x.scale)
    return x[tokens]
