# SPDX-License-Identifier: Apache-2.0
"""Write a GGUF file tensor by tensor, in any order: memory use is that of one tensor.

Header and metadata are those of the package `gguf`; the data are written here as they come.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch

from ...io.writer import TensorSpec, TensorStream
from .package import gguf_package


if TYPE_CHECKING:
    from gguf import GGUFWriter

_ALIGNMENT = 32
#: Tensors of these dtypes, and bytes, which are blocks of MXFP4 -> GGML's types.
_KINDS = {torch.uint8: "MXFP4", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class GGUFFile(TensorStream):
    """One GGUF file at ``path``. Use as a context manager.

    Args:
        specs: every tensor that will be written, by name; those of bytes are rows of MXFP4 blocks.
        architecture: `general.architecture`.
        fill: adds the metadata.
        texts: more metadata. May be replaced before the context ends by something no longer, if it depends on what is
            written.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        architecture: str,
        fill: Callable[["GGUFWriter"], None],
        texts: Mapping[str, str] | None = None,
    ):
        super().__init__(specs)
        self._path, self._architecture, self._fill = path, architecture, fill
        self.metadata = dict(texts or {})
        self._reserved = {key: len(text.encode()) for key, text in self.metadata.items()}
        self._stream: BinaryIO | None = None
        self._header = b""

    def __enter__(self) -> "GGUFFile":
        self._header = self._make_header()
        self._stream = open(self._path, "xb")
        self._stream.write(self._header)
        end = len(self._header)
        for name, spec in self._specs.items():
            self._places[name] = (self._stream, end)
            end += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._stream.truncate(end)
        return self

    def __exit__(self, kind, *exception) -> None:
        try:
            if kind is None:
                self._check_complete()
                self._rewrite_header()
        finally:
            self._stream.close()

    def _rewrite_header(self) -> None:
        if (header := self._make_header()) == self._header:
            return
        if len(header) != len(self._header):
            raise ValueError(f"the header became {len(header)} bytes; {len(self._header)} were reserved for it")
        self._stream.seek(0)
        self._stream.write(header)

    def _make_header(self) -> bytes:
        """The bytes before the data, with their padding."""
        gguf, scratch = gguf_package(), self._path.with_name(f".{self._path.name}.header")
        writer = gguf.GGUFWriter(scratch, self._architecture)
        try:
            self._fill(writer)
            for key, size in self._reserved.items():
                writer.add_string(key, self.metadata[key].ljust(size))
            for name, spec in self._specs.items():
                kind = gguf.GGMLQuantizationType[_KINDS[spec.dtype]]
                raw = "uint8" if spec.dtype == torch.uint8 else "float32"
                writer.add_tensor_info(name, spec.shape, np.dtype(raw), spec.nbytes, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            header = scratch.read_bytes()
        finally:
            scratch.unlink(missing_ok=True)
        return header + bytes(-len(header) % _ALIGNMENT)
