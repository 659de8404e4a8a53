# SPDX-License-Identifier: Apache-2.0
"""Quantization, rotation, and products with packed weights on CPUs: a library of C++ functions, compiled on first use
and kept in the user's cache.

A compiler alone makes it in a few seconds. `torch.utils.cpp_extension` needs ninja and, with torch's headers, half a
minute.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
#: Below that of the package that calls: its settings apply.
_logger = logging.getLogger("hf_mxfp4.cpu")
#: Folder of the compiled libraries, instead of the user's cache folder.
CACHE_VARIABLE = "HF_MXFP4_CACHE"
# The results must be those of the arithmetic as written; the last two drop only error flags that nobody reads.
_FLAGS: tuple[str, ...] = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")
_FLAGS += ("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math")
#: Instructions that the library is compiled for: those of this processor, or fewer, to compare them.
VARIANT_VARIABLE = "HF_MXFP4_CPU"
#: Options by variant; the first that the compiler accepts.
_TUNING = {
    "native": ("-march=native", "-mcpu=native", ""),
    "avx2": ("-march=x86-64-v3",),
    "portable": ("",),
    "sanitized": ("-march=native -fsanitize=address,undefined -fno-sanitize-recover=all -g",),
}
_COMPILE_SECONDS = 600
#: Parts of a packed tensor, in the order of the functions' arguments.
PARTS = ("codes", "scale", "macro", "residual_codes", "residual_scale")
#: Work, in elements of plain quantization, that is worth waking a thread for.
_WORTH_A_THREAD = 1 << 19
#: Dtypes of values.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: The process that may have torch's OpenMP threads: one that is forked from it has none.
_PROCESS = os.getpid()
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class SchemeStruct(ctypes.Structure):
    """The C struct `Scheme` of blocks.h, field by field."""

    _fields_ = [
        ("carry", ctypes.c_uint32),
        ("clips", ctypes.c_int32),
        ("least_squares", ctypes.c_int32),
        ("search", ctypes.c_int32),
        ("mantissas", _INT64),
        ("macro_blocks", _INT64),
        ("fallback", ctypes.c_int32),
        ("alpha", ctypes.c_float),
    ]


class ProductStruct(ctypes.Structure):
    """The C struct `Arguments` of product.cpp, field by field."""

    _fields_ = [
        ("x", _POINTER),
        ("type", _INT64),
        ("n_rows", _INT64),
        ("codes", _POINTER),
        ("scale", _POINTER),
        ("macro", _POINTER),
        ("residual_codes", _POINTER),
        ("residual_scale", _POINTER),
        ("in_features", _INT64),
        ("out_features", _INT64),
        ("weights", ctypes.POINTER(SchemeStruct)),
        ("bias", _POINTER),
        ("ends", _POINTER),
        ("n_experts", _INT64),
        ("y", _POINTER),
        ("threads", _INT64),
    ]


class DitherStruct(ctypes.Structure):
    """The C struct `Dither` of dither.cpp, field by field."""

    _fields_ = [("half_cell", _INT64), ("attempts", _INT64), ("seed", ctypes.c_uint64)]


# Matrix, its type and length, the scheme, rows and threads.
_COMMON = (_POINTER, ctypes.c_int, _INT64, ctypes.POINTER(SchemeStruct), _INT64, _INT64)
_SIGNATURES = {
    "mxfp4_quantize": (*_COMMON, *[_POINTER] * 6),
    "mxfp4_dequantize": (*_COMMON, *[_POINTER] * 5),
    "mxfp4_rotate": (_POINTER, ctypes.c_int, _POINTER, _INT64, ctypes.c_float, _INT64, _INT64),
    "mxfp4_dither": (
        _POINTER,
        _INT64,
        ctypes.POINTER(SchemeStruct),
        _INT64,
        _INT64,
        ctypes.POINTER(DitherStruct),
        ctypes.POINTER(_INT64),
    ),
    "mxfp4_product": (ctypes.POINTER(ProductStruct),),
    "mxfp4_product_rows": (),
}


class CompilationError(RuntimeError):
    """The library could not be compiled; the message says why."""


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the library, or `None` and the reason. Tried once per process."""
    try:
        library = _open()
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = None
        library.mxfp4_product_rows.restype = _INT64
        ctypes.c_int.in_dll(library, "mxfp4_process").value = _PROCESS
    except (CompilationError, OSError, AttributeError) as error:
        return None, str(error)
    return library, None


def _open() -> ctypes.CDLL:
    """Open the library in the cache, or compile it: into the cache, or else for this process alone."""
    key = _key()
    folder = _cache_folder()
    for path in sorted(folder.glob(f"{key}-*.so")) if folder is not None else ():
        with contextlib.suppress(OSError):  # not readable, or of a machine with another C library
            if _is_private(path) and path.stem == f"{key}-{_digest(path)}":
                return ctypes.CDLL(str(path))
    if folder is not None and os.access(folder, os.W_OK):
        return ctypes.CDLL(str(_compile(folder, key)))
    with tempfile.TemporaryDirectory(prefix="hf_mxfp4-") as temporary:
        library = ctypes.CDLL(str(_compile(Path(temporary), key)))
    _logger.warning(
        "the compiled CPU functions are not kept: set %s to a folder that you, and only you, can write to",
        CACHE_VARIABLE,
    )
    return library


def _cache_folder() -> Path | None:
    """Return the folder of compiled libraries; `None` where there is none that only this user can write to: what lies
    there is run as code."""
    try:
        chosen = os.environ.get(CACHE_VARIABLE)
        folder = Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_mxfp4")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not chosen and not _is_private(folder):
            folder.chmod(0o700)
        return folder if _is_private(folder) else None
    except (OSError, RuntimeError):  # no home, or not a folder
        return None


def _is_private(path: Path) -> bool:
    """Whether nobody but this user and root can write to it."""
    status = path.stat()
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022


def _digest(path: Path) -> str:
    """Return a digest of a library's bytes, which is in its name: a damaged one would end the process that loads it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _key() -> str:
    """Return what results depend on: a cache folder may be shared by machines with other processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    wanted = ("flags", "features", "model name", "cpu family", "model", "stepping")
    processor = sorted({line for line in lines if line.split(":")[0].strip().lower() in wanted})
    sources = b"".join(source.read_bytes() for source in SOURCES)
    identity = "\n".join(map(str, (sources, platform.platform(), processor, _FLAGS, _tuning())))
    return f"cpu-{hashlib.sha256(identity.encode()).hexdigest()[:20]}"


def _compile(folder: Path, key: str) -> Path:
    """Compile the library into a folder: other processes see all of it or nothing."""
    candidates = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    compiler = next(filter(None, map(shutil.which, candidates)), None)
    if compiler is None:
        raise CompilationError("no C++ compiler was found (install g++ or clang++, or set CXX)")
    files = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    handle, name = tempfile.mkstemp(".part", f"{key}-", folder)  # threads, and containers, may share a process id
    os.close(handle)
    draft = Path(name)
    started = time.perf_counter()
    message = ""
    try:
        for tuning in _tuning():
            command = [compiler, *_FLAGS, *tuning.split(), *files, "-o", str(draft)]
            try:
                result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CompilationError(f"{compiler} did not run: {error}") from error
            if result.returncode == 0:
                draft.chmod(0o700)
                target = folder / f"{key}-{_digest(draft)}.so"
                os.replace(draft, target)
                seconds = time.perf_counter() - started
                _logger.info("compiled the fused CPU functions in %.1f s: %s", seconds, target)
                return target
            message = result.stderr.strip()[-500:]
    finally:
        draft.unlink(missing_ok=True)
    raise CompilationError(f"{compiler} failed: {message}")


def _tuning() -> tuple[str, ...]:
    """Return the compiler's options for the instructions that the user asks for."""
    variant = os.environ.get(VARIANT_VARIABLE, "native")
    if variant not in _TUNING:
        raise CompilationError(f"{VARIANT_VARIABLE}={variant} is not known; choose one of {', '.join(_TUNING)}")
    return _TUNING[variant]


# ---- tensors as the functions take them -----------------------------------------------------------------------------


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with contiguous elements in memory. Raises `RuntimeError` where its storage was freed."""
    is_contiguous = x.is_contiguous()
    # Bytes from the first element to the last.
    n_bytes = x.nbytes
    if n_bytes and not is_contiguous:
        last_element = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        n_bytes = (1 + last_element) * x.itemsize
    if n_bytes and n_bytes + x.storage_offset() * x.itemsize > x.untyped_storage().nbytes():
        raise RuntimeError(
            f"the memory of a tensor {list(x.shape)} was freed (FSDP frees parameters between passes); "
            "gather its values before it is quantized or multiplied"
        )
    if x.is_neg() or x._is_zerotensor():
        return x.detach().clone(memory_format=torch.contiguous_format)
    if is_contiguous:
        return x
    return x.detach().contiguous()


def checked_parts(
    parts: Sequence[torch.Tensor | None], leading: Sequence[int], sizes: Sequence[int | None]
) -> list[torch.Tensor | None]:
    """Return the parts of a packed tensor as [`in_memory`] does, whose axes are those ``leading`` and one of a size of
    `part_sizes`. Raises `ValueError` for parts of other shapes and `RuntimeError` for one that is not on the CPU."""
    checked: list[torch.Tensor | None] = []
    rows = math.prod(leading)
    for name, part, size in zip(PARTS, parts, sizes, strict=True):
        if part is None and size is None:
            checked.append(None)
            continue
        if part is not None and not part.is_cpu:
            raise RuntimeError(f"the packed weight is on {part.device}, its input on cpu; move one of them")
        if part is None or size is None or part.dtype is not torch.uint8 or part.shape != (*leading, size):
            actual = "missing" if part is None else f"{part.dtype} {list(part.shape)}"
            expected = "none" if size is None else f"torch.uint8 {[*leading, size]}"
            raise ValueError(f"{name} of a packed tensor is {actual}; its scheme and length need {expected}")
        # A part that fills its storage needs no closer look.
        if not part.is_contiguous() or part.untyped_storage().nbytes() != rows * size:
            part = in_memory(part)
        checked.append(part)
    return checked


def address(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor begins in memory, `None` for none."""
    if tensor is None:
        return None
    return tensor.data_ptr()


def check_product(x: torch.Tensor, bias: torch.Tensor | None, in_features: int, leading: tuple[int, ...]) -> None:
    """Raise `ValueError` or `RuntimeError` for an input ``x`` and the bias; ``leading`` is the shape of the bias."""
    if x.shape[-1] != in_features:
        raise ValueError(f"an input of {x.shape[-1]} columns meets a weight of {in_features}")
    if bias is None:
        return
    if bias.dtype is not x.dtype or bias.shape != leading:
        raise ValueError(f"the bias is {bias.dtype} {list(bias.shape)}; expected {x.dtype} {list(leading)}")
    if not bias.is_cpu:
        raise RuntimeError(f"the bias is on {bias.device}, the input on cpu; move one of them")


def checked_ends(ends: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Return where the rows of experts end, in memory; rows after them belong to experts of other processes. Raises
    `ValueError` where they are no rows."""
    places = [0, *ends.flatten().tolist()]
    if ends.dtype is not torch.int32 or ends.dim() != 1 or places != sorted(places) or places[-1] > n_rows:
        raise ValueError(
            f"the rows of experts end at {ends.dtype} {list(ends.shape)} {places[1:]}; expected an int32 vector that "
            f"rises to at most the number of rows, {n_rows}"
        )
    return in_memory(ends.cpu())


# ---- calls ----------------------------------------------------------------------------------------------------------


def over_rows(name: str, rows: torch.Tensor, described: tuple[Any, int], *rest: int | None) -> None:
    """Call a function on all rows of a contiguous tensor.

    Args:
        name: ``"mxfp4_quantize"``, or ``"mxfp4_dequantize"``, which writes the rows.
        rows: values ``[..., length]``.
        described: a pointer to a [`SchemeStruct`] for rows of this length, and roughly how many elements of plain
            quantization take as long as one under this scheme.
        rest: addresses of values, where they are written, and of `PARTS`; `None` for those that are not there.
    """
    length = rows.shape[-1]
    size = rows.numel()
    scheme, cost = described
    function = getattr(load()[0], name)
    function(rows.data_ptr(), TYPES[rows.dtype], length, scheme, size // length, threads_for(size * cost), *rest)


def threads_for(cost: int) -> int:
    """Return all threads that torch computes with, or one for little work.

    It is never a number between: OpenMP ends threads that it is not asked for, and would start them again.
    """
    if cost <= _WORTH_A_THREAD:
        return 1
    return torch.get_num_threads()


def rotate(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return a tensor in float32, bfloat16 or float16 with every ``size`` (16, 32, 64 or 128) neighbours of its last
    axis, which that divides, multiplied by Sylvester's matrix over its root, in float32. It is its own inverse."""
    if size not in (16, 32, 64, 128) or x.shape[-1] % size:
        raise ValueError(f"rows of {x.shape[-1]} elements cannot be rotated in blocks of {size}")
    rows = in_memory(x)
    out = torch.empty_like(rows, dtype=torch.float32)
    count = rows.numel() // size
    threads = threads_for(rows.numel())
    load()[0].mxfp4_rotate(rows.data_ptr(), TYPES[x.dtype], out.data_ptr(), size, size**-0.5, count, threads)
    return out
