# SPDX-License-Identifier: Apache-2.0
"""The log that makes a long analysis resumable: one JSON line per finished tensor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..resume_log import ProgressMismatch, ResumeLog
from .results import TensorResult
from .statistics import ErrorStatistics
from .sweep import PrecisionSweep


FORMAT = 1


class ProgressLog(ResumeLog):
    """Results of finished tensors, on disk as soon as they are known.

    Every line carries size and modification time of the file its tensor came from. Use as a context manager.

    Args:
        path: the log; made with its folder if need be.
        model, schemes, version: what the results are of; kept in the first line.
        overwrite: start over whatever the log holds.

    Raises [`ProgressMismatch`] when the log was written for something else.
    """

    def __init__(self, path: Path, model: str, schemes: Sequence[str], version: str, *, overwrite: bool = False):
        header = {"format": FORMAT, "hf_mxfp4": version, "model": model, "schemes": list(schemes)}
        super().__init__(path, header, overwrite=overwrite)

    def key(self, line: Mapping[str, Any]) -> str:
        return line["tensor"]

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
        self._append(line)
