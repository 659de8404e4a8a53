# SPDX-License-Identifier: Apache-2.0
"""One quantization of an input that several layers take: q, k and v of attention, gate and up of an MLP.

What a thread quantized last is kept, with a weak reference to the very tensor object, its version, memory and shape,
and the stream. Another layer of the same parent gets the same values, and so saves the same tensor for its backward
pass. They are let go when that tensor object is, or when the thread quantizes another one.

Writes that leave the version as it is (through ``.data``, numpy or a kernel of one's own) are not noticed. Between the
layers of one parent nobody writes; and that a new pass never gets values of an old one, even where an input lies in a
buffer that is filled again, is since a layer gets the values of one quantization once: when it comes again, the input
is quantized again.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor


Made = TypeVar("Made")

#: One object for each parent and way to quantize, by what they are: a key that is cheap to look up.
_keys: dict[tuple, object] = {}
_thread = threading.local()
_counts = {"quantized": 0, "shared": 0}


class _Entry:
    """What was made of one tensor.

    Attributes:
        values: by key, the values, and the `id` of each user that has had them.
    """

    __slots__ = ("_place", "_shape", "_version", "_x", "values")

    def __init__(self, x: torch.Tensor):
        values: dict[object, tuple[Any, list[int]]] = {}
        self.values = values
        self._x = weakref.ref(x, lambda _: values.clear())
        self._version, self._place, self._shape = x._version, _place(x), x.shape

    def is_of(self, x: torch.Tensor) -> bool:
        """Whether it is of this tensor, as it is now."""
        if self._x() is not x or self._version != x._version:
            return False
        return self._place == _place(x) and self._shape == x.shape


def _place(x: torch.Tensor) -> tuple[int, int]:
    """Where a tensor lies, and the stream that computes now: another one does not wait for what this one makes."""
    if isinstance(x, FakeTensor):
        return 0, 0
    stream = 0
    if x.is_cuda:
        stream = torch.cuda.current_stream(x.device).cuda_stream
    elif x.is_xpu:
        stream = torch.xpu.current_stream(x.device).sycl_queue
    return x.data_ptr(), stream


def key_of(name: str, *how: Any) -> object | None:
    """The key of a layer of this name, equal to that of others of the same parent that quantize in the same way
    ``how``; `None` for a layer without a name."""
    if not name:
        return None
    return _keys.setdefault((name.rpartition(".")[0], *how), object())


def shared_input(x: torch.Tensor, key: object, user: object, quantize: Callable[[torch.Tensor], Made]) -> Made:
    """``quantize(x)``, or what that gave another ``user`` with this key. Not for compiled code."""
    if x.is_inference():  # has no version
        _counts["quantized"] += 1
        return quantize(x)
    entry: _Entry | None = getattr(_thread, "entry", None)
    if entry is None or not entry.is_of(x):
        entry = _thread.entry = _Entry(x)
    else:
        found = entry.values.get(key)
        if found is not None and id(user) not in found[1]:
            found[1].append(id(user))
            _counts["shared"] += 1
            return found[0]
    _counts["quantized"] += 1
    value = quantize(x)
    entry.values[key] = value, [id(user)]
    return value


def shared_input_counts() -> dict[str, int]:
    """How often named linear layers of this process ``"quantized"`` an input, outside of compiled code, and how often
    they got the values that another layer of their parent had made: ``"shared"``."""
    return dict(_counts)
