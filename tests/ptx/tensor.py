# SPDX-License-Identifier: Apache-2.0
"""Tensor memory of sm_100, products that read and write it, and the barriers in shared memory that tell when these are
done. Products run where they are issued; until somebody waited for a barrier at which they were committed, nothing else
may write what they read, or have to do with what they wrote."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .arithmetic import of_bits16
from .memory import Fault
from .warps import described_matrix


_COLUMNS = 512
#: Of 64 rows of a matrix, the lanes behind the first: each warp has 16 of its 32.
_LANES = (np.arange(64) // 16 * 32 + np.arange(64) % 16)[:, None]
#: Descriptor of a product of 64 rows of bfloat16 into float32, K in neighbours, but for the number of columns.
_PRODUCT = 64 // 16 << 24 | 1 << 10 | 1 << 7 | 1 << 4
#: Whom `elect` chooses is not specified.
_ELECTED = 7


class TensorMemory:
    """Words ``[128 lanes, 512 columns]`` of a program. Of each: whether it was written, the warp that wrote it since
    the last barrier plus one, and the last product that has to do with it, and that nobody waited for."""

    def __init__(self):
        self._data = np.zeros((128, _COLUMNS), np.uint32)
        self._is_set, self._is_coming = np.zeros((2, 128, _COLUMNS), bool)
        self.taken = np.zeros((128, _COLUMNS), np.int32)
        self._writer = np.zeros((128, _COLUMNS), np.int8)
        self._columns = range(0)

    def allocate(self, count: int) -> int:
        """Return the first of so many columns: not 0, which no kernel may count on."""
        if self._columns or count not in (32, 64, 128, 256, 512):
            raise Fault(f"{count} columns of tensor memory, with {len(self._columns)} before")
        self._columns = range(_COLUMNS - count, _COLUMNS)
        return self._columns.start

    def free(self, first: int, count: int) -> None:
        if self._columns != range(first, first + count):
            raise Fault(f"{count} columns of tensor memory from {first} on were not allocated")
        self._columns = range(0)

    def require_free(self) -> None:
        """At the end of a program."""
        if self._columns:
            raise Fault("tensor memory was not given back")

    def barrier(self) -> None:
        """All warps see what all wrote."""
        self._writer.fill(0)

    def places(self, lanes: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Indices of words of which the columns were allocated."""
        for column in (columns.min(), columns.max()):
            if column not in self._columns:
                raise Fault(f"column {column} of tensor memory, of {self._columns}")
        return lanes, columns

    def read(self, places: tuple, warps: np.ndarray | int, product: int = 0) -> np.ndarray:
        """Words for warps, or for a product that a warp issued."""
        self._take(places, product)
        if not self._is_set[places].all():
            raise Fault("tensor memory was not written, or is on its way")
        writer = self._writer[places]
        if ((writer != 0) & (writer != warps + 1)).any():
            raise Fault("a race: reads tensor memory that another warp wrote since the last barrier")
        return self._data[places]

    def write(self, places: tuple, words: np.ndarray, warps: np.ndarray | int, product: int = 0) -> None:
        """Words of warps, which are on their way, or of a product."""
        self._take(places, product)
        self._data[places], self._is_set[places], self._is_coming[places] = words, product > 0, product == 0
        self._writer[places] = 0 if product else warps + 1

    def arrive(self) -> None:
        """What was on its way is there."""
        self._is_set |= self._is_coming
        self._is_coming.fill(False)

    def _take(self, places: tuple, product: int) -> None:
        """Products wait for each other."""
        if product:
            self.taken[places] = product
        elif self.taken[places].any():
            raise Fault("a race: tensor memory of a product that nobody waited for")


@dataclass
class Barrier:
    """An ``mbarrier``: arrivals of a phase and those still missing, phases that are over, and the last product before
    the last arrival."""

    count: int
    missing: int
    phases: int = 0
    product: int = 0


# ---- instructions ---------------------------------------------------------------------------------------------------


def _allocate(found, operands, reader, writer, address):
    at, count = address(operands[0]), int(operands[1])

    def step(machine, group) -> None:
        machine.require_warps(group)
        first = np.array([[machine.tensor.allocate(count)]], np.uint32)
        machine.shared.write(at(machine, group)[:1], first.view(np.uint8), group[:1])

    return step


def _free(found, operands, reader, writer, address):
    first, count = reader(operands[0], "u32"), int(operands[1])

    def step(machine, group) -> None:
        machine.require_warps(group)
        machine.tensor.free(int(first(machine, group)[group[0]]), count)

    return step


def _moved(found, operand: str, split: str, address) -> Callable:
    """Words ``[threads, count]`` that a group moves: half of a warp those of 16 lanes, the other half those of the same
    lanes, ``split`` columns on."""
    at, columns = address(operand), np.arange(int(found.group(1)))

    def places(machine, group) -> tuple:
        machine.require_all(group)
        (lane, column), (warp, thread) = np.divmod(at(machine, group), 1 << 16), np.divmod(group, 32)
        if (lane // 32 != warp % 4).any() or (lane % 16).any():
            raise Fault("lanes of tensor memory that another warp has")
        return machine.tensor.places(
            (lane + thread % 16)[:, None], (column + thread // 16 * int(split))[:, None] + columns
        )

    return places


def _load(found, operands, reader, writer, address):
    writers, moved = [writer(name) for name in operands[0]], _moved(found, *operands[1:], address)

    def step(machine, group) -> None:
        words = np.zeros((len(writers), len(machine.threads)), np.uint32)
        words[:, group] = machine.tensor.read(moved(machine, group), group[:, None] // 32).T
        machine.unset_sources = np.full(len(machine.threads), 255, np.uint8)
        machine.arriving.update(operands[0])
        for write, values in zip(writers, words, strict=True):
            write(machine, values, group)

    return step


def _store(found, operands, reader, writer, address):
    readers, moved = [reader(name, "b32") for name in operands[2]], _moved(found, *operands[:2], address)

    def step(machine, group) -> None:
        words = np.stack([read(machine, group)[group] for read in readers], axis=1)
        machine.tensor.write(moved(machine, group), words, group[:, None] // 32)

    return step


def _wait(found, operands, reader, writer, address):
    def step(machine, group) -> None:
        machine.require_all(group)
        if found.group(1) == "ld":
            machine.arrive()
        else:
            machine.tensor.arrive()

    return step


def _multiply(found, operands, reader, writer, address):
    """Sums in float64, rounded once, of a left operand in tensor memory and a right one in shared memory."""
    to, left = address(operands[0]), address(operands[1])
    right, kind, keeps = reader(operands[2], "u64"), reader(operands[3], "u32"), reader(operands[4], "pred")

    def step(machine, group) -> None:
        (lane, column), (left_lane, left_column) = (divmod(int(at(machine, group)[0]), 1 << 16) for at in (to, left))
        thread, described = group[0], int(kind(machine, group)[group[0]])
        count = 8 * (described >> 17 & 63)
        if len(group) > 1 or described != _PRODUCT | count // 8 << 17 or lane not in (0, 16) or lane != left_lane:
            raise Fault("a product that is not supported")
        machine.issued += 1
        tensor, by = machine.tensor, (thread // 32, machine.issued)
        halves = tensor.read(tensor.places(lane + _LANES, left_column + np.arange(8)), *by).view(np.uint16)
        sums = of_bits16(halves, "bf16") @ described_matrix(machine, int(right(machine, group)[thread]), count).T
        places = tensor.places(lane + _LANES, column + np.arange(count))
        if keeps(machine, group)[thread]:
            sums += tensor.read(places, *by).view(np.float32)
        tensor.write(places, sums.astype(np.float32).view(np.uint32), *by)

    return step


def _elect(found, operands, reader, writer, address):
    lane, chosen = map(writer, operands[0].split("|"))

    def step(machine, group) -> None:
        machine.require_warps(group)
        lane(machine, np.full(len(machine.threads), _ELECTED, np.uint32), group)
        chosen(machine, machine.threads % 32 == _ELECTED, group)

    return step


def _make_barrier(found, operands, reader, writer, address):
    at, count = address(operands[0]), int(operands[1])

    def step(machine, group) -> None:
        machine.shared.write(at(machine, group), np.zeros((len(group), 8), np.uint8), group)
        machine.barriers[int(at(machine, group)[0])] = Barrier(count, count)

    return step


def _end_barrier(found, operands, reader, writer, address):
    at = address(operands[0])

    def step(machine, group) -> None:
        machine.shared.write(at(machine, group), np.zeros((len(group), 8), np.uint8), group, is_set=False)
        del machine.barriers[int(at(machine, group)[0])]

    return step


def _commit(found, operands, reader, writer, address):
    at = address(operands[0])

    def step(machine, group) -> None:
        for place in at(machine, group):
            barrier = machine.barrier_at(int(place))
            barrier.missing, barrier.product = barrier.missing - 1, machine.issued
            if barrier.missing == 0:
                barrier.missing, barrier.phases = barrier.count, barrier.phases + 1

    return step


def _try_wait(found, operands, reader, writer, address):
    write, at, parity = writer(operands[0]), address(operands[1]), reader(operands[2], "u32")

    def step(machine, group) -> None:
        machine.shared.read(at(machine, group), 8, group)
        done, barrier = np.zeros(len(machine.threads), bool), machine.barrier_at(int(at(machine, group)[0]))
        done[group] = parity(machine, group)[group] % 2 != barrier.phases % 2
        if done[group].all():
            machine.finish(barrier.product)
        write(machine, done, group)

    return step


def _permit(found, operands, reader, writer, address):
    return lambda machine, group: machine.require_warps(group)


TENSOR = {
    r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32": _allocate,
    r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned": _permit,
    r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32": _free,
    r"tcgen05\.ld\.sync\.aligned\.16x32bx2\.x(\d+)\.b32": _load,
    r"tcgen05\.st\.sync\.aligned\.16x32bx2\.x(\d+)\.b32": _store,
    r"tcgen05\.wait::(ld|st)\.sync\.aligned": _wait,
    r"tcgen05\.mma\.cta_group::1\.kind::f16": _multiply,
    r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one\.shared::cluster\.b64": _commit,
    r"elect\.sync": _elect,
    r"mbarrier\.init\.shared::cta\.b64": _make_barrier,
    r"mbarrier\.inval\.shared::cta\.b64": _end_barrier,
    r"mbarrier\.try_wait\.parity\.shared::cta\.b64": _try_wait,
}
