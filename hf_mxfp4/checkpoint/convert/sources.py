# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as packed layers, read one at a time: packed ones, full-precision ones, and other engines' formats."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...config import QUANT_METHOD, MXFP4RLConfig
from ...experts_layout import unsupported_reason
from ...gemm.storage.packed_weight import check_rotation, quantize_weight
from ...module_names import fused_experts
from ..formats import PackedFormat
from ..io.folder import CheckpointError, CheckpointFolder
from ..io.packed_files import check_packed_files
from ..io.reader import StoredTensor, read_headers
from ..io.tensor_names import FileNames
from ..io.validate import check_checkpoint
from .stored_weights import join_pieces, layer_shapes, packed_names, packed_specs, quantizable_layers, read_tensor


class LayerSource(ABC):
    """A checkpoint whose quantized layers can be had in packed form.

    Attributes:
        folder: what is read.
        config: the scheme, of mode ``"packed"``.
        model: the model without memory.
        shapes: weights to be quantized, in the model's order: linear layers by their names, the fused weights of
            experts by theirs (``...experts.gate_up_proj``).
        names: what files call the tensors of the model; `None` where no experts are quantized, and files have the
            model's names.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        config: MXFP4RLConfig,
        model: nn.Module | None = None,
        names: FileNames | None = None,
    ):
        self.folder, self.config = folder, config
        self.model = folder.empty_model() if model is None else model
        layers = quantizable_layers(self.model, config)
        has_experts = any(not isinstance(layer, nn.Linear) for layer in layers.values())
        self.names = (names or FileNames(self.model)) if has_experts else None
        self.shapes = layer_shapes(layers, self.names)
        for layer, shape in self.shapes.items():
            try:
                check_rotation(layer, shape.in_features, config.weight_rotation)
            except ValueError as error:
                raise CheckpointError(f"{folder.path}: {error}") from None

    @abstractmethod
    def stored(self, layer: str) -> Iterable[StoredTensor]:
        """The tensors of the files that make a weight."""

    @abstractmethod
    def read(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        """The packed tensors of one matrix by the names of [`PACKED_FIELDS`]. Raises `ShardError`."""

    def find(self, name: str) -> StoredTensor | None:
        """The tensor that the files have for one of the model, by either name."""
        other = self.names.whole.get(name, name) if self.names else name
        return self.folder.tensors.get(name) or self.folder.tensors.get(other)

    @cached_property
    def rest(self) -> dict[str, StoredTensor]:
        """Tensors that belong to no quantized weight, biases included."""
        taken = {tensor.name for layer in self.shapes for tensor in self.stored(layer)}
        return {name: tensor for name, tensor in self.folder.tensors.items() if name not in taken}

    def bytes_of(self, layer: str) -> int:
        return sum(tensor.nbytes for tensor in self.stored(layer))

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
        self._fields = {layer: packed_names(layer, shape, config) for layer, shape in self.shapes.items()}
        packed = folder.empty_model()
        tensors: dict[str, dict[str, tuple[int, ...]]] = {}
        for layer, shape in self.shapes.items():
            for name, spec in packed_specs(layer, shape, config).items():
                owner, _, own = name.rpartition(".")
                tensors.setdefault(owner, {})[own] = spec.shape
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
                packed.get_submodule(owner).register_parameter(own, nn.Parameter(tensor, requires_grad=False))
        #: What was recorded of the weights' SQNR when they were packed, in decibels.
        self.sqnr_db: float | None = check_folder(folder, packed, config, tensors).get("weight_sqnr_db")

    def stored(self, layer: str) -> list[StoredTensor]:
        return [self.folder.tensors[name] for name in self._fields[layer].values()]

    def read(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        return {field: read_tensor(self.folder.tensors[name], expert) for field, name in self._fields[layer].items()}


class MasterSource(LayerSource):
    """A full-precision checkpoint, trained with ``mode="qat"`` or plain, packed as it is read.

    ``config``: of mode ``"packed"``; without one the checkpoint's own scheme. ``is_plain``: it was not trained under
    one.
    """

    def __init__(self, folder: CheckpointFolder, config: MXFP4RLConfig | None = None):
        own = own_config(folder)
        self.is_plain = own is None
        if own is not None and own.mode != "qat":
            raise CheckpointError(f"{folder.path} is packed already")
        if own is not None and config is not None:
            raise CheckpointError(f"{folder.path} was trained under a scheme of its own ({own.describe()}); give none")
        if own is None and config is None:
            raise CheckpointError(f"{folder.path} has no scheme; give one, or name a QAT or packed checkpoint")
        if own is not None and own.packing_unsupported_reason:
            raise CheckpointError(f"{folder.path} was trained under {own.describe()}; {own.packing_unsupported_reason}")
        super().__init__(folder, config or own.packed())
        if own is not None:
            check_folder(folder, self.model, own)
        self._whole: dict[str, StoredTensor] = {}
        for layer, shape in self.shapes.items():
            name = layer if shape.experts is not None else f"{layer}.weight"
            tensor = self.find(name)
            if tensor is not None or not shape.pieces:
                self._whole[layer] = tensor or _find(folder, name)
                _check_float(self._whole[layer], shape.full_shape())
                continue
            # One tensor for each expert, and often two: neither is ever joined with those of other experts.
            for piece in shape.pieces:
                _check_float(_find(folder, piece.name), (shape.n_rows(piece), shape.in_features))

    def stored(self, layer: str) -> list[StoredTensor]:
        if layer in self._whole:
            return [self._whole[layer]]
        return [self.folder.tensors[piece.name] for piece in self.shapes[layer].pieces]

    def master(self, layer: str, expert: int | None = None) -> torch.Tensor:
        """One full-precision matrix ``[N, K]``. Raises `ShardError`."""
        shape = self.shapes[layer]
        if layer in self._whole:
            weight = read_tensor(self._whole[layer], expert)
            return weight.t() if shape.transposed else weight
        return join_pieces(self.folder, shape, expert)

    def read(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        return self.pack(self.master(layer, expert))

    def pack(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """The packed tensors of a full-precision matrix ``[N, K]``."""
        config = self.config
        return quantize_weight(master, config.weight_scheme, config.backend, config.weight_rotation)


class ForeignSource(LayerSource):
    """A checkpoint in another engine's MXFP4 format.

    Raises [`CheckpointError`] when it quantizes layers that this package never does, or stores what has no equal here.
    """

    def __init__(self, folder: CheckpointFolder, format: PackedFormat):
        imported = format.read_config(folder.quantization)
        scales = {name for name, tensor in folder.tensors.items() if format.marks(tensor)}
        if not scales:
            raise CheckpointError(f"{folder.path} has no block scales, so nothing in it is quantized")
        for name in folder.tensors:
            if meaning := format.foreign.get(name.rsplit(".", 1)[-1]):
                raise CheckpointError(f"{folder.path} has {name}: {meaning}, which this package has no equal of")
        model = folder.empty_model()
        format = format.for_checkpoint(folder, model)
        self.notes, self.format = [*imported.notes, *folder.notes()], format
        left_out = [name for name in fused_experts(model) if unsupported_reason(model.get_submodule(name))]
        candidates = quantizable_layers(model, _with_skips(imported.config, left_out))
        has_experts = any(not isinstance(layer, nn.Linear) for layer in candidates.values())
        names = FileNames(model) if has_experts else None
        quantized: set[str] = set()
        for name, layer in candidates.items():
            own = {
                spec
                for weight, shape in layer_shapes({name: layer}, names).items()
                if not format.shape_misfit(shape)
                for spec in format.specs(weight, shape)
            }
            if not scales.isdisjoint(own):
                quantized.add(name)
                scales -= own
        if scales:
            foreign = min(scales).removesuffix(".weight_scale").removesuffix("_scales")
            raise CheckpointError(
                f"{folder.path} quantizes {foreign}"
                + (f" and {len(scales) - 1} more" if len(scales) > 1 else "")
                + ", which this package keeps in full precision (heads, routers, embeddings) or cannot pack"
            )
        skips = [*(name for name in candidates if name not in quantized), *left_out]
        super().__init__(folder, _with_skips(imported.config, skips), model, names)
        self._specs = {layer: format.specs(layer, shape) for layer, shape in self.shapes.items()}
        for specs in self._specs.values():
            for name, spec in specs.items():
                tensor = _find(folder, name)
                if tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                    raise CheckpointError(
                        f"{tensor.file.name}: {name} is {tensor.dtype} {list(tensor.shape)}; the model needs "
                        f"{spec.dtype} {list(spec.shape)}"
                    )

    def stored(self, layer: str) -> list[StoredTensor]:
        return [self.folder.tensors[name] for name in self._specs[layer]]

    def read(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        return self.format.read(layer, self.shapes[layer], expert, self._read)

    def _read(self, name: str, index: int | None = None) -> torch.Tensor:
        return read_tensor(self.folder.tensors[name], index)


def _check_float(tensor: StoredTensor, expected: tuple[int, ...]) -> None:
    if not tensor.dtype.is_floating_point or tensor.shape != expected:
        raise CheckpointError(
            f"{tensor.file.name}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}; "
            f"the model needs floating-point {list(expected)}"
        )


def own_config(folder: CheckpointFolder) -> MXFP4RLConfig | None:
    """The scheme in a checkpoint's `config.json`; `None` for a plain one. Raises [`CheckpointError`]."""
    options = folder.quantization
    if not options:
        return None
    method = options.get("quant_method")
    if method != QUANT_METHOD:
        raise CheckpointError(
            f"{folder.path} is quantized by {method!r}; import it first (compressed-tensors, quark and gpt-oss can be "
            "imported)"
        )
    try:
        return MXFP4RLConfig.from_dict(options)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the quantization_config of {folder.path} cannot be read: {error}") from error


def check_folder(
    folder: CheckpointFolder,
    model: nn.Module,
    config: MXFP4RLConfig,
    packed: Mapping[str, Mapping[str, tuple[int, ...]]] | None = None,
) -> dict[str, Any]:
    """[`check_checkpoint`] of a folder, and [`check_packed_files`] of its layers in ``packed``. Raises
    [`CheckpointError`]."""
    try:
        files = read_headers(sorted({tensor.file for tensor in folder.tensors.values()}))
        record = check_checkpoint(files, model, config)
        if packed is not None:
            check_packed_files(files, packed)
        return record
    except ValueError as error:
        raise CheckpointError(f"{folder.path}: {error}") from None


def _find(folder: CheckpointFolder, name: str) -> StoredTensor:
    if name not in folder.tensors:
        raise CheckpointError(
            f"{folder.path} has no {name}, which its architecture needs; if its files use other names, load it with "
            "from_pretrained, and save_pretrained it first"
        )
    return folder.tensors[name]


def _with_skips(config: MXFP4RLConfig, names: list[str]) -> MXFP4RLConfig:
    return replace(config, modules_to_not_convert=names or None)
