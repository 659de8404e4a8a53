# SPDX-License-Identifier: Apache-2.0
"""Pack weights as a checkpoint is read, and check what was loaded."""

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps

from ...config import MXFP4RLConfig
from ...layers import PACKED, MXFP4PackedExperts, MXFP4PackedLinear
from ...report import ErrorEnergy, add_packed, add_packed_experts


class PackOnLoad(ConversionOps):
    """Packs one weight of a checkpoint as transformers reads it, so that full-precision weights exist one at a time,
    and adds its error to ``energy``."""

    def __init__(self, config: MXFP4RLConfig, energy: ErrorEnergy):
        self._config, self._energy = config, energy

    def convert(self, input_dict, full_layer_name: str = "", model=None, **kwargs) -> dict[str, torch.Tensor]:
        """Map ``{name of the weight: [tensor]}`` to the layer's packed tensors by their full names. Of several weights,
        which one tensor of the files is split into, each name is a full one.

        Raises `ValueError` when a weight is not of the layer's shape, which transformers does not check here.
        """
        names = [full_layer_name] if len(input_dict) == 1 else list(input_dict)
        found: dict[str, torch.Tensor] = {}
        for name, value in zip(names, input_dict.values(), strict=True):
            found |= self._pack(model, name, value[0] if isinstance(value, list) else value)
        return found

    def _pack(self, model: nn.Module, full_layer_name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        owner, _, own = full_layer_name.rpartition(".")
        layer = model.get_submodule(owner)
        is_packed = isinstance(layer, PACKED) and own in (getattr(layer, "projections", None) or ("weight",))
        if not is_packed:
            return {full_layer_name: weight}
        needed = getattr(layer, own).shape  # the placeholder's
        if weight.shape != needed:
            raise ValueError(
                f"{full_layer_name} is {list(weight.shape)} in the checkpoint, the model needs {list(needed)}"
            )
        if isinstance(layer, MXFP4PackedExperts):
            packed = layer.pack_weight(own, weight)
            add_packed_experts(self._energy, layer, own, weight, packed)
        else:
            packed = layer.pack_weight(weight)
            add_packed(self._energy, weight, packed, self._config)
        return {f"{owner}.{tensor}": nn.Parameter(data, requires_grad=False) for tensor, data in packed.items()}


def refuse_parallel_plan(model: nn.Module) -> None:
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


def packed_layers(model: nn.Module) -> dict[str, MXFP4PackedLinear | MXFP4PackedExperts]:
    """Return the packed layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PACKED)}


def tie_packed(model: nn.Module) -> None:
    """Share all packed tensors of layers whose weights are tied, and add their names to those of tied tensors."""
    from ...checkpoint import tied_weights

    tied = getattr(model, "all_tied_weights_keys", None)
    layers = packed_layers(model) if tied else {}
    if not layers:
        return
    names = {f"{name}.{own}" for name, layer in layers.items() for own, _ in layer.named_parameters(recurse=False)}
    for target, source in tied_weights(model, names).items():
        (owner, _, own), other = target.rpartition("."), source.rpartition(".")[0]
        if owner in layers and other in layers and own != "bias":
            tied[target] = source
            setattr(layers[owner], own, getattr(layers[other], own))


def check_loaded(model: nn.Module) -> None:
    """Raise `ValueError` for the first tensor of a packed layer that no file has. transformers only warns of it."""
    for name, layer in packed_layers(model).items():
        for own, parameter in layer.named_parameters(recurse=False):
            # Offloaded parameters are meta tensors here, and left to the check of the files.
            if not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False):
                raise ValueError(f"{name}.{own} is in no file of the checkpoint")
        layer.check()
