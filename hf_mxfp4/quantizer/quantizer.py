# SPDX-License-Identifier: Apache-2.0
"""`MXFP4RLQuantizer`: how transformers applies an [`MXFP4RLConfig`] to a model it loads, saves or trains."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from .._logging import get_logger
from ..checkpoint import check_checkpoint, check_packed_files, make_record, take_state_dict, wrap_saving
from ..checkpoint.io.mapped import resolved
from ..config import QUANT_METHOD, MXFP4RLConfig
from ..dither import dither_masters
from ..experts_layout import projections
from ..layers import (
    PACKED,
    QUANTIZED,
    Matrix,
    MXFP4Experts,
    MXFP4Linear,
    MXFP4PackedExperts,
    MXFP4PackedLinear,
    matrix_names,
    trainable_matrices,
)
from ..layers.experts_base import ExpertsBase
from ..module_names import find_layers, full_names, name_matches
from ..report import ErrorEnergy, QuantizationReport, count_weights, master_sqnr
from .generation import wrap_generation
from .tables import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)


MakeLayer = Callable[[nn.Module, MXFP4RLConfig, str], nn.Module]


class MXFP4RLQuantizer(HfQuantizer):
    """Swaps the linear layers of a decoder for [`MXFP4Linear`] or [`MXFP4PackedLinear`] as the model is loaded, and
    experts in fused weights for [`MXFP4Experts`] or [`MXFP4PackedExperts`].

    Mode ``"qat"``: master weights keep their names and dtypes, so any checkpoint of the architecture loads, sharded or
    not, and what `save_pretrained` writes is that checkpoint again plus the scheme in `config.json`.

    Mode ``"packed"``: the weights of a full-precision checkpoint are packed one by one as they are read; a checkpoint
    of packed weights is checked against the scheme in its `config.json` and loaded as it is.
    """

    requires_calibration = False

    def __init__(self, quantization_config: MXFP4RLConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self._swapped: tuple[list[str], list[str]] = ([], [])
        self._loads = True
        #: The error of packing a full-precision checkpoint, and the files that it is read from.
        self.error_energy = ErrorEnergy()
        self.source_files: frozenset[str] = frozenset()
        #: What the files of a quantized checkpoint say of themselves.
        self.record: dict = {}
        #: Of the model, whose methods know of quantized layers.
        self.model_class: type | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._wrap_methods()  # a model that was unpickled has not been loaded here

    def _wrap_methods(self) -> None:
        if self.model_class is not None:
            wrap_saving(self.model_class)
            wrap_generation(self.model_class)

    @property
    def _packed(self) -> bool:
        return self.quantization_config.mode == "packed"

    @property
    def _packs_on_load(self) -> bool:
        return self._packed and not self.pre_quantized

    def validate_environment(self, *args, device_map=None, **kwargs):
        if self._packed and isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map puts packed weights on disk, from where they cannot be used; they take about a quarter of "
                "their size in bfloat16, so that 'cpu' may do"
            )

    def _process_model_before_weight_loading(self, model, checkpoint_files: Sequence[str] | None = None, **kwargs):
        _refuse_parallel_plan(model)
        make = _placeholder if self._packs_on_load else None
        self._swapped = quantize_linears(model, self.quantization_config, make)
        if kwargs.get("use_kernels") and any(isinstance(module, ExpertsBase) for module in model.modules()):
            raise ValueError(
                "use_kernels=True lets transformers replace whole layers of experts by kernels that compute in full "
                "precision; load the model without it, or add 'experts' to modules_to_not_convert"
            )
        layers = _packed_layers(model)
        for layer in layers.values():
            # transformers would draw random numbers for a tensor that is missing, and fail on uint8.
            layer._is_hf_initialized = True
        if self.pre_quantized and checkpoint_files:
            self.record = check_checkpoint(checkpoint_files, model, self.quantization_config)
        if self._packs_on_load:
            self.source_files = resolved(checkpoint_files or ())
        elif self._packed and checkpoint_files:
            shapes = {name: layer.shapes() for name, layer in layers.items()}
            check_packed_files(checkpoint_files, shapes, getattr(model, "base_model_prefix", ""))
        return model

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        """Exactly the full-precision placeholders of a checkpoint that is packed as it is read."""
        owner, _, name = param_name.rpartition(".")
        if not self._packs_on_load:
            return False
        layer = model.get_submodule(owner)
        if isinstance(layer, MXFP4PackedExperts):
            return name in layer.projections
        return name == "weight" and isinstance(layer, MXFP4PackedLinear)

    def param_element_size(self, model, param_name: str, param) -> float:
        """Bytes per element, for `device_map="auto"`: two codes share a byte; the scales are counted by themselves."""
        return 0.5 if self.param_needs_quantization(model, param_name) else param.element_size()

    def get_quantize_ops(self):
        from .pack import PackOnLoad

        return PackOnLoad(self)

    def attach(self, model, quantized: Sequence[str], skipped: Sequence[str], energy: ErrorEnergy) -> None:
        """Make this the quantizer of a model whose layers were swapped by hand, so that it saves and reports as if it
        had been loaded so."""
        self._swapped, self._loads, self.error_energy = (list(quantized), list(skipped)), False, energy
        model.hf_quantizer, model.is_quantized, model.quantization_method = self, True, QUANT_METHOD
        self.postprocess_model(model)

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self._loads and (self._packed or self.pre_quantized):
            _check_loaded(model, whole=self.pre_quantized)
        quantized, skipped = self._swapped
        dithers = self._loads and not self._packed and self.quantization_config.dither_ties
        dither = dither_masters(model) if dithers else None
        n_weights, packed_bytes = count_weights(model)
        model.quantization_report = QuantizationReport(
            scheme=self.quantization_config.describe(),
            quantized=tuple(quantized),
            skipped=tuple(skipped),
            sqnr_db=self.error_energy.sqnr_db if self._packed else master_sqnr(model),
            n_weights=n_weights,
            packed_bytes=packed_bytes,
            dither=dither,
        )
        get_logger().info("%s: %s", type(model).__name__, model.quantization_report)
        if any(isinstance(module, MXFP4PackedExperts) for module in model.modules()):
            # transformers would split the experts' weights by name as it saves, and not their scales; so the files have
            # the names that the model has.
            model._weight_conversions = []
        self.model_class = type(model)
        self._wrap_methods()
        # From here on PEFT's tables know what LoRA on a quantized layer is.
        importlib.import_module("..adapters", __package__)
        return model

    def matrices(self, model) -> Iterator[Matrix]:
        """The master weights of the model's quantized layers, one by one."""
        return trainable_matrices(model)

    def dequantize(self, model, dtype=None):
        """A plain model: every quantized layer becomes an `nn.Linear`, or experts of the model's own class, that holds
        the quantized values.

        With a ``dtype`` all floating-point parameters are converted to it; without one, none is (transformers would
        fall back to the dtype that the model was loaded in, which may no longer be its own).
        """
        model = self._dequantize(model, dtype)
        self.remove_quantization_config(model)
        return model

    def _dequantize(self, model, dtype=None):
        layers = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, QUANTIZED)}
        if not layers:
            raise ValueError("nothing to dequantize: the model has no MXFP4 layer")
        if any(isinstance(layer, MXFP4PackedExperts) for layer in layers.values()):
            model.__dict__.pop("_weight_conversions", None)
        plain: dict[int, nn.Module] = {}
        for name, layer in layers.items():
            if id(layer) not in plain:
                to_plain = layer.to_linear if isinstance(layer, nn.Linear) else layer.to_experts
                plain[id(layer)] = to_plain(dtype)
            model.set_submodule(name, plain[id(layer)])
        if dtype is not None:
            # Not model.to(dtype): that would convert buffers such as the rotary frequencies too.
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
        model.__dict__.pop("quantization_report", None)
        return model

    def get_state_dict_and_metadata(self, model):
        return take_state_dict(model), make_record(self.quantization_config, self.recorded_sqnr_db)

    @property
    def recorded_sqnr_db(self) -> float | None:
        """SQNR of packed weights in decibels, measured when they were packed, now or before they were saved."""
        return self.error_energy.sqnr_db if self.record == {} else self.record["weight_sqnr_db"]

    def is_serializable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        # Asked by `generate` with a static cache. What CUDA graphs cannot hold is tagged so on its operator.
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        # Packed weights are frozen: transformers then asks for adapters.
        return not self._packed


def quantize_linears(
    model: nn.Module, config: MXFP4RLConfig, make_layer: MakeLayer | None = None
) -> tuple[list[str], list[str]]:
    """Swap the linear layers and the experts of ``model`` in place; the names of the quantized linear maps and of those
    left alone.

    ``make_layer`` builds a layer from a plain one, the config and its name; by default the layer class of the config's
    mode does.

    Raises `ValueError` when nothing matched, an entry of the config's ``layer_overrides`` matched no quantized layer,
    or the model keeps experts in a way that is not known.
    """
    layers, skipped = find_layers(model, config.modules_to_not_convert or ())
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


def _placeholder(layer: nn.Module, config: MXFP4RLConfig, name: str) -> nn.Module:
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


def _refuse_parallel_plan(model: nn.Module) -> None:
    """Raise `ValueError` for a model that transformers would split over devices as it loads: trainable layers fail on
    the split tensors, and of packed ones the weight alone would be split, without its scales."""
    plan = getattr(model.config, "distributed_config", None)
    asked = {name: getattr(plan, name, None) for name in ("tp_plan", "tp_size", "fsdp_size", "pp_size")}
    asked = {name: value for name, value in asked.items() if value not in (None, 0, 1)}
    if asked:
        raise ValueError(
            f"the layers of this package cannot be split over devices as they load ({str(asked)[:200]}); leave out "
            "tp_plan, tp_size and distributed_config, and shard with FSDP2 or DeepSpeed through `accelerate launch` "
            "(recipes/accelerate), or place whole layers with device_map"
        )


def _packed_layers(model: nn.Module) -> dict[str, MXFP4PackedLinear | MXFP4PackedExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PACKED)}


def _check_loaded(model: nn.Module, whole: bool) -> None:
    """transformers only warns of tensors that no file has, and fills in random numbers.

    Raises `ValueError` for the first one missing in a packed layer or, with ``whole``, anywhere but in a head that the
    checkpoint was saved without.
    """
    layers = _packed_layers(model)
    same_class = type(model).__name__ in (model.config.architectures or ())
    prefix = getattr(model, "base_model_prefix", "")
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        new_head = not same_class and hasattr(model, prefix) and not name.startswith(f"{prefix}.")
        if layer not in layers and (new_head or not whole):
            continue
        # Offloaded parameters are meta tensors here, and left to the check of the files.
        if not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False):
            raise ValueError(f"{name} is in no file of the checkpoint")
    for layer in layers.values():
        layer.check()


# A reloaded module registers again; transformers refuses duplicates.
AUTO_QUANTIZATION_CONFIG_MAPPING.pop(QUANT_METHOD, None)
AUTO_QUANTIZER_MAPPING.pop(QUANT_METHOD, None)
register_quantization_config(QUANT_METHOD)(MXFP4RLConfig)
register_quantizer(QUANT_METHOD)(MXFP4RLQuantizer)
