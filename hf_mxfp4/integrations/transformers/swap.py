# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are replaced by quantized layers, and by what."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from ...checkpoint import FileHeader, tensors_by_name
from ...config import MXFP4RLConfig
from ...layers import MXFP4Experts, MXFP4Linear, MXFP4PackedExperts, MXFP4PackedLinear, matrix_names
from ...model_structure import experts_unsupported_reason, projections
from ...module_names import (
    BY_OPTION,
    find_layers,
    full_names,
    fused_experts,
    is_skipped_by_name,
)


MakeLayer = Callable[[nn.Module, MXFP4RLConfig, str], nn.Module]

SAVED_PLAIN = "in full precision in the checkpoint"


def quantize_linears(
    model: nn.Module,
    config: MXFP4RLConfig,
    make_layer: MakeLayer | None = None,
    reasons: dict[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Swap the linear layers and the experts of ``model`` in place; return the names of the quantized linear maps, and
    those left alone with the reasons.

    ``make_layer`` builds a layer from a plain one, the config and its name; by default the layer class of the config's
    mode does. ``reasons`` replaces what [`skip_reasons`] says.

    Raises `ValueError` when nothing matched, or the model keeps experts in a way that is not known.
    """
    skips = config.modules_to_not_convert or ()
    layers, skipped = find_layers(model, skips, reasons)
    return swap_layers(model, layers, config, make_layer or from_plain), skipped


def from_plain(layer: nn.Module, config: MXFP4RLConfig, name: str) -> nn.Module:
    """Return the quantized layer of the config's mode for a linear layer or for experts, plain or trainable ones."""
    packed = config.mode == "packed"
    if isinstance(layer, nn.Linear):
        return (MXFP4PackedLinear if packed else MXFP4Linear).from_linear(layer, config, name)
    return (MXFP4PackedExperts if packed else MXFP4Experts).from_experts(layer, config, name)


def placeholder(layer: nn.Module, config: MXFP4RLConfig, name: str) -> nn.Module:
    """Return the packed layer that a full-precision checkpoint is loaded into."""
    return (MXFP4PackedLinear if isinstance(layer, nn.Linear) else MXFP4PackedExperts).placeholder(layer, config, name)


def swap_layers(
    model: nn.Module, layers: dict[str, nn.Module], config: MXFP4RLConfig, make_layer: MakeLayer
) -> list[str]:
    """Replace layers of ``model`` by what ``make_layer`` builds from them; return the names of their linear maps, each
    layer once.

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


# ---- which layers a quantized checkpoint has in MXFP4 ---------------------------------------------------------------


def reasons_of_checkpoint(
    model: nn.Module, config: MXFP4RLConfig, reasons: Mapping[str, str], headers: Iterable[FileHeader]
) -> dict[str, str]:
    """Return the reasons of [`hf_mxfp4.module_names.skip_reasons`] changed to what the checkpoint in ``headers`` has.
    Layers that no file has, such as those of a new head, stay as they are.

    The choice of layers may differ between versions of this package, or between the class that a checkpoint was saved
    from and the one that it is loaded into. Packed files show which weights are packed; for master weights,
    `config.json` lists what stayed in full precision.
    """
    stored, found = _stored_dtypes(model, headers), dict(reasons)
    for name, weight in _candidates(model).items():
        dtype = stored.get(weight)
        if dtype is None or reasons.get(name) == BY_OPTION:
            continue
        if config.mode == "packed":
            if dtype == torch.uint8:
                found.pop(name, None)
        elif _was_plain(model, config, name):
            found.setdefault(name, SAVED_PLAIN)
        else:
            found.pop(name, None)
    return found


def _was_plain(model: nn.Module, config: MXFP4RLConfig, name: str) -> bool:
    if config.full_precision is None:
        return is_skipped_by_name(model, name)
    prefix = getattr(model, "base_model_prefix", "")
    names = {*full_names(model, name), name.removeprefix(f"{prefix}.")}
    return any(own == kept or own.startswith(f"{kept}.") for own in names for kept in config.full_precision)


def _candidates(model: nn.Module) -> dict[str, str]:
    """Return linear layers and fused experts by name, each with the name of a weight of it."""
    found = {n: f"{n}.weight" for n, m in model.named_modules(remove_duplicate=False) if type(m) is nn.Linear}
    for name in fused_experts(model):
        experts = model.get_submodule(name)
        if experts_unsupported_reason(experts) is None:
            found[name] = f"{name}.{projections(experts)[0]}"
    return found


def _stored_dtypes(model: nn.Module, headers: Iterable[FileHeader]) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors in the files, by the names that they have in the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    prefix, state = getattr(model, "base_model_prefix", ""), model.state_dict()
    found = {}
    for name, tensor in tensors_by_name(headers).items():
        own = name if name in state else rename_source_key(name, renamings, converters, prefix, state)[0]
        found[own] = tensor.dtype
    return found
