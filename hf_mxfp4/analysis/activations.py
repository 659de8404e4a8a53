# SPDX-License-Identifier: Apache-2.0
"""Error statistics of what enters the quantized layers, on texts of the user's own."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ..module_names import split_linears
from ..numerics import QuantScheme
from .results import Problem, TensorResult
from .source import SourceError
from .statistics import ErrorStatistics, error_statistics
from .sweep import PrecisionSweep, precision_sweep


#: Fields of a dataset's rows that are taken for the text, in this order, where none is named.
TEXT_FIELDS = ("text", "prompt", "question", "content")


def read_texts(dataset: Path, field: str | None, count: int) -> list[str]:
    """The first ``count`` texts of a file of JSON lines.

    Args:
        field: name of the text's field; by default the first of [`TEXT_FIELDS`] that the first row has as a string.

    Raises [`SourceError`] for a file that cannot be read, a missing field, or no text at all.
    """
    try:
        with open(dataset, encoding="utf-8") as stream:
            lines = list(itertools.islice((line for line in stream if line.strip()), count))
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{dataset} cannot be read: {error}") from error
    texts = []
    for i, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SourceError(f"row {i} of {dataset} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise SourceError(f"row {i} of {dataset} is not a JSON object; every line must be one")
        if field is None:
            field = next((name for name in TEXT_FIELDS if isinstance(row.get(name), str)), None)
            if field is None:
                raise SourceError(
                    f"{dataset} has none of the fields {', '.join(TEXT_FIELDS)} with a text; name one with "
                    f"--text-field (it has {', '.join(row) or 'no field'})"
                )
        if not isinstance(row.get(field), str):
            raise SourceError(f"row {i} of {dataset} has no text in {field!r} (it has {', '.join(row) or 'no field'})")
        texts.append(row[field])
    if not texts:
        raise SourceError(f"{dataset} has no rows")
    return texts


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

    Inputs are seen as the layer is given them, in the precision the model runs in, blocks along the last axis.

    Args:
        batches: token ids ``[1, tokens]`` on the model's device; no padding, which would be counted.

    Returns:
        Results of kind ``"activation"``, and problems for layers that saw NaN or infinity, or nothing at all.

    Raises [`SourceError`] for a model without such layers.
    """
    layers = quantized_layers(model)
    if not layers:
        raise SourceError(f"{type(model).__name__} has no linear layer that would be quantized")
    statistics = {name: {str(scheme): ErrorStatistics() for scheme in schemes} for name in layers}
    sweeps: dict[str, PrecisionSweep] = {}
    widths: dict[str, tuple[int, str]] = {}
    bad: dict[str, int] = {}

    def hook(name: str):
        def observe(module: nn.Module, args: tuple) -> None:
            x = args[0].detach()
            widths[name] = (x.shape[-1], str(x.dtype).removeprefix("torch."))
            if non_finite := int((~torch.isfinite(x)).sum()):
                bad[name] = bad.get(name, 0) + non_finite
                return
            for scheme in schemes:
                statistics[name][str(scheme)] += error_statistics(x.reshape(-1, x.shape[-1]), scheme)
            if name not in sweeps:
                sweeps[name] = precision_sweep(x)

        return observe

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            for batch in batches:
                model(input_ids=batch)
    finally:
        for handle in handles:
            handle.remove()
    problems = [Problem(name, f"{count} elements of its input are NaN or infinite") for name, count in bad.items()]
    problems += [Problem(name, "no text reached this layer") for name in layers if name not in widths]
    results = []
    for name in layers:
        if name in widths and name not in bad:
            width, dtype = widths[name]
            elements = next(iter(statistics[name].values())).elements
            shape = (elements // max(1, width), width)
            results.append(TensorResult(name, "activation", shape, dtype, statistics[name], sweeps[name]))
    return results, problems


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
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval(), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(f"{model} cannot be loaded to run it: {error}") from error


def tokenized(tokenizer, texts: Sequence[str], max_length: int) -> list[torch.Tensor]:
    """Token ids ``[1, tokens]`` of every text that has any, cut to ``max_length``.

    Raises [`SourceError`] when no text has a token, or one has a character that the tokenizer lacks.
    """
    try:
        ids = [tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt").input_ids for text in texts]
    except Exception as error:  # fast tokenizers raise nothing narrower, for a character they lack
        raise SourceError(f"the tokenizer cannot encode the texts of the dataset: {error}") from error
    ids = [batch for batch in ids if batch.shape[-1]]
    if not ids:
        raise SourceError("the tokenizer finds no token in the texts of the dataset")
    return ids
