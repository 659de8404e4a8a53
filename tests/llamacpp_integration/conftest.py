# SPDX-License-Identifier: Apache-2.0
"""Tests that run llama.cpp itself: `make test-llamacpp`, which builds it. Elsewhere they are skipped."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def run_tokens() -> Path:
    """The program that `build.sh` made."""
    folder = os.environ.get("LLAMACPP")
    program = Path(folder or "/nowhere") / "build" / "bin" / "run-tokens"
    if not program.is_file():
        pytest.skip("`make test-llamacpp` builds llama.cpp and runs this")
    return program
