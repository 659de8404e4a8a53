# SPDX-License-Identifier: Apache-2.0
"""Adapters of experts, whichever way they were made: all become PEFT's ``target_parameters`` and its factors.

Made on the linear layers that each expert had in older versions of transformers: PEFT converts them. Made by
``target_modules=["experts"]``, our name for all projections of a layer: [`target_experts`] converts the config.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from ...layers import PACKED, MXFP4Experts, MXFP4PackedExperts
from ...model.plain_layers import is_linear
from ..patches import refuse_lost


_PATTERNS = ("rank_pattern", "alpha_pattern")
#: Options of `LoraConfig` that say which layers get adapters, and of what size.
TARGETS = ("target_modules", "target_parameters", *_PATTERNS)


def quantized_experts(model: nn.Module) -> dict[str, MXFP4Experts | MXFP4PackedExperts]:
    """Return the quantized experts of a model by the names that they have without adapters."""
    experts = {}
    for name, module in model.named_modules():
        if isinstance(module, (MXFP4Experts, MXFP4PackedExperts)):
            experts[name.replace(".base_layer", "")] = module
    return experts


def target_experts(config: LoraConfig, given: dict[str, Any], model: nn.Module) -> None:
    """Have ``config`` target the parameters of quantized experts that its ``target_modules`` name, in place.

    Args:
        given: the options [`TARGETS`] before PEFT converted the names of single experts' linear layers. PEFT drops
            linear layers of the same names, as shared experts have: these are put back.
    """
    experts = quantized_experts(model)
    targets = given["target_modules"]
    if not experts:
        return
    if targets is None:
        _set(config, given)  # PEFT's defaults for the model, which its conversion removes
        return
    asked = copy.copy(config)
    _set(asked, given)
    named = [name for name in experts if check_target_module_exists(asked, name)]
    if named:
        _set(config, given)
        _target_whole_experts(config, {name: experts[name] for name in named}, model, len(named) == len(experts))
    elif isinstance(targets, str):
        _keep_pattern(config, given, experts)
    else:
        _put_back_linears(config, given, model)


def _keep_pattern(
    config: LoraConfig, given: dict[str, Any], experts: dict[str, MXFP4Experts | MXFP4PackedExperts]
) -> None:
    """Undo PEFT's conversion of a pattern that names no expert: it becomes the ends of names, which can match more. So
    does ``"all-linear"``, which means linear layers alone where experts are packed."""
    is_packed = any(isinstance(layer, PACKED) for layer in experts.values())
    is_all_linear = given["target_modules"].lower() == "all-linear" and is_packed and not config.inference_mode
    names_no_expert = set(config.target_parameters or ()) == set(given["target_parameters"] or ())
    if is_all_linear or names_no_expert:
        _set(config, given)


def _put_back_linears(config: LoraConfig, given: dict[str, Any], model: nn.Module) -> None:
    """Put back the names of linear layers that PEFT took for those of experts. Layers whose weight is a target
    parameter have their adapter there."""
    linears = []
    for name in _names_of(model, is_linear):
        if not any(_names_any(target, [f"{name}.weight"]) for target in config.target_parameters or ()):
            linears.append(name)
    put_back = {target for target in given["target_modules"] if _names_any(target, linears)}
    config.target_modules = put_back.union(config.target_modules)
    if config.use_rslora:
        # PEFT doubles alpha with the rank, but rank-stabilized scaling divides by the square root of the rank.
        for pattern in set(config.alpha_pattern) - set(given["alpha_pattern"] or ()):
            config.alpha_pattern[pattern] /= math.sqrt(config.rank_pattern[pattern] / config.r)


def _set(config: LoraConfig, given: dict[str, Any]) -> None:
    """Give a config the options that the user gave it."""
    for option, value in given.items():
        setattr(config, option, copy.copy(value))


def _target_whole_experts(
    config: LoraConfig, named: dict[str, MXFP4Experts | MXFP4PackedExperts], model: nn.Module, are_all: bool
) -> None:
    """Replace ``named`` experts in the targets by their projections; of all experts of the model short names do."""
    if isinstance(config.target_modules, str):
        matched = (name for name in _names_of(model, lambda module: True) if check_target_module_exists(config, name))
        config.target_modules = set(matched) - set(named)
    else:
        config.target_modules = {target for target in config.target_modules if not _names_any(target, named)}
    parameters = set(config.target_parameters or ())
    for name, layer in named.items():
        target = name.rpartition(".")[2] if are_all else name
        parameters |= {f"{target}.{projection}" for projection in layer.projections}
        for option in _PATTERNS:
            patterns = getattr(config, option) or {}
            for key in [key for key in patterns if re.match(rf"(.*\.)?({key})$", name)]:
                patterns |= {f"{key}.{projection}": patterns[key] for projection in layer.projections}
    config.target_parameters = sorted(parameters)


def _names_of(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> list[str]:
    """Return the names of some modules that they have without adapters, each once."""
    names = [name for name, module in model.named_modules() if is_wanted(module) and ".lora_" not in name]
    return list(dict.fromkeys(name.replace(".base_layer", "") for name in names if name))


def _names_any(target: str, names: Iterable[str]) -> bool:
    """Return whether a target is one of the names or the end of one."""
    return any(f".{name}".endswith(f".{target}") for name in names)


def check_reached(model: nn.Module, keys: Iterable[str]) -> None:
    """Raise `ValueError` for factors in a file that have no place in a model; PEFT would leave them out."""
    places = model.state_dict().keys()
    lost = [key for key in keys if ".lora_" in key and not {key, key.removeprefix("base_model.model.")} & places]
    refuse_lost(model, lost)
