# SPDX-License-Identifier: Apache-2.0
"""What `dither_ties` does to steps, and what it costs; writes `benchmarks/results/tie_dither.json`.

    python -m benchmarks.tie_dither --model SmolLM2-135M-Instruct --text gsm8k/test.jsonl
    python -m benchmarks.tie_dither --part start ...                # one part; records of the others stay

``movement``: how far small steps in random directions move quantized weights over how far they move masters, which
the straight-through estimator takes for 1, by scheme, without and with the dither, on Gaussian weights rounded to
bfloat16 and on the model; whether rounding gives the checkpoint back, and codes and scales are the same. ``start``:
what a dither does to the policy before any training, in nats per token. ``steps`` and ``floor``: see `tie_steps`.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.files import write_json
from hf_mxfp4.gemm import rotate_operand
from hf_mxfp4.gemm.storage.packed_weight import quantize_weight
from hf_mxfp4.layers import cached_weights, trainable_matrices
from hf_mxfp4.numerics import decode_e8m0, quantize
from hf_mxfp4.numerics.dither import Cells
from hf_mxfp4.rl.callbacks.movement import Movement, MovementSums
from hf_mxfp4.rl.callbacks.weight_samples import WeightSample, layer_type, sample_weights
from recipes.common.hardware import hardware

from . import perplexity
from .export_perplexity import Losses, difference, tensors_in
from .macro_factors import FACTORS_OF, PLAIN
from .tie_steps import measure_floor, measure_steps


RESULT = Path(__file__).with_name("results") / "tie_dither.json"
PACKAGES = ("torch", "transformers", "trl")
PARTS = ("movement", "start", "steps", "floor")

#: Schemes by the name in the tables.
SCHEMES: dict[str, dict[str, Any]] = {
    "rceil": PLAIN,
    "floor": {**PLAIN, "scale_rule": "floor"},
    "even": {**PLAIN, "scale_rule": "even"},
    "mse": {**PLAIN, "scale_rule": "mse"},
    "rceil, MBS static": {"scale_rule": "rceil", "macro_search": "static", "outlier_fallback": None},
    "rceil, MBS hybrid, fallback 0.5": FACTORS_OF,
    "even, blockwise": {"scale_rule": "even", "macro_search": "blockwise", "outlier_fallback": None},
    "`paper_a`": {"preset": "paper_a"},
    "rceil, fallback 1.0": {"scale_rule": "rceil", "macro_block": None, "outlier_fallback": 1.0},
    "`paper_b`: floor, 32x32": {"preset": "paper_b"},
    "rceil, rotated by H16": {**PLAIN, "fprop": {"rotation": "deterministic-16"}},
    "rceil, MBS hybrid, fallback 0.5, rotated by H16": {**FACTORS_OF, "fprop": {"rotation": "deterministic-16"}},
}
#: Standard deviations of the steps.
STEPS = (1e-6, 1e-5)
#: How many weights are stepped on, at most: evenly spaced rows of all matrices.
WEIGHTS = 2**25
#: Ulps that a weight is moved by, to either side, so that no lattice is left on which its numbers lie.
SPREAD = 4.5
#: E2M1's midpoints between neighbouring magnitudes, in units of the block scale.
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

#: Problems whose perplexity is taken: after the first 40, which the other tables have.
FIRST_PROBLEM, N_PROBLEMS = 40, 16
START_SCHEMES = {"w4a16, rceil": {"preset": "w4a16", **PLAIN}, "w4a4, rceil, MBS hybrid, fallback 0.5": FACTORS_OF}


# ---- movement --------------------------------------------------------------------------------------------------------


def gaussian_checkpoint(folder: Path) -> Path:
    """A Llama whose matrices are Gaussian numbers (standard deviation .02, 7 M of them) in bfloat16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 1, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=12, num_key_value_heads=12, initializer_range=0.02)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder: Path, dither: bool, **options: Any) -> tuple[nn.Module, float]:
    """The model with float32 masters, and the CPU seconds that loading took."""
    start = time.process_time()
    config = MXFP4RLConfig(dither_ties=dither, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    return model.eval(), time.process_time() - start


def step_samples(model: nn.Module) -> list[WeightSample]:
    """The rows that are stepped on. `sample_weights` leaves out what a product rotates; of that, as many are taken."""
    samples = sample_weights(model, WEIGHTS)
    if samples:
        return samples
    matrices = list(trainable_matrices(model))
    stride = max(1, -(-sum(matrix.weight().numel() for matrix in matrices) // WEIGHTS))
    for matrix in matrices:
        n_rows, columns = matrix.weight()[::stride].shape
        rows = slice(0, matrix.weight().shape[0], stride)
        part = (matrix.fprop.right, matrix.layer.config.backend, n_rows, n_rows, n_rows * columns)
        samples.append(WeightSample(layer_type(matrix), (matrix,), (rows,), *part))
    return samples


def movement(samples: Iterable[WeightSample], step: float, spread: float = 0.0) -> Movement:
    """The movement of a Gaussian step of this standard deviation; with ``spread``, from masters that were moved by up
    to as many ulps of bfloat16 first.

    Raises:
        ValueError: rows of a sample are padding.
    """
    sums = MovementSums()
    for index, sample in enumerate(samples):
        before, generator = sample.take(), torch.Generator().manual_seed(index)
        if before.numel() != sample.n_weights:
            raise ValueError(f"{sample.matrices[0].name} has rows that do not fill a tile")
        if spread:
            before = spread_over(before, spread, generator)
        after = before + torch.randn(before.shape, generator=generator) * step
        matrix = sample.matrices[0]
        before, after = (rotate_operand(rows, matrix.fprop.rotation, "fprop", matrix.rng) for rows in (before, after))
        sums.add(before, after, sample.scheme, sample.backend, sample.n_weights)
    return sums.movement


def spread_over(weight: torch.Tensor, ulps: float, generator: torch.Generator) -> torch.Tensor:
    """``weight`` moved uniformly by up to so many ulps of bfloat16, of 8 significant bits, to either side."""
    ulp = torch.ldexp((weight != 0).to(weight.dtype), weight.frexp().exponent - 8)
    return weight + ulp * ulps * (2 * torch.rand(weight.shape, generator=generator) - 1)


def checkpoint_differences(model: nn.Module, checkpoint: dict[str, torch.Tensor]) -> tuple[int, int]:
    """How many master weights do not round to the numbers of a 16-bit checkpoint, bit for bit, and how many bytes of
    codes and scales of the forward products differ from those of these numbers."""
    not_rounding_back = differing = 0
    for matrix in trainable_matrices(model):
        number, weight = checkpoint[matrix.full_name], matrix.weight()
        not_rounding_back += int((weight.to(number.dtype).view(torch.int16) != number.view(torch.int16)).sum())
        rotated = [
            rotate_operand(value, matrix.fprop.rotation, "fprop", matrix.rng) for value in (weight, number.float())
        ]
        stored, wanted = (quantize_weight(value, matrix.fprop.right, matrix.layer.config.backend) for value in rotated)
        differing += sum(int((stored[name] != wanted[name]).sum()) for name in wanted)
    return not_rounding_back, differing


def tie_densities(weights: Iterable[torch.Tensor]) -> list[float]:
    """How densely numbers of bfloat16 occupy each of `MIDPOINTS` under `rceil`, over the density of the four numbers
    above and the four below: 1 for weights that were rounded to bfloat16 alone."""
    counts = torch.zeros(1 << 15, dtype=torch.int64)
    for weight in weights:
        scale = decode_e8m0(quantize(weight.float(), scale_rule="rceil").scale)
        scaled = weight.float().unflatten(-1, (-1, 32)) / scale.unsqueeze(-1)
        counts += torch.bincount(scaled.abs().bfloat16().view(torch.int16).flatten().long(), minlength=1 << 15)
    numbers = torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16).double()
    found = []
    for midpoint in MIDPOINTS:
        tie = int(torch.tensor(midpoint, dtype=torch.bfloat16).view(torch.int16))
        around = range(tie - 4, tie + 5)
        width = {i: float(numbers[i + 1] - numbers[i - 1]) / 2 for i in around}
        others = [i for i in around if i != tie]
        density = sum(int(counts[i]) for i in others) / sum(width[i] for i in others)
        found.append(int(counts[tie]) / width[tie] / density if density else math.nan)
    return found


def measure_movement(folder: Path, weights: str) -> list[dict]:
    checkpoint = tensors_in(folder)
    records = []
    for name, options in SCHEMES.items():
        plain, seconds_without = load(folder, False, **options)
        samples = step_samples(plain)
        found = {"without": {step: movement(samples, step) for step in STEPS}}
        found["spread"] = {STEPS[0]: movement(samples, STEPS[0], SPREAD)}
        del plain, samples
        model, seconds = load(folder, True, **options)
        samples = step_samples(model)
        found["with"] = {step: movement(samples, step) for step in STEPS}
        report = model.quantization_report.dither
        not_rounding_back, differing = checkpoint_differences(model, checkpoint)
        with_it, without = found["with"][STEPS[0]].ratio, found["without"][STEPS[0]].ratio
        records.append(
            {
                "name": f"movement / {weights} / {name}",
                "shape": [report.n_weights],
                "value": with_it,
                "unit": f"movement of quantized weights over that of masters, steps of {STEPS[0]:g}",
                "baseline": without,
                "ratio": with_it / without,
                "movement": {
                    kind: {f"{step:g}": [m.ratio, m.standard_error, m.n_changed] for step, m in by_step.items()}
                    for kind, by_step in found.items()
                },
                "n_stepped": found["with"][STEPS[0]].n_weights,
                "share_on_boundaries": [report.share_before, report.share_after],
                "n_left": report.n_left,
                "n_not_rounding_back": not_rounding_back,
                "n_bytes_differing": differing,
                "load_cpu_seconds": [seconds_without, seconds],
            }
        )
        _say(records[-1])
    densities = tie_densities(checkpoint[matrix.full_name] for matrix in trainable_matrices(model))
    records.append(
        {
            "name": f"density of ties / {weights}",
            "shape": [sum(matrix.weight().numel() for matrix in trainable_matrices(model))],
            "value": densities[0],
            "unit": "density of weights at the midpoint 0.25 over that of its eight neighbours in bfloat16",
            "baseline": 1.0,
            "ratio": densities[0],
            "by_midpoint": dict(zip(map(str, MIDPOINTS), densities, strict=True)),
        }
    )
    _say(records[-1])
    return records


# ---- the policy that training starts from ----------------------------------------------------------------------------


@torch.no_grad()
def dither_to_both_sides(model: nn.Module, seed: int) -> None:
    """Move the masters to places of their cells that are drawn alone, whatever happens to codes and scales."""
    generator = torch.Generator().manual_seed(seed)
    for matrix in trainable_matrices(model):
        weight = matrix.weight()
        cells = Cells(weight.clone(), torch.bfloat16)
        weight.copy_(cells.values(cells.draw(generator)))


def measure_start(folder: Path, texts: list[str]) -> list[dict]:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def losses(model: nn.Module) -> Losses:
        with cached_weights():
            return perplexity.losses(model, tokenizer, texts)

    records = []
    for name, options in START_SCHEMES.items():
        found = {"none": losses(load(folder, False, **options)[0])}
        for seed in (0, 1):
            model, _ = load(folder, False, **options)
            dither_to_both_sides(model, seed)
            found[f"to both sides, seed {seed}"] = losses(model)
        found["as `from_pretrained` dithers"] = losses(load(folder, True, **options)[0])
        baseline = math.exp(perplexity.mean_loss(found["none"]))
        for dither, each in found.items():
            value = math.exp(perplexity.mean_loss(each))
            nats, error = difference(each, found["none"])
            records.append(
                {
                    "name": f"start / {name} / {dither}",
                    "shape": [len(texts), sum(map(len, each))],
                    "value": value,
                    "unit": "perplexity",
                    "baseline": baseline,
                    "ratio": value / baseline,
                    "nats_per_token": perplexity.mean_loss(each),
                    "nats": nats,
                    "standard_error": error,
                    "largest_difference": max(
                        abs(a - b) for x, y in zip(each, found["none"], strict=True) for a, b in zip(x, y, strict=True)
                    ),
                }
            )
            _say(records[-1])
    return records


# ---- records ---------------------------------------------------------------------------------------------------------


def _say(record: dict) -> None:
    print(f"{record['name']}: {record['value']:.4g} (baseline {record['baseline']})", flush=True)


def measure(part: str, model: Path, text: Path) -> list[dict]:
    if part == "start":
        return measure_start(model, perplexity.read_texts(text, FIRST_PROBLEM + N_PROBLEMS)[FIRST_PROBLEM:])
    if part in ("steps", "floor"):
        lines = text.read_text(encoding="utf-8").splitlines()[FIRST_PROBLEM : FIRST_PROBLEM + N_PROBLEMS]
        problems = list(map(json.loads, lines))
        return measure_steps(model, problems) if part == "steps" else measure_floor(model, problems)
    with tempfile.TemporaryDirectory() as temporary:
        gaussian = measure_movement(gaussian_checkpoint(Path(temporary)), "Gaussian")
    return gaussian + measure_movement(model, "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint in bfloat16")
    parser.add_argument("--text", type=Path, required=True, help=".jsonl with questions and answers")
    parser.add_argument("--part", choices=PARTS, help="measure this alone; records of the others stay")
    options = parser.parse_args()
    origin = {
        "ceiling_fraction": None,
        "model": options.model.name,
        "text": f"{options.text.parent.name}/{options.text.name}",
        "hardware": hardware(),
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
        "command": f"python -m benchmarks.tie_dither --model {options.model.name} "
        f"--text {options.text.parent.name}/{options.text.name}",
        "date": datetime.date.today().isoformat(),
    }
    for part in [options.part] if options.part else PARTS:
        prefixes = ("movement /", "density of ties /") if part == "movement" else (f"{part} /",)
        found = [{**record, **origin} for record in measure(part, options.model, options.text)]
        kept = json.loads(RESULT.read_text()) if RESULT.exists() else []
        kept = [record for record in kept if not record["name"].startswith(prefixes)] + found
        write_json(RESULT, kept)


if __name__ == "__main__":
    main()
