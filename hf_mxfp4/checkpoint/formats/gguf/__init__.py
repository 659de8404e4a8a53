# SPDX-License-Identifier: Apache-2.0
"""GGUF, the one-file format of llama.cpp and what builds on it; one of its types of tensors is MXFP4."""

from .folder import is_gguf, open_gguf
from .format import GGUFFormat
from .tensors import from_blocks, to_blocks


__all__ = ["GGUFFormat", "from_blocks", "is_gguf", "open_gguf", "to_blocks"]
