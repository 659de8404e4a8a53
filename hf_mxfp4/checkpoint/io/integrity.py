# SPDX-License-Identifier: Apache-2.0
"""Compare safetensors files with the checksums that they carry, and write checksums into files that carry none.

A file is gone through once, in portions, by some threads: memory use is that of the portions, and what is read stays
in the system's cache for whoever loads the file.
"""

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64

from ..._logging import get_logger
from ...files import draft_of, sync_to_disk
from .checksums import CHECKSUMS, HEADER_CHECKSUM, UNKNOWN, Contents, checksum_metadata, header_checksum
from .reader import (
    AnyFile,
    FileHeader,
    ShardError,
    StoredTensor,
    is_safetensors,
    load_header,
    read_file_header,
    read_headers,
)
from .writer import header_bytes


#: ``0`` in the environment loads checkpoints without comparing their data with their checksums.
VARIABLE = "HF_MXFP4_VERIFY"
#: Bytes that are read at a time, about what the cache of a core holds; that are mapped at a time; and that a thread has
#: to do at a time, unless one tensor has more.
_READ, _MAPPED, _GROUP = 1 << 18, 1 << 22, 1 << 25
#: More do not read memory any faster.
_THREADS = 4

#: Told of bytes that were read, with the name of what they belong to.
OnBytes = Callable[[int, str], None]
#: Gives the bytes of a file from one place to another, piece by piece.
Portions = Callable[[Path, int, int], Iterator[memoryview]]


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

    Attributes:
        tensors: all of them, in the order of their bytes.
        expected: checksums by names; `None` for a file that carries none.
    """

    def __init__(self, header: FileHeader):
        self.file, self.tensors, metadata = header.file, header.tensors, header.metadata
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

    @property
    def header_damage(self) -> list[Damage]:
        """What is wrong with the header, if anything."""
        return [] if self._header_problem is None else [Damage(self.file.name, None, self._header_problem)]

    def compare(self, tensors: Sequence[StoredTensor], checksums: Sequence[str]) -> Iterator[Damage]:
        """Those of some tensors whose checksums are not the ones that the header gives."""
        doubt = "" if self._header_problem is None else ", unless that is what is damaged in the header"
        for tensor, found in zip(tensors, checksums, strict=True):
            expected = self.expected.get(tensor.name)
            if expected is not None and found != expected:
                reason = f"has the checksum {found}, {expected} was written with it{doubt}"
                yield Damage(self.file.name, tensor.name, reason)


def _read_portions(file: Path, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes of a part of a file, by plain reads: a disk that fails is an error."""
    buffer = memoryview(bytearray(_READ))
    try:
        with open(file, "rb", buffering=0) as stream:
            stream.seek(start)
            while start < stop:
                count = stream.readinto(buffer[: min(_READ, stop - start)])
                if not count:
                    raise ShardError(f"{file.name} ended at byte {start}; was it written to meanwhile?")
                yield buffer[:count]
                start += count
    except OSError as error:
        raise ShardError(f"{file.name} cannot be read: {error.strerror or error}") from error


def _mapped_portions(file: Path, start: int, stop: int) -> Iterator[memoryview]:
    """The same without a copy, as loading maps the file anyway."""
    try:
        with open(file, "rb") as stream:
            while start < stop:
                first = start - start % mmap.ALLOCATIONGRANULARITY
                end = min(stop, first + _MAPPED)
                with mmap.mmap(stream.fileno(), end - first, access=mmap.ACCESS_READ, offset=first) as mapped:
                    with memoryview(mapped) as view, view[start - first :] as portion:
                        yield portion
                start = end
    except (OSError, ValueError) as error:  # the second where the file has become shorter
        raise ShardError(f"{file.name} cannot be read: {error}") from error


def find_damage(
    files: Sequence[FileChecksums],
    on_bytes: OnBytes = lambda count, name: None,
    read: Portions = _read_portions,
    threads: int = _THREADS,
) -> Iterator[Damage]:
    """Everything in files that does not agree with their checksums, the headers first; nothing of files that carry
    none. ``read`` gives the bytes of a part of a file, in so many ``threads`` at most. Raises [`ShardError`] for one
    that cannot be read to its end."""
    for file in files:
        yield from file.header_damage
    groups = [(file, group) for file in files if file.expected is not None for group in _groups(file.tensors)]

    def checksums_of(place: tuple[FileChecksums, list[StoredTensor]]) -> list[str]:
        file, group = place
        return _checksums(group, read(file.file, *_span(group)))

    pool = ThreadPoolExecutor(max(1, min(threads, len(groups), _n_cores())), "checksums")
    try:
        found = map(checksums_of, groups) if threads == 1 else pool.map(checksums_of, groups)
        for (file, group), checksums in zip(groups, found, strict=True):
            yield from file.compare(group, checksums)
            on_bytes(sum(tensor.nbytes for tensor in group), group[-1].name)
    finally:
        pool.shutdown(cancel_futures=True)


def is_switched_off() -> bool:
    """Whether the environment says to load without checking data. Raises `ValueError` for what is neither 0 nor 1."""
    text = os.environ.get(VARIABLE, "1")
    if text not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={text!r} must be 1, to check the data of checkpoints as they are loaded, or 0")
    return text == "0"


def check_data(files: Sequence[AnyFile], *, is_ours: bool = True, mapped: bool = False) -> int:
    """Compare headers and all data of ``files`` with the checksums that they carry.

    Args:
        files: safetensors files of one checkpoint, or their headers; others are passed over.
        is_ours: whether to say so when the files carry no checksums, as those saved by earlier versions do.
        mapped: map the files into memory, in some threads, for what maps them afterwards: that is faster than to read
            them in this thread, which takes next to no memory.

    Returns:
        The number of tensors compared: 0 where there are no checksums, and where `HF_MXFP4_VERIFY=0`.

    Raises [`ShardError`], which names file and tensor, for the first that does not agree.
    """
    if is_switched_off():
        get_logger().info("%s=0: the data of the checkpoint are not checked", VARIABLE)
        return 0
    opened = [FileChecksums(header) for header in read_headers([file for file in files if is_safetensors(file)])]
    checked = [file for file in opened if file.expected is not None]
    without = [file.file.name for file in opened if file.expected is None]
    if checked and without:
        get_logger().warning("%s: not checked, without the checksums that other files have", ", ".join(without))
    elif without and is_ours:
        get_logger().info("the files carry no checksums: their data are not checked (hf-mxfp4 verify --add adds them)")
    how = {"read": _mapped_portions} if mapped else {"threads": 1}
    for damage in find_damage(checked, **how):
        raise ShardError(
            f"{damage}. Download or copy the file again; `hf-mxfp4 verify` names everything that is damaged. (If a "
            f"tool changed the file on purpose and kept its metadata, {VARIABLE}=0 loads it)"
        )
    n_tensors = sum(len(file.tensors) for file in checked)
    if checked:
        get_logger().info("checked %d tensors, %.1f MB", n_tensors, sum(file.n_bytes for file in checked) / 1e6)
    return n_tensors


def why_damaged(folder: str | os.PathLike) -> str | None:
    """What is damaged in the weights of a folder that a trainer wrote; `None` when nothing is, and where they carry no
    checksums."""
    try:
        check_data(sorted(Path(folder).glob("model*.safetensors")), is_ours=False)
    except ShardError as error:
        return str(error)
    return None


def add_checksums(file: Path, on_bytes: OnBytes = lambda count, name: None) -> int:
    """Write checksums into a file that carries none; the number of its tensors.

    The file is copied with a longer header, and the copy takes its place in one step when it is on the disk. A link is
    replaced by a file of its own. Raises [`ShardError`] for a file that cannot be read, `ValueError` for one that
    carries checksums already, and `OSError` where it cannot be written.
    """
    own = read_file_header(file)
    tensors, metadata = own.tensors, own.metadata
    if CHECKSUMS in metadata or HEADER_CHECKSUM in metadata:
        raise ValueError(f"{file.name} carries checksums already")
    (header, _, _), draft = load_header(file), draft_of(file)

    def with_checksums(checksums: dict[str, str]) -> bytes:
        added = checksum_metadata(_contents(tensors), checksums, metadata)
        return header_bytes({**header, "__metadata__": dict(sorted({**metadata, **added}.items()))})

    def copied() -> Iterator[memoryview]:
        for portion in _read_portions(file, *_span(tensors)):
            target.write(portion)
            on_bytes(len(portion), file.name)
            yield portion

    try:
        with open(draft, "wb") as target:
            target.write(with_checksums({tensor.name: UNKNOWN for tensor in tensors}))
            found = _checksums(tensors, copied()) if tensors else []
            target.seek(0)
            target.write(with_checksums({tensor.name: value for tensor, value in zip(tensors, found, strict=True)}))
        sync_to_disk(draft)
        os.replace(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    sync_to_disk(file.parent)
    return len(tensors)


def _checksums(tensors: Sequence[StoredTensor], portions: Iterable[memoryview]) -> list[str]:
    """The checksums of tensors that follow each other in a file, whose bytes come in ``portions``."""
    found: list[str] = []
    source, portion, used = iter(portions), memoryview(b""), 0
    for tensor in tensors:
        checksum, missing = xxh3_64(), tensor.nbytes
        while missing:
            if used == len(portion):
                portion, used = next(source), 0
            count = min(missing, len(portion) - used)
            checksum.update(portion[used : used + count])
            used, missing = used + count, missing - count
        found.append(checksum.hexdigest())
    return found


def _span(tensors: Sequence[StoredTensor]) -> tuple[int, int]:
    """Where in their file tensors that follow each other begin and end."""
    return tensors[0].offset, tensors[-1].offset + tensors[-1].nbytes


def _groups(tensors: Iterable[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Tensors that follow each other, so many that they are worth a thread's while."""
    group: list[StoredTensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > _GROUP:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _contents(tensors: Sequence[StoredTensor]) -> Contents:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
