# SPDX-License-Identifier: Apache-2.0
"""The shared library of the fused CPU functions: compiled on first use and kept in the user's cache."""

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


_FILES = (
    "blocks.h",
    "decode.h",
    "lanes.h",
    "product.h",
    "product_amx.h",
    "product_bf16.h",
    "product_float.h",
    "product.cpp",
    "quantize.cpp",
    "rotate.cpp",
    "statistics.cpp",
)
SOURCES = tuple(Path(__file__).with_name(name) for name in _FILES)
#: Folder of the compiled libraries, instead of the user's cache folder.
CACHE_VARIABLE = "HF_MXFP4_CACHE"
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
# The results must be those of the arithmetic as written; the last two drop only error flags that nobody reads.
_EXACT = ("-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math")
#: Instructions that the library is compiled for: those of this processor, or fewer, to compare them.
VARIANT_VARIABLE = "HF_MXFP4_CPU"
#: Options by variant; the first that the compiler accepts.
_TUNING = {
    "native": (("-march=native",), ("-mcpu=native",), ()),
    "avx512": (("-march=native", "-mno-amx-bf16"),),
    "avx2": (("-march=x86-64-v3",),),
    "portable": ((),),
    "sanitized": (("-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"),),
}
_COMPILE_SECONDS = 600


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
        ("parallel", _POINTER),
    ]


# Matrix, its type and length, the scheme, and the range of rows.
_COMMON = (_POINTER, ctypes.c_int, ctypes.c_int64, ctypes.POINTER(SchemeStruct), ctypes.c_int64, ctypes.c_int64)
_SIGNATURES = {
    "mxfp4_quantize": (*_COMMON, *[_POINTER] * 6),
    "mxfp4_dequantize": (*_COMMON, *[_POINTER] * 5),
    "mxfp4_rotate": (
        *(_POINTER, ctypes.c_int, _POINTER, ctypes.c_int),
        *(ctypes.c_int64, ctypes.c_float, ctypes.c_int64, ctypes.c_int64),
    ),
    "mxfp4_statistics": (*_COMMON, _POINTER, _POINTER),
    "mxfp4_product": (ctypes.POINTER(ProductStruct),),
    "mxfp4_product_rows": (ctypes.c_int64,),
}


class CompilationError(RuntimeError):
    """The library could not be compiled or loaded; the message says why."""


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or `None` and the reason. Tried once per process."""
    try:
        library = _open()
    except (CompilationError, OSError) as error:
        get_logger().info("CPU quantization runs eagerly, without the fused functions: %s", error)
        return None, str(error)
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int64 if "_rows" in name else None
    return library, None


def _open() -> ctypes.CDLL:
    path = _compiled()
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # damaged in the cache
        path.unlink(missing_ok=True)
        return ctypes.CDLL(str(_compiled()))


def _compiled() -> Path:
    compiler = _compiler()
    # A cache folder may be shared by machines with other processors and compilers.
    sources = b"".join(source.read_bytes() for source in SOURCES)
    identity = (sources, compiler, _version(compiler), _processor(), repr((_FLAGS, _EXACT, _tuning())))
    key = hashlib.sha256("\n".join(map(str, identity)).encode()).hexdigest()[:20]
    folder = _cache_folder()
    target = folder / f"cpu-{key}.so"
    if target.exists():
        return target
    started = time.perf_counter()
    descriptor, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(descriptor)
    try:
        _compile(compiler, Path(name))
        os.replace(name, target)  # other processes see all of it or nothing
    finally:
        Path(name).unlink(missing_ok=True)
    get_logger().info("compiled the fused CPU functions in %.1f s: %s", time.perf_counter() - started, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    message = ""
    files = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    for tuning in _tuning():
        command = [compiler, *_FLAGS, *tuning, *_EXACT, *files, "-o", str(target)]
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


def _version(compiler: str) -> str:
    try:
        result = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilationError(f"{compiler} did not run: {error}") from error
    return result.stdout


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


def _cache_folder() -> Path:
    """A folder that only the user can write to: what lies there is loaded as code."""
    chosen = os.environ.get(CACHE_VARIABLE)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen) if chosen else root / "hf_mxfp4"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable and chosen is None:
        return Path(_process_folder())
    if not writable:
        raise CompilationError(f"{CACHE_VARIABLE}={folder} cannot be written")
    status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o002):
        raise CompilationError(
            f"the cache folder {folder} can be written by others; set {CACHE_VARIABLE} to a private one"
        )
    return folder


@functools.cache
def _process_folder() -> str:
    """For a home that cannot be written: a folder of this process alone, compiled into anew each time."""
    import atexit

    folder = tempfile.mkdtemp(prefix="hf_mxfp4-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
