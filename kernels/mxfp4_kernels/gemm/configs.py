# SPDX-License-Identifier: Apache-2.0
"""Which configs a product may be launched with, which one it is, and the launch.

A config is a dictionary of sizes of tiles (those of `ProductTile`), ``num_warps`` and ``num_stages``. Each product has
a list of them, the likeliest first; one rule says which of these the GPU has the shared memory for.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from ..common.arguments import ProductTile
from ..common.autotune import choose, milliseconds, settle
from ..common.plan import launch


Config = dict[str, int]
#: Shared memory that a program takes besides its pipeline: to find its expert, and to change layouts.
BESIDES = 4096


@functools.lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return 160 * 1024 if "gfx95" in properties.gcnArchName else 64 * 1024
    return properties.shared_memory_per_block_optin


@functools.lru_cache(maxsize=64)
def arch_of(device: torch.device) -> str:
    """``"90"`` and the like for NVIDIA's compute capability 9.0, ``"gfx942"`` and the like for AMD."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"{properties.major}{properties.minor}"


def named(names: Sequence[str], tiles: Iterable[Sequence[int]]) -> list[Config]:
    """Configs of tuples: sizes with these names, warps, stages."""
    return [dict(zip((*names, "num_warps", "num_stages"), tile, strict=True)) for tile in tiles]


def fitting(
    configs: Sequence[Config],
    stage_bytes: Callable[[Config], int],
    limit: int,
    besides: int = BESIDES,
    in_registers: int = 0,
) -> list[Config]:
    """Those of ``configs`` whose pipelines, of ``num_stages`` times ``stage_bytes``, fit into ``limit`` bytes with what
    there is ``besides``; without any the last, with the shortest pipeline. ``in_registers``: stages that take no
    shared memory."""
    fits = [
        config for config in configs if stage_bytes(config) * (config["num_stages"] - in_registers) + besides <= limit
    ]
    return fits or [{**configs[-1], "num_stages": 2}]


def fitting_packed(
    configs: Sequence[Config], limit: int, step: int, element_size: int, has_fallback: bool
) -> list[Config]:
    """[`fitting`] configs of a product with a packed weight, which reads rows of the other operand, codes and scale
    bytes, ``step`` columns at a time. One stage is in registers, where codes are decoded."""

    def stage_bytes(config: Config) -> int:
        weight_bytes = config["BN"] * 17 // 32 * (2 if has_fallback else 1)
        return step * (config["BM"] * element_size + weight_bytes)

    return fitting(configs, stage_bytes, limit, in_registers=1)


def launch_tuned(
    name: str,
    key: Sequence[object],
    configs: Sequence[Config],
    run: Callable[[Config, torch.Tensor], None],
    out: torch.Tensor,
) -> None:
    """Launch with the config that [`mxfp4_kernels.common.autotune.choose`] says. Where the GPU turns out to have too
    little for it, the first of the others that runs takes its place.

    Args:
        name, key, configs: as there.
        run: launches a config, into a tensor like ``out``.

    Raises Triton's `OutOfResources` when none runs.
    """

    def bench(config: Config) -> float:
        scratch = torch.empty_like(out)
        return milliseconds(lambda: run(config, scratch))

    chosen = choose(name, key, configs, bench, out.device)
    try:
        return run(chosen, out)
    except OutOfResources as error:
        failure = error
    for config in configs:
        if config == chosen:
            continue
        try:
            run(config, out)
        except OutOfResources as error:
            failure = error
            continue
        text = f"{name} {tuple(key)}: {dict(chosen)} does not run here, {config} does ({failure})"
        warnings.warn(text, stacklevel=3)
        return settle(name, key, config, out.device)
    raise failure


def launch_config(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    arguments: tuple,
    constants: Mapping[str, Any],
    config: Config,
) -> None:
    """Start a kernel with a config, on a device."""
    get = config.get
    tile = ProductTile(get("BM", 0), get("BN", 0), get("BK", 0), get("GROUP_M", 0))
    options = {"num_warps": config["num_warps"], "num_stages": config["num_stages"]}
    launch(kernel, grid, device, *arguments, TILE=tile, **constants, **options)
