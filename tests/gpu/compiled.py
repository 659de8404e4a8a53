# SPDX-License-Identifier: Apache-2.0
"""Scripts of the other folders that compare kernels, here with compiled ones."""

import json
import os
import subprocess
import sys
from pathlib import Path


TESTS = Path(__file__).resolve().parents[1]


def report_of(script: str, *arguments: str, timeout: float = 550):
    """What a script prints, parsed as JSON; in a process of its own, whose kernels are compiled.

    Args:
        script: its path in ``tests``.
        timeout: seconds after which it is stopped, which is an error.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", str(TESTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
