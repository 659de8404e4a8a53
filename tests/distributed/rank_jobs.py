# SPDX-License-Identifier: Apache-2.0
"""Functions of this folder's modules, run in the ranks of one job."""

import os
from pathlib import Path
from typing import Any

import processes


#: On top of the environment; as users have it.
VARIABLES = {"HF_MXFP4_VERBOSITY": "info"}


def start_job(name: str, log: Path, *, ranks: int = 1, timeout: float = 400, **arguments: Any) -> processes.Process:
    """Start ``"module:function"`` in each rank; ``log`` gets what all of them write."""
    options = {"ranks": ranks, "timeout": timeout, "log": log, "environment": os.environ | VARIABLES}
    return processes.start(processes.function(name, **arguments), **options)


def run_job(name: str, log: Path, **options: Any) -> processes.Done:
    """The same to its end; its ``output`` is what the log has."""
    return start_job(name, log, **options).wait()
