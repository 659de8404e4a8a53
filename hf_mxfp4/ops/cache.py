# SPDX-License-Identifier: Apache-2.0
"""Quantized weights, kept while somebody promises that the weights do not change."""

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..numerics import MXFP4Tensor
from .quantization import is_captured
from .state import GemmState


#: What a [`WeightCache`] keeps of trainable weights: ``"dense"`` values in the dtype of products, ``"packed"`` codes
#: and scale bytes, from which each product in a wider dtype makes its values again, ``"auto"`` codes where products
#: without gradients are computed on those (on GPUs with Triton, on CPUs with a compiler), and values where they are not
#: and on CPUs, ``"none"`` nothing.
WEIGHT_FORMS = ("auto", "dense", "packed", "none")


class WeightCache:
    """What products make of the weights of some models, made once and kept until [`clear`].

    Outside of [`open`] every product quantizes its weight. Whoever opens a cache promises that nothing writes the
    weights until it is cleared: the trainer for an optimizer step, `generate` for a call, [`cached_weights`] for a
    block. Writes that PyTorch counts, and tensors in other memory, are noticed all the same; those through ``.data``
    and by fused optimizers are not.

    The memory is kept when the cache is cleared: the next step's values of a weight are written to where those of the
    last step were. [`release`] gives it back. A CUDA graph that is captured leaves nothing here, since what it makes is
    filled when it is replayed. It reads what is kept only within [`serving_graphs`], as that may be gone by then.

    Args:
        models: whose layers look here. A cache that another one is open for already keeps nothing: the first decides.
        form: one of `WEIGHT_FORMS`.

    Raises `ValueError` for another form.
    """

    def __init__(self, *models: nn.Module, form: str = "auto"):
        if form not in WEIGHT_FORMS:
            raise ValueError(f"form={form!r} is not known; choose one of {', '.join(WEIGHT_FORMS)}")
        self.form = form
        self._states = [state for model in models for state in gemm_states(model)]
        self._entries: dict[Hashable, _Entry] = {}
        self._serves_graphs = False
        #: What graphs read, by key: the weight, what makes the value of it, and the value.
        self._in_graphs: dict[Hashable, tuple[torch.Tensor, Callable[[Any], Any], Any]] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Let products of the models' layers, in all threads, use what is kept, and add to it. Errors clear it."""
        opened = [state for state in self._states if state.cache is None]
        for state in opened:
            state.cache = self
        try:
            yield
        except BaseException:
            self.clear()
            raise
        finally:
            for state in opened:
                state.cache = None

    @contextlib.contextmanager
    def serving_graphs(self) -> Iterator[None]:
        """Let CUDA graphs that are captured within this context read what is kept, in place of quantizing weights in
        each replay. Whoever replays them promises to call [`refresh`] once weights have changed, and not to replay them
        after [`release`]. What depends on the optimizer step is not served: it is drawn again in each step."""
        self._serves_graphs = True
        try:
            yield
        finally:
            self._serves_graphs = False

    def refresh(self) -> bool:
        """Make again what graphs read and what is stale by now, in its memory. To be called while the cache is open.

        Return whether the graphs may be replayed. They may not where a value has moved: that of a weight in other
        memory, or one of another kind.
        """
        for key, (weight, make, captured) in list(self._in_graphs.items()):
            if self.get(weight, key, make) is not captured:
                self._in_graphs.clear()
                return False
        return True

    def clear(self) -> None:
        """Use nothing that is kept any more. To be called when weights have changed or are about to."""
        for entry in self._entries.values():
            entry.version = None

    def release(self) -> None:
        """Give back the memory of what is kept, at the end of the work that the cache was made for."""
        self._entries.clear()
        self._in_graphs.clear()

    def find(self, weight: torch.Tensor, key: Hashable, step: int | None = None) -> Any:
        """Return what is kept for this weight, key and step, or `None`."""
        entry = self._entries.get(key)
        if entry is None or entry.version is None or entry.version != _version(weight, step):
            return None
        is_served = self._serves_graphs and step is None
        if is_captured(weight) and not is_served or not entry.is_of(weight):
            return None
        return entry.value

    def get(self, weight: torch.Tensor, key: Hashable, make: Callable[[Any], Any], step: int | None = None) -> Any:
        """Return what is kept for this weight and key, or make it.

        Of a tensor that was computed from a weight, as with an adapter's part, nothing is kept: it is another one in
        each pass.

        Args:
            weight: the weight.
            key: what is made of it, and for which layer.
            make: makes it. It is given what was made for this weight before, to be written to and returned, or `None`.
                It may return something else, which is copied to there.
            step: the optimizer step, if it depends on that.
        """
        value = self.find(weight, key, step)
        if value is not None:
            if is_captured(weight):
                self._in_graphs[key] = (weight, make, value)
            return value
        is_kept = weight.is_leaf and not is_captured(weight)
        entry = self._entries.get(key) if is_kept else None
        stale = entry.value if entry is not None and entry.is_of(weight) else None
        with torch.inference_mode(False), torch.no_grad():  # a backward pass may need later what is kept
            value = make(stale)
            if stale is not None and value is not stale:
                value = _written_to(stale, value)
        if is_kept:
            self._entries[key] = _Entry(weight, value, step)
        return value


class _Entry:
    """A value, and the weight that it was made of: compiled code and engines that shard weights pass the same memory in
    other objects, or the same object in memory that was freed and reserved again.

    Attributes:
        value: what is kept.
        place: the memory of the weight, and its layout there.
        version: of the values there, and the optimizer step; `None` where the value is stale.
    """

    def __init__(self, weight: torch.Tensor, value: Any, step: int | None):
        self.value = value
        self.place = _place(weight)
        self.version: tuple | None = _version(weight, step)
        # Of its memory, which gives no other memory its number as long as this lives; of a tensor without memory,
        # itself.
        if self.place[0] is None:
            self._owner: StorageWeakRef | weakref.ref = weakref.ref(weight)
        else:
            self._owner = StorageWeakRef(weight.untyped_storage())

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether the value was made of this weight, perhaps of other values of it."""
        return self.place == _place(weight) and (self.place[0] is not None or self._owner() is weight)


def _place(weight: torch.Tensor) -> tuple:
    has_memory = type(weight) in (torch.Tensor, nn.Parameter) and not weight.is_meta
    memory = weight.untyped_storage()._cdata if has_memory else None
    return memory, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype


def _version(weight: torch.Tensor, step: int | None) -> tuple:
    """Return what changes when PyTorch notices a write to a weight, and the optimizer step."""
    writes = None if weight.is_inference() else weight._version
    return writes, step


def _written_to(stale: Any, value: Any) -> Any:
    """Return a value in the memory of another one, of the same kind; the value itself where that has other shapes."""
    old = _tensors(stale)
    new = _tensors(value)
    if len(old) != len(new):
        return value
    for target, source in zip(old, new, strict=True):
        if (target is None) != (source is None):
            return value
        if target is not None and (target.shape != source.shape or target.dtype != source.dtype):
            return value
    for target, source in zip(old, new, strict=True):
        if target is not None and target is not source:
            target.copy_(source)
    return stale


def _tensors(value: Any) -> list[torch.Tensor | None]:
    """Return the tensors of an operand."""
    if value is None or isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, MXFP4Tensor):
        return list(value.parts)
    return [tensor for part in value for tensor in _tensors(part)]


def gemm_states(model: nn.Module) -> list[GemmState]:
    """Return the states of all quantized layers of ``model``."""
    states: list[GemmState] = []
    for module in model.modules():
        attributes = vars(module)
        if isinstance(attributes.get("state"), GemmState):
            states.append(attributes["state"])
        elif isinstance(attributes.get("states"), dict):
            states.extend(state for state in attributes["states"].values() if isinstance(state, GemmState))
    return states


@contextlib.contextmanager
def cached_weights(model: nn.Module, form: str = "auto") -> Iterator[None]:
    """Within this context every quantized layer of ``model`` quantizes its weight at most once and trusts that nobody
    changes it; the copies are dropped at the end. For rollouts, evaluation and whatever else computes often on the same
    weights; one call of `generate` has such a context of its own. Of nested contexts the outermost decides. A CUDA
    graph that is captured within quantizes weights at each replay.

    Args:
        model: whose weights stay as they are.
        form: one of `WEIGHT_FORMS`. Layers that are packed keep dequantized values with ``"dense"`` alone, and
            not where a CPU multiplies with the codes.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: another form.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"cached_weights takes the model whose weights do not change, not {type(model).__name__}")
    cache = WeightCache(model, form=form)
    try:
        with cache.open():
            yield
    finally:
        cache.release()


def uncached_weights(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within this context every quantized layer of ``model`` quantizes its weight at each use: the values of
    [`cached_weights`] in less memory and more time. For `generate` and training, which keep copies otherwise."""
    return cached_weights(model, "none")
