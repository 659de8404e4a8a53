# SPDX-License-Identifier: Apache-2.0
"""The weight matrices of a model one by one: of a linear layer there is one, of experts there are many."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .. import model_structure
from ..gemm import LayerRng, quantize_experts, quantize_weight
from ..numerics import GemmScheme
from .experts import MXFP4Experts
from .experts_base import ExpertsBase
from .linear import MXFP4Linear
from .packed_experts import MXFP4PackedExperts
from .packed_linear import MXFP4PackedLinear


TRAINABLE = (MXFP4Linear, MXFP4Experts)
PACKED = (MXFP4PackedLinear, MXFP4PackedExperts)
QUANTIZED = (*TRAINABLE, *PACKED)


@dataclass(frozen=True)
class WeightMatrix:
    """A matrix ``[N, K]`` that is quantized on its own, of a layer of trainable weights.

    Attributes:
        name: of the linear map: that of a linear layer, or ``...experts.3.gate_up_proj``.
        layer: what it is a part of.
        parameter: the parameter of ``layer`` that holds it.
        expert: its index in that parameter, `None` when it is all of it.
    """

    name: str
    layer: MXFP4Linear | MXFP4Experts
    parameter: str
    expert: int | None = None

    @property
    def full_name(self) -> str:
        """The parameter's name in the model."""
        owner = self.name if self.expert is None else self.name.removesuffix(f".{self.expert}.{self.parameter}")
        return f"{owner}.{self.parameter}"

    @property
    def fprop(self) -> GemmScheme:
        """How the forward product takes the matrix, as its right operand."""
        return self.layer.gemms.fprop if self.expert is None else self.layer.gemms[self.parameter].fprop

    @property
    def rng(self) -> LayerRng:
        """The random numbers of the linear map."""
        return self.layer.rng if self.expert is None else self.layer.rngs[self.parameter][self.expert]

    @property
    def siblings(self) -> int:
        """Return how many matrices the parameter holds."""
        return 1 if self.expert is None else self.layer.n_experts

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """This matrix of a value of the parameter, the same memory."""
        return value if self.expert is None else self.layer.rows_first(value)[self.expert]

    def weight(self) -> torch.Tensor:
        """The master weight as it is now, detached."""
        return self.of(getattr(self.layer, self.parameter).detach())

    def layer_values(self, value: torch.Tensor) -> torch.Tensor:
        """The values that the forward product takes for a value of the whole parameter, in its shape and dtype, where
        the scheme does not rotate."""
        if self.expert is None:
            return self.layer.quantized_weight(value, value.dtype)
        return self.layer.rows_first(self.layer.quantized_weight(self.parameter, value, value.dtype))

    def packed_values(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes and scales of [`layer_values`], uint8 ``[N, ...]`` or of experts ``[E, N, ...]``, where the scheme can
        be packed; by what their names in a packed checkpoint have after that of the parameter."""
        scheme, backend = self.layer.config.weight_scheme, self.layer.config.backend
        if self.expert is None:
            packed = quantize_weight(value.detach(), scheme, backend)
        else:
            packed = quantize_experts(self.layer.rows_first(value.detach()), scheme, backend)
        return {field.removeprefix("weight"): part for field, part in packed.items()}

    def effective_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The values that the forward product takes for rows of the matrix, rotated back, in its dtype."""
        if self.expert is None:
            return self.layer.effective_weight(rows)
        return self.layer.effective_rows(self.parameter, self.expert, rows)


def matrix_names(name: str, layer: nn.Module) -> list[str]:
    """The names of the linear maps in a quantized layer called ``name``, as they are counted and reported."""
    return model_structure.matrix_names(name, layer) if isinstance(layer, ExpertsBase) else [name]


def trainable_matrices(model: nn.Module) -> Iterator[WeightMatrix]:
    """All matrices of the trainable quantized layers of ``model``, in its order."""
    for name, layer in model.named_modules():
        if isinstance(layer, MXFP4Linear):
            yield WeightMatrix(name, layer, "weight")
        elif isinstance(layer, MXFP4Experts):
            for expert in range(layer.n_experts):
                for projection in layer.projections:
                    yield WeightMatrix(f"{name}.{expert}.{projection}", layer, projection, expert)
