# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 costs`: what quantizing each part of a model costs, and what to leave out for a budget of bits."""

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .evaluate import Dtype
from .options import JsonOption, fail, told_errors


if TYPE_CHECKING:
    from ..analysis.perplexity.checkpoint import Job
    from ..analysis.perplexity.cost_report import CostReport

#: Parts that are shown; all are in the file.
SHOWN = 20


class Unit(str, Enum):
    """The names in [`hf_mxfp4.analysis.perplexity.costs.UNITS`]."""

    MODULE = "module"
    TYPE = "type"
    LAYER = "layer"


def costs(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a model on the Hugging Face Hub.")
    ],
    text: Annotated[str, typer.Option("--text", metavar="TEXT", help="As for eval.")],
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            metavar="SCHEME",
            help="As for eval. Parts are tried under the first one; with --budget the others are measured beside the "
            "suggestion. Repeatable. [default: own, or default]",
        ),
    ] = None,
    by: Annotated[
        Unit,
        typer.Option(
            "--by",
            help="What is left in full precision at a time: a linear layer or a module of experts, all of one type "
            "(mlp.down_proj), or a decoder layer.",
        ),
    ] = Unit.MODULE,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="BITS",
            help="Suggest modules_to_not_convert that take an operand to so many bits on average, chosen by every "
            "fourth text and measured on the others.",
        ),
    ] = None,
    text_field: Annotated[str | None, typer.Option("--text-field", help="As for eval.")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Texts, or windows of a running text.")] = 40,
    max_length: Annotated[int, typer.Option("--max-length", min=2, help="Tokens per text or window.")] = 512,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="[default: that of the checkpoint]")] = Dtype.AUTO,
    device: Annotated[
        str, typer.Option("--device", help="'cpu', 'cuda', ... [default: a GPU if there is one]")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of costs.json and the logs. [default: costs/<model name>]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Forget what an earlier run left in --out.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure by how much the divergence from full precision (KL) falls with each part of a model left in full
    precision, and what that takes in bits; and with --budget, suggest what to leave out.

    It takes a pass over the texts for each part. An interrupted run resumes when the same command is given again.
    """
    with told_errors("the same command resumes where it stopped"):
        from ..analysis.perplexity.checkpoint import Job, TextOptions
        from ..analysis.perplexity.load import load
        from ..analysis.perplexity.schemes import read_schemes

        options = TextOptions(text, text_field, samples, max_length)
        texts = options.read()
        typer.echo(f"loading {model} into memory", err=True)
        loaded = load(model, dtype.value, device)
        if loaded.stored:
            fail(f"{loaded.name} stores quantized weights, of which there is no full precision; give the original")
        schemes = read_schemes(scheme or ["default" if loaded.own is None else "own"], loaded.own)
        job = Job(loaded, options, options.tokens(loaded.tokenizer, texts), schemes)
        report = _measured(job, by.value, budget, out or Path("costs") / loaded.name.replace("/", "--"), overwrite)
    _show(report, as_json)


def _measured(job: "Job", unit: str, budget: float | None, folder: Path, overwrite: bool) -> "CostReport":
    from ..analysis.perplexity.cost_report import JSON_NAME, Told, cost_report
    from .console import TokenProgress

    with TokenProgress() as progress:

        def on_start(parts: int, tokens: int, seconds: float) -> None:
            progress.total = tokens
            about = f", about {parts * seconds / 60:.1f} minutes" if seconds else ""
            typer.echo(f"{parts} parts, a pass over the texts each{about}", err=True)

        def on_again(tokens: int, name: str) -> None:
            progress.total += tokens
            progress(tokens, name)

        def on_round(parts: int, bits: float, kl: float) -> None:
            typer.echo(f"{parts} parts in full precision: {bits:.4f} bits, KL {kl:.4f}", err=True)

        try:
            told = Told(on_start, progress, on_again, on_round)
            report = cost_report(job, unit, budget, folder, overwrite=overwrite, told=told)
        except ValueError as error:
            fail(str(error))
    typer.echo(f"{folder / JSON_NAME} has all parts", err=True)
    return report


def _show(report: "CostReport", as_json: bool) -> None:
    from ..analysis.perplexity.cost_tables import COST_COLUMNS, HELD_OUT_COLUMNS, cost_rows, held_out_rows, snippet
    from .console import out, plain_table

    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, allow_nan=False))
        return
    console = out()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    title = (
        f"{report.model} under {report.scheme.name} ({report.bits:.4f} bits), {report.texts} texts, {report.tokens:,} "
        f"predicted tokens of {report.text}: KL {report.kl.text(4)}"
    )
    console.print(plain_table(title, COST_COLUMNS, cost_rows(report, SHOWN)))
    say(
        "gain: by how much KL falls with the part in full precision, nats per token, paired by text, ± standard error. "
        "bits: what the average operand takes more. Gains of parts do not add up."
    )
    if report.suggestion is None:
        return
    say(f"\nfor a budget of {report.suggestion.budget:g} bits, chosen by these texts:\n\n{snippet(report)}")
    title = (
        f"measured on the other {report.held_out.texts} texts, {report.held_out.tokens:,} predicted tokens, by which "
        "nothing was chosen"
    )
    console.print(plain_table(title, HELD_OUT_COLUMNS, held_out_rows(report)))
