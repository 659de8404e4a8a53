# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 env`: versions, devices, and what computes what here; for bug reports."""

import importlib.metadata
import json
import os
import platform
from typing import Any

import typer

from .options import JsonOption


PACKAGES = ("hf-mxfp4", "torch", "transformers", "trl", "peft", "accelerate", "triton", "safetensors")
_KERNEL_SCHEMES = (
    "rceil",
    "floor",
    "even",
    "mse",
    "rceil+mbs128-static",
    "rceil+mbs128-dynamic",
    "even+mbs128-blockwise",
    "rceil+mbs128-static+of0.5",
    "rceil+stochastic",
)
_DTYPES = ("float32", "bfloat16", "float16")


def env(as_json: JsonOption = False) -> None:
    """Show versions, devices, and which backend and instructions the layers use on them."""
    from .console import out, plain_table

    facts = environment()
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    console = out()
    versions = [[name, version or "not installed"] for name, version in facts["versions"].items()]
    console.print(plain_table("versions", ["package", "version"], versions))
    machine = [["system", facts["system"]], ["CPU", f"{facts['cpu']['name']}, {facts['cpu']['cores']} cores"]]
    machine += [[f"GPU {i}", f"{gpu['name']}, {gpu['capability']}"] for i, gpu in enumerate(facts["gpus"])]
    if not facts["gpus"]:
        machine.append(["GPUs", "none"])
    console.print(plain_table("machine", ["", ""], machine))
    rows = [[q["device"], q["dtype"], q["scheme"], q["backend"], q["reason"] or ""] for q in facts["quantization"]]
    console.print(plain_table("what quantizes", ["device", "dtype", "scheme", "backend", "why not faster"], rows))
    kernels = [[name, reason or "yes"] for name, reason in facts["triton_kernels"].items()]
    console.print(plain_table("covered by the Triton kernels", ["scheme", ""], kernels))
    console.print(facts["products"], markup=False, highlight=False)


def environment() -> dict[str, Any]:
    """What [`env`] shows, JSON-clean."""
    import torch

    from .. import __version__

    versions = {name: _version(name) for name in PACKAGES}
    versions["hf-mxfp4"] = __version__
    gpus = _gpus(torch)
    return {
        "versions": {"python": platform.python_version(), **versions},
        "system": platform.platform(),
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count()},
        "gpus": gpus,
        "quantization": _quantization(torch, ["cpu", *sorted({gpu["type"] for gpu in gpus})]),
        "triton_kernels": _kernel_coverage(torch),
        "products": "Products: the layers multiply quantized values in the dtype of the model (or of autocast) with "
        "torch's ordinary matrix product, on every device. No FP4 or FP8 instruction is used.",
    }


def _quantization(torch: Any, devices: list[str]) -> list[dict[str, Any]]:
    from ..config import MXFP4RLConfig
    from ..numerics import QuantScheme
    from ..ops import backend_for

    default = MXFP4RLConfig()
    schemes = list(dict.fromkeys([QuantScheme(), default.weight_scheme, default.activation_scheme]))
    rows = []
    for device in devices:
        for name in _DTYPES:
            for scheme in schemes:
                backend, reason = backend_for(device, getattr(torch, name), scheme, "auto")
                rows.append(
                    {"device": device, "dtype": name, "scheme": str(scheme), "backend": backend, "reason": reason}
                )
    return rows


def _kernel_coverage(torch: Any) -> dict[str, str | None]:
    """Scheme to `None`, or to why the Triton kernels do not cover it for bfloat16 tensors."""
    import mxfp4_kernels

    from ..analysis.schemes import parse_scheme

    coverage = {}
    for text in _KERNEL_SCHEMES:
        scheme = parse_scheme(text)
        coverage[text] = mxfp4_kernels.supports(
            torch.bfloat16,
            scale_rule=scheme.scale_rule.value,
            macro_block=scheme.macro_block,
            macro_search=scheme.macro_search,
            outlier_fallback=scheme.outlier_fallback,
            rounding=scheme.rounding,
        )
    return coverage


def _gpus(torch: Any) -> list[dict[str, Any]]:
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


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            names = [line.split(":", 1)[1].strip() for line in stream if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
