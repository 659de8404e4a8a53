# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 env` and `doctor`: versions, devices and what computes what here, for bug reports; and whether the kernels
are right on the GPUs here."""

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

import hf_mxfp4

from .. import lab
from ..utils import machine, package_versions
from .common import JsonOption, fail, print_json, print_table


#: Where products are shown for when there is no GPU.
_TYPICAL_HARDWARE = ("sm_80", "sm_90", "sm_100")


def env(
    as_json: JsonOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print what computes what, and why.")] = False,
) -> None:
    """Show versions, devices, and what quantizes on them; with --verbose, what multiplies, and why."""
    facts = environment()
    if as_json:
        print_json(facts)
        return
    for name, version in facts["versions"].items():
        typer.echo(f"{name:<13} {version or 'not installed'}")
    typer.echo(f"{'system':<13} {facts['system']}")
    typer.echo(f"{'CPU':<13} {facts['cpu']['name']}, {facts['cpu']['cores']} cores")
    gpus = [f"{gpu['name']}, {gpu['capability']}" for gpu in facts["gpus"]]
    for i, gpu in enumerate(gpus or ["none"]):
        typer.echo(f"{f'GPU {i}' if gpus else 'GPUs':<13} {gpu}")
    backends: dict[str, dict[str, None]] = {}
    for row in facts["quantization"]:
        name = row["backend"] + (f" ({row['reason']})" if row["reason"] else "")
        backends.setdefault(row["device"], {})[name] = None
    for device, names in backends.items():
        typer.echo(f"quantization on {device}: {', '.join(names)}")
    if not verbose:
        typer.echo("what computes what, and why: hf-mxfp4 env --verbose")
        return
    for title, key in (("what quantizes", "quantization"), ("what multiplies", "products")):
        rows = [[str(value or "") for value in row.values()] for row in facts[key]]
        print_table(title, list(facts[key][0]), rows)


def doctor(as_json: JsonOption = False) -> None:
    """Compare every family of kernels on the GPUs here with the eager functions. Exit code 1 if one differs.

    Under TRITON_INTERPRET=1 the kernels run in Triton's interpreter, on the CPU, which takes minutes.
    """
    devices = ["cpu"] if os.environ.get("TRITON_INTERPRET") == "1" else _devices(machine())
    if not devices:
        fail("PyTorch sees no GPU here. TRITON_INTERPRET=1 runs the kernels on the CPU, in Triton's interpreter")
    found = {device: [asdict(check) for check in lab.check_kernels(device)] for device in devices}
    if as_json:
        print_json({**environment(), "kernels": found})
    else:
        for device, checks in found.items():
            rows = [[each["name"], each["problem"] or "right", f"{each['seconds']:.1f}"] for each in checks]
            print_table(f"kernels on {device}", ["kernels", "result", "seconds"], rows)
        typer.echo("for an issue: hf-mxfp4 doctor --json")
    if any(check["problem"] for checks in found.values() for check in checks):
        raise typer.Exit(1)


def _devices(facts: dict[str, Any]) -> list[str]:
    """GPUs that [`machine`] found: `["cuda:0", "cuda:1"]`."""
    kinds = [gpu["type"] for gpu in facts["gpus"]]
    return [f"{kind}:{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]


def environment() -> dict[str, Any]:
    """Return what [`env`] shows, JSON-clean."""
    facts = machine()
    return {
        "versions": package_versions(),
        **facts,
        "quantization": _quantization(["cpu", *sorted({gpu["type"] for gpu in facts["gpus"]})]),
        "products": _products(_devices(facts)),
    }


def _quantization(devices: list[str]) -> list[dict[str, Any]]:
    import torch

    presets = [hf_mxfp4.MXFP4RLConfig(preset=preset) for preset in ("w4a8", "w4a4", "paper_a")]
    schemes = [hf_mxfp4.QuantScheme(), *(config.weight_scheme for config in presets)]
    rows = []
    for device in devices:
        for dtype in ("float32", "bfloat16", "float16"):
            for scheme in schemes:
                backend, reason = hf_mxfp4.ops.backend_for(device, getattr(torch, dtype), scheme, "auto")
                row = {"device": device, "dtype": dtype, "scheme": str(scheme)}
                rows.append({**row, "backend": backend, "reason": reason})
    return rows


def _products(devices: list[str]) -> list[dict[str, Any]]:
    """Per preset, hardware and product, what multiplies and why; without a GPU, on hardware as it is sold."""
    import torch

    from ..presets import PRESETS

    rows, ops = [], hf_mxfp4.ops
    here = [ops.hardware_of(torch.device(device)) for device in devices]
    for preset in PRESETS:
        scheme = hf_mxfp4.MXFP4RLConfig(preset=preset).gemms()
        for hardware in dict.fromkeys(here or _TYPICAL_HARDWARE):
            for product in hf_mxfp4.numerics.GEMM_OPERANDS:
                layer, experts = (ops.select_matmul(product, scheme, hardware, experts=of) for of in (False, True))
                row = {"preset": preset, "hardware": hardware, "product": product}
                rows.append({**row, "linear": layer.name, "experts": experts.name, "reason": layer.reason})
    return rows
