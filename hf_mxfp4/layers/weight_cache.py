# SPDX-License-Identifier: Apache-2.0
"""Quantized weights kept between uses of a layer, for as long as the master weight has not changed.

Generation runs a layer many times on one weight. A stale copy would be a silent error, so outside of [`cached_weights`]
a kept value is used only on the CPU of a single-process job, and only when the weight's identity, its autograd version
and a checksum of its bits all agree: writes through ``.data`` change the bits without changing the version, and sharded
engines refill a parameter's storage behind both. On a GPU the checksum would cost more than to quantize again, and make
the host wait.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch


#: How [`cached_weights`] keeps the weights of trainable layers: ``"dense"`` in the dtype of products, ``"packed"`` as
#: codes and scale bytes, ``"auto"`` packed where a kernel computes on those, and dense elsewhere: beside the codes for
#: products of more rows than the kernel takes, as in rollouts of large batches.
WEIGHT_FORMS = ("auto", "dense", "packed")

#: Number of the outermost [`cached_weights`] context in force, 0 outside of any.
_frozen = 0
_contexts_entered = 0
#: One of `WEIGHT_FORMS`, of the context in force.
_form = "auto"
#: Whether a [`uncached_weights`] context is in force.
_bypassed = False
_filled: "weakref.WeakSet[WeightCache]" = weakref.WeakSet()


@contextlib.contextmanager
def cached_weights(form: str = "auto") -> Iterator[None]:
    """Within this context every quantized layer quantizes its weight at most once and trusts that nobody changes it.

    For rollouts and evaluation. A value kept from before the context is checked at its first use. The context also
    makes caching available on GPUs and in distributed jobs, where the copies are dropped at its end, and for packed
    weights, whose dequantized copies are dropped at its end everywhere. Of nested contexts the outermost one decides,
    be it this one or [`uncached_weights`].

    Args:
        form: one of `WEIGHT_FORMS`. Linear layers alone can keep trainable weights packed, for products without
            gradients; see [`MXFP4Linear.rollout_form`].

    Raises:
        ValueError: another form.
    """
    global _frozen, _contexts_entered, _form
    if form not in WEIGHT_FORMS:
        raise ValueError(f"form={form!r} is not known; choose one of {', '.join(WEIGHT_FORMS)}")
    if _frozen or _bypassed:
        yield
        return
    _contexts_entered += 1
    _frozen, _form = _contexts_entered, form
    try:
        yield
    finally:
        _frozen = 0
        _forget(all_of_them=False)


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


def form_in_force() -> str | None:
    """The form that the [`cached_weights`] context in force asks for; `None` outside of any."""
    return _form if _frozen else None


class WeightCache:
    """The last quantized value of one weight.

    Args:
        only_in_context: keep it within [`cached_weights`] alone: for a value larger than what it is computed from.

    Attributes:
        shared: the tensors of the value where compiled code may take them as inputs, which then does not ask for it:
            within a [`cached_weights`] context, from [`share`] on. `None` otherwise.
    """

    def __init__(self, only_in_context: bool = False):
        self.only_in_context = only_in_context
        # Whether the value goes when the context ends.
        self._dropped = only_in_context
        self._key: tuple | None = None
        self._value: Any = None
        # The context in which the value was found to be current, and the weight that it was found for.
        self._trusted: tuple | None = None
        self.shared: tuple[torch.Tensor | None, ...] | None = None

    def get(self, weight: torch.Tensor, dtype: torch.dtype, compute: Callable[[], Any]) -> Any:
        """The kept value for this weight and dtype (uint8: packed), or a fresh one from ``compute``."""
        self._dropped = self.only_in_context or _distributed() or not _is_checked(weight)
        if _bypassed or not _frozen and self._dropped:
            return compute()
        identity = (_frozen, id(weight), weight.shape, weight.device, weight.dtype, dtype)
        if _frozen and self._value is not None and self._trusted == identity:
            return self._value
        # A sharded engine refills a weight's storage unseen: there, nothing older than the context counts.
        key = identity if self._dropped else (*identity[1:], *_state(weight))
        if self._value is None or self._key != key:
            self._value, self._key, self.shared = compute(), key, None
            _filled.add(self)
        self._trusted = identity
        return self._value

    def share(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        """Let compiled code take these tensors of the kept value while the context in force lasts. CUDA graphs read
        them where they are."""
        if not _frozen:
            raise RuntimeError("tensors of a quantized weight can be shared within cached_weights() alone")
        for tensor in tensors:
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)
        self.shared = tensors

    def clear(self) -> None:
        """Forget the kept value and free its memory."""
        self._key = self._value = self._trusted = self.shared = None

    def __reduce__(self):
        # A copied or unpickled layer starts with an empty cache.
        return WeightCache, (self.only_in_context,)


def _is_checked(weight: torch.Tensor) -> bool:
    """Whether a change of the weight is looked for, outside of contexts that promise there is none."""
    return weight.device.type in ("cpu", "meta")


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
        cache.shared = None
        if all_of_them or cache._dropped:
            cache.clear()
            _filled.discard(cache)
