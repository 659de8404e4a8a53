# SPDX-License-Identifier: Apache-2.0
"""What the files of a checkpoint call the tensors of a model, where the two differ.

Most mixtures of experts keep the weights of all experts in one parameter and have one tensor for each expert and each
of gate, up and down in their files. What becomes of which rows is not spelt out here: transformers is given tensors of
row numbers to save, and where the numbers turn up is what the files look like.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ...experts_layout import projections, unsupported_reason
from ...module_names import fused_experts
from .folder import CheckpointError


@dataclass(frozen=True)
class Piece:
    """A tensor of the files that holds rows of one expert's weight."""

    name: str
    expert: int
    rows: slice


class FileNames:
    """The names that `save_pretrained` gives the tensors of a plain ``model``, and that checkpoints of it have.

    Attributes:
        whole: name in the model -> name in the files, of tensors that are the same in both.
        pieces: name in the model -> the tensors that the files have in its place, experts and rows in their order.

    Raises [`CheckpointError`] for an architecture whose tensors are changed in some other way.
    """

    def __init__(self, model: nn.Module):
        self.whole: dict[str, str] = {}
        self.pieces: dict[str, tuple[Piece, ...]] = {}
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        for name in _fused_weights(model):
            n_experts, n_rows, _ = shapes.pop(name)
            # Two columns, since older versions of transformers drop an axis of length one.
            numbers = torch.arange(n_experts * n_rows).view(n_experts, n_rows, 1).expand(-1, -1, 2)
            found = _saved(model, {name: numbers})
            if len(found) == 1 and next(iter(found.values())).shape == numbers.shape:
                self.whole[name] = next(iter(found))
            else:
                self.pieces[name] = _pieces(model, name, found, n_rows)
        marks = _saved(model, {name: torch.tensor([index]) for index, name in enumerate(shapes)})
        names = list(shapes)
        for name, mark in marks.items():
            if mark.shape != (1,):
                raise _unknown(model, name)
            self.whole[names[int(mark)]] = name


def _fused_weights(model: nn.Module) -> list[str]:
    """Weights of experts ``[experts, N, K]``, all of one module after the other."""
    experts = {name: model.get_submodule(name) for name in fused_experts(model)}
    return [
        f"{name}.{projection}"
        for name, module in experts.items()
        if unsupported_reason(module) is None and not module.is_transposed
        for projection in projections(module)
    ]


def _saved(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion  # brings torch.compile's machinery with it

    try:
        return revert_weight_conversion(model, tensors)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        raise _unknown(model, next(iter(tensors))) from error


def _pieces(model: nn.Module, name: str, found: dict[str, torch.Tensor], n_rows: int) -> tuple[Piece, ...]:
    pieces = []
    for own, numbers in found.items():
        rows = numbers.reshape(-1, 2)[:, 0]
        expert, start = divmod(int(rows[0]), n_rows)
        step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
        stop = start + step * len(rows)
        if not torch.equal(rows, expert * n_rows + torch.arange(start, stop, step)):
            raise _unknown(model, name)
        pieces.append(Piece(own, expert, slice(start, min(stop, n_rows), step)))
    return tuple(sorted(pieces, key=lambda piece: (piece.expert, piece.rows.start)))


def _unknown(model: nn.Module, name: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoints of {type(model).__name__} keep {name} in a way that is not converted file by file; load the "
        "model with from_pretrained and pack it with hf_mxfp4.pack"
    )
