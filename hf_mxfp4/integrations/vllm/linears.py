# SPDX-License-Identifier: Apache-2.0
"""Quantized linear layers in vLLM: on packed weights that stay in place, with adapters, or on dense ones."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from ...config import MXFP4RLConfig
from ...numerics import BLOCK_SIZE, FP8, NVFP4, LinearScheme, OperandScheme, QuantScheme
from ...ops import (
    PACKED_FIELDS,
    GemmSpec,
    PackedState,
    PackedWeight,
    check_rotation,
    compiled_packed_linear,
    is_same_memory,
    packed_shapes,
    read_input_scheme,
    register_owner,
)
from ...ops import quantize_input as quantize
from ...utils import Mixin
from .weight_loading import ExpectedLayers


@torch.library.custom_op("mxfp4_rl::quantize_input", mutates_args=())
def quantize_input(x: torch.Tensor, scheme: str, backend: str) -> torch.Tensor:
    """Return ``Q(x)`` along the last axis, in its dtype, by a scheme, ``"fp8"`` or ``"mxfp8"``: one operator, for
    compilers."""
    return quantize(x, x.dtype, read_input_scheme(scheme), backend).contiguous()


@quantize_input.register_fake
def _(x: torch.Tensor, scheme: str, backend: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def check_share(
    name: str,
    share: int,
    columns: int,
    schemes: tuple[QuantScheme | None, OperandScheme | None],
    advice: str,
    unit: int = BLOCK_SIZE,
) -> None:
    """Raise `ValueError` when a process's ``share`` of the input ``columns`` cuts what is quantized together.

    Args:
        schemes: of packed weights and of inputs, if any.
        advice: what to set instead.
        unit: how many columns belong together in any case.
    """
    if share == columns:
        return
    _, inputs = schemes
    has_row_factors = isinstance(inputs, QuantScheme) and inputs.macro_block == "row"
    if has_row_factors or inputs in (FP8, NVFP4):
        raise ValueError(
            f"{name}: tensor parallelism splits the inputs of this layer, and {inputs} needs whole rows; use {advice}"
        )
    blocks = [scheme.macro_block for scheme in schemes if isinstance(scheme, QuantScheme)]
    # One factor for a row of weights is true of every part of it.
    unit = math.lcm(BLOCK_SIZE, unit, *(block for block in blocks if isinstance(block, int)))
    if share % unit:
        raise ValueError(
            f"{name}: tensor parallelism gives each process {share} of {columns} columns, which cuts blocks of {unit}; "
            f"choose a smaller tensor_parallel_size, or {advice}"
        )


class _FromOurCheckpoint(Mixin):
    """Mixin of methods for linear layers; ``parts`` are the names in checkpoints of what vLLM has joined in one."""

    def __init__(self, scheme: MXFP4RLConfig, name: str, expected: ExpectedLayers, parts: list[str]):
        super().__init__()
        self.scheme = scheme
        self.name = name
        self.expected = expected
        self.parts = parts
        self._names = packed_shapes(1, BLOCK_SIZE, scheme.weight_scheme).keys()
        self._inputs = str(scheme.activation_scheme or "")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raise `ValueError` unless all tensors came, of all that vLLM has joined here."""
        self.expected.check_linear(self.parts, self.scheme.weight_scheme)
        super().process_weights_after_loading(layer)


class MXFP4RLLinearMethod(_FromOurCheckpoint, LinearMethodBase):
    """``Q(x) Q(W)^T + b`` on codes and scales, by the names that they have on disk, and what adapters add to it. The
    parameters are made once and written in place, so that graphs which hold their addresses stay true."""

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
        """Make uint8 parameters of the shapes on disk, or of this process's share of the columns. Raises `ValueError`
        when a share would cut what is quantized together."""
        weights = self.scheme.weight_scheme
        loader = extra_weight_attrs["weight_loader"]
        rotation = self.scheme.weight_rotation
        schemes = (weights, self.scheme.activation_scheme)
        check_rotation(self.name, input_size, rotation)
        unit = BLOCK_SIZE
        if rotation is not None:
            unit = rotation.size
        check_share(self.name, input_size_per_partition, input_size, schemes, "tensor_parallel_size=1", unit)
        products = LinearScheme(self.scheme.gemms().fprop)
        self._state = PackedState(GemmSpec(products, self.scheme.backend, self.scheme.matmul_backend))
        self._layer = weakref.ref(layer)
        register_owner(self)
        shapes = packed_shapes(sum(output_partition_sizes), input_size_per_partition, weights)
        for name, shape in shapes.items():
            data = torch.empty(shape, dtype=torch.uint8)
            if name == "weight_macro" and weights.macro_block == "row":  # whole in every process
                parameter = ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
            else:
                parameter = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
            layer.register_parameter(name, parameter)
        rank = self.expected.settings.adapter_rank
        if rank:
            make_room(
                layer,
                self.name,
                rank,
                len(self.parts),
                output_partition_sizes,
                input_size_per_partition,
                params_dtype,
                loader,
            )

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = compiled_packed_linear(x, layer.weight, bias)  # one operator
        if self.expected.settings.adapter_rank:
            y = add_adapters(y, x, layer)
        return y

    def packed_product(self, codes: torch.Tensor) -> tuple[PackedState, PackedWeight] | None:
        """Return what the operator multiplies with; see [`hf_mxfp4.ops.packed_operators`]."""
        layer = self._layer()
        if layer is None or not is_same_memory(codes, layer.weight):
            return None
        parts = []
        for name in PACKED_FIELDS:
            part = None
            if name in self._names:
                # vLLM's parameters are of classes of their own; kernels read plain tensors alone.
                part = getattr(layer, name).as_subclass(torch.Tensor)
            parts.append(part)
        return self._state, tuple(parts)


class MXFP4RLDenseLinearMethod(_FromOurCheckpoint, UnquantizedLinearMethod):
    """``Q(x) W^T + b`` on the values that came: ``Q(W)`` of a checkpoint, made before it is split among processes, and
    whatever a trainer pushes."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._inputs:
            x = quantize_input(x, self._inputs, self.scheme.backend)
        return super().apply(layer, x, bias)


# ---- adapters -------------------------------------------------------------------------------------------------------
# Next to the packed weight, written in place: ``y + (x A^T) B^T``. The factors are modules of their own, so that their
# weights have the names by which trainers push them; both are zero until something is pushed.

#: vLLM's names of the parts of a layer that it joins from queries, keys and values; other parts have numbers.
PART_INDEX = {"q": 0, "k": 1, "v": 2}


class _Factor(nn.Module):
    """Weight of one factor, of all layers that vLLM has joined in ``layer``."""

    def __init__(self, layer: nn.Module, name: str, rank: int, shape: tuple[int, int], dtype: torch.dtype):
        super().__init__()
        # vLLM's reloading remembers parameters with their loaders, for as long as the module of these loaders lives.
        self._layer = weakref.ref(layer)
        self._name = name
        self._rank = rank
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.weight.weight_loader = self.load

    def _room(self, rank: int) -> int:
        """Return how much less than the largest rank this is."""
        if rank > self._rank:
            raise ValueError(
                f"{self._name}: an adapter of rank {rank} was pushed, and there is room for rank {self._rank}; set "
                "adapter_rank in the vllm settings of the checkpoint"
            )
        return self._rank - rank


class _Down(_Factor):
    """``A`` ``[parts * rank, K]``: the parts of a joined layer below each other, each of this process's columns."""

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        """Load ``[r, K]`` in the place of one part's adapter, whatever rank that had."""
        padded = F.pad(loaded_weight, (0, 0, 0, self._room(loaded_weight.shape[0])))
        if padded.shape[1] != param.shape[1]:  # split by columns
            padded = padded.narrow(1, self._layer().tp_rank * param.shape[1], param.shape[1])
        index = PART_INDEX.get(loaded_shard_id, loaded_shard_id)
        if index is None and param.shape[0] == self._rank:  # nothing is joined
            index = 0
        if not isinstance(index, int):
            raise ValueError(f"{self._name}: {loaded_shard_id!r} is none of the layers that vLLM has joined in it")
        param.data.narrow(0, index * self._rank, self._rank).copy_(padded)


class _Up(_Factor):
    """``B`` ``[N, rank]``, of this process's rows."""

    def __init__(self, *arguments: Any, loader: Callable[..., Any]):
        super().__init__(*arguments)
        self.weight.output_dim = 0
        self._loader = loader.__func__  # type: ignore[attr-defined]

    def load(self, param: torch.Tensor, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        """Load ``[N, r]`` in the place of one part's adapter, as vLLM loads the rows of its weight."""
        padded = F.pad(loaded_weight, (0, self._room(loaded_weight.shape[1])))
        if loaded_shard_id is None:
            self._loader(self._layer(), param, padded)
        else:
            self._loader(self._layer(), param, padded, loaded_shard_id)


def make_room(
    layer: nn.Module,
    name: str,
    rank: int,
    n_parts: int,
    rows: list[int],
    columns: int,
    dtype: torch.dtype,
    loader: Callable[..., Any],
) -> None:
    """Give ``layer`` factors of zeros, for adapters up to ``rank`` of each of the ``n_parts`` layers joined in it.
    ``rows`` (of each part) and ``columns`` are those of this process; ``loader`` is vLLM's, a method of ``layer``.
    Raises `ValueError` when vLLM has split the rows otherwise than by those layers."""
    if n_parts not in (1, len(rows)):
        raise ValueError(
            f"{name}: vLLM joins {n_parts} layers of checkpoints into {len(rows)} parts, and adapters cannot be told "
            "apart; set adapter_rank=0 and push merged weights"
        )
    layer.mxfp4_adapter_rows = [sum(rows)]
    if n_parts == len(rows):
        layer.mxfp4_adapter_rows = list(rows)
    layer.lora_A = _Down(layer, name, rank, (n_parts * rank, columns), dtype)
    layer.lora_B = _Up(layer, name, rank, (sum(rows), rank), dtype, loader=loader)


def add_adapters(y: torch.Tensor, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Return ``y`` ``[..., N]`` with what the adapters of ``layer`` add to it for inputs ``x`` ``[..., K]``."""
    inner = F.linear(x, layer.lora_A.weight)
    up = layer.lora_B.weight
    rows = layer.mxfp4_adapter_rows
    if len(rows) == 1:
        return y + F.linear(inner, up)
    parts = zip(inner.chunk(len(rows), dim=-1), up.split(rows), strict=True)
    return y + torch.cat([F.linear(part, factor) for part, factor in parts], dim=-1)
