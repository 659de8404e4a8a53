# SPDX-License-Identifier: Apache-2.0
"""Round all linear layers of a decoder onto the grid of their scheme, in the order in which they are run (GPTQ)."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..model.layer_names import find_layers
from ..model.plain_layers import is_linear
from ..numerics import QuantScheme, Rotation
from ..utils import progress_bar
from .rounding import output_error, quantized_again, round_weight, unsupported_reason


_STATES = "hidden_states"


class _Reached(Exception):
    """A layer has been run as far as was asked."""


class DecoderRun:
    """The decoder layers of a model, and the hidden states and arguments that they get on some texts.

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
        self._calls = [_calls(model, layers, ids) for ids in progress_bar(batches, what="Running the model")]
        self._states = [calls[0][_STATES] for calls in self._calls]

    def through(self, index: int) -> Iterator[torch.Tensor]:
        """Yield the output of layer ``index`` for each text, computed from the states before it."""
        for states, calls in zip(self._states, self._calls, strict=True):
            yield _first(self.layers[index](**{**calls[index], _STATES: states}))

    def inputs_of(self, index: int, module: nn.Module) -> Iterator[torch.Tensor]:
        """Yield the input of ``module``, a part of layer ``index``, on each text. The layer is run no further."""
        inputs: list[torch.Tensor] = []

        def stop(module: nn.Module, arguments: tuple) -> None:
            inputs.append(arguments[0])
            raise _Reached

        for states, calls in zip(self._states, self._calls, strict=True):
            handle = module.register_forward_pre_hook(stop)
            try:
                with contextlib.suppress(_Reached):
                    self.layers[index](**{**calls[index], _STATES: states})
            finally:
                handle.remove()
            yield inputs.pop()

    def advance(self, index: int) -> None:
        """Continue with the states behind layer ``index``."""
        self._states = list(self.through(index))


def _calls(model: nn.Module, layers: nn.ModuleList, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Return the named arguments of each layer on one text; hidden states of the first alone are kept."""
    calls: list[dict[str, Any]] = []
    output_before = None

    def note_call(layer: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
        if len(arguments) == 1:
            named = {_STATES: arguments[0], **named}
        index = len(calls)
        is_next = index < len(layers) and layer is layers[index] and _STATES in named
        if not is_next or (index and named[_STATES] is not output_before):
            raise ValueError(f"the layers of {type(model).__name__} are not run one after the other")
        calls.append(named if index == 0 else {**named, _STATES: None})

    def note_output(layer: nn.Module, arguments: tuple, output: Any) -> None:
        nonlocal output_before
        output_before = _first(output)

    handles = [layer.register_forward_pre_hook(note_call, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(note_output) for layer in layers]
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


@dataclass(frozen=True)
class Rounding:
    """What [`round_model`] did.

    Attributes:
        layers: names of the layers whose weights were rounded.
        left: names of those that the config quantizes, and that were left alone: experts, and layers outside the
            decoder.
        gain_db: how much smaller the error of the layers' outputs is than with the nearest values, in decibels: the
            mean over layers.
    """

    layers: tuple[str, ...]
    left: tuple[str, ...]
    gain_db: float


@torch.no_grad()
def round_model(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    config: MXFP4RLConfig,
) -> Rounding:
    """Replace the weights of a decoder in full precision, in place, by values of the grid that they are quantized to,
    chosen so that the outputs of each layer change least on ``batches`` (GPTQ, arXiv 2210.17323): quantizing them under
    the same scheme loses nothing more.

    Args:
        model: a causal language model of transformers, not quantized; left in evaluation mode.
        batches: token ids ``[1, tokens]`` of texts like those it is for; more tokens than layers have inputs.
        config: which layers are quantized, and the scheme of the weights of each in the forward product.

    Raises:
        ValueError: no texts; a scheme whose values would not stay when they are quantized again; nothing was rounded;
            inputs that are not finite; a model that does not run its decoder layers one after the other.
    """
    if not batches:
        raise ValueError("rounding needs texts to measure activations on, got none")
    model.eval()
    fprop = config.gemms().fprop
    scheme: Any = fprop.right
    rotation = fprop.rotation
    layers, _ = find_layers(model, config.modules_to_not_convert or ())
    names: dict[nn.Module, str] = {}
    for name, layer in layers.items():
        if is_linear(layer) and isinstance(scheme, QuantScheme):
            if reason := unsupported_reason(scheme, rotation):
                raise ValueError(f"weights of {name} under {scheme} cannot be rounded to stay: {reason}")
            names.setdefault(layer, name)
    gains: dict[str, float] = {}
    run = DecoderRun(model, batches)
    with progress_bar(total=len(names), what="Rounding weights", unit="layer") as bar:
        for index, layer in enumerate(run.layers):
            linears = [module for module in layer.modules() if module in names]
            for group in _groups(run, index, linears):
                moments = second_moments(group[0], run.inputs_of(index, group[0]))
                for linear in group:
                    try:
                        gains[names[linear]] = _replace(linear, moments, scheme, rotation)
                    except ValueError as error:
                        raise ValueError(f"{names[linear]}: {error}") from error
                    bar.update()
            run.advance(index)
    left = tuple(name for name in layers if name not in gains)
    if not gains:
        raise ValueError(f"no layer of {type(model).__name__} was rounded; left alone: {', '.join(left)}")
    return Rounding(tuple(gains), left, sum(gains.values()) / len(gains))


def _groups(run: DecoderRun, index: int, linears: Sequence[nn.Linear]) -> list[list[nn.Linear]]:
    """Return layers grouped by the tensor that they read, in the order of their calls, without those that are not
    called."""
    groups: list[tuple[torch.Tensor, list[nn.Linear]]] = []

    def note(linear: nn.Linear, arguments: tuple[torch.Tensor, ...]) -> None:
        for states, members in groups:
            if states is arguments[0]:
                members.append(linear)
                return
        groups.append((arguments[0], [linear]))

    handles = [linear.register_forward_pre_hook(note) for linear in linears]
    try:
        next(run.through(index))
    finally:
        for handle in handles:
            handle.remove()
    return [members for _, members in groups]


def second_moments(linear: nn.Linear, inputs: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return ``x.T @ x`` of a layer's inputs, summed over texts; float32 ``[K, K]``."""
    total = torch.zeros(linear.in_features, linear.in_features, device=linear.weight.device)
    for x in inputs:
        rows = x.flatten(0, -2).float()
        total.addmm_(rows.T, rows)
    return total


def _replace(linear: nn.Linear, moments: torch.Tensor, scheme: QuantScheme, rotation: Rotation | None) -> float:
    """Round a layer's weight; return by how many decibels its output error is below that of the nearest values."""
    weight = linear.weight
    nearest = quantized_again(weight, scheme, rotation)
    rounded = round_weight(weight, moments, scheme, rotation)
    values = quantized_again(rounded, scheme, rotation)
    before = output_error(nearest - weight.float(), moments)
    after = output_error(values - weight.float(), moments)
    if after > before:
        rounded = nearest
        after = before
    weight.copy_(rounded)
    return 10 * math.log10(before / after) if after > 0 else 0.0
