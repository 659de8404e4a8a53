# SPDX-License-Identifier: Apache-2.0
"""The schemes of `benchmarks.evidence` on a real encoder, which none of them was chosen on.

    python -m benchmarks.encoder_evidence --model all-MiniLM-L6-v2 --calibrate gsm8k/train.jsonl --text gsm8k/test.jsonl

Writes `benchmarks/results/encoder_evidence.json`: by how much sentence embeddings turn, ``1 - cos`` to those in full
precision, and for how many sentences the nearest other one stays the nearest. What is there already is kept, so a run
that was stopped goes on. Weights are rounded by GPTQ layer by layer, each on the inputs that the rounded ones before it
give on texts of ``--calibrate``. Nothing is smoothed: an encoder's norms stand behind its sums, and there scales cannot
move into them.
"""

import argparse
import contextlib
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from hf_mxfp4.lab.gptq.rounding import second_moments
from hf_mxfp4.lab.gptq.weight import round_weight
from hf_mxfp4.lab.perplexity.schemes import ModelScheme, read_schemes
from hf_mxfp4.lab.perplexity.swapped import swapped
from hf_mxfp4.lab.texts import TextOptions
from hf_mxfp4.layers import cached_weights
from hf_mxfp4.module_names import find_layers
from hf_mxfp4.numerics import QuantScheme

from .evidence import (
    AS_IT_IS,
    OURS,
    ROUNDED,
    ROUNDED_FOR_BOTH,
    ROUNDING_TEXTS,
    WITH_RESIDUALS,
    products,
    rotated,
    with_rotation,
)
from .records import made, option_parser, write


PACKAGES = ("torch", "transformers")
MAX_LENGTH = 256


def tokens(tokenizer, texts: list[str]) -> Iterator[torch.Tensor]:
    """Ids of one text at a time."""
    for text in texts:
        yield tokenizer(text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt").input_ids


@torch.no_grad()
def embeddings(model: nn.Module, tokenizer, texts: list[str]) -> torch.Tensor:
    """Unit vectors ``[texts, hidden]``: the mean of the last hidden states over a text's tokens, one text at a time."""
    with cached_weights(model, "dense"):
        found = [model(input_ids=ids).last_hidden_state[0].double().mean(0) for ids in tokens(tokenizer, texts)]
    return nn.functional.normalize(torch.stack(found), dim=1)


def nearest(vectors: torch.Tensor) -> torch.Tensor:
    """Of each sentence the index of the nearest other one."""
    return (vectors @ vectors.T).fill_diagonal_(-1).argmax(1)


@torch.no_grad()
def round_encoder(model: nn.Module, batches: list[torch.Tensor], scheme: ModelScheme) -> int:
    """Round all linear layers in the order in which they stand, which is that of their calls; how many there were. For
    quantized inputs where the scheme has such."""
    layers, _ = find_layers(model)
    quantized = isinstance(scheme.config.gemms().fprop.left, QuantScheme)
    with swapped(model, scheme.config) if quantized else contextlib.nullcontext():
        for name in layers:
            linear = model.get_submodule(name)
            with cached_weights(model, "dense"):
                moments = second_moments(linear, (model(input_ids=ids) for ids in batches))
            fprop = scheme.config.gemms().fprop
            linear.weight.copy_(round_weight(linear.weight, moments, fprop.right, fprop.rotation))
    return len(layers)


def variants() -> Iterator[tuple[str, ModelScheme | None, list[ModelScheme]]]:
    """What weights are rounded for, if they are, and what is measured then."""
    weights = read_schemes([f"w4a16:{OURS}"])[0]
    yield "as it is", None, [*read_schemes(list(AS_IT_IS)), *rotated((OURS,))]
    yield "GPTQ", weights, read_schemes(list(ROUNDED))
    yield "GPTQ for H64", with_rotation(weights), rotated(ROUNDED)
    residuals = with_rotation(read_schemes([f"w4a16:{OURS}+of1@0.25"])[0])
    yield "GPTQ with residuals for H64", residuals, rotated(WITH_RESIDUALS)
    yield "GPTQ for H64 and quantized inputs", rotated((OURS,))[0], rotated(ROUNDED_FOR_BOTH)


def main() -> None:
    parser = option_parser(__doc__, "encoder_evidence")
    parser.add_argument("--model", type=Path, required=True, help="folder of a sentence encoder")
    parser.add_argument("--calibrate", type=Path, required=True, help="JSON lines that weights are rounded on")
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with the sentences")
    parser.add_argument("--field", default="question")
    parser.add_argument("--samples", type=int, default=400)
    run(parser.parse_args())


def run(options: argparse.Namespace) -> None:
    text, calibration = (f"{file.parent.name}/{file.name}" for file in (options.text, options.calibrate))
    command = (
        f"python -m benchmarks.encoder_evidence --model {options.model.name} --calibrate {calibration} --text {text}"
    )
    out = Path(options.out)
    records: list[dict] = json.loads(out.read_text()) if out.is_file() else []
    done = {(record["variant"], record["name"]) for record in records}
    original, tokenizer = AutoModel.from_pretrained(options.model).eval(), AutoTokenizer.from_pretrained(options.model)
    texts = TextOptions(str(options.text), options.field, options.samples).read()
    exact = embeddings(original, tokenizer, texts)
    for variant, rounded_for, schemes in variants():
        missing = [scheme for scheme in schemes if (variant, scheme.name) not in done]
        if not missing:
            continue
        model = AutoModel.from_pretrained(options.model).eval()
        if rounded_for is not None:
            calibrated = TextOptions(str(options.calibrate), options.field, ROUNDING_TEXTS).read()
            count = round_encoder(model, list(tokens(tokenizer, calibrated)), rounded_for)
            print(f"{variant}: rounded {count} layers", flush=True)
        for scheme in missing:
            with swapped(model, scheme.config) as sqnr_db:
                vectors = embeddings(model, tokenizer, texts)
            turned = (1 - (vectors * exact).sum(1)).tolist()
            found = {
                "name": scheme.name,
                "shape": [len(texts), exact.shape[1]],
                "value": statistics.fmean(turned),
                "unit": "1 - cos",
                "baseline": None,
                "ratio": None,
                "ceiling_fraction": None,
                "standard_error": statistics.stdev(turned) / math.sqrt(len(turned)),
                "same_nearest": float((nearest(vectors) == nearest(exact)).double().mean()),
                "bits": scheme.bits,
                "products": products(scheme.config),
                "weight_sqnr_db": sqnr_db,
                "variant": variant,
                "model": options.model.name,
                "text": text,
                **made(command, PACKAGES),
            }
            records.append(found)
            print(f"{variant}: {scheme.name}: {found['value']:.5f}, {found['same_nearest']:.3f}", flush=True)
            write(records, out)


if __name__ == "__main__":
    main()
