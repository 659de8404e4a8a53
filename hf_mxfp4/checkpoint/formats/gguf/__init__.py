# SPDX-License-Identifier: Apache-2.0
"""GGUF, the one-file format of llama.cpp and what builds on it; one of its types of tensors is MXFP4."""

from .format import GGUFFormat
from .tensors import to_blocks


__all__ = ["GGUFFormat", "to_blocks"]
