# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as packed layers, read one at a time: packed ones, full-precision ones, and other engines' formats."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..config import QUANT_METHOD, MXFP4RLConfig
from ..module_names import find_linears, fused_experts
from ..ops.packed import PACKED_FIELDS, packed_shapes, quantize_weight
from .folder import CheckpointError, CheckpointFolder
from .formats import LayerShape, RenamedFormat
from .stream import StoredTensor, read_rows
from .validate import check_checkpoint


class LayerSource(ABC):
    """A checkpoint whose quantized layers can be had in packed form.

    Attributes:
        folder: what is read.
        config: the scheme, of mode ``"packed"``.
        model: the model without memory.
        shapes: layers to be quantized, in the model's order.
    """

    def __init__(self, folder: CheckpointFolder, config: MXFP4RLConfig, model: nn.Module | None = None):
        self.folder, self.config = folder, config
        self.model = folder.empty_model() if model is None else model
        linears = _linears(self.model, config)
        self.shapes: dict[str, LayerShape] = {}
        seen: set[int] = set()
        for name, linear in linears.items():
            if id(linear) not in seen:  # one layer in several places is stored under the first
                seen.add(id(linear))
                self.shapes[name] = LayerShape(linear.out_features, linear.in_features)

    @abstractmethod
    def stored(self, layer: str) -> Mapping[str, StoredTensor]:
        """The tensors of the file that make a layer's weight."""

    @abstractmethod
    def read(self, layer: str) -> dict[str, torch.Tensor]:
        """A layer's packed tensors by the names of [`PACKED_FIELDS`]. Raises `ShardError`."""

    @cached_property
    def rest(self) -> dict[str, StoredTensor]:
        """Tensors that belong to no quantized weight, biases included."""
        taken = {tensor.name for layer in self.shapes for tensor in self.stored(layer).values()}
        return {name: tensor for name, tensor in self.folder.tensors.items() if name not in taken}

    def bytes_of(self, layer: str) -> int:
        return sum(tensor.nbytes for tensor in self.stored(layer).values())

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.folder.tensors.values())


class PackedSource(LayerSource):
    """A checkpoint that a packed model saved."""

    def __init__(self, folder: CheckpointFolder):
        config = own_config(folder)
        if config is None or config.mode != "packed":
            raise CheckpointError(f"{folder.path} is no packed checkpoint")
        super().__init__(folder, config)
        self._fields = {
            layer: packed_shapes(shape.out_features, shape.in_features, config.weight_scheme)
            for layer, shape in self.shapes.items()
        }
        packed = folder.empty_model()
        for layer, shapes in self._fields.items():
            linear = packed.get_submodule(layer)
            for field, shape in shapes.items():
                tensor = torch.empty(shape, dtype=torch.uint8, device="meta")
                linear.register_parameter(field, nn.Parameter(tensor, requires_grad=False))
        #: What was recorded of the weights' SQNR when they were packed, in decibels.
        self.sqnr_db: float | None = check_folder(folder, packed, config).get("weight_sqnr_db")

    def stored(self, layer: str) -> dict[str, StoredTensor]:
        return {field: self.folder.tensors[f"{layer}.{field}"] for field in self._fields[layer]}

    def read(self, layer: str) -> dict[str, torch.Tensor]:
        return {field: read_whole(tensor) for field, tensor in self.stored(layer).items()}


class MasterSource(LayerSource):
    """A full-precision checkpoint, trained with ``mode="qat"`` or plain, packed as it is read.

    ``config``: of mode ``"packed"``; without one the checkpoint's own scheme.
    """

    def __init__(self, folder: CheckpointFolder, config: MXFP4RLConfig | None = None):
        own = own_config(folder)
        if own is not None and own.mode != "qat":
            raise CheckpointError(f"{folder.path} is packed already")
        if own is not None and config is not None:
            raise CheckpointError(f"{folder.path} was trained under a scheme of its own ({own.describe()}); give none")
        if own is None and config is None:
            raise CheckpointError(f"{folder.path} has no scheme; give one, or name a QAT or packed checkpoint")
        if own is not None and own.packing_obstacle:
            raise CheckpointError(f"{folder.path} was trained under {own.describe()}; {own.packing_obstacle}")
        super().__init__(folder, config or own.packed())
        if own is not None:
            check_folder(folder, self.model, own)
        for layer, shape in self.shapes.items():
            tensor = _find(folder, f"{layer}.weight")
            expected = (shape.out_features, shape.in_features)
            if not tensor.dtype.is_floating_point or tensor.shape != expected:
                raise CheckpointError(
                    f"{tensor.file.name}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}; "
                    f"the model needs floating-point {list(expected)}"
                )

    def stored(self, layer: str) -> dict[str, StoredTensor]:
        return {"weight": self.folder.tensors[f"{layer}.weight"]}

    def master(self, layer: str) -> torch.Tensor:
        """The full-precision weight. Raises `ShardError`."""
        return read_whole(self.stored(layer)["weight"])

    def read(self, layer: str) -> dict[str, torch.Tensor]:
        return self.pack(self.master(layer))

    def pack(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        return quantize_weight(master, self.config.weight_scheme, self.config.backend)


class ForeignSource(LayerSource):
    """A checkpoint in another engine's MXFP4 format.

    Raises [`CheckpointError`] when it quantizes layers that this package never does, or stores what has no equal here.
    """

    def __init__(self, folder: CheckpointFolder, format: RenamedFormat):
        imported = format.read_config(folder.quantization)
        self.notes = imported.notes
        self._names = format.names
        scale = f".{format.names['weight_scale']}"
        layers = [name.removesuffix(scale) for name in folder.tensors if name.endswith(scale)]
        if not layers:
            raise CheckpointError(f"{folder.path} has no tensor *{scale}, so nothing in it is quantized")
        for name in folder.tensors:
            if meaning := format.foreign.get(name.rsplit(".", 1)[-1]):
                raise CheckpointError(f"{folder.path} has {name}: {meaning}, which this package has no equal of")
        model = folder.empty_model()
        super().__init__(folder, _skipping(imported.config, model, set(layers)), model)
        if foreign := sorted(set(layers) - set(self.shapes)):
            raise CheckpointError(
                f"{folder.path} quantizes {foreign[0]}"
                + (f" and {len(foreign) - 1} more" if len(foreign) > 1 else "")
                + ", which this package keeps in full precision (heads, routers, embeddings) or cannot pack (experts)"
            )
        for layer, shape in self.shapes.items():
            for name, spec in format.specs(layer, shape).items():
                tensor = _find(folder, name)
                if tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                    raise CheckpointError(
                        f"{tensor.file.name}: {name} is {tensor.dtype} {list(tensor.shape)}; the model needs "
                        f"{spec.dtype} {list(spec.shape)}"
                    )

    def stored(self, layer: str) -> dict[str, StoredTensor]:
        return {field: self.folder.tensors[f"{layer}.{name}"] for field, name in self._names.items()}

    def read(self, layer: str) -> dict[str, torch.Tensor]:
        return {field: read_whole(tensor) for field, tensor in self.stored(layer).items()}


def _linears(model: nn.Module, config: MXFP4RLConfig) -> dict[str, nn.Linear]:
    try:
        return find_linears(model, config.modules_to_not_convert or ())[0]
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def own_config(folder: CheckpointFolder) -> MXFP4RLConfig | None:
    """The scheme in a checkpoint's `config.json`; `None` for a plain one. Raises [`CheckpointError`]."""
    options = folder.quantization
    if not options:
        return None
    method = options.get("quant_method")
    if method != QUANT_METHOD:
        raise CheckpointError(
            f"{folder.path} is quantized by {method!r}; import it first (compressed-tensors and quark can be imported)"
        )
    try:
        return MXFP4RLConfig.from_dict(options)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the quantization_config of {folder.path} cannot be read: {error}") from error


def check_folder(folder: CheckpointFolder, model: nn.Module, config: MXFP4RLConfig) -> dict[str, Any]:
    """[`check_checkpoint`] of a folder. Raises [`CheckpointError`]."""
    files = sorted({str(tensor.file) for tensor in folder.tensors.values()})
    try:
        return check_checkpoint(files, model, config)
    except ValueError as error:
        raise CheckpointError(f"{folder.path}: {error}") from None


def read_whole(tensor: StoredTensor) -> torch.Tensor:
    """A stored matrix. Raises `ShardError`."""
    return read_rows(tensor, 0, tensor.shape[0])


def packed_names(layer: str, config: MXFP4RLConfig) -> dict[str, str]:
    """The fields that a layer's weight has under a scheme, and their full names, in the order of [`PACKED_FIELDS`]."""
    present = packed_shapes(1, 1, config.weight_scheme)
    return {field: f"{layer}.{field}" for field in PACKED_FIELDS if field in present}


def _find(folder: CheckpointFolder, name: str) -> StoredTensor:
    if name not in folder.tensors:
        raise CheckpointError(
            f"{folder.path} has no {name}, which its architecture needs; if its files use other names, load it with "
            "from_pretrained, and save_pretrained it first"
        )
    return folder.tensors[name]


def _skipping(config: MXFP4RLConfig, model: nn.Module, layers: set[str]) -> MXFP4RLConfig:
    """``config`` for exactly the linear layers named ``layers``, as far as a config can say so."""
    experts = fused_experts(model)
    linears = _linears(model, _with_skips(config, experts))
    return _with_skips(config, [*(name for name in linears if name not in layers), *experts])


def _with_skips(config: MXFP4RLConfig, names: list[str]) -> MXFP4RLConfig:
    return replace(config, modules_to_not_convert=names or None)
