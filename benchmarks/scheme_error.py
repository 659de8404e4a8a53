# SPDX-License-Identifier: Apache-2.0
"""Squared error of the quantization schemes on random data and on a trained model's weights; writes
`benchmarks/results/scheme_error.json`.

    python -m benchmarks.scheme_error

Random data: rows of 1024 elements whose standard deviations are spread over one octave, 2 million elements per
distribution, seed 0. Trained weights: the linear layers of the demo's model (0.6 million parameters) after
600 steps of supervised training; its output error is measured on what enters the layers, 2,000 tokens that the searches
have not seen. The baseline is the macro-block scaling of arXiv 2605.20402: rceil with the static factor. Two minutes.
"""

import argparse
import platform

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_mxfp4
from hf_mxfp4.lab import ErrorStatistics, error_statistics
from hf_mxfp4.model.layer_names import find_layers
from hf_mxfp4.numerics import FP8, NVFP4, OperandScheme, QuantScheme, fake_quantize_e4m3, fake_quantize_nvfp4
from hf_mxfp4.recipes.tasks import ALPHABET, Task, load_task
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer, build_qwen2, encode_example, supervised_warmup

from .records import RESULTS, made, write


COMMAND = "python -m benchmarks.scheme_error"
SHAPE = (2048, 1024)
SCHEMES = {
    "floor": QuantScheme("floor"),
    "rceil": QuantScheme("rceil"),
    "even": QuantScheme("even"),
    "mse": QuantScheme("mse"),
    "rceil, static factor": QuantScheme("rceil", 128),
    "even, static factor": QuantScheme("even", 128),
    "rceil, dynamic factor": QuantScheme("rceil", 128, "dynamic"),
    "even, dynamic factor": QuantScheme("even", 128, "dynamic"),
    "mse, dynamic factor": QuantScheme("mse", 128, "dynamic"),
    "rceil, block mantissas": QuantScheme("rceil", 128, "block_mantissas"),
    "even, block mantissas": QuantScheme("even", 128, "block_mantissas"),
    "mse, block mantissas": QuantScheme("mse", 128, "block_mantissas"),
    "even, block mantissas up to 1.5": QuantScheme("even", 128, "block_mantissas_fp8"),
    "rceil, static factor, fallback 0.5": QuantScheme("rceil", 128, "static", 0.5),
    "rceil, static factor, fallback 1": QuantScheme("rceil", 128, "static", 1.0),
    "rceil, 32 x 32 tiles": QuantScheme("rceil", block_rows=32),
    "even, 32 x 32 tiles": QuantScheme("even", block_rows=32),
    "NVFP4": NVFP4,
    "E4M3, a scale per row": FP8,
}
BASELINE = "rceil, static factor"


def samples() -> dict[str, torch.Tensor]:
    """Return the three distributions, float32 [2048, 1024]."""
    torch.manual_seed(0)
    spread = torch.exp2(torch.rand(SHAPE[0], 1))
    return {
        "Gaussian": torch.randn(SHAPE) * spread,
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample(SHAPE) * spread,
        "Student-t(4)": torch.distributions.StudentT(4.0).sample(SHAPE) * spread,
    }


def trained_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Task]:
    """Return the demo's model after supervised training, in full precision."""
    tokenizer = build_char_tokenizer(ALPHABET)
    task = load_task("arithmetic")
    return train(task, num_layers=4, seed=0), tokenizer, task


def train(task: Task, num_layers: int, seed: int) -> PreTrainedModel:
    """Return a model that solves most of the problems, in full precision."""
    tokenizer = build_char_tokenizer(ALPHABET)
    model = build_qwen2(tokenizer, num_layers=num_layers, seed=seed)
    supervised_warmup(model, tokenizer, task.train, steps=600, target_loss=0.2, seed=seed, progress=False)
    return model.eval()


def trained_layers() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weight ``[N, K]`` and its input ``[tokens, K]`` on texts that the model has not seen."""
    model, tokenizer, task = trained_model()
    unseen = inputs(model, tokenizer, task.test)
    linears, _ = find_layers(model)
    return [(linear.weight.detach(), unseen[name][:2000]) for name, linear in linears.items()]


def inputs(model: PreTrainedModel, tokenizer, rows) -> dict[str, torch.Tensor]:
    """Return what enters each linear layer, ``[tokens, K]``."""
    found: dict[str, list[torch.Tensor]] = {}
    linears, _ = find_layers(model)

    def keep(name):
        def hook(module, arguments):
            found.setdefault(name, []).append(arguments[0].detach().flatten(0, -2))

        return hook

    handles = [linear.register_forward_pre_hook(keep(name)) for name, linear in linears.items()]
    with torch.no_grad():
        for row in rows:
            ids, _ = encode_example(tokenizer, row["prompt"], row["completion"])
            model(input_ids=torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def quantized(x: torch.Tensor, scheme: OperandScheme) -> torch.Tensor:
    """Return the values of a tensor under a scheme."""
    if scheme is NVFP4:
        return fake_quantize_nvfp4(x)
    if scheme is FP8:
        return fake_quantize_e4m3(x)
    return hf_mxfp4.fake_quantize(x, **vars(scheme))


def output_error(layers: list[tuple], scheme: OperandScheme) -> float:
    """``|x (Q(W) - W)^T|**2 / |x W^T|**2`` over all layers."""
    error = 0.0
    energy = 0.0
    for weight, x in layers:
        error += (x @ (quantized(weight, scheme) - weight).T).double().square().sum().item()
        energy += (x @ weight.T).double().square().sum().item()
    return error / energy


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # no options, but --help runs nothing
    data = samples()
    layers = trained_layers()
    records: list[dict] = []

    def add(name: str, on: str, value: float, unit: str, baseline: float, **more) -> None:
        shape = [sum(weight.numel() for weight, _ in layers)]
        if on in data:
            shape = list(SHAPE)
        records.append(
            {
                "name": name,
                "on": on,
                "shape": shape,
                "value": value,
                "unit": unit,
                "baseline": baseline,
                "ratio": baseline / value,
                "ceiling_fraction": None,
                **more,
                **made(COMMAND, ("torch",), f"{platform.machine()} CPU"),
            }
        )

    def measure(on: str, scheme: QuantScheme) -> ErrorStatistics:
        if on in data:
            return error_statistics(data[on], scheme)
        return sum((error_statistics(weight, scheme) for weight, _ in layers), ErrorStatistics())

    for on in (*data, "trained weights"):
        baseline = measure(on, SCHEMES[BASELINE]).relative_mse
        for name, scheme in SCHEMES.items():
            if scheme is FP8:  # which has no components
                tensors = [weight for weight, _ in layers]
                if on in data:
                    tensors = [data[on]]
                # Against the identity, whose output error is that of the tensor itself.
                value = output_error([(x, torch.eye(x.shape[1])) for x in tensors], scheme)
                add(name, on, value, "relative squared error", baseline)
                continue
            found = measure(on, scheme)
            add(name, on, found.relative_mse, "relative squared error", baseline, **found.summary())
        floor = measure(on, QuantScheme()).floor_relative_mse
        add("ideal scale amax / 6 (not MXFP4)", on, floor, "relative squared error", baseline)
    baseline = output_error(layers, SCHEMES[BASELINE])
    for name, scheme in SCHEMES.items():
        value = output_error(layers, scheme)
        add(name, "outputs of trained layers", value, "relative squared error", baseline)
    for record in records:
        print(f"{record['on']:<26}{record['name']:<50}{100 * record['value']:8.4f} %")
    write(records, RESULTS / "scheme_error.json")


if __name__ == "__main__":
    main()
