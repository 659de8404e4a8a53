# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers in vLLM: on packed weights that stay as and where they were made, with adapters beside them,
or on dense ones."""

import json
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from ...config import MXFP4RLConfig
from ...gemm import PACKED_FIELDS, check_rotation, packed_shapes
from ...gemm import packed as _operators  # noqa: F401  (registers operators)
from ...numerics import BLOCK_SIZE
from .activations import quantize_input
from .adapters import PART_INDEX, add_adapters, make_room
from .expected import ExpectedLayers
from .served import WeightBytes


_MISSING = "in no file of the checkpoint; the scheme in config.json needs it"


class MXFP4RLLinearMethod(LinearMethodBase):
    """``Q(x) Q(W)^T + b`` on codes and scales, by the names that they have on disk, and what adapters add to it.

    The parameters are made once and written in place, by whatever is loaded or pushed, so that graphs which hold their
    addresses stay true.

    Args:
        scheme: of the checkpoint.
        name: of the layer, in vLLM.
        expected: told when the layer is loaded.
        parts: the layers that vLLM has joined in it, by the names that they have in checkpoints.
    """

    def __init__(
        self,
        scheme: MXFP4RLConfig,
        name: str = "",
        expected: ExpectedLayers | None = None,
        parts: list[str] | None = None,
    ):
        self.scheme, self.name, self.parts = scheme, name, parts or [name]
        self.expected = expected or ExpectedLayers()
        inputs = scheme.activation_scheme
        self._texts = str(scheme.weight_scheme), "" if inputs is None else str(inputs)
        self._rotation = scheme.weight_rotation

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
        """uint8 parameters of the shapes on disk; of a layer that is split by columns, the share of this process.

        Raises `ValueError` when a share would cut what is quantized together.
        """
        weights = self.scheme.weight_scheme
        check_rotation(self.name, input_size, self._rotation)
        if input_size_per_partition != input_size:
            self._check_share(input_size_per_partition, input_size)
        whole = packed_shapes(1, input_size, weights)
        shapes = packed_shapes(sum(output_partition_sizes), input_size_per_partition, weights)
        layer.mxfp4_shape = sum(output_partition_sizes), input_size_per_partition
        layer.mxfp4_n_parts = len(output_partition_sizes)
        layer.mxfp4_arrived = {name: set() for name in shapes}
        for name, shape in shapes.items():
            loader = _checked_loader(
                layer, f"{self.name}.{name}", name, whole[name][1], extra_weight_attrs["weight_loader"]
            )
            data = torch.empty(shape, dtype=torch.uint8)
            if name == "weight_macro" and weights.macro_block == "row":  # whole in every process
                parameter = ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
            else:
                parameter = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
            layer.register_parameter(name, parameter)
        if self.expected.settings.adapter_rank:
            self._make_room(layer, output_partition_sizes, params_dtype, extra_weight_attrs["weight_loader"])

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing is processed. Raise `ValueError` unless all tensors came, of all that vLLM has joined here."""
        missing = [
            f"{part}.{name}"
            for name, shards in layer.mxfp4_arrived.items()
            for part in self._parts_without(shards, layer.mxfp4_n_parts)
        ]
        if missing:
            raise ValueError(f"{', '.join(missing)}: {_MISSING}")
        self.expected.is_done(self.weight_bytes(layer))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        packed = [getattr(layer, name) if name in layer.mxfp4_arrived else None for name in PACKED_FIELDS]
        operand, backend, (weights, inputs) = x, self.scheme.backend, self._texts
        if self._rotation is not None:
            operand, inputs = torch.ops.hf_mxfp4.rotated_input(x, self._rotation.size, inputs, x.dtype, backend), ""
        y = torch.ops.hf_mxfp4.packed_linear(operand, *packed, bias, None, x.dtype, weights, inputs, backend)
        return add_adapters(y, x, layer, layer.mxfp4_adapter_rows) if self.expected.settings.adapter_rank else y

    def weight_bytes(self, layer: torch.nn.Module) -> WeightBytes:
        """What the layer's weight takes in this process."""
        tensors = [getattr(layer, name) for name in layer.mxfp4_arrived]
        return WeightBytes.of(tensors, *layer.mxfp4_shape, self.scheme.weight_scheme)

    def _make_room(
        self, layer: torch.nn.Module, rows: list[int], dtype: torch.dtype, loader: Callable[..., Any]
    ) -> None:
        if len(self.parts) not in (1, len(rows)):
            raise ValueError(
                f"{self.name}: vLLM joins {len(self.parts)} layers of checkpoints into {len(rows)} parts, and adapters "
                "cannot be told apart; set adapter_rank=0 and push merged weights"
            )
        layer.mxfp4_adapter_rows = list(rows) if len(self.parts) == len(rows) else [sum(rows)]
        rank = self.expected.settings.adapter_rank
        make_room(layer, self.name, rank, len(layer.mxfp4_adapter_rows), layer.mxfp4_shape, dtype, loader)

    def _parts_without(self, shards: set[Any], n_parts: int) -> list[str]:
        """The parts that none of ``shards`` is of: an index or letter, several, or `None` for all."""
        if None in shards:
            return []
        indices = {index for shard in shards for index in (shard if isinstance(shard, tuple) else (shard,))}
        indices = {PART_INDEX.get(index, index) for index in indices}
        names = self.parts if len(self.parts) == n_parts else [self.name] * n_parts
        return list(dict.fromkeys(name for index, name in enumerate(names) if index not in indices))

    def _check_share(self, share: int, columns: int) -> None:
        blocks = [BLOCK_SIZE, self.scheme.weight_scheme.macro_block or BLOCK_SIZE]
        if self._rotation is not None:
            blocks.append(self._rotation.size)
        inputs = self.scheme.activation_scheme
        if inputs is not None:
            blocks.append(inputs.macro_block or BLOCK_SIZE)
            if inputs.macro_block == "row" or inputs.fallback_rate is not None:
                raise ValueError(
                    f"{self.name}: tensor parallelism splits the inputs of this layer, and {inputs} needs whole rows; "
                    "use tensor_parallel_size=1"
                )
        # One factor for a row of weights is true of every part of it.
        unit = math.lcm(*(block for block in blocks if block != "row"))
        if share % unit:
            raise ValueError(
                f"{self.name}: tensor parallelism gives each process {share} of {columns} columns, which cuts blocks "
                f"of {unit}; choose a smaller tensor_parallel_size"
            )


def _checked_loader(
    layer: torch.nn.Module, full_name: str, name: str, columns: int, loader: Callable[..., Any]
) -> Callable[..., Any]:
    """``loader`` of ``layer``, for packed tensors of ``columns`` bytes only: others would be cut to size in silence.

    It is a method of the layer as vLLM's own loaders are, which its reloading takes apart and binds again.
    """
    is_method = getattr(loader, "__self__", None) is layer
    function = loader.__func__ if is_method else loader

    def load(self: torch.nn.Module, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: Any = None):
        if loaded_weight.dtype != torch.uint8 or loaded_weight.dim() != 2 or loaded_weight.shape[1] != columns:
            raise ValueError(
                f"{full_name} takes uint8 of {columns} columns; {loaded_weight.dtype} {list(loaded_weight.shape)} came "
                "past the plugin, or is of another scheme than config.json says"
            )
        owner = (self,) if is_method else ()
        shard = () if loaded_shard_id is None else (loaded_shard_id,)
        function(*owner, param, loaded_weight, *shard)
        self.mxfp4_arrived[name].add(loaded_shard_id)

    return MethodType(load, layer)


class MXFP4RLDenseLinearMethod(LinearMethodBase):
    """``Q(x) W^T + b`` on the values that came: ``Q(W)`` of a checkpoint, made before it is split among processes, and
    whatever a trainer pushes."""

    def __init__(self, scheme: MXFP4RLConfig, name: str, expected: ExpectedLayers, parts: list[str]):
        self.scheme, self.name, self.expected, self.parts = scheme, name, expected, parts
        self._json = json.dumps(scheme.to_dict())
        self._plain = UnquantizedLinearMethod()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *sizes: Any,
        **options: Any,
    ) -> None:
        """The weight of a layer that is not quantized."""
        self._plain.create_weights(layer, input_size_per_partition, output_partition_sizes, *sizes, **options)
        layer.mxfp4_shape = sum(output_partition_sizes), input_size_per_partition

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raise `RuntimeError` unless all that vLLM has joined here was converted, and `ValueError` where some of it
        came in part."""
        missing = [part for part in self.parts if part not in self.expected.arrived]
        names = packed_shapes(1, BLOCK_SIZE, self.scheme.weight_scheme)
        lacking = [
            f"{part}.{name}" for part in missing for name in names if name not in self.expected.pending.get(part, names)
        ]
        if lacking:
            raise ValueError(f"{', '.join(lacking)}: {_MISSING}")
        if missing:
            raise RuntimeError(
                f"{', '.join(missing)}: not converted, since vLLM loads this model's weights past the plugin, or no "
                "file has them; pack them, hf_mxfp4.pack(model), save_pretrained, and load that folder with "
                "weights='packed'"
            )
        self.expected.is_done(self.weight_bytes(layer))
        self._plain.process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.scheme.activation_scheme is not None:
            x = quantize_input(x, self._json)
        return self._plain.apply(layer, x, bias)

    def weight_bytes(self, layer: torch.nn.Module) -> WeightBytes:
        """What the layer's weight takes in this process."""
        return WeightBytes.of([layer.weight], *layer.mxfp4_shape, self.scheme.weight_scheme)
