# SPDX-License-Identifier: Apache-2.0
"""Quantized weights, kept while somebody promises that the weights do not change."""

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

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
    and by fused optimizers are not. A CUDA graph that is captured takes nothing from here and leaves nothing: it is
    replayed when what was kept is gone, and what it makes is filled only then.

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
        self._kept: dict[Hashable, _Kept] = {}

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

    def clear(self) -> None:
        """Let go what is kept. To be called when weights have changed or are about to."""
        self._kept.clear()

    def find(self, weight: torch.Tensor, key: Hashable) -> Any:
        """Return what is kept for this weight and key, or `None`."""
        if _is_captured(weight):
            return None
        kept = self._kept.get(key)
        return kept.value if kept is not None and kept.is_of(weight) else None

    def get(self, weight: torch.Tensor, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what ``make`` gave for this weight and key, or gives now. Of a tensor that was computed from a weight,
        as with an adapter's part, nothing is kept: it is another one in each pass."""
        value = self.find(weight, key)
        if value is None:
            with torch.inference_mode(False), torch.no_grad():  # a backward pass may need later what is kept
                value = make()
            if weight.is_leaf and not _is_captured(weight):
                self._kept[key] = _Kept.of(weight, value)
        return value


class _Kept(NamedTuple):
    """A value, and the weight that it was made of: compiled code and engines that shard weights pass the same memory in
    other objects, or the same object in memory that was freed and reserved again."""

    value: Any
    identity: tuple
    #: Of its memory, which gives no other memory its number as long as this lives; of a tensor without memory, itself.
    owner: StorageWeakRef | weakref.ref

    @classmethod
    def of(cls, weight: torch.Tensor, value: Any) -> "_Kept":
        identity = _identity(weight)
        owner = weakref.ref(weight) if identity[0] is None else StorageWeakRef(weight.untyped_storage())
        return cls(value, identity, owner)

    def is_of(self, weight: torch.Tensor) -> bool:
        return self.identity == _identity(weight) and (self.identity[0] is not None or self.owner() is weight)


def _identity(weight: torch.Tensor) -> tuple:
    """Return what tells a weight, its place in memory and its version."""
    has_memory = type(weight) in (torch.Tensor, nn.Parameter) and not weight.is_meta
    memory = weight.untyped_storage()._cdata if has_memory else None
    version = None if weight.is_inference() else weight._version
    return memory, version, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype


def _is_captured(weight: torch.Tensor) -> bool:
    """Whether products with a weight are being captured in a CUDA graph."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def gemm_states(model: nn.Module) -> list[GemmState]:
    """Those of all quantized layers of ``model``."""
    found: list[GemmState] = []
    for module in model.modules():
        state, states = vars(module).get("state"), vars(module).get("states")
        if isinstance(state, GemmState):
            found.append(state)
        elif isinstance(states, dict):
            found.extend(each for each in states.values() if isinstance(each, GemmState))
    return found


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
        cache.clear()


def uncached_weights(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within this context every quantized layer of ``model`` quantizes its weight at each use: the values of
    [`cached_weights`] in less memory and more time. For `generate` and training, which keep copies otherwise."""
    return cached_weights(model, "none")
