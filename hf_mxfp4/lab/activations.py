# SPDX-License-Identifier: Apache-2.0
"""Measure the error of what enters the quantized layers, on texts of the user's own."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..hooks import hooked_inputs
from ..module_names import split_linears
from ..numerics import QuantScheme
from .results import TensorResult
from .source import Problem, SourceError
from .statistics import ErrorStatistics, error_statistics
from .sweep import PrecisionSweep, precision_sweep


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers that are or would be quantized, by name."""
    report = getattr(model, "quantization_report", None)
    if report is not None:
        modules = dict(model.named_modules())
        # Experts are not modules of their own.
        return {name: modules[name] for name in report.quantized if name in modules}
    return dict(split_linears(model)[0])


@dataclass
class _Inputs:
    """What one layer was given in all passes; layers of one module that are given the same tensor share it."""

    names: list[str] = field(default_factory=list)
    width: int = 0
    dtype: str = ""
    bad: int = 0
    statistics: dict[str, ErrorStatistics] = field(default_factory=dict)
    sweep: PrecisionSweep | None = None

    def add(self, values: torch.Tensor, schemes: Sequence[QuantScheme]) -> None:
        self.width, self.dtype = values.shape[-1], str(values.dtype).removeprefix("torch.")
        bad = int((~torch.isfinite(values)).sum())
        self.bad += bad
        if bad:
            return
        rows = values.reshape(-1, self.width)
        for scheme in schemes:
            known = self.statistics.get(str(scheme), ErrorStatistics())
            self.statistics[str(scheme)] = known + error_statistics(rows, scheme)
        if self.sweep is None:
            self.sweep = precision_sweep(rows)

    def result(self, name: str) -> TensorResult:
        rows = next(iter(self.statistics.values())).elements // max(1, self.width)
        return TensorResult(name, "activation", (rows, self.width), self.dtype, self.statistics, self.sweep)


def analyze_activations(
    model: nn.Module, batches: Sequence[torch.Tensor], schemes: Sequence[QuantScheme]
) -> tuple[list[TensorResult], list[Problem]]:
    """Measure the inputs of every quantized linear layer over forward passes of the model.

    Inputs are seen as the layer is given them, in the precision the model runs in, blocks along the last axis. Layers
    of one module that are given the very same tensor in the first pass (``q_proj``, ``k_proj`` and ``v_proj``) are one
    result, named after all of them: ``...self_attn.q_proj/k_proj/v_proj``.

    Args:
        batches: token ids ``[1, tokens]`` on the model's device; no padding, which would be counted.

    Returns:
        Results of kind ``"activation"``, and problems for layers that saw NaN or infinity, or nothing at all.

    Raises [`SourceError`] for a model without such layers.
    """
    layers = quantized_layers(model)
    if not layers:
        raise SourceError(f"{type(model).__name__} has no linear layer that would be quantized")
    groups = _sharing(model, layers, batches[0])

    def hook(inputs: _Inputs):
        return lambda module, arguments: inputs.add(arguments[0].detach(), schemes)

    with torch.no_grad(), hooked_inputs((layers[inputs.names[0]], hook(inputs)) for inputs in groups):
        for batch in batches:
            model(input_ids=batch)
    results, not_finite, not_reached = [], [], []
    for inputs in groups:
        name = "/".join([inputs.names[0], *(other.rpartition(".")[2] for other in inputs.names[1:])])
        if inputs.bad:
            not_finite.append(Problem(name, f"{inputs.bad} elements of its input are NaN or infinite"))
        elif inputs.statistics:
            results.append(inputs.result(name))
        else:
            not_reached.append(Problem(name, "no text reached this layer"))
    return results, not_finite + not_reached


@torch.no_grad()
def _sharing(model: nn.Module, layers: dict[str, nn.Module], batch: torch.Tensor) -> list[_Inputs]:
    """Find in one forward pass which layers of one module are given the same tensor, each once."""
    calls: dict[str, list[torch.Tensor]] = {name: [] for name in layers}

    def hook(name: str):
        return lambda module, arguments: calls[name].append(arguments[0])

    with hooked_inputs((layer, hook(name)) for name, layer in layers.items()):
        model(input_ids=batch)
    groups: dict[tuple, _Inputs] = {}
    for name, given in calls.items():
        key = (name.rpartition(".")[0], id(given[0])) if len(given) == 1 else (name,)
        groups.setdefault(key, _Inputs()).names.append(name)
    return list(groups.values())
