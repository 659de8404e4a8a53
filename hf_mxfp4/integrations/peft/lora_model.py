# SPDX-License-Identifier: Apache-2.0
"""LoRA on a model with quantized layers: what is attached, what is refused, and how all of it is merged."""

import copy
import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from ..._logging import get_logger
from ...layers import PACKED, QUANTIZED, TRAINABLE, MXFP4Experts, MXFP4Linear, MXFP4PackedExperts, MXFP4PackedLinear
from ...utils import nearest_names
from ..transformers.pack_model import pack
from .base_scheme import record_base
from .experts import MXFP4LoraExpertParameter, MXFP4LoraExperts, lora_on_experts
from .linear import MXFP4LoraLinear, MXFP4LoraMasterLinear
from .merging import LOSSY_DB, MergeReport, Merges
from .methods import adapters_on_quantized, merge_into_plain, targeted_layers


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
_VARIANTS = ("use_dora", "use_qalora", "lora_bias")


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

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """[`peft.LoraModel.inject_adapter`], but names of targets keep their meaning on models with packed experts:
        PEFT would replace those that experts had in older models by ``target_parameters``."""
        config = self.peft_config[adapter_name]
        self._given = {option: copy.copy(getattr(config, option)) for option in _TARGETS}
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _check_new_adapter_config(self, config: LoraConfig) -> None:
        modules = dict(self.model.named_modules())
        n_experts = sum(isinstance(module, MXFP4PackedExperts) for module in modules.values())
        if n_experts:
            for option, value in self._given.items():
                setattr(config, option, value)
        super()._check_new_adapter_config(config)
        if any(isinstance(module, QUANTIZED) for module in modules.values()):
            _check_target_names(config, self.model, n_experts)
            targeted = targeted_layers(self.model, config, type(self))
            if targeted:
                _check_computation(config, targeted.values())
            _check_parameters(config, modules)
            config._register_custom_module(_LAYERS)
        names = [name for name, other in self.peft_config.items() if other is config]
        record_base(config, self.model, names[0] if names else "")

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """[`peft.LoraModel.merge_adapter`]; what quantizing the sums costs is logged and kept in `merge_report`."""
        super().merge_adapter(*args, **kwargs)
        self._report(_quantized_lora(self.model))

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> nn.Module:
        """[`peft.LoraModel.merge_and_unload`]; a quantized model stays quantized, and `merge_report` on it says what
        quantizing the sums cost."""
        layers = _quantized_lora(self.model)
        model = super().merge_and_unload(*args, **kwargs)
        self._report(layers)
        if self.merge_report is not None:
            model.merge_report = self.merge_report
        return model

    def _report(self, layers: dict[str, Merges]) -> None:
        merged = {name: layer for name, layer in layers.items() if layer.merge_error is not None}
        self.merge_report = None
        if not merged:
            return
        self.merge_report = MergeReport({name: layer.merge_error for name, layer in merged.items()})
        get_logger().info("%s", self.merge_report)
        kept = self.merge_report.total.update_sqnr_db
        if kept < LOSSY_DB:
            get_logger().warning(
                "quantizing the merged weights kept the adapters' change at an SQNR of only %.1f dB: part of what was "
                "trained is lost. Keep the adapter beside its base, or merge into bfloat16 with "
                "hf_mxfp4.merge_adapters(model, into='bf16')",
                kept,
            )


def merge_adapters(model: PeftModel, into: str = "packed") -> nn.Module:
    """Merge the active adapters of a quantized model into its weights, and return the model without adapters.

    Args:
        model: a model with adapters on packed layers or on layers of trainable weights. Methods of PEFT other than LoRA
            can be merged ``into="bf16"`` only.
        into: ``"packed"``: a packed model. Packed weights are packed again under their scheme, as
            `model.merge_and_unload()` does, and sums with trainable weights as [`pack`] does; the signal to noise ratio
            that this cost is logged per layer and kept in `merge_report`. ``"bf16"``: a plain bfloat16 model of weights
            ``Q(W) + delta``; each sum is made in float32 and rounded once.

    Raises:
        TypeError: ``model`` is no PEFT model with adapters in its layers.
        ValueError: another ``into``, a base that is not quantized, or a method that cannot be merged so.
    """
    if into not in ("packed", "bf16"):
        raise ValueError(f"into={into!r} is not supported; choose one of 'packed', 'bf16'")
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, BaseTuner):
        raise TypeError(f"merge_adapters takes a PeftModel with adapters in its layers, not {type(model).__name__}")
    layers = adapters_on_quantized(model)
    if not layers:
        raise ValueError(
            "no adapter of this model is on a quantized layer; use model.merge_and_unload(), which sums in full "
            "precision"
        )
    if into == "packed":
        masters = [layer for layer in layers if isinstance(layer.get_base_layer(), TRAINABLE)]
        for layer in masters[:1]:
            layer.get_base_layer().config.packed()  # raises for a scheme whose weights cannot be packed
        merged = model.merge_and_unload()
        return pack(merged) if masters else merged
    merge_into_plain(layers, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All adapters are already merged")
        plain = model.merge_and_unload()  # what is on plain layers
    quantizer = plain.hf_quantizer
    if any(isinstance(module, QUANTIZED) for module in plain.modules()):
        return quantizer.dequantize(plain, torch.bfloat16)
    plain.__dict__.pop("_weight_conversions", None)  # it saves as any plain model again
    plain.__dict__.pop("quantization_report", None)
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    quantizer.remove_quantization_config(plain)
    return plain


def _quantized_lora(model: nn.Module) -> dict[str, Merges]:
    """Return LoRA on quantized layers by the names of what it adapts: layers, or single parameters of experts."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, MXFP4LoraExpertParameter):
            name = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
        if isinstance(module, Merges):
            layers[name] = module
    return layers


# ---- what is refused ------------------------------------------------------------------------------------------------


def _check_computation(config: LoraConfig, targets: Iterable[nn.Module]) -> None:
    """Refuse what computes with the weights of quantized layers, or is made from packed ones."""
    packed = any(isinstance(layer, PACKED) for layer in targets)
    kind = "packed layers, whose full-precision weights are gone" if packed else "layers that quantize their weight"
    advice = f"is not supported on {kind}; use plain LoRA, or load the base"
    init = config.init_lora_weights
    if packed and init not in _INITS:
        raise ValueError(
            f"init_lora_weights={init!r} {advice} with MXFP4RLConfig(mode='qat') or in full precision (packed layers: "
            f"{', '.join(map(repr, _INITS))})"
        )
    marked = {field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")}
    for name in sorted(marked.union(_VARIANTS)):
        if getattr(config, name, None):
            raise ValueError(f"{name}={getattr(config, name)!r} {advice} in full precision")


def _check_parameters(config: LoraConfig, modules: dict[str, nn.Module]) -> None:
    """Refuse the weight of a trainable linear layer, of which PEFT would make ``Q(W + delta)``."""
    weights = [f"{n.removesuffix('.base_layer')}.weight" for n, m in modules.items() if isinstance(m, MXFP4Linear)]
    for target in config.target_parameters or ():
        for weight in weights:
            if f".{weight}".endswith(f".{target}"):
                raise ValueError(
                    f"target_parameters has {target!r}, which is {weight} of a quantized linear layer: PEFT would "
                    "quantize the adapter with the weight, where most of it is lost; name the layer in target_modules, "
                    "for an adapter beside the quantized weight"
                )


def _check_target_names(config: LoraConfig, model: nn.Module, n_experts: int) -> None:
    """Refuse entries of ``target_modules`` and ``target_parameters`` of an adapter to be trained that are the name of
    nothing in ``model``: PEFT would train the other targets only. Entries are matched as PEFT does it; text in place of
    a list is left to PEFT, which refuses what matches nothing."""
    if n_experts and isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        get_logger().warning(
            'target_modules="all-linear" means linear layers: the experts of %d layers get no adapters. For '
            'adapters on them, give a list of names with "experts" among them',
            n_experts,
        )
    options = {
        "target_modules": ("module", [name for name, _ in model.named_modules() if name]),
        "target_parameters": ("parameter", [name for name, _ in model.named_parameters()]),
    }
    for option, (kind, names) in options.items():
        targets = getattr(config, option, None) or ()
        if isinstance(targets, str) or config.inference_mode:
            continue
        # Below adapters that are there already, names are longer.
        names = list(dict.fromkeys(name.replace(".base_layer", "") for name in names if ".lora_" not in name))
        for target in sorted(targets):
            if not any(f".{name}".endswith(f".{target}") for name in names):
                near = " or ".join(map(repr, nearest_names(target, names)))
                experts = " The packed experts of a layer are one module, called 'experts'." if n_experts else ""
                raise ValueError(
                    f"{option} has {target!r}, the name of no {kind} of {type(model).__name__} (near: {near}). Correct "
                    f"it or leave it out: PEFT would train the other targets only.{experts}"
                )
