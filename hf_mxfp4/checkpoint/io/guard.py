# SPDX-License-Identifier: Apache-2.0
"""A key of `config.json` that stops transformers where hf_mxfp4 is not imported.

transformers only warns of a quantization method that it does not know. It would then compute in full precision and save
a config that claims MXFP4. The key ``transformers_weights`` names the file of the weights; transformers refuses a value
that is no safetensors file and prints it. [`MXFP4RLQuantizer`] removes the key before transformers looks for the file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import MXFP4RLConfig
from ...files import write_json
from .folder import read_json


KEY = "transformers_weights"
TEXT = (
    "none that transformers can use alone. This checkpoint is MXFP4 of the package hf_mxfp4: put `import hf_mxfp4` "
    "before from_pretrained, or run commands such as trl or lm_eval as `hf-mxfp4 run -- COMMAND`. For full precision, "
    "make a copy with `hf-mxfp4 export --format bf16`"
)


def with_scheme(config: Mapping[str, Any], scheme: MXFP4RLConfig) -> dict[str, Any]:
    """Return a `config.json` with the scheme and the key."""
    return {**config, "quantization_config": scheme.to_dict(), KEY: TEXT}


def without_scheme(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` without the scheme and the key."""
    return {name: value for name, value in config.items() if name not in ("quantization_config", KEY)}


def guard_folder(folder: Path) -> None:
    """Put the key into the `config.json` that transformers has written there."""
    write_json(folder / "config.json", {**read_json(folder / "config.json"), KEY: TEXT}, sort_keys=True)


def remove_scheme(config: Any) -> None:
    """Make a config of transformers that was read from such a file one of a plain model: of the master weights."""
    config.__dict__.pop("quantization_config", None)
    unguard(config)


def unguard(config: Any) -> None:
    """Remove the key from a config of transformers that was read from such a file."""
    if not str(getattr(config, KEY, ".json")).endswith((".safetensors", ".json")):
        delattr(config, KEY)
