# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 env`: versions, devices, and what computes what here; for bug reports."""

from collections import Counter
from typing import Annotated, Any

import typer

from ..utils import machine, package_versions
from .common import JsonOption, print_json, print_table


#: Where products are shown for when there is no GPU.
_TYPICAL_HARDWARE = ("sm_80", "sm_90", "sm_100")


def env(
    as_json: JsonOption = False,
    check: Annotated[bool, typer.Option("--check", help="Check all kernels on the GPUs here first.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print what computes what, and why.")] = False,
) -> None:
    """Show versions, devices, and what quantizes on them; with --verbose, what multiplies, and why."""
    facts = environment(check)
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
    for device, states in facts["self_checks"].items():
        counts = Counter(states.values())
        typer.echo(f"kernels on {device}: {', '.join(f'{count} {state}' for state, count in counts.items())}")
    if not verbose:
        typer.echo("what computes what, and why: hf-mxfp4 env --verbose")
        return
    for title, key in (("what quantizes", "quantization"), ("what multiplies", "products")):
        rows = [[str(value or "") for value in row.values()] for row in facts[key]]
        print_table(title, list(facts[key][0]), rows)


def environment(check: bool = False) -> dict[str, Any]:
    """Return what [`env`] shows, JSON-clean; with ``check`` after a check of all kernels on all GPUs."""
    import torch

    from ..backends import self_check

    facts = machine()
    kinds = [gpu["type"] for gpu in facts["gpus"]]
    devices = [torch.device(kind, kinds[:i].count(kind)) for i, kind in enumerate(kinds)]
    return {
        "versions": package_versions(),
        **facts,
        "quantization": _quantization(["cpu", *sorted(set(kinds))]),
        "self_checks": {str(device): self_check.states(device, check) for device in devices},
        "products": _products(devices),
    }


def _quantization(devices: list[str]) -> list[dict[str, Any]]:
    import torch

    from ..backends import backend_for
    from ..config import MXFP4RLConfig
    from ..numerics import QuantScheme

    default, rows = MXFP4RLConfig(), []
    for device in devices:
        for dtype in ("float32", "bfloat16", "float16"):
            for scheme in dict.fromkeys([QuantScheme(), default.weight_scheme, default.activation_scheme]):
                backend, reason = backend_for(device, getattr(torch, dtype), scheme, "auto")
                row = {"device": device, "dtype": dtype, "scheme": str(scheme)}
                rows.append({**row, "backend": backend, "reason": reason})
    return rows


def _products(devices: list[Any]) -> list[dict[str, Any]]:
    """Per preset, hardware and product, what multiplies and why; without a GPU, on hardware as it is sold."""
    from ..config import MXFP4RLConfig
    from ..gemm import hardware_of, select_matmul
    from ..numerics import GEMM_OPERANDS
    from ..presets import PRESETS

    rows = []
    for preset in PRESETS:
        scheme = MXFP4RLConfig(preset=preset).gemms()
        for hardware in list(dict.fromkeys(map(hardware_of, devices))) or _TYPICAL_HARDWARE:
            for gemm in GEMM_OPERANDS:
                layer, experts = (select_matmul(gemm, scheme, hardware, experts=of) for of in (False, True))
                row = {"preset": preset, "hardware": hardware, "product": gemm}
                rows.append({**row, "linear": layer.name, "experts": experts.name, "reason": layer.reason})
    return rows
