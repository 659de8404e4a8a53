# SPDX-License-Identifier: Apache-2.0
"""Whether preparation needs data: divergence of models prepared on texts, on samples of their own, on random ids.

    python -m benchmarks.preparation --model SmolLM2-135M-Instruct --step smoothing \
        --calibrate gsm8k/train.jsonl --text gsm8k/test.jsonl

Adds to `benchmarks/results/preparation.json` a record for each calibration and scheme, as soon as it is measured. What
is there already of the same command is kept, so a run that was stopped goes on. All are compared with the checkpoint as
it is, in full precision.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

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
from hf_mxfp4.lab.loading import Loaded
from hf_mxfp4.lab.scoring import Reference

from .records import ROOT, made, option_parser, write


PACKAGES = ("torch", "transformers")
STRENGTH = 0.3
W4A16, W4A8, W4A4 = "w4a16:even+mbs128-blockwise_fp8", "w4a8:even+mbs128-blockwise_fp8", "w4a4:even+mbs128-blockwise"

NONE, TEXT, RANDOM, OWN = "none", "GSM8K", "random ids", "own samples"


@dataclass(frozen=True)
class Calibration:
    """Token ids that a model is prepared on.

    Attributes:
        kind: where they are from; `NONE` where the model is not prepared.
        rows: how many sequences.
        length: tokens of each, of texts at most.
        seed: that they are drawn with.
    """

    kind: str
    rows: int = 0
    length: int = 0
    seed: int = 0

    def batches(self, original: Loaded, text: str) -> list[torch.Tensor]:
        """Return token ids ``[1, tokens]``.

        Args:
            original: the model in full precision, which writes samples of its own.
            text: file of the texts.
        """
        if self.kind == TEXT:
            source = TextOptions(text, samples=self.rows, max_length=self.length)
            return source.tokens(original.tokenizer, source.read())
        torch.manual_seed(self.seed)
        if self.kind == RANDOM:
            vocabulary = original.model.get_input_embeddings().num_embeddings
            return list(torch.randint(vocabulary, (self.rows, 1, self.length)))
        return list(self._samples(original).unsqueeze(1))

    def _samples(self, original: Loaded) -> torch.Tensor:
        """Return sequences ``[rows, length]`` that the model writes after its first token, at temperature 1."""
        first = original.tokenizer.bos_token_id
        if first is None:
            first = original.tokenizer.eos_token_id
        return original.model.generate(
            torch.full((self.rows, 1), first),
            attention_mask=torch.ones(self.rows, 1, dtype=torch.long),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=self.length - 1,
            max_new_tokens=self.length - 1,
            pad_token_id=first,
        )


#: The first row is what others are compared with; those that decide come before those that say how much varies.
SMOOTHING = (
    Calibration(NONE),
    Calibration(TEXT, 24, 128),
    *(Calibration(RANDOM, 4, 64, seed) for seed in (1, 2, 3)),
    Calibration(OWN, 24, 128, 1),
    Calibration(RANDOM, 24, 128, 1),
    Calibration(OWN, 4, 64, 1),
    *(Calibration(RANDOM, 1, 32, seed) for seed in (1, 2, 3)),
    *(Calibration(RANDOM, 24, 128, seed) for seed in (2, 3)),
    *(Calibration(OWN, *shape, 2) for shape in ((24, 128), (4, 64))),
)
ROUNDING = (
    Calibration(NONE),
    Calibration(TEXT, 128, 128),
    Calibration(OWN, 128, 128, 1),
    Calibration(RANDOM, 128, 128, 1),
)
#: What a model is smoothed on before its weights are rounded, whatever these are rounded on.
SMOOTHED_ON = Calibration(RANDOM, 4, 64, 1)

#: Prepares a model in place, on ids of ``calibration``.
Prepare = Callable[[nn.Module, Loaded, Calibration, str], None]


def smoothed(model: nn.Module, original: Loaded, calibration: Calibration, text: str) -> None:
    if calibration.kind == NONE:
        return
    found = smooth_model(model, calibration.batches(original, text), STRENGTH)
    print(f"smoothed {len(found.places)} places, exponents {found.exponents}", flush=True)


def rounded(model: nn.Module, original: Loaded, calibration: Calibration, text: str) -> None:
    """Smooth a model, and round its weights by GPTQ."""
    smoothed(model, original, SMOOTHED_ON, text)
    if calibration.kind == NONE:
        return
    found = round_model(model, calibration.batches(original, text), read_schemes([W4A16])[0].config)
    print(f"rounded {len(found.layers)} layers, {found.gain_db:.2f} dB", flush=True)


#: What is done, on which ids, and the schemes that are measured then.
STEPS: dict[str, tuple[Prepare, Sequence[Calibration], tuple[str, ...]]] = {
    "smoothing": (smoothed, SMOOTHING, (W4A8, W4A4)),
    "GPTQ": (rounded, ROUNDING, (W4A16, W4A8)),
}


def commit() -> str:
    """Return the commit that is measured."""
    found = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip()


def record_of(row: Row, base: Row, step: str, calibration: Calibration) -> dict:
    """Return the record of a row next to the one in full precision."""
    return {
        "name": row.name,
        "step": step,
        "calibration": asdict(calibration),
        "shape": [len(row.scores), row.tokens],
        "value": row.kl.value,
        "unit": "nats per token",
        "standard_error": row.kl.error,
        "baseline": None,
        "ratio": None,
        "ceiling_fraction": None,
        "perplexity": row.perplexity,
        "full_precision_perplexity": base.perplexity,
        "by_text": [round(each.kl / each.tokens, 6) for each in row.scores],
        "tokens_by_text": [each.tokens for each in row.scores],
    }


def measured(
    model: nn.Module, schemes: Sequence[ModelScheme], reference: Reference, batches: Sequence[torch.Tensor]
) -> Iterator[Row]:
    """Yield what each scheme does to a model, which stays in full precision."""
    for scheme in schemes:
        with swapped(model, scheme.config) as sqnr_db:
            yield Row(scheme.name, tuple(score(model, reference, batches)), scheme, sqnr_db)


def main() -> None:
    parser = option_parser(__doc__, "preparation")
    parser.add_argument("--model", type=Path, required=True, help="folder of a full-precision checkpoint")
    parser.add_argument("--step", choices=STEPS, required=True, help="what is prepared on each calibration")
    parser.add_argument("--calibrate", type=Path, required=True, help="texts of the calibration that has some")
    parser.add_argument("--text", type=Path, required=True, help="what is predicted: JSON lines or plain text")
    parser.add_argument("--samples", type=int, default=24, help="texts or windows to predict")
    parser.add_argument("--cases", type=int, help="the first calibrations of the step; by default all")
    run(parser.parse_args())


def run(options: argparse.Namespace) -> None:
    text, calibration_text = (f"{file.parent.name}/{file.name}" for file in (options.text, options.calibrate))
    command = (
        f"python -m benchmarks.preparation --model {options.model.name} --step {options.step} "
        f"--calibrate {calibration_text} --text {text} --samples {options.samples}"
    )
    out = Path(options.out)
    records: list[dict] = json.loads(out.read_text()) if out.is_file() else []
    done = {(r["name"], *r["calibration"].values()) for r in records if r["command"] == command}
    original = load(str(options.model), "bfloat16")
    predicted = TextOptions(str(options.text), samples=options.samples)
    batches = texts_to_predict(predicted, original.tokenizer, predicted.read())
    reference = reference_of(original.model, batches)
    base = Row(FULL_PRECISION, tuple(reference.scores[index] for index in range(len(batches))))
    prepare, calibrations, names = STEPS[options.step]
    for calibration in calibrations[: options.cases]:
        missing = [name for name in names if (name, *asdict(calibration).values()) not in done]
        if not missing:
            continue
        model = load(str(options.model), "bfloat16").model
        begin = time.process_time()
        prepare(model, original, calibration, str(options.calibrate))
        seconds = time.process_time() - begin
        for row in measured(model, read_schemes(missing), reference, batches):
            found = record_of(row, base, options.step, calibration) | {"cpu_seconds": round(seconds, 1)}
            found |= {"model": options.model.name, "text": text, "commit": commit()}
            records.append(found | made(command, PACKAGES))
            write(records, out)
            print(f"{calibration}: {row.name}: KL {row.kl.text(4)}, perplexity {row.perplexity:.3f}", flush=True)


if __name__ == "__main__":
    main()
