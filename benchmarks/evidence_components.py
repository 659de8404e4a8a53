# SPDX-License-Identifier: Apache-2.0
"""Which part of the error predicts the damage: components of the errors of weights and activations of a real model,
scheme by scheme, to be laid beside the KL of `benchmarks.evidence`.

    python -m benchmarks.evidence_components --model SmolLM2-135M-Instruct --text gsm8k/test.jsonl

Writes `benchmarks/results/evidence_components.json`: energies over that of the tensor, averaged over the linear layers.
Activations are those of the model in full precision.
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

from hf_mxfp4.lab import (
    ErrorStatistics,
    TextOptions,
    analyze_activations,
    error_statistics,
    load,
    quantized_layers,
    read_schemes,
    texts_to_predict,
)
from hf_mxfp4.numerics import QuantScheme

from .evidence import AS_IT_IS
from .records import made, option_parser, write


PACKAGES = ("torch", "transformers")
COMPONENTS = ("scale_bias", "deadzone", "grid", "total")


def relative(found: Iterable[ErrorStatistics]) -> dict[str, float]:
    """Each component's energy over that of the tensor, averaged over tensors."""
    found = list(found)
    return {name: fmean(getattr(each, name) / each.energy for each in found) for name in COMPONENTS}


def of_weights(model: nn.Module, schemes: Iterable[QuantScheme]) -> dict[QuantScheme, dict[str, float]]:
    """[`relative`] of the weights of all linear layers that are quantized."""
    weights = [layer.weight.detach() for layer in quantized_layers(model).values()]
    return {scheme: relative(error_statistics(weight, scheme) for weight in weights) for scheme in schemes}


def of_activations(
    model: nn.Module, batches: list[torch.Tensor], schemes: list[QuantScheme]
) -> dict[QuantScheme, dict[str, float]]:
    """[`relative`] of the inputs of these layers; a common input of several counts once."""
    results, problems = analyze_activations(model, batches, schemes)
    if problems:
        raise ValueError(f"{len(problems)} layers could not be analyzed, the first is {problems[0]}")
    return {scheme: relative(result.statistics[str(scheme)] for result in results) for scheme in schemes}


def main() -> None:
    parser = option_parser(__doc__, "evidence_components")
    parser.add_argument("--model", type=Path, required=True, help="folder of a full-precision checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="what activations are measured on")
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args()
    text = f"{options.text.parent.name}/{options.text.name}"
    loaded = load(str(options.model), "bfloat16")
    model, texts = loaded.model, TextOptions(str(options.text), samples=options.samples)
    batches = texts_to_predict(texts, loaded.tokenizer, texts.read())
    schemes = [scheme for scheme in read_schemes(list(AS_IT_IS)) if scheme.config.activation_scheme is not None]
    pairs = [(scheme.name, scheme.config.weight_scheme, scheme.config.activation_scheme) for scheme in schemes]
    weights = of_weights(model, dict.fromkeys(weight for _, weight, _ in pairs))
    activations = of_activations(model, batches, list(dict.fromkeys(inputs for _, _, inputs in pairs)))
    command = f"python -m benchmarks.evidence_components --model {options.model.name} --text {text}"
    records = [
        {
            "name": name,
            "shape": [len(batches), sum(batch.numel() for batch in batches)],
            "value": activations[inputs]["total"],
            "unit": "error energy of activations over their energy, averaged over layers",
            "baseline": weights[weight]["total"],
            "ratio": activations[inputs]["total"] / weights[weight]["total"],
            "ceiling_fraction": None,
            "model": options.model.name,
            "text": text,
            "weights": weights[weight],
            "activations": activations[inputs],
            **made(command, PACKAGES),
        }
        for name, weight, inputs in pairs
    ]
    write(records, options.out)


if __name__ == "__main__":
    main()
