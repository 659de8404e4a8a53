# SPDX-License-Identifier: Apache-2.0
"""The package `gguf`, llama.cpp's own reader and writer, which is optional."""

from types import ModuleType

from ...io.folder import CheckpointError


def gguf_package() -> ModuleType:
    """The module. Raises [`CheckpointError`] where it is not installed, or knows no MXFP4."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError("GGUF files need the package gguf; install it with `pip install gguf`") from None
    if not hasattr(gguf.GGMLQuantizationType, "MXFP4"):
        raise CheckpointError("this version of the package gguf knows no MXFP4; `pip install --upgrade gguf`")
    return gguf
