# SPDX-License-Identifier: Apache-2.0
"""Whether preparation needs data: divergence of models prepared on texts, on samples of their own, on random ids.

    python -m benchmarks.preparation --model SmolLM2-135M-Instruct --step smoothing \
        --calibrate gsm8k/train.jsonl --text gsm8k/test.jsonl

Adds to `benchmarks/results/preparation.json` a record for each calibration and scheme, as soon as it is measured. What
is there already of the same command is kept, so a run that was stopped goes on. All are compared with the checkpoint as
it is, in full precision.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4DistillationConfig, MXFP4DistillationTrainer
from hf_mxfp4.lab import ModelScheme, Row, TextOptions, load, read_schemes, round_model, smooth_model
from hf_mxfp4.lab.evaluation.loading import Loaded

from .held_out import HeldOut, short_name
from .records import made, option_parser, recorded, write


PACKAGES = ("torch", "transformers")
W4A16 = "w4a16:even+mbs128-blockwise_fp8"
W4A8 = "w4a8:even+mbs128-blockwise_fp8"
W4A4 = "w4a4:even+mbs128-blockwise"

NONE = "none"
TEXT = "GSM8K"
RANDOM = "random ids"
OWN = "own samples"


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
        if self.kind == NONE:
            return []
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


#: The first is what others are compared with; those that decide come before those that say how much varies.
SMOOTHING = (
    Calibration(NONE),
    Calibration(TEXT, 24, 128),
    Calibration(RANDOM, 4, 64, 1),
    Calibration(OWN, 24, 128, 1),
    *(Calibration(RANDOM, 4, 64, seed) for seed in (2, 3)),
    *(Calibration(RANDOM, 1, 32, seed) for seed in (1, 2, 3)),
    Calibration(OWN, 4, 64, 1),
    *(Calibration(RANDOM, 24, 128, seed) for seed in (1, 2, 3)),
    *(Calibration(OWN, *shape, 2) for shape in ((24, 128), (4, 64))),
)
ROUNDING = (
    Calibration(NONE),
    Calibration(TEXT, 32, 128),
    Calibration(OWN, 32, 128, 1),
    Calibration(RANDOM, 32, 128, 1),
)
DISTILLING = (
    Calibration(NONE),
    Calibration(TEXT, 80, 128),
    Calibration(OWN, 80, 128, 1),
    Calibration(RANDOM, 80, 128, 1),
)
#: What a model is smoothed on before it is rounded or distilled, whatever that is done on.
SMOOTHED_ON = Calibration(RANDOM, 4, 64, 1)
#: Of distillation: rows of a step, and the rate.
ROWS = 4
RATE = 3e-4


def smoothed(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    """Smooth a model in place, unless its calibration has no data."""
    if batches:
        report = smooth_model(model, batches)
        print(f"smoothed {len(report.places)} places, exponents {report.exponents}", flush=True)


def rounded(model: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    """Round the weights of a model in place by GPTQ, unless its calibration has no data."""
    if batches:
        report = round_model(model, batches, read_schemes([W4A16])[0].config)
        print(f"rounded {len(report.layers)} layers, {report.gain_db:.2f} dB", flush=True)


def distilled(folder: Path, scheme: ModelScheme, teacher: Loaded, batches: Sequence[torch.Tensor]) -> nn.Module:
    """Return a student, loaded from a checkpoint, whose quantized layers were trained once over the rows."""
    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=scheme.config)
    if not batches:
        return student
    arguments = MXFP4DistillationConfig(
        str(folder / "outputs"),
        max_steps=len(batches) // ROWS,
        per_device_train_batch_size=ROWS,
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=5,
        report_every=0,
        report_to="none",
        save_strategy="no",
        seed=0,
    )
    rows = Dataset.from_dict({"input_ids": [ids[0].tolist() for ids in batches]})
    trainer = MXFP4DistillationTrainer(student, teacher.model, arguments, rows, processing_class=teacher.tokenizer)
    trainer.train()
    print(f"distilled {trainer.tokens_distilled} tokens in {trainer.state.global_step} steps", flush=True)
    return student


@dataclass(frozen=True)
class Study:
    """A model, and what it is prepared and measured on.

    Attributes:
        folder: of the checkpoint.
        original: the same in memory.
        calibrate: file of the texts of a calibration that has some.
        texts: held out.
    """

    folder: Path
    original: Loaded
    calibrate: str
    texts: list[HeldOut]

    def ids(self, calibration: Calibration) -> list[torch.Tensor]:
        return calibration.batches(self.original, self.calibrate)

    def rows(self, step: str, calibration: Calibration, names: Sequence[str]) -> Iterator[tuple[HeldOut, Row, float]]:
        """Yield held-out texts under each of the schemes ``names``, and CPU seconds that the step took."""
        batches = self.ids(calibration)
        schemes = read_schemes(list(names))
        model = load(str(self.folder), "bfloat16").model
        if step != "smoothing":
            smoothed(model, self.ids(SMOOTHED_ON))
        begin = time.process_time()
        if step == "distillation":
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                for scheme in schemes:
                    student = distilled(Path(folder), scheme, self.original, batches)
                    seconds = time.process_time() - begin
                    for text in self.texts:
                        yield text, text.row(scheme.name, student), seconds
            return
        prepare = smoothed if step == "smoothing" else rounded
        prepare(model, batches)
        seconds = time.process_time() - begin
        for scheme in schemes:
            for text in self.texts:
                yield text, text.row_under(scheme, model), seconds


#: Calibrations and schemes of what is done.
STEPS = {
    "smoothing": (SMOOTHING, (W4A8, W4A4)),
    "GPTQ": (ROUNDING, (W4A8,)),
    "distillation": (DISTILLING, (W4A8,)),
}


def record_of(row: Row, held_out: HeldOut) -> dict:
    """Return the record of a model, next to the checkpoint in full precision."""
    return {
        "name": row.name,
        "shape": [len(row.scores), row.tokens],
        "value": row.kl.value,
        "unit": "nats per token",
        "standard_error": row.kl.error,
        "baseline": None,
        "ratio": None,
        "ceiling_fraction": None,
        "perplexity": row.perplexity,
        "full_precision_perplexity": held_out.full_precision.perplexity,
        "kl_by_text": [round(text.kl, 4) for text in row.scores],
        "tokens_by_text": [text.tokens for text in row.scores],
        "text": held_out.name,
    }


def main() -> None:
    parser = option_parser(__doc__, "preparation")
    parser.add_argument("--model", type=Path, required=True, help="folder of a full-precision checkpoint")
    parser.add_argument("--step", choices=STEPS, required=True, help="what is done on each calibration")
    parser.add_argument("--calibrate", type=Path, required=True, help="texts of the calibration that has some")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="what is predicted: JSON lines or text")
    parser.add_argument("--samples", type=int, default=24, help="texts or windows to predict")
    parser.add_argument("--cases", type=int, help="the first calibrations of the step; by default all")
    run(parser.parse_args())


def run(options: argparse.Namespace) -> None:
    """Measure what the file of records lacks, and write it after each model."""
    texts = [short_name(file) for file in options.text]
    command = (
        f"python -m benchmarks.preparation --model {options.model.name} --step {options.step} --calibrate "
        f"{short_name(options.calibrate)} --text {' '.join(texts)} --samples {options.samples}"
    )
    records = recorded(options.out)
    done = {(r["name"], r["text"], *r["calibration"].values()) for r in records if r["command"] == command}
    original = load(str(options.model), "bfloat16")
    held_out = [HeldOut.read(file, original, options.samples) for file in options.text]
    study = Study(options.model, original, str(options.calibrate), held_out)
    calibrations, schemes = STEPS[options.step]
    for calibration in calibrations[: options.cases]:
        key = tuple(asdict(calibration).values())
        missing = [name for name in schemes if any((name, text, *key) not in done for text in texts)]
        if not missing:
            continue
        for text, row, seconds in study.rows(options.step, calibration, missing):
            record = {
                "step": options.step,
                "calibration": asdict(calibration),
                "model": options.model.name,
                **record_of(row, text),
                "cpu_seconds": round(seconds, 1),
            }
            records.append(record | made(command, PACKAGES))
            write(records, options.out)
            print(f"{calibration}: {row.name}, {text.name}: KL {row.kl.text(4)}", flush=True)


if __name__ == "__main__":
    main()
