# SPDX-License-Identifier: Apache-2.0
"""Compare safetensors files with the checksums that they carry, and write checksums into files that carry none.

A file is read once, in portions, by plain reads: memory use is that of one portion, and what is read stays in the
system's cache for whoever loads the file next.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_64

from ..._logging import get_logger
from ...files import draft_of, sync_to_disk
from .checksums import CHECKSUMS, HEADER_CHECKSUM, UNKNOWN, Contents, checksum_metadata, header_checksum
from .reader import ShardError, StoredTensor, load_header, read_header_and_metadata
from .writer import header_bytes


#: ``0`` in the environment loads checkpoints without comparing their data with their checksums.
VARIABLE = "HF_MXFP4_VERIFY"
#: About what the caches of a core hold.
_PORTION = 1 << 20

#: Told of bytes that were read, with the name of the tensor that they belong to.
OnBytes = Callable[[int, str], None]


@dataclass(frozen=True)
class Damage:
    """What does not agree in a file: with its checksum the data of ``tensor``, or the header, for which that is
    `None`."""

    file: str
    tensor: str | None
    reason: str

    def __str__(self) -> str:
        what = "its header" if self.tensor is None else f"the data of {self.tensor}"
        return f"{self.file} is damaged: {what} {self.reason}"


class FileChecksums:
    """The tensors of a file in the order of their bytes, and the checksums that its header gives.

    Raises [`ShardError`] for a file that cannot be read.

    Attributes:
        tensors: all of them, in the order of their bytes.
        expected: checksums by names; `None` for a file that carries none.
    """

    def __init__(self, file: Path):
        self.file = file
        self.tensors, metadata = read_header_and_metadata(file)
        entry, of_header = metadata.get(CHECKSUMS), metadata.get(HEADER_CHECKSUM)
        self.expected: dict[str, str] | None = None if entry is None and of_header is None else {}
        self._header_problem: str | None = None
        if self.expected is None:
            return
        if of_header != header_checksum(_contents(self.tensors), metadata):
            self._header_problem = "does not have the checksum that was written into it"
        try:
            found = json.loads(entry or "")
        except ValueError:
            found = None
        if isinstance(found, dict):
            self.expected = found
        lacking = [tensor.name for tensor in self.tensors if not isinstance(self.expected.get(tensor.name), str)]
        if lacking and self._header_problem is None:
            self._header_problem = f"has no checksum of {lacking[0]} ({len(lacking)} lack one)"

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def damage(self, on_bytes: OnBytes = lambda count, name: None) -> Iterator[Damage]:
        """Everything in the file that does not agree with its checksums, the header first; nothing of a file that
        carries none. Raises [`ShardError`] for a file that cannot be read to its end."""
        if self.expected is None:
            return
        if self._header_problem is not None:
            yield Damage(self.file.name, None, self._header_problem)
        doubt = "" if self._header_problem is None else ", unless that is what is damaged in the header"
        for tensor, found in _checksums(self.file, self.tensors, on_bytes):
            expected = self.expected.get(tensor.name)
            if expected is not None and found != expected:
                reason = f"has the checksum {found}, {expected} was written with it{doubt}"
                yield Damage(self.file.name, tensor.name, reason)


def is_switched_off() -> bool:
    """Whether the environment says to load without checking data. Raises `ValueError` for what is neither 0 nor 1."""
    text = os.environ.get(VARIABLE, "1")
    if text not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={text!r} must be 1, to check the data of checkpoints as they are loaded, or 0")
    return text == "0"


def check_data(files: Sequence[str | os.PathLike], *, is_ours: bool = True) -> int:
    """Compare all data of ``files`` with the checksums in their headers; the number of tensors compared, 0 where there
    are no checksums and where `HF_MXFP4_VERIFY=0`.

    Args:
        files: safetensors files of one checkpoint; others are passed over.
        is_ours: whether to say so when the files carry no checksums, as those saved by earlier versions do.

    Raises [`ShardError`], which names file and tensor, for the first that does not agree.
    """
    if is_switched_off():
        get_logger().info("%s=0: the data of the checkpoint are not checked", VARIABLE)
        return 0
    read = [FileChecksums(Path(file)) for file in files if str(file).endswith(".safetensors")]
    checked = [file for file in read if file.expected is not None]
    for file in checked:
        for damage in file.damage():
            raise ShardError(
                f"{damage}. Download or copy the file again; `hf-mxfp4 verify` names everything that is damaged. (If a "
                f"tool changed the file on purpose and kept its metadata, {VARIABLE}=0 loads it)"
            )
    without = [file.file.name for file in read if file.expected is None]
    if checked and without:
        get_logger().warning("%s: not checked, without the checksums that other files have", ", ".join(without))
    elif without and is_ours:
        get_logger().info("the files carry no checksums: their data are not checked (hf-mxfp4 verify --add adds them)")
    n_tensors = sum(len(file.tensors) for file in checked)
    if checked:
        get_logger().info("checked %d tensors, %.1f MB", n_tensors, sum(file.n_bytes for file in checked) / 1e6)
    return n_tensors


def add_checksums(file: Path, on_bytes: OnBytes = lambda count, name: None) -> int:
    """Write checksums into a file that carries none; the number of its tensors.

    The file is copied with a longer header, and the copy takes its place in one step when it is on the disk. A link is
    replaced by a file of its own. Raises [`ShardError`] for a file that cannot be read, `ValueError` for one that
    carries checksums already, and `OSError` where it cannot be written.
    """
    tensors, metadata = read_header_and_metadata(file)
    if CHECKSUMS in metadata or HEADER_CHECKSUM in metadata:
        raise ValueError(f"{file.name} carries checksums already")
    (header, _, _), draft = load_header(file), draft_of(file)

    def with_checksums(checksums: dict[str, str]) -> bytes:
        added = checksum_metadata(_contents(tensors), checksums, metadata)
        return header_bytes({**header, "__metadata__": {**metadata, **added}})

    try:
        with open(draft, "wb") as target:
            target.write(with_checksums({tensor.name: UNKNOWN for tensor in tensors}))
            found = {tensor.name: value for tensor, value in _checksums(file, tensors, on_bytes, target)}
            target.seek(0)
            target.write(with_checksums(found))
        sync_to_disk(draft)
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    sync_to_disk(file.parent)
    return len(tensors)


def _checksums(
    file: Path, tensors: Sequence[StoredTensor], on_bytes: OnBytes, target: BinaryIO | None = None
) -> Iterator[tuple[StoredTensor, str]]:
    """Each tensor of a file with the checksum of its bytes, which are copied to ``target``."""
    buffer = memoryview(bytearray(_PORTION))
    with _opened(file) as stream:
        stream.seek(tensors[0].offset if tensors else 0)
        for tensor in tensors:
            checksum, left = xxh3_64(), tensor.nbytes
            while left:
                portion = buffer[: _read(stream, buffer[: min(left, _PORTION)], tensor)]
                checksum.update(portion)
                if target is not None:
                    target.write(portion)
                left -= len(portion)
                on_bytes(len(portion), tensor.name)
            yield tensor, checksum.hexdigest()


def _opened(file: Path) -> BinaryIO:
    try:
        return open(file, "rb", buffering=0)
    except OSError as error:
        raise ShardError(f"{file.name} cannot be read: {error.strerror or error}") from error


def _read(stream: BinaryIO, buffer: memoryview, tensor: StoredTensor) -> int:
    try:
        count = stream.readinto(buffer)
    except OSError as error:
        raise ShardError(f"{tensor.file.name} cannot be read: {error.strerror or error}") from error
    if not count:
        raise ShardError(f"{tensor.file.name} ended inside {tensor.name}; was it written to meanwhile?")
    return count


def _contents(tensors: Sequence[StoredTensor]) -> Contents:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
