# SPDX-License-Identifier: Apache-2.0
"""Checkpoint formats of other engines, by name."""

from collections.abc import Mapping
from typing import Any

from .base import BF16Format, Format, ImportableFormat, PackedFormat, TensorScaleFormat
from .compressed_tensors import CompressedTensorsFormat
from .gguf import GGUFFormat
from .gpt_oss import GptOssFormat
from .nvfp4 import ModelOptFormat, NVFP4Format
from .quark import QuarkFormat


_NVFP4 = NVFP4Format()
#: A new format is one more module, one more line here, and one more choice of `hf-mxfp4 export --format`.
FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        CompressedTensorsFormat(),
        _NVFP4,
        ModelOptFormat(),
        QuarkFormat(),
        GptOssFormat(),
        GGUFFormat(),
        BF16Format(),
    )
}
#: The formats that can be imported, by their `quant_method`; of those that share one, the first.
IMPORTABLE: dict[str, ImportableFormat] = {
    format.quant_method: format for format in reversed(FORMATS.values()) if isinstance(format, ImportableFormat)
}


def stored_format(options: Mapping[str, Any]) -> ImportableFormat:
    """Return the format of a `quantization_config` whose `quant_method` is one of [`IMPORTABLE`]."""
    if options["quant_method"] == _NVFP4.quant_method and options.get("format") == _NVFP4.format:
        return _NVFP4
    return IMPORTABLE[options["quant_method"]]


__all__ = [
    "FORMATS",
    "IMPORTABLE",
    "Format",
    "ImportableFormat",
    "PackedFormat",
    "TensorScaleFormat",
    "stored_format",
]
