# SPDX-License-Identifier: Apache-2.0
"""What a benchmark ran on."""

import os
import platform
from pathlib import Path

import torch


def hardware(threads: int | None = None) -> str:
    """Processor, cores, and the threads that torch uses (or `threads`, where that was another process); the GPU."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{model}, {os.cpu_count()} logical cores, {threads or torch.get_num_threads()} threads"
