# SPDX-License-Identifier: Apache-2.0
"""What merging an adapter would cost, estimated without merging it."""

import math

import torch
from torch import nn

from ..expert_parameters import MXFP4LoraExpertParameter
from ..master_lora import MXFP4LoraMasterLinear
from .merge_report import MergeError, MergeReport
from .merging import Merges, MergesIntoPacked


#: Below this SQNR of the adapters' change, a merge into quantized weights is pointed out: at 4 to 5 dB the policies of
#: `recipes/configs/tiny_cpu_lora.yaml` lose half of what training gained (accuracy 0.80 to 0.64, from 0.50).
LOSSY_DB = 10.0
#: How many layers of a model, and rows of each, are looked at.
_LAYERS, _ROWS = 16, 64


def adapted_layers(model: nn.Module) -> dict[str, Merges]:
    """Adapters on quantized layers by the names of what they adapt: layers, or single parameters of experts."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, MXFP4LoraExpertParameter):
            name = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
        if isinstance(module, Merges):
            layers[name] = module
    return layers


@torch.no_grad()
def merge_cost(model: nn.Module, adapter: str) -> MergeReport | None:
    """The errors that merging an adapter would make, on evenly spaced rows of evenly spaced layers (of experts: of the
    first one). Nothing is merged or written.

    `None` when nothing can be measured in this process alone: weights that are spread over processes, offloaded or
    merged already.
    """
    layers = {name: layer for name, layer in adapted_layers(model).items() if _is_whole(layer, adapter)}
    names = list(layers)[:: math.ceil(len(layers) / _LAYERS) or 1]
    errors = {name: _sampled(layers[name], adapter) for name in names}
    return MergeReport(errors, "sampled") if errors else None


def _is_whole(layer: Merges, adapter: str) -> bool:
    if layer.merged or adapter not in layer.lora_A:
        return False
    if isinstance(layer, MXFP4LoraExpertParameter) and layer.parameter_name not in layer.get_base_layer().projections:
        return False
    return not any(
        parameter.is_meta or parameter.numel() == 0 or hasattr(parameter, "full_tensor")
        for parameter in layer.parameters()
    )


def _sampled(layer: Merges, adapter: str) -> MergeError:
    if not isinstance(layer, MergesIntoPacked):
        return _sampled_master(layer, adapter)
    total, update = layer.first_sum([adapter])
    rows = _rows(total.shape[0], layer.get_base_layer().config.weight_scheme.block_rows)
    return MergeError.of(total[rows], update[rows], layer.repacked(total[rows]))


def _sampled_master(layer: MXFP4LoraMasterLinear | MXFP4LoraExpertParameter, adapter: str) -> MergeError:
    base, weight, delta = layer.get_base_layer(), layer.master().detach(), layer.delta(adapter)
    if isinstance(layer, MXFP4LoraExpertParameter):
        weight, delta = (base.rows_first(tensor)[0] for tensor in (weight, delta))
    rows = _rows(weight.shape[0], getattr(base.config.gemms().fprop.right, "block_rows", 1))
    weight, delta = weight[rows], delta[rows]

    def quantized(values: torch.Tensor) -> torch.Tensor:
        if isinstance(layer, MXFP4LoraExpertParameter):
            return base.effective_rows(layer.parameter_name, 0, values).float()
        return base.effective_weight(values).float()

    merged = quantized((weight.float() + delta).to(weight.dtype))
    return MergeError.of(quantized(weight) + delta, delta, merged)


def _rows(n_rows: int, band: int) -> slice:
    """At most 64 rows; those that share scales stay together."""
    return slice(None, None, math.ceil(n_rows / _ROWS)) if band == 1 else slice(max(band, _ROWS))
