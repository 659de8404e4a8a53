# SPDX-License-Identifier: Apache-2.0
"""Tensor memory of sm_100, products that read and write it, and the barriers in shared memory that tell when these are
done. Products run where they are issued; until somebody waited for a barrier at which they were committed, nothing else
may write what they read, or have to do with what they wrote."""

from dataclasses import dataclass

import numpy as np

from .instructions import described_matrix
from .memory import Fault, SharedMemory
from .semantics import of_bits16


#: Of 64 rows of a matrix, the lanes behind the first: each warp has 16 of its 32.
_LANES = (np.arange(64) // 16 * 32 + np.arange(64) % 16)[:, None]
#: Descriptor of a product of 64 rows of bfloat16 into float32, K in neighbours, but for the number of columns.
_PRODUCT = 64 // 16 << 24 | 1 << 10 | 1 << 7 | 1 << 4
#: Whom `elect` chooses is not specified.
_ELECTED = 7


class TensorMemory(SharedMemory):
    """The columns of tensor memory that a program has: 32-bit words of 128 lanes, one lane after the other.

    Attributes:
        stores: those on their way.
    """

    def __init__(self, columns: int = 0):
        super().__init__(4 * 128 * columns)
        # Not from 0 on, which no kernel may count on.
        self.columns = range(512 - columns, 512)
        self.stores: list[tuple] = []

    def addresses(self, lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Places of words, in bytes."""
        for column in (columns.min(), columns.max()):
            if column not in self.columns:
                raise Fault(f"column {column} of tensor memory, of {self.columns}")
        return (4 * (lanes * len(self.columns) + columns - self.columns.start)).reshape(-1)

    def read(self, addresses: np.ndarray, width: int, threads: np.ndarray) -> np.ndarray:
        if self.taken[addresses].any():
            raise Fault("a race: reads what a product wrote that nobody waited for")
        return super().read(addresses, width, threads)

    def write_by_product(self, addresses: np.ndarray, values: np.ndarray, product: int) -> None:
        places = self._places(addresses, values.shape[1])
        self.data[places], self.taken[places] = values, product
        self.is_set[places], self.is_fenced[places] = True, True

    def arrive(self) -> None:
        """What was stored is there."""
        for store in self.stores:
            self.write(*store)
        self.stores = []
        self.is_fenced.fill(True)


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
    if machine.tensor.columns or int(count) not in (32, 64, 128, 256, 512):
        raise Fault(f"with {len(machine.tensor.columns)} columns of tensor memory before")
    machine.tensor = TensorMemory(int(count))
    first = np.array([[machine.tensor.columns.start]], np.uint32)
    machine.shared.write(machine.addresses(to)[:1], first.view(np.uint8), machine.group[:1])


def _free(machine, found, first, count) -> None:
    machine.require_warps()
    start = int(machine.get("u32", first)[machine.group[0]])
    if machine.tensor.columns != range(start, start + int(count)):
        raise Fault(f"columns of tensor memory from {start} on were not allocated")
    machine.tensor = TensorMemory()


def _moved(machine, operand: str, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Addresses and threads of the words ``[threads, count]`` that a group moves: half of a warp those of 16 lanes, the
    other half those of the same lanes, ``split`` columns on."""
    machine.require_all()
    (lane, column), (warp, thread) = np.divmod(machine.addresses(operand), 1 << 16), np.divmod(machine.group, 32)
    if (lane // 32 != warp % 4).any() or (lane % 16).any():
        raise Fault("lanes of tensor memory that another warp has")
    columns = (column + thread // 16 * int(split))[:, None] + np.arange(count)
    return machine.tensor.addresses((lane + thread % 16)[:, None], columns), np.repeat(machine.group, count)


def _load(machine, found, to, source, split) -> None:
    addresses, threads = _moved(machine, source, split, len(to))
    words = np.zeros((len(to), len(machine.threads)), np.uint32)
    words[:, machine.group] = machine.tensor.read(addresses, 4, threads).view(np.uint32).reshape(-1, len(to)).T
    for name, values in zip(to, words, strict=True):
        machine.put(name, values, ~np.zeros_like(values))
    machine.arriving.update(to)


def _store(machine, found, to, split, source) -> None:
    words = np.stack([machine.get("b32", name)[machine.group] for name in source], axis=1)
    addresses, threads = _moved(machine, to, split, len(source))
    store = addresses, words.reshape(-1, 1).view(np.uint8), threads
    machine.tensor.write(*store, is_set=False)
    machine.tensor.stores.append(store)


def _wait(machine, found) -> None:
    machine.require_all()
    (machine if found[1] == "ld" else machine.tensor).arrive()


def _multiply(machine, found, to, left, right, kind, keeps) -> None:
    """Sums in float64, rounded once, of a left operand in tensor memory and a right one in shared memory."""
    (lane, column), (left_lane, left_column) = (divmod(int(machine.addresses(at)[0]), 1 << 16) for at in (to, left))
    thread = machine.group[0]
    descriptor, kind = int(machine.get("u64", right)[thread]), int(machine.get("u32", kind)[thread])
    count = 8 * (kind >> 17 & 63)
    if len(machine.group) > 1 or kind != _PRODUCT | count // 8 << 17 or lane not in (0, 16) or lane != left_lane:
        raise Fault("a product that is not supported")
    machine.issued += 1
    places = machine.tensor.addresses(lane + _LANES, left_column + np.arange(8))
    halves = machine.tensor.read_by_product(places, 4, machine.issued).view(np.uint16).reshape(64, 16)
    sums = of_bits16(halves, "bf16") @ described_matrix(machine, descriptor, count).T
    places = machine.tensor.addresses(lane + _LANES, column + np.arange(count))
    if machine.get("pred", keeps)[thread]:
        sums += machine.tensor.read_by_product(places, 4, machine.issued).view(np.float32).reshape(sums.shape)
    machine.tensor.write_by_product(places, sums.astype(np.float32).reshape(-1, 1).view(np.uint8), machine.issued)


def _elect(machine, found, to, threads) -> None:
    machine.require_warps()
    lane, chosen = to.split("|")
    machine.put(lane, np.full(len(machine.threads), _ELECTED, np.uint32))
    machine.put(chosen, machine.threads % 32 == _ELECTED)


def _change_barrier(machine, found, where, count="0") -> None:
    is_made, addresses = found[1] == "init", machine.addresses(where)
    machine.shared.write(addresses, np.zeros((len(addresses), 8), np.uint8), machine.group, is_set=is_made)
    machine.barriers[int(addresses[0])] = Barrier(int(count), int(count)) if is_made else None


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
    r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32": _free,
    r"tcgen05\.ld\.sync\.aligned\.16x32bx2\.x\d+\.b32": _load,
    r"tcgen05\.st\.sync\.aligned\.16x32bx2\.x\d+\.b32": _store,
    r"tcgen05\.wait::(ld|st)\.sync\.aligned": _wait,
    r"tcgen05\.mma\.cta_group::1\.kind::f16": _multiply,
    r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one\.shared::cluster\.b64": _commit,
    r"elect\.sync": _elect,
    r"mbarrier\.(init|inval)\.shared::cta\.b64": _change_barrier,
    r"mbarrier\.try_wait\.parity\.shared::cta\.b64": _try_wait,
}
