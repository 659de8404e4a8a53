# SPDX-License-Identifier: Apache-2.0
"""Quantized weights kept between uses of a layer, for as long as the master weight has not changed.

Generation runs a layer many times on one weight. A stale copy would be a silent error, so outside of [`cached_weights`]
a kept value is used only in a single-process job, and only when the weight's identity, its autograd version and a
checksum of its bits all agree: writes through ``.data`` change the bits without changing the version, and sharded
engines refill a parameter's storage behind both.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch


#: Number of the outermost [`cached_weights`] context in force, 0 outside of any.
_frozen = 0
_contexts_entered = 0
#: Whether a [`uncached_weights`] context is in force.
_bypassed = False
_filled: "weakref.WeakSet[WeightCache]" = weakref.WeakSet()


@contextlib.contextmanager
def cached_weights() -> Iterator[None]:
    """Within this context every quantized layer quantizes its weight at most once and trusts that nobody changes it.

    For rollouts and evaluation. A value kept from before the context is checked at its first use. The context also
    makes caching available in distributed jobs, where the copies are dropped at its end, and for packed weights, whose
    dequantized copies are dropped at its end everywhere. Of nested contexts the outermost one decides, be it this one
    or [`uncached_weights`].
    """
    global _frozen, _contexts_entered
    if _frozen or _bypassed:
        yield
        return
    _contexts_entered += 1
    _frozen = _contexts_entered
    try:
        yield
    finally:
        _frozen = 0
        _forget(all_of_them=_distributed())


@contextlib.contextmanager
def uncached_weights() -> Iterator[None]:
    """Within this context every quantized layer quantizes (or dequantizes) its weight at each use, and no copy outlives
    the use: the values of [`cached_weights`] in less memory and more time. Copies from before the context are dropped.
    """
    global _bypassed
    if _frozen or _bypassed:
        yield
        return
    _forget(all_of_them=True)
    _bypassed = True
    try:
        yield
    finally:
        _bypassed = False


class WeightCache:
    """The last quantized value of one weight.

    Args:
        only_in_context: keep it within [`cached_weights`] alone: for a value larger than what it is computed from.
    """

    def __init__(self, only_in_context: bool = False):
        self.only_in_context = only_in_context
        self._key: tuple | None = None
        self._value: torch.Tensor | None = None
        # The context in which the value was found to be current, and the weight that it was found for.
        self._trusted: tuple | None = None

    def get(self, weight: torch.Tensor, dtype: torch.dtype, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The kept value for this weight and dtype, or a fresh one from ``compute``."""
        distributed = _distributed()
        if _bypassed or not _frozen and (distributed or self.only_in_context):
            return compute()
        identity = (_frozen, id(weight), weight.shape, weight.device, weight.dtype, dtype)
        if _frozen and self._value is not None and self._trusted == identity:
            return self._value
        # A sharded engine refills a weight's storage unseen: there, nothing older than the context counts.
        key = identity if distributed or self.only_in_context else (*identity[1:], *_state(weight))
        if self._value is None or self._key != key:
            self._value, self._key = compute(), key
            _filled.add(self)
        self._trusted = identity
        return self._value

    def clear(self) -> None:
        """Forget the kept value and free its memory."""
        self._key = self._value = self._trusted = None

    def __reduce__(self):
        # A copied or unpickled layer starts with an empty cache.
        return WeightCache, (self.only_in_context,)


def _state(weight: torch.Tensor) -> tuple:
    """What changes when the weight does."""
    if weight.is_meta:
        return ()
    return weight.data_ptr(), None if weight.is_inference() else weight._version, _checksum(weight)


def _checksum(weight: torch.Tensor) -> int:
    """Sum of the elements' bits, each times numbers that belong to its place along each axis, modulo 2**64."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[weight.element_size()]
    *outer, rows, columns = (_multipliers(size, weight.device) for size in weight.shape)
    matrices = weight.detach().view(bits).reshape(-1, *weight.shape[-2:]) if outer else (weight.detach().view(bits),)
    # One matrix at a time: int64 products take several times the memory of the weight.
    sums = torch.stack([((matrix * columns).sum(dim=1) * rows).sum() for matrix in matrices])
    for numbers in outer:
        sums = (sums.view(len(numbers), -1) * numbers[:, None]).sum(dim=0)
    return int(sums.sum())


def _multipliers(count: int, device: torch.device) -> torch.Tensor:
    """Scattered odd int64 numbers (the finalizer of the splitmix64 generator; products wrap around)."""
    x = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    return (x ^ (x >> 27)) | 1


def _distributed() -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _forget(all_of_them: bool) -> None:
    for cache in list(_filled):
        if all_of_them or cache.only_in_context:
            cache.clear()
            _filled.discard(cache)
