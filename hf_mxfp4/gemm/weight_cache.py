# SPDX-License-Identifier: Apache-2.0
"""Quantized weights kept between uses of a layer, within contexts that promise that nobody changes the weight.

Generation runs a layer many times on one weight. A stale copy would be a silent error, and no test for change is both
safe and cheap: writes through ``.data`` and by fused optimizers change the bits without changing the version, sharded
engines refill a parameter's storage behind both, and a checksum of all bits costs a CPU more than to quantize again. So
outside of the contexts nothing is kept, and what was kept in one is gone at its end. A training pass quantizes a weight
once: its backward pass has the operand of its own forward pass ([`kept_for_backward`]).

A trainer has a context of its own, [`StepWeights`], from the rollout of an optimizer step to its last backward pass. It
keeps quantizations; what is made of those for one use (dense values of packed weights) belongs to the contexts inside.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook


#: How [`cached_weights`] keeps the weights of trainable layers: ``"dense"`` in the dtype of products, ``"packed"`` as
#: codes and scale bytes, ``"auto"`` packed where products are computed on those (on GPUs with Triton, on CPUs with a
#: compiler), and dense elsewhere: on GPUs beside the codes for products of more rows than the kernel takes, as in
#: rollouts of large batches.
WEIGHT_FORMS = ("auto", "dense", "packed")

#: Where a value is kept for one call of `generate`, without being asked to by [`cached_weights`].
_UNASKED = ("anywhere", "cpu", "nowhere")


class _Context:
    """One context that trusts weights.

    Attributes:
        form: one of `WEIGHT_FORMS`.
        asked: whether it is one of [`cached_weights`] or [`StepWeights`], and not that of one call.
        strict: whether a weight must be the very memory, unwritten as far as its version tells: weights that lie still
            between the optimizer's steps, and nothing that was computed from them.
    """

    def __init__(self, form: str, asked: bool, strict: bool = False):
        self.form, self.asked, self.strict = form, asked, strict
        self._filled: weakref.WeakSet[WeightCache] = weakref.WeakSet()
        self._shared: weakref.WeakSet[WeightCache] = weakref.WeakSet()
        self._lock = threading.Lock()  # a [`cached_weights`] context is that of all threads

    def add(self, cache: "WeightCache", shared: bool = False) -> None:
        with self._lock:
            (self._shared if shared else self._filled).add(cache)

    def end(self) -> None:
        """Let go what was kept."""
        with self._lock:
            for cache in list(self._filled):
                cache.forget(self)
            for cache in list(self._shared):
                cache.shared = None
            self._filled.clear()
            self._shared.clear()


#: The outermost [`cached_weights`] context in force.
_asked: _Context | None = None
#: That of the [`StepWeights`] in force.
_step: _Context | None = None
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
    larger than they, are kept within this context alone, and only where products take them (not on CPUs with a
    compiler). It holds for all threads. Of nested contexts the outermost one
    decides, be it this one or [`uncached_weights`].

    Args:
        form: one of `WEIGHT_FORMS`: what products without gradients of trainable weights compute with; see
            [`MXFP4Linear.rollout_form`].

    Raises:
        ValueError: another form.
    """
    global _asked
    _checked(form)
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
    the use: the values of [`cached_weights`] (of its packed copies to rounding) in less memory and more time. For
    `generate` and for training, which keep copies otherwise."""
    global _bypassed
    if _in_force() or _bypassed:
        yield
        return
    _bypassed = True
    try:
        yield
    finally:
        _bypassed = False


class StepWeights:
    """The quantizations of one optimizer step: each is made at its first use and kept until the weights change.

    In force within [`active`], for all threads; what was kept waits between such contexts, and is gone at [`end`], and
    when any optimizer of PyTorch begins a step, also inside of [`active`]. Whoever enters [`active`] promises that
    nothing else changes weights between there and [`end`]. Beyond that promise a kept quantization is taken for weights
    alone that lie in the same memory and that nothing has written but through ``.data``.

    Contexts of [`cached_weights`] inside say what products without gradients compute with, and keep what is made of a
    quantization for those; within [`uncached_weights`] nothing that is kept is used.

    Args:
        form: one of `WEIGHT_FORMS`. Dense are operands in the dtype of products, packed are codes and scale bytes, from
            which each use makes the operand anew, the same bits.

    Raises `ValueError` for another form.
    """

    def __init__(self, form: str = "auto"):
        self._form = _checked(form)
        self._context: _Context | None = None

    @property
    def is_open(self) -> bool:
        """Whether quantizations may be waiting."""
        return self._context is not None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within this context quantizations are kept and taken. One inside of another context does nothing."""
        global _step
        if _step or _in_force() or _bypassed:
            yield
            return
        if self._context is None:
            self._context = _Context(self._form, asked=True, strict=True)
            _watch_optimizers()
            _open.add(self)
        _step = self._context
        try:
            yield
        except BaseException:
            self.end()
            raise
        finally:
            _step = None

    def end(self) -> None:
        """Let go what was kept. To be called when weights have changed or are about to."""
        global _step
        context, self._context = self._context, None
        if context is None:
            return
        if _step is context:
            _step = None
        _open.discard(self)
        context.end()


#: Those that may keep something.
_open: "weakref.WeakSet[StepWeights]" = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Have the step of any optimizer end what is open, from now on."""

    def end_all(*_: Any) -> None:
        for weights in list(_open):
            weights.end()

    register_optimizer_step_pre_hook(end_all)


def _checked(form: str) -> str:
    if form not in WEIGHT_FORMS:
        raise ValueError(f"form={form!r} is not known; choose one of {', '.join(WEIGHT_FORMS)}")
    return form


def form_in_force() -> str | None:
    """The form that the [`cached_weights`] context in force asks for; `None` outside of any."""
    context = _in_force()
    return None if context is None else context.form


def step_form_in_force() -> str | None:
    """The form of the [`StepWeights`] in force; `None` outside of any, and within [`uncached_weights`]."""
    return None if _step is None or _bypassed else _step.form


def nothing_keeps_weights() -> bool:
    """Whether each use of a weight quantizes it: outside of all contexts that trust weights."""
    return not _bypassed and _step is None and _in_force() is None


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


def backward_pass() -> int | None:
    """The number of the backward pass that runs in this thread, in which gradient checkpointing repeats forward passes;
    `None` outside of any, and within [`uncached_weights`]."""
    number = torch._C._current_graph_task_id()
    return None if number < 0 or _bypassed else number


class _Kept(NamedTuple):
    """A value, the context that keeps it, and the weight that it was made of."""

    context: _Context
    key: tuple
    value: Any
    weight: weakref.ref
    memory: tuple | None
    storage: StorageWeakRef | None
    version: int | None

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether the value is that of ``weight``, which the context trusts."""
        same = self.weight() is weight
        if not self.context.strict:
            return same or self.memory is not None and self.memory == _memory(weight)
        if self.memory != _memory(weight) or self.version != _version(weight):
            return False
        # Memory that was freed may have been given to another tensor meanwhile.
        return same or self.storage is not None and self.storage == StorageWeakRef(weight.untyped_storage())


class WeightCache:
    """The quantized value of one weight, kept within a context that trusts the weight.

    Args:
        unasked: where one call of `generate` keeps it without being asked to: ``"anywhere"``, dense values on a
            ``"cpu"`` alone, or ``"nowhere"``, for a value larger than what it is computed from.

    Attributes:
        shared: the tensors of the value where compiled code may take them as inputs, which then does not ask for it:
            within a [`cached_weights`] context, from [`share`] on. `None` otherwise.
    """

    def __init__(self, unasked: str = "anywhere"):
        if unasked not in _UNASKED:
            raise ValueError(f"unasked={unasked!r} is not one of {', '.join(_UNASKED)}")
        self.unasked = unasked
        # All in one attribute: another thread finds all of it or none.
        self._kept: _Kept | None = None
        self.shared: tuple[torch.Tensor | None, ...] | None = None

    @property
    def value(self) -> Any:
        """The kept value; `None` where there is none."""
        kept = self._kept
        return None if kept is None else kept.value

    def get(
        self, weight: torch.Tensor, dtype: torch.dtype, compute: Callable[[], Any], of_step: bool | None = None
    ) -> Any:
        """The kept value for this weight and dtype (uint8: packed), or a fresh one from ``compute``. A weight is known
        by identity and by its memory: compiled code passes on other objects.

        Args:
            of_step: whether a [`StepWeights`] keeps it; by default where it is not larger than what it is made of.
        """
        context = self._keeper(weight, dtype, of_step)
        if context is None:
            return compute()
        value = self._find(context, weight, dtype)
        if value is None:
            value = compute()
            storage = StorageWeakRef(weight.untyped_storage()) if context.strict and _memory(weight) else None
            of = weakref.ref(weight), _memory(weight), storage, _version(weight)
            self._kept, self.shared = _Kept(context, _key(weight, dtype), value, *of), None
            context.add(self)
        return value

    def find(self, weight: torch.Tensor, dtype: torch.dtype) -> Any:
        """What [`get`] would give without computing it; `None` where there is nothing."""
        context = self._keeper(weight, dtype)
        return None if context is None else self._find(context, weight, dtype)

    def _find(self, context: _Context, weight: torch.Tensor, dtype: torch.dtype) -> Any:
        kept = self._kept
        if kept is None or kept.context is not context or kept.key != _key(weight, dtype) or not kept.is_of(weight):
            return None
        return kept.value

    def _keeper(self, weight: torch.Tensor, dtype: torch.dtype, of_step: bool | None = None) -> _Context | None:
        """The context that keeps the value of a weight, if any."""
        if _bypassed:
            return None
        if _step is not None and (self.unasked != "nowhere" if of_step is None else of_step):
            # What was computed from a weight, with an adapter's part, is another tensor in each pass.
            return _step if weight.is_leaf else None
        context = _in_force()
        if context is None or not (context.asked or self._is_kept_unasked(weight, dtype)):
            return None
        return context

    def _is_kept_unasked(self, weight: torch.Tensor, dtype: torch.dtype) -> bool:
        if self.unasked == "cpu":
            return weight.device.type == "cpu" or dtype == torch.uint8
        return self.unasked == "anywhere"

    def share(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        """Let compiled code take these tensors of the kept value while the context in force lasts. CUDA graphs read
        them where they are."""
        if not copies_are_shared():
            raise RuntimeError("tensors of a quantized weight can be shared within cached_weights() alone")
        for tensor in tensors:
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)
        self.shared = tensors
        _in_force().add(self, shared=True)

    def clear(self) -> None:
        """Forget the kept value and free its memory."""
        self._kept = self.shared = None

    def forget(self, context: _Context) -> None:
        """[`clear`], of a value that was kept within ``context``."""
        kept = self._kept
        if kept is not None and kept.context is context:
            self.clear()

    def __reduce__(self):
        # A copied or unpickled layer starts with an empty cache.
        return WeightCache, (self.unasked,)


def _key(weight: torch.Tensor, dtype: torch.dtype) -> tuple:
    return weight.shape, weight.device, weight.dtype, dtype


def _memory(weight: torch.Tensor) -> tuple | None:
    """Where a weight lies; `None` for tensors that have no memory of their own."""
    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.data_ptr() == 0:
        return None
    return weight.data_ptr(), weight.stride()


def _version(weight: torch.Tensor) -> int | None:
    """How often a weight was written, but through ``.data`` and the like; `None` of one that does not count."""
    return None if weight.is_inference() else weight._version


def _distributed() -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
