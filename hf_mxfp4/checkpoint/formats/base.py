# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint format has to say about itself. One small module per format."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...config import MXFP4RLConfig
from ...numerics import BLOCK_SIZE, QuantScheme
from ..io.folder import CheckpointError, CheckpointFolder
from ..io.reader import StoredTensor
from ..io.tensor_names import Piece
from ..io.writer import MAX_SHARD_SIZE, OtherTensor, ShardWriter, TensorSpec, TensorStream


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: Reads a tensor of the files by its name, or one slice of its first axis.
Read = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class LayerShape:
    """The logical weight ``[out_features, in_features]`` of a linear layer, or those of as many experts.

    Attributes:
        experts: how many there are in a fused weight; `None` for a linear layer.
        transposed: the model has ``[experts, in_features, out_features]``.
        pieces: what the files of plain checkpoints have in the place of a fused weight; empty where it is one tensor
            there too.
    """

    out_features: int
    in_features: int
    experts: int | None = None
    transposed: bool = False
    pieces: tuple[Piece, ...] = ()

    @property
    def matrices(self) -> Iterable[int | None]:
        """The experts, or `None` for the one matrix of a linear layer."""
        return (None,) if self.experts is None else range(self.experts)

    @property
    def n_matrices(self) -> int:
        return 1 if self.experts is None else self.experts

    @property
    def n_weights(self) -> int:
        """Return the number of elements of all matrices."""
        return self.n_matrices * self.out_features * self.in_features

    @cached_property
    def _pieces_by_expert(self) -> dict[int, list[Piece]]:
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.expert, []).append(piece)
        return found

    def pieces_of(self, expert: int) -> list[Piece]:
        return self._pieces_by_expert.get(expert, [])

    def n_rows(self, piece: Piece) -> int:
        return len(range(self.out_features)[piece.rows])

    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of the weight in the model."""
        matrix = (self.out_features, self.in_features)
        return matrix if self.experts is None else (self.experts, *(matrix[::-1] if self.transposed else matrix))


@dataclass(frozen=True)
class Imported:
    """What another format's config says: the scheme in our terms, and remarks on what it does not say."""

    config: MXFP4RLConfig
    notes: list[str] = field(default_factory=list)


class Format(ABC):
    """A checkpoint format of another engine."""

    #: What users call it.
    name: ClassVar[str]
    #: Whether engines that read it quantize activations too, where it says so.
    quantizes_activations: ClassVar[bool] = False

    #: How its files are run, in Markdown, for a model card; exports of formats without it have none.
    how_to_run: ClassVar[str | None] = None
    #: Whether tensors have the names that files of a plain model have, or else those of the model itself.
    plain_names: ClassVar[bool] = True

    def architecture_misfit(self, config: "PreTrainedConfig") -> str | None:
        """Why no model of this config can be stored; `None` if it can."""
        return None

    def for_checkpoint(self, folder: CheckpointFolder, model: "PreTrainedModel") -> "Format":
        """Return the format for one checkpoint, where names or metadata depend on its architecture. ``model`` is on the
        meta device. Raises [`CheckpointError`] where a package is missing for it."""
        return self

    @abstractmethod
    def quantization_config(
        self, config: MXFP4RLConfig, ignored: Sequence[str], quantized: Sequence[str] = ()
    ) -> dict[str, Any] | None:
        """What `config.json` needs.

        Args:
            ignored: linear layers that are not quantized, and experts that are not by the names that files have.
            quantized: weights that are, by the names that they have in the model.
        """

    @abstractmethod
    def notes(self, config: MXFP4RLConfig, ignored: Sequence[str], quantized: Sequence[str] = ()) -> list[str]:
        """Say what of ``config`` the format leaves out, besides the weights; in sentences for the user.
        Arguments as those of [`quantization_config`]."""

    def full_specs(self, layer: str, shape: LayerShape) -> dict[str, TensorSpec]:
        """Names and kinds of the tensors that a weight in full precision is stored as."""
        return {name: TensorSpec(torch.bfloat16, size) for name, size in plain_sizes(layer, shape).items()}

    def full_tensors(
        self, layer: str, shape: LayerShape, expert: int | None, matrix: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return what one matrix ``[N, K]`` is in tensors of [`full_specs`], in those that hold more than it the next
        slice of the first axis."""
        if expert is None:
            return {f"{layer}.weight": matrix}
        if shape.pieces:
            return {piece.name: matrix[piece.rows] for piece in shape.pieces_of(expert)}
        return {layer: matrix.t() if shape.transposed else matrix}

    def others(self, tensors: Sequence[OtherTensor], dtype: torch.dtype) -> list[OtherTensor]:
        """Return what tensors that are not quantized, of a model in ``dtype``, are in the files: here the same, in
        bfloat16."""
        return [tensor.cast(dtype, torch.bfloat16) for tensor in tensors]

    def open_writer(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        max_shard_size: int | str = MAX_SHARD_SIZE,
        metadata: Mapping[str, str] | None = None,
    ) -> TensorStream:
        """Return a context manager that writes the files, see [`ShardWriter`], whose arguments these are."""
        return ShardWriter(folder, specs, max_shard_size, metadata)


class PackedFormat(Format):
    """A format with MXFP4 layers: plain ones, with nothing but codes and block scales."""

    #: `quant_method` of its `quantization_config`.
    quant_method: ClassVar[str]
    #: Last parts of the names of tensors that mean something this project has not -> what that is.
    foreign: ClassVar[Mapping[str, str]] = {}

    def misfits(self, scheme: QuantScheme) -> list[str]:
        """Parts of a weight scheme that the format has no place for; empty when it holds the weight bit for bit."""
        parts = []
        if scheme.macro_block is not None:
            parts.append(f"macro-block factors (mbs{scheme.macro_block}-{scheme.macro_search})")
        if scheme.outlier_fallback is not None:
            parts.append(f"the outlier-fallback residual (of{scheme.outlier_fallback:g})")
        return parts

    def leaves_out(self, shape: LayerShape) -> str | None:
        """Why a layer of this kind never is MXFP4 in this format; `None` if it may be."""
        return None

    def shape_misfit(self, shape: LayerShape) -> str | None:
        """Why a layer of this shape cannot be stored in MXFP4 under any scheme; `None` if it can."""
        if shape.in_features % BLOCK_SIZE:
            return f"in_features={shape.in_features} is not a multiple of {BLOCK_SIZE}"
        return None

    def plain_name(self, name: str) -> str:
        """Return the name that a plain checkpoint has for a stored weight of this format; others as they are."""
        return name

    @abstractmethod
    def marks(self, tensor: StoredTensor) -> bool:
        """Whether a tensor of the files is one, of [`specs`], that only quantized layers have: their scales, say."""

    @abstractmethod
    def specs(self, layer: str, shape: LayerShape) -> dict[str, TensorSpec]:
        """Names and kinds of the tensors that a plain MXFP4 layer is stored as."""

    @abstractmethod
    def tensors(
        self, layer: str, shape: LayerShape, expert: int | None, packed: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return what our ``weight`` and ``weight_scale`` of one matrix are in tensors of [`specs`], in those that hold
        more than it the next slice of the first axis; no arithmetic, the same bits."""

    @abstractmethod
    def read(self, layer: str, shape: LayerShape, expert: int | None, read: Read) -> dict[str, torch.Tensor]:
        """The way back: our ``weight`` and ``weight_scale`` of one matrix."""

    def restored(self, tensors: Sequence[OtherTensor], dtype: torch.dtype) -> list[OtherTensor]:
        """Return the model's tensors, in ``dtype``, that those of the files that are not quantized are: here the
        same."""
        return list(tensors)

    @abstractmethod
    def read_config(self, options: Mapping[str, Any]) -> Imported:
        """Read a `quantization_config` of this format. Raises [`CheckpointError`] for what has no equal here."""


class RenamedFormat(PackedFormat):
    """A format that stores our very bytes under other names, one matrix or rows of one in each tensor."""

    #: Our name of a layer's tensor -> the format's.
    names: ClassVar[Mapping[str, str]]

    def shape_misfit(self, shape: LayerShape) -> str | None:
        if shape.experts is not None and not shape.pieces:
            return "the architecture has all experts in one tensor, and this format one matrix in each"
        return super().shape_misfit(shape)

    def plain_name(self, name: str) -> str:
        end = f".{self.names['weight']}"
        return f"{name.removesuffix(end)}.weight" if name.endswith(end) else name

    def marks(self, tensor: StoredTensor) -> bool:
        return tensor.name.endswith(f".{self.names['weight_scale']}")

    def specs(self, layer: str, shape: LayerShape) -> dict[str, TensorSpec]:
        sizes = {"weight": shape.in_features // 2, "weight_scale": shape.in_features // BLOCK_SIZE}
        return {
            f"{owner}.{self.names[ours]}": TensorSpec(torch.uint8, (len(range(shape.out_features)[rows]), size))
            for expert in shape.matrices
            for owner, rows in _owners(layer, shape, expert).items()
            for ours, size in sizes.items()
        }

    def tensors(
        self, layer: str, shape: LayerShape, expert: int | None, packed: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {
            f"{owner}.{self.names[ours]}": tensor[rows]
            for owner, rows in _owners(layer, shape, expert).items()
            for ours, tensor in packed.items()
        }

    def read(self, layer: str, shape: LayerShape, expert: int | None, read: Read) -> dict[str, torch.Tensor]:
        packed: dict[str, torch.Tensor] = {}
        for ours, theirs in self.names.items():
            for owner, rows in _owners(layer, shape, expert).items():
                part = read(f"{owner}.{theirs}")
                if ours not in packed:
                    packed[ours] = part.new_empty(shape.out_features, part.shape[1])
                packed[ours][rows] = part
        return packed


def plain_sizes(layer: str, shape: LayerShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that plain checkpoints have for a weight."""
    if shape.pieces:
        return {piece.name: (shape.n_rows(piece), shape.in_features) for piece in shape.pieces}
    return {f"{layer}.weight" if shape.experts is None else layer: shape.full_shape()}


def _owners(layer: str, shape: LayerShape, expert: int | None) -> dict[str, slice]:
    """The linear layers that a matrix is in the files, and the rows of each."""
    if expert is None:
        return {layer: slice(None)}
    return {piece.name.removesuffix(".weight"): piece.rows for piece in shape.pieces_of(expert)}


def expect(where: str, options: Any, expected: Mapping[str, Any]) -> None:
    """Raise [`CheckpointError`] unless ``options`` is a dictionary with the values expected; a tuple lists several."""
    if not isinstance(options, Mapping):
        raise CheckpointError(f"{where} is {options!r}, not a JSON object")
    for key, value in expected.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if options.get(key) not in allowed:
            names = " or ".join(map(repr, allowed))
            raise CheckpointError(f"{where} has {key}={options.get(key)!r}; only {names} can be imported")
