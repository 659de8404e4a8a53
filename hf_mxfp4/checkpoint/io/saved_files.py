# SPDX-License-Identifier: Apache-2.0
"""Checksums in the files that transformers writes.

`save_pretrained` gives a quantizer one metadata for all files, before it gathers, renames and splits the tensors. So
the function that it writes each file with is wrapped: there are the tensors of the file as they will be in it.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

import torch

from .checksums import CHECKSUMS, checksum_metadata, tensor_checksum
from .integrity import add_checksums
from .reader import load_header, read_file_header
from .writer import header_bytes


_WANTED: ContextVar[bool] = ContextVar("checksums_wanted", default=False)


@contextlib.contextmanager
def checksums_in(folder: Path) -> Iterator[None]:
    """Give the safetensors files that are saved into an empty ``folder`` while the context lasts their checksums.

    Files that a transformers wrote in another way get theirs when the context ends, for which they are copied once.
    """
    _wrap_writing()
    token = _WANTED.set(True)
    try:
        yield
    finally:
        _WANTED.reset(token)
    for file in sorted(folder.glob("*.safetensors")):
        if not has_checksums(file):
            add_checksums(file)


def has_checksums(file: Path) -> bool:
    """Whether the header of a file gives checksums. Raises `ShardError` for a file that cannot be read."""
    return CHECKSUMS in read_file_header(file).metadata


def file_metadata(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """``metadata`` of a file of ``tensors``, and their checksums."""
    contents = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    return {**metadata, **checksum_metadata(contents, checksums, metadata)}


def _wrap_writing() -> None:
    """Wrap what transformers writes files with, once; for all other saves it stays what it was."""
    from transformers import modeling_utils

    original = getattr(modeling_utils, "safe_save_file", None)
    if original is None or getattr(original, "adds_checksums", False):
        return

    @functools.wraps(original)
    def save_file(tensors, filename, metadata=None, **options):
        if not _WANTED.get():
            return original(tensors, filename, metadata=metadata, **options)
        original(tensors, filename, metadata=file_metadata(tensors, metadata or {}), **options)
        _order_metadata(Path(filename))

    save_file.adds_checksums = True
    modeling_utils.safe_save_file = save_file


def _order_metadata(file: Path) -> None:
    """Sort the metadata of a file, whose order safetensors leaves to chance: the same model gives the same bytes."""
    header, start, _ = load_header(file)
    ordered = header_bytes({**header, "__metadata__": dict(sorted(header["__metadata__"].items()))}, start)
    if len(ordered) == start:
        with open(file, "r+b") as stream:
            stream.write(ordered)
