# SPDX-License-Identifier: Apache-2.0
"""Trainable experts of a mixture: full-precision master weights in one 3-D parameter, MXFP4 operands."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..backends.select import choose_backend
from ..config import MXFP4RLConfig
from ..experts_layout import weight_size
from ..gemm import BackwardProducts, Draws, FastExperts, Groups, SavedInput, cat_rows, grouped_linear, rotate_back
from ..gemm.custom_ops import LinearForm, trainable_experts
from ..numerics import PLAIN, FallbackThreshold, LinearScheme, MXFP4Tensor, QuantScheme
from .experts_base import ExpertsBase
from .operands import input_operand, packed_operand, weight_operand
from .weight_cache import WeightCache, kept_for_backward


class MXFP4Experts(ExpertsBase):
    """Experts that compute as an [`MXFP4Linear`] for each projection of each expert would.

    Every expert's weight is quantized on its own, in blocks along the contraction axis whatever axis that is in the
    master weight. The parameters are those of the transformers module (same names, shapes and dtypes), so conversion
    of checkpoints, optimizers, DDP, FSDP2, ZeRO and PEFT's ``target_parameters`` see the experts that they know;
    nothing ever writes them but the optimizer. Made by [`from_experts`] alone.

    Attributes, besides those of the experts and of [`ExpertsBase`]:
        gemms: by projection, what the scheme means for the three products; see [`set_gemms`].
        forms: by projection, what its operator's shapes depend on; see [`hf_mxfp4.gemm.custom_ops`].
        dithered: as of [`MXFP4Linear`].
        draws: by projection, the random numbers of each expert; see [`set_quantization_step`].
    """

    @classmethod
    def from_experts(cls, experts: nn.Module, config: MXFP4RLConfig, name: str = "") -> "MXFP4Experts":
        """Quantized experts around the very parameters of ``experts``.

        Raises `ValueError` for a module that is not laid out as transformers' experts are.
        """
        layer = cls._around(experts, config, name)
        # As the draws of a linear layer have the name that the layer would have.
        layer.draws = {
            projection: tuple(
                Draws(config.stochastic_seed, f"{name}.{expert}.{projection}") for expert in range(layer.n_experts)
            )
            for projection in layer.projections
        }
        layer.dithered = {}
        # A second copy of nearly all of a model: where memory is short, only if asked for.
        layer._caches = {projection: WeightCache(unasked="cpu") for projection in layer.projections}
        layer._folded = {projection: WeightCache(unasked="cpu") for projection in layer.projections}
        layer.gemms, layer.forms, layer._products = {}, {}, {}
        for projection in layer.projections:
            layer.set_gemms(config.gemms(f"{name}.{projection}"), projection)
        schemes = {projection: gemms.fprop.left for projection, gemms in layer.gemms.items()}
        layer._start_thresholds({p: getattr(scheme, "fallback_rate", None) for p, scheme in schemes.items()})
        return layer

    def _own_attributes(self) -> tuple[str, ...]:
        return (*super()._own_attributes(), "gemms", "forms", "draws", "dithered", "_caches", "_folded", "_products")

    def set_gemms(self, gemms: LinearScheme, projection: str) -> None:
        """Compute the three products of a projection as ``gemms`` says, whose forward one must be the config's."""
        if gemms.fprop != self.config.gemms(self.name).fprop:
            raise ValueError(f"{self._label()}: single layers can differ from the config in dgrad and wgrad alone")
        self.gemms[projection] = gemms
        plain = gemms.dgrad == gemms.wgrad == PLAIN and gemms.fprop.rotation is None and not gemms.is_random
        self._products[projection] = (
            None
            if plain
            else tuple(BackwardProducts(gemms, draws, self.config.backend) for draws in self.draws[projection])
        )
        products = None if plain else self._products[projection][0]
        columns = self.weight_size(projection)[2]
        self.forms[projection] = LinearForm.of(gemms, products, self.config.saved_activations, columns)

    def full_precision_forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the plain experts compute on the master weights; see [`full_precision`]."""
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
        for projection, gemms in self.gemms.items():
            for draws in self.draws[projection]:
                draws.set_step(step)
            if gemms.fprop.is_random:
                self._caches[projection].clear()

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
        if torch.compiler.is_compiling():
            return trainable_experts(self, projection, x, groups)
        weight, bias = self.master(projection), self.bias_of(projection)
        return grouped_linear(x, weight, bias, groups, **self.parts(projection, groups))

    def master(self, projection: str) -> nn.Parameter:
        """The master weight of a projection."""
        return getattr(self, projection)

    def parts(self, projection: str, groups: Groups) -> dict[str, Any]:
        """The arguments of [`hf_mxfp4.gemm.grouped_linear`] that say how, by name, for one pass."""
        gemms, engine = self.gemms[projection], self.config.engine
        options = engine, self.draws[projection][0], partial(self._keep_folded, projection)
        return {
            "quantize_input": partial(self._input, projection, groups),
            "quantize_weight": kept_for_backward(partial(self.quantized_weight, projection)),
            "products": self._products[projection],
            "transposed": self.is_transposed,
            "saved": SavedInput(self.config.saved_activations, partial(self._packed_input, projection, groups)),
            "backend": self.config.backend,
            "fast": None if engine == "dense" else FastExperts(gemms, *options),
        }

    def _keep_folded(self, projection: str, weight: torch.Tensor, compute: Callable[[], Any]) -> Any:
        """The weights as a fast engine takes them, kept as [`WeightCache`] says."""
        return self._folded[projection].get(weight, weight.dtype, compute)

    def _input(self, projection: str, groups: Groups, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``Q(x)`` of all rows."""
        fprop, options = self.gemms[projection].fprop, self._input_options(projection)
        parts = [
            input_operand(rows, dtype, fprop, draws, *options) for rows, draws in self._draw(projection, groups, x)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _packed_input(self, projection: str, groups: Groups, x: torch.Tensor) -> MXFP4Tensor:
        """[`_input`] as codes and scale bytes."""
        fprop, options = self.gemms[projection].fprop, self._input_options(projection)
        return cat_rows(
            [packed_operand(rows, fprop, draws, *options) for rows, draws in self._draw(projection, groups, x)]
        )

    def _input_options(self, projection: str) -> tuple[FallbackThreshold | None, str]:
        return self.fallback_thresholds.get(projection), self.config.backend

    def _draw(self, projection: str, groups: Groups, x: torch.Tensor) -> list[tuple[torch.Tensor, Draws]]:
        """Rows that are quantized together, and their random numbers: each expert's own where some are drawn."""
        draws = self.draws[projection]
        if not self.gemms[projection].fprop.is_random:
            return [(x, draws[0])]
        return [(x[rows], draws[expert]) for expert, rows in groups] or [(x, draws[0])]

    def quantized_weight(self, projection: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight as the forward product takes it: ``Q(W)`` ``[experts, N, K]`` in ``dtype``, of the rotated and
        padded weight where the scheme rotates. Kept as [`WeightCache`] says."""
        fprop = self.gemms[projection].fprop
        if not isinstance(fprop.right, QuantScheme) and fprop.rotation is None:
            return self.rows_first(weight.detach()).to(dtype)
        return self._caches[projection].get(weight, dtype, lambda: self.weight_operand(projection, weight, dtype))

    def rows_first(self, weight: torch.Tensor) -> torch.Tensor:
        """A master weight as ``[experts, N, K]``, the same memory."""
        return weight.transpose(1, 2) if self.is_transposed else weight

    @torch.no_grad()
    def weight_operand(self, projection: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[`quantized_weight`], not kept."""
        fprop, backend = self.gemms[projection].fprop, self.config.backend
        weight, draws = self.rows_first(weight.detach()), self.draws[projection]
        scheme = fprop.right
        by_row = isinstance(scheme, QuantScheme) and scheme.block_rows == 1 and scheme.fallback_rate is None
        by_row = by_row and scheme.rounding == "nearest"  # each expert has random numbers of its own
        if by_row and fprop.rotation is None and choose_backend(weight, scheme, backend) != "eager":
            return weight_operand(weight, fprop, draws[0], backend).to(dtype)
        out = None
        for expert, own in enumerate(draws):  # the eager functions take several times the memory of their input
            values = weight_operand(weight[expert], fprop, own, backend)
            out = values.new_empty(len(draws), *values.shape, dtype=dtype) if out is None else out
            out[expert] = values
        return out

    @torch.no_grad()
    def effective_rows(self, projection: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """The values ``[n, K]`` that the forward product takes for rows of an expert's weight, rotated back, in its
        dtype."""
        fprop, draws = self.gemms[projection].fprop, self.draws[projection][expert]
        values = weight_operand(rows, fprop, draws, self.config.backend)
        return rotate_back(values, fprop.rotation, "fprop", rows.shape[-1], draws).to(rows.dtype)

    @torch.no_grad()
    def effective_weight(self, projection: str, weight: torch.Tensor) -> torch.Tensor:
        """The values that the forward product takes for a master weight, in its shape and dtype."""
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for expert, rows in enumerate(self.rows_first(weight.detach())):
            self.rows_first(out)[expert] = self.effective_rows(projection, expert, rows)
        return out
