# SPDX-License-Identifier: Apache-2.0
"""Which layers a quantized checkpoint has in MXFP4.

The choice of layers may differ between versions of this package, or between the class that a checkpoint was saved from
and the one that it is loaded into. Packed files show which weights are packed. Beside master weights, `config.json`
lists what stayed in full precision, where names alone (`ALWAYS_SKIPPED`) would say otherwise.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ...checkpoint import FileHeader, tensors_by_name
from ...config import MXFP4RLConfig
from ...experts_layout import projections, unsupported_reason
from ...module_names import BY_OPTION, full_names, fused_experts, is_skipped_by_name


SAVED_PLAIN = "in full precision in the checkpoint"


def reasons_of_checkpoint(
    model: nn.Module, config: MXFP4RLConfig, reasons: Mapping[str, str], headers: Iterable[FileHeader]
) -> dict[str, str]:
    """Return the reasons of [`hf_mxfp4.module_names.skip_reasons`] changed to what the checkpoint in ``headers`` has.
    Layers that no file has, such as those of a new head, stay as they are."""
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
    """Linear layers and fused experts by name, each with the name of a weight of it."""
    found = {n: f"{n}.weight" for n, m in model.named_modules(remove_duplicate=False) if type(m) is nn.Linear}
    for name in fused_experts(model):
        experts = model.get_submodule(name)
        if unsupported_reason(experts) is None:
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
    stored = tensors_by_name(headers)
    found = {}
    for name, tensor in stored.items():
        own = name if name in state else rename_source_key(name, renamings, converters, prefix, state)[0]
        found[own] = tensor.dtype
    return found
