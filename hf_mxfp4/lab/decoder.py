# SPDX-License-Identifier: Apache-2.0
"""Run the decoder layers of a model one after the other, each on what the changed ones before it give."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..hooks import hooked_inputs


_STATES = "hidden_states"


class _Reached(Exception):
    """A layer has been run as far as was asked."""


class DecoderRun:
    """The decoder layers of a model, and the arguments that each got on some texts.

    Args:
        model: a causal language model of transformers.
        batches: token ids ``[1, tokens]`` of each text.

    Raises:
        ValueError: the model has no list of decoder layers, or they are not run one after the other.
    """

    def __init__(self, model: nn.Module, batches: Sequence[torch.Tensor]):
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not len(layers):
            raise ValueError(f"{type(model).__name__} has no list of decoder layers, which are calibrated one by one")
        self.layers = layers
        names = {module: name for name, module in model.named_modules()}
        self.names = [names[layer] for layer in layers]
        self._calls = [_calls(model, layers, ids) for ids in batches]
        self._states = [calls[0][_STATES] for calls in self._calls]

    def through(self, index: int) -> Iterator[torch.Tensor]:
        """What layer ``index`` gives for each text, from the states that it is at."""
        for states, calls in zip(self._states, self._calls, strict=True):
            yield _first(self.layers[index](**{**calls[index], _STATES: states}))

    def until(self, index: int, module: nn.Module) -> Iterator[None]:
        """Run layer ``index`` on each text, and no further than to ``module``, a part of it, whose hooks are called."""

        def stop(module: nn.Module, arguments: tuple) -> None:
            raise _Reached

        with hooked_inputs([(module, stop)]):
            for states, calls in zip(self._states, self._calls, strict=True):
                with contextlib.suppress(_Reached):
                    self.layers[index](**{**calls[index], _STATES: states})
                yield

    def advance(self, index: int) -> None:
        """Go on to the states behind layer ``index``."""
        self._states = list(self.through(index))


def _calls(model: nn.Module, layers: nn.ModuleList, ids: torch.Tensor) -> list[dict[str, Any]]:
    """The named arguments of each layer on one text; hidden states of the first alone are kept."""
    calls: list[dict[str, Any]] = []
    given: list[torch.Tensor] = []

    def before(index: int) -> Callable:
        def keep(module: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
            named = dict(zip((_STATES,), arguments, strict=True)) | named if len(arguments) == 1 else dict(named)
            if index != len(calls) or _STATES not in named or index and named[_STATES] is not given[-1]:
                raise ValueError(f"the layers of {type(model).__name__} are not run one after the other")
            calls.append(named if index == 0 else {**named, _STATES: None})

        return keep

    def after(module: nn.Module, arguments: tuple, output: Any) -> None:
        given[:] = [_first(output)]

    handles = [layer.register_forward_pre_hook(before(i), with_kwargs=True) for i, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        model(ids.to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) != len(layers):
        raise ValueError(f"{type(model).__name__} ran {len(calls)} of its {len(layers)} decoder layers")
    return calls


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
