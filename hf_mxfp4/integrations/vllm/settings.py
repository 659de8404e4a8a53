# SPDX-License-Identifier: Apache-2.0
"""How vLLM is to keep the weights of a checkpoint: what stands under `vllm` in the quantization config of its
`config.json`. Imports no vLLM, so that a trainer can write it."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...suggestions import unknown_key_message


#: The key inside `quantization_config`.
SETTINGS_KEY = "vllm"

STORAGES = ("packed", "dense", "native")

#: Environment variables that go before what a checkpoint says, for servers on checkpoints that say nothing.
VARIABLES = {"weights": "MXFP4_RL_VLLM_WEIGHTS", "adapter_rank": "MXFP4_RL_VLLM_ADAPTER_RANK"}


@dataclass(frozen=True)
class EngineSettings:
    """How one vLLM keeps quantized weights.

    Attributes:
        weights: ``"packed"``: codes and scales, for good; ``"dense"``: values in the dtype of vLLM, dequantized as they
            arrive; ``"native"``: as vLLM's own MXFP4 kernels want codes and scales, of plain weight-only schemes, to
            serve and not to train.
        adapter_rank: the largest rank of the adapters that are pushed beside packed weights; 0 for no room.

    Raises `ValueError` for other values, and for adapters beside dense weights.
    """

    weights: str = "packed"
    adapter_rank: int = 0

    def __post_init__(self):
        if self.weights not in STORAGES:
            raise ValueError(f"{SETTINGS_KEY}.weights={self.weights!r} must be 'packed', 'dense' or 'native'")
        if type(self.adapter_rank) is not int or self.adapter_rank < 0:
            raise ValueError(f"{SETTINGS_KEY}.adapter_rank={self.adapter_rank!r} must be a whole number of at least 0")
        if self.adapter_rank and self.weights != "packed":
            raise ValueError(
                f"{SETTINGS_KEY}.adapter_rank={self.adapter_rank} needs {SETTINGS_KEY}.weights='packed': into dense "
                "weights adapters are added before they are pushed, and native ones take none"
            )

    @classmethod
    def read(cls, options: Any = None, environment: Mapping[str, str] = os.environ) -> "EngineSettings":
        """From the dictionary in a checkpoint, `None` without one, and the environment, which goes first.

        Raises `ValueError` as the constructor does, and for unknown keys.
        """
        if options is None:
            options = {}
        if not isinstance(options, Mapping):
            raise ValueError(f"{SETTINGS_KEY}={options!r} in the quantization config must be a mapping")
        known = [field.name for field in fields(cls)]
        for key in options:
            if key not in known:
                raise ValueError(unknown_key_message(f"{SETTINGS_KEY} in the quantization config", str(key), known))
        found = dict(options)
        for name, variable in VARIABLES.items():
            if variable in environment:
                text = environment[variable]
                found[name] = _number(variable, text) if name == "adapter_rank" else text
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """What [`read`] reads back."""
        return asdict(self)


def _number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} must be a whole number") from None
