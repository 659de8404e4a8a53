# SPDX-License-Identifier: Apache-2.0
"""One case on one GPU: recorded on the stub, compiled, estimated, and put into a record."""

import contextlib
import io
from typing import Any

from ..bench import Aim
from .cases import Case, recorded
from .compile import compile_launch
from .estimate import Estimate, estimate, estimate_operator, in_turn
from .gpus import GPU
from .stub import Launch, Step, cuda_of, stub_gpu
from .work import work_of


def modelled(case: Case, gpu: GPU) -> dict[str, Any]:
    """The record of a case: as those of `benchmarks.gpu`, with ``"kind": "modelled"``."""
    record = {
        "name": case.name,
        "shape": list(case.shape),
        "kind": "modelled",
        "gpu": gpu.name,
        "arch": gpu.arch,
        "status": "ok",
        "baseline": None,
        "ratio": None,
        "ceiling_fraction": None,
    }
    try:
        with stub_gpu(gpu) as steps:
            launched = recorded(case, steps, cuda_of(gpu))
        kernels = [_step(step, gpu, case) for step in launched]
    except Exception as error:
        return record | {"status": "failed", "value": "failed", "unit": "", "reason": _first_line(error)}
    whole = in_turn([found for _, found in kernels])
    flops = whole.flops if case.flops is None else case.flops
    floor = max(case.n_bytes / gpu.copy, sum(n / gpu.ceiling(kind) for kind, n in flops.items()))
    name, baseline = case.baseline or (None, None)
    ratio = baseline(gpu) / whole.seconds if baseline else None
    record |= {
        "value": _digits(1e6 * whole.seconds),
        "unit": "us",
        "ceiling_fraction": _digits(floor / whole.seconds),
        "baseline": name,
        "ratio": None if ratio is None else _digits(ratio),
        "bottleneck": whole.bottleneck if len(kernels) == 1 else _slowest(kernels),
        "launches": len(kernels),
        "kernels": _listed(kernels),
        "aims": [],
    }
    if gpu.name in case.aims:
        what, unit = (f"of {name}", "x") if name else ("of the copy ceiling", "%")
        aim = Aim(what, case.aims[gpu.name], ratio if name else floor / whole.seconds, unit)
        record["aims"] = [{"what": what, "least": aim.least, "reached": _digits(aim.reached), "text": str(aim)}]
    return record


def _step(step: Step, gpu: GPU, case: Case) -> tuple[dict[str, Any], Estimate]:
    if not isinstance(step, Launch):
        found = estimate_operator(step, gpu)
        return {"name": f"torch {step.name}", "seconds": _digits(found.seconds), "bottleneck": found.bottleneck}, found
    with contextlib.redirect_stderr(io.StringIO()):
        compiled = compile_launch(step, gpu)
    work = work_of(step, case.reached)
    found = estimate(compiled, gpu, work)
    about = {
        "name": step.name,
        "seconds": _digits(found.seconds),
        "bottleneck": found.bottleneck,
        "programs": step.programs,
        "warps": compiled.warps,
        "registers": compiled.registers,
        "shared": compiled.shared,
        "spilled": compiled.spilled,
        "resident": found.programs_per_multiprocessor,
        "per": work.unit,
        "instructions": _digits(sum(found.instructions.values())),
        "pipes": {pipe: _digits(n) for pipe, n in found.instructions.items() if n >= 0.05},
    }
    return about, found


def _listed(kernels: list[tuple[dict[str, Any], Estimate]]) -> list[dict[str, Any]]:
    """Small steps of torch that take no part worth a line as one."""
    listed = [about for about, _ in kernels]
    small = [about for about in listed if about["name"].startswith("torch ") and about["bottleneck"] != "tensor"]
    if len(small) < 4:
        return listed
    others = {"name": f"{len(small)} small operators of torch", "seconds": _digits(sum(s["seconds"] for s in small))}
    return [*(about for about in listed if about not in small), others | {"bottleneck": "memory"}]


def _slowest(kernels: list[tuple[dict[str, Any], Estimate]]) -> str:
    about, found = max(kernels, key=lambda kernel: kernel[1].seconds)
    return f"{found.bottleneck} of {about['name']}"


def row(record: dict[str, Any]) -> str:
    """A record in a line."""
    what = f"  {record['name']} {'x'.join(map(str, record['shape']))}"
    if record["status"] == "failed":
        return f"{what:<66} failed: {record['reason']}"
    ratio = "" if record["ratio"] is None else f"{record['ratio']:.2f}x {record['baseline']}"
    cells = [f"{what:<66}", f"{record['value']:8.1f} us", f"{100 * record['ceiling_fraction']:4.0f} %"]
    cells += [f"{ratio:<22}", f"{record['launches']} launches, {record['bottleneck']}"]
    return "  ".join([*cells, *(aim["text"] for aim in record["aims"])])


def kernel_row(kernel: dict[str, Any]) -> str:
    """A launch in a line."""
    line = f"      {1e6 * kernel['seconds']:8.1f} us  {kernel['name']}, {kernel['bottleneck']}"
    if "programs" not in kernel:
        return line
    pipes = ", ".join(f"{name} {count:g}" for name, count in kernel["pipes"].items())
    takes = f"{kernel['programs']} programs of {kernel['warps']} warps, {kernel['resident']} at once"
    memory = f"{kernel['registers']} registers, {kernel['shared']} bytes shared, {kernel['spilled']} spilled"
    return f"{line}: {takes}; {memory}; {kernel['instructions']:g} a {kernel['per']} ({pipes})"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
