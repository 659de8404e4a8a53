# SPDX-License-Identifier: Apache-2.0
"""Names of tensors in checkpoint files and in the model, as transformers maps them.

Nothing here knows an architecture. Loading is asked of `rename_source_key`, the function with which transformers finds
the place of each stored tensor. Saving is asked of `revert_weight_conversion`: it gets tensors of row numbers, and
where the numbers turn up is what the files look like.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ..gemm import PACKED_SUFFIXES
from ..model_structure import experts_unsupported_reason, projections
from ..module_names import fused_experts
from .folder import CheckpointError


@dataclass(frozen=True)
class Piece:
    """A tensor of the files that holds rows of one expert's weight."""

    name: str
    expert: int
    rows: slice


class FileNames:
    """What the files of a checkpoint call the tensors of ``model``, and what they hold besides.

    Args:
        model: on the meta device or not; of its tensors only the names and shapes count.
        stored: the names in the files.
        spell: the name that a plain checkpoint would have for a stored name, where a format adds suffixes of its own.

    Attributes:
        places: stored name -> name in the model, of tensors that are loaded as they are.
        stored: the other way round, as ``spell`` makes the names.
        converted: stored name -> first tensor of the model that transformers computes from it.
        unexpected: stored names that transformers ignores.
        missing: tensors of the model that no file has, except tied ones and those that the architecture computes.
    """

    def __init__(self, model: nn.Module, stored: Iterable[str] = (), spell: Callable[[str], str] = str):
        self._model = model
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.tied = tied_weights(model, self._shapes)
        self.places: dict[str, str] = {}
        self.converted: dict[str, str] = {}
        self.unexpected: set[str] = set()
        self._found = found = self._place({spell(name): name for name in stored})
        self.stored = {place: spell(name) for name, place in self.places.items()}
        sources = {self.tied.get(name, name) for name in found}
        computed = _matcher(getattr(model, "_keys_to_ignore_on_load_missing", None))
        self.missing = {
            name
            for name in self._shapes.keys() - found
            if self.tied.get(name, name) not in sources and not computed(name)
        }

    def _place(self, stored: Mapping[str, str]) -> set[str]:
        """Find the places of all stored tensors; the tensors of the model that get a value."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        transforms = get_model_conversion_mapping(self._model) if hasattr(self._model, "base_model_prefix") else []
        renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix, found = getattr(self._model, "base_model_prefix", ""), set()
        for name in sorted(stored, key=dot_natural_key):
            place, pattern = rename_source_key(name, renamings, converters, prefix, self._shapes)
            if place not in self._shapes and name in self._shapes:
                place, pattern = rename_source_key(name, [], [], prefix, self._shapes)
            if pattern is not None:
                first, *others = by_pattern[pattern].target_patterns
                targets = [place, *(place.replace(first, other) for other in others)]
            else:
                targets = [place]
            targets = [target for target in targets if target in self._shapes]
            found.update(targets)
            if not targets:
                self.unexpected.add(stored[name])
            elif pattern is not None:
                self.converted[stored[name]] = targets[0]
            else:
                self.places[stored[name]] = place
        return found

    def is_tied_away(self, name: str) -> bool:
        """Return whether the files have a tensor of the model only under the name of another that it is tied to."""
        return name in self._shapes and name not in self._found and name not in self.missing

    @cached_property
    def pieces(self) -> dict[str, tuple[Piece, ...]]:
        """Fused weights of experts -> the tensors that plain files have in their place, experts and rows in order."""
        pieces = {}
        for name in _fused_weights(self._model):
            n_experts, n_rows, _ = self._shapes[name]
            # Two columns, since older versions of transformers drop an axis of length one.
            numbers = torch.arange(n_experts * n_rows).view(n_experts, n_rows, 1).expand(-1, -1, 2)
            found = _saved(self._model, {name: numbers})
            if len(found) > 1 or next(iter(found.values())).shape != numbers.shape:
                pieces[name] = _pieces(self._model, name, found, n_rows)
        return pieces

    @cached_property
    def whole(self) -> dict[str, str]:
        """Name in the model -> name in files that `save_pretrained` writes, of tensors that are the same in both.

        Raises [`CheckpointError`] for an architecture whose other tensors are converted.
        """
        names = [name for name in self._shapes if name not in self.pieces]
        fused = set(_fused_weights(self._model))
        whole = {name: next(iter(_saved(self._model, {name: torch.zeros(1, 1, 2)}))) for name in fused & set(names)}
        rest = [name for name in names if name not in fused]
        for name, mark in _saved(self._model, {name: torch.tensor([i]) for i, name in enumerate(rest)}).items():
            if mark.shape != (1,):
                raise unknown_layout(self._model, name)
            whole[rest[int(mark)]] = name
        return whole


def tied_weights(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the tied tensors of a model and those that they are tied to, with all fields of packed weights."""
    tied, names = dict(getattr(model, "all_tied_weights_keys", None) or {}), set(names)
    for target, source in list(tied.items()):
        tied |= {f"{target}{end}": f"{source}{end}" for end in PACKED_SUFFIXES if f"{source}{end}" in names}
    return tied


def unknown_layout(model: nn.Module, name: str) -> CheckpointError:
    """Return the error for a tensor that transformers computes from those in the files."""
    return CheckpointError(
        f"checkpoints of {type(model).__name__} keep {name} in a way that is not converted file by file; load the "
        "model with from_pretrained, and write a packed checkpoint with hf_mxfp4.pack(model).save_pretrained(...)"
    )


def _matcher(patterns: Iterable[str] | None) -> Callable[[str], object]:
    compiled = [re.compile(pattern) for pattern in patterns or ()]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def _fused_weights(model: nn.Module) -> list[str]:
    """Weights of experts ``[experts, N, K]``, all of one module after the other."""
    experts = {name: model.get_submodule(name) for name in fused_experts(model)}
    return [
        f"{name}.{projection}"
        for name, module in experts.items()
        if experts_unsupported_reason(module) is None and not module.is_transposed
        for projection in projections(module)
    ]


def _saved(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion  # brings torch.compile's machinery with it

    try:
        return revert_weight_conversion(model, tensors)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        raise unknown_layout(model, next(iter(tensors))) from error


def _pieces(model: nn.Module, name: str, found: dict[str, torch.Tensor], n_rows: int) -> tuple[Piece, ...]:
    pieces = []
    for own, numbers in found.items():
        rows = numbers.reshape(-1, 2)[:, 0]
        expert, start = divmod(int(rows[0]), n_rows)
        step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
        stop = start + step * len(rows)
        if not torch.equal(rows, expert * n_rows + torch.arange(start, stop, step)):
            raise unknown_layout(model, name)
        pieces.append(Piece(own, expert, slice(start, min(stop, n_rows), step)))
    return tuple(sorted(pieces, key=lambda piece: (piece.expert, piece.rows.start)))
