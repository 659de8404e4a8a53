# SPDX-License-Identifier: Apache-2.0
"""`MXFP4RLQuantizer`: how transformers applies an [`MXFP4RLConfig`] to a model it loads, saves or trains."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers.quantizers import HfQuantizer

from ..._logging import get_logger
from ...checkpoint import (
    FileHeader,
    check_checkpoint,
    check_unquantized,
    make_record,
    read_headers,
    take_state_dict,
    unguard,
    wrap_saving,
)
from ...config import MXFP4RLConfig
from ...dither import dither_masters
from ...layers import (
    QUANTIZED,
    ExpertsBase,
    MXFP4PackedExperts,
    MXFP4PackedLinear,
    WeightMatrix,
    trainable_matrices,
)
from ...module_names import full_precision_record, skip_reasons
from ...registration import QUANT_METHOD, enter_classes
from ...report import ErrorEnergy, QuantizationReport, count_weights, master_sqnr
from .generation import wrap_generation
from .load import PackOnLoad, check_loaded, packed_layers, refuse_parallel_plan, tie_packed
from .swap import placeholder, quantize_linears, reasons_of_checkpoint
from .trl_trainers import check_trainer, watch_references


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
        self._swapped: tuple[list[str], dict[str, str]] = ([], {})
        self._loads = True
        #: The error of packing a full-precision checkpoint.
        self.error_energy = ErrorEnergy()
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

    def update_attn_implementation(self, config):
        # Called for something else: the only time before transformers stops at a config.json of ours.
        unguard(config)
        return super().update_attn_implementation(config)

    def _process_model_before_weight_loading(self, model, checkpoint_files: Sequence[str] | None = None, **kwargs):
        refuse_parallel_plan(model)
        check_trainer()
        files = read_headers(checkpoint_files or ())
        reasons = skip_reasons(model, self.quantization_config.modules_to_not_convert or ())
        if self.pre_quantized:
            headers = [file for file in files if isinstance(file, FileHeader)]
            reasons = reasons_of_checkpoint(model, self.quantization_config, reasons, headers)
        self.quantization_config = self.quantization_config.keeping(full_precision_record(model, reasons))
        make = placeholder if self._packs_on_load else None
        self._swapped = quantize_linears(model, self.quantization_config, make, reasons)
        if kwargs.get("use_kernels") and any(isinstance(module, ExpertsBase) for module in model.modules()):
            raise ValueError(
                "use_kernels=True lets transformers replace whole layers of experts by kernels that compute in full "
                "precision; load the model without it, or add 'experts' to modules_to_not_convert"
            )
        layers = packed_layers(model)
        for layer in layers.values():
            # transformers would draw random numbers for a tensor that is missing, and fail on uint8.
            layer._is_hf_initialized = True
        if self.pre_quantized and files:
            tie_packed(model)
            self.record = check_checkpoint(files, self.quantization_config)
        elif files:
            check_unquantized(files)
        return model

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        """Return True for exactly the full-precision placeholders of a checkpoint that is packed as it is read."""
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
        return PackOnLoad(self.quantization_config, self.error_energy)

    def attach(self, model, quantized: Sequence[str], skipped: Mapping[str, str], energy: ErrorEnergy) -> None:
        """Make this the quantizer of a model whose layers were swapped by hand, so that it saves and reports as if it
        had been loaded so."""
        self._swapped, self._loads, self.error_energy = (list(quantized), dict(skipped)), False, energy
        model.hf_quantizer, model.is_quantized, model.quantization_method = self, True, QUANT_METHOD
        self.postprocess_model(model)

    def _process_model_after_weight_loading(self, model, **kwargs):
        tie_packed(model)
        if self._loads:
            check_loaded(model)
        quantized, skipped = self._swapped
        dithers = self._loads and not self._packed and self.quantization_config.dither_ties
        dither = dither_masters(model) if dithers else None
        n_weights, packed_bytes = count_weights(model)
        model.quantization_report = QuantizationReport(
            scheme=self.quantization_config.describe(),
            quantized=tuple(quantized),
            skipped=tuple(skipped),
            skip_reasons=dict(skipped),
            sqnr_db=self.error_energy.sqnr_db if self._packed else master_sqnr(model),
            n_weights=n_weights,
            packed_bytes=packed_bytes,
            dither=dither,
        )
        get_logger().info("%s: %s", type(model).__name__, model.quantization_report)
        if self._loads and model.quantization_report.masters_on_grid:
            get_logger().warning(
                "The master weights of %s lie on the grid of their scheme (hf-mxfp4 gptq makes such checkpoints): "
                "steps below half a grid step change no quantized weight, so training them does nothing at usual "
                "learning rates. Train LoRA adapters on it, or train the checkpoint that was rounded.",
                type(model).__name__,
            )
        if any(isinstance(module, MXFP4PackedExperts) for module in model.modules()):
            # transformers would split the experts' weights by name as it saves, and not their scales; so the files have
            # the names that the model has.
            model._weight_conversions = []
        self.model_class = type(model)
        self._wrap_methods()
        # From here on PEFT's tables know what LoRA on a quantized layer is.
        importlib.import_module("..peft", __package__)
        watch_references()
        return model

    def matrices(self, model) -> Iterator[WeightMatrix]:
        """Yield the master weights of the model's quantized layers."""
        return trainable_matrices(model)

    def dequantize(self, model, dtype=None):
        """Return a plain model: every quantized layer becomes an `nn.Linear`, or experts of the model's own class, that
        holds the quantized values.

        With a ``dtype`` all floating-point parameters are converted to it; without one, none is (transformers would
        fall back to the dtype that the model was loaded in, which may no longer be its own).
        """
        layers = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, QUANTIZED)}
        if not layers:
            raise ValueError("nothing to dequantize: the model has no MXFP4 layer")
        plain: dict[nn.Module, nn.Module] = {}
        for name, layer in layers.items():
            if layer not in plain:
                plain[layer] = (layer.to_linear if isinstance(layer, nn.Linear) else layer.to_experts)(dtype)
            model.set_submodule(name, plain[layer])
        # Not model.to(dtype): that would convert buffers such as the rotary frequencies too.
        for parameter in model.parameters():
            if dtype is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        if any(isinstance(layer, MXFP4PackedExperts) for layer in layers.values()):
            model.__dict__.pop("_weight_conversions", None)  # it saves as any plain model again
        model.__dict__.pop("quantization_report", None)
        self.remove_quantization_config(model)
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


enter_classes(MXFP4RLConfig, MXFP4RLQuantizer)
