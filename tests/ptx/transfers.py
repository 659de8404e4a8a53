# SPDX-License-Identifier: Apache-2.0
"""Instructions that move data between registers and memory, and barriers.

Each function here and in `warps.py` gets the match of the name, the operands and three functions, which make of an
operand what reads it, writes it, or gives the addresses in it; it returns what executes the instruction for a group of
threads of a machine.
"""

import numpy as np

from .memory import Fault
from .semantics import DTYPES


def _load_parameter(found, operands, reader, writer, address):
    kind, write, name = found.group(1), writer(operands[0]), operands[1][1:-1]

    def step(machine, group) -> None:
        value = machine.arguments[name]
        if isinstance(value, float):
            value = int(np.float32(value).view(np.uint32))
        dtype = DTYPES[kind]
        unsigned = np.full(len(machine.threads), value & (256**dtype.itemsize - 1), f"u{dtype.itemsize}")
        write(machine, unsigned.view(dtype), group)

    return step


def _vector(operand: str | tuple) -> tuple:
    return operand if isinstance(operand, tuple) else (operand,)


def _load(found, operands, reader, writer, address):
    space, bits = found.group(1), int(found.group(2)) // 8
    writers, at = [writer(name) for name in _vector(operands[0])], address(operands[1])

    def step(machine, group) -> None:
        memory = machine.memory if space == "global" else machine.shared
        data = memory.read(at(machine, group), bits * len(writers), group)
        for number, write in enumerate(writers):
            values = np.zeros(len(machine.threads), f"u{bits}")
            values[group] = np.ascontiguousarray(data[:, number * bits : (number + 1) * bits]).view(f"u{bits}")[:, 0]
            write(machine, values, group)

    return step


def _store(found, operands, reader, writer, address):
    space, bits = found.group(1), int(found.group(2)) // 8
    readers, at = [reader(name, f"u{8 * bits}") for name in _vector(operands[1])], address(operands[0])

    def step(machine, group) -> None:
        parts = np.stack([read(machine, group)[group] for read in readers], axis=1)
        memory = machine.memory if space == "global" else machine.shared
        memory.write(at(machine, group), parts.view(np.uint8).reshape(len(group), -1), group)

    return step


def _atomic_add(found, operands, reader, writer, address):
    write, at, read = writer(operands[0]), address(operands[1]), reader(operands[2], "u32")

    def step(machine, group) -> None:
        before, added = np.zeros(len(machine.threads), np.uint32), read(machine, group)
        for number, where in zip(group, at(machine, group), strict=True):
            place, thread = np.array([where]), np.array([number])
            before[number] = machine.memory.read(place, 4, thread).view(np.uint32)[0, 0]
            total = np.array([[before[number] + added[number]]], np.uint32)
            machine.memory.write(place, total.view(np.uint8), thread)
        write(machine, before, group)

    return step


def _copy(found, operands, reader, writer, address):
    """Read at once, and arrives in shared memory with a wait; beyond the number of source bytes come zeros."""
    to, source, size = address(operands[0]), address(operands[1]), int(operands[2], 0)
    read_length = reader(operands[3], "u32") if len(operands) > 3 else None

    def step(machine, group) -> None:
        lengths = np.full(len(group), size) if read_length is None else read_length(machine, group)[group]
        if not np.isin(lengths, (0, size)).all():
            raise Fault("a part of a copy")
        values, real = np.zeros((len(group), size), np.uint8), lengths == size
        if real.any():
            values[real] = machine.memory.read(source(machine, group)[real], size, group[real])
        machine.shared.write(to(machine, group), values, group, is_set=False)
        machine.copies[-1].append((to(machine, group), values, group))

    return step


def _commit(found, operands, reader, writer, address):
    def step(machine, group) -> None:
        machine.require_all(group)
        machine.copies.append([])

    return step


def _wait(found, operands, reader, writer, address):
    left = int(operands[0], 0)

    def step(machine, group) -> None:
        machine.require_all(group)
        while len(machine.copies) - 1 > left:
            for copy in machine.copies.pop(0):
                machine.shared.write(*copy)

    return step


def _barrier(found, operands, reader, writer, address):
    def step(machine, group) -> None:
        machine.require_all(group)
        if "warp" in found.group():
            machine.shared.warp_barrier()
        else:
            machine.shared.barrier()
            machine.tensor.barrier()

    return step


def _fence(found, operands, reader, writer, address):
    def step(machine, group) -> None:
        machine.require_all(group)
        machine.shared.is_fenced.fill(True)

    return step


TRANSFERS = {
    r"ld\.param\.([bs]\d\d)": _load_parameter,
    r"ld\.(global|shared)(?:\.cg)?(?:\.v\d)?\.b(\d+)": _load,
    r"st\.(global|shared)(?:\.v\d)?\.b(\d+)": _store,
    r"atom\.global\.gpu\.(?:acq_rel|relaxed)\.add\.u32": _atomic_add,
    r"cp\.async\.c[ag]\.shared\.global": _copy,
    r"cp\.async\.commit_group": _commit,
    r"cp\.async\.wait_group": _wait,
    r"bar\.sync|bar\.warp\.sync": _barrier,
    r"fence\.proxy\.async\.shared::cta": _fence,
}
