# SPDX-License-Identifier: Apache-2.0
"""Runs a script of this folder in a process of its own, where Triton interprets kernels or compiles them.

Triton looks at TRITON_INTERPRET when a kernel is defined, its own library functions included: whichever test imports it
first decides for the whole process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., dict]:
    """``run_script(name, *arguments, interpret)``: what the script prints, parsed as JSON."""

    def run(name: str, *arguments: str, interpret: bool) -> dict:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TRITON_INTERPRET": str(int(interpret)),
            "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        }
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(name)), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
