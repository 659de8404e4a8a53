# SPDX-License-Identifier: Apache-2.0
"""How one vLLM keeps quantized weights: part of the quantization config that it is started with."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...utils import unknown_key_message


#: The key of [`EngineSettings`] inside `quantization_config`.
SETTINGS_KEY = "vllm"


@dataclass(frozen=True)
class EngineSettings:
    """How one vLLM keeps quantized weights.

    Attributes:
        weights: ``"packed"``: codes and scales, for good; ``"dense"``: values in the dtype of vLLM, dequantized when
            they are loaded.
        adapter_rank: the largest rank of the adapters that are pushed beside packed weights; 0 for no room.

    Raises `ValueError` for other values, and for adapters beside dense weights.
    """

    weights: str = "packed"
    adapter_rank: int = 0

    def __post_init__(self):
        if self.weights not in ("packed", "dense"):
            raise ValueError(f"{SETTINGS_KEY}.weights={self.weights!r} must be 'packed' or 'dense'")
        if type(self.adapter_rank) is not int or self.adapter_rank < 0:
            raise ValueError(f"{SETTINGS_KEY}.adapter_rank={self.adapter_rank!r} must be a whole number of at least 0")
        if self.adapter_rank and self.weights != "packed":
            raise ValueError(
                f"{SETTINGS_KEY}.adapter_rank={self.adapter_rank} needs {SETTINGS_KEY}.weights='packed': into dense "
                "weights adapters are added before they are pushed"
            )

    @classmethod
    def read(cls, options: Any = None) -> "EngineSettings":
        """Read the dictionary in a checkpoint, `None` without one. Raises `ValueError` for unknown keys, too."""
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            raise ValueError(f"{SETTINGS_KEY}={options!r} in the quantization config must be a mapping")
        known = [field.name for field in fields(cls)]
        for key in options:
            if key not in known:
                raise ValueError(unknown_key_message(f"{SETTINGS_KEY} in the quantization config", str(key), known))
        return cls(**options)
