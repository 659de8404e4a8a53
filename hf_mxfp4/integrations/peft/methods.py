# SPDX-License-Identifier: Apache-2.0
"""Check which of PEFT's methods are attached to quantized layers, and keep them from writing into packed weights.

A method is supported when its layer uses the quantized layer as a function of its input, so that it computes the same
as on a plain layer that holds ``Q(W)``. A method that reads ``layer.weight`` would read packed bytes, or compute with
the master weight, which has not been quantized.
"""

import functools
import re
from typing import Any

import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_target_module_exists
from torch import nn

from ...layers import PACKED, QUANTIZED, MXFP4PackedExperts, MXFP4PackedLinear
from .merging import Merges


#: Methods that compute with ``Q(W)`` on every quantized linear layer; names are those of `peft.PeftType`.
#: `tests/layers/test_peft_methods.py` compares each one with the same method on a plain layer that holds ``Q(W)``.
SUPPORTED = frozenset(
    "ADALORA BEFT BOFT C3A FOURIERFT GRALORA IA3 LILY LORA MISS OFT RANDLORA ROAD VBLORA VERA WAVEFT".split()
)
#: Methods that do so on trainable layers only: on packed ones they take the shape of the bytes for that of the weight.
TRAINABLE_ONLY = frozenset({"LOHA", "LOKR", "UNILORA"})


def targeted_layers(model: nn.Module, config: PeftConfig, tuner: type[BaseTuner]) -> dict[str, nn.Module]:
    """Return the quantized layers that ``target_modules`` matches, by the names that they have without adapters."""
    layers = {name.removesuffix(".base_layer"): m for name, m in model.named_modules() if isinstance(m, QUANTIZED)}
    targets = getattr(config, "target_modules", None)
    if targets is None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        targets = (getattr(tuner, "target_module_mapping", None) or {}).get(kind)
        if targets is None:
            return {}
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
    as_given, config.target_modules = config.target_modules, targets
    try:
        return {name: layer for name, layer in layers.items() if check_target_module_exists(config, name)}
    finally:
        config.target_modules = as_given


def check_method(tuner: BaseTuner, model: nn.Module, config: PeftConfig) -> None:
    """Raise `ValueError` for a method that cannot compute on the quantized layers that it targets, or that would train
    packed bytes."""
    packed = _packed_layers(model)
    if packed:
        _check_saved_modules(config, packed)
    hit = targeted_layers(model, config, type(tuner))
    if not hit:
        return
    name, layer = next(((n, m) for n, m in hit.items() if isinstance(m, PACKED)), next(iter(hit.items())))
    method = _name(config)
    registered = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    where = f"on {name}, a {'packed' if isinstance(layer, PACKED) else 'trainable'} quantized layer"
    if registered is None or not isinstance(tuner, registered):
        raise ValueError(f"{type(tuner).__name__} is not supported {where}: attach {method} with get_peft_model")
    if method == "MISS" and config.init_weights == "bat":
        raise ValueError(f"MISS with init_weights='bat' is not supported {where}: it computes with the plain weight")
    if method in SUPPORTED or method in TRAINABLE_ONLY and not isinstance(layer, PACKED):
        return
    weight, others = "is not quantized yet", SUPPORTED | TRAINABLE_ONLY
    if isinstance(layer, PACKED):
        weight, others = "is stored in 4 bits", SUPPORTED
    raise ValueError(
        f"{method} is not supported {where}: it computes with the layer's weight, which {weight}, or it has not been "
        f"tried. Use one of {', '.join(sorted(others))}, or keep these layers in full precision with "
        "MXFP4RLConfig(modules_to_not_convert=[...])"
    )


def adapters_on_quantized(model: nn.Module) -> list[BaseTunerLayer]:
    """Return the adapters on quantized layers, of whatever method; the wrappers of one layer's parameters from the
    outside in."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return [layer for layer in layers if isinstance(layer.get_base_layer(), QUANTIZED)]


def _unmergeable(model: nn.Module) -> list[BaseTunerLayer]:
    """Return adapters whose merge is PEFT's own, which knows nothing of quantized weights."""
    return [layer for layer in adapters_on_quantized(model) if not isinstance(layer, Merges)]


def merge_into_plain(layers: list[BaseTunerLayer], dtype: torch.dtype) -> None:
    """Put plain layers that hold ``Q(W)`` below these adapters and merge the adapters into them in float32, then round
    them to ``dtype``. Adapters that were merged before are merged here, too."""
    wrappers: dict[nn.Module, list[BaseTunerLayer]] = {}
    for layer in layers:
        wrappers.setdefault(layer.get_base_layer(), []).append(layer)
    for base, own in wrappers.items():
        names = [list(dict.fromkeys([*layer.merged_adapters, *layer.active_adapters])) for layer in own]
        for layer in own:
            if layer.merged:
                layer.unmerge()
        if isinstance(base, MXFP4PackedExperts):  # PEFT has no layer for them
            own[0].base_layer = own[0].to_plain(dtype, [name for name in names[0] if name in own[0].lora_A])
            own[0].merged_adapters = names[0]
            continue
        to_plain = base.to_linear if isinstance(base, nn.Linear) else base.to_experts
        own[-1].base_layer = plain = to_plain(torch.float32)
        for layer, adapters in zip(own, names, strict=True):
            layer.merge(adapter_names=adapters)
        plain.to(dtype)


def _packed_layers(model: nn.Module) -> dict[str, MXFP4PackedLinear | MXFP4PackedExperts]:
    """Return packed layers by the names that they have without adapters."""
    return {name.removesuffix(".base_layer"): m for name, m in model.named_modules() if isinstance(m, PACKED)}


def _check_saved_modules(config: PeftConfig, packed: dict[str, MXFP4PackedLinear | MXFP4PackedExperts]) -> None:
    """Refuse what PEFT would wrap around the stored bytes instead of the weight; it compares the ends of names."""
    places = {name[: end.start()] for name in packed for end in re.finditer(r"\.|$", name)}
    places |= {f"{name}.{own}" for name, layer in packed.items() for own, _ in layer.named_parameters()}
    for option in ("target_parameters", "modules_to_save", "trainable_token_indices"):
        for target in getattr(config, option, None) or ():
            hit = min((place for place in places if isinstance(target, str) and place.endswith(target)), default=None)
            if hit is not None:
                raise ValueError(
                    f"{option} has {target!r}: {hit} is a packed layer, a part of one or around one, whose weight is "
                    "stored in 4 bits and frozen; name the layer in target_modules for LoRA, or keep it in full "
                    "precision with MXFP4RLConfig(modules_to_not_convert=[...])"
                )


def _name(config: PeftConfig) -> str:
    return getattr(config.peft_type, "name", None) or str(config.peft_type).rpartition(".")[2].upper()


_ATTACH, _INJECT, _MERGE_ALLOWED = BaseTuner.__init__, BaseTuner.inject_adapter, BaseTuner._check_merge_allowed


@functools.wraps(_ATTACH)
def _attach(self: BaseTuner, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    config = peft_config if isinstance(peft_config, PeftConfig) else peft_config[adapter_name]
    check_method(self, model, config)  # before what some tuners compute from the weights
    _ATTACH(self, model, peft_config, adapter_name, *args, **kwargs)


@functools.wraps(_INJECT)
def _inject(self: BaseTuner, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    check_method(self, model, self.peft_config[adapter_name])
    _INJECT(self, model, adapter_name, *args, **kwargs)


@functools.wraps(_MERGE_ALLOWED)
def _check_merge_allowed(self: BaseTuner) -> None:
    if _unmergeable(self.model):
        methods = sorted({_name(config) for config in self.peft_config.values()})
        raise ValueError(
            f"adapters of {', '.join(methods)} are on quantized layers, and only LoRA can be merged into quantized "
            "weights: keep the adapter next to its base, or make a bfloat16 model with hf_mxfp4.merge_adapters(model, "
            "into='bf16')"
        )
    _MERGE_ALLOWED(self)


def watch_tuners() -> None:
    """Have PEFT's tuners, which share one base class, ask [`check_method`] before they attach and merge."""
    BaseTuner.__init__, BaseTuner.inject_adapter, BaseTuner._check_merge_allowed = (
        _attach,
        _inject,
        _check_merge_allowed,
    )
