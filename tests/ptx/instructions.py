# SPDX-License-Identifier: Apache-2.0
"""Instructions that move data between registers and memory, that make threads wait, and that the threads of a warp, or
of a group of four warps, execute together.

Each function here and in `tensor.py` executes an instruction for the group of a machine. It gets the match of the name,
and the operands. Threads of warps are ``[warps, 32]``; fragments of matrices are where the PTX manual has them.
"""

import numpy as np

from .memory import Fault
from .semantics import DTYPES, halves, of_bits16


_LANE, _SIDE, _NUMBER = np.arange(32), np.arange(2)[:, None], np.arange(4)[:, None, None]
_ROW, _COLUMN = _LANE // 4, _LANE % 4 * 2
#: Indices of left and right operands by register, half of a register and lane: of all warps, rows and columns.
_LEFT = slice(None), _ROW + 8 * (_NUMBER % 2), _COLUMN + _SIDE + 8 * (_NUMBER // 2)
_RIGHT = slice(None), _COLUMN + _SIDE + 8 * _NUMBER[:2], _ROW


# ---- memory ---------------------------------------------------------------------------------------------------------


def _load_parameter(machine, found, to, parameter) -> None:
    value, size = machine.arguments[parameter[1:-1]], DTYPES[found[1]].itemsize
    if isinstance(value, float):
        value = int(np.float32(value).view(np.uint32))
    machine.put(to, np.full(len(machine.threads), value & (256**size - 1), f"u{size}"))


def _vector(operand: str | tuple) -> tuple:
    return operand if isinstance(operand, tuple) else (operand,)


def _load(machine, found, to, source) -> None:
    names, size = _vector(to), int(found[2]) // 8
    data = machine.spaces[found[1]].read(machine.addresses(source), size * len(names), machine.group)
    for name, part in zip(names, data.view(f"u{size}").T, strict=True):
        values = np.zeros(len(machine.threads), f"u{size}")
        values[machine.group] = part
        machine.put(name, values)


def _store(machine, found, to, source) -> None:
    parts = np.stack([machine.get(f"u{found[2]}", name)[machine.group] for name in _vector(source)], axis=1)
    machine.spaces[found[1]].write(machine.addresses(to), parts.view(np.uint8), machine.group)


def _atomic_add(machine, found, to, where, added) -> None:
    before, added = np.zeros(len(machine.threads), np.uint32), machine.get("u32", added)
    for number, address in zip(machine.group, machine.addresses(where), strict=True):
        place, thread = np.array([address]), np.array([number])
        before[number] = machine.memory.read(place, 4, thread).view(np.uint32)[0, 0]
        total = np.array([[before[number] + added[number]]], np.uint32)
        machine.memory.write(place, total.view(np.uint8), thread)
    machine.put(to, before)


def _copy(machine, found, to, source, size, length=None) -> None:
    """Read at once, and arrives in shared memory with a wait; beyond the number of source bytes come zeros."""
    size, group = int(size, 0), machine.group
    lengths = np.full(len(group), size) if length is None else machine.get("u32", length)[group]
    if not np.isin(lengths, (0, size)).all():
        raise Fault("a part of a copy")
    values, real = np.zeros((len(group), size), np.uint8), lengths == size
    if real.any():
        values[real] = machine.memory.read(machine.addresses(source)[real], size, group[real])
    machine.shared.write(machine.addresses(to), values, group, is_set=False)
    machine.copies[-1].append((machine.addresses(to), values, group))


def _end_copies(machine, found) -> None:
    machine.require_all()
    machine.copies.append([])


def _wait_copies(machine, found, left) -> None:
    machine.require_all()
    while len(machine.copies) - 1 > int(left, 0):
        for copy in machine.copies.pop(0):
            machine.shared.write(*copy)


def _barrier(machine, found, number) -> None:
    machine.require_all()
    machine.shared.barrier()
    machine.tensor.barrier()


def _barrier_of_warps(machine, found, threads) -> None:
    machine.require_all()
    machine.shared.warp_barrier()


def _fence(machine, found) -> None:
    machine.require_all()
    machine.shared.is_fenced.fill(True)


# ---- warps ----------------------------------------------------------------------------------------------------------


def _shuffle(machine, found, to, value, lane_of, clamp, threads) -> None:
    machine.require_all()
    lane, by = machine.threads % 32, (machine.get("u32", lane_of) & 31).astype(int)
    limits = machine.get("u32", clamp).astype(int)
    segment, last = (limits >> 8) & 31, limits & 31
    lowest, highest = lane & segment, (lane & segment) | (last & ~segment)
    source = {"bfly": lane ^ by, "up": lane - by, "idx": lowest | (by & ~segment)}[found[1]]
    inside = source >= highest if found[1] == "up" else source <= highest
    places = machine.threads // 32 * 32 + np.where(inside, source, lane)
    values, unset = machine.source("b32", value)
    machine.put(to.split("|")[0], values[places], None if unset is None else unset[places])


def _reduce(machine, found, to, value, threads) -> None:
    machine.require_all()
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[found[1]]
    total = function.reduce(machine.get("s32", value).reshape(-1, 32), axis=1, dtype=np.int32)
    machine.put(to, np.repeat(total, 32))


def _matrix_rows(machine, count: int, operand: str) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of rows ``[warps, matrices, 8]``, and the threads that give them."""
    machine.require_all()
    chosen = np.flatnonzero(machine.threads % 32 < 8 * count)
    return machine.addresses(operand)[chosen], chosen


def _load_matrices(machine, found, to, source) -> None:
    addresses, threads = _matrix_rows(machine, len(to), source)
    data = machine.shared.read(addresses, 16, threads).view(np.uint16).reshape(-1, len(to), 8, 8)
    data = data.swapaxes(2, 3) if found[1] else data
    for number, name in enumerate(to):
        machine.put(name, np.ascontiguousarray(data[:, number]).reshape(-1, 2).view(np.uint32)[:, 0])


def _store_matrices(machine, found, to, source) -> None:
    addresses, threads = _matrix_rows(machine, len(source), to)
    words = np.stack([machine.get("b32", name).reshape(-1, 32) for name in source], axis=1)
    data = words.view(np.uint16).reshape(-1, len(source), 8, 8)
    data = np.ascontiguousarray(data.swapaxes(2, 3) if found[1] else data)
    machine.shared.write(addresses, data.view(np.uint8).reshape(-1, 16), threads)


# ---- products -------------------------------------------------------------------------------------------------------


def _operand(machine, names: tuple, places: tuple, width: int) -> np.ndarray:
    """Matrices ``[warps, 16, width]`` of registers with pairs of bfloat16."""
    words = np.stack([machine.get("b32", name).reshape(-1, 32) for name in names], axis=1)
    out = np.empty((len(words), 16, width))
    out[places] = of_bits16(np.stack(halves(words), axis=2), "bf16")
    return out


def _places_of_sums(count: int) -> tuple:
    """Indices of float32 sums by register and lane: of all warps, rows and columns."""
    number = np.arange(count)[:, None]
    return slice(None), _ROW + 8 * (number // 2 % 2), 8 * (number // 4) + _COLUMN + number % 2


def _write_sums(machine, sums: np.ndarray, names: tuple) -> None:
    for name, values in zip(names, sums[_places_of_sums(len(names))].swapaxes(0, 1), strict=True):
        machine.put(name, values.astype(np.float32).reshape(-1))


def _read_sums(machine, names: tuple) -> np.ndarray:
    out = np.empty((len(machine.threads) // 32, 16, 2 * len(names)))
    parts = [machine.get("f32", name).reshape(-1, 32) for name in names]
    out[_places_of_sums(len(names))] = np.stack(parts, axis=1)
    return out


def _multiply(machine, found, to, left, right, before) -> None:
    """Sums in float64, rounded once: how tensor cores round is not specified."""
    machine.require_all()
    product = _operand(machine, left, _LEFT, 16) @ _operand(machine, right, _RIGHT, 8)
    _write_sums(machine, product + _read_sums(machine, before), to)


def described_matrix(machine, descriptor: int, rows: int) -> np.ndarray:
    """``[rows, 16]`` of bfloat16 in shared memory, K in neighbours, for the last product that was issued, as a matrix
    descriptor tells: address, bytes from eight rows to the next, and rows swizzled over 128, 64 or 32 bytes."""
    start, stride = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    mode = descriptor >> 62
    if mode == 0 or descriptor >> 49 & 7 or descriptor >> 61 & 1:
        raise Fault(f"matrix descriptor {descriptor:#x} is not supported")
    width = {1: 128, 2: 64, 3: 32}[mode]
    row = np.arange(rows)[:, None]
    at = start + row // 8 * stride + row % 8 * width + 16 * np.arange(2)[None, :]
    at ^= (at >> 7 & (width // 16 - 1)) << 4
    data = machine.shared.read_by_product(at.reshape(-1), 16, machine.issued)
    return of_bits16(data.reshape(rows, 32).view(np.uint16), "bf16")


def _multiply_group(machine, found, to, left, descriptor, accumulates, *signs) -> None:
    """``wgmma`` with the left operand in registers, executed at once; until a wait, nobody may write what it reads."""
    if signs != ("1", "1", "0"):
        raise Fault("signs and transposes of wgmma are not supported")
    machine.require_all()
    machine.issued += 1
    right = described_matrix(machine, int(machine.get("u64", descriptor)[0]), int(found[1]))
    before = _read_sums(machine, to) if machine.get("pred", accumulates)[0] else 0
    _write_sums(machine, _operand(machine, left, _LEFT, 16) @ right.T + before, to)


def _wait_products(machine, found, left) -> None:
    if left != "0":
        raise Fault("a wait for a part of the products is not supported")
    machine.require_all()
    machine.finish(machine.issued)


INSTRUCTIONS = {
    r"ld\.param\.([bs]\d\d)": _load_parameter,
    r"ld\.(global|shared)(?:\.cg)?(?:\.v\d)?\.b(\d+)": _load,
    r"st\.(global|shared)(?:\.v\d)?\.b(\d+)": _store,
    r"atom\.global\.gpu\.(?:acq_rel|relaxed)\.add\.u32": _atomic_add,
    r"cp\.async\.c[ag]\.shared\.global": _copy,
    r"cp\.async\.commit_group": _end_copies,
    r"cp\.async\.wait_group": _wait_copies,
    r"bar\.sync": _barrier,
    r"bar\.warp\.sync": _barrier_of_warps,
    r"fence\.proxy\.async\.shared::cta": _fence,
    r"shfl\.sync\.(bfly|up|idx)\.b32": _shuffle,
    r"redux\.sync\.(add|min|max)\.s32": _reduce,
    r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16": _load_matrices,
    r"stmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16": _store_matrices,
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32": _multiply,
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16": _multiply_group,
    r"wgmma\.wait_group\.sync\.aligned": _wait_products,
    # What orders that which is executed in order anyway, and what others may have.
    r"wgmma\.(?:fence|commit_group)\.sync\.aligned": lambda *_: None,
    r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned": lambda *_: None,
}
