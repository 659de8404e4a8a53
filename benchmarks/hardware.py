# SPDX-License-Identifier: Apache-2.0
"""What a benchmark ran on."""

import os
import platform
from pathlib import Path

import torch


def hardware() -> str:
    """Processor, cores, and the threads that torch uses."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} logical cores, {torch.get_num_threads()} threads"
