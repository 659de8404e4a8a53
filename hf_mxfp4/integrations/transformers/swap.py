# SPDX-License-Identifier: Apache-2.0
"""Replacing modules of a model: which layers are swapped, and for what."""

from collections.abc import Callable, Sequence

from torch import nn

from ...config import MXFP4RLConfig
from ...experts_layout import projections
from ...layers import MXFP4Experts, MXFP4Linear, MXFP4PackedExperts, MXFP4PackedLinear, matrix_names
from ...module_names import choose_layers, full_names, name_matches, skip_reasons


MakeLayer = Callable[[nn.Module, MXFP4RLConfig, str], nn.Module]


def quantize_linears(
    model: nn.Module,
    config: MXFP4RLConfig,
    make_layer: MakeLayer | None = None,
    reasons: dict[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Swap the linear layers and the experts of ``model`` in place; the names of the quantized linear maps, and
    those left alone with the reasons.

    ``make_layer`` builds a layer from a plain one, the config and its name; by default the layer class of the config's
    mode does. ``reasons`` replaces what [`skip_reasons`] says.

    Raises `ValueError` when nothing matched, an entry of the config's ``layer_overrides`` matched no quantized layer,
    or the model keeps experts in a way that is not known.
    """
    skips = config.modules_to_not_convert or ()
    layers, skipped = choose_layers(model, skip_reasons(model, skips) if reasons is None else reasons, skips)
    # Overrides name linear layers, and projections of experts.
    names = {
        place: {place: ()} if isinstance(layer, nn.Linear) else {f"{place}.{p}": (p,) for p in projections(layer)}
        for place, layer in layers.items()
    }
    check_overrides(model, config, [name for own in names.values() for name in own])
    quantized = swap_layers(model, layers, config, make_layer or from_plain)
    if config.layer_overrides:
        for place, own in names.items():
            for name, projection in own.items():
                model.get_submodule(place).set_gemms(config.gemms(*full_names(model, name)), *projection)
    return quantized, skipped


def from_plain(layer: nn.Module, config: MXFP4RLConfig, name: str) -> nn.Module:
    """The quantized layer of the config's mode for a linear layer or for experts, plain ones or trainable ones."""
    packed = config.mode == "packed"
    if isinstance(layer, nn.Linear):
        return (MXFP4PackedLinear if packed else MXFP4Linear).from_linear(layer, config, name)
    return (MXFP4PackedExperts if packed else MXFP4Experts).from_experts(layer, config, name)


def placeholder(layer: nn.Module, config: MXFP4RLConfig, name: str) -> nn.Module:
    """The packed layer that a full-precision checkpoint is loaded into."""
    return (MXFP4PackedLinear if isinstance(layer, nn.Linear) else MXFP4PackedExperts).placeholder(layer, config, name)


def check_overrides(model: nn.Module, config: MXFP4RLConfig, names: Sequence[str]) -> None:
    """Raise `ValueError` for an entry of ``layer_overrides`` that matches none of the quantized layers ``names``."""
    for pattern, _ in config.layer_overrides or ():
        if not any(name_matches(full, pattern) for name in names for full in full_names(model, name)):
            raise ValueError(
                f"layer_overrides has {pattern!r}, which matches no quantized layer of {type(model).__name__}; give "
                "whole dotted name parts such as 'layers.0' or 'mlp.down_proj', or 're:<regex on the full name>'"
            )


def swap_layers(
    model: nn.Module, layers: dict[str, nn.Module], config: MXFP4RLConfig, make_layer: MakeLayer
) -> list[str]:
    """Replace layers of ``model`` by what ``make_layer`` builds from them; the names of their linear maps, each layer
    once.

    ``layers`` is emptied on the way, so that what a replaced layer held can be freed before the next one is built.
    """
    names = []
    while layers:
        name, old = next(iter(layers.items()))
        new = make_layer(old, config, name)
        for place in [place for place, other in layers.items() if other is old]:
            model.set_submodule(place, new)
            del layers[place]
        names += matrix_names(name, new)
        del old, new
    return names
