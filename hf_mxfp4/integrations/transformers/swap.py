# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are replaced by quantized layers, and what is done with weights as a checkpoint is read."""

import re
from collections.abc import Callable

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from ...checkpoint import tied_weights
from ...config import MXFP4RLConfig
from ...layers import PACKED, QUANTIZED, MXFP4Experts, MXFP4Linear, MXFP4PackedExperts, MXFP4PackedLinear, matrix_names
from ...model.layer_names import find_layers
from ...model.plain_layers import is_linear, is_plain_linear, linear_adapter, needs_conversion
from ...model.structure import weight_names
from ...numerics import ErrorEnergy
from ...numerics.formats import E8M0_NAN
from ...ops import PACKED_FIELDS, PACKED_SUFFIXES, not_finite
from ...report import add_packed


MakeLayer = Callable[[nn.Module, MXFP4RLConfig, str], nn.Module]


def quantize_linears(
    model: nn.Module,
    config: MXFP4RLConfig,
    make_layer: MakeLayer | None = None,
    reasons: dict[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Swap the linear layers and the experts of ``model`` in place; return the names of the quantized linear maps, and
    those left alone with the reasons.

    Args:
        make_layer: builds a layer from a plain one, the config and its name; by default that of the config's mode.
        reasons: replace what [`skip_reasons`] says.

    Raises as [`find_layers`] does.
    """
    skips = config.modules_to_not_convert or ()
    layers, skipped = find_layers(model, skips, reasons)
    make = make_layer or from_plain
    swap_layers(model, layers, lambda layer, name: make(layer, config, name))
    return quantized_names(model), skipped


def quantized_names(model: nn.Module) -> list[str]:
    """Return the names of the linear maps of all quantized layers, each layer once."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, QUANTIZED):
            names += matrix_names(name, module)
    return names


def from_plain(layer: nn.Module, config: MXFP4RLConfig, name: str, *, is_empty: bool = False) -> nn.Module:
    """Return the quantized layer of the config's mode for a linear layer or for experts, plain or trainable ones.
    ``is_empty``: a packed layer that a full-precision checkpoint is loaded into."""
    if is_linear(layer):
        if is_empty:
            return MXFP4PackedLinear.placeholder(layer, config, name)
        if config.mode == "packed":
            return MXFP4PackedLinear.from_linear(layer, config, name)
        return MXFP4Linear.from_linear(layer, config, name)
    if is_empty:
        return MXFP4PackedExperts.placeholder(layer, config, name)
    if config.mode == "packed":
        return MXFP4PackedExperts.from_experts(layer, config, name)
    return MXFP4Experts.from_experts(layer, config, name)


def to_plain(layer: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return the plain layer that holds the quantized values."""
    if is_linear(layer):
        return layer.to_linear(dtype)
    return layer.to_experts(dtype)


def check_here(model: nn.Module) -> None:
    """Raise `ValueError` for a parameter that has no memory, as those of a partly offloaded model."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} is not in memory (offloaded or not loaded); load the model without offloading")


def swap_layers(model: nn.Module, layers: dict[str, nn.Module], make: Callable[[nn.Module, str], nn.Module]) -> None:
    """Replace layers of ``model`` by what ``make`` builds from them and their first name. ``layers`` is emptied, so
    that what a replaced layer held can be freed before the next one is built."""
    while layers:
        name, old = next(iter(layers.items()))
        new = make(old, name)
        places = [place for place, layer in layers.items() if layer is old]  # several names may share one layer
        for place in places:
            model.set_submodule(place, new)
            del layers[place]
        del old, new  # the old layer can be freed before the next one is built


# ---- weights as they are read ---------------------------------------------------------------------------------------


def add_error(
    energies: list[ErrorEnergy], layer: nn.Module, own: str, original: torch.Tensor, packed: dict[str, torch.Tensor]
) -> None:
    """Append the error of a weight of a packed layer, laid out as in the model, by the tensors it was packed into."""
    if is_linear(layer):
        add_packed(energies, original, packed, layer.config)
        return
    if layer.is_transposed:
        original = original.transpose(1, 2)
    for expert, rows in enumerate(original):
        parts = {}
        for field, suffix in zip(PACKED_FIELDS, PACKED_SUFFIXES, strict=True):
            if f"{own}{suffix}" in packed:
                parts[field] = packed[f"{own}{suffix}"][expert]
        add_packed(energies, rows, parts, layer.config, siblings=layer.n_experts)


class PackOnLoad(ConversionOps):
    """Packs one weight of a checkpoint as transformers reads it, and appends its error to ``energies``."""

    def __init__(self, energies: list[ErrorEnergy]):
        self._energies = energies

    def convert(self, input_dict, full_layer_name: str = "", model=None, **kwargs) -> dict[str, torch.Tensor]:
        """Map ``{name of the weight: [tensor]}`` to the layer's packed tensors by their full names. Of several weights
        each name is a full one. Raises `ValueError` for one of another shape than the layer's."""
        tensors: dict[str, torch.Tensor] = {}
        for name, value in input_dict.items():
            if len(input_dict) == 1:
                name = full_layer_name
            weight = value[0] if isinstance(value, list) else value
            tensors |= self._pack(model, name, weight)
        return tensors

    def _pack(self, model: nn.Module, full_name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the packed tensors of a weight by their full names; any other tensor as it is."""
        owner, _, parameter = full_name.rpartition(".")
        layer = model.get_submodule(owner)
        if not isinstance(layer, PACKED) or parameter not in weight_names(layer):
            return {full_name: weight}
        needed = getattr(layer, parameter).shape  # of the placeholder
        if weight.shape != needed:
            raise ValueError(f"{full_name} is {list(weight.shape)} in the checkpoint, the model needs {list(needed)}")
        if isinstance(layer, MXFP4PackedLinear):
            packed = layer.pack_weight(weight)
        else:
            packed = layer.pack_weight(parameter, weight)
        add_error(self._energies, layer, parameter, weight, packed)
        return {f"{owner}.{name}": nn.Parameter(data, requires_grad=False) for name, data in packed.items()}


class FromPlain(ConversionOps):
    """Lays out a weight of a plain linear layer as quantized layers do, and the other way round as it is saved."""

    def __init__(self, is_transposed: bool):
        self._is_transposed = is_transposed

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs) -> dict[str, torch.Tensor]:
        (value,) = input_dict.values()
        weight = value[0] if isinstance(value, list) else value
        return {target_patterns[0]: weight.mT.contiguous() if self._is_transposed else weight}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


def conversions_from_plain(model: nn.Module) -> list[WeightConverter]:
    """Return how weights of plain layers become those of the quantized layers of ``model``, where they differ."""
    conversions = []
    for name, layer in model.named_modules():
        if isinstance(layer, QUANTIZED) and is_linear(layer) and needs_conversion(layer):
            adapter = linear_adapter(layer)
            # The files of a base model lack its prefix.
            name = name.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.")
            source = f"{name}.{adapter.weight_name}"
            target = f"{name}.weight"
            conversions.append(WeightConverter(source, target, [FromPlain(adapter.is_transposed)]))
    return conversions


def forget_conversions(model: nn.Module) -> None:
    """Save the weights of linear layers under the names and in the layout that they have in ``model``."""
    conversions = getattr(model, "_weight_conversions", None)
    if not conversions:
        return
    kept = []
    for conversion in conversions:
        operations = getattr(conversion, "operations", ())
        if not any(isinstance(operation, FromPlain) for operation in operations):
            kept.append(conversion)
    model._weight_conversions = kept


def refuse_parallel_plan(model: nn.Module) -> None:
    """Raise `ValueError` for a model that transformers would split over devices as it loads, without scales."""
    plan = getattr(model.config, "distributed_config", None)
    asked = {}
    for name in ("tp_plan", "tp_size", "fsdp_size", "pp_size"):
        value = getattr(plan, name, None)
        if value not in (None, 0, 1):
            asked[name] = value
    if asked:
        raise ValueError(
            f"the layers of this package cannot be split over devices as they load ({str(asked)[:200]}); leave out "
            "tp_plan, tp_size and distributed_config, and shard with FSDP2 or DeepSpeed through `accelerate launch` "
            "(recipes/accelerate), or place whole layers with device_map"
        )


def packed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the packed layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PACKED)}


def tie_packed(model: nn.Module) -> None:
    """Share all packed tensors of layers whose weights are tied, and add their names to those of tied tensors."""
    tied = getattr(model, "all_tied_weights_keys", None)
    if not tied:
        return
    layers = packed_layers(model)
    if not layers:
        return
    names = set()
    for name, layer in layers.items():
        names |= {f"{name}.{parameter}" for parameter, _ in layer.named_parameters(recurse=False)}
    # transformers knows the weight alone: without its scales a tied layer would read other numbers from its codes.
    for target, source in tied_weights(model, names).items():
        owner, _, parameter = target.rpartition(".")
        source_owner, _, _ = source.rpartition(".")
        if owner in layers and source_owner in layers and parameter != "bias":
            tied[target] = source
            setattr(layers[owner], parameter, getattr(layers[source_owner], parameter))


def check_loaded(model: nn.Module) -> None:
    """Raise `ValueError` for a tensor that no file has, unless it is of a new head, and for a packed weight with NaN or
    infinity. transformers only warns of tensors that are missing."""
    computed = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    # All but heads: a new head is drawn at random, as for sequence classification.
    body = {id(parameter) for parameter in model.base_model.parameters()}
    for name, parameter in model.named_parameters():
        # Offloaded parameters are meta tensors here, and left to the check of the files.
        is_known = parameter.is_meta or getattr(parameter, "_is_hf_initialized", False)
        if is_known or id(parameter) not in body or any(re.search(pattern, name) for pattern in computed):
            continue
        owner = name.rpartition(".")[0]
        in_layers = any(part.isdigit() for part in owner.split("."))
        is_pooler = not in_layers and is_plain_linear(model.get_submodule(owner))  # as of BERT: a new head
        if not is_pooler:
            raise ValueError(f"{name} is in no file of the checkpoint; complete the files")
    for name, layer in packed_layers(model).items():
        layer.check()
        for parameter_name, scale in layer.named_parameters(recurse=False):
            if not parameter_name.endswith("_scale") or scale.is_meta:
                continue
            if (scale == E8M0_NAN).any():  # a block with NaN or infinity has this scale
                raise not_finite(f"{name}.{parameter_name.removesuffix('_scale')}")
