# SPDX-License-Identifier: Apache-2.0
"""The evidence on a real model: divergence of schemes, of a checkpoint as it is, smoothed, and rounded by GPTQ.

    python -m benchmarks.evidence --model SmolLM2-135M-Instruct --calibrate gsm8k/train.jsonl \
        --text gsm8k/test.jsonl --samples 200

Writes `benchmarks/results/evidence.json`; with ``--cores --out benchmarks/results/tensor_cores.json`` that record, of
the schemes that tensor cores multiply and of the baselines FP8 and NVFP4; with ``--schemes NAME ... --out FILE`` one of
some schemes alone. What is there already for the model and the text is kept, so a run that was stopped goes on, and a
second text or model is a second run. All are compared with the checkpoint as it is, in full precision. Checkpoints are
prepared on texts of ``--calibrate`` alone.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab import ModelScheme, Row, TextOptions, load, read_schemes, round_model, smooth_model
from hf_mxfp4.numerics import NVFP4, QuantScheme
from hf_mxfp4.ops import select_matmul

from .held_out import HeldOut, short_name
from .records import made, option_parser, recorded, write


PACKAGES = ("torch", "transformers")
OURS = "even+mbs128-blockwise"
ROTATED = "deterministic-64"
#: What checkpoints were before, where that is not the original.
CONVERTED = {"SmolLM2-135M-Instruct": "a Q4_1 GGUF file", "gemma-3-270m": "a Q4_K_M GGUF file"}
#: Texts that channels are scaled by, and that weights are rounded by.
SMOOTHING_TEXTS = 32
ROUNDING_TEXTS = 128

#: Of the checkpoint as it is.
AS_IT_IS = (
    *("rceil", "floor", "mse", "even", "rceil+mbs128-static", "rceil+mbs128-hybrid", "rceil+of0.5", "rceil+of1"),
    *("rceil+mbs128-hybrid+of0.5", "rceil+mbs128-hybrid+of1", "even+mbs128-hybrid", "paper_b", "w4a16:rceil"),
    *("w4a16:even", f"w4a16:{OURS}", OURS, f"{OURS}+of1"),
)
#: By what multiplies them, as it is and smoothed: weights and activations in 4 bits, activations in E4M3, in 16 bits.
CORES = (
    *("even", f"{OURS}_fp8", OURS, "nvfp4", f"w4a8:{OURS}_fp8", f"w4a8:{OURS}", "w8a8"),
    *("w4a8:even", "w4a8:even/mxfp8", f"w4a8:{OURS}_fp8/mxfp8"),
    *("w4a16:even", f"w4a16:{OURS}_fp8", f"w4a16:{OURS}", "w4a16:nvfp4"),
)
SMOOTHED = (OURS, f"w4a16:{OURS}")
ROUNDED = (
    f"w4a16:{OURS}",
    OURS,
    f"w4a4:{OURS}/{OURS}+of1",
)

#: Returns so many calibration texts, as token ids ``[1, tokens]``.
Texts = Callable[[int], list[torch.Tensor]]
#: Changes a model in place, on calibration texts.
Prepare = Callable[[nn.Module, Texts], None]


def with_rotation(scheme: ModelScheme) -> ModelScheme:
    """Return the same, with both operands of the forward product rotated online."""
    options = {**scheme.config.to_dict()["fprop"], "rotation": ROTATED}
    return ModelScheme(f"{scheme.name}, H64", replace(scheme.config, fprop=options))


def rotated(names: Sequence[str]) -> list[ModelScheme]:
    """Return schemes by name, with both operands rotated."""
    return [with_rotation(scheme) for scheme in read_schemes(list(names))]


def rounded_for(config: MXFP4RLConfig) -> Prepare:
    """Return what smooths a model and rounds its weights by GPTQ for a scheme."""

    def prepare(model: nn.Module, texts: Texts) -> None:
        smoothed(model, texts)
        report = round_model(model, texts(ROUNDING_TEXTS), config)
        print(f"rounded {len(report.layers)} layers, {report.gain_db:.2f} dB", flush=True)

    return prepare


def smoothed(model: nn.Module, texts: Texts) -> None:
    """Smooth a model."""
    smooth_model(model, texts(SMOOTHING_TEXTS))


def variants(cores: bool, names: Sequence[str]) -> Iterator[tuple[str, Prepare, list[ModelScheme]]]:
    """Yield what is done with the checkpoint, and the schemes that are measured then: of tensor cores, or those of
    ``names``, or, without either, those of the evidence."""
    if cores or names:
        schemes = read_schemes(list(CORES if cores else names))
        yield "as it is", lambda *_: None, schemes
        yield "smoothed", smoothed, schemes
        weights, exact = read_schemes([f"w4a16:{OURS}_fp8", f"w4a8:{OURS}_fp8"])
        yield "smoothed, GPTQ for H64", rounded_for(with_rotation(weights).config), [with_rotation(exact)]
        return
    weights = read_schemes([f"w4a16:{OURS}"])[0]
    yield "as it is", lambda *_: None, [*read_schemes(list(AS_IT_IS)), *rotated((OURS,))]
    yield "smoothed", smoothed, read_schemes(list(SMOOTHED))
    yield "smoothed, GPTQ", rounded_for(weights.config), read_schemes(list(ROUNDED))
    yield "smoothed, GPTQ for H64", rounded_for(with_rotation(weights).config), rotated(ROUNDED)


def products(config: MXFP4RLConfig) -> float | None:
    """Return how many MXFP4 products a forward product takes: residuals are operands of their own. `None` where one
    operand is in full precision."""
    count = 1.0
    fprop = config.gemms().fprop
    for operand in (fprop.left, fprop.right):
        if not isinstance(operand, QuantScheme):
            return None
        if operand.outlier_fallback is not None:
            count *= 2
    return count


def tensor_cores(config: MXFP4RLConfig) -> list[str]:
    """Return what the tensor cores of Hopper and of Blackwell multiply the operands of the forward product as."""
    gemms = config.gemms()
    names = [select_matmul("fprop", gemms, hardware).name for hardware in ("sm_90", "sm_100")]
    if gemms.fprop.left is gemms.fprop.right is NVFP4:  # which other engines multiply
        names[1] = "fp4"
    return [name.upper().replace("DENSE", "BF16") for name in names]


def compared(row: Row, held_out: HeldOut) -> dict:
    """Return the record of a scheme, with the checkpoint in full precision as the baseline."""
    baseline = held_out.full_precision.perplexity
    return {
        "name": row.name,
        "shape": [len(row.scores), row.tokens],
        "value": row.perplexity,
        "unit": "perplexity",
        "baseline": baseline,
        "ratio": row.perplexity / baseline,
        "ceiling_fraction": None,
        "bits": row.scheme.bits,
        "weight_bits": row.scheme.weight_bits,
        "tensor_cores": tensor_cores(row.scheme.config),
        "kl": row.kl.value,
        "kl_standard_error": row.kl.error,
        "same_top": row.same_top,
        "weight_sqnr_db": row.weight_sqnr_db,
        "products": products(row.scheme.config),
    }


def main() -> None:
    parser = option_parser(__doc__, "evidence")
    parser.add_argument("--model", type=Path, required=True, help="folder of a full-precision checkpoint")
    parser.add_argument("--calibrate", type=Path, required=True, help="texts that checkpoints are prepared on")
    parser.add_argument("--text", type=Path, required=True, help="what is predicted: JSON lines or plain text")
    parser.add_argument("--samples", type=int, default=200, help="texts or windows to predict")
    parser.add_argument("--cores", action="store_true", help="the schemes of tensor cores alone; give --out too")
    parser.add_argument("--schemes", nargs="+", default=[], help="these instead; give --out too")
    run(parser.parse_args())


def run(options: argparse.Namespace) -> None:
    """Measure the schemes that the file of records lacks, and write it after each."""
    name = options.model.name
    command = (
        f"python -m benchmarks.evidence --model {name} --calibrate {short_name(options.calibrate)} "
        f"--text {short_name(options.text)} --samples {options.samples}"
    )
    if options.cores:
        command += " --cores"
    if options.schemes:
        command += f" --schemes {' '.join(options.schemes)}"
    records = recorded(options.out)
    done = {(r["variant"], r["name"]) for r in records if r["model"] == name and r["command"] == command}
    original = load(str(options.model), "bfloat16")
    held_out = HeldOut.read(options.text, original, options.samples)

    def texts(count: int) -> list[torch.Tensor]:
        source = TextOptions(str(options.calibrate), samples=count)
        return source.tokens(original.tokenizer, source.read())

    for variant, prepare, schemes in variants(options.cores, options.schemes):
        missing = [scheme for scheme in schemes if (variant, scheme.name) not in done]
        if not missing:
            continue
        model = load(str(options.model), "bfloat16").model
        prepare(model, texts)
        for scheme in missing:
            row = held_out.row_under(scheme, model)
            record = compared(row, held_out) | {"variant": variant, "model": name, "text": held_out.name}
            if name in CONVERTED:
                record["converted_from"] = CONVERTED[name]
            records.append(record | made(command, PACKAGES))
            write(records, options.out)
            print(f"{variant}: {row.name}: {row.perplexity:.3f}, KL {row.kl.text(4)}", flush=True)


if __name__ == "__main__":
    main()
