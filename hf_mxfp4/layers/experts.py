# SPDX-License-Identifier: Apache-2.0
"""Trainable experts of a mixture: full-precision master weights in one 3-D parameter, MXFP4 operands."""

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..gemm import GemmState, Groups, LayerRng, compiled_linear, effective_rows, quantized_linear, weight_operand
from ..model_structure import weight_size
from ..numerics import LinearScheme
from .experts_base import ExpertsBase
from .linear import spec_of


class MXFP4Experts(ExpertsBase):
    """Experts that compute as an [`MXFP4Linear`] for each projection of each expert would.

    Every expert's weight is quantized on its own, in blocks along the contraction axis whatever axis that is in the
    master weight. The parameters are those of the transformers module (same names, shapes and dtypes), so conversion
    of checkpoints, optimizers, DDP, FSDP2, ZeRO and PEFT's ``target_parameters`` see the experts that they know;
    nothing ever writes them but the optimizer. Made by [`from_experts`] alone.
    """

    @classmethod
    def from_experts(cls, experts: nn.Module, config: MXFP4RLConfig, name: str = "") -> "MXFP4Experts":
        """Quantized experts around the very parameters of ``experts``.

        Raises `ValueError` for a module that is not laid out as transformers' experts are.
        """
        layer = cls._around(experts, config, name)
        for projection in layer.projections:
            spec = spec_of(config, config.gemms(), layer.is_transposed)
            # As those of a linear layer have the name that the layer would have.
            names = [f"{name}.{expert}.{projection}" for expert in range(layer.n_experts)]
            layer.states[projection] = GemmState(spec, [LayerRng(config.stochastic_seed, own) for own in names])
        return layer

    @property
    def gemms(self) -> dict[str, LinearScheme]:
        """Return by projection what the scheme means for the three products."""
        return {projection: state.spec.scheme for projection, state in self.states.items()}

    @property
    def rngs(self) -> dict[str, tuple[LayerRng, ...]]:
        """Return by projection the random numbers of each expert; see [`set_quantization_step`]."""
        return {projection: state.rngs for projection, state in self.states.items()}

    def full_precision_forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute what the plain experts do on the master weights; see [`full_precision`]."""
        ours = {name: self.__dict__[name] for name in self.plain_attributes}
        self.__dict__.update(self.plain_attributes)
        try:
            return super(ExpertsBase, self).forward(hidden_states, top_k_index, top_k_weights)
        finally:
            self.__dict__.update(ours)

    @property
    def is_random(self) -> bool:
        """Whether the experts draw random numbers."""
        return any(gemms.is_random for gemms in self.gemms.values())

    def set_step(self, step: int) -> None:
        """Draw the random numbers of optimizer step ``step`` from now on."""
        for state in self.states.values():
            state.set_step(step)

    def to_experts(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Plain experts whose weights hold the quantized values (in ``dtype``, default the master's)."""
        plain = self._to_plain()
        for name, parameter in self.named_parameters(recurse=False):
            value = self.effective_weight(name, parameter) if name in self.projections else parameter.detach()
            value = value.to(dtype or parameter.dtype, copy=name not in self.projections)
            setattr(plain, name, nn.Parameter(value, parameter.requires_grad))
        return plain

    def weight_size(self, projection: str) -> tuple[int, int, int]:
        return weight_size(self, projection)

    def _input_dtype(self) -> torch.dtype:
        return getattr(self, self.projections[0]).dtype

    def project(self, projection: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        operands = x, getattr(self, projection), self.bias_of(projection)
        state = self.states[projection]
        return (compiled_linear if torch.compiler.is_compiling() else quantized_linear)(*operands, state, groups)

    def quantized_weight(self, projection: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight as the forward product takes it: ``Q(W)`` ``[experts, N, K]`` in ``dtype``, of the rotated and
        padded weight where the scheme rotates. Kept by the [`WeightCache`] that is open, if any."""
        return weight_operand(weight, dtype, self.states[projection])

    def rows_first(self, weight: torch.Tensor) -> torch.Tensor:
        """A master weight as ``[experts, N, K]``, the same memory."""
        return weight.transpose(1, 2) if self.is_transposed else weight

    def effective_rows(self, projection: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """The values ``[n, K]`` that the forward product takes for rows of an expert's weight, rotated back, in its
        dtype."""
        return effective_rows(rows, self.states[projection], expert)

    @torch.no_grad()
    def effective_weight(self, projection: str, weight: torch.Tensor) -> torch.Tensor:
        """The values that the forward product takes for a master weight, in its shape and dtype."""
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for expert, rows in enumerate(self.rows_first(weight.detach())):
            self.rows_first(out)[expert] = self.effective_rows(projection, expert, rows)
        return out
