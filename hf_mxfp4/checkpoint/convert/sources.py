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
from ...gemm import check_rotation, quantize_weight
from ...module_names import fused_experts
from ..formats import FORMATS, LayerShape, PackedFormat
from ..io.folder import CheckpointError, CheckpointFolder
from ..io.reader import StoredTensor, read_headers
from ..io.tensor_names import FileNames, unknown_layout
from ..io.validate import check_checkpoint
from .stored_weights import join_pieces, layer_shapes, packed_names, packed_specs, quantizable_layers, read_tensor


#: What to do with checkpoints of bitsandbytes, GPTQ, AWQ, FP8 and the like.
NOT_IMPORTED = (
    "what can be imported are MXFP4 checkpoints of compressed-tensors, quark, gpt-oss and gguf. Use the full-precision "
    "checkpoint that this one was made from. If there is none, load it with transformers, call model.dequantize() "
    "where its method has that, save it with save_pretrained, and use that folder: its weights are then quantized twice"
)


class LayerSource(ABC):
    """A checkpoint whose quantized layers can be had in packed form.

    Attributes:
        folder: what is read.
        config: the scheme, of mode ``"packed"``.
        model: the model without memory.
        names: what the files call the tensors of the model.
        has_experts: whether experts are quantized; packed checkpoints then have the model's names.
        shapes: weights to be quantized, in the model's order: linear layers by their names, the fused weights of
            experts by theirs (``...experts.gate_up_proj``).
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
        self.names = FileNames(self.model, folder.tensors) if names is None else names
        layers = {
            name: layer
            for name, layer in quantizable_layers(self.model, config).items()
            if not self.names.is_tied_away(f"{name}.weight")
        }
        self.has_experts = any(not isinstance(layer, nn.Linear) for layer in layers.values())
        self.shapes = layer_shapes(layers, self.names)
        for layer, shape in self.shapes.items():
            try:
                check_rotation(layer, shape.in_features, config.weight_rotation)
            except ValueError as error:
                raise CheckpointError(f"{folder.path}: {error}") from None

    def in_files(self, layer: str) -> str:
        """Return what the files call a layer of [`shapes`]."""
        return _owner(self.names, layer, self.shapes[layer])

    def in_packed_files(self, layer: str) -> str:
        """Return what `save_pretrained` of the packed model calls a layer."""
        return layer if self.has_experts else self.in_files(layer)

    def in_plain_files(self, layer: str) -> str:
        """Return what `save_pretrained` of the plain model calls a layer."""
        if not self.has_experts:
            return self.in_files(layer)
        if self.shapes[layer].experts is not None:
            return self.names.whole.get(layer, layer)
        return self.names.whole[f"{layer}.weight"].removesuffix(".weight")

    @abstractmethod
    def stored(self, layer: str) -> Iterable[StoredTensor]:
        """The tensors of the files that make a weight."""

    @abstractmethod
    def read(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        """The packed tensors of one matrix by the names of [`PACKED_FIELDS`]. Raises `ShardError`."""

    def find(self, name: str) -> StoredTensor:
        """Return the tensor of the files for one of the model. Raises [`CheckpointError`] if there is none."""
        stored = self.names.stored.get(name, name)
        if stored in self.folder.tensors:
            return self.folder.tensors[stored]
        if name in self.names.converted.values():
            raise unknown_layout(self.model, name)
        raise CheckpointError(
            f"{self.folder.path} has no {name}, which a {type(self.model).__name__} needs; complete the files, or "
            "restore the config.json that was saved with them"
        )

    def check_complete(self) -> None:
        """Raise [`CheckpointError`] where the files lack a tensor that the model needs."""
        if self.names.missing:
            self.find(min(self.names.missing))

    @cached_property
    def _taken(self) -> set[str]:
        return {tensor.name for layer in self.shapes for tensor in self.stored(layer)}

    @cached_property
    def rest(self) -> dict[str, StoredTensor]:
        """Tensors of the model that belong to no quantized weight, biases included."""
        out = self._taken | self.names.unexpected
        return {name: tensor for name, tensor in self.folder.tensors.items() if name not in out}

    def notes_on_rest(self) -> list[str]:
        """Say which tensors of the files are left out, as transformers ignores them."""
        ignored = sorted(self.names.unexpected - self._taken)
        if not ignored:
            return []
        shown = ", ".join(ignored[:3]) + (", ..." if len(ignored) > 3 else "")
        return [
            f"{len(ignored)} tensors that transformers ignores in a {type(self.model).__name__} were left out: {shown}."
        ]

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
        self._fields = {
            layer: packed_names(self.in_files(layer), shape, config) for layer, shape in self.shapes.items()
        }
        packed = folder.empty_model()
        for layer, shape in self.shapes.items():
            for name, spec in packed_specs(layer, shape, config).items():
                owner, _, own = name.rpartition(".")
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
                packed.get_submodule(owner).register_parameter(own, nn.Parameter(tensor, requires_grad=False))
        #: What was recorded of the weights' SQNR when they were packed, in decibels.
        self.sqnr_db: float | None = check_folder(folder, packed, config).get("weight_sqnr_db")

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
            if name in self.names.stored or not shape.pieces:
                self._whole[layer] = self.find(name)
                _check_float(self._whole[layer], shape.full_shape())
                continue
            # One tensor for each expert, and often two: neither is ever joined with those of other experts.
            for piece in shape.pieces:
                _check_float(self.find(piece.name), (shape.n_rows(piece), shape.in_features))
        self.check_complete()

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
        # Formats with names of their own map these themselves.
        names = FileNames(model, folder.tensors if format.plain_names else (), format.plain_name)
        left_out = [name for name in fused_experts(model) if unsupported_reason(model.get_submodule(name))]
        candidates = quantizable_layers(model, _with_skips(imported.config, left_out))
        quantized: set[str] = set()
        for name, layer in candidates.items():
            own = {
                spec
                for weight, shape in layer_shapes({name: layer}, names).items()
                if not format.shape_misfit(shape)
                for spec in format.specs(_owner(names, weight, shape), shape)
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
        self._specs = {layer: format.specs(self.in_files(layer), shape) for layer, shape in self.shapes.items()}
        for specs in self._specs.values():
            for name, spec in specs.items():
                tensor = self.find(name)
                if tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                    raise CheckpointError(
                        f"{tensor.file.name}: {name} is {tensor.dtype} {list(tensor.shape)}; the model needs "
                        f"{spec.dtype} {list(spec.shape)}"
                    )
        if format.plain_names:
            self.check_complete()

    def stored(self, layer: str) -> list[StoredTensor]:
        return [self.folder.tensors[name] for name in self._specs[layer]]

    def read(self, layer: str, expert: int | None = None) -> dict[str, torch.Tensor]:
        return self.format.read(self.in_files(layer), self.shapes[layer], expert, self._read)

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
        raise CheckpointError(f"{folder.path} is quantized by {method!r}; {_what_is_possible(options)}")
    try:
        return MXFP4RLConfig.from_dict(options)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the quantization_config of {folder.path} cannot be read: {error}") from error


def check_folder(folder: CheckpointFolder, model: nn.Module, config: MXFP4RLConfig) -> dict[str, Any]:
    """[`check_checkpoint`] of a folder. Raises [`CheckpointError`]."""
    try:
        files = read_headers(sorted({tensor.file for tensor in folder.tensors.values()}))
        return check_checkpoint(files, model, config)
    except ValueError as error:
        raise CheckpointError(f"{folder.path}: {error}") from None


def importable() -> dict[str, PackedFormat]:
    """Return the formats that can be imported, by their `quant_method`."""
    return {format.quant_method: format for format in FORMATS.values() if isinstance(format, PackedFormat)}


def _what_is_possible(options: Mapping[str, Any]) -> str:
    """Say what to do with a checkpoint that another method quantized."""
    if (format := importable().get(str(options.get("quant_method")))) is not None:
        try:
            format.read_config(options)
        except CheckpointError as error:
            return f"it cannot be imported ({error}); {NOT_IMPORTED}"
        return "import it first (hf-mxfp4 import), or use the full-precision checkpoint that it was made from"
    return NOT_IMPORTED


def _owner(names: FileNames, weight: str, shape: LayerShape) -> str:
    end = "" if shape.experts is not None else ".weight"
    return names.stored.get(f"{weight}{end}", weight).removesuffix(".weight")


def _with_skips(config: MXFP4RLConfig, names: list[str]) -> MXFP4RLConfig:
    return replace(config, modules_to_not_convert=names or None)
