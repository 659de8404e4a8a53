# SPDX-License-Identifier: Apache-2.0
"""Counters of the bytes that training holds; the same for real tensors, when they are measured, and for those without
memory, when they are predicted."""

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer


def storages(tree: object) -> Iterator[torch.UntypedStorage]:
    """Return the storages of all tensors in nested lists, tuples and dictionaries; of sharded ones the local part."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield getattr(leaf, "_local_tensor", leaf).untyped_storage()


def unique_bytes(tree: object) -> int:
    """Bytes of the storages of all tensors in ``tree``, each once."""
    return sum({storage._cdata: storage.nbytes() for storage in storages(tree)}.values())


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes of a model's ``weights`` (with buffers), ``gradients``, and the ``optimizer``'s state."""
    parameters = list(model.parameters())
    state = [] if optimizer is None else [list(entry.values()) for entry in optimizer.state.values()]
    return {
        "weights": unique_bytes([parameters, list(model.buffers())]),
        "gradients": unique_bytes([parameter.grad for parameter in parameters]),
        "optimizer": unique_bytes(state),
    }


class SavedTensors:
    """Count the storages that autograd saves for the backward pass inside this context, without parameters and buffers.

    Args:
        model: its forward pass runs inside.

    Attributes:
        held: bytes held between a forward pass without gradient checkpointing and its backward pass.
        held_checkpointed: the same with every decoder layer checkpointed, which keeps what goes into the layer.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._own = {storage._cdata for storage in storages([list(model.parameters()), list(model.buffers())])}
        # A storage is held, so that no other can take its address.
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}
        self._in_layer = False
        self._handles: list = []
        self._hooks = saved_tensors_hooks(self._note, lambda tensor: tensor)

    @property
    def held(self) -> int:
        return sum(storage.nbytes() for storage in self._saved.values())

    @property
    def held_checkpointed(self) -> int:
        return sum(storage.nbytes() for storage in self._outside.values())

    def __enter__(self) -> "SavedTensors":
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._in_layer = True
            self._outside |= self._others([args, kwargs])

        def leave(*_: object) -> None:
            self._in_layer = False

        for layer in (m for m in self._model.modules() if isinstance(m, GradientCheckpointingLayer)):
            self._handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(leave))
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _others(self, tree: object) -> dict[int, torch.UntypedStorage]:
        return {storage._cdata: storage for storage in storages(tree) if storage._cdata not in self._own}

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        self._saved |= self._others(tensor)
        if not self._in_layer:
            self._outside |= self._others(tensor)
        return tensor


class LiveTensors(TorchDispatchMode):
    """Within this context, the bytes of the tensors that live, and the most that lived at one time.

    Memory inside an operator (workspaces) is not seen, and an allocator takes more than what lives.

    Args:
        existing: tensors that count from the beginning, in nested lists and dictionaries.

    Attributes:
        current, peak: bytes.
    """

    def __init__(self, existing: Iterable = ()):
        super().__init__()
        self.current = self.peak = 0
        self._references: dict[int, tuple[weakref.ref, int]] = {}
        for storage in storages(list(existing)):
            self._add(storage)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for storage in storages(result):
            self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._references:
            return

        def gone(reference):
            if self._references.get(key, (None,))[0] is reference:
                self.current -= self._references.pop(key)[1]

        self._references[key] = weakref.ref(storage, gone), size
        self.current += size
        self.peak = max(self.peak, self.current)
