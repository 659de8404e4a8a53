# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 env`: versions, devices, and what computes what here; for bug reports."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ..environment import machine, package_versions
from .options import JsonOption


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
#: Where engines are shown for when there is no GPU.
_TYPICAL_HARDWARE = ("sm_80", "sm_90", "sm_100")
_DTYPES = ("float32", "bfloat16", "float16")


def env(
    as_json: JsonOption = False,
    check: Annotated[bool, typer.Option("--check", help="Check all kernels on the GPUs here first.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print what computes what, and why.")] = False,
) -> None:
    """Show versions, devices, and what quantizes on them; with --verbose, what multiplies, and why."""
    facts = environment(check)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    for line in _summary(facts):
        typer.echo(line)
    if verbose:
        _show_details(facts)
    else:
        typer.echo("what computes what, and why: hf-mxfp4 env --verbose")


def _summary(facts: dict[str, Any]) -> Iterator[str]:
    for name, version in facts["versions"].items():
        yield f"{name:<13} {version or 'not installed'}"
    yield f"{'system':<13} {facts['system']}"
    yield f"{'CPU':<13} {facts['cpu']['name']}, {facts['cpu']['cores']} cores"
    for i, gpu in enumerate(facts["gpus"]):
        yield f"{f'GPU {i}':<13} {gpu['name']}, {gpu['capability']}"
    if not facts["gpus"]:
        yield f"{'GPUs':<13} none"
    backends: dict[str, dict[str, None]] = {}
    for row in facts["quantization"]:
        found = row["backend"] + (f" ({row['reason']})" if row["reason"] else "")
        backends.setdefault(row["device"], {})[found] = None
    for device, names in backends.items():
        yield f"quantization on {device}: {', '.join(names)}"
    for device, states in facts["self_checks"].items() if facts["gpus"] else ():
        counts = Counter(states.values())
        yield f"kernels on {device}: {', '.join(f'{count} {state}' for state, count in counts.items())}"


def _show_details(facts: dict[str, Any]) -> None:
    from .console import out, plain_table

    console = out()
    rows = [[q["device"], q["dtype"], q["scheme"], q["backend"], q["reason"] or ""] for q in facts["quantization"]]
    console.print(plain_table("what quantizes", ["device", "dtype", "scheme", "backend", "why not faster"], rows))
    kernels = [[name, reason or "yes"] for name, reason in facts["triton_kernels"].items()]
    console.print(plain_table("covered by the Triton kernels", ["scheme", ""], kernels))
    checks = [[device, *line] for device, lines in facts["self_checks"].items() for line in lines.items()]
    console.print(plain_table("what self-checks found", ["device", "kernels", ""], checks))
    _show_products(console, facts["products"])


def _show_products(console: Any, products: list[dict[str, Any]]) -> None:
    """Engines as a table whose last column refers to the reasons below it."""
    from .console import plain_table

    rows, reasons = [], []
    for row in products:
        found, experts = ([of[gemm] for gemm in ("fprop", "dgrad", "wgrad")] for of in (row, row["experts"]))
        why = list(dict.fromkeys(engine["reason"] for engine in found + experts if engine["engine"] == "dense"))
        reasons += [reason for reason in why if reason not in reasons]
        numbers = ", ".join(str(reasons.index(reason) + 1) for reason in why)
        names = [engine["engine"] for engine in found]
        rows.append([row["config"], row["hardware"], *names, "/".join(e["engine"] for e in experts), numbers])
    header = ["config", "hardware", "fprop", "dgrad", "wgrad", "of experts", "why dense"]
    console.print(plain_table("what multiplies", header, rows))
    for number, reason in enumerate(reasons, 1):
        console.print(f"{number}: {reason}", markup=False, highlight=False)


def environment(check: bool = False) -> dict[str, Any]:
    """Return what [`env`] shows, JSON-clean; with ``check`` after a check of all kernels on all GPUs."""
    import torch

    facts = machine()
    gpus = facts["gpus"]
    return {
        "versions": package_versions(),
        **facts,
        "quantization": _quantization(torch, ["cpu", *sorted({gpu["type"] for gpu in gpus})]),
        "triton_kernels": _kernel_coverage(torch),
        "self_checks": _self_checks(torch, [gpu["type"] for gpu in gpus], check),
        "products": _products(torch, [gpu["type"] for gpu in gpus]),
    }


def _self_checks(torch: Any, gpus: list[str], check: bool) -> dict[str, dict[str, str]]:
    """Device and family of kernels to what is known of these there, in words."""
    from ..backends import self_check

    if not gpus:
        return {"no GPU": dict.fromkeys(self_check.FAMILIES, "not checked (no GPU)")}
    return {str(device): self_check.states(device, check) for device in _devices(torch, gpus)}


def _devices(torch: Any, gpus: list[str]) -> list[Any]:
    """Torch's devices of GPUs of these types."""
    return [torch.device(kind, sum(other == kind for other in gpus[:i])) for i, kind in enumerate(gpus)]


def _quantization(torch: Any, devices: list[str]) -> list[dict[str, Any]]:
    from ..backends import backend_for
    from ..config import MXFP4RLConfig
    from ..numerics import QuantScheme

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


def _products(torch: Any, gpus: list[str]) -> list[dict[str, Any]]:
    """Per config and hardware, the engine of each product of a layer and why, and under ``"experts"`` those of experts;
    without a GPU, on hardware as it is sold."""
    from ..config import MXFP4RLConfig
    from ..gemm import hardware_of
    from ..presets import PRESETS

    found = list(dict.fromkeys(map(hardware_of, _devices(torch, gpus)))) or _TYPICAL_HARDWARE
    rows = []
    for preset in PRESETS:
        plain = {"outlier_fallback": None}
        for options in ({}, plain, {**plain, "macro_block": None}):
            config = MXFP4RLConfig(preset=preset, **options)
            label = preset + "".join(f", no {name}" for name in options if options[name] is None)
            for hardware in found:
                layer, experts = (_engines(config.gemms(), hardware, of_experts) for of_experts in (False, True))
                rows.append({"config": label, "hardware": hardware, **layer, "experts": experts})
    return rows


def _engines(scheme: Any, hardware: str, of_experts: bool) -> dict[str, dict[str, str]]:
    from ..gemm import select_matmul
    from ..numerics import GEMM_OPERANDS

    found = {gemm: select_matmul(gemm, scheme, hardware, experts=of_experts) for gemm in GEMM_OPERANDS}
    return {gemm: {"engine": engine.name, "reason": engine.reason} for gemm, engine in found.items()}


def _kernel_coverage(torch: Any) -> dict[str, str | None]:
    """Scheme to `None`, or to why the Triton kernels do not cover it for bfloat16 tensors."""
    from ..backends.triton import unsupported_reason
    from ..lab.errors.schemes import parse_scheme

    return {text: unsupported_reason("cuda", torch.bfloat16, parse_scheme(text)) for text in _KERNEL_SCHEMES}
