# SPDX-License-Identifier: Apache-2.0
"""Executes a parsed kernel, one program after the other, all threads of a program at once.

Threads that are at the same instruction form a group; the group furthest behind runs first, so that groups meet again
after a branch, unless it waits for others at a barrier. A register is an array with an element for each thread.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .memory import Fault, GlobalMemory, SharedMemory
from .parser import Instruction, Kernel
from .semantics import DTYPES, meaning_of
from .tensor import TENSOR, Barrier, TensorMemory
from .transfers import TRANSFERS
from .warps import COLLECTIVE


_REGISTER = {1: np.dtype("?"), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}
_ALL = np.uint8(255)
#: Of a program, basic blocks; ours have a few hundred.
_MOST_BLOCKS = 20_000

Step = Callable[["Machine", np.ndarray], None]
#: Whether it hands on registers that were not written, and the step.
Code = tuple[bool, Step | None]


class Machine:
    """One program of a launch.

    Attributes:
        threads: how many there are; their numbers.
        shared, tensor, memory: bytes of the program, its tensor memory, and the buffers of the launch.
        copies: groups of asynchronous copies that have not arrived, the open one last.
        arriving: registers loaded from tensor memory, and those they were moved to, before a wait.
        issued: products so far.
        barriers: those in shared memory, by address.
    """

    def __init__(
        self, kernel: Kernel, steps: list[Code], memory: GlobalMemory, arguments: dict, place: tuple, shared: int
    ):
        self.kernel, self.memory, self.arguments, self.place = kernel, memory, arguments, place
        self.shared, self.tensor, self.threads = SharedMemory(shared), TensorMemory(), np.arange(kernel.threads)
        self.copies: list[list[tuple]] = [[]]
        self.arriving: set[str] = set()
        self.issued, self.barriers = 0, {}
        self._steps, self._alive = steps, kernel.threads
        self._registers: dict[str, np.ndarray] = {}
        self._unset: dict[str, np.ndarray] = {}
        self.unset_sources: np.ndarray | None = None
        self._is_arithmetic = False

    def read(self, name: str, group: np.ndarray, used: int = _ALL) -> np.ndarray:
        """The register, of all threads, of which some bytes (bits of ``used``) count. Where a thread of the group never
        wrote these, arithmetic goes on, and what comes out counts as not written either; every other use is an error.
        """
        unset = self._unset.get(name)
        if name not in self._registers:
            unset = np.full(len(self.threads), _ALL, np.uint8)
            self._registers[name] = np.zeros(len(self.threads), _REGISTER[_width(name, self.kernel)])
            self._unset[name] = unset
        if unset is not None and (unset[group] & used).any():
            if not self._is_arithmetic:
                raise Fault(f"register {name} was not written by all threads that use it")
            unset = np.where(unset & used != 0, _ALL, np.uint8(0))
            self.unset_sources = unset if self.unset_sources is None else self.unset_sources | unset
        return self._registers[name]

    def unset_bytes(self, name: str) -> np.ndarray:
        """A bit for each byte of a register that was not written, by thread."""
        otherwise = 0 if name in self._registers or not name.startswith("%") else _ALL
        return self._unset.get(name, np.full(len(self.threads), otherwise, np.uint8))

    def write(self, name: str, values: np.ndarray, group: np.ndarray) -> None:
        """Set the register of the threads of a group; ``values`` are of all threads."""
        unset = self.unset_sources
        if len(group) == len(self.threads):
            self._registers[name] = values
            if unset is not None:
                self._unset[name] = unset
            else:
                self._unset.pop(name, None)
            return
        nothing = np.zeros(len(self.threads), values.dtype)
        changed = self._registers.get(name, nothing).copy()
        changed[group] = values[group]
        before = self.unset_bytes(name).copy()
        before[group] = 0 if unset is None else unset[group]
        self._registers[name], self._unset[name] = changed, before

    def require_all(self, group: np.ndarray) -> None:
        """A barrier, or an instruction of all warps, that some threads do not come to would hang or be undefined."""
        if len(group) != self._alive:
            raise Fault(f"{len(group)} of {self._alive} threads come here")

    def require_warps(self, group: np.ndarray) -> None:
        """An instruction of whole warps."""
        if 32 * len(np.unique(group // 32)) != len(group):
            raise Fault("a part of a warp comes here")

    def arrive(self) -> None:
        """What was loaded from tensor memory is there."""
        for name in self.arriving:
            self._unset.pop(name, None)
        self.arriving.clear()

    def barrier_at(self, address: int) -> Barrier:
        if address not in self.barriers:
            raise Fault(f"no barrier at {address}")
        return self.barriers[address]

    def finish(self, product: int) -> None:
        """Products up to a number are done."""
        for memory in (self.shared, self.tensor):
            memory.taken[memory.taken <= product] = 0

    def run(self) -> None:
        groups, ends = {0: self.threads}, len(self.kernel.instructions)
        barriers = {at for at, instruction in enumerate(self.kernel.instructions) if instruction.op == "bar.sync"}
        stops = barriers.union(self.kernel.labels.values(), [ends])
        for _ in range(_MOST_BLOCKS):
            if not groups:
                return self.tensor.require_free()
            waiting = {at for at in barriers.intersection(groups) if len(groups[at]) < self._alive}
            at = min(groups.keys() - waiting or waiting)
            group = groups.pop(at)
            while at < ends and self.kernel.instructions[at].op.split(".")[0] not in ("bra", "ret"):
                self._execute(at, group)
                at += 1
                if at in stops:
                    break
            else:
                if at < ends:
                    self._leave(at, group, groups)
                continue
            self._join(groups, at, group)
        raise Fault("the program does not end")

    def _execute(self, at: int, group: np.ndarray) -> None:
        instruction = self.kernel.instructions[at]
        operands = instruction.operands
        try:
            self._is_arithmetic = False
            if instruction.guard is not None:
                group = self._guarded(instruction, group)
            if len(group):
                self.unset_sources = None
                self._is_arithmetic, step = self._steps[at]
                step(self, group)
                if self.arriving and instruction.op.startswith("mov.") and self.arriving & _names(operands[1:]):
                    self.arriving |= _names(operands[:1])
        except Fault as fault:
            raise Fault(f"program {self.place}, instruction {at}: {instruction.text}: {fault}") from None

    def _guarded(self, instruction: Instruction, group: np.ndarray) -> np.ndarray:
        name, value = instruction.guard
        return group[self.read(name, group)[group] == value]

    def _leave(self, at: int, group: np.ndarray, groups: dict[int, np.ndarray]) -> None:
        """A branch, or the end of threads."""
        instruction = self.kernel.instructions[at]
        self._is_arithmetic = False
        going = group if instruction.guard is None else self._guarded(instruction, group)
        if instruction.op == "ret":
            self._alive -= len(going)
        else:
            self._join(groups, self.kernel.labels[instruction.operands[0]], going)
        self._join(groups, at + 1, np.setdiff1d(group, going, assume_unique=True))

    @staticmethod
    def _join(groups: dict[int, np.ndarray], at: int, group: np.ndarray) -> None:
        if len(group):
            groups[at] = np.union1d(groups[at], group) if at in groups else group


def execute(kernel: Kernel, grid: Sequence[int], arguments: Sequence, memory: GlobalMemory, shared: int) -> None:
    """Run every program of a grid.

    Args:
        arguments: numbers and addresses, in the order of the parameters.
        shared: bytes of shared memory of a program.

    Raises:
        Fault: an instruction without semantics, or a kernel that does what it must not do.
    """
    steps = [(_carries_unset(instruction.op), _step(instruction, kernel)) for instruction in kernel.instructions]
    named = dict(zip(kernel.parameters, arguments, strict=True))
    x, y, z = grid
    with np.errstate(all="ignore"):
        for number in range(x * y * z):
            place = number % x, number // x % y, number // (x * y)
            Machine(kernel, steps, memory, named, place, shared).run()


# ---- instructions ---------------------------------------------------------------------------------------------------


def _carries_unset(op: str) -> bool:
    """Whether an instruction hands on what was never written instead of using it."""
    return op.startswith("shfl") or meaning_of(op) is not None


def _names(operands: tuple) -> set[str]:
    return {name for operand in operands for name in (operand if isinstance(operand, tuple) else [operand])}


def _width(name: str, kernel: Kernel) -> int:
    if name in kernel.registers:
        return kernel.registers[name]
    return kernel.registers[re.sub(r"\d+$", "", name)]


def _reader(operand: str, kind: str, kernel: Kernel) -> Callable[[Machine, np.ndarray], np.ndarray]:
    """A function that gives an operand as an array of a type."""
    dtype, threads = DTYPES[kind], kernel.threads
    if operand.startswith(("%tid", "%ctaid")):
        axis = "xyz".index(operand[-1])
        if operand.startswith("%ctaid"):
            return lambda machine, group: np.full(threads, machine.place[axis], dtype)
        return lambda machine, group: (machine.threads * (axis == 0)).astype(dtype)
    if operand == "global_smem":
        return lambda machine, group: np.zeros(threads, dtype)
    if re.match(r"-?\d|0[fd]", operand):
        value = _constant(operand, dtype, threads)
        return lambda machine, group: value
    if kind == "pred" or _width(operand, kernel) == 8 * dtype.itemsize:
        return lambda machine, group: machine.read(operand, group).view(dtype)
    narrow, used = np.dtype(f"u{dtype.itemsize}"), np.uint8(2**dtype.itemsize - 1)
    return lambda machine, group: machine.read(operand, group, used).astype(narrow).view(dtype)


def _constant(text: str, dtype: np.dtype, threads: int) -> np.ndarray:
    if dtype.kind == "b":
        return np.full(threads, int(text) != 0)
    value = int(text[2:], 16) if text.startswith("0f") else int(text.rstrip("U"), 0)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return np.full(threads, value & (256**dtype.itemsize - 1), unsigned).view(dtype)


def _writer(operand: str, kernel: Kernel) -> Callable[[Machine, np.ndarray, np.ndarray], None]:
    """A function that puts values into a register, which may be wider."""
    if operand == "_":
        return lambda machine, values, group: None
    target = _REGISTER[_width(operand, kernel)]

    def write(machine: Machine, values: np.ndarray, group: np.ndarray) -> None:
        if values.dtype.itemsize == target.itemsize:
            values = values.view(target)
        else:
            values = values.astype(np.dtype(f"{'i' if values.dtype.kind == 'i' else 'u'}{target.itemsize}")).view(
                target
            )
        machine.write(operand, values, group)

    return write


def _address(operand: str, kernel: Kernel) -> Callable[[Machine, np.ndarray], np.ndarray]:
    """A function that gives the addresses (int64) of the threads of a group."""
    base, _, offset = operand[1:-1].replace(" ", "").partition("+")
    bits = 64 if base == "global_smem" else _width(base, kernel)
    read = _reader(base, f"u{bits}", kernel)
    return lambda machine, group: read(machine, group)[group].astype(np.int64) + int(offset or 0)


def _step(instruction: Instruction, kernel: Kernel) -> Step | None:
    """A function that executes an instruction for a group of threads."""
    op, operands = instruction.op, instruction.operands
    if op in ("ret",) or op.startswith("bra"):
        return None
    if op.startswith("mov.") and any(isinstance(operand, tuple) for operand in operands):
        return _pack(instruction, kernel)
    for pattern, build in (TRANSFERS | COLLECTIVE | TENSOR).items():
        if (found := re.fullmatch(pattern, op)) is not None:
            sources = [
                partial(_operand, kernel=kernel),
                partial(_writer, kernel=kernel),
                partial(_address, kernel=kernel),
            ]
            return build(found, operands, *sources)
    meaning = meaning_of(op)
    if meaning is None or len(operands) != len(meaning.sources) + 1:
        raise Fault(f"no semantics for {instruction.text!r}")
    readers = [_reader(operand, kind, kernel) for operand, kind in zip(operands[1:], meaning.sources, strict=True)]
    write, dtype = _writer(operands[0], kernel), DTYPES[meaning.result]

    def step(machine: Machine, group: np.ndarray, *unset: np.ndarray | None) -> None:
        values = meaning.compute(*(read(machine, group) for read in readers))
        if unset:
            machine.unset_sources = unset[0]
        write(machine, values.astype(dtype, copy=False), group)

    return _bytewise(step, op, operands) if op.startswith(("prmt", "shl", "shr")) or op.endswith("f32x2") else step


def _bytewise(step: Step, op: str, operands: tuple) -> Step | None:
    """``prmt`` with constant selectors, shifts by whole bytes, packing and pairs of float32: of what was not written,
    only the bytes that are taken count."""
    name, constant = op.split(".")[0], operands[-1]
    if name in ("prmt", "shl", "shr") and constant.startswith("%"):
        return step
    number = int(constant.rstrip("U"), 0) if name in ("prmt", "shl", "shr") else 0
    if name in ("shl", "shr") and number % 8:
        return step

    def unset_of(machine: Machine) -> np.ndarray:
        if op.endswith("f32x2"):
            unset = np.bitwise_or.reduce([machine.unset_bytes(operand) for operand in operands[1:]])
            return np.where(unset & 15, 15, 0) | np.where(unset & 240, 240, 0)
        if name == "mov":
            size = int(op[-2:]) // 8 // len(constant)
            parts = [(machine.unset_bytes(part) & 2**size - 1) << size * at for at, part in enumerate(constant)]
            return np.bitwise_or.reduce(parts)
        if name == "prmt":
            both = machine.unset_bytes(operands[1]) & 15 | machine.unset_bytes(operands[2]) << 4
            return np.bitwise_or.reduce([(both >> (number >> 4 * place & 7) & 1) << place for place in range(4)])
        unset = machine.unset_bytes(operands[1]) & 2 ** (int(op[-2:]) // 8) - 1
        return unset >> number // 8 if name == "shr" else unset << number // 8

    def bytewise(machine: Machine, group: np.ndarray) -> None:
        unset = unset_of(machine).astype(np.uint8)
        step(machine, group, unset if unset.any() else None)

    return bytewise


def _operand(operand: str, kind: str, kernel: Kernel) -> Callable[[Machine, np.ndarray], np.ndarray]:
    return _reader(operand, kind, kernel)


def _pack(instruction: Instruction, kernel: Kernel) -> Step:
    """``mov`` between a register and the vector of its parts, the lowest first."""
    to, source = instruction.operands
    bits = int(instruction.op[-2:])
    if isinstance(to, tuple):
        part = bits // len(to)
        read, writers = _reader(source, f"u{bits}", kernel), [_writer(name, kernel) for name in to]

        def unpack(machine: Machine, group: np.ndarray) -> None:
            parts = np.ascontiguousarray(read(machine, group)).view(f"u{part // 8}").reshape(-1, len(to))
            unset = machine.unset_bytes(source)
            for number, write in enumerate(writers):
                part_unset = unset >> number * part // 8 & 2 ** (part // 8) - 1
                machine.unset_sources = part_unset if part_unset.any() else None
                write(machine, np.ascontiguousarray(parts[:, number]), group)

        return unpack
    readers = [_reader(name, f"u{bits // len(source)}", kernel) for name in source]
    write = _writer(to, kernel)

    def pack(machine: Machine, group: np.ndarray, unset: np.ndarray | None) -> None:
        parts = np.stack([read(machine, group) for read in readers], axis=1)
        machine.unset_sources = unset
        write(machine, parts.view(f"u{bits // 8}")[:, 0], group)

    return _bytewise(pack, instruction.op, instruction.operands)
