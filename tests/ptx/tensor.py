# SPDX-License-Identifier: Apache-2.0
"""Tensor memory of sm_100, products that read and write it, and the barriers in shared memory that tell when these are
done. Products run where they are issued; until somebody waited for a barrier at which they were committed, nothing else
may write what they read, or have to do with what they wrote."""

from dataclasses import dataclass

import numpy as np

from .instructions import described_matrix
from .memory import Fault
from .semantics import of_bits16


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


def _allocate(machine, found, to, count) -> None:
    machine.require_warps()
    first = np.array([[machine.tensor.allocate(int(count))]], np.uint32)
    machine.shared.write(machine.addresses(to)[:1], first.view(np.uint8), machine.group[:1])


def _free(machine, found, first, count) -> None:
    machine.require_warps()
    machine.tensor.free(int(machine.get("u32", first)[machine.group[0]]), int(count))


def _permit(machine, found) -> None:
    machine.require_warps()


def _moved(machine, operand: str, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Words ``[threads, count]`` that a group moves: half of a warp those of 16 lanes, the other half those of the same
    lanes, ``split`` columns on."""
    machine.require_all()
    (lane, column), (warp, thread) = np.divmod(machine.addresses(operand), 1 << 16), np.divmod(machine.group, 32)
    if (lane // 32 != warp % 4).any() or (lane % 16).any():
        raise Fault("lanes of tensor memory that another warp has")
    first = (column + thread // 16 * int(split))[:, None]
    return machine.tensor.places((lane + thread % 16)[:, None], first + np.arange(count))


def _load(machine, found, to, source, split) -> None:
    words = np.zeros((len(to), len(machine.threads)), np.uint32)
    places = _moved(machine, source, split, len(to))
    words[:, machine.group] = machine.tensor.read(places, machine.group[:, None] // 32).T
    for name, values in zip(to, words, strict=True):
        machine.put(name, values, ~np.zeros_like(values))
    machine.arriving.update(to)


def _store(machine, found, to, split, source) -> None:
    words = np.stack([machine.get("b32", name)[machine.group] for name in source], axis=1)
    machine.tensor.write(_moved(machine, to, split, len(source)), words, machine.group[:, None] // 32)


def _wait(machine, found) -> None:
    machine.require_all()
    if found[1] == "ld":
        machine.arrive()
    else:
        machine.tensor.arrive()


def _multiply(machine, found, to, left, right, kind, keeps) -> None:
    """Sums in float64, rounded once, of a left operand in tensor memory and a right one in shared memory."""
    (lane, column), (left_lane, left_column) = (divmod(int(machine.addresses(at)[0]), 1 << 16) for at in (to, left))
    thread = machine.group[0]
    descriptor, kind = int(machine.get("u64", right)[thread]), int(machine.get("u32", kind)[thread])
    count = 8 * (kind >> 17 & 63)
    if len(machine.group) > 1 or kind != _PRODUCT | count // 8 << 17 or lane not in (0, 16) or lane != left_lane:
        raise Fault("a product that is not supported")
    machine.issued += 1
    tensor, by = machine.tensor, (thread // 32, machine.issued)
    halves = tensor.read(tensor.places(lane + _LANES, left_column + np.arange(8)), *by).view(np.uint16)
    sums = of_bits16(halves, "bf16") @ described_matrix(machine, descriptor, count).T
    places = tensor.places(lane + _LANES, column + np.arange(count))
    if machine.get("pred", keeps)[thread]:
        sums += tensor.read(places, *by).view(np.float32)
    tensor.write(places, sums.astype(np.float32).view(np.uint32), *by)


def _elect(machine, found, to, threads) -> None:
    machine.require_warps()
    lane, chosen = to.split("|")
    machine.put(lane, np.full(len(machine.threads), _ELECTED, np.uint32))
    machine.put(chosen, machine.threads % 32 == _ELECTED)


def _make_barrier(machine, found, where, count) -> None:
    _write_barrier(machine, where, True)
    machine.barriers[int(machine.addresses(where)[0])] = Barrier(int(count), int(count))


def _end_barrier(machine, found, where) -> None:
    _write_barrier(machine, where, False)
    del machine.barriers[int(machine.addresses(where)[0])]


def _write_barrier(machine, where: str, is_set: bool) -> None:
    nothing = np.zeros((len(machine.group), 8), np.uint8)
    machine.shared.write(machine.addresses(where), nothing, machine.group, is_set)


def _commit(machine, found, where) -> None:
    for address in machine.addresses(where):
        barrier = machine.barrier_at(int(address))
        barrier.missing, barrier.product = barrier.missing - 1, machine.issued
        if barrier.missing == 0:
            barrier.missing, barrier.phases = barrier.count, barrier.phases + 1


def _try_wait(machine, found, to, where, parity) -> None:
    machine.shared.read(machine.addresses(where), 8, machine.group)
    barrier = machine.barrier_at(int(machine.addresses(where)[0]))
    done = machine.get("u32", parity) % 2 != barrier.phases % 2
    if done[machine.group].all():
        machine.finish(barrier.product)
    machine.put(to, done)


TENSOR = {
    r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32": _allocate,
    r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned": _permit,
    r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32": _free,
    r"tcgen05\.ld\.sync\.aligned\.16x32bx2\.x\d+\.b32": _load,
    r"tcgen05\.st\.sync\.aligned\.16x32bx2\.x\d+\.b32": _store,
    r"tcgen05\.wait::(ld|st)\.sync\.aligned": _wait,
    r"tcgen05\.mma\.cta_group::1\.kind::f16": _multiply,
    r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one\.shared::cluster\.b64": _commit,
    r"elect\.sync": _elect,
    r"mbarrier\.init\.shared::cta\.b64": _make_barrier,
    r"mbarrier\.inval\.shared::cta\.b64": _end_barrier,
    r"mbarrier\.try_wait\.parity\.shared::cta\.b64": _try_wait,
}
