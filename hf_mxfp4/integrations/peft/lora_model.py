# SPDX-License-Identifier: Apache-2.0
"""LoRA on a model with quantized layers: what is attached, what is refused, and the scheme of the base in the adapter's
`adapter_config.json`, which is compared on loading."""

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraModel
from torch import nn

from ..._logging import get_logger
from ...config import MXFP4RLConfig
from ...layers import PACKED, QUANTIZED, MXFP4Experts, MXFP4Linear, MXFP4PackedExperts, MXFP4PackedLinear
from ...utils import nearest_names
from .layers import MXFP4LoraExpertParameter, MXFP4LoraExperts, MXFP4LoraLinear, MXFP4LoraMasterLinear, lora_on_experts
from .merging import LOSSY_DB, MergeReport, Merges
from .methods import targeted_layers


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
    """[`peft.LoraModel`] that knows quantized layers.

    Packed layers get [`MXFP4LoraLinear`], packed experts [`MXFP4LoraExperts`], trainable layers
    [`MXFP4LoraMasterLinear`], and trainable experts, by ``target_parameters``, [`MXFP4LoraExpertParameter`]. What would
    need full-precision weights that are gone, or would train nothing without a word, is refused with a `ValueError`
    before the model is touched. The adapter's config records the base's scheme.

    Attributes:
        merge_report: what the last merge into quantized layers cost; on the model itself after `merge_and_unload`.
    """

    merge_report: MergeReport | None = None

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Keep the targets as they are given, for models with packed experts: PEFT would replace names that experts had
        in older models by ``target_parameters``."""
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
            config.fan_in_fan_out = False  # as PEFT does for linear layers
            _check_target_names(config, self.model, n_experts)
            _check_computation(config, targeted_layers(self.model, config, type(self)).values())
            config._register_custom_module(_LAYERS)
        _record_base(config, self.model, next((n for n, own in self.peft_config.items() if own is config), ""))

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
        errors = {name: layer.merge_error for name, layer in layers.items() if layer.merge_error is not None}
        self.merge_report = MergeReport(errors) if errors else None
        if not errors:
            return
        get_logger().info("%s", self.merge_report)
        kept = self.merge_report.total.update_sqnr_db
        if kept < LOSSY_DB:
            get_logger().warning(
                "quantizing the merged weights kept the adapters' change at an SQNR of only %.1f dB: part of what was "
                "trained is lost. Keep the adapter beside its base, or merge into bfloat16 with "
                "hf_mxfp4.merge_adapters(model, into='bf16')",
                kept,
            )


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
    if not targets:
        return
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


def _check_target_names(config: LoraConfig, model: nn.Module, n_experts: int) -> None:
    """Refuse targets of an adapter to be trained that are the name of nothing in ``model``: PEFT would train the other
    targets only. Names are matched as PEFT does it, which itself refuses text that matches nothing."""
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


# ---- the scheme of the base ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class MXFP4LoraConfig(LoraConfig):
    """[`peft.LoraConfig`] of an adapter on a quantized base; `adapter_config.json` holds the base's scheme too.

    A [`peft.LoraConfig`] becomes one when its adapter is attached to a quantized model. Without hf_mxfp4, PEFT reads
    the file as well, and warns of the additional entry.
    """

    base_quantization: dict[str, Any] | None = dataclasses.field(
        default=None,
        metadata={"help": "The MXFP4RLConfig of the model that the adapter was trained on, as in its config.json."},
    )


def base_scheme(model: nn.Module) -> MXFP4RLConfig | None:
    """Return the scheme of a model that was quantized by this package, otherwise `None`."""
    scheme = getattr(getattr(model, "config", None), "quantization_config", None)
    return scheme if isinstance(scheme, MXFP4RLConfig) else None


def _record_base(config: LoraConfig, model: nn.Module, adapter_name: str) -> None:
    """Note the scheme of ``model`` in ``config``, in place. If it has another one already, from a file, warn of the
    difference; an adapter loaded for inference keeps it."""
    found, stored = base_scheme(model), getattr(config, "base_quantization", None)
    if stored is not None:
        _compare(adapter_name, stored, found)
        if config.inference_mode:
            return
    if found is not None and type(config) is LoraConfig:
        # In place, because PEFT holds several references to this object and reads from each of them.
        config.__class__ = MXFP4LoraConfig
    if isinstance(config, MXFP4LoraConfig):
        config.base_quantization = None if found is None else found.to_dict()


def _compare(adapter_name: str, stored: dict[str, Any], found: MXFP4RLConfig | None) -> None:
    try:
        trained = MXFP4RLConfig.from_dict(stored)
    except (TypeError, ValueError) as error:
        get_logger().warning(
            "adapter %r names a quantization scheme of its base that cannot be read: %s", adapter_name, error
        )
        return
    if found is None or _values(found) != _values(trained):
        get_logger().warning(
            "adapter %r was made for a base quantized as %s, and is now attached to one %s: expect other outputs, or "
            "load the base with the adapter's scheme",
            adapter_name,
            _describe(trained),
            "in full precision" if found is None else f"quantized as {_describe(found)}",
        )


def _values(scheme: MXFP4RLConfig) -> tuple:
    # Packed and trainable models of the same scheme compute alike.
    return scheme.gemms().fprop, frozenset(scheme.modules_to_not_convert or ())


def _describe(scheme: MXFP4RLConfig) -> str:
    names = scheme.modules_to_not_convert
    return scheme.describe() + (f" without {', '.join(names)}" if names else "")
