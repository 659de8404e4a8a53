# SPDX-License-Identifier: Apache-2.0
"""What the layers of a real model cost, and a suggestion for a budget of bits; writes
`benchmarks/results/layer_costs.json`.

    python -m benchmarks.layer_costs --model SmolLM2-135M-Instruct --text gsm8k/test.jsonl --work FOLDER

What `hf-mxfp4 costs` measures, for each of [`SETS`]: linear layers are tried in full precision under its first scheme,
some are chosen by every fourth text, and the choice is measured on the other texts beside the other schemes. It resumes
in FOLDER where it was stopped.
"""

from pathlib import Path
from typing import Any

from hf_mxfp4.analysis.perplexity.checkpoint import Job, TextOptions
from hf_mxfp4.analysis.perplexity.cost_report import CostReport, Told, cost_report
from hf_mxfp4.analysis.perplexity.costs import PartCost
from hf_mxfp4.analysis.perplexity.load import load
from hf_mxfp4.analysis.perplexity.results import Row
from hf_mxfp4.analysis.perplexity.schemes import read_schemes
from hf_mxfp4.cli.console import TokenProgress

from .records import made, option_parser, write


PACKAGES = ("torch", "transformers")
BUDGET = 4.5
_BLOCKWISE = "even+mbs128-blockwise"
#: By what is quantized: how many texts, and schemes: the one that parts are tried under, and others of at most so many
#: bits, with outlier fallback as far as there is room.
SETS = {
    "weights": (
        28,
        (
            f"w4a16:{_BLOCKWISE}",
            f"w4a16:{_BLOCKWISE}+of1.0@0.04",
            "w4a16:mse+mbs128-blockwise",
            "w4a16:mse+mbs128-blockwise+of1.0@0.04",
            "w4a16:even+mbs32-dynamic",
            "w4a16:even+of1.0@0.058",
            "w4a16:even",
        ),
    ),
    "weights and activations": (
        16,
        (
            f"w4a4:{_BLOCKWISE}",
            f"w4a4:{_BLOCKWISE}+of1.0@0.02/{_BLOCKWISE}+of1.0@0.06",
            f"w4a4:{_BLOCKWISE}+of1.0@0.04",
        ),
    ),
}
#: Parts that are kept, the dearest.
KEPT = 10


def row_record(row: Row, report: CostReport) -> dict[str, Any]:
    """A scheme on the texts that were held out."""
    base, evaluation = report.held_out.base, report.held_out
    compared = row is not base and row.name != report.suggestion.name
    difference = report.kl_difference(row.name) if compared else None
    return {
        "name": row.name,
        "on": "held out",
        "shape": [evaluation.texts, evaluation.tokens],
        "value": row.perplexity,
        "unit": "perplexity",
        "baseline": base.perplexity,
        "ratio": row.perplexity / base.perplexity,
        "ceiling_fraction": None,
        "bits": None if row is base else row.scheme.bits,
        "kl": None if row is base else row.kl.value,
        "kl_standard_error": None if row is base else row.kl.error,
        "suggestion_to_it": None if difference is None else difference.value,
        "suggestion_to_it_standard_error": None if difference is None else difference.error,
    }


def part_record(cost: PartCost, report: CostReport) -> dict[str, Any]:
    """A part on the texts to choose by."""
    return {
        "name": cost.part.name,
        "on": "parts",
        "shape": [report.texts, report.tokens],
        "value": cost.kl.value,
        "unit": "nats",
        "baseline": report.kl.value,
        "ratio": cost.kl.value / report.kl.value,
        "ceiling_fraction": None,
        "gain": cost.gain.value,
        "standard_error": cost.gain.error,
        "bits": cost.bits,
        "chosen": cost.part in report.suggestion.parts,
    }


def as_records(report: CostReport, operands: str) -> list[dict[str, Any]]:
    """The rows of the schemes, and the dearest parts and the chosen ones, of one of [`SETS`]."""
    kept = [cost for i, cost in enumerate(report.costs) if i < KEPT or cost.part in report.suggestion.parts]
    rows = [row_record(row, report) for row in report.held_out.rows]
    return [{**record, "operands": operands} for record in (*rows, *(part_record(cost, report) for cost in kept))]


def main() -> None:
    parser = option_parser(__doc__, "layer_costs")
    parser.add_argument("--model", type=Path, required=True, help="folder of a full-precision checkpoint")
    parser.add_argument("--text", type=Path, required=True, help=".jsonl with questions and answers, or plain text")
    parser.add_argument("--work", type=Path, required=True, help="folder of the logs")
    options = parser.parse_args()
    text = f"{options.text.parent.name}/{options.text.name}"
    loaded, found = load(str(options.model), "bfloat16", "cpu"), []
    for operands, (problems, schemes) in SETS.items():
        source = TextOptions(str(options.text), samples=problems)
        job = Job(loaded, source, source.tokens(loaded.tokenizer, source.read()), read_schemes(list(schemes)))
        with TokenProgress() as progress:
            told = Told(on_tokens=progress, on_again=progress)
            report = cost_report(job, "module", BUDGET, options.work / operands.replace(" ", "-"), told=told)
        found += as_records(report, operands)
    command = f"python -m benchmarks.layer_costs --model {options.model.name} --text {text} --work FOLDER"
    shared = {"model": options.model.name, "text": text, "budget": BUDGET, **made(command, PACKAGES)}
    write([{**record, **shared} for record in found], options.out)


if __name__ == "__main__":
    main()
