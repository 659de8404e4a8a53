# SPDX-License-Identifier: Apache-2.0
"""The log that makes a long analysis resumable: one JSON line per finished tensor."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from .results import TensorResult
from .statistics import ErrorStatistics
from .sweep import PrecisionSweep


FORMAT = 1
#: Seconds of work that a power failure may cost; a killed process loses none.
_SYNC_SECONDS = 1.0


class ProgressMismatch(ValueError):
    """The log belongs to another checkpoint, other schemes or another version, or is damaged."""


class ProgressLog:
    """Results of finished tensors, on disk as soon as they are known.

    Every line carries size and modification time of the file its tensor came from. Use as a context manager.

    Args:
        path: the log; made with its folder if need be.
        model, schemes, version: what the results are of; kept in the first line.
        overwrite: start over whatever the log holds.

    Raises [`ProgressMismatch`] when the log was written for something else.
    """

    def __init__(self, path: Path, model: str, schemes: Sequence[str], version: str, *, overwrite: bool = False):
        self.path = path
        self._header = {"format": FORMAT, "hf_mxfp4": version, "model": model, "schemes": list(schemes)}
        self._done: dict[str, dict] = {}
        self._last_sync = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = 0 if overwrite or not path.exists() else self._load()
        self._stream: IO[bytes] = open(path, "r+b" if kept else "wb")
        if kept:
            self._stream.truncate(kept)
            self._stream.seek(kept)
        else:
            self._write(self._header)

    def __enter__(self) -> "ProgressLog":
        return self

    def __exit__(self, *exception) -> None:
        self.sync()
        self._stream.close()

    def __len__(self) -> int:
        return len(self._done)

    def find(self, tensor: str, shard: str, identity: list) -> TensorResult | None:
        """The result of a tensor of a shard, if it is known.

        Raises [`ProgressMismatch`] when it was computed from another version of the file.
        """
        line = self._done.get(tensor)
        if line is None:
            return None
        if line["shard"] != shard or line["identity"] != identity:
            raise ProgressMismatch(
                f"{self.path} holds results of {shard} as it was before it changed; "
                "start over with --overwrite, or give another --out"
            )
        return TensorResult(
            name=tensor,
            kind="weight",
            shape=tuple(line["shape"]),
            dtype=line["dtype"],
            statistics={scheme: ErrorStatistics.from_dict(sums) for scheme, sums in line["statistics"].items()},
            sweep=PrecisionSweep.from_dict(line["sweep"]),
        )

    def add(self, result: TensorResult, shard: str, identity: list) -> None:
        """Append a finished result."""
        line = {
            "tensor": result.name,
            "shard": shard,
            "identity": identity,
            "shape": list(result.shape),
            "dtype": result.dtype,
            "statistics": {scheme: statistics.to_dict() for scheme, statistics in result.statistics.items()},
            "sweep": result.sweep.to_dict(),
        }
        self._done[result.name] = line
        self._write(line)
        if time.monotonic() - self._last_sync > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Have the disk hold all that was added."""
        os.fsync(self._stream.fileno())
        self._last_sync = time.monotonic()

    def _write(self, line: dict) -> None:
        self._stream.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        self._stream.flush()

    def _load(self) -> int:
        """Read the log; bytes of it to keep. A last line that was torn by the end of its process is dropped."""
        lines = self.path.read_bytes().split(b"\n")
        torn = lines.pop()  # empty when the file ends as it should
        parsed = []
        for number, text in enumerate(lines, 1):
            try:
                parsed.append(json.loads(text))
            except ValueError:
                raise ProgressMismatch(
                    f"line {number} of {self.path} is damaged; start over with --overwrite, or give another --out"
                ) from None
        if len(parsed) < 2:
            return 0  # no result yet: nothing that could be mixed
        for key, now in self._header.items():
            if (before := parsed[0].get(key)) != now:
                raise ProgressMismatch(
                    f"{self.path} holds results for {key} {_words(before)}, not {_words(now)}; "
                    "start over with --overwrite, or give another --out"
                )
        self._done = {line["tensor"]: line for line in parsed[1:]}
        return self.path.stat().st_size - len(torn)


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
