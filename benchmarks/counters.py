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
    """The storages of all tensors in nested lists, tuples and dictionaries; of sharded ones the local part."""
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
    """Within this context, the storages that autograd saves for the backward pass, but those of parameters and buffers,
    by decoder layer; and what goes into these layers, which is what gradient checkpointing keeps of them.

    Args:
        model: its forward pass runs inside.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._own = {storage._cdata for storage in storages([list(model.parameters()), list(model.buffers())])}
        # A storage is held, so that no other can take its address; with it, its size and the layer that saved it.
        self._saved: dict[int, tuple[torch.UntypedStorage, int, int | None]] = {}
        self._inputs: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._layer: int | None = None
        self._handles: list = []
        self._hooks = saved_tensors_hooks(self._note, lambda tensor: tensor)

    @property
    def held(self) -> int:
        """Bytes held between a forward pass without gradient checkpointing and its backward pass."""
        return sum(size for _, size, _ in self._saved.values())

    @property
    def held_checkpointed(self) -> int:
        """The same with every decoder layer checkpointed; whether it was so inside or not."""
        outside = {key: size for key, (_, size, layer) in self._saved.items() if layer is None}
        return sum({**outside, **{key: size for key, (_, size) in self._inputs.items()}}.values())

    @property
    def largest_layer(self) -> int:
        """Bytes that the decoder layer which saves most does besides what goes into it: what checkpointing computes
        again and holds at one time. 0 where layers were checkpointed."""
        layers: dict[int, int] = {}
        for key, (_, size, layer) in self._saved.items():
            if layer is not None and key not in self._inputs:
                layers[layer] = layers.get(layer, 0) + size
        return max(layers.values(), default=0)

    def __enter__(self) -> "SavedTensors":
        layers = [m for m in self._model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for i, layer in enumerate(layers):

            def enter(module, args, kwargs, i=i):
                self._layer = i
                for storage in storages([args, kwargs]):
                    if storage._cdata not in self._own:
                        self._inputs[storage._cdata] = storage, storage.nbytes()

            def leave(module, args, output):
                self._layer = None

            self._handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(leave))
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        for storage in storages(tensor):
            if storage._cdata not in self._own:
                self._saved.setdefault(storage._cdata, (storage, storage.nbytes(), self._layer))
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
        key, size = storage._cdata, storage.nbytes()
        if key in self._references:
            return

        def gone(reference):
            if self._references.get(key, (None,))[0] is reference:
                self.current -= self._references.pop(key)[1]

        self._references[key] = weakref.ref(storage, gone), size
        self.current += size
        self.peak = max(self.peak, self.current)
