# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint format defines. One small module per format."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...config import MXFP4RLConfig
from ...numerics import BLOCK_SIZE, QuantScheme, ScaleRule
from ..folder import CheckpointError, CheckpointFolder, NewTensor, StoredTensor, cast_tensors, write_shards
from ..names import LayerShape, plain_tensors


#: Reads a tensor of the files by its name, or one slice of its first axis.
Read = Callable[..., torch.Tensor]
Packed = Mapping[str, torch.Tensor]
Names = Sequence[str]


class Format(ABC):
    """A checkpoint format of another engine."""

    #: What users call it.
    name: ClassVar[str]
    #: The command that serves a ``folder``.
    serve: ClassVar[str] = "vllm serve {folder} (on a GPU; format bf16 also on a CPU)"
    #: Whether the format can say that engines quantize activations too.
    quantizes_activations: ClassVar[bool] = False
    #: Whether it says so of a checkpoint; see [`for_checkpoint`].
    quantizes_inputs: bool = False
    #: What becomes of activations then, and otherwise, in words that continue a sentence.
    quantized_activations: ClassVar[str]
    activations: ClassVar[str] = "the exported model computes them in full precision (W4A16)"
    #: Whether tensors have the names that files of a plain model have, or else those of the model itself.
    plain_names: ClassVar[bool] = True
    #: Whether a float16 checkpoint by default stays float16 where it is not quantized; other formats are bfloat16.
    keeps_float16: ClassVar[bool] = False
    #: Fields of the scheme that full-precision weights are quantized by for this format.
    holds: ClassVar[Mapping[str, Any]] = {"macro_block": None}

    def for_checkpoint(self, folder: CheckpointFolder, model: torch.nn.Module, quantizes_inputs: bool) -> "Format":
        """Return the format for one checkpoint, whose ``model`` is on the meta device and whose inputs are quantized to
        4 bits, or are not. Raises [`CheckpointError`] if it cannot hold this architecture, or a package is missing."""
        format = copy.copy(self)
        format.quantizes_inputs = quantizes_inputs and self.quantizes_activations
        return format

    def misfits(self, scheme: QuantScheme) -> list[str]:
        """Return parts of a weight scheme that the format cannot hold; empty when it holds the weight bit for bit."""
        return []

    def leaves_out(self, shape: LayerShape) -> str | None:
        """Return why a layer of this kind never is MXFP4 in this format; `None` if it may be."""
        return None

    def quantization_config(
        self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()
    ) -> dict[str, Any] | None:
        """Return the entry of `config.json`, if any. ``ignored``: names in files of what is not quantized.
        ``quantized``: weights that are, by the names in the model."""
        return None

    def more_files(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return JSON files that engines read in addition to ``options``, the entry of `config.json`, by name."""
        return {}

    def notes(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> list[str]:
        """Say what of ``config`` the format leaves out, apart from the weights; in sentences for the user."""
        scheme = config.activation_scheme
        if scheme is None and not self.quantizes_inputs:
            return []
        before = "not quantized"
        if scheme is not None:
            before = f"quantized ({scheme})"
        after = self.activations
        if self.quantizes_inputs:
            after = self.quantized_activations
        return [f"Activations were {before}; {after}."]

    def full_tensors(self, layer: str, shape: LayerShape, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that a full-precision weight ``[N, K]`` or ``[experts, N, K]`` is stored as."""
        return plain_tensors(layer, shape, weight)

    def others(self, tensors: Sequence[NewTensor], cast: Set[str], dtype: torch.dtype) -> list[NewTensor]:
        """Return the tensors of the files for those that are not quantized; ``cast`` names those to be in ``dtype``.
        An export is refused if one is left out."""
        return cast_tensors(tensors, cast, dtype)

    def write(self, folder: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> list[Path]:
        """Write the files; return those of safetensors."""
        return write_shards(folder, tensors, metadata)


class PackedFormat(Format):
    """A format with MXFP4 layers: plain ones, with only codes and block scales, unless it ``holds`` more."""

    def misfits(self, scheme: QuantScheme) -> list[str]:
        parts = []
        if scheme.macro_block is not None:
            parts.append(f"macro-block factors (mbs{scheme.macro_block}-{scheme.macro_search})")
        if scheme.outlier_fallback is not None:
            parts.append(f"the outlier-fallback residual (of{scheme.outlier_fallback:g})")
        return parts

    def shape_misfit(self, shape: LayerShape) -> str | None:
        """Return why a layer of this shape cannot be stored in MXFP4 under any scheme; `None` if it can."""
        if shape.in_features % BLOCK_SIZE:
            return f"in_features={shape.in_features} is not a multiple of {BLOCK_SIZE}"
        return None

    @abstractmethod
    def tensors(self, layer: str, shape: LayerShape, packed: Packed) -> dict[str, torch.Tensor]:
        """Return the tensors that the ``weight`` and ``weight_scale`` of all matrices of a layer are stored as."""

    def specs(self, layer: str, shape: LayerShape) -> dict[str, torch.Tensor]:
        """Return [`tensors`] on the meta device."""
        return self.tensors(layer, shape, shape.meta_packed(QuantScheme(ScaleRule.EVEN)))


class ImportableFormat(PackedFormat):
    """A format whose checkpoints can be imported."""

    #: `quant_method` of its `quantization_config`.
    quant_method: ClassVar[str]

    @abstractmethod
    def plain_name(self, name: str) -> str:
        """Return the name that a plain checkpoint has for a stored weight of this format; others unchanged."""

    @abstractmethod
    def marks(self, tensor: StoredTensor) -> bool:
        """Return whether a tensor of the files is one that only quantized layers have, such as their scales."""

    @abstractmethod
    def read(self, layer: str, shape: LayerShape, expert: int | None, read: Read) -> dict[str, torch.Tensor]:
        """Return the ``weight`` and ``weight_scale`` of one matrix from the tensors of the files: our packed form,
        except in a [`TensorScaleFormat`]."""

    @abstractmethod
    def read_config(self, options: Mapping[str, Any]) -> tuple[MXFP4RLConfig, list[str]]:
        """Read a `quantization_config` of this format: the scheme in our terms, and remarks on what it does not say.
        Raises [`CheckpointError`] for what has no equal here."""


class TensorScaleFormat(ImportableFormat):
    """A format whose weights have block scales of another type and a tensor scale, so that bytes are converted.

    The weights of one module share their tensor scale: engines join q, k and v, and gate and up.
    """

    @abstractmethod
    def top_exponent(self, packed: Packed) -> int:
        """Return the largest exponent of the block scales of a matrix in our packed form."""

    @abstractmethod
    def encode(self, packed: Packed, top: int) -> dict[str, torch.Tensor]:
        """Return the fields of this format for a matrix in our packed form, as [`tensors`] accepts them.

        Args:
            top: the largest [`top_exponent`] of the matrices that share a tensor scale.
        """

    @abstractmethod
    def decode(self, stored: Packed) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return a matrix that [`read`] returned in our packed form, and which blocks ``[N, K/32]`` keep their values
        in it."""

    @abstractmethod
    def values(self, stored: Packed) -> torch.Tensor:
        """Return the float32 values ``[N, K]`` of what [`encode`] or [`read`] returned."""


class RenamedFormat(ImportableFormat):
    """A format that stores the bytes of this package under other names, one matrix or rows of one in each tensor."""

    #: Our name of a layer's tensor -> the format's.
    names: ClassVar[Mapping[str, str]]
    #: Whether experts that are one tensor in plain files are one here.
    holds_fused: ClassVar[bool] = False

    def shape_misfit(self, shape: LayerShape) -> str | None:
        if shape.is_fused and not self.holds_fused:
            return (
                "the architecture has all experts in one tensor, and this format one matrix in each, unlike gpt-oss "
                "and nvfp4-modelopt"
            )
        return super().shape_misfit(shape)

    def plain_name(self, name: str) -> str:
        end = f".{self.names['weight']}"
        if name.endswith(end):
            return f"{name.removesuffix(end)}.weight"
        return name

    def marks(self, tensor: StoredTensor) -> bool:
        return tensor.name.endswith(self.names["weight_scale"])

    def tensors(self, layer: str, shape: LayerShape, packed: Packed) -> dict[str, torch.Tensor]:
        tensors = {}
        for field, whole in packed.items():
            for name, tensor in plain_tensors(layer, shape, whole).items():
                tensors[f"{name.removesuffix('.weight')}.{self.names[field]}"] = tensor
        return tensors

    def read(self, layer: str, shape: LayerShape, expert: int | None, read: Read) -> dict[str, torch.Tensor]:
        if expert is None:
            return {ours: read(f"{layer}.{theirs}") for ours, theirs in self.names.items()}
        packed: dict[str, torch.Tensor] = {}
        for ours, theirs in self.names.items():
            for piece in shape.pieces_of(expert):
                part = read(f"{piece.name.removesuffix('.weight')}.{theirs}")
                if ours not in packed:
                    packed[ours] = part.new_empty(shape.out_features, part.shape[1])
                packed[ours][piece.rows] = part
        return packed


class BF16Format(Format):
    """A plain bfloat16 checkpoint that holds the dequantized values: anything loads it."""

    name = "bf16"
    serve = "vllm serve {folder}"
    activations = "the exported model computes in full precision"

    def notes(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> list[str]:
        notes = super().notes(config, ignored, quantized)
        if config.weight_rotation is None:
            return notes
        return [
            f"Weights were rotated before they were quantized ({config.weight_rotation}); the exported ones are "
            "rotated back and rounded to bfloat16, and no input is rotated.",
            *notes,
        ]


def expect(where: str, options: Any, expected: Mapping[str, Any]) -> None:
    """Raise [`CheckpointError`] unless ``options`` is a dictionary with the values expected; a tuple lists several."""
    if not isinstance(options, Mapping):
        raise CheckpointError(f"{where} is {options!r}, not a JSON object")
    for key, value in expected.items():
        allowed = value
        if not isinstance(value, tuple):
            allowed = (value,)
        if options.get(key) not in allowed:
            names = " or ".join(map(repr, allowed))
            raise CheckpointError(f"{where} has {key}={options.get(key)!r}; only {names} can be imported")
