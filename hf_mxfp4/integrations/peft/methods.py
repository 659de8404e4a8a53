# SPDX-License-Identifier: Apache-2.0
"""Check which of PEFT's methods are attached to quantized layers, and keep them from writing into packed weights.

A method is supported when its layer uses the quantized layer as a function of its input. A method that reads
``layer.weight`` would read packed bytes, or compute with the master weight, which has not been quantized.
"""

import copy
import functools
import re
from typing import Any

from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftConfig
from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
from torch import nn

from ...layers import PACKED, QUANTIZED, MXFP4Linear
from .merging import Merges, adapters_on_quantized


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
    config = copy.copy(config)
    config.target_modules = targets
    return {name: layer for name, layer in layers.items() if check_target_module_exists(config, name)}


def check_method(tuner: BaseTuner, model: nn.Module, config: PeftConfig) -> None:
    """Raise `ValueError` for a method that cannot compute on the quantized layers that it targets, or that would train
    packed bytes."""
    _check_saved_modules(config, model)
    hit = targeted_layers(model, config, type(tuner))
    if not hit:
        return
    name, layer = next(((n, m) for n, m in hit.items() if isinstance(m, PACKED)), next(iter(hit.items())))
    is_packed, method = isinstance(layer, PACKED), config.peft_type.name
    registered = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    where = f"on {name}, a {'packed' if is_packed else 'trainable'} quantized layer"
    if registered is None or not isinstance(tuner, registered):
        raise ValueError(f"{type(tuner).__name__} is not supported {where}: attach {method} with get_peft_model")
    if method == "MISS" and config.init_weights == "bat":
        raise ValueError(f"MISS with init_weights='bat' is not supported {where}: it computes with the plain weight")
    supported = SUPPORTED if is_packed else SUPPORTED | TRAINABLE_ONLY
    if method not in supported:
        raise ValueError(
            f"{method} is not supported {where}: it computes with the layer's weight, which "
            f"{'is stored in 4 bits' if is_packed else 'is not quantized yet'}, or it has not been tried. Use one of "
            f"{', '.join(sorted(supported))}, or keep these layers in full precision with "
            "MXFP4RLConfig(modules_to_not_convert=[...])"
        )


def _check_saved_modules(config: PeftConfig, model: nn.Module) -> None:
    """Refuse what PEFT would wrap around stored bytes, or around a master weight, of which it would make
    ``Q(W + delta)``; it compares the ends of names."""
    layers = {name.removesuffix(".base_layer"): m for name, m in model.named_modules() if isinstance(m, QUANTIZED)}
    packed = {name: layer for name, layer in layers.items() if isinstance(layer, PACKED)}
    places = {name[: end.start()] for name in packed for end in re.finditer(r"\.|$", name)}
    places |= {f"{name}.{own}" for name, layer in packed.items() for own, _ in layer.named_parameters()}
    masters = {f"{name}.weight" for name, layer in layers.items() if isinstance(layer, MXFP4Linear)}
    for option in ("target_parameters", "modules_to_save", "trainable_token_indices"):
        found = places | masters if option == "target_parameters" else places
        for target in getattr(config, option, None) or ():
            hit = min((place for place in found if isinstance(target, str) and place.endswith(target)), default=None)
            what = "is a packed layer, a part of one or around one, whose weight is stored in 4 bits and frozen"
            if hit in masters:
                what = "is of a trainable quantized layer: PEFT would quantize the adapter with the weight"
            if hit is not None:
                raise ValueError(
                    f"{option} has {target!r}: {hit} {what}; name the layer in target_modules for LoRA, or keep it in "
                    "full precision with MXFP4RLConfig(modules_to_not_convert=[...])"
                )


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
    if any(not isinstance(layer, Merges) for layer in adapters_on_quantized(self.model)):
        methods = sorted({config.peft_type.name for config in self.peft_config.values()})
        raise ValueError(
            f"adapters of {', '.join(methods)} are on quantized layers, and only LoRA can be merged into quantized "
            "weights: keep the adapter next to its base, or make a bfloat16 model with hf_mxfp4.merge_adapters(model, "
            "into='bf16')"
        )
    _MERGE_ALLOWED(self)


def watch_tuners() -> None:
    """Have all tuners of PEFT ask [`check_method`] before they attach and merge."""
    BaseTuner.__init__, BaseTuner.inject_adapter = _attach, _inject
    BaseTuner._check_merge_allowed = _check_merge_allowed
