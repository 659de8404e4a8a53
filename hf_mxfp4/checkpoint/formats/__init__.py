# SPDX-License-Identifier: Apache-2.0
"""Checkpoint formats of other engines, by name."""

from collections.abc import Mapping
from typing import Any

from .base import BF16Format, Format, ImportableFormat, PackedFormat
from .compressed_tensors import CompressedTensorsFormat
from .gguf import GGUFFormat
from .gpt_oss import GptOssFormat
from .nvfp4 import ModelOptFormat, NVFP4Format
from .quark import QuarkFormat


#: A new format is one more module, and one more line here.
FORMATS: dict[str, Any] = {
    format.name: format
    for format in (
        CompressedTensorsFormat(),
        NVFP4Format(),
        ModelOptFormat(),
        QuarkFormat(),
        GptOssFormat(),
        GGUFFormat(),
        BF16Format(),
    )
}
#: The formats that can be imported, by their `quant_method`.
IMPORTABLE: dict[str, ImportableFormat] = {
    FORMATS[name].quant_method: FORMATS[name] for name in ("compressed-tensors", "nvfp4-modelopt", "quark", "gpt-oss")
}


def stored_format(options: Mapping[str, Any]) -> ImportableFormat:
    """Return the format of a `quantization_config` whose `quant_method` is one of [`IMPORTABLE`]."""
    nvfp4 = FORMATS["nvfp4"]
    own = nvfp4.quant_method, nvfp4.format
    return nvfp4 if (options["quant_method"], options.get("format")) == own else IMPORTABLE[options["quant_method"]]


__all__ = ["FORMATS", "IMPORTABLE", "Format", "ImportableFormat", "PackedFormat", "stored_format"]
