# SPDX-License-Identifier: Apache-2.0
"""Instructions that the threads of a warp, or of a group of four warps, execute together. Threads are ``[warps, 32]``
here; fragments of matrices are where the PTX manual has them."""

import numpy as np

from .arithmetic import halves, of_bits16
from .memory import Fault


_LANE = np.arange(32)
_ROW, _COLUMN = _LANE // 4, _LANE % 4 * 2


def _shuffle(found, operands, reader, writer, address):
    write, value = writer(operands[0].split("|")[0]), reader(operands[1], "b32")
    lane_of, clamp = reader(operands[2], "u32"), reader(operands[3], "u32")
    mode = found.group(1)

    def step(machine, group) -> None:
        machine.require_all(group)
        lane, by = machine.threads % 32, (lane_of(machine, group) & 31).astype(int)
        limits = clamp(machine, group).astype(int)
        segment, last = (limits >> 8) & 31, limits & 31
        lowest, highest = lane & segment, (lane & segment) | (last & ~segment)
        source = {"bfly": lane ^ by, "up": lane - by, "idx": lowest | (by & ~segment)}[mode]
        inside = source >= highest if mode == "up" else source <= highest
        source = np.where(inside, source, lane)
        places = machine.threads // 32 * 32 + source
        values = value(machine, group)[places]
        if machine.unset_sources is not None:
            machine.unset_sources = machine.unset_sources[places]
        write(machine, values, group)

    return step


def _reduce(found, operands, reader, writer, address):
    write, value = writer(operands[0]), reader(operands[1], "s32")
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[found.group(1)]

    def step(machine, group) -> None:
        machine.require_all(group)
        total = function.reduce(value(machine, group).reshape(-1, 32), axis=1, dtype=np.int32)
        write(machine, np.repeat(total, 32), group)

    return step


def _matrix_rows(found, operands, address):
    """Addresses of rows ``[warps, matrices, 8]``, and the threads that give them."""
    count, at = int(found.group(1)), address(operands)

    def rows(machine, group):
        machine.require_all(group)
        chosen = np.flatnonzero(machine.threads % 32 < 8 * count)
        return at(machine, group)[chosen], chosen

    return count, rows


def _load_matrices(found, operands, reader, writer, address):
    count, rows = _matrix_rows(found, operands[1], address)
    writers, transposed = [writer(name) for name in operands[0]], bool(found.group(2))

    def step(machine, group) -> None:
        addresses, threads = rows(machine, group)
        data = machine.shared.read(addresses, 16, threads).view(np.uint16).reshape(-1, count, 8, 8)
        data = data.swapaxes(2, 3) if transposed else data
        for number, write in enumerate(writers):
            words = np.ascontiguousarray(data[:, number]).reshape(-1, 8, 4, 2).view(np.uint32)
            write(machine, words.reshape(-1), group)

    return step


def _store_matrices(found, operands, reader, writer, address):
    count, rows = _matrix_rows(found, operands[0], address)
    readers, transposed = [reader(name, "b32") for name in operands[1]], bool(found.group(2))

    def step(machine, group) -> None:
        addresses, threads = rows(machine, group)
        words = np.stack([read(machine, group).reshape(-1, 32) for read in readers], axis=1)
        data = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 8)
        data = np.ascontiguousarray(data.swapaxes(2, 3)) if transposed else data
        machine.shared.write(addresses, data.view(np.uint8).reshape(-1, 16), threads)

    return step


def left_operand(registers: list[np.ndarray]) -> np.ndarray:
    """Matrices ``[warps, 16, 16]`` (float64) of four registers with pairs of bfloat16."""
    out = np.empty((len(registers[0]) // 32, 16, 16))
    for number, words in enumerate(registers):
        for side, half in enumerate(halves(words)):
            out[:, _ROW + 8 * (number % 2), _COLUMN + side + 8 * (number // 2)] = _values(half)
    return out


def _values(half: np.ndarray) -> np.ndarray:
    return of_bits16(half, "bf16").reshape(-1, 32)


def _right_operand(registers: list[np.ndarray]) -> np.ndarray:
    """Matrices ``[warps, 16, 8]`` of two registers."""
    out = np.empty((len(registers[0]) // 32, 16, 8))
    for number, words in enumerate(registers):
        for side, half in enumerate(halves(words)):
            out[:, _COLUMN + side + 8 * number, _ROW] = _values(half)
    return out


def _sums_at(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column, by lane, of register ``number`` of float32 sums of a warp."""
    return _ROW + 8 * (number // 2 % 2), 8 * (number // 4) + _COLUMN + number % 2


def _write_sums(machine, group, sums: np.ndarray, writers) -> None:
    for number, write in enumerate(writers):
        rows, columns = _sums_at(number)
        write(machine, np.ascontiguousarray(sums[:, rows, columns]).astype(np.float32).reshape(-1), group)


def _read_sums(machine, group, readers) -> np.ndarray:
    out = np.empty((len(machine.threads) // 32, 16, 2 * len(readers)))
    for number, read in enumerate(readers):
        rows, columns = _sums_at(number)
        out[:, rows, columns] = read(machine, group).reshape(-1, 32)
    return out


def _multiply(found, operands, reader, writer, address):
    """Sums in float64, rounded once: how tensor cores round is not specified."""
    to, left, right, before = operands
    writers, sums = [writer(name) for name in to], [reader(name, "f32") for name in before]
    left, right = [reader(name, "b32") for name in left], [reader(name, "b32") for name in right]

    def step(machine, group) -> None:
        machine.require_all(group)
        a = left_operand([read(machine, group) for read in left])
        b = _right_operand([read(machine, group) for read in right])
        _write_sums(machine, group, a @ b + _read_sums(machine, group, sums), writers)

    return step


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


def _multiply_group(found, operands, reader, writer, address):
    """``wgmma`` with the left operand in registers, executed at once; until a wait, nobody may write what it reads."""
    names, left, descriptor, accumulates, *signs = operands
    if signs != ["1", "1", "0"]:
        raise Fault("signs and transposes of wgmma are not supported")
    writers, sums = [writer(name) for name in names], [reader(name, "f32") for name in names]
    left, where = [reader(name, "b32") for name in left], reader(descriptor, "u64")
    keeps = reader(accumulates, "pred")

    def step(machine, group) -> None:
        machine.require_all(group)
        machine.issued += 1
        right = described_matrix(machine, int(where(machine, group)[0]), int(found.group(1)))
        a = left_operand([read(machine, group) for read in left])
        before = _read_sums(machine, group, sums) if keeps(machine, group)[0] else 0
        _write_sums(machine, group, a @ right.T + before, writers)

    return step


def _nothing(found, operands, reader, writer, address):
    """What orders that which is executed in order anyway."""
    return lambda machine, group: machine.require_all(group)


def _wait_group(found, operands, reader, writer, address):
    if operands != ("0",):
        raise Fault("a wait for a part of the products is not supported")

    def step(machine, group) -> None:
        machine.require_all(group)
        machine.finish(machine.issued)

    return step


COLLECTIVE = {
    r"shfl\.sync\.(bfly|up|idx)\.b32": _shuffle,
    r"redux\.sync\.(add|min|max)\.s32": _reduce,
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16": _load_matrices,
    r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16": _store_matrices,
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32": _multiply,
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16": _multiply_group,
    r"wgmma\.wait_group\.sync\.aligned": _wait_group,
    r"wgmma\.(?:fence|commit_group)\.sync\.aligned": _nothing,
}
