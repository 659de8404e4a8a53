# SPDX-License-Identifier: Apache-2.0
"""Launch parameters by measurement: chosen once per GPU, kernel and class of shapes, and kept on disk.

A kernel's host code lists the configs that may run (dictionaries of compile-time arguments, ``num_warps``,
``num_stages``), the one that its heuristic would take first, and asks [`choose`] before a launch:

    bench = lambda config: milliseconds(lambda: launch(config))
    config = choose("matmul_e4m3", (m_class, n, k), configs, bench, device)

Nothing is measured unless asked for: by ``HF_MXFP4_AUTOTUNE=1`` in the environment, or within [`autotune`]. What was
measured is used ever after, from ``$HF_MXFP4_CACHE/autotune/<gpu>.json`` (``~/.cache/hf_mxfp4`` by default), for as
long as Triton and the sources of this package are the same. What first runs under capture in a CUDA graph, where
nothing can be measured, is measured when it next runs outside of one. Several processes of one job do not measure
either: each would choose for itself, and sum in another order than the others. They read what one process measured
before. Otherwise the table that is shipped for the GPU
decides (``configs/<gpu>.json`` of this package, of the same form), and then the first config. An entry that is not
among the configs offered is passed over, so that no file can make a launch fail.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton


Config = Mapping[str, Any]

_SHIPPED = Path(__file__).parents[1] / "configs"
_lock = threading.RLock()
#: (GPU, kernel, key) -> config, of this process, and whether that was measured (or could not be).
_chosen: dict[tuple[str, str, str], tuple[Config, bool]] = {}
_asked = 0


@contextlib.contextmanager
def autotune() -> Iterator[None]:
    """Measure, within this context, every kernel and class of shapes that was not measured on this GPU before."""
    global _asked
    _asked += 1
    try:
        yield
    finally:
        _asked -= 1


def choose(
    kernel_name: str,
    key: Sequence[object],
    configs: Sequence[Config],
    bench: Callable[[Config], float],
    device: torch.device,
) -> Config:
    """The config to launch a kernel with.

    Args:
        kernel_name: what the configs belong to.
        key: numbers and words that tell apart what needs configs of its own; a class of sizes, rather than a size that
            changes with every batch.
        configs: those that may run, dictionaries that JSON can hold, the usual one first.
        bench: maps a config to its time. It may raise: that config is out, with one warning if all are. It must leave
            the caller's results alone, or make them anew. [`milliseconds`] helps.
        device: that the kernel runs on. On a CPU, in the interpreter, nothing is looked up or measured.

    Returns:
        One of ``configs``.

    Raises:
        ValueError: no configs.
    """
    if not configs:
        raise ValueError(f"{kernel_name}: no configs to choose from")
    if device.type == "cpu" or len(configs) == 1:
        return configs[0]
    gpu, text = gpu_name(device), " ".join(map(str, key))
    place = (gpu, kernel_name, text)
    config, settled = _chosen.get(place, (None, False))
    # What was chosen without a measurement stays, but for one that is asked for.
    if config is not None and (settled or not _is_tuning(device)):
        return config
    with _lock:
        tuning = _is_tuning(device)
        found = _offered(_measured(gpu).get(kernel_name, {}).get(text), configs)
        settled = tuning or found is not None
        if found is None and tuning:
            with _on(device):
                found = _fastest(kernel_name, text, configs, bench)
            if found is not None:
                _remember(gpu, kernel_name, text, found)
        if found is None and _is_asked() and (processes := _processes()) > 1:
            _say_that_one_process_measures(processes)
        if found is None:
            found = _offered(read_table(_SHIPPED / f"{gpu}.json").get(kernel_name, {}).get(text), configs) or configs[0]
        _chosen[place] = found, settled
    return found


def settle(kernel_name: str, key: Sequence[object], config: Config, device: torch.device) -> None:
    """Let [`choose`] return this config in this process."""
    _chosen[gpu_name(device), kernel_name, " ".join(map(str, key))] = config, True


def milliseconds(launch: Callable[[], object]) -> float:
    """Median time of a launch on the current GPU, with the second-level cache cleared before each."""
    return triton.testing.do_bench(launch, warmup=5, rep=30, return_mode="median")


@functools.lru_cache(maxsize=64)
def gpu_name(device: torch.device) -> str:
    """The name of a device as files are named by it: ``nvidia_h200``."""
    module = getattr(torch, device.type)
    return re.sub(r"[^a-z0-9]+", "_", module.get_device_name(device).lower()).strip("_") or device.type


@functools.lru_cache(maxsize=1)
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="hf_mxfp4-")
    warnings.warn(f"there is no home folder, so {folder} is used; set HF_MXFP4_CACHE to a folder", stacklevel=3)
    return Path(folder)


def cache_folder() -> Path:
    """Return where what was found out about this machine is kept: a temporary folder where there is no home."""
    if chosen := os.environ.get("HF_MXFP4_CACHE"):
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "hf_mxfp4"
    except RuntimeError:
        return _temporary_folder()


def cache_file(gpu: str) -> Path:
    """Where measured configs of a GPU are kept."""
    return cache_folder() / "autotune" / f"{gpu}.json"


@functools.lru_cache(maxsize=1)
def version() -> str:
    """Of what configs were measured with: Triton, and the sources of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return f"triton {triton.__version__}, kernels {digest.hexdigest()[:16]}"


def _is_asked() -> bool:
    return bool(_asked) or os.environ.get("HF_MXFP4_AUTOTUNE") == "1"


def _is_tuning(device: torch.device) -> bool:
    if not _is_asked() or _processes() > 1:
        return False
    # A measurement waits for the GPU, which a graph under capture cannot.
    with _on(device):
        return not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _processes() -> int:
    """Of the job that this one belongs to."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() else 1


@functools.cache
def _say_that_one_process_measures(processes: int) -> None:
    warnings.warn(
        f"nothing is autotuned in {processes} processes, which would each choose for itself: run one process alone "
        f"first, with the same shapes; what it measures is kept in {cache_folder() / 'autotune'}",
        stacklevel=5,
    )


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes a GPU the current one, which streams, clocks and the buffers that clear caches belong to."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _fastest(kernel_name: str, text: str, configs: Sequence[Config], bench: Callable[[Config], float]) -> Config | None:
    best, best_time, failure = None, math.inf, None
    for config in configs:
        try:
            time = bench(config)
        except Exception as error:  # a config may need more than this GPU has, and each compiler says so differently
            failure = error
            continue
        if time < best_time:
            best, best_time = config, time
    if best is None:
        warnings.warn(f"autotuning {kernel_name} ({text}): no config ran; the last error: {failure}", stacklevel=4)
    return best


def _offered(entry: object, configs: Sequence[Config]) -> Config | None:
    return next((config for config in configs if dict(config) == entry), None)


def _measured(gpu: str) -> Mapping[str, Any]:
    table = read_table(cache_file(gpu))
    return table if table.get("version") == version() else {}


def read_table(path: Path) -> dict[str, Any]:
    """A file as a mapping of mappings (but for the version); empty, with a warning, when it cannot be read as that."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(table, dict):
            raise ValueError("not a mapping")
        for name, entries in table.items():
            if name != "version" and not isinstance(entries, dict):
                raise ValueError(f"{name!r} is not a mapping")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"ignoring {path}, which cannot be read: {error}", stacklevel=4)
        return {}
    return table


def _remember(gpu: str, kernel_name: str, text: str, config: Config) -> None:
    """Add an entry to the file. Other processes' entries stay; of two that write at once, one may lose its own."""
    path = cache_file(gpu)
    table = {"version": version(), **_measured(gpu)}
    table[kernel_name] = {**table.get(kernel_name, {}), text: dict(config)}
    write_table(path, table)


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Put a file in the place of another, whole, whoever writes at the same time. Warns where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(table, file, indent=1, sort_keys=True)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"cannot keep what was measured in {path}: {error}", stacklevel=4)
