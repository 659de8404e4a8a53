# SPDX-License-Identifier: Apache-2.0
"""Small helpers of many packages: lazy imports, dataclasses of options, changes to a model that are undone, and the
versions and the machine that a result belongs to. Importing this module imports no other package."""

import ast
import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import math
import os
import pkgutil
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ._logging import get_logger


_Class = TypeVar("_Class", bound=type)

#: The base of classes that only work before a class of a library, whose methods they call.
Mixin: Any = object
#: 97.5 % quantile of the normal distribution.
Z_975 = 1.9599639845400536
#: From this ratio of times on, products in bfloat16 are called slow.
SLOW_BFLOAT16 = 2.5
#: Packages whose versions belong to a result.
PACKAGES = ("hf-mxfp4", "torch", "transformers", "trl", "peft", "accelerate", "triton", "safetensors")


def lazy_names(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return a package's `__getattr__` and `__all__` for the names and submodules that its stub, `__init__.pyi`,
    imports: each is imported when it is first used."""
    stub = ast.parse(pkgutil.get_data(package, "__init__.pyi"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    origins = {alias.name: node for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        origin = origins[name]
        dots = "." * origin.level
        if origin.module is None:  # `from . import name`, a submodule
            return importlib.import_module(dots + name, package)
        module = importlib.import_module(dots + origin.module, package)
        return getattr(module, name)

    return get, sorted(name for name, origin in origins.items() if origin.module is not None)


def option(default: Any, help: str, compare: bool = True, **metadata: Any) -> Any:
    """Return a field of a dataclass with a default, and with what it is for, which parsers show as help. A list is the
    default of every object by itself. Without ``compare`` objects that differ in it are equal."""
    described = {"help": help, **metadata}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), compare=compare, metadata=described)
    return dataclasses.field(default=default, compare=compare, metadata=described)


def progress_bar(items: Iterable | None = None, *, what: str, **options: Any) -> Any:
    """Return a bar of tqdm on standard error, which `transformers.utils.logging.disable_progress_bar` hides; a line
    every ten seconds where that is no terminal."""
    from transformers.utils.logging import tqdm

    seconds = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(items, desc=what, leave=False, mininterval=seconds, **options)


def described_options(cls: _Class) -> _Class:
    """Make a dataclass of options refuse unknown ones with the nearest names, and list its own in its docstring, by the
    ``help`` that their fields carry."""
    known = [option.name for option in dataclasses.fields(cls) if option.init]
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self, *args: Any, **options: Any) -> None:
        for name in options:
            if name not in known:
                raise TypeError(unknown_key_message(cls.__name__, name, known))
        init(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[misc]
    inherited = {name for base in cls.__bases__ for name in getattr(base, "__dataclass_fields__", {})}
    own = [option for option in dataclasses.fields(cls) if option.init and option.name not in inherited]
    cls.__doc__ = f"{cls.__doc__.rstrip()}\n\n    Args:\n" + "\n".join(map(_described, own)) + "\n    "
    return cls


def _described(option: dataclasses.Field) -> str:
    """Return an option as one entry of a docstring's list of arguments."""
    kind = str(option.type)
    if type(option.type) is type:
        kind = option.type.__name__
    text = f"{option.name} ({kind}, default {option.default!r}): {option.metadata['help']}"
    return textwrap.fill(text, 116, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)


def unknown_key_message(owner: str, key: str, known: list[str]) -> str:
    """Return ``"<owner> has no option 'key'"``, with the closest known names when there are any."""
    close = difflib.get_close_matches(key, known, n=2)
    if close:
        return f"{owner} has no option {key!r}; did you mean {' or '.join(map(repr, close))}?"
    if len(known) < 30:
        return f"{owner} has no option {key!r}; options are {', '.join(known)}"
    return f"{owner} has no option {key!r}"


def nearest_names(name: str, known: Sequence[str]) -> list[str]:
    """Return at most three of the dotted names ``known``, or ends of them, that a misspelled one may have meant."""
    n_parts = name.count(".") + 1
    ends: dict[str, None] = {}  # in the order of ``known``, each once
    for full_name in known:
        parts = full_name.split(".")
        for count in (n_parts, n_parts + 1):
            ends[".".join(parts[-count:])] = None
    return difflib.get_close_matches(name, list(ends), n=3, cutoff=0.5) or list(known[:3])


@contextlib.contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Turn dropout and checkpointing off; restore the training mode of every module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def replaced_method(module: Any, method: str, replacement: Any) -> Iterator[None]:
    """Replace a method of one object, module or class; restore it on exit."""
    replaced = vars(module).get(method)  # none if the class has it, or a base class
    setattr(module, method, replacement)
    try:
        yield
    finally:
        delattr(module, method)
        if replaced is not None:
            setattr(module, method, replaced)


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of the share ``correct / n`` after Wilson (JASA 22, 1927)."""
    p = correct / n
    z = Z_975
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = center - half
    high = center + half
    # These ends are exact, and sums have rounding errors.
    if correct == 0:
        low = 0.0
    if correct == n:
        high = 1.0
    return low, high


def share_text(accuracy: float, n: int) -> str:
    """Return an accuracy on ``n`` problems with its interval, as ``0.250 [0.071, 0.591]``."""
    correct = round(accuracy * n)
    low, high = wilson_interval(correct, n)
    return f"{correct / n:.3f} [{low:.3f}, {high:.3f}]"


def package_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that matter here, `None` for those not installed."""
    from . import __version__

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        versions[name] = installed_version(name)
    versions["hf-mxfp4"] = __version__  # also where it runs from a clone
    return versions


def installed_version(name: str) -> str | None:
    """Return the version of a package; `None` for one that is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Return the operating system, the CPU (name and cores) and the GPUs, JSON-clean."""
    return {
        "system": platform.platform(),
        "cpu": {"name": cpu_name(), "cores": os.cpu_count()},
        "gpus": present_gpus(),
    }


def cpu_name() -> str:
    """Return the processor's name."""
    # Linux only; elsewhere, and on some processors, Python's own answer has to do.
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def bfloat16_slowdown() -> float:
    """Return how many times longer a small product takes on this CPU in bfloat16 than in float32; about 1 where the CPU
    has instructions for it."""
    import torch

    seconds = {torch.bfloat16: math.inf, torch.float32: math.inf}
    matrices = {dtype: torch.ones(256, 256, dtype=dtype, device="cpu") for dtype in seconds}
    for _ in range(4):  # the first calls prepare the kernels
        for dtype, matrix in matrices.items():
            begin = time.perf_counter()
            torch.nn.functional.linear(matrix, matrix)
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - begin)
    return seconds[torch.bfloat16] / seconds[torch.float32]


@functools.cache
def warn_of_slow_bfloat16() -> None:
    """Say once when products in bfloat16, which are about to run on the CPU, are slow there."""
    if bfloat16_slowdown() > SLOW_BFLOAT16:
        get_logger().warning(
            "this CPU multiplies in bfloat16 %.0f times slower than in float32: load the model with "
            "dtype=torch.float32, and train with bf16=False",
            bfloat16_slowdown(),
        )


def present_gpus() -> list[dict[str, Any]]:
    """Return type, name and capability of each GPU that torch sees."""
    import torch

    gpus = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        if not module.is_available():
            continue
        for i in range(module.device_count()):
            if kind == "xpu":
                capability = "xpu"
            elif torch.version.hip:
                capability = torch.cuda.get_device_properties(i).gcnArchName
            else:
                major, minor = module.get_device_capability(i)
                capability = f"compute capability {major}.{minor}"
            gpus.append({"type": kind, "name": module.get_device_name(i), "capability": capability})
    return gpus
