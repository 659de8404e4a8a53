# SPDX-License-Identifier: Apache-2.0
"""The evidence on a real model: divergence of schemes, of a checkpoint as it is, smoothed, and rounded by GPTQ.

    python -m benchmarks.evidence --model SmolLM2-135M-Instruct --calibrate gsm8k/train.jsonl \
        --text gsm8k/test.jsonl --samples 200

Writes `benchmarks/results/evidence.json`. What is there already for the model and the text is kept, so a run that was
stopped goes on, and a second text or model is a second run. All are compared with the checkpoint as it is, in full
precision. Checkpoints are prepared on texts of ``--calibrate`` alone.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab.gptq import round_model
from hf_mxfp4.lab.perplexity.checkpoint import texts_to_predict
from hf_mxfp4.lab.perplexity.evaluate import reference_of, score
from hf_mxfp4.lab.perplexity.load import load
from hf_mxfp4.lab.perplexity.results import FULL_PRECISION, Row
from hf_mxfp4.lab.perplexity.schemes import ModelScheme, read_schemes
from hf_mxfp4.lab.perplexity.swapped import swapped
from hf_mxfp4.lab.smoothing import smooth_model
from hf_mxfp4.lab.texts import TextOptions
from hf_mxfp4.numerics import QuantScheme

from .records import made, option_parser, write
from .scheme_perplexity import compared


PACKAGES = ("torch", "transformers")
OURS = "even+mbs128-blockwise"
ROTATED = "deterministic-64"
STRENGTH = 0.3
#: Texts that channels are scaled by, and that weights are rounded by.
SMOOTHING_TEXTS, ROUNDING_TEXTS = 32, 128

#: Of the checkpoint as it is. The first are those that carry the claims.
AS_IT_IS = (
    "rceil",
    "rceil+mbs128-static",
    "rceil+mbs128-hybrid",
    "rceil+of0.5",
    "rceil+mbs128-hybrid+of0.5",
    "even",
    OURS,
    f"{OURS}+of1@0.05",
    f"{OURS}+of1@0.1",
    f"{OURS}+of1@0.25",
    f"{OURS}+of1",
    f"w4a16:{OURS}",
    "w4a16:rceil",
    "w4a16:even",
    "w4a16:rceil+mbs128-dynamic",
    "w4a16:rceil+of0.5",
    "rceil+mbs128-hybrid+of1",
    "rceil+of1",
    "rceil+of0.5@0.1",
    "rceil+of1@0.1",
    f"{OURS}+of0.25@0.1",
    f"{OURS}+of0.5@0.1",
    f"{OURS}+of0.75@0.1",
    f"{OURS}+of1@0.02",
    f"w4a4:{OURS}/{OURS}+of1@0.1",
    f"w4a4:{OURS}+of1@0.1/{OURS}",
    "floor",
    "mse",
    "paper_b",
    "w4a16:floor",
    "w4a16:mse",
    "even+mbs128-hybrid",
)
SMOOTHED = (
    OURS,
    f"{OURS}+of1@0.05",
    f"w4a16:{OURS}",
    f"{OURS}+of1@0.1",
    f"{OURS}+of1@0.25",
    f"{OURS}+of1",
    "rceil+mbs128-hybrid+of0.5",
    "rceil",
)
ACTIVATIONS = (OURS, f"{OURS}+of1@0.05", f"{OURS}+of1@0.1", f"{OURS}+of1@0.25", f"{OURS}+of1")
ROUNDED = (f"w4a16:{OURS}", *(OURS if each == OURS else f"w4a4:{OURS}/{each}" for each in ACTIVATIONS))
ROUNDED_FOR_BOTH = tuple(ROUNDED[index] for index in (1, 4, 2, 0))
WITH_RESIDUALS = tuple(f"w4a4:{OURS}+of1@0.25/{OURS}+of1{rate}" for rate in ("@0.25", "@0.5", "@0.75", ""))

Prepare = Callable[[nn.Module, Callable[[int], list[torch.Tensor]]], None]


def with_rotation(scheme: ModelScheme) -> ModelScheme:
    """The same, with both operands of the forward product rotated online."""
    options = {**scheme.config.to_dict()["fprop"], "rotation": ROTATED}
    return ModelScheme(f"{scheme.name}, H64", replace(scheme.config, fprop=options))


def rotated(names: Sequence[str]) -> list[ModelScheme]:
    return [with_rotation(scheme) for scheme in read_schemes(list(names))]


def rounded_for(config: MXFP4RLConfig, inputs: str = "full") -> Prepare:
    def prepare(model: nn.Module, texts: Callable[[int], list[torch.Tensor]]) -> None:
        smoothed(model, texts)
        found = round_model(model, texts(ROUNDING_TEXTS), config, inputs=inputs)
        print(f"rounded {len(found.layers)} layers, {found.gain_db:.2f} dB", flush=True)

    return prepare


def smoothed(model: nn.Module, texts: Callable[[int], list[torch.Tensor]]) -> None:
    smooth_model(model, texts(SMOOTHING_TEXTS), STRENGTH)


def as_it_is(model: nn.Module, texts: Callable[[int], list[torch.Tensor]]) -> None:
    """Nothing is done."""


def variants() -> Iterator[tuple[str, Prepare, list[ModelScheme]]]:
    """What is done with the checkpoint, and what is measured then."""
    weights = read_schemes([f"w4a16:{OURS}"])[0]
    yield "as it is", as_it_is, [*read_schemes(list(AS_IT_IS)), *rotated((OURS,))]
    yield "smoothed", smoothed, [*read_schemes(list(SMOOTHED)), *rotated((OURS, f"{OURS}+of1@0.05"))]
    yield "smoothed, GPTQ", rounded_for(weights.config), read_schemes(list(ROUNDED))
    yield "smoothed, GPTQ for H64", rounded_for(with_rotation(weights).config), rotated(ROUNDED)
    residuals = with_rotation(read_schemes([f"w4a16:{OURS}+of1@0.25"])[0])
    yield "smoothed, GPTQ with residuals for H64", rounded_for(residuals.config), rotated(WITH_RESIDUALS)
    both = rotated((OURS,))[0].config
    yield "smoothed, GPTQ for H64 and quantized inputs", rounded_for(both, "quantized"), rotated(ROUNDED_FOR_BOTH)


def products(config: MXFP4RLConfig) -> float | None:
    """How many MXFP4 products a forward product takes: residuals are operands of their own. `None` where one operand
    is in full precision."""
    count = 1.0
    for operand in (config.gemms().fprop.left, config.gemms().fprop.right):
        if not isinstance(operand, QuantScheme):
            return None
        if operand.outlier_fallback is not None:
            count *= 1 + (1.0 if operand.fallback_rate is None else operand.fallback_rate)
    return count


def main() -> None:
    parser = option_parser(__doc__, "evidence")
    parser.add_argument("--model", type=Path, required=True, help="folder of a full-precision checkpoint")
    parser.add_argument("--calibrate", type=Path, required=True, help="texts that checkpoints are prepared on")
    parser.add_argument("--text", type=Path, required=True, help="what is predicted: JSON lines or plain text")
    parser.add_argument("--samples", type=int, default=200, help="texts or windows to predict")
    parser.add_argument("--variants", nargs="+", help="by default all")
    parser.add_argument("--first", type=int, help="only so many schemes of each variant")
    options = parser.parse_args()
    run(options)


def run(options: argparse.Namespace) -> None:
    text, calibration = (f"{file.parent.name}/{file.name}" for file in (options.text, options.calibrate))
    command = (
        f"python -m benchmarks.evidence --model {options.model.name} --calibrate {calibration} --text {text} "
        f"--samples {options.samples}"
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
    for variant, prepare, schemes in variants():
        missing = [each for each in schemes[: options.first] if (variant, each.name) not in done]
        if not missing or options.variants and variant not in options.variants:
            continue
        model = load(str(options.model), "bfloat16").model
        prepare(model, texts)
        for scheme in missing:
            with swapped(model, scheme.config) as sqnr_db:
                row = Row(scheme.name, tuple(score(model, reference, batches)), scheme, sqnr_db)
            records.append(
                {
                    **compared(row, base, [len(batches), tokens]),
                    "same_top": row.same_top,
                    "weight_sqnr_db": sqnr_db,
                    "products": products(scheme.config),
                    "variant": variant,
                    "model": options.model.name,
                    "text": text,
                    **made(command, PACKAGES),
                }
            )
            write(records, out)
            print(f"{variant}: {row.name}: {row.perplexity:.3f}, KL {row.kl.text(4)}", flush=True)


if __name__ == "__main__":
    main()
