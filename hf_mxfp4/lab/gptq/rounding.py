# SPDX-License-Identifier: Apache-2.0
"""All linear layers of a decoder, rounded in the order in which they are run."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...config import MXFP4RLConfig
from ...hooks import hooked_inputs
from ...layers import MXFP4Linear, cached_weights
from ...module_names import find_layers
from ...numerics import QuantScheme, Rotation, unrotate
from ..perplexity.scoring import in_full_precision
from ..perplexity.swapped import swapped
from .decoder import DecoderRun
from .weight import output_error, quantized_again, round_weight, unsupported_reason


#: What weights are rounded for: inputs in full precision, or as the scheme quantizes them.
INPUTS = ("full", "quantized")


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
    on_layer: Callable[[str], None] = lambda name: None,
    inputs: str = "full",
) -> Rounding:
    """Replace the weights of a decoder in full precision, in place, by values of the grid that they are quantized to,
    chosen so that the outputs of each layer change least on ``batches`` (GPTQ, arXiv 2210.17323): quantizing them under
    the same scheme loses nothing more.

    Args:
        model: a causal language model of transformers, not quantized; left in evaluation mode.
        batches: token ids ``[1, tokens]`` of texts like those it is for; more tokens than layers have inputs.
        config: which layers are quantized, and the scheme of the weights of each in the forward product.
        on_layer: told the name of each layer that is done.
        inputs: one of [`INPUTS`]. With ``"quantized"`` layers are run as they will be, with quantized inputs too, and
            what changes least is the output on those: a weight's product with the noise of its inputs counts as well.
            (GPTAQ, arXiv 2504.02692, starts there, and moves weights towards the outputs of the model in full
            precision besides, which is not done; see docs/gptq.md.)

    Raises:
        ValueError: no texts; ``inputs`` that is not known, or quantized inputs where the config quantizes none; a
            scheme whose values would not stay when they are quantized again; nothing was rounded; inputs that are not
            finite; a model that does not run its decoder layers one after the other.
    """
    if not batches:
        raise ValueError("rounding needs texts to measure activations on, got none")
    if inputs not in INPUTS:
        raise ValueError(f"inputs={inputs!r} must be one of {', '.join(INPUTS)}")
    model.eval()
    found, _ = find_layers(model, config.modules_to_not_convert or ())
    schemes = {}
    for name, layer in found.items():
        scheme = _forward_scheme(model, config, name, inputs)
        if isinstance(layer, nn.Linear) and scheme is not None:
            schemes.setdefault(layer, (name, *scheme))
    run = DecoderRun(model, batches)
    gains: dict[str, float] = {}
    # Under the config's scheme, the very weights are in layers that quantize them and their inputs.
    with swapped(model, config) if inputs == "quantized" else contextlib.nullcontext():
        placed = {model.get_submodule(name): (name, *scheme) for name, *scheme in schemes.values()}
        for index, layer in enumerate(run.layers):
            with in_full_precision(model):
                groups = _groups(run, index, [each for each in layer.modules() if each in placed])
            for group in groups:
                with cached_weights(model, "dense"):
                    moments = second_moments(group[0], run.until(index, group[0]))
                for linear in group:
                    name, *scheme = placed[linear]
                    try:
                        gains[name] = _replace(linear, moments, *scheme)
                    except ValueError as error:
                        raise ValueError(f"{name}: {error}") from error
                    on_layer(name)
            with cached_weights(model, "dense"):
                run.advance(index)
    left = tuple(name for name in found if name not in gains)
    if not gains:
        raise ValueError(f"no layer of {type(model).__name__} was rounded; left alone: {', '.join(left)}")
    return Rounding(tuple(gains), left, sum(gains.values()) / len(gains))


def _forward_scheme(
    model: nn.Module, config: MXFP4RLConfig, name: str, inputs: str
) -> tuple[QuantScheme, Rotation | None] | None:
    """How the forward product quantizes the weights of a layer, and what rotates them before; `None` if it does not."""
    fprop = config.gemms().fprop
    if not isinstance(fprop.right, QuantScheme):
        return None
    if reason := unsupported_reason(fprop.right, fprop.rotation):
        raise ValueError(f"weights of {name} under {fprop.right} cannot be rounded to stay: {reason}")
    if inputs == "quantized" and not isinstance(fprop.left, QuantScheme):
        raise ValueError(
            f"inputs of {name} stay in full precision under {config.describe()}: weights can be rounded for quantized "
            "inputs where the scheme quantizes activations, as w4a4 does"
        )
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
    """``x.T @ x`` of a layer's inputs, summed over what runs while ``passes`` is iterated; float32 ``[K, K]``. Of the
    inputs of a quantized layer as its product takes them, rotated back where it rotates them."""
    size = linear.in_features
    total = torch.zeros(size, size, device=linear.weight.device)

    def add(module: nn.Linear, arguments: tuple[torch.Tensor, ...]) -> None:
        states = arguments[0].flatten(0, -2)
        if isinstance(module, MXFP4Linear):
            states = _as_taken(module, states)
        states = states.float()
        total.addmm_(states.T, states)

    with hooked_inputs([(linear, add)]):
        for _ in passes:
            pass  # the hook has what is wanted
    return total


def _as_taken(linear: MXFP4Linear, states: torch.Tensor) -> torch.Tensor:
    """The inputs ``[tokens, K]`` that a quantized layer computes with, float32, as they stand before a rotation."""
    taken, rotation = linear.forward_input(states, torch.float32), linear.gemms.fprop.rotation
    return taken if rotation is None else unrotate(taken, rotation.size)[:, : states.shape[-1]]


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
