# SPDX-License-Identifier: Apache-2.0
"""Quantized weights kept between uses of a layer, within contexts that promise that nobody changes the weight.

Generation runs a layer many times on one weight. A stale copy would be a silent error, and no test for change is both
safe and cheap: writes through ``.data`` and by fused optimizers change the bits without changing the version, sharded
engines refill a parameter's storage behind both, and a checksum of all bits costs a CPU more than to quantize again. So
outside of the contexts nothing is kept, and what was kept in one is gone at its end. A training pass quantizes a weight
once: its backward pass has the operand of its own forward pass ([`kept_for_backward`]).
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch


#: How [`cached_weights`] keeps the weights of trainable layers: ``"dense"`` in the dtype of products, ``"packed"`` as
#: codes and scale bytes, ``"auto"`` packed where a kernel computes on those, and dense elsewhere: beside the codes for
#: products of more rows than the kernel takes, as in rollouts of large batches.
WEIGHT_FORMS = ("auto", "dense", "packed")

#: Where a value is kept for one call of `generate`, without being asked to by [`cached_weights`].
_UNASKED = ("anywhere", "cpu", "nowhere")


class _Context:
    """One context that trusts weights.

    Attributes:
        form: one of `WEIGHT_FORMS`.
        asked: whether it is a [`cached_weights`] context, and not that of one call.
    """

    def __init__(self, form: str, asked: bool):
        self.form, self.asked = form, asked
        self._filled: weakref.WeakSet[WeightCache] = weakref.WeakSet()
        self._lock = threading.Lock()  # a [`cached_weights`] context is that of all threads

    def add(self, cache: "WeightCache") -> None:
        with self._lock:
            self._filled.add(cache)

    def end(self) -> None:
        """Let go what was kept."""
        with self._lock:
            for cache in list(self._filled):
                cache.forget(self)


#: The outermost [`cached_weights`] context in force.
_asked: _Context | None = None
#: Whether a [`uncached_weights`] context is in force.
_bypassed = False
#: Has the context of the call of `generate` that a thread is in.
_thread = threading.local()


def _in_force() -> _Context | None:
    return getattr(_thread, "context", None) or _asked


@contextlib.contextmanager
def cached_weights(form: str = "auto") -> Iterator[None]:
    """Within this context every quantized layer quantizes (or dequantizes) its weight at most once and trusts that
    nobody changes it; the copies are dropped at the end.

    For rollouts, evaluation and whatever else computes often on the same weights. One call of `generate` of a model
    that transformers loaded has such a context of its own, but for packed weights: their dequantized copies, which are
    larger than they, are kept within this context alone. It holds for all threads. Of nested contexts the outermost one
    decides, be it this one or [`uncached_weights`].

    Args:
        form: one of `WEIGHT_FORMS`. Linear layers alone can keep trainable weights packed, for products without
            gradients; see [`MXFP4Linear.rollout_form`].

    Raises:
        ValueError: another form.
    """
    global _asked
    if form not in WEIGHT_FORMS:
        raise ValueError(f"form={form!r} is not known; choose one of {', '.join(WEIGHT_FORMS)}")
    if _in_force() or _bypassed:
        yield
        return
    context = _asked = _Context(form, asked=True)
    try:
        yield
    finally:
        _asked = None
        context.end()


@contextlib.contextmanager
def cached_for_call() -> Iterator[None]:
    """[`cached_weights`] for what this thread does alone: others may train meanwhile, also another model. Copies that
    are larger than what they are computed from are not kept, see [`WeightCache`]."""
    if _in_force() or _bypassed:
        yield
        return
    context = _thread.context = _Context("auto", asked=False)
    try:
        yield
    finally:
        del _thread.context
        context.end()


@contextlib.contextmanager
def uncached_weights() -> Iterator[None]:
    """Within this context every quantized layer quantizes (or dequantizes) its weight at each use, and no copy outlives
    the use: the values of [`cached_weights`] in less memory and more time. For `generate` and for training, which keep
    copies otherwise."""
    global _bypassed
    if _in_force() or _bypassed:
        yield
        return
    _bypassed = True
    try:
        yield
    finally:
        _bypassed = False


def form_in_force() -> str | None:
    """The form that the [`cached_weights`] context in force asks for; `None` outside of any."""
    context = _in_force()
    return None if context is None else context.form


def copies_are_shared() -> bool:
    """Whether [`WeightCache.share`] is possible. Not for one call of `generate`: the CUDA graphs of one call would hold
    addresses that the next one has not."""
    context = _in_force()
    return context is not None and context.asked


def kept_for_backward(weight: torch.Tensor) -> bool:
    """Whether the backward pass of a layer gets what its forward pass has made of this weight.

    On the CPU, in a job of one process. Elsewhere, and within [`uncached_weights`], the backward pass quantizes the
    weight as it is then: kernels are fast there, and a copy of all weights between the passes is not worth its memory.
    """
    return weight.device.type == "cpu" and not _bypassed and not _distributed()


class WeightCache:
    """The quantized value of one weight, kept within a context that trusts the weight.

    Args:
        unasked: where one call of `generate` keeps it without being asked to: ``"anywhere"``, on a ``"cpu"``, or
            ``"nowhere"``, for a value larger than what it is computed from.

    Attributes:
        shared: the tensors of the value where compiled code may take them as inputs, which then does not ask for it:
            within a [`cached_weights`] context, from [`share`] on. `None` otherwise.
    """

    def __init__(self, unasked: str = "anywhere"):
        if unasked not in _UNASKED:
            raise ValueError(f"unasked={unasked!r} is not one of {', '.join(_UNASKED)}")
        self.unasked = unasked
        # Context, weight and value in one attribute: another thread finds all of them or none.
        self._kept: tuple[_Context, tuple, Any, int, tuple | None] | None = None
        self.shared: tuple[torch.Tensor | None, ...] | None = None

    @property
    def value(self) -> Any:
        """The kept value; `None` where there is none."""
        kept = self._kept
        return None if kept is None else kept[2]

    def get(self, weight: torch.Tensor, dtype: torch.dtype, compute: Callable[[], Any]) -> Any:
        """The kept value for this weight and dtype (uint8: packed), or a fresh one from ``compute``. A weight is known
        by identity and by its memory: compiled code passes on other objects."""
        context = _in_force()
        if context is None or _bypassed or not (context.asked or self._is_kept_unasked(weight)):
            return compute()
        key = weight.shape, weight.device, weight.dtype, dtype
        identity, memory = id(weight), _memory(weight)
        kept = self._kept
        if kept is not None and kept[0] is context and kept[1] == key:
            if kept[3] == identity or memory is not None and kept[4] == memory:
                return kept[2]
        value = compute()
        self._kept, self.shared = (context, key, value, identity, memory), None
        context.add(self)
        return value

    def _is_kept_unasked(self, weight: torch.Tensor) -> bool:
        return self.unasked == "anywhere" or self.unasked == weight.device.type

    def share(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        """Let compiled code take these tensors of the kept value while the context in force lasts. CUDA graphs read
        them where they are."""
        if not copies_are_shared():
            raise RuntimeError("tensors of a quantized weight can be shared within cached_weights() alone")
        for tensor in tensors:
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)
        self.shared = tensors

    def clear(self) -> None:
        """Forget the kept value and free its memory."""
        self._kept = self.shared = None

    def forget(self, context: _Context) -> None:
        """[`clear`], of a value that was kept within ``context``."""
        kept = self._kept
        if kept is not None and kept[0] is context:
            self.clear()

    def __reduce__(self):
        # A copied or unpickled layer starts with an empty cache.
        return WeightCache, (self.unasked,)


def _memory(weight: torch.Tensor) -> tuple | None:
    """Where a weight lies; `None` for tensors that have no memory of their own."""
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.data_ptr() == 0:
        return None
    return weight.data_ptr(), weight.stride()


def _distributed() -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
