# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels ahead of time, without a GPU. For scripts that `run_script` starts: a process that interprets
kernels cannot compile them."""

import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


#: What is read from machine code: instructions, which takes half of the time, and resources.
READ = ["-sass", "-res-usage"]


def gpu_target(backend: str, arch: str) -> GPUTarget:
    """``"cuda", "90"`` or ``"hip", "gfx950"``."""
    return GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)


def compile_kernel(
    target: GPUTarget,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    multiples_of_16: Iterable[str] = (),
) -> dict[str, Any]:
    """Code of one variant of a kernel: ``llir``, ``ptx`` and ``sass`` (with resource usage) or ``amdgcn``, and
    bytes of ``shared`` memory.

    Args:
        types: Triton's type of every argument that is not constant; of more names than the kernel has, if need be. Of a
            bundle, a (named) tuple of types, with numbers and `None` for what is constant in it.
        constants: values of compile-time arguments; `None` for a pointer that is not used. Likewise.
        options: of the compiler, ``num_warps`` and the like.
        multiples_of_16: arguments, and parts of bundles, that the compiler may take for multiples of 16 (pointers:
            aligned to 16 bytes).
    """
    names = kernel.arg_names
    signature, values, attributes = {}, {}, {}
    multiples = set(multiples_of_16)

    def kind_of(name: str, path: tuple[int, ...], kind: Any) -> Any:
        if isinstance(kind, tuple):
            parts = getattr(kind, "_fields", [name] * len(kind))
            found = [kind_of(part, (*path, i), k) for i, (part, k) in enumerate(zip(parts, kind, strict=True))]
            return type(kind)(*found) if hasattr(kind, "_fields") else tuple(found)
        if not isinstance(kind, str):
            values[path] = kind
            return "constexpr"
        if name in multiples:
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    for place, name in enumerate(names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        else:
            signature[name] = kind_of(name, (place,), types[name])
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=target, options=dict(options))
    report = {kind: compiled.asm[kind] for kind in ("llir", "ptx", "amdgcn") if kind in compiled.asm}
    if "cubin" in compiled.asm:
        report["sass"] = _disassemble(compiled.asm["cubin"])
    return report | {"shared": compiled.metadata.shared}


def _disassemble(cubin: bytes) -> str:
    """Machine code and resource usage of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, *READ, file.name]
        nvdisasm = triton.knobs.nvidia.nvdisasm.path
        environment = {"PATH": nvdisasm.rpartition("/")[0]}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
