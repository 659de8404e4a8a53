# SPDX-License-Identifier: Apache-2.0
"""Executes a parsed kernel, one program after the other, all threads of a program at once.

Threads that are at the same instruction form a group; the group furthest behind runs first, so that groups meet again
after a branch, unless it waits for others at a barrier. A register is an array with an element for each thread, and has
a second one with the bits that were not written.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np

from .instructions import INSTRUCTIONS
from .memory import Fault, GlobalMemory, SharedMemory
from .parser import Instruction, Kernel
from .semantics import DTYPES, Meaning, meaning_of
from .tensor import TENSOR, Barrier, TensorMemory


_REGISTER = {1: np.dtype("?"), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}
#: Of a program, basic blocks; ours have a few hundred.
_MOST_BLOCKS = 20_000

#: Values of all threads, and their bits that were not written, if there are any.
Source = tuple[np.ndarray, np.ndarray | None]


class Machine:
    """One program of a launch.

    Attributes:
        threads, group: how many there are, their numbers; those that execute the instruction.
        shared, tensor, memory: bytes of the program, its tensor memory, and the buffers of the launch.
        spaces: those of them that loads and stores name.
        copies: groups of asynchronous copies that have not arrived, the open one last.
        arriving: registers loaded from tensor memory, and those they were moved to, before a wait.
        issued: products so far.
        barriers: those in shared memory, by address.
    """

    def __init__(self, code: "Code", memory: GlobalMemory, arguments: dict, place: tuple, shared: int):
        self.memory, self.arguments, self.place = memory, arguments, place
        self.shared, self.tensor = SharedMemory(shared), TensorMemory()
        self.spaces = {"global": memory, "shared": self.shared}
        self.threads = self.group = np.arange(code.kernel.threads)
        self.copies: list[list[tuple]] = [[]]
        self.arriving: set[str] = set()
        self.issued, self.barriers = 0, {}
        self._code, self._alive = code, code.kernel.threads
        self._registers: dict[str, np.ndarray] = {}
        self._unset: dict[str, np.ndarray] = {}

    def register(self, name: str) -> Source:
        if name not in self._registers:
            zeros = np.zeros(len(self.threads), _REGISTER[self._code.width(name)])
            self._registers[name], self._unset[name] = zeros, ~zeros
        return self._registers[name], self._unset.get(name)

    def source(self, kind: str, operand: str) -> Source:
        """An operand as an array of a type."""
        values, unset = self._code.reader(operand, kind)(self)
        return values, unset if unset is not None and unset[self.group].any() else None

    def get(self, kind: str, operand: str) -> np.ndarray:
        """An operand that all threads of the group wrote."""
        values, unset = self.source(kind, operand)
        if unset is not None:
            raise Fault(f"register {operand} was not written by all threads that use it")
        return values

    def addresses(self, operand: str) -> np.ndarray:
        """Those (int64) of the threads of the group in ``[base + offset]``."""
        base, _, offset = operand[1:-1].replace(" ", "").partition("+")
        bits = 64 if base == "global_smem" else self._code.width(base)
        return self.get(f"u{bits}", base)[self.group].astype(np.int64) + int(offset or 0)

    def put(self, name: str, values: np.ndarray, unset: np.ndarray | None = None) -> None:
        """Set a register, which may be wider, of the group; ``values`` are of all threads."""
        if name == "_":
            return
        target = _REGISTER[self._code.width(name)]
        if values.dtype.itemsize != target.itemsize:
            values = values.astype(np.dtype(f"{'i' if values.dtype.kind == 'i' else 'u'}{target.itemsize}"))
        values, unset = values.view(target), None if unset is None else unset.astype(target)
        if len(self.group) < len(self.threads):
            others = np.ones(len(self.threads), bool)
            others[self.group] = False
            before, unset_before = self.register(name)
            values = np.where(others, before, values)
            if unset is not None or unset_before is not None:
                none = np.zeros(len(self.threads), target)
                unset = np.where(others, *(none if part is None else part for part in (unset_before, unset)))
        self._registers[name] = values
        if unset is None or not unset.any():
            self._unset.pop(name, None)
        else:
            self._unset[name] = unset

    def arrive(self) -> None:
        """What was loaded from tensor memory is there."""
        for name in self.arriving:
            self._unset.pop(name, None)
        self.arriving.clear()

    def require_all(self) -> None:
        """A barrier, or an instruction of all warps, that some threads do not come to would hang or be undefined."""
        if len(self.group) != self._alive:
            raise Fault(f"{len(self.group)} of {self._alive} threads come here")

    def require_warps(self) -> None:
        """An instruction of whole warps."""
        if 32 * len(np.unique(self.group // 32)) != len(self.group):
            raise Fault("a part of a warp comes here")

    def barrier_at(self, address: int) -> Barrier:
        barrier = self.barriers.get(address)
        if barrier is None:
            raise Fault(f"no barrier at {address}")
        return barrier

    def finish(self, product: int) -> None:
        """Products up to a number are done."""
        for memory in (self.shared, self.tensor):
            memory.taken[memory.taken <= product] = 0

    def run(self) -> None:
        groups, instructions = {0: self.threads}, self._code.kernel.instructions
        for _ in range(_MOST_BLOCKS):
            if not groups:
                return
            waiting = {at for at in self._code.barriers.intersection(groups) if len(groups[at]) < self._alive}
            at = min(groups.keys() - waiting or waiting)
            group = groups.pop(at)
            while at < len(instructions) and self._code.steps[at] is not None:
                self._execute(at, group)
                at += 1
                if at in self._code.stops:
                    self._join(groups, at, group)
                    break
            else:
                if at < len(instructions):
                    self._leave(at, group, groups)
        raise Fault("the program does not end")

    def _execute(self, at: int, group: np.ndarray) -> None:
        instruction = self._code.kernel.instructions[at]
        try:
            self.group = self._guarded(instruction, group)
            if len(self.group):
                self._code.steps[at](self)
        except Fault as fault:
            raise Fault(f"program {self.place}, instruction {at}: {instruction.text}: {fault}") from None

    def _guarded(self, instruction: Instruction, group: np.ndarray) -> np.ndarray:
        """Threads of a group for which an instruction is not switched off."""
        if instruction.guard is None:
            return group
        self.group = group
        name, value = instruction.guard
        return group[self.get("pred", name)[group] == value]

    def _leave(self, at: int, group: np.ndarray, groups: dict[int, np.ndarray]) -> None:
        """A branch, or the end of threads."""
        instruction = self._code.kernel.instructions[at]
        going = self._guarded(instruction, group)
        if instruction.op == "ret":
            self._alive -= len(going)
        else:
            self._join(groups, self._code.kernel.labels[instruction.operands[0]], going)
        self._join(groups, at + 1, np.setdiff1d(group, going, assume_unique=True))

    @staticmethod
    def _join(groups: dict[int, np.ndarray], at: int, group: np.ndarray) -> None:
        if len(group):
            groups[at] = np.union1d(groups[at], group) if at in groups else group


class Code:
    """A kernel, prepared.

    Attributes:
        steps: what executes each instruction, `None` for one that may lead elsewhere.
        barriers, stops: instructions where threads wait for others, and where groups may meet.
        reader: gives a function that makes an operand (a register, a constant) of a machine an array of a type.
    """

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.barriers = {at for at, instruction in enumerate(kernel.instructions) if instruction.op == "bar.sync"}
        self.stops = self.barriers.union(kernel.labels.values(), [len(kernel.instructions)])
        self.width = cache(partial(_width, kernel))
        self.reader = cache(partial(_reader, self))
        self.steps = [_step(instruction) for instruction in kernel.instructions]


def execute(kernel: Kernel, grid: Sequence[int], arguments: Sequence, memory: GlobalMemory, shared: int) -> None:
    """Run every program of a grid.

    Args:
        arguments: numbers and addresses, in the order of the parameters.
        shared: bytes of shared memory of a program.

    Raises:
        Fault: an instruction without semantics, or a kernel that does what it must not do.
    """
    code, named = Code(kernel), dict(zip(kernel.parameters, arguments, strict=True))
    x, y, z = grid
    with np.errstate(all="ignore"):
        for number in range(x * y * z):
            place = number % x, number // x % y, number // (x * y)
            machine = Machine(code, memory, named, place, shared)
            machine.run()
            if machine.tensor.columns:
                raise Fault(f"program {place}: tensor memory was not given back")


# ---- operands and arithmetic ----------------------------------------------------------------------------------------


def _width(kernel: Kernel, name: str) -> int:
    """Bits of a register."""
    return kernel.registers[name if name in kernel.registers else re.sub(r"\d+$", "", name)]


def _reader(code: Code, operand: str, kind: str) -> Callable[[Machine], Source]:
    dtype, threads = DTYPES[kind], code.kernel.threads
    if operand.startswith("%ctaid"):
        return lambda machine: (np.full(threads, machine.place["xyz".index(operand[-1])], dtype), None)
    if operand.startswith("%tid"):
        return lambda machine: ((machine.threads * (operand[-1] == "x")).astype(dtype), None)
    if operand == "global_smem" or re.match(r"-?\d|0[fd]", operand):
        value = _constant(operand, dtype, threads)
        return lambda machine: (value, None)

    unsigned = dtype if dtype.kind == "b" else np.dtype(f"u{dtype.itemsize}")

    def read(machine: Machine) -> Source:
        values, unset = machine.register(operand)
        return values.astype(unsigned, copy=False).view(dtype), unset if unset is None else unset.astype(unsigned)

    return read


def _constant(text: str, dtype: np.dtype, threads: int) -> np.ndarray:
    value = 0 if text == "global_smem" else int(text[2:], 16) if text.startswith("0f") else int(text.rstrip("U"), 0)
    if dtype.kind == "b":
        return np.full(threads, value != 0)
    return np.full(threads, value & (256**dtype.itemsize - 1), f"u{dtype.itemsize}").view(dtype)


def _step(instruction: Instruction) -> Callable[[Machine], None] | None:
    """A function that executes an instruction for the group of a machine."""
    op, operands = instruction.op, instruction.operands
    if op == "ret" or op.startswith("bra"):
        return None
    if op.startswith("mov."):
        return partial(_move, op, operands)
    for pattern, function in (INSTRUCTIONS | TENSOR).items():
        if (found := re.fullmatch(pattern, op)) is not None:
            return lambda machine: function(machine, found, *operands)
    meaning = meaning_of(op)
    if meaning is None or len(operands) != len(meaning.sources) + 1:
        raise Fault(f"no semantics for {instruction.text!r}")
    return partial(_compute, op, meaning, operands)


def _compute(op: str, meaning: Meaning, operands: tuple, machine: Machine) -> None:
    """Arithmetic goes on with what was not written, and what comes out counts as not written either."""
    sources = [machine.source(*source) for source in zip(meaning.sources, operands[1:], strict=True)]
    values = meaning.compute(*(values for values, _ in sources)).astype(DTYPES[meaning.result], copy=False)
    machine.put(operands[0], values, _unset_bits(op, meaning, operands, sources))


def _unset_bits(op: str, meaning: Meaning, operands: tuple, sources: list[Source]) -> np.ndarray | None:
    """All bits of a result; but ``prmt`` and shifts by constants move them, and pairs have two results."""
    if all(unset is None for _, unset in sources):
        return None
    parts = [np.zeros(values.shape, f"u{values.itemsize}") if unset is None else unset for values, unset in sources]
    if op.startswith(("prmt", "shl", "shr")) and not operands[-1].startswith("%"):
        return meaning.compute(*parts[:-1], sources[-1][0])
    if op.endswith("f32x2"):
        either = np.bitwise_or.reduce(parts).view(np.uint32) != 0
        return (either * np.uint32(0xFFFFFFFF)).view(np.uint64)
    either = np.logical_or.reduce([part != 0 for part in parts])
    return -either.astype(f"u{DTYPES[meaning.result].itemsize}")


def _move(op: str, operands: tuple, machine: Machine) -> None:
    """``mov``, also between a register and the vector of its parts, the lowest first."""
    kind = op.split(".")[1]
    to, source = ((operand,) if isinstance(operand, str) else operand for operand in operands)
    if len(to) == len(source) == 1:
        machine.put(*to, *machine.source(kind, *source))
    else:
        bits = int(kind[1:])
        sources = [machine.source(f"u{bits // len(source)}", name) for name in source]
        parts, unset = zip(*sources, strict=True)
        unset_parts = [None] * len(to)
        if any(part is not None for part in unset):
            zero = np.zeros_like(parts[0])
            unset_parts = _regrouped([zero if part is None else part for part in unset], bits // len(to))
        for name, *part in zip(to, _regrouped(parts, bits // len(to)), unset_parts, strict=True):
            machine.put(name, *part)
    if machine.arriving.intersection(source):
        machine.arriving.update(to)


def _regrouped(parts: Sequence[np.ndarray], bits: int) -> list[np.ndarray]:
    """The bits of several integers, the lowest first, as integers of another size."""
    return list(np.ascontiguousarray(np.stack(parts, axis=1).view(f"u{bits // 8}").T))
