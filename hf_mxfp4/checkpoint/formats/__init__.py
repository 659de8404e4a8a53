# SPDX-License-Identifier: Apache-2.0
"""Checkpoint formats of other engines, by name."""

from .base import BF16Format, Format, ImportableFormat, PackedFormat
from .compressed_tensors import CompressedTensorsFormat
from .gguf import GGUFFormat
from .gpt_oss import GptOssFormat
from .nvfp4 import NVFP4Format
from .quark import QuarkFormat


#: A new format is one more module, and one more line here.
FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        CompressedTensorsFormat(),
        NVFP4Format(),
        QuarkFormat(),
        GptOssFormat(),
        GGUFFormat(),
        BF16Format(),
    )
}
#: The formats that can be imported, by their `quant_method`.
IMPORTABLE: dict[str, ImportableFormat] = {
    FORMATS[name].quant_method: FORMATS[name] for name in ("compressed-tensors", "quark", "gpt-oss")
}

__all__ = ["FORMATS", "IMPORTABLE", "Format", "ImportableFormat", "PackedFormat"]
