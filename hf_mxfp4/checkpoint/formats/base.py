# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint format has to say about itself. One small module per format."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...config import MXFP4RLConfig
from ...numerics import BLOCK_SIZE, QuantScheme
from ..folder import CheckpointError
from ..writer import TensorSpec


@dataclass(frozen=True)
class LayerShape:
    """The logical weight ``[out_features, in_features]`` of a linear layer."""

    out_features: int
    in_features: int


@dataclass(frozen=True)
class Imported:
    """What another format's config says: the scheme in our terms, and remarks on what it does not say."""

    config: MXFP4RLConfig
    notes: list[str] = field(default_factory=list)


class Format(ABC):
    """A checkpoint format of another engine."""

    #: What users call it.
    name: ClassVar[str]

    @abstractmethod
    def quantization_config(self, config: MXFP4RLConfig, ignored: Sequence[str]) -> dict[str, Any] | None:
        """What `config.json` needs; ``ignored`` are the linear layers that are not quantized."""

    @abstractmethod
    def notes(self, config: MXFP4RLConfig) -> list[str]:
        """What of ``config`` the format leaves out, besides the weights; in sentences for the user."""


class PackedFormat(Format):
    """A format with MXFP4 layers: plain ones, with nothing but codes and block scales."""

    def misfits(self, scheme: QuantScheme) -> list[str]:
        """Parts of a weight scheme that the format has no place for; empty when it holds the weight bit for bit."""
        parts = []
        if scheme.macro_block is not None:
            parts.append(f"macro-block factors (mbs{scheme.macro_block}-{scheme.macro_search})")
        if scheme.outlier_fallback is not None:
            parts.append(f"the outlier-fallback residual (of{scheme.outlier_fallback:g})")
        return parts

    def shape_misfit(self, shape: LayerShape) -> str | None:
        """Why a layer of this shape cannot be stored in MXFP4 under any scheme; `None` if it can."""
        if shape.in_features % BLOCK_SIZE:
            return f"in_features={shape.in_features} is not a multiple of {BLOCK_SIZE}"
        return None

    @abstractmethod
    def specs(self, layer: str, shape: LayerShape) -> dict[str, TensorSpec]:
        """Names and kinds of the tensors that a plain MXFP4 layer is stored as."""

    @abstractmethod
    def tensors(self, layer: str, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of [`specs`] from our ``weight`` and ``weight_scale``; no arithmetic, the same bits."""


class RenamedFormat(PackedFormat):
    """A format that stores our very bytes under other names, so that it can be read back too."""

    #: Our name of a layer's tensor -> the format's.
    names: ClassVar[Mapping[str, str]]
    #: Last parts of the names of tensors that mean something this project has not -> what that is.
    foreign: ClassVar[Mapping[str, str]] = {}

    def specs(self, layer: str, shape: LayerShape) -> dict[str, TensorSpec]:
        rows, columns = shape.out_features, shape.in_features
        sizes = {"weight": columns // 2, "weight_scale": columns // BLOCK_SIZE}
        return {f"{layer}.{self.names[ours]}": TensorSpec(torch.uint8, (rows, size)) for ours, size in sizes.items()}

    def tensors(self, layer: str, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"{layer}.{self.names[ours]}": tensor for ours, tensor in packed.items()}

    @abstractmethod
    def read_config(self, options: Mapping[str, Any]) -> Imported:
        """Read a `quantization_config` of this format. Raises [`CheckpointError`] for what has no equal here."""


def expect(where: str, options: Any, expected: Mapping[str, Any]) -> None:
    """Raise [`CheckpointError`] unless ``options`` is a dictionary with the values expected; a tuple lists several."""
    if not isinstance(options, Mapping):
        raise CheckpointError(f"{where} is {options!r}, not a JSON object")
    for key, value in expected.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if options.get(key) not in allowed:
            names = " or ".join(map(repr, allowed))
            raise CheckpointError(f"{where} has {key}={options.get(key)!r}; only {names} can be imported")
