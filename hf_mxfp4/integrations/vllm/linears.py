# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers in vLLM: on packed weights that stay as and where they were made, with adapters beside them,
or on dense ones."""

import math
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from ...backends import fake_quantize
from ...config import MXFP4RLConfig
from ...gemm import (
    PACKED_FIELDS,
    PackedSpec,
    check_rotation,
    compiled_packed_linear,
    packed_shapes,
    read_scheme,
)
from ...numerics import BLOCK_SIZE, QuantScheme
from .adapters import add_adapters, make_room
from .weight_loading import ExpectedLayers


@torch.library.custom_op("mxfp4_rl::quantize_input", mutates_args=())
def quantize_input(x: torch.Tensor, scheme: str, backend: str) -> torch.Tensor:
    """Return ``Q(x)`` along the last axis, in the dtype of ``x``: one operator, so that vLLM can compile the model
    around it.

    Args:
        scheme: of inputs, as text.
        backend: see [`hf_mxfp4.fake_quantize`].
    """
    return fake_quantize(x, read_scheme(scheme), backend).contiguous()


@quantize_input.register_fake
def _(x: torch.Tensor, scheme: str, backend: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def check_share(
    name: str,
    share: int,
    columns: int,
    schemes: tuple[QuantScheme | None, QuantScheme | None],
    advice: str,
    unit: int = BLOCK_SIZE,
) -> None:
    """Raise `ValueError` when a process's ``share`` of the input ``columns`` cuts what is quantized together.

    Args:
        schemes: of weights that are packed, and of inputs; `None` for others.
        advice: what to set instead.
        unit: how many columns belong together in any case.
    """
    inputs = schemes[1]
    if share == columns:
        return
    if inputs is not None and (inputs.macro_block == "row" or inputs.fallback_rate is not None):
        raise ValueError(
            f"{name}: tensor parallelism splits the inputs of this layer, and {inputs} needs whole rows; use {advice}"
        )
    blocks = [scheme.macro_block for scheme in schemes if scheme is not None]
    # One factor for a row of weights is true of every part of it.
    unit = math.lcm(BLOCK_SIZE, unit, *(block for block in blocks if block not in (None, "row")))
    if share % unit:
        raise ValueError(
            f"{name}: tensor parallelism gives each process {share} of {columns} columns, which cuts blocks of {unit}; "
            f"choose a smaller tensor_parallel_size, or {advice}"
        )


class MXFP4RLLinearMethod(LinearMethodBase):
    """``Q(x) Q(W)^T + b`` on codes and scales, by the names that they have on disk, and what adapters add to it.

    The parameters are made once and written in place, by whatever is loaded or pushed, so that graphs which hold their
    addresses stay true.

    Args:
        scheme: of the checkpoint.
        name: of the layer, in vLLM.
        expected: what is known of all layers.
        parts: the layers that vLLM has joined in it, by the names that they have in checkpoints.
    """

    def __init__(self, scheme: MXFP4RLConfig, name: str, expected: ExpectedLayers, parts: list[str]):
        self.scheme, self.name, self.expected, self.parts = scheme, name, expected, parts
        self._names = packed_shapes(1, BLOCK_SIZE, scheme.weight_scheme).keys()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make uint8 parameters of the shapes on disk; of a layer that is split by columns, the share of this process.

        Raises `ValueError` when a share would cut what is quantized together.
        """
        weights, loader = self.scheme.weight_scheme, extra_weight_attrs["weight_loader"]
        rotation, schemes = self.scheme.weight_rotation, (weights, self.scheme.activation_scheme)
        check_rotation(self.name, input_size, rotation)
        unit = BLOCK_SIZE if rotation is None else rotation.size
        check_share(self.name, input_size_per_partition, input_size, schemes, "tensor_parallel_size=1", unit)
        self._spec = PackedSpec(*schemes, input_size_per_partition, self.scheme.backend, rotation)
        shapes = packed_shapes(sum(output_partition_sizes), input_size_per_partition, weights)
        for name, shape in shapes.items():
            data = torch.empty(shape, dtype=torch.uint8)
            if name == "weight_macro" and weights.macro_block == "row":  # whole in every process
                parameter = ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
            else:
                parameter = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
            layer.register_parameter(name, parameter)
        if self.expected.settings.adapter_rank:
            self._make_room(layer, output_partition_sizes, input_size_per_partition, params_dtype, loader)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raise `ValueError` unless all tensors came, of all that vLLM has joined here."""
        self.expected.check_linear(self.parts, self.scheme.weight_scheme)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed = tuple(getattr(layer, name) if name in self._names else None for name in PACKED_FIELDS)
        y = compiled_packed_linear(x, packed, bias, self._spec)  # one operator
        return add_adapters(y, x, layer, layer.mxfp4_adapter_rows) if self.expected.settings.adapter_rank else y

    def _make_room(
        self, layer: torch.nn.Module, rows: list[int], columns: int, dtype: torch.dtype, loader: Callable[..., Any]
    ) -> None:
        if len(self.parts) not in (1, len(rows)):
            raise ValueError(
                f"{self.name}: vLLM joins {len(self.parts)} layers of checkpoints into {len(rows)} parts, and adapters "
                "cannot be told apart; set adapter_rank=0 and push merged weights"
            )
        layer.mxfp4_adapter_rows = list(rows) if len(self.parts) == len(rows) else [sum(rows)]
        rank, n_parts = self.expected.settings.adapter_rank, len(layer.mxfp4_adapter_rows)
        make_room(layer, self.name, rank, n_parts, (sum(rows), columns), dtype, loader)


class MXFP4RLDenseLinearMethod(UnquantizedLinearMethod):
    """``Q(x) W^T + b`` on the values that came: ``Q(W)`` of a checkpoint, made before it is split among processes, and
    whatever a trainer pushes."""

    def __init__(self, scheme: MXFP4RLConfig, name: str, expected: ExpectedLayers, parts: list[str]):
        super().__init__()
        self.scheme, self.name, self.expected, self.parts = scheme, name, expected, parts
        inputs = scheme.activation_scheme
        self._inputs = "" if inputs is None else str(inputs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raise `ValueError` unless all tensors came, of all that vLLM has joined here."""
        self.expected.check_linear(self.parts, self.scheme.weight_scheme)
        super().process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._inputs:
            x = quantize_input(x, self._inputs, self.scheme.backend)
        return super().apply(layer, x, bias)
