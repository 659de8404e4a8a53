# SPDX-License-Identifier: Apache-2.0
"""The evidence on a real model: divergence of schemes, of a checkpoint as it is, smoothed, and rounded by GPTQ.

    python -m benchmarks.evidence --model SmolLM2-135M-Instruct --calibrate gsm8k/train.jsonl \
        --text gsm8k/test.jsonl --samples 200

Writes `benchmarks/results/evidence.json`; with ``--cores --out benchmarks/results/tensor_cores.json`` that record, of
the schemes that tensor cores multiply and of the baselines FP8 and NVFP4. What is there already for the model and the
text is kept, so a run that was stopped goes on, and a second text or model is a second run. All are compared with the
checkpoint as it is, in full precision. Checkpoints are prepared on texts of ``--calibrate`` alone.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab import (
    FULL_PRECISION,
    ModelScheme,
    Row,
    TextOptions,
    load,
    read_schemes,
    reference_of,
    round_model,
    score,
    smooth_model,
    swapped,
    texts_to_predict,
)
from hf_mxfp4.numerics import NVFP4, QuantScheme
from hf_mxfp4.ops import select_matmul

from .records import made, option_parser, write


PACKAGES = ("torch", "transformers")
OURS = "even+mbs128-blockwise"
ROTATED = "deterministic-64"
#: Texts that channels are scaled by, and that weights are rounded by.
SMOOTHING_TEXTS, ROUNDING_TEXTS = 32, 128

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

Prepare = Callable[[nn.Module, Callable[[int], list[torch.Tensor]]], None]


def with_rotation(scheme: ModelScheme) -> ModelScheme:
    """Return the same, with both operands of the forward product rotated online."""
    options = {**scheme.config.to_dict()["fprop"], "rotation": ROTATED}
    return ModelScheme(f"{scheme.name}, H64", replace(scheme.config, fprop=options))


def rotated(names: Sequence[str]) -> list[ModelScheme]:
    return [with_rotation(scheme) for scheme in read_schemes(list(names))]


def rounded_for(config: MXFP4RLConfig) -> Prepare:
    def prepare(model: nn.Module, texts: Callable[[int], list[torch.Tensor]]) -> None:
        smoothed(model, texts)
        found = round_model(model, texts(ROUNDING_TEXTS), config)
        print(f"rounded {len(found.layers)} layers, {found.gain_db:.2f} dB", flush=True)

    return prepare


def smoothed(model: nn.Module, texts: Callable[[int], list[torch.Tensor]]) -> None:
    smooth_model(model, texts(SMOOTHING_TEXTS))


def variants(cores: bool) -> Iterator[tuple[str, Prepare, list[ModelScheme]]]:
    """Yield what is done with the checkpoint, and the schemes that are measured then."""
    if cores:
        yield "as it is", lambda *_: None, read_schemes(list(CORES))
        yield "smoothed", smoothed, read_schemes(list(CORES))
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
    for operand in (config.gemms().fprop.left, config.gemms().fprop.right):
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


def compared(row: Row, base: Row, shape: list[int]) -> dict:
    """Return the record of a row next to the one in full precision; ``shape`` is texts and tokens."""
    return {
        "name": row.name,
        "shape": shape,
        "value": row.perplexity,
        "unit": "perplexity",
        "baseline": base.perplexity,
        "ratio": row.perplexity / base.perplexity,
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
    parser.add_argument("--variants", nargs="+", help="by default all")
    parser.add_argument("--cores", action="store_true", help="the schemes of tensor cores alone; give --out too")
    run(parser.parse_args())


def run(options: argparse.Namespace) -> None:
    text, calibration = (f"{file.parent.name}/{file.name}" for file in (options.text, options.calibrate))
    command = (
        f"python -m benchmarks.evidence --model {options.model.name} --calibrate {calibration} --text {text} "
        f"--samples {options.samples}{' --cores' * options.cores}"
    )
    out = Path(options.out)
    records: list[dict] = json.loads(out.read_text()) if out.is_file() else []
    done = {(r["variant"], r["name"]) for r in records if (r["model"], r["command"]) == (options.model.name, command)}
    original = load(str(options.model), "bfloat16")
    predicted = TextOptions(str(options.text), samples=options.samples)
    batches = texts_to_predict(predicted, original.tokenizer, predicted.read())
    tokens = sum(ids.shape[1] - 1 for ids in batches)
    reference = reference_of(original.model, batches)

    def texts(count: int) -> list[torch.Tensor]:
        source = TextOptions(str(options.calibrate), samples=count)
        return source.tokens(original.tokenizer, source.read())

    base = Row(FULL_PRECISION, tuple(reference.scores[index] for index in range(len(batches))))
    for variant, prepare, schemes in variants(options.cores):
        missing = [each for each in schemes if (variant, each.name) not in done]
        if not missing or options.variants and variant not in options.variants:
            continue
        model = load(str(options.model), "bfloat16").model
        prepare(model, texts)
        for scheme in missing:
            with swapped(model, scheme.config) as sqnr_db:
                row = Row(scheme.name, tuple(score(model, reference, batches)), scheme, sqnr_db)
            record = compared(row, base, [len(batches), tokens]) | {"variant": variant}
            records.append(record | {"model": options.model.name, "text": text} | made(command, PACKAGES))
            write(records, out)
            print(f"{variant}: {row.name}: {row.perplexity:.3f}, KL {row.kl.text(4)}", flush=True)


if __name__ == "__main__":
    main()
