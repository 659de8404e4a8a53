# SPDX-License-Identifier: Apache-2.0
"""What smoothing saves on a real model; writes `benchmarks/results/smoothing.json`.

    python -m benchmarks.smoothing --model SmolLM2-135M-Instruct --text gsm8k/test.jsonl --calibrate gsm8k/train.jsonl

The model as it is, and after `hf-mxfp4 smooth` at several strengths on texts of ``--calibrate``, each measured as
`hf-mxfp4 eval` does: perplexity and the divergence from full precision, which is the same for all.
"""

from pathlib import Path

from hf_mxfp4.lab.perplexity.checkpoint import texts_to_predict
from hf_mxfp4.lab.perplexity.evaluate import evaluate
from hf_mxfp4.lab.perplexity.load import load
from hf_mxfp4.lab.perplexity.schemes import read_schemes
from hf_mxfp4.lab.smoothing import smooth_model
from hf_mxfp4.lab.texts import TextOptions

from .records import made, option_parser, write
from .scheme_perplexity import compared


PACKAGES = ("torch", "transformers")
SCHEMES = (
    "w4a16:even+mbs128-blockwise",
    "even+mbs128-blockwise",
    "even+mbs128-blockwise+of1@0.04",
    "even+mbs128-blockwise+of1@0.1",
    "rceil+mbs128-hybrid+of0.5",
)
AS_IT_IS = "none"


def main() -> None:
    parser = option_parser(__doc__, "smoothing")
    parser.add_argument("--model", type=Path, required=True, help="folder of a full-precision checkpoint")
    parser.add_argument("--text", type=Path, required=True, help="what is predicted: JSON lines or plain text")
    parser.add_argument("--calibrate", type=Path, required=True, help="what activations are measured on")
    parser.add_argument("--problems", type=int, default=40, help="texts to predict")
    parser.add_argument("--samples", type=int, default=32, help="texts to measure activations on")
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    options = parser.parse_args()
    text, calibration = (f"{file.parent.name}/{file.name}" for file in (options.text, options.calibrate))
    command = f"python -m benchmarks.smoothing --model {options.model.name} --text {text} --calibrate {calibration}"
    predicted = TextOptions(str(options.text), samples=options.problems)
    measured = TextOptions(str(options.calibrate), samples=options.samples)
    records: list[dict] = []
    for strength in (None, *options.strengths):
        loaded = load(str(options.model), "bfloat16")
        if strength is not None:
            smooth_model(loaded.model, measured.tokens(loaded.tokenizer, measured.read()), strength)
        batches = texts_to_predict(predicted, loaded.tokenizer, predicted.read())
        base, *rows = evaluate(loaded.model, batches, read_schemes(options.schemes))
        for row in rows:
            records.append(
                {
                    **compared(row, base, [len(batches), sum(ids.shape[1] - 1 for ids in batches)]),
                    "strength": AS_IT_IS if strength is None else strength,
                    "model": options.model.name,
                    "text": text,
                    **made(command, PACKAGES),
                }
            )
            print(
                f"{strength}: {row.name}: {row.perplexity:.3f}, KL {row.kl.value:.4f} +- {row.kl.error:.4f}", flush=True
            )
        write(records, options.out)


if __name__ == "__main__":
    main()
