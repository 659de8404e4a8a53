# SPDX-License-Identifier: Apache-2.0
"""The versions and the machine that a result belongs to."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


PACKAGES = ("hf-mxfp4", "torch", "transformers", "trl", "peft", "accelerate", "triton", "safetensors")


def package_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter here, `None` for those that are not installed."""
    from . import __version__

    versions = {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}}
    versions["hf-mxfp4"] = __version__
    return versions


def machine() -> dict[str, Any]:
    """The operating system, the CPU (name and cores) and the GPUs, JSON-clean."""
    return {
        "system": platform.platform(),
        "cpu": {"name": cpu_name(), "cores": os.cpu_count()},
        "gpus": present_gpus(),
    }


def present_gpus() -> list[dict[str, Any]]:
    """The GPUs that torch sees: type, name and capability of each."""
    import torch

    found = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        for i in range(module.device_count() if module.is_available() else 0):
            capability = f"compute capability {'.'.join(map(str, module.get_device_capability(i)))}"
            if kind == "xpu":
                capability = "xpu"
            elif torch.version.hip:
                capability = torch.cuda.get_device_properties(i).gcnArchName
            found.append({"type": kind, "name": module.get_device_name(i), "capability": capability})
    return found


def installed_version(name: str) -> str | None:
    """The version of a package; `None` for one that is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
