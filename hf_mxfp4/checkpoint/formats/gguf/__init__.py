# SPDX-License-Identifier: Apache-2.0
"""GGUF, the one-file format of llama.cpp and what builds on it; one of its types of tensors is MXFP4."""

from .folder import is_gguf, open_gguf
from .format import GGUFFormat


__all__ = ["GGUFFormat", "is_gguf", "open_gguf"]
