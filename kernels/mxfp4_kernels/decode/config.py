# SPDX-License-Identifier: Apache-2.0
"""Tiles of products with packed weights, and how many programs share one, by shape and GPU."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton


#: Whether this Triton hands tensor cores eight neighbours from a thread where they read the decoded weight from
#: registers. From 3.8 on it is fewer, and two warps take more instructions for a weight than four.
IN_REGISTERS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
#: Columns of a step.
STEP = 128
#: Architectures whose tensor cores work for four warps at once (AMD's warps have twice the threads).
_FOUR_WARPS = ("90", "100", "103", "gfx942", "gfx950")
#: Values that a thread holds without spilling registers, of which it has 255.
_MOST_VALUES = 160
#: Warps that a multiprocessor needs to issue in most cycles: fewer wait for their own results half of the time.
_BUSY_WARPS = 8
#: Steps of a split that pay for its start.
_LEAST_STEPS = 2
_MOST_SPLITS = 16
#: Shared memory that a program takes besides its pipeline.
_BESIDES = 4096


class Gpu(NamedTuple):
    """Facts about a GPU.

    Attributes:
        arch: ``"90"`` and the like for NVIDIA's compute capability 9.0, ``"gfx942"`` and the like for AMD.
        multiprocessors: how many it has.
        shared_memory: bytes that one program may have.
    """

    arch: str
    multiprocessors: int
    shared_memory: int


@functools.lru_cache(maxsize=64)
def gpu_of(device: torch.device) -> Gpu:
    """Return the facts about a device; for the interpreter, those of an H100."""
    if device.type != "cuda":
        return Gpu("90", 132, 232448)
    properties = torch.cuda.get_device_properties(device)
    count = properties.multi_processor_count
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        # Shared memory (LDS) of AMD's GPUs: 160 KiB from gfx950 on.
        shared_memory = 64 * 1024
        if "gfx95" in arch:
            shared_memory = 160 * 1024
        return Gpu(arch, count, shared_memory)
    return Gpu(f"{properties.major}{properties.minor}", count, properties.shared_memory_per_block_optin)


class Config(NamedTuple):
    """``BM`` rows of the other operand and ``BN`` rows of the weight in a tile, and options of the compiler."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


@functools.lru_cache(maxsize=1024)
def tile_config(rows: int, has_fallback: bool, gpu: Gpu) -> Config:
    """Return the tile for products with so many rows (of each expert, in the mean)."""
    is_amd = gpu.arch.startswith("gfx")
    # What tensor cores need of their right operand.
    smallest = 16 if is_amd else 8
    height = min(64, max(smallest, triton.next_power_of_2(rows)))
    # The largest tile that fits into registers.
    while True:
        width = 64
        warps = 4
        if height == 16 and gpu.arch == "90" and IN_REGISTERS:
            # Four warps multiply as a group there and read the decoded weight from shared memory; two read registers.
            warps = 2
        elif height == 8 and not has_fallback:
            width = 128
        if height == smallest or _fits(height, width, warps, has_fallback, gpu.arch):
            break
        height //= 2
    # Bytes of a step: bfloat16 rows, and codes with their scale bytes, twice if there is a residual.
    weight_bytes = width * 17 // 32
    if has_fallback:
        weight_bytes *= 2
    stage = STEP * (2 * height + weight_bytes)
    # One stage is in registers, where codes are decoded, and another is loaded only when that is done. The others hide
    # the latency of memory, so there are two where a multiprocessor has room for those of all its programs.
    programs = _warps_per_multiprocessor(warps) // warps
    stages = 2
    if not is_amd and 2 * stage + _BESIDES <= gpu.shared_memory:
        stages = 3
    if not is_amd and not has_fallback and programs * (3 * stage + _BESIDES) <= gpu.shared_memory:
        stages = 4
    return Config(height, width, warps, stages)


def _fits(height: int, width: int, warps: int, has_fallback: bool, arch: str) -> bool:
    """Return whether threads hold a tile in registers: sums of a step and of all, decoded weights in pairs, and copies
    of the other operand. Of what passes, compilers spill a few bytes at most on sm_90, sm_100 and sm_120."""
    # Instructions of a warp take both operands from registers, those of four read one from shared memory.
    takes_registers = warps < 4 or arch not in _FOUR_WARPS
    copies = 1
    if takes_registers and has_fallback:
        copies = 4
    elif warps < 4:
        copies = 2
    values = 2 * height * width + width * STEP // 2 + height * STEP * copies
    return values <= _MOST_VALUES * 32 * warps


def _warps_per_multiprocessor(warps: int) -> int:
    """Return how many warps a multiprocessor holds at once, with the registers that programs of so many warps take."""
    return 10 if warps == 2 else 12


def split_steps(steps: int, tiles: int, warps: int, multiprocessors: int) -> int:
    """Return how many of its ``steps`` along K each program of a tile takes.

    The multiprocessor with the most programs is the last one, and the start and the end of a program take as long as a
    step. Of equal times the one with the fewest splits.
    """

    def time(splits: int) -> int:
        on_busiest = -(-tiles * splits // multiprocessors)
        steps_of_program = -(-steps // splits) + 1
        if on_busiest * warps < _BUSY_WARPS:
            return 2 * on_busiest * steps_of_program
        return on_busiest * steps_of_program

    programs = _warps_per_multiprocessor(warps) * multiprocessors // warps
    most = max(1, min(programs // tiles, steps // _LEAST_STEPS, _MOST_SPLITS))
    return -(-steps // min(range(1, most + 1), key=time))
