# SPDX-License-Identifier: Apache-2.0
"""LoRA on a model with quantized layers: what is attached, what is refused, and how all of it is merged."""

import copy
import dataclasses
import re
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraModel
from torch import nn

from .._logging import get_logger
from ..dither import round_frozen_masters
from ..layers import PACKED, QUANTIZED, TRAINABLE, MXFP4Experts, MXFP4Linear, MXFP4PackedExperts, MXFP4PackedLinear
from ..quantizer.pack_model import pack
from .base_scheme import record_base
from .expert_lora import MXFP4LoraExperts
from .expert_parameters import lora_on_experts
from .lora_layer import MXFP4LoraLinear
from .master_lora import MXFP4LoraMasterLinear
from .merge.merge_cost import LOSSY_DB, adapted_layers
from .merge.merge_report import MergeReport
from .merge.merging import Merges, MergesIntoPacked
from .target_names import check_expert_targets, check_target_names


#: The way that PEFT documents for layers of its users (developer guide, custom models): what stands for LoRA on which.
_LAYERS = {
    MXFP4PackedLinear: MXFP4LoraLinear,
    MXFP4PackedExperts: MXFP4LoraExperts,
    MXFP4Linear: MXFP4LoraMasterLinear,
    MXFP4Experts: lora_on_experts,
}
#: Options of `LoraConfig` that say which layers get adapters, and of what size.
_TARGETS = ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern")
#: Initial values of adapters that are made without looking at the base weight.
_INITS = (True, False, "gaussian")
#: Options of `LoraConfig` that change what an adapter computes; PEFT marks them in newer versions.
_VARIANTS = ("use_dora", "use_qalora")


class MXFP4LoraModel(LoraModel):
    """[`peft.LoraModel`], which it is in all respects for models without quantized layers.

    Packed layers get [`MXFP4LoraLinear`], packed experts [`MXFP4LoraExperts`]. What would need their full-precision
    weights, or would train nothing without a word, is refused with a `ValueError` before the model is touched. Layers
    of trainable weights get [`MXFP4LoraMasterLinear`], their experts, by ``target_parameters``,
    [`MXFP4LoraExpertParameter`]. The adapter's config records the base's scheme.

    Attributes:
        merge_report: what the last merge into quantized layers cost; on the model itself after `merge_and_unload`.
    """

    merge_report: MergeReport | None = None
    _told: tuple[str, ...] = ()

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """[`peft.LoraModel.inject_adapter`], but names of targets keep their meaning on models with packed experts:
        PEFT would replace those that experts had in older models by ``target_parameters``. Masters that become frozen
        have their dither taken back."""
        config = self.peft_config[adapter_name]
        self._asked = {option: copy.copy(getattr(config, option)) for option in _TARGETS}
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        round_frozen_masters(model)

    def _check_new_adapter_config(self, config: LoraConfig) -> None:
        if any(isinstance(module, MXFP4PackedExperts) for module in self.model.modules()):
            for option, value in self._asked.items():
                setattr(config, option, value)
            check_expert_targets(config, self.model)
        super()._check_new_adapter_config(config)
        check_target_names(config, self.model, any(isinstance(module, QUANTIZED) for module in self.model.modules()))
        packed = _packed_layers(self.model)
        if packed:
            _check_computation(config)
            _check_targets(config, packed)
        trainable = {name: m for name, m in self.model.named_modules() if isinstance(m, TRAINABLE)}
        _check_parameters(config, trainable)
        if packed or trainable:
            config._register_custom_module(_LAYERS)
        names = [name for name, other in self.peft_config.items() if other is config]
        record_base(config, self.model, names[0] if names else "")

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """[`peft.LoraModel.merge_adapter`]; what quantizing the sums costs is kept in `merge_report`, and logged: when
        the same adapters are merged again and again, as for the weights of another engine, the first time."""
        super().merge_adapter(*args, **kwargs)
        layers = adapted_layers(self.model)
        merged = tuple(dict.fromkeys(adapter for layer in layers.values() for adapter in layer.merged_adapters))
        self._report(layers, told=merged == self._told)
        self._told = merged

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> nn.Module:
        """[`peft.LoraModel.merge_and_unload`]; a quantized model stays quantized, and `merge_report` on it says what
        quantizing the sums cost."""
        layers = adapted_layers(self.model)
        model = super().merge_and_unload(*args, **kwargs)
        self._report(layers)
        if self.merge_report is not None:
            model.merge_report = self.merge_report
        return model

    def _report(self, layers: dict[str, Merges], told: bool = False) -> None:
        merged = {name: layer for name, layer in layers.items() if layer.merge_error is not None}
        self.merge_report = None
        if not merged:
            return
        kinds = {"packed" if isinstance(layer, MergesIntoPacked) else "trainable" for layer in merged.values()}
        errors = {name: layer.merge_error for name, layer in merged.items()}
        self.merge_report = MergeReport(errors, " and ".join(sorted(kinds)))
        if told:
            return
        get_logger().info("%s", self.merge_report)
        lost = self.merge_report.total.update_sqnr_db
        if lost < LOSSY_DB:
            get_logger().warning(
                "%s the merged weights kept the adapters' change at an SQNR of only %.1f dB: part of what was "
                "trained is lost. Keep the adapter beside its base, or merge into bfloat16 with "
                "hf_mxfp4.merge_adapters(model, into='bf16')",
                "packing" if kinds == {"packed"} else "quantizing",
                lost,
            )


def merge_adapters(model: PeftModel, into: str = "packed") -> nn.Module:
    """Merge the active LoRA adapters of a quantized model into its weights; the model without adapters.

    Args:
        model: a model with LoRA adapters on packed layers or on layers of trainable weights.
        into: ``"packed"``: a packed model. Packed weights are packed again under their scheme, as
            `model.merge_and_unload()` does, and sums with trainable weights as [`pack`] does; the signal to noise ratio
            that this cost is logged per layer and kept in `merge_report`. ``"bf16"``: a plain bfloat16 model of weights
            ``Q(W) + delta``; each sum is rounded once, but for what was not quantized before.

    Raises:
        TypeError: ``model`` is no PEFT model with LoRA.
        ValueError: another ``into``, a base that is not quantized, or a variant of LoRA that does more than add to a
            weight.
    """
    if into not in ("packed", "bf16"):
        raise ValueError(f"into={into!r} is not supported; choose one of 'packed', 'bf16'")
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, LoraModel):
        raise TypeError(f"merge_adapters takes a PeftModel with LoRA adapters, not {type(model).__name__}")
    layers = adapted_layers(model)
    if not layers:
        raise ValueError(
            "no adapter of this model is on a quantized layer; use model.merge_and_unload(), which sums in full "
            "precision"
        )
    masters = [layer for layer in layers.values() if not isinstance(layer, MergesIntoPacked)]
    if into == "packed":
        for layer in masters[:1]:
            layer.get_base_layer().config.packed()  # raises for a scheme whose weights cannot be packed
        merged = model.merge_and_unload()
        return pack(merged) if masters else merged
    for layer in masters:
        if any(name in layer.lora_variant for name in layer.active_adapters):
            raise ValueError(
                "an adapter of this model is a variant of LoRA that does more than add to a weight, as DoRA does; "
                "merge it with model.merge_and_unload(), or keep it beside its base"
            )
    for layer in layers.values():
        layer.unload_dtype = torch.bfloat16
        layer.merge_error = None
    plain = model.merge_and_unload()
    if any(isinstance(layer, MXFP4LoraExperts) for layer in layers.values()):
        plain.__dict__.pop("_weight_conversions", None)  # it saves as any plain model again
    quantizer = plain.hf_quantizer
    if any(isinstance(module, QUANTIZED) for module in plain.modules()):
        return quantizer.dequantize(plain, torch.bfloat16)
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    plain.__dict__.pop("quantization_report", None)
    quantizer.remove_quantization_config(plain)
    return plain


def _packed_layers(model: nn.Module) -> dict[str, MXFP4PackedLinear | MXFP4PackedExperts]:
    """Packed layers by the names that they have without adapters."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, PACKED)}
    return {name.removesuffix(".base_layer"): layer for name, layer in layers.items()}


def _check_computation(config: LoraConfig) -> None:
    advice = (
        "is not supported on packed layers, whose full-precision weights are gone; use plain LoRA, or load the base "
        "with MXFP4RLConfig(mode='qat') or in full precision"
    )
    init = config.init_lora_weights
    if init not in _INITS:
        raise ValueError(f"init_lora_weights={init!r} {advice} (packed layers: {', '.join(map(repr, _INITS))})")
    marked = {field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")}
    for name in sorted(marked.union(_VARIANTS)):
        if getattr(config, name, None):
            raise ValueError(f"{name}={getattr(config, name)!r} {advice}")


def _check_targets(config: LoraConfig, packed: dict[str, MXFP4PackedLinear | MXFP4PackedExperts]) -> None:
    """Refuse what PEFT would wrap around the stored bytes instead of the weight."""
    advice = (
        "whose weight is stored in 4 bits and frozen; name the layer in target_modules for LoRA, or keep it in full "
        "precision with MXFP4RLConfig(modules_to_not_convert=[...])"
    )
    stored = [f"{name}.{own}" for name, layer in packed.items() for own, _ in layer.named_parameters()]
    for target in config.target_parameters or ():
        hit = next((name for name in stored if f".{name}".endswith(f".{target}")), None)
        if hit is not None:
            raise ValueError(f"target_parameters has {target!r}, which is {hit} of a packed layer, {advice}")
    # PEFT compares the ends of modules' names.
    places = {name[: end.start()] for name in packed for end in re.finditer(r"\.|$", name)}
    tokens = config.trainable_token_indices
    options = {
        "modules_to_save": config.modules_to_save or (),
        "trainable_token_indices": tokens if isinstance(tokens, dict) else (),
    }
    for option, targets in options.items():
        for target in targets:
            hit = min((place for place in places if place.endswith(target)), default=None)
            if hit is not None:
                what = "is" if hit in packed else "contains"
                raise ValueError(f"{option} has {target!r}: {hit} {what} a packed layer, {advice}")


def _check_parameters(config: LoraConfig, trainable: dict[str, MXFP4Linear | MXFP4Experts]) -> None:
    """Refuse the weight of a linear layer, of which PEFT would make ``Q(W + delta)``."""
    for target in config.target_parameters or ():
        for name, layer in trainable.items():
            weight = f"{name.removesuffix('.base_layer')}.weight"
            if isinstance(layer, MXFP4Linear) and f".{weight}".endswith(f".{target}"):
                raise ValueError(
                    f"target_parameters has {target!r}, which is {weight} of a quantized linear layer: PEFT would "
                    "quantize the adapter with the weight, where most of it is lost; name the layer in target_modules, "
                    "for an adapter beside the quantized weight"
                )
