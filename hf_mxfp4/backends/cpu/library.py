# SPDX-License-Identifier: Apache-2.0
"""The shared library of the fused CPU functions: compiled on first use and kept in the user's cache."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..._logging import get_logger


SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
#: Folder of the compiled libraries, instead of the user's cache folder.
CACHE_VARIABLE = "HF_MXFP4_CACHE"
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")
# The results must be those of the arithmetic as written; the last two drop only error flags that nobody reads.
_EXACT = ("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math")
#: Instructions that the library is compiled for: those of this processor, or fewer, to compare them.
VARIANT_VARIABLE = "HF_MXFP4_CPU"
_NATIVE = (("-march=native",), ("-mcpu=native",), ())
#: Options by variant; the first that the compiler accepts.
_TUNING = {
    "native": _NATIVE,
    "avx512": _NATIVE,  # from when there was code for AMX
    "avx2": (("-march=x86-64-v3",),),
    "portable": ((),),
    "sanitized": (("-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"),),
}
_COMPILE_SECONDS = 600
#: The process that may have torch's OpenMP threads: one that is forked from it has none.
_PROCESS = os.getpid()


class SchemeStruct(ctypes.Structure):
    """The C struct `Scheme` of blocks.h, field by field."""

    _fields_ = [
        ("carry", ctypes.c_uint32),
        ("clips", ctypes.c_int32),
        ("least_squares", ctypes.c_int32),
        ("search", ctypes.c_int32),
        ("macro_blocks", ctypes.c_int64),
        ("fallback", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("fallback_blocks", ctypes.c_int64),
    ]


_POINTER = ctypes.c_void_p


class ProductStruct(ctypes.Structure):
    """The C struct `Arguments` of product.cpp, field by field."""

    _fields_ = [
        ("x", _POINTER),
        ("type", ctypes.c_int64),
        ("n_rows", ctypes.c_int64),
        ("inputs", _POINTER),
        ("codes", _POINTER),
        ("scale", _POINTER),
        ("macro", _POINTER),
        ("residual_codes", _POINTER),
        ("residual_scale", _POINTER),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("weights", _POINTER),
        ("bias", _POINTER),
        ("ends", _POINTER),
        ("n_experts", ctypes.c_int64),
        ("y", _POINTER),
        ("threads", ctypes.c_int64),
    ]


# Matrix, its type and length, the scheme, rows and threads.
_COMMON = (_POINTER, ctypes.c_int, ctypes.c_int64, ctypes.POINTER(SchemeStruct), ctypes.c_int64, ctypes.c_int64)
_SIGNATURES = {
    "mxfp4_quantize": (*_COMMON, *[_POINTER] * 6),
    "mxfp4_dequantize": (*_COMMON, *[_POINTER] * 5),
    "mxfp4_rotate": (
        *(_POINTER, ctypes.c_int, _POINTER, ctypes.c_int),
        *(ctypes.c_int64, ctypes.c_float, ctypes.c_int64, ctypes.c_int64),
    ),
    "mxfp4_statistics": (*_COMMON, ctypes.c_int64, _POINTER, _POINTER),
    "mxfp4_product": (ctypes.POINTER(ProductStruct),),
    "mxfp4_product_rows": (),
}


class CompilationError(RuntimeError):
    """The library could not be compiled; the message says why."""


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the library, or `None` and the reason, which is logged. Tried once per process."""
    try:
        library = _open()
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int64 if "_rows" in name else None
        ctypes.c_int.in_dll(library, "mxfp4_process").value = _PROCESS
    except (CompilationError, OSError, AttributeError, ValueError) as error:
        get_logger().warning("CPU quantization runs eagerly, without the fused functions: %s", error)
        return None, str(error)
    return library, None


def _open() -> ctypes.CDLL:
    key = _key()
    folder, problem = _cache_folder()
    for path in sorted(folder.glob(f"{key}-*.so")) if folder is not None else ():
        with contextlib.suppress(OSError):  # not readable, or of a machine with another C library
            if _is_private(path) and path.stem == f"{key}-{_digest(path)}":
                return ctypes.CDLL(str(path))
    if folder is not None and os.access(folder, os.W_OK):
        return ctypes.CDLL(str(_compiled(folder, key)))
    with tempfile.TemporaryDirectory(prefix="hf_mxfp4-") as temporary:
        library = ctypes.CDLL(str(_compiled(Path(temporary), key)))
    problem = problem or f"{folder} cannot be written"
    get_logger().warning(
        "the compiled CPU functions are not kept: %s; set %s to a folder that only you can write to",
        *(problem, CACHE_VARIABLE),
    )
    return library


def _key() -> str:
    """What results depend on: a cache folder may be shared by machines with other processors."""
    sources = b"".join(source.read_bytes() for source in SOURCES)
    identity = "\n".join(map(str, (sources, _processor(), _FLAGS, _EXACT, _tuning())))
    return f"cpu-{hashlib.sha256(identity.encode()).hexdigest()[:20]}"


def _digest(path: Path) -> str:
    """Of a library's bytes, in its name: a damaged one would end the process that loads it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _compiled(folder: Path, key: str) -> Path:
    compiler, started = _compiler(), time.perf_counter()
    descriptor, name = tempfile.mkstemp(suffix=".part", dir=folder)
    os.close(descriptor)
    try:
        _compile(compiler, name)
        target = folder / f"{key}-{_digest(Path(name))}.so"
        os.chmod(name, 0o700)
        os.replace(name, target)  # other processes see all of it or nothing
    finally:
        Path(name).unlink(missing_ok=True)
    get_logger().info("compiled the fused CPU functions in %.1f s: %s", time.perf_counter() - started, target)
    return target


def _compile(compiler: str, target: str) -> None:
    message = ""
    files = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    for tuning in _tuning():
        command = [compiler, *_FLAGS, *tuning, *_EXACT, *files, "-o", target]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilationError(f"{compiler} did not run: {error}") from error
        if result.returncode == 0:
            return
        message = result.stderr.strip()[-500:]
    raise CompilationError(f"{compiler} failed: {message}")


def _tuning() -> tuple[tuple[str, ...], ...]:
    variant = os.environ.get(VARIANT_VARIABLE, "native")
    if variant not in _TUNING:
        raise CompilationError(f"{VARIANT_VARIABLE}={variant} is not known; choose one of {', '.join(_TUNING)}")
    return _TUNING[variant]


def _compiler() -> str:
    candidates = (os.environ.get("CXX"), "c++", "g++", "clang++")
    for name in filter(None, candidates):
        path = shutil.which(name)
        if path is not None:
            return path
    raise CompilationError("no C++ compiler was found (install g++ or clang++, or set CXX)")


def _processor() -> str:
    """What `-march=native` depends on."""
    description = [platform.machine(), platform.processor(), sys.platform]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "features", "model name", "cpu family", "model", "stepping")
    description += sorted({line for line in lines if line.split(":")[0].strip().lower() in wanted})
    return "\n".join(description)


def _cache_folder() -> tuple[Path | None, str | None]:
    """Return the folder of compiled libraries, or `None` and why it cannot be used: what lies there is run as code."""
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        folder = Path(chosen or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = folder if chosen else folder / "hf_mxfp4"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not chosen and not _is_private(folder):
            folder.chmod(0o700)
        if not _is_private(folder):
            return None, f"other users can write to {folder}"
    except (OSError, RuntimeError) as error:  # no home, or not a folder
        return None, str(error)
    return folder, None


def _is_private(path: Path) -> bool:
    """Whether nobody but this user and root can write to it."""
    status = path.stat()
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022
