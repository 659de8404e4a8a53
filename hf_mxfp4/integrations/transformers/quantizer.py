# SPDX-License-Identifier: Apache-2.0
"""`MXFP4RLQuantizer`: how transformers applies an [`MXFP4RLConfig`] to models it loads, saves or trains; and `pack`."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import is_fsdp_enabled, is_local_dist_rank_0
from transformers.quantizers import HfQuantizer

from ..._logging import get_logger
from ...checkpoint import (
    FileNames,
    StoredTensor,
    check_checkpoint,
    check_unquantized,
    kept_reasons,
    make_record,
    read_header,
    saver_names,
    take_state_dict,
    tensors_by_name,
    unguard,
    wrap_saving,
)
from ...config import MXFP4RLConfig
from ...layers import PACKED, QUANTIZED, TRAINABLE, MXFP4Experts, MXFP4PackedExperts
from ...model.layer_names import find_layers, full_precision_record, skip_reasons, translate_names, unknown_names
from ...model.plain_layers import is_linear, linear_size, linear_weight
from ...model.structure import weight_names
from ...numerics import FP8, ErrorEnergy
from ...ops import check_finite
from ...prepare import Smoothing, dither_masters, smooth_loaded
from ...registration import QUANT_METHOD, enter_classes
from ...report import QuantizationReport, count_weights, master_sqnr, weight_sqnr
from ...utils import progress_bar, warn_of_slow_bfloat16
from ..patches import check_trainer, patch_model_class, patch_reference_loading
from . import swap


class MXFP4RLQuantizer(HfQuantizer):
    """Swaps linear layers of a decoder and fused experts for quantized ones as the model is loaded.

    Mode ``"qat"``: master weights keep their names and dtypes, and `save_pretrained` adds the scheme to `config.json`.
    Mode ``"packed"``: the weights of a full-precision checkpoint are packed one by one as they are read; a checkpoint
    of packed weights is checked against the scheme in its `config.json` and loaded as it is.
    """

    requires_calibration = False
    quantization_config: MXFP4RLConfig

    def __init__(self, quantization_config: MXFP4RLConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self._skipped: dict[str, str] = {}
        self._loads = True
        self.error_energies: list[ErrorEnergy] = []  # of weights that were packed here
        self._conversions: list = []  # of weights that quantized layers hold otherwise than plain ones
        self.record: dict = {}  # what the files of a quantized checkpoint say of themselves
        self.model_class: type | None = None  # whose methods know of quantized layers

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._wrap_methods()  # a model that was unpickled has not been loaded here

    def _wrap_methods(self) -> None:
        """Have methods of the model's class do what quantized models need."""
        if self.model_class is not None:
            wrap_saving(self.model_class)
            patch_model_class(self.model_class)

    @property
    def _packed(self) -> bool:
        return self.quantization_config.mode == "packed"

    def validate_environment(self, *args, device_map=None, **kwargs):
        if self._packed and isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map puts packed weights on disk, from where they cannot be used; they take about a quarter of "
                "their size in bfloat16, so that 'cpu' may do"
            )

    def update_attn_implementation(self, config):
        # Called for something else: the only time before transformers stops at a config.json of ours.
        unguard(config)
        return config

    update_tp_plan = update_attn_implementation  # called in its place by transformers 5.17

    def _process_model_before_weight_loading(self, model, checkpoint_files: Sequence[str] | None = None, **kwargs):
        # Called by transformers with the model on the meta device.
        swap.refuse_parallel_plan(model)
        check_trainer()
        files = checkpoint_files or ()
        headers = [read_header(file) for file in files if str(file).endswith(".safetensors")]
        reasons = self._choose_layers(model, tensors_by_name(headers))
        make = None
        if self._packed and not self.pre_quantized:
            make = partial(swap.from_plain, is_empty=True)
        _, self._skipped = swap.quantize_linears(model, self.quantization_config, make, reasons)
        self._conversions = swap.conversions_from_plain(model)
        has_experts = any(isinstance(module, (MXFP4Experts, MXFP4PackedExperts)) for module in model.modules())
        if kwargs.get("use_kernels") and has_experts:
            raise ValueError(
                "use_kernels=True lets transformers replace whole layers of experts by kernels that compute in full "
                "precision; load the model without it, or add 'experts' to modules_to_not_convert"
            )
        for layer in swap.packed_layers(model).values():
            # transformers would draw random numbers for a tensor that is missing, and fail on uint8.
            layer._is_hf_initialized = True
        if self.pre_quantized and files:
            swap.tie_packed(model)
            self.record = check_checkpoint(files, headers, self.quantization_config)
        else:
            check_unquantized(headers)
        return model

    def _choose_layers(self, model: nn.Module, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
        """Return why layers stay in full precision, and note it in the config, by the names in ``model``."""
        config = self.quantization_config
        given = config.modules_to_not_convert or ()
        record = config.full_precision
        unknown = unknown_names(model, (*given, *(record or ())))
        if not self.pre_quantized and record is None and not unknown:
            # The names in the files decide nothing here.
            names = FileNames(model, {})
        else:
            names = FileNames(model, tensors)
        if unknown:
            # They are those of the files, or of the model that was saved: another class may load it.
            names.saver = saver_names(model, tensors)
            known = translate_names(model, given, names.others, names.absent)
            config = replace(config, modules_to_not_convert=known or None).keeping(record)
        if self._packed and self.pre_quantized and tensors:
            if all(tensor.dtype != torch.uint8 for tensor in tensors.values()):
                raise ValueError(
                    "the config describes packed weights, and the files hold full-precision ones; pass the scheme as "
                    "quantization_config, and the config that the files were saved with"
                )
        reasons = kept_reasons(names, config, tensors, self.pre_quantized)
        self.quantization_config = config.keeping(full_precision_record(model, reasons))
        return reasons

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        """Return True for exactly the full-precision placeholders of a checkpoint that is packed as it is read."""
        if not self._packed or self.pre_quantized:
            return False
        owner, _, name = param_name.rpartition(".")
        layer = model.get_submodule(owner)
        return isinstance(layer, PACKED) and name in weight_names(layer)

    def param_element_size(self, model, param_name: str, param) -> float:
        """Return bytes per element, for `device_map="auto"`: two codes share a byte; the scales are counted by
        themselves."""
        if self.param_needs_quantization(model, param_name):
            return 0.5
        return param.element_size()

    def get_weight_conversions(self):
        return self._conversions

    def get_quantize_ops(self):
        return swap.PackOnLoad(self.error_energies)

    def attach(self, model, skipped: Mapping[str, str], energies: list[ErrorEnergy]) -> None:
        """Make this the quantizer of a model whose layers were swapped by hand."""
        self._skipped = dict(skipped)
        self._loads = False
        self.error_energies = energies
        model.hf_quantizer = self
        model.is_quantized = True
        model.quantization_method = QUANT_METHOD
        self.postprocess_model(model)

    def _process_model_after_weight_loading(self, model, **kwargs):
        swap.tie_packed(model)
        if self._loads:
            swap.check_loaded(model)
        report = self._report(model)
        model.quantization_report = report
        get_logger().info("%s: %s", type(model).__name__, report)
        if self._loads and report.masters_on_grid:
            get_logger().warning(
                "The master weights of %s lie on the grid of their scheme (hf-mxfp4 gptq makes such checkpoints): "
                "steps below half a grid step change no quantized weight, so training them does nothing at usual "
                "learning rates. Train LoRA adapters on it, or train the checkpoint that was rounded.",
                type(model).__name__,
            )
        if self._loads:
            self._warn_of_slow_products(model)
        if any(isinstance(module, MXFP4PackedExperts) for module in model.modules()):
            # transformers would split the experts' weights as it saves, and not their scales: files have our names.
            model._weight_conversions = []
        elif self._packed:
            swap.forget_conversions(model)
        self.model_class = type(model)
        self._wrap_methods()
        # From here on PEFT's tables know what LoRA on a quantized layer is.
        importlib.import_module("..peft", __package__)
        patch_reference_loading()
        return model

    def _warn_of_slow_products(self, model) -> None:
        """Warn of weights that leave the FP8 products of their preset, and of bfloat16 on a CPU that lacks it."""
        config = self.quantization_config
        problem = config.gemms().e4m3_problem("fprop")
        if config.activation_scheme is FP8 and problem is not None:
            get_logger().warning(
                "Activations are in E4M3 for FP8 tensor cores, which cannot multiply these weights: %s. Products are "
                "in 16 bits.",
                problem,
            )
        if model.dtype == torch.bfloat16 and not torch.accelerator.is_available():
            warn_of_slow_bfloat16()

    def _report(self, model) -> QuantizationReport:
        """Smooth and dither trainable weights as the config says, and report what was done to the model."""
        smoothing = self._smooth(model)
        dither = None
        if self._loads and not self._packed and self.quantization_config.dither_ties:
            dither = dither_masters(model)
        n_weights, packed_bytes = count_weights(model)
        if self._packed:
            sqnr_db = weight_sqnr(self.error_energies)  # measured when they were packed
        else:
            sqnr_db = master_sqnr(model)
        return QuantizationReport(
            scheme=self.quantization_config.describe(),
            quantized=tuple(swap.quantized_names(model)),
            skipped=tuple(self._skipped),
            skip_reasons=self._skipped,
            sqnr_db=sqnr_db,
            n_weights=n_weights,
            packed_bytes=packed_bytes,
            dither=dither,
            smoothing=smoothing,
        )

    def _smooth(self, model) -> Smoothing | None:
        """Smooth a plain checkpoint that was loaded in mode ``"qat"``, and say what it did."""
        if not self._loads or self.pre_quantized or not self.quantization_config.smooth:
            return None
        if self._packed:
            get_logger().info(
                "%s is packed without smoothing; with it, run `hf-mxfp4 smooth` first, or load in mode 'qat' and call "
                "hf_mxfp4.pack", type(model).__name__,
            )  # fmt: skip
            return None
        if is_fsdp_enabled() and not is_local_dist_rank_0():
            return None  # this process has no weights yet; they come from the one that reads them
        return smooth_loaded(model)

    def dequantize(self, model, dtype=None):
        """Return a plain model of the quantized values, all its parameters in ``dtype`` where that is given."""
        if not any(isinstance(module, QUANTIZED) for module in model.modules()):
            raise ValueError("nothing to dequantize: the model has no MXFP4 layer")
        return self.make_plain(model, dtype)

    def make_plain(self, model, dtype=None):
        """[`dequantize`] of a model that may have no quantized layer any more."""
        swap.check_here(model)
        swap.forget_conversions(model)
        modules = model.named_modules(remove_duplicate=False)
        layers = {name: module for name, module in modules if isinstance(module, QUANTIZED)}
        swap.swap_layers(model, layers, lambda layer, name: swap.to_plain(layer, dtype))
        # Not model.to(dtype): that would convert buffers such as the rotary frequencies too.
        for parameter in model.parameters():
            if dtype is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        model.__dict__.pop("quantization_report", None)
        conversions = model.__dict__.pop("_weight_conversions", None)  # transformers 5.24 would forget them
        self.remove_quantization_config(model)
        if conversions:  # packed experts have an empty list; without it the model saves as any plain one
            model._weight_conversions = conversions
        return model

    def get_state_dict_and_metadata(self, model):
        return take_state_dict(model), make_record(self.quantization_config, self.recorded_sqnr_db)

    @property
    def recorded_sqnr_db(self) -> float | None:
        """SQNR of packed weights in decibels, measured when they were packed, now or before they were saved."""
        if self.record:
            return self.record["weight_sqnr_db"]
        return weight_sqnr(self.error_energies)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        # Asked by `generate` with a static cache. What CUDA graphs cannot hold is tagged so on its operator.
        return True

    @property
    def is_trainable(self) -> bool:
        check_trainer()  # a Trainer asks when it gets a model
        return True

    @property
    def is_qat_trainable(self) -> bool:
        # Packed weights are frozen: transformers then asks for adapters.
        return not self._packed


# ---- a model in memory ----------------------------------------------------------------------------------------------


def pack(model: nn.Module, config: MXFP4RLConfig | None = None) -> nn.Module:
    """Turn a model's full-precision weights into packed 4-bit ones, in place and layer by layer.

    A packed model has the very weights of the trainable one under the same scheme; logits differ by the order of sums.
    `save_pretrained` then writes a packed checkpoint.

    Args:
        model: trained with ``mode="qat"``, or a plain one; it is returned.
        config: of mode ``"packed"``. A model of mode ``"qat"`` keeps its own scheme without one, and in any case its
            choice of layers; a plain model needs one.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: it is packed already, has adapters, its weights are sharded or not loaded, nothing in it can be
            packed, a weight is not finite, or the config is of another mode or missing.
    """
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise TypeError(f"pack takes a transformers model, not {type(model).__name__}; unwrap it first")
    if any(isinstance(module, PACKED) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} is packed already")
    if any(isinstance(getattr(module, "base_layer", None), nn.Module) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has adapters; merge them into it first (merge_and_unload)")
    trained = next((module.config for module in model.modules() if isinstance(module, TRAINABLE)), None)
    config = _packed_config(type(model).__name__, trained, config)
    energies: list[ErrorEnergy] = []

    def make(layer: nn.Module, name: str) -> nn.Module:
        _check_weights(name, layer)
        packed = swap.from_plain(layer, config, name)
        tensors = {tensor_name: getattr(packed, tensor_name) for tensor_name in packed.shapes()}
        for weight_name in weight_names(packed):
            master = _weight(layer, weight_name).detach()
            swap.add_error(energies, packed, weight_name, master, tensors)
        bar.update()
        return packed

    if trained is None:
        layers, skipped = find_layers(model, config.modules_to_not_convert or ())
        kept = full_precision_record(model, skip_reasons(model, config.modules_to_not_convert or ()))
    else:
        modules = model.named_modules(remove_duplicate=False)
        layers = {name: module for name, module in modules if isinstance(module, TRAINABLE)}
        skipped = {}
        if hasattr(model, "quantization_report"):
            skipped = model.quantization_report.skip_reasons
        kept = trained.full_precision
    with progress_bar(total=len(layers), what="Packing weights", delay=2) as bar:
        swap.swap_layers(model, layers, make)
    MXFP4RLQuantizer(config.keeping(kept), pre_quantized=True).attach(model, skipped, energies)
    return model


def _weight(layer: nn.Module, name: str) -> nn.Parameter:
    """Return the only weight of a linear layer, or one of experts by its name."""
    if is_linear(layer):
        return linear_weight(layer)
    return getattr(layer, name)


def _check_weights(name: str, layer: nn.Module) -> None:
    """Raise `ValueError` for a layer whose weights are sharded, not loaded or not finite."""
    for parameter_name in weight_names(layer):
        weight = _weight(layer, parameter_name)
        if is_linear(layer):
            has_shape = weight.shape == linear_size(layer)
        else:
            has_shape = weight.dim() == 3
        if type(weight.data) is not torch.Tensor or weight.is_meta or not has_shape:
            raise ValueError(
                f"{name}.{parameter_name} is not here in full ({type(weight.data).__name__} {list(weight.shape)} on "
                f"{weight.device}); gather or load the model's weights, then pack"
            )
        check_finite(f"{name}.{parameter_name}", weight)


def _packed_config(model: str, trained: MXFP4RLConfig | None, config: MXFP4RLConfig | None) -> MXFP4RLConfig:
    """Return the config that [`pack`] uses, from the one that the model was trained with and the one that is given."""
    if config is None:
        if trained is None:
            raise ValueError(
                f"{model} has no MXFP4Linear layer to pack; pass config=MXFP4RLConfig(mode='packed') to pack its plain "
                "linear layers"
            )
        return trained.packed()
    if config.mode != "packed":
        raise ValueError(f"pack needs a config of mode='packed', not {config.mode!r}")
    if trained is None or config.modules_to_not_convert == trained.modules_to_not_convert:
        return config
    if config.modules_to_not_convert is not None:
        raise ValueError(
            f"{model} was trained with modules_to_not_convert={trained.modules_to_not_convert}, the config says "
            f"{config.modules_to_not_convert}; leave it out to pack the layers that were trained in MXFP4"
        )
    return replace(config, modules_to_not_convert=trained.modules_to_not_convert)


enter_classes(MXFP4RLConfig, MXFP4RLQuantizer)
