# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are converted, read one matrix at a time: packed, full-precision, and other engines' formats."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..config import QUANT_METHOD, MXFP4RLConfig
from ..model.layer_names import fused_experts
from ..model.plain_layers import is_linear
from ..model.structure import experts_unsupported_reason
from ..ops import check_finite, check_rotation, packed_shapes, quantize_weight
from .folder import CheckpointError, CheckpointFolder, NewTensor, StoredTensor, new_tensors, read_header
from .formats import IMPORTABLE, ImportableFormat, TensorScaleFormat
from .names import (
    FileNames,
    LayerShape,
    layer_shapes,
    packed_tensors,
    plain_tensors,
    quantizable_layers,
    unknown_layout,
)
from .scheme import read_record, stored_scheme


#: What to do with checkpoints of bitsandbytes, GPTQ, AWQ, FP8 and the like.
NOT_IMPORTED = (
    "what can be imported are MXFP4 checkpoints of compressed-tensors, quark and gpt-oss, and NVFP4 ones of "
    "compressed-tensors and modelopt. Use the full-precision checkpoint that this one was made from; or load it with "
    "transformers, call model.dequantize() where its method has that, and save it: weights are then quantized twice"
)


class LayerSource(ABC):
    """A checkpoint whose quantized layers can be read in packed form.

    Attributes:
        config: the scheme, of mode ``"packed"``.
        model: the model on the meta device.
        names: what the files call its tensors.
        reasons: why layers stay in full precision, by name, as in loading.
        has_experts: whether experts are quantized; packed checkpoints then have the model's names.
        shapes: weights to be quantized: linear layers and fused weights of experts (``...experts.down_proj``), by name.
        stored: the tensors of the files that make up each of these weights.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        config: MXFP4RLConfig,
        model: nn.Module | None = None,
        names: FileNames | None = None,
    ):
        if model is None:
            model = folder.empty_model()
        if names is None:
            names = FileNames(model, folder.tensors)
        self.folder = folder
        self.config = config
        self.model = model
        self.names = names

        # What is quantized: as the checkpoint itself says, if it has a scheme.
        stored_config = stored_scheme(folder.quantization)
        is_quantized = stored_config is not None
        layers, self.reasons = quantizable_layers(names, stored_config or config, folder.tensors, is_quantized)
        layers = {name: layer for name, layer in layers.items() if not names.is_tied_away(f"{name}.weight")}
        self.has_experts = any(not is_linear(layer) for layer in layers.values())
        self.shapes = layer_shapes(layers, names)
        for layer, shape in self.shapes.items():
            try:
                check_rotation(layer, shape.in_features, config.weight_rotation)
            except ValueError as error:
                raise CheckpointError(f"{folder.path}: {error}") from None

        # Where it is in the files, and whether they have all else that the model needs.
        self.stored = {layer: self._find(self._specs(layer, shape)) for layer, shape in self.shapes.items()}
        if names.missing:
            self._find({min(names.missing): None})  # raises an error with its name
        state = model.state_dict()
        self._find({place: state[place] for name, place in names.places.items() if name not in self._taken})

    @abstractmethod
    def _specs(self, layer: str, shape: LayerShape) -> dict[str, torch.Tensor]:
        """Return the tensors that make up a weight, on the meta device, by their names in the files."""

    @abstractmethod
    def read(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        """Return the packed tensors of one matrix by the names of [`PACKED_FIELDS`]. Raises `ShardError`."""

    def in_files(self, layer: str) -> str:
        """Return what the files call a layer of [`shapes`]."""
        return _owner(self.names, layer, self.shapes[layer])

    def in_plain_files(self, layer: str) -> str:
        """Return what `save_pretrained` of the plain model calls a layer."""
        if not self.has_experts:
            return self.in_files(layer)
        weight = self.shapes[layer].weight_name(layer)
        return self.names.whole.get(weight, weight).removesuffix(".weight")

    def packed_layer(self, layer: str, make: Callable[[str], dict[str, torch.Tensor]]) -> list[NewTensor]:
        """Return a layer in our own packed files; ``make(layer)`` makes its packed fields."""
        name = layer if self.has_experts else self.in_files(layer)
        shape = self.shapes[layer]
        specs = packed_tensors(name, shape, shape.meta_packed(self.config.weight_scheme))
        return new_tensors(specs, lambda: packed_tensors(name, shape, make(layer)))

    def bytes_of(self, layer: str) -> int:
        return sum(tensor.nbytes for tensor in self.stored[layer])

    def _find(self, specs: Mapping[str, torch.Tensor | None]) -> list[StoredTensor]:
        """Return the tensors of the files for those of the model. Raises [`CheckpointError`] if one is missing, has
        another shape than its spec, or another dtype unless both are floating-point."""
        tensors = []
        for name, spec in specs.items():
            stored = self.folder.tensors.get(self.names.stored.get(name, name))
            if stored is None and name in self.names.converted.values():
                raise unknown_layout(self.model, name)
            if stored is None:
                raise CheckpointError(
                    f"{self.folder.path} has no {name}, which a {type(self.model).__name__} needs; complete the files, "
                    "or restore the config.json that was saved with them"
                )
            tensors.append(stored)
            if spec is None:
                continue
            needed: Any = spec.dtype
            fits = stored.dtype == spec.dtype
            if spec.is_floating_point():
                needed = "floating-point"
                fits = stored.dtype.is_floating_point
            if not fits or stored.shape != spec.shape:
                raise CheckpointError(
                    f"{stored.file.name}: {stored.name} is {stored.dtype} {list(stored.shape)}; the model needs "
                    f"{needed} {list(spec.shape)}"
                )
        return tensors

    # ---- tensors that are not quantized ---------------------------------------------------------------------------

    @cached_property
    def rest(self) -> dict[str, StoredTensor]:
        """Tensors of the model that belong to no quantized weight, biases included."""
        left_out = self._taken | self.names.unexpected
        return {name: tensor for name, tensor in self.folder.tensors.items() if name not in left_out}

    @cached_property
    def _taken(self) -> set[str]:
        """The names in the files of tensors that make up quantized weights."""
        return {tensor.name for stored in self.stored.values() for tensor in stored}

    def notes_on_rest(self) -> list[str]:
        """Name the tensors of the files that are left out, as transformers ignores them."""
        ignored = sorted(self.names.unexpected - self._taken)
        if not ignored:
            return []
        shown = ", ".join(ignored[:3])
        if len(ignored) > 3:
            shown += ", ..."
        architecture = type(self.model).__name__
        return [f"{len(ignored)} tensors that transformers ignores in a {architecture} were left out: {shown}."]

    def packed_rest(self) -> list[NewTensor]:
        """Return all other tensors by the names that `save_pretrained` of the packed model gives."""
        if self.has_experts:
            return self.model_rest()
        return self._stored_rest()

    def plain_rest(self) -> list[NewTensor]:
        """Return all other tensors by the names in a plain model's files, experts in as many tensors as there."""
        # A Trainer's checkpoint has experts as they are in the model, also where all are in full precision.
        has_model_names = self.has_experts or not self.names.pieces.keys().isdisjoint(self.names.stored)
        if has_model_names:
            return self._renamed(to_files=True)
        return self._stored_rest()

    def model_rest(self) -> list[NewTensor]:
        """Return all other tensors by the names that the model has in memory."""
        return self._renamed(to_files=False)

    def _stored_rest(self) -> list[NewTensor]:
        """Return all other tensors by the names that they are stored by."""
        return [_copy(tensor, name) for name, tensor in self.rest.items()]

    def _renamed(self, to_files: bool) -> list[NewTensor]:
        """Return all other tensors by the names in a plain model's files (``to_files``), or else in the model."""
        names = self.names
        rest = dict(self.rest)
        renamed: list[NewTensor] = []
        # Fused weights of experts that are several tensors in plain files, and are not quantized.
        owners = sorted({name.rpartition(".")[0] for name in names.pieces.keys() - self.shapes.keys()})
        experts = layer_shapes({name: self.model.get_submodule(name) for name in owners}, names)
        for name, shape in experts.items():
            stored = names.stored.get(name, name)
            if stored in rest:
                tensor = rest.pop(stored)
                if to_files and shape.pieces:
                    renamed += _split(tensor, shape)
                else:
                    renamed.append(_copy(tensor, name))
            elif all(piece.name in rest for piece in shape.pieces):
                pieces = [rest.pop(piece.name) for piece in shape.pieces]
                if to_files:
                    renamed += [_copy(piece, piece.name) for piece in pieces]
                else:
                    renamed += self._joined(name, shape, pieces[0].dtype)
        # All else keeps its value: only names differ.
        for stored, tensor in rest.items():
            name = names.places.get(stored, stored)
            if to_files:
                name = names.whole.get(name, stored)
            elif stored in names.converted:
                raise unknown_layout(self.model, names.converted[stored])
            renamed.append(_copy(tensor, name))
        return renamed

    def _joined(self, name: str, shape: LayerShape, dtype: torch.dtype) -> list[NewTensor]:
        """Return a fused weight of experts that is several tensors in the files."""

        def make() -> dict[str, torch.Tensor]:
            return {name: torch.stack([self.join(shape, expert) for expert in shape.matrices])}

        return new_tensors({name: shape.meta().to(dtype)}, make)

    def join(self, shape: LayerShape, expert: int) -> torch.Tensor:
        """Return an expert's matrix ``[N, K]`` from the tensors that hold its rows. Raises `ShardError`."""
        pieces = shape.pieces_of(expert)
        dtype = self.folder.tensors[pieces[0].name].dtype
        whole = torch.empty(shape.out_features, shape.in_features, dtype=dtype)
        for piece in pieces:
            whole[piece.rows] = self.folder.tensors[piece.name].read()
        return whole


class PackedSource(LayerSource):
    """A checkpoint that a packed model saved, with the recorded SQNR of its weights in decibels (``sqnr_db``)."""

    def __init__(self, folder: CheckpointFolder):
        super().__init__(folder, own_config(folder))
        self.sqnr_db: float | None = _record(folder, self.config).get("weight_sqnr_db")

    def _specs(self, layer: str, shape: LayerShape) -> dict[str, torch.Tensor]:
        return packed_tensors(self.in_files(layer), shape, shape.meta_packed(self.config.weight_scheme))

    def read(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        fields = packed_shapes(1, 1, self.config.weight_scheme)
        return {field: _read(tensor, expert) for field, tensor in zip(fields, self.stored[layer], strict=True)}


class MasterSource(LayerSource):
    """A full-precision checkpoint, trained with ``mode="qat"`` or plain (``is_plain``), packed as it is read: under its
    own scheme, or under ``config``, of mode ``"packed"``."""

    def __init__(self, folder: CheckpointFolder, config: MXFP4RLConfig | None = None):
        trained = own_config(folder)
        self.is_plain = trained is None
        if trained is None:
            if config is None:
                raise CheckpointError(f"{folder.path} has no scheme; give one, or name a QAT or packed checkpoint")
            super().__init__(folder, config)
            return
        if trained.mode != "qat":
            raise CheckpointError(f"{folder.path} is packed already")
        scheme = trained.describe()
        if config is not None:
            raise CheckpointError(f"{folder.path} was trained under a scheme of its own ({scheme}); give none")
        if trained.packing_unsupported_reason:
            raise CheckpointError(f"{folder.path} was trained under {scheme}; {trained.packing_unsupported_reason}")
        super().__init__(folder, trained.packed())
        _record(folder, trained)  # raises an error unless the files fit their config.json

    def _specs(self, layer: str, shape: LayerShape) -> dict[str, torch.Tensor]:
        if self._is_split(layer, shape):
            return plain_tensors(layer, shape, shape.meta())
        return {shape.weight_name(layer): shape.in_model(shape.meta())}

    def _is_split(self, layer: str, shape: LayerShape) -> bool:
        """Return whether the files have a weight of experts in several tensors, at least one for each expert."""
        return bool(shape.pieces) and layer not in self.names.stored

    def master(self, layer: str, expert: int | None = None) -> torch.Tensor:
        """Return one full-precision matrix ``[N, K]``. Raises `ShardError`."""
        shape = self.shapes[layer]
        if self._is_split(layer, shape):
            return self.join(shape, expert)
        return shape.in_model(_read(self.stored[layer][0], expert))

    def finite_master(self, layer: str, expert: int | None = None) -> torch.Tensor:
        """Return [`master`]. Raises [`CheckpointError`] if it holds NaN or infinity."""
        weight = self.master(layer, expert)
        try:
            check_finite(layer, weight)
        except ValueError as error:
            raise CheckpointError(f"{self.folder.path}: {error}") from None
        return weight

    def read(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        return self.pack(self.finite_master(layer, expert))

    def pack(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the packed tensors of a full-precision matrix ``[N, K]``."""
        config = self.config
        return quantize_weight(master, config.weight_scheme, config.backend, config.weight_rotation)


class ForeignSource(LayerSource):
    """A checkpoint in another engine's MXFP4 format.

    Raises [`CheckpointError`] when it quantizes layers that this package never does, or stores what has no equal here.
    """

    def __init__(self, folder: CheckpointFolder, format: ImportableFormat):
        config, self.notes = format.read_config(folder.quantization)
        scales = {name for name, tensor in folder.tensors.items() if format.marks(tensor)}
        if not scales:
            raise CheckpointError(f"{folder.path} has no block scales, so nothing in it is quantized")
        self.format = format
        model = folder.empty_model()
        names = FileNames(model, folder.tensors, format.plain_name)

        # Layers whose scales are in the files are quantized; the others stay in full precision.
        skips = [name for name in fused_experts(model) if experts_unsupported_reason(model.get_submodule(name))]
        supported = replace(config, modules_to_not_convert=skips or None)
        candidates, _ = quantizable_layers(names, supported, folder.tensors, is_quantized=False)
        plain = []
        for name, layer in candidates.items():
            tensors: set[str] = set()
            for weight, shape in layer_shapes({name: layer}, names).items():
                if not format.shape_misfit(shape):
                    tensors |= format.specs(_owner(names, weight, shape), shape).keys()
            if scales.isdisjoint(tensors):
                plain.append(name)
            scales -= tensors

        # Scales that are left belong to layers that this package never quantizes.
        if scales:
            foreign = min(scales).removesuffix(".weight_scale").removesuffix("_scales")
            if len(scales) > 1:
                foreign += f" and {len(scales) - 1} more"
            raise CheckpointError(
                f"{folder.path} quantizes {foreign}, which this package keeps in full precision (heads, routers, "
                "embeddings) or cannot pack under that name"
            )
        super().__init__(folder, replace(config, modules_to_not_convert=[*plain, *skips] or None), model, names)

    def _specs(self, layer: str, shape: LayerShape) -> dict[str, torch.Tensor]:
        return self.format.specs(self.in_files(layer), shape)

    def read(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        stored = self.read_stored(layer, expert)
        if isinstance(self.format, TensorScaleFormat):
            return self.format.decode(stored)[0]
        return stored

    def read_stored(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        """Return one matrix as the format's own ``read`` does. Raises `ShardError`."""

        def read(name: str, index: int | None = None) -> torch.Tensor:
            return _read(self.folder.tensors[name], index)

        return self.format.read(self.in_files(layer), self.shapes[layer], expert, read)


def own_config(folder: CheckpointFolder) -> MXFP4RLConfig | None:
    """Return the scheme in a checkpoint's `config.json`; `None` for a plain one. Raises [`CheckpointError`]."""
    options = folder.quantization
    if not options:
        return None
    check_method(options, folder.path)
    try:
        return MXFP4RLConfig.from_dict(options)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the quantization_config of {folder.path} cannot be read: {error}") from error


def check_method(options: Mapping[str, Any], where: Any) -> None:
    """Raise [`CheckpointError`] for a ``quantization_config`` of another method, with what to do instead."""
    method = options.get("quant_method")
    if method != QUANT_METHOD:
        advice = NOT_IMPORTED
        if str(method) in IMPORTABLE:
            advice = "import it first (hf-mxfp4 import), or use the full-precision checkpoint that it was made from"
        raise CheckpointError(f"{where} is quantized by {method!r}; {advice}")


def _record(folder: CheckpointFolder, config: MXFP4RLConfig) -> dict[str, Any]:
    """Return what the headers of the files say of themselves. Raises [`CheckpointError`] unless it fits the config."""
    try:
        files = sorted({tensor.file for tensor in folder.tensors.values()})
        return read_record([read_header(file) for file in files], config)
    except ValueError as error:
        raise CheckpointError(f"{folder.path}: {error}") from None


def _read(tensor: StoredTensor, index: int | None = None) -> torch.Tensor:
    """Return a tensor, or one slice of its first axis."""
    if index is None:
        return tensor.read()
    return tensor.read(index, index + 1)[0]


def _copy(tensor: StoredTensor, name: str) -> NewTensor:
    """Return a tensor of the new files that holds the bytes of a stored one."""
    return NewTensor(name, tensor.dtype, tensor.shape, tensor.read)


def _split(tensor: StoredTensor, shape: LayerShape) -> list[NewTensor]:
    """Return a fused weight of experts in the tensors that plain files have in its place."""
    specs = plain_tensors("", shape, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    return new_tensors(specs, lambda: plain_tensors("", shape, tensor.read()))


def _owner(names: FileNames, layer: str, shape: LayerShape) -> str:
    """Return what the files call a linear layer, or a fused weight of experts."""
    return names.stored.get(shape.weight_name(layer), layer).removesuffix(".weight")
