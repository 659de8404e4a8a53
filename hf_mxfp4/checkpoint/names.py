# SPDX-License-Identifier: Apache-2.0
"""The weights of a model that are quantized, and the names that tensors have in checkpoint files, as transformers maps
them.

Loading is asked of `rename_source_key`, with which transformers finds the place of each stored tensor. Saving is asked
of `revert_weight_conversion`: it gets tensors of row numbers, and where these turn up is what the files look like.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..model.layer_names import (
    BY_OPTION,
    candidates,
    find_layers,
    fused_experts,
    is_recorded,
    skip_reasons,
    unknown_names,
)
from ..model.plain_layers import is_linear, linear_size, needs_conversion
from ..model.structure import HEAD, experts_layout, experts_unsupported_reason, projections, weight_names, weight_size
from ..numerics import QuantScheme
from ..ops import PACKED_FIELDS, PACKED_SUFFIXES, packed_shapes
from .folder import CONFIG, CheckpointError, CheckpointFolder, StoredTensor, read_json


@dataclass(frozen=True)
class Piece:
    """A tensor of the files that holds rows of one expert's weight."""

    name: str
    expert: int
    rows: slice


class FileNames:
    """What the files of a checkpoint call the tensors of ``model``, of which only names and shapes count.

    Args:
        stored: the names in the files.
        spell: the name that a plain checkpoint would have for a stored name, where a format adds suffixes of its own.

    Attributes:
        places: stored name -> name in the model, of tensors that are loaded as they are.
        stored: the other way round, as ``spell`` makes the names.
        converted: stored name -> first tensor of the model that transformers computes from it.
        unexpected: stored names that transformers ignores.
        missing: tensors of the model that no file has, except tied ones and those that the architecture computes.
        saver: the names in the model that wrote the files, if it is of another class.
    """

    saver: "FileNames | None" = None

    def __init__(self, model: nn.Module, stored: Iterable[str] = (), spell: Callable[[str], str] = str):
        self._model = model
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.places: dict[str, str] = {}
        self.converted: dict[str, str] = {}
        self.unexpected: set[str] = set()
        self._placed = self._place({spell(name): name for name in stored})
        self.stored = {place: spell(name) for name, place in self.places.items()}

        # Of tied tensors the files may have any one.
        tied = tied_weights(model, self._shapes)
        origins = {tied.get(name, name) for name in self._placed}
        computed = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        self.missing: set[str] = set()
        for name in self._shapes.keys() - self._placed:
            is_computed = any(re.search(pattern, name) for pattern in computed)
            if tied.get(name, name) not in origins and not is_computed:
                self.missing.add(name)

    def _place(self, stored: Mapping[str, str]) -> set[str]:
        """Fill the attributes for stored names by their plain names, and return the tensors of the model that the files
        have."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        prefix = ""
        transforms = []
        if hasattr(self._model, "base_model_prefix"):  # a model of transformers
            prefix = self._model.base_model_prefix
            transforms = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        placed: set[str] = set()
        for name in sorted(stored, key=dot_natural_key):
            place, pattern = rename_source_key(name, renamings, converters, prefix, self._shapes)
            if place not in self._shapes and name in self._shapes:
                # The file has a name of the model itself, as a Trainer's checkpoints have.
                place, pattern = rename_source_key(name, [], [], prefix, self._shapes)
            targets = [place]
            if pattern is not None:  # several tensors of the model may be computed from it
                first, *others = by_pattern[pattern].target_patterns
                targets += [place.replace(first, other) for other in others]
            targets = [target for target in targets if target in self._shapes]
            placed.update(targets)
            if not targets:
                self.unexpected.add(stored[name])
            elif pattern is not None:
                self.converted[stored[name]] = targets[0]
            else:
                self.places[stored[name]] = place
        return placed

    @cached_property
    def others(self) -> dict[str, set[str]]:
        """Further names of the modules of the model, by the names there: in the files, and in the model that wrote
        them (``saver``)."""
        others: dict[str, set[str]] = {}
        for stored, place in (self.converted | self.places).items():
            owner = place.rpartition(".")[0]
            last = owner.rpartition(".")[2]
            others.setdefault(owner, set()).update(_module_of(name, last) for name in self._names_of(stored))
        return others

    @property
    def absent(self) -> set[str]:
        """Names of the modules in files that the model does not have, as [`others`]."""
        return {name.rpartition(".")[0] for stored in self.unexpected for name in self._names_of(stored)}

    def _names_of(self, stored: str) -> set[str]:
        """Return the names of a tensor in the files and in the model that wrote them."""
        if self.saver is None:
            return {stored}
        places = self.saver.converted | self.saver.places
        return {stored, places.get(stored, stored)}

    def is_tied_away(self, name: str) -> bool:
        """Return whether the files have a tensor of the model only under the name of another that it is tied to."""
        return name in self._shapes and name not in self._placed and name not in self.missing

    @cached_property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Fused weights of experts -> the tensors that plain files have in their place, experts and rows in order."""
        # Have transformers save tensors of row numbers, and read off the results what it does with rows.
        pieces = {}
        for name in _fused_weights(self._model):
            n_experts, n_rows, _ = self._shapes[name]
            # Two columns, since older versions of transformers drop an axis of length one.
            numbers = torch.arange(n_experts * n_rows).view(n_experts, n_rows, 1).expand(-1, -1, 2)
            saved = _saved(self._model, {name: numbers})
            if [tensor.shape for tensor in saved.values()] != [numbers.shape]:
                pieces[name] = _pieces(self._model, name, saved, n_rows)
        return pieces

    @cached_property
    def whole(self) -> dict[str, str]:
        """Name in the model -> name in files that `save_pretrained` writes, of tensors that are the same in both.

        Raises [`CheckpointError`] for an architecture whose other tensors are converted.
        """
        fused = _fused_weights(self._model)
        whole = {}
        for name in fused:
            if name not in self.pieces:
                (whole[name],) = _saved(self._model, {name: torch.zeros(1, 1, 2)})
        # Number all other tensors, and look under which name transformers saves each number.
        rest = [name for name in self._shapes if name not in fused]
        numbers = {name: torch.tensor([number]) for number, name in enumerate(rest)}
        for name, number in _saved(self._model, numbers).items():
            if number.shape != (1,):
                raise unknown_layout(self._model, name)
            whole[rest[int(number)]] = name
        return whole


def _module_of(name: str, last: str) -> str:
    """Return the name of a tensor's module, up to ``last``, where that is the name of experts in one tensor."""
    parts = name.split(".")
    if last not in parts:
        return name.rpartition(".")[0]
    n_inside = parts[::-1].index(last)
    return ".".join(parts[: len(parts) - n_inside])


def saver_names(model: nn.Module, tensors: Mapping[str, StoredTensor]) -> FileNames | None:
    """Return the names in the model that wrote the files, by the `config.json` next to them; `None` if that has the
    class of ``model`` or cannot be read."""
    folder = Path()
    if tensors:
        folder = next(iter(tensors.values())).file.parent
    try:
        config = read_json(folder / CONFIG)
        if type(model).__name__ in (config.get("architectures") or ()):
            return None
        return FileNames(CheckpointFolder(folder, config, tensors).empty_model(), tensors)
    except CheckpointError:
        return None


def tied_weights(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the tied tensors of a model and those that they are tied to, with all fields of packed weights."""
    names = set(names)
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for target, source in list(tied.items()):
        for suffix in PACKED_SUFFIXES:
            if f"{source}{suffix}" in names:
                tied[f"{target}{suffix}"] = f"{source}{suffix}"
    return tied


def unknown_layout(model: nn.Module, name: str) -> CheckpointError:
    """Return the error for a tensor that transformers computes from those in the files."""
    return CheckpointError(
        f"checkpoints of {type(model).__name__} keep {name} in a way that is not converted file by file; load the "
        "model with from_pretrained, and write a packed checkpoint with hf_mxfp4.pack(model).save_pretrained(...)"
    )


def _fused_weights(model: nn.Module) -> list[str]:
    """Return the names of fused weights of experts that transformers may split into several tensors as it saves."""
    weights = []
    for name in fused_experts(model):
        experts = model.get_submodule(name)
        if experts_unsupported_reason(experts) is None and not experts_layout(experts).is_transposed:
            weights += [f"{name}.{projection}" for projection in projections(experts)]
    return weights


def _saved(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a model as transformers would save them."""
    from transformers.core_model_loading import revert_weight_conversion  # brings torch.compile's machinery with it

    try:
        return revert_weight_conversion(model, tensors)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        raise unknown_layout(model, next(iter(tensors))) from error


def _pieces(model: nn.Module, name: str, saved: dict[str, torch.Tensor], n_rows: int) -> tuple[Piece, ...]:
    """Read off tensors of row numbers which rows of a fused weight ``[experts, n_rows, ...]`` each saved tensor has."""
    pieces = []
    for stored, numbers in saved.items():
        rows = numbers.reshape(-1, 2)[:, 0]
        expert, start = divmod(int(rows[0]), n_rows)
        step = 1
        if len(rows) > 1:
            step = int(rows[1] - rows[0])
        stop = start + step * len(rows)
        if not torch.equal(rows, expert * n_rows + torch.arange(start, stop, step)):
            raise unknown_layout(model, name)
        pieces.append(Piece(stored, expert, slice(start, min(stop, n_rows), step)))
    return tuple(sorted(pieces, key=lambda piece: (piece.expert, piece.rows.start)))


@dataclass(frozen=True)
class LayerShape:
    """The logical weight ``[out_features, in_features]`` of a linear layer, or those of ``experts`` in a fused weight.

    Attributes:
        transposed: the model has ``[experts, in_features, out_features]``.
        pieces: the tensors that plain checkpoints have in place of a fused weight; empty if it is one tensor there too.
    """

    out_features: int
    in_features: int
    experts: int | None = None
    transposed: bool = False
    pieces: tuple[Piece, ...] = ()

    @property
    def matrices(self) -> Sequence[int | None]:
        """The experts, or `None` for the one matrix of a linear layer."""
        if self.experts is None:
            return (None,)
        return range(self.experts)

    @property
    def n_weights(self) -> int:
        """The number of elements of all matrices."""
        return len(self.matrices) * self.out_features * self.in_features

    @property
    def is_fused(self) -> bool:
        """Whether plain checkpoints have the weights of all experts in one tensor."""
        return self.experts is not None and not self.pieces

    def weight_name(self, layer: str) -> str:
        """Return the name of the weight in the model: fused ones are layers by themselves."""
        if self.experts is None:
            return f"{layer}.weight"
        return layer

    def in_model(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight laid out as in the model, or from that as ``[N, K]``."""
        if self.transposed:
            return weight.mT
        return weight

    def pieces_of(self, expert: int) -> list[Piece]:
        """Return the tensors of plain checkpoints that hold rows of one expert."""
        return [piece for piece in self.pieces if piece.expert == expert]

    def meta(self) -> torch.Tensor:
        """Return the weight in bfloat16, ``[N, K]`` or ``[experts, N, K]``, on the meta device."""
        return self._meta((self.out_features, self.in_features), torch.bfloat16)

    def meta_packed(self, scheme: QuantScheme) -> dict[str, torch.Tensor]:
        """Return the packed fields of the weight on the meta device."""
        shapes = packed_shapes(self.out_features, self.in_features, scheme)
        return {field: self._meta(shape, torch.uint8) for field, shape in shapes.items()}

    def _meta(self, matrix: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor for the shape of one matrix, or one of all experts."""
        shape = matrix
        if self.experts is not None:
            shape = (self.experts, *matrix)
        return torch.empty(shape, dtype=dtype, device="meta")


def kept_reasons(
    names: FileNames, config: MXFP4RLConfig, tensors: Mapping[str, StoredTensor], is_quantized: bool
) -> dict[str, str]:
    """Return the reasons of [`skip_reasons`], changed to what a checkpoint says: packed files show which weights are
    packed, and ``config`` lists what stayed in full precision when it was saved, with a model or an adapter.

    Layers that no file has, such as a new head, stay; so do all layers of a checkpoint that is not quantized
    (``is_quantized``) if the config lists nothing, or modules of another model. Without files, as of a state dict,
    heads stay.
    """
    model = names._model
    record = config.full_precision
    reasons = skip_reasons(model, config.modules_to_not_convert or ())
    if not is_quantized and (record is None or unknown_names(model, record)):
        return reasons
    places = names.converted | names.places
    dtypes = {place: tensors[stored].dtype for stored, place in places.items() if stored in tensors}
    shows_packed = torch.uint8 in dtypes.values()
    for name, module in candidates(model).items():
        if reasons.get(name) == BY_OPTION:
            continue
        if not is_linear(module) and experts_unsupported_reason(module) is not None:
            continue
        # All weights of a module are in the same form: the first one tells.
        dtype = dtypes.get(f"{name}.{weight_names(module)[0]}")
        if dtype is None and (tensors or reasons.get(name) == HEAD):
            continue
        if shows_packed:
            is_plain = dtype.is_floating_point
        else:
            is_plain = is_recorded(model, name, record, names.others.get(name, ()))
        if is_plain:
            reasons.setdefault(name, "in full precision in the checkpoint")
        else:
            reasons.pop(name, None)
    return reasons


def quantizable_layers(
    names: FileNames, config: MXFP4RLConfig, tensors: Mapping[str, StoredTensor], is_quantized: bool
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return linear layers and experts to be quantized, each under its first name, and [`kept_reasons`] of the others.
    Raises [`CheckpointError`]."""
    try:
        reasons = kept_reasons(names, config, tensors, is_quantized)
        layers = find_layers(names._model, config.modules_to_not_convert or (), reasons)[0]
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    first_names: dict[nn.Module, str] = {}  # a model may have a layer under several names
    for name, layer in layers.items():
        first_names.setdefault(layer, name)
    return {name: layer for layer, name in first_names.items()}, reasons


def layer_shapes(layers: Mapping[str, nn.Module], names: FileNames) -> dict[str, LayerShape]:
    """Return the weights of linear layers by the layers' names, the fused ones of experts by their own."""
    shapes: dict[str, LayerShape] = {}
    for name, layer in layers.items():
        if is_linear(layer):
            if needs_conversion(layer):
                raise unknown_layout(names._model, name)
            shapes[name] = LayerShape(*linear_size(layer))
            continue
        for projection in projections(layer):
            experts, rows, columns = weight_size(layer, projection)
            weight = f"{name}.{projection}"
            shapes[weight] = LayerShape(
                rows, columns, experts, experts_layout(layer).is_transposed, names.pieces.get(weight, ())
            )
    return shapes


def plain_tensors(name: str, shape: LayerShape, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that plain files have for a weight ``[N, K]`` or ``[experts, N, K]`` called ``name`` there."""
    if shape.pieces:
        return {piece.name: weight[piece.expert, piece.rows] for piece in shape.pieces}
    return {shape.weight_name(name): shape.in_model(weight)}


def packed_tensors(name: str, shape: LayerShape, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that our own packed files have for the packed fields of a weight."""
    base = shape.weight_name(name)
    suffixes = zip(PACKED_FIELDS, PACKED_SUFFIXES, strict=True)
    return {f"{base}{suffix}": packed[field] for field, suffix in suffixes if field in packed}


def stack_packed(shape: LayerShape, make: Callable[[int | None], Mapping[str, torch.Tensor]]) -> dict:
    """Return the packed fields of a weight; ``make(expert)`` returns those of one matrix."""
    packed = [make(expert) for expert in shape.matrices]
    if shape.experts is None:
        return dict(packed[0])
    return {field: torch.stack([part[field] for part in packed]) for field in packed[0]}
