# SPDX-License-Identifier: Apache-2.0
"""`pack`: from the full-precision weights of a model in memory to packed ones."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...config import MXFP4RLConfig
from ...layers import PACKED, TRAINABLE, MXFP4PackedLinear
from ...model_structure import projections
from ...module_names import find_layers, full_precision_record, skip_reasons
from ...report import ErrorEnergy, add_packed, add_packed_experts
from .quantizer import MXFP4RLQuantizer
from .swap import from_plain, swap_layers


if TYPE_CHECKING:  # importing it would load torch.compile's machinery, and Triton with it
    from transformers import PreTrainedModel


def pack(model: "PreTrainedModel", config: MXFP4RLConfig | None = None) -> "PreTrainedModel":
    """Turn a model's full-precision weights into packed 4-bit ones, in place and layer by layer.

    A packed model has the very weights of the trainable one under the same scheme; logits differ by the order of sums.
    `save_pretrained` then writes a packed checkpoint, a sixth to a quarter of the size in bfloat16 for the layers
    concerned.

    Args:
        model: trained with ``mode="qat"``, or a plain one.
        config: of mode ``"packed"``. A model of mode ``"qat"`` keeps its own scheme without one, and in any case its
            choice of layers; a plain model needs one.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a transformers model.
        ValueError: it is packed already, has adapters, its weights are sharded or not loaded, nothing in it can be
            packed, or the config is of another mode or missing.
    """
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise TypeError(f"pack takes a transformers model, not {type(model).__name__}; unwrap it first")
    modules = list(model.modules())
    if any(isinstance(module, PACKED) for module in modules):
        raise ValueError(f"{type(model).__name__} is packed already")
    if any(isinstance(getattr(module, "base_layer", None), nn.Module) for module in modules):
        raise ValueError(f"{type(model).__name__} has adapters; merge them into it first (merge_and_unload)")
    trained = next((module.config for module in modules if isinstance(module, TRAINABLE)), None)
    del modules
    config = _packed_config(type(model).__name__, trained, config)
    energy = ErrorEnergy()

    def make(layer: nn.Module, config: MXFP4RLConfig, name: str) -> nn.Module:
        _check_whole(name, layer)
        packed = from_plain(layer, config, name)
        if isinstance(packed, MXFP4PackedLinear):
            tensors = {name: tensor for name, tensor in packed.named_parameters() if name != "bias"}
            add_packed(energy, layer.weight.detach(), tensors, config)
        else:
            for projection in packed.projections:
                tensors = {name: getattr(packed, name) for name in packed.shapes()}
                add_packed_experts(energy, packed, projection, getattr(layer, projection).detach(), tensors)
        return packed

    if trained is None:
        layers, skipped = find_layers(model, config.modules_to_not_convert or ())
        kept = full_precision_record(model, skip_reasons(model, config.modules_to_not_convert or ()))
    else:
        modules = model.named_modules(remove_duplicate=False)
        layers = {name: module for name, module in modules if isinstance(module, TRAINABLE)}
        report = getattr(model, "quantization_report", None)
        skipped, kept = {} if report is None else report.skip_reasons, trained.full_precision
    quantized = swap_layers(model, layers, config, make)
    MXFP4RLQuantizer(config.keeping(kept), pre_quantized=True).attach(model, quantized, skipped, energy)
    return model


def _check_whole(name: str, layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        sizes = {"weight": (layer.out_features, layer.in_features)}
    else:
        sizes = dict.fromkeys(projections(layer))
    for own, size in sizes.items():
        weight = getattr(layer, own)
        whole = weight.dim() == 3 if size is None else weight.shape == size
        if type(weight.data) is not torch.Tensor or weight.is_meta or not whole:
            raise ValueError(
                f"{name}.{own} is not here in full ({type(weight.data).__name__} {list(weight.shape)} on "
                f"{weight.device}); gather or load the model's weights, then pack"
            )


def _packed_config(model: str, trained: MXFP4RLConfig | None, config: MXFP4RLConfig | None) -> MXFP4RLConfig:
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
