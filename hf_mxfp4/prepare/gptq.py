# SPDX-License-Identifier: Apache-2.0
"""Round all linear layers of a decoder onto the grid of their scheme, in the order in which they are run (GPTQ)."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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


@contextlib.contextmanager
def hooked_inputs(hooks: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    """Call the hook of each module with its arguments within this context, as `register_forward_pre_hook` does."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
        self._calls = [_calls(model, layers, ids) for ids in progress_bar(batches, what="Running the model")]
        self._states = [calls[0][_STATES] for calls in self._calls]

    def through(self, index: int) -> Iterator[torch.Tensor]:
        """Return what layer ``index`` gives for each text, from the states that it is at."""
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
    """Return the named arguments of each layer on one text; hidden states of the first alone are kept."""
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
    found, _ = find_layers(model, config.modules_to_not_convert or ())
    schemes: dict[nn.Module, Any] = {}
    for name, layer in found.items():
        scheme = _forward_scheme(config, name)
        if is_linear(layer) and scheme is not None:
            schemes.setdefault(layer, (name, *scheme))
    run = DecoderRun(model, batches)
    gains: dict[str, float] = {}
    with progress_bar(total=len(schemes), what="Rounding weights", unit="layer") as bar:
        for index, layer in enumerate(run.layers):
            for group in _groups(run, index, [each for each in layer.modules() if each in schemes]):
                moments = second_moments(group[0], run.until(index, group[0]))
                for linear in group:
                    name, *scheme = schemes[linear]
                    try:
                        gains[name] = _replace(linear, moments, *scheme)
                    except ValueError as error:
                        raise ValueError(f"{name}: {error}") from error
                    bar.update()
            run.advance(index)
    left = tuple(name for name in found if name not in gains)
    if not gains:
        raise ValueError(f"no layer of {type(model).__name__} was rounded; left alone: {', '.join(left)}")
    return Rounding(tuple(gains), left, sum(gains.values()) / len(gains))


def _forward_scheme(config: MXFP4RLConfig, name: str) -> tuple[QuantScheme, Rotation | None] | None:
    """How the forward product quantizes the weights of a layer, and what rotates them before; `None` if it does not."""
    fprop = config.gemms().fprop
    if not isinstance(fprop.right, QuantScheme):
        return None
    if reason := unsupported_reason(fprop.right, fprop.rotation):
        raise ValueError(f"weights of {name} under {fprop.right} cannot be rounded to stay: {reason}")
    return fprop.right, fprop.rotation


def _groups(run: DecoderRun, index: int, linears: Sequence[nn.Linear]) -> list[list[nn.Linear]]:
    """Layers by what they read, in the order of their calls; those that are not called are left out."""
    groups: list[tuple[torch.Tensor, list[nn.Linear]]] = []

    def note(module: nn.Linear, arguments: tuple[torch.Tensor, ...]) -> None:
        for states, members in groups:
            if states is arguments[0]:
                members.append(module)
                return
        groups.append((arguments[0], [module]))

    with hooked_inputs((linear, note) for linear in linears):
        next(run.through(index))
    return [members for _, members in groups]


def second_moments(linear: nn.Linear, passes: Iterable) -> torch.Tensor:
    """Return ``x.T @ x`` of a layer's inputs, summed while ``passes`` is iterated; float32 ``[K, K]``."""
    total = torch.zeros(linear.in_features, linear.in_features, device=linear.weight.device)

    def add(module: nn.Linear, arguments: tuple[torch.Tensor, ...]) -> None:
        states = arguments[0].flatten(0, -2).float()
        total.addmm_(states.T, states)

    with hooked_inputs([(linear, add)]):
        for _ in passes:
            pass  # the hook has what is wanted
    return total


def _replace(linear: nn.Linear, moments: torch.Tensor, scheme: QuantScheme, rotation: Rotation | None) -> float:
    """Round a layer's weight; by how many decibels its output error is below that of the nearest values."""
    weight = linear.weight
    nearest = quantized_again(weight, scheme, rotation)
    rounded = round_weight(weight, moments, scheme, rotation)
    values = quantized_again(rounded, scheme, rotation)
    before, after = (output_error(new - weight.float(), moments) for new in (nearest, values))
    if after > before:
        rounded, after = nearest, before
    weight.copy_(rounded)
    return 10 * math.log10(before / after) if after > 0 else 0.0
