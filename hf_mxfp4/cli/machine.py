# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 env` and `doctor`: versions, devices and what computes what on this machine, for bug reports; and whether
the kernels are right on its GPUs."""

import os
from collections import Counter
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
    for i, gpu in enumerate(facts["gpus"]):
        typer.echo(f"{f'GPU {i}':<13} {gpu['name']}, {gpu['capability']}")
    if not facts["gpus"]:
        typer.echo(f"{'GPUs':<13} none")
    backends: dict[str, list[str]] = {}
    for row in facts["quantization"]:
        name = f"{row['backend']} ({row['reason']})" if row["reason"] else row["backend"]
        names = backends.setdefault(row["device"], [])
        if name not in names:
            names.append(name)
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
    checks = {device: list(lab.check_kernels(device)) for device in devices}
    if as_json:
        kernels = {device: list(map(asdict, results)) for device, results in checks.items()}
        print_json({**environment(), "kernels": kernels})
    else:
        for device, results in checks.items():
            rows = [[check.name, check.problem or "right", f"{check.seconds:.1f}"] for check in results]
            print_table(f"kernels on {device}", ["kernels", "result", "seconds"], rows)
        typer.echo("for an issue: hf-mxfp4 doctor --json")
    if any(check.problem for results in checks.values() for check in results):
        raise typer.Exit(1)


def _devices(facts: dict[str, Any]) -> list[str]:
    """Return the names in torch of the GPUs that [`machine`] found, such as ``["cuda:0", "cuda:1"]``."""
    numbers: Counter[str] = Counter()
    devices = []
    for gpu in facts["gpus"]:
        devices.append(f"{gpu['type']}:{numbers[gpu['type']]}")
        numbers[gpu["type"]] += 1
    return devices


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
    """Return what quantizes, per device, dtype and scheme, and why it is not the first choice."""
    import torch

    presets = [hf_mxfp4.MXFP4RLConfig(preset=preset) for preset in ("w4a8", "w4a4", "paper_a")]
    schemes = [hf_mxfp4.QuantScheme(), *(config.weight_scheme for config in presets)]
    rows = []
    for device in devices:
        for dtype in ("float32", "bfloat16", "float16"):
            for scheme in schemes:
                backend, reason = hf_mxfp4.ops.backend_for(device, getattr(torch, dtype), scheme, "auto")
                rows.append(
                    {
                        "device": device,
                        "dtype": dtype,
                        "scheme": str(scheme),
                        "backend": backend,
                        "reason": reason,
                    }
                )
    return rows


def _products(devices: list[str]) -> list[dict[str, Any]]:
    """Return what multiplies, per preset, hardware and product, and why; without a GPU, on typical hardware."""
    import torch

    from ..ops import hardware_of, select_matmul
    from ..presets import PRESETS

    present = [hardware_of(torch.device(device)) for device in devices]
    rows = []
    for preset in PRESETS:
        scheme = hf_mxfp4.MXFP4RLConfig(preset=preset).gemms()
        for hardware in dict.fromkeys(present or _TYPICAL_HARDWARE):
            for product in hf_mxfp4.numerics.GEMM_OPERANDS:
                linear = select_matmul(product, scheme, hardware, experts=False)
                experts = select_matmul(product, scheme, hardware, experts=True)
                rows.append(
                    {
                        "preset": preset,
                        "hardware": hardware,
                        "product": product,
                        "linear": linear.name,
                        "experts": experts.name,
                        "reason": linear.reason,
                    }
                )
    return rows
