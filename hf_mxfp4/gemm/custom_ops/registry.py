# SPDX-License-Identifier: Apache-2.0
"""Layers as arguments of operators.

A layer has state that changes while it trains: the step and the counts behind its random numbers, a fallback threshold,
its cached weight. Compiled code must not hold any of it, so an operator of a layer finds it when it runs. The argument
is a tensor, a number of the layer's own: as an input of the graph, where a plain number would be a constant in it, it
lets layers of equal shapes share one graph.
"""

import itertools
import weakref
from typing import Any

import torch


_owners: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def new_handle(owner: Any) -> torch.Tensor:
    """A handle of ``owner``, int64 without axes on the CPU, wherever the owner's tensors are."""
    number = next(_numbers)
    _owners[number] = owner
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def owner_of(handle: torch.Tensor) -> Any:
    """Whose handle it is. Raises `RuntimeError` for one of an object that is gone."""
    owner = _owners.get(int(handle))
    if owner is None:
        raise RuntimeError(f"layer {int(handle)} of this compiled code is gone; keep its model, or compile again")
    return owner
