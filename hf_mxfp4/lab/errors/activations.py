# SPDX-License-Identifier: Apache-2.0
"""Error statistics of what enters the quantized layers, on texts of the user's own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ...module_names import split_linears
from ...numerics import QuantScheme
from .results import Problem, TensorResult
from .source import SourceError
from .statistics import ErrorStatistics, error_statistics
from .sweep import PrecisionSweep, precision_sweep


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers that are or would be quantized, by name."""
    report = getattr(model, "quantization_report", None)
    if report is not None:
        modules = dict(model.named_modules())
        # Experts are not modules of their own.
        return {name: modules[name] for name in report.quantized if name in modules}
    return dict(split_linears(model)[0])


def analyze_activations(
    model: nn.Module, batches: Sequence[torch.Tensor], schemes: Sequence[QuantScheme]
) -> tuple[list[TensorResult], list[Problem]]:
    """Statistics of the inputs of every quantized linear layer over forward passes of the model.

    Inputs are seen as the layer is given them, in the precision the model runs in, blocks along the last axis. Layers
    of one module that are always given the very same tensor (``q_proj``, ``k_proj`` and ``v_proj``) are one result,
    named after all of them: ``...self_attn.q_proj/k_proj/v_proj``.

    Args:
        batches: token ids ``[1, tokens]`` on the model's device; no padding, which would be counted.

    Returns:
        Results of kind ``"activation"``, and problems for layers that saw NaN or infinity, or nothing at all.

    Raises [`SourceError`] for a model without such layers.
    """
    layers = quantized_layers(model)
    if not layers:
        raise SourceError(f"{type(model).__name__} has no linear layer that would be quantized")
    inputs = {name: _Inputs(schemes) for name in layers}
    last = _LastInput(schemes)

    def hook(name: str):
        def observe(module: nn.Module, args: tuple) -> None:
            owner = last.see(name, args[0])
            inputs[name].add(last, owner)

        return observe

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            for batch in batches:
                model(input_ids=batch)
    finally:
        for handle in handles:
            handle.remove()
    results, not_finite, not_reached = [], [], []
    for names in _sharing(inputs):
        seen = inputs[names[0]]
        name = "/".join([names[0], *(other.rpartition(".")[2] for other in names[1:])])
        if seen.calls == 0:
            not_reached.append(Problem(name, "no text reached this layer"))
        elif seen.bad:
            not_finite.append(Problem(name, f"{seen.bad} elements of its input are NaN or infinite"))
        else:
            elements = next(iter(seen.statistics.values())).elements
            shape = (elements // max(1, seen.width), seen.width)
            results.append(TensorResult(name, "activation", shape, seen.dtype, seen.statistics, seen.sweep))
    return results, not_finite + not_reached


class _LastInput:
    """The tensor that a layer was given last, and its statistics, for the layers that are given it too."""

    def __init__(self, schemes: Sequence[QuantScheme]):
        self._schemes = schemes
        self._tensor: torch.Tensor | None = None
        self._version = -1
        self._owner = ""
        self.values: torch.Tensor = torch.empty(0)
        self.bad = 0
        self.statistics: dict[str, ErrorStatistics] = {}

    def see(self, name: str, tensor: torch.Tensor) -> str:
        """Name of the layer that was given this tensor first, which may be ``name`` itself."""
        if tensor is self._tensor and tensor._version == self._version:
            return self._owner
        self._tensor, self._version, self._owner = tensor, tensor._version, name
        self.values = tensor.detach()
        self.bad = int((~torch.isfinite(self.values)).sum())
        rows = self.values.reshape(-1, self.values.shape[-1])
        self.statistics = {} if self.bad else {str(scheme): error_statistics(rows, scheme) for scheme in self._schemes}
        return name


class _Inputs:
    """What one layer was given in all passes.

    Attributes:
        calls: how often it was given something.
        bad: elements of that which are NaN or infinite.
        owner: the layer that was given each of those tensors first; empty where it is not one layer.
    """

    def __init__(self, schemes: Sequence[QuantScheme]):
        self.statistics = {str(scheme): ErrorStatistics() for scheme in schemes}
        self.sweep: PrecisionSweep | None = None
        self.width = self.calls = self.bad = 0
        self.dtype = ""
        self.owner: str | None = None

    def add(self, last: _LastInput, owner: str) -> None:
        self.owner = owner if self.owner in (None, owner) else ""
        self.calls += 1
        self.width, self.dtype = last.values.shape[-1], str(last.values.dtype).removeprefix("torch.")
        self.bad += last.bad
        for scheme, statistics in last.statistics.items():
            self.statistics[scheme] += statistics
        if self.sweep is None and not last.bad:
            self.sweep = precision_sweep(last.values)


def _sharing(inputs: Mapping[str, _Inputs]) -> list[list[str]]:
    """Names of layers in groups: those of one module that were given the same tensors in every pass, others alone."""
    groups: dict[tuple, list[str]] = {}
    for name, seen in inputs.items():
        key = (seen.owner, name.rpartition(".")[0], seen.calls) if seen.owner else (name,)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def load_for_activations(model: str) -> tuple[nn.Module, object]:
    """Model and tokenizer, in memory, in the dtype of the checkpoint; a quantized policy runs as it was trained.

    Raises [`SourceError`] when one of them cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(model).expanduser()
    if path.is_file():
        raise SourceError("activations need a model's folder or hub id, with its config and tokenizer, not one file")
    name = str(path) if path.exists() else model
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=False).eval()
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(f"{model} cannot be loaded to run it: {error}") from error
