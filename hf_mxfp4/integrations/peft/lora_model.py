# SPDX-License-Identifier: Apache-2.0
"""What of PEFT is attached to quantized layers, and what is refused: its methods, LoRA's options and targets; and the
scheme of the base in the adapter's `adapter_config.json`, which is compared on loading.

A method is supported when its layer uses the quantized layer as a function of its input. A method that reads
``layer.weight`` would read packed bytes, or compute with the master weight, which has not been quantized.
"""

import copy
import dataclasses
import re
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING, LoraConfig, PeftConfig
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import BaseTuner, check_target_module_exists
from torch import nn

from ..._logging import get_logger
from ...config import MXFP4RLConfig
from ...layers import PACKED, QUANTIZED, MXFP4Experts, MXFP4Linear, MXFP4PackedExperts, MXFP4PackedLinear
from ...model.plain_layers import is_linear
from ...model.structure import weight_names
from ...ops import effective_rows
from ...utils import nearest_names
from ..patches import change_class
from .expert_adapters import TARGETS, check_reached, target_experts
from .layers import ExpertParameter, MXFP4LoraLinear, MXFP4LoraMasterLinear, lora_on_experts
from .merging import LOSSY_DB, MergeReport, Merges, adapters_on_quantized


#: Methods that compute with ``Q(W)`` on every quantized linear layer; names are those of `peft.PeftType`.
#: `tests/layers/test_peft_methods.py` compares each one with the same method on a plain layer that holds ``Q(W)``.
SUPPORTED = frozenset(
    "ADALORA BEFT BOFT C3A FOURIERFT GRALORA IA3 LILY LORA MISS OFT RANDLORA ROAD VBLORA VERA WAVEFT".split()
)
#: Methods that do so on trainable layers only: on packed ones they take the shape of the bytes for that of the weight.
TRAINABLE_ONLY = frozenset({"LOHA", "LOKR", "UNILORA"})
#: The way that PEFT documents for layers of its users (developer guide, custom models): what stands for LoRA on which.
_LAYERS = {
    MXFP4PackedLinear: MXFP4LoraLinear,
    MXFP4PackedExperts: lora_on_experts,
    MXFP4Linear: MXFP4LoraMasterLinear,
    MXFP4Experts: lora_on_experts,
}
#: Initial values of adapters that are made without looking at the base weight; on experts PEFT has less.
_INITS = (True, False, "gaussian", "orthogonal", "eva")
_EXPERT_INITS = _INITS[:3]
#: Options of `LoraConfig` that change what an adapter computes; PEFT marks them in newer versions.
_VARIANTS = ("use_dora", "use_qalora", "lora_bias")
#: Rows of a weight that a base is known by.
_ROWS = 32


class MXFP4LoraModel(LoraModel):
    """[`peft.LoraModel`] that knows quantized layers.

    What would need full-precision weights that are gone, or would train nothing without a word, is refused with a
    `ValueError` before the model is touched. The adapter's config records the base's scheme.

    Attributes:
        merge_report: what the last merge into quantized layers cost; on the model itself after `merge_and_unload`.
    """

    merge_report: MergeReport | None = None

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Keep the targets as they are given: PEFT converts names that experts had in older models."""
        config = self.peft_config[adapter_name]
        self._given = {option: copy.copy(getattr(config, option)) for option in TARGETS}
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _check_new_adapter_config(self, config: LoraConfig) -> None:
        modules = list(self.model.modules())
        n_experts = sum(isinstance(module, MXFP4PackedExperts) for module in modules)
        target_experts(config, self._given, self.model)
        super()._check_new_adapter_config(config)
        if any(isinstance(module, QUANTIZED) for module in modules):
            config.fan_in_fan_out = False  # as PEFT does for linear layers
            _check_target_names(config, self.model, n_experts)
            _check_computation(config, targeted_layers(self.model, config, type(self)).values())
            config._register_custom_module(_LAYERS)
        # PEFT gives the config without the name of its adapter.
        adapter_name = ""
        for name, known_config in self.peft_config.items():
            if known_config is config:
                adapter_name = name
                break
        _record_base(config, self.model, adapter_name)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: Any
    ) -> Any:
        tensors = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        if any(isinstance(module, QUANTIZED) for module in model.modules()):
            check_reached(model, tensors)
        return tensors

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        """[`peft.LoraModel.merge_adapter`]; what quantizing the sums costs is logged and kept in `merge_report`."""
        super().merge_adapter(*args, **kwargs)
        self._report(_quantized_lora(self.model))

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> nn.Module:
        """[`peft.LoraModel.merge_and_unload`]; a quantized model stays quantized, and gets the `merge_report`."""
        layers = _quantized_lora(self.model)
        model = super().merge_and_unload(*args, **kwargs)
        self._report(layers)
        if self.merge_report is not None:
            model.merge_report = self.merge_report
            if hasattr(model, "hf_quantizer"):
                model.hf_quantizer.record = {"weight_sqnr_db": None}  # the known one is that of the weights before
        return model

    def _report(self, layers: dict[str, Merges]) -> None:
        """Keep and log what the merges of these layers cost; warn if they lost much of what was trained."""
        errors = {name: layer.merge_error for name, layer in layers.items() if layer.merge_error is not None}
        if not errors:
            self.merge_report = None
            return
        self.merge_report = MergeReport(errors)
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
        if isinstance(module, ExpertParameter):
            name = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
        if isinstance(module, Merges):
            layers[name] = module
    return layers


# ---- methods -------------------------------------------------------------------------------------------------------


def targeted_layers(model: nn.Module, config: PeftConfig, tuner: type[BaseTuner]) -> dict[str, nn.Module]:
    """Return the quantized layers that the targets match, by the names that they have without adapters."""
    layers = _quantized_layers(model)
    targeted = {}

    # Targets that are parameters.
    for name, layer in layers.items():
        parameters = [f".{name}.{parameter}" for parameter, _ in layer.named_parameters()]
        for target in getattr(config, "target_parameters", None) or ():
            if any(parameter.endswith(f".{target}") for parameter in parameters):
                targeted[name] = layer

    # Targets that are modules. PEFT has usual ones for many types of models.
    targets = getattr(config, "target_modules", None)
    if targets is None:
        model_type = getattr(getattr(model, "config", None), "model_type", None)
        usual_targets = getattr(tuner, "target_module_mapping", None) or {}
        targets = usual_targets.get(model_type)
    if targets is None:
        return targeted
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return targeted | {name: layer for name, layer in layers.items() if is_linear(layer)}
    config = copy.copy(config)
    config.target_modules = targets
    return targeted | {name: layer for name, layer in layers.items() if check_target_module_exists(config, name)}


def _quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the quantized layers by the names that they have without adapters."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QUANTIZED)}
    return {name.replace(".base_layer", ""): layer for name, layer in layers.items()}


def check_method(tuner: BaseTuner, model: nn.Module, config: PeftConfig) -> None:
    """Raise `ValueError` for a method that cannot compute on the layers that it targets, or trains packed bytes."""
    _check_saved_modules(config, model)
    targeted = targeted_layers(model, config, type(tuner))
    if not targeted:
        return
    packed = [name for name, layer in targeted.items() if isinstance(layer, PACKED)]
    if packed:
        supported = SUPPORTED
        where = f"on {packed[0]}, a packed quantized layer"
        weight_state = "is stored in 4 bits"
    else:
        supported = SUPPORTED | TRAINABLE_ONLY
        where = f"on {next(iter(targeted))}, a trainable quantized layer"
        weight_state = "is not quantized yet"
    method = config.peft_type.name
    registered = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    if registered is None or not isinstance(tuner, registered):
        raise ValueError(f"{type(tuner).__name__} is not supported {where}: attach {method} with get_peft_model")
    if method == "MISS" and config.init_weights == "bat":
        raise ValueError(f"MISS with init_weights='bat' is not supported {where}: it computes with the plain weight")
    if method not in supported:
        raise ValueError(
            f"{method} is not supported {where}: it computes with the layer's weight, which {weight_state}, or it has "
            f"not been tried. Use one of {', '.join(sorted(supported))}, or keep these layers in full precision with "
            "MXFP4RLConfig(modules_to_not_convert=[...])"
        )


def _check_saved_modules(config: PeftConfig, model: nn.Module) -> None:
    """Refuse what PEFT would wrap around stored bytes, or a master weight; it compares the ends of names."""
    stored = set()  # packed tensors that are no target
    masters = set()
    modules = set()  # packed layers, their tensors, and all modules around them
    for name, layer in _quantized_layers(model).items():
        if isinstance(layer, MXFP4Linear):
            masters.add(f"{name}.weight")
        if isinstance(layer, PACKED):
            tensors = {f"{name}.{tensor}" for tensor in layer.shapes()}
            modules |= tensors | {name[: end.start()] for end in re.finditer(r"\.|$", name)}
            # Weights of experts can be named, as those of the plain model can be.
            stored |= tensors - {f"{name}.{projection}" for projection in getattr(layer, "projections", ())}
    for option in ("target_parameters", "modules_to_save", "trainable_token_indices"):
        refused = modules
        if option == "target_parameters":
            refused = stored | masters
        for target in getattr(config, option, None) or ():
            matches = sorted(name for name in refused if isinstance(target, str) and name.endswith(target))
            if not matches:
                continue
            reason = "is a packed layer, a part of one or around one, whose weight is stored in 4 bits and frozen"
            if matches[0] in masters:
                reason = "is of a trainable quantized layer: PEFT would quantize the adapter with the weight"
            raise ValueError(
                f"{option} has {target!r}: {matches[0]} {reason}; name the layer in target_modules for LoRA, or keep "
                "it in full precision with MXFP4RLConfig(modules_to_not_convert=[...])"
            )


def check_merge(tuner: BaseTuner) -> None:
    """Raise `ValueError` for adapters on quantized layers that cannot be merged into quantized weights."""
    if any(not isinstance(layer, Merges) for layer in adapters_on_quantized(tuner.model)):
        methods = sorted({config.peft_type.name for config in tuner.peft_config.values()})
        raise ValueError(
            f"adapters of {', '.join(methods)} are on quantized layers, and only LoRA can be merged into quantized "
            "weights: keep the adapter next to its base, or make a bfloat16 model with hf_mxfp4.merge_adapters(model, "
            "into='bf16')"
        )


# ---- what is refused of LoRA -----------------------------------------------------------------------------------------


def _check_computation(config: LoraConfig, targets: Iterable[nn.Module]) -> None:
    """Refuse what computes with the weights of quantized layers, or is made from packed ones."""
    if not targets:
        return
    is_packed = any(isinstance(layer, PACKED) for layer in targets)
    kind = "layers that quantize their weight"
    if is_packed:
        kind = "packed layers, whose full-precision weights are gone"
    advice = f"is not supported on {kind}; use plain LoRA, or load the base"
    init = config.init_lora_weights
    if init not in _EXPERT_INITS and not all(is_linear(layer) for layer in targets):
        raise ValueError(f"init_lora_weights={init!r} is not supported on experts ({_listed(_EXPERT_INITS)})")
    if is_packed and init not in _INITS:
        raise ValueError(
            f"init_lora_weights={init!r} {advice} with MXFP4RLConfig(mode='qat') or in full precision (packed layers: "
            f"{_listed(_INITS)})"
        )
    marked = {field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")}
    for name in sorted(marked.union(_VARIANTS)):
        value = getattr(config, name, None)
        if value:
            raise ValueError(f"{name}={value!r} {advice} in full precision")


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(repr, values))


def _check_target_names(config: LoraConfig, model: nn.Module, n_experts: int) -> None:
    """Refuse targets of an adapter to be trained that are the name of nothing: PEFT would train the other ones only."""
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
            if any(f".{name}".endswith(f".{target}") for name in names):
                continue
            near = " or ".join(map(repr, nearest_names(target, names)))
            message = (
                f"{option} has {target!r}, the name of no {kind} of {type(model).__name__} (near: {near}). Correct it "
                "or leave it out: PEFT would train the other targets only."
            )
            if n_experts:
                message += " The packed experts of a layer are one module, called 'experts'."
            raise ValueError(message)


# ---- the scheme of the base ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class MXFP4LoraConfig(LoraConfig):
    """[`peft.LoraConfig`] of an adapter on a quantized base, with the base's scheme in `adapter_config.json`. The one
    becomes the other when its adapter is attached; without hf_mxfp4, PEFT warns of the additional entry."""

    base_quantization: dict[str, Any] | None = dataclasses.field(
        default=None,
        metadata={"help": "The MXFP4RLConfig of the model that the adapter was trained on, as in its config.json."},
    )
    base_checksum: int | None = dataclasses.field(
        default=None, metadata={"help": "A checksum of rows of that model's quantized weights."}
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a dictionary; those of PEFT alone where the base is not quantized."""
        options = super().to_dict()
        for name in ("base_quantization", "base_checksum"):
            if options[name] is None:
                del options[name]
        return options


def base_scheme(model: nn.Module) -> MXFP4RLConfig | None:
    """Return the scheme of a model that was quantized by this package, otherwise `None`."""
    scheme = getattr(getattr(model, "config", None), "quantization_config", None)
    if isinstance(scheme, MXFP4RLConfig):
        return scheme
    return None  # the model has no scheme, or one of another package


def _record_base(config: LoraConfig, model: nn.Module, adapter_name: str) -> None:
    """Note the scheme of ``model`` in ``config``, in place; warn if it has another one from a file."""
    scheme = base_scheme(model)
    stored = getattr(config, "base_quantization", None)
    checksum = _checksum(model)
    if stored is not None:
        has_other_weights = None not in (config.base_checksum, checksum) and config.base_checksum != checksum
        _compare(adapter_name, stored, scheme, has_other_weights)
        if config.inference_mode:  # it was loaded as it is, and keeps the base that it was trained on
            return
    if scheme is not None and type(config) is LoraConfig:
        change_class(config, MXFP4LoraConfig)
    if isinstance(config, MXFP4LoraConfig):
        config.base_quantization = None if scheme is None else scheme.to_dict()
        config.base_checksum = checksum


@torch.no_grad()
def _checksum(model: nn.Module) -> int | None:
    """Return a checksum of rows of all quantized weights, the same for packed and trainable models of one base; `None`
    without such rows here, and under rotations, which are undone by sums in another order. A base that was smoothed
    with other scales, in whatever layer, has another one.
    """
    layers = [module for module in model.modules() if isinstance(module, QUANTIZED)]
    if not layers:
        return None
    checksum = 0
    for layer in layers:
        for name in weight_names(layer):
            weight = getattr(layer, name)
            is_here = not weight.is_meta and weight.numel() and not hasattr(weight, "full_tensor")
            if not is_here or layer.config.weight_rotation:
                return None
            values = _first_rows(layer, name).bfloat16().cpu()
            checksum = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def _first_rows(layer: nn.Module, projection: str) -> torch.Tensor:
    """Return the values of rows of a quantized weight, of all experts one after the other."""
    if isinstance(layer, MXFP4Linear):
        return layer.effective_weight(layer.weight[:_ROWS].float())
    if isinstance(layer, MXFP4PackedLinear):
        parts = tuple(None if part is None else part[:_ROWS] for part in layer.packed_weight())
        return layer.unpacked(parts, torch.float32)
    if isinstance(layer, MXFP4PackedExperts):
        packed = layer.packed_weight(projection)
        parts = tuple(None if part is None else part[:, :_ROWS].flatten(0, 1) for part in packed)
        return layer.unpacked(projection, parts, torch.float32)
    rows = layer.rows_first(getattr(layer, projection))[:, :_ROWS].flatten(0, 1)
    return effective_rows(rows.float(), layer.states[projection])


def _compare(adapter_name: str, stored: dict[str, Any], scheme: MXFP4RLConfig | None, has_other_weights: bool) -> None:
    """Warn if an adapter was trained on a base of another scheme, or with other weights."""
    try:
        trained = MXFP4RLConfig.from_dict(stored)
    except (TypeError, ValueError) as error:
        message = "adapter %r names a quantization scheme of its base that cannot be read: %s"
        get_logger().warning(message, adapter_name, error)
        return
    # Packed and trainable models of the same scheme compute alike.
    if scheme is None or _computation(trained) != _computation(scheme):
        get_logger().warning(
            "adapter %r was made for a base %s, and is now attached to one %s: expect other outputs, or load the base "
            "with the adapter's scheme", adapter_name, _described(trained), _described(scheme),
        )  # fmt: skip
    elif has_other_weights:
        get_logger().warning(
            "adapter %r was made for a base of the same scheme with other weights: expect other outputs. A base that "
            "was smoothed as it was loaded must be so again (mode 'qat', smooth=True), or be saved", adapter_name,
        )  # fmt: skip


def _computation(scheme: MXFP4RLConfig) -> tuple[Any, set[str]]:
    """Return the forward product of quantized layers, and which layers are not."""
    return scheme.gemms().fprop, set(scheme.modules_to_not_convert or ())


def _described(scheme: MXFP4RLConfig | None) -> str:
    """Return what a base is, in words that continue a sentence."""
    if scheme is None:
        return "in full precision"
    text = f"quantized as {scheme.describe()}"
    if scheme.modules_to_not_convert:
        text += f" without {', '.join(scheme.modules_to_not_convert)}"
    return text
