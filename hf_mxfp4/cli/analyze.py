# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 analyze` and `simulate`: what quantization does to the weights of a checkpoint, and to random data."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .options import (
    IncludeOption,
    JsonOption,
    MaxLengthOption,
    OverwriteOption,
    SchemeOption,
    SkipOption,
    TextFieldOption,
    fail,
    report_folder,
    reported_errors,
    schemes_of,
)


if TYPE_CHECKING:
    from ..config import MXFP4RLConfig
    from ..lab import Analysis, ErrorStatistics, TextOptions
    from ..lab.source import Source
    from ..numerics import QuantScheme


PROGRESS_NAME = "progress.jsonl"
#: Tensors of largest relative error that are shown.
_WORST = 5
#: Columns of statistics on a terminal, and on one that is narrower than `_WIDE`.
_COLUMNS = ("SQNR dB", "rel. MSE %", "floor %", "scale bias", "deadzone", "grid", "to zero %", "gain")
_NARROW = ("SQNR dB", "scale bias", "deadzone", "grid")
_WIDE = 140


def analyze(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint's folder, a .safetensors file, or a model on the Hugging Face Hub, which is downloaded "
            "to the usual cache.",
        ),
    ],
    scheme: SchemeOption = None,
    include: IncludeOption = None,
    exclude: SkipOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the reports. [default: analysis/<model name>]")
    ] = None,
    overwrite: OverwriteOption = False,
    activations: Annotated[
        bool,
        typer.Option(
            "--activations",
            help="Also load the whole model into memory, run it on texts of --text, and analyse what enters the "
            "layers.",
        ),
    ] = False,
    text: Annotated[
        str | None, typer.Option("--text", help="The texts for --activations: JSON lines, or what eval takes.")
    ] = None,
    text_field: TextFieldOption = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Texts to run.")] = 8,
    max_length: MaxLengthOption = 512,
    as_json: JsonOption = False,
) -> None:
    """Measure the MXFP4 error of every weight that would be quantized, and write a report.

    Schemes default to the checkpoint's own, or, for one that has none, to plain MXFP4 and the two corrections of arXiv
    2605.20402. An interrupted run resumes when the same command is given again.
    """
    if activations != (text is not None):
        fail("--activations and --text go together")
    with reported_errors("the same command resumes where it stopped"):
        wanted = schemes_of(scheme or ())
        from ..lab import TextOptions, open_source, write_analysis
        from ..lab.reports import analysis_summary
        from ..lab.texts import TEXT_FIELDS
        from .console import report_problems

        options = TextOptions(text or "", text_field, samples, max_length, TEXT_FIELDS)
        texts = [] if text is None else options.read()
        source = open_source(model)
        folder = out or Path("analysis") / report_folder(model)
        analysis = _analyze_weights(source, wanted, include or (), exclude or (), folder, overwrite)
        if texts:
            _add_activations(analysis, model, source.scheme, wanted, options, texts)
        facts = source.describe()
        paths = write_analysis(analysis, facts, folder)
        if as_json:
            typer.echo(json.dumps(analysis_summary(analysis, facts), indent=1, allow_nan=False))
        else:
            _show(analysis)
        report_problems(analysis.problems)
        typer.echo(f"reports: {', '.join(str(path) for path in paths)}", err=True)
    if analysis.problems:
        raise typer.Exit(1)


def _default_schemes(own: "MXFP4RLConfig | None", kind: str) -> list["QuantScheme"]:
    from ..lab import PAPER_SCHEMES

    if own is None:
        return schemes_of(PAPER_SCHEMES)
    return [own.weight_scheme if kind == "weight" else own.activation_scheme or own.weight_scheme]


def _analyze_weights(source: "Source", wanted, include, exclude, folder: Path, overwrite: bool) -> "Analysis":
    from .. import __version__
    from ..lab import Selection, TensorLog, analyze_weights
    from ..lab.weights import bytes_to_analyze
    from .console import WorkProgress

    schemes = wanted or _default_schemes(source.scheme, "weight")
    selection = Selection.of(source, include, exclude)
    path, names = folder / PROGRESS_NAME, [str(scheme) for scheme in schemes]
    with TensorLog(path, source.name, names, __version__, overwrite=overwrite) as log:
        if len(log):
            typer.echo(f"{path} holds {len(log)} tensors that are done", err=True)
        with WorkProgress(bytes_to_analyze(source, selection)) as progress:
            return analyze_weights(source, schemes, selection, log=log, on_bytes=progress)


def _add_activations(analysis: "Analysis", model: str, own, wanted, options: "TextOptions", texts: list[str]) -> None:
    from ..lab import analyze_activations, load
    from ..module_names import fused_experts

    typer.echo(f"loading the whole model into memory to run {len(texts)} texts", err=True)
    loaded = load(model, as_trained=True)
    batches = [ids.to(loaded.model.device) for ids in options.tokens(loaded.tokenizer, texts)]
    results, problems = analyze_activations(loaded.model, batches, wanted or _default_schemes(own, "activation"))
    analysis.results += results
    analysis.problems += problems
    tokens = sum(batch.shape[-1] for batch in batches)
    precision = "quantized as its config says" if own else f"in {loaded.dtype}"
    analysis.notes.append(f"Activations: {len(batches)} texts, {tokens} tokens, with the model {precision}.")
    if experts := fused_experts(loaded.model):
        analysis.notes.append(
            f"Activations: {len(experts)} modules keep their experts in fused weights, not in linear layers; "
            "what enters them is not among the numbers."
        )


def _show(analysis: "Analysis") -> None:
    """Print schemes, the best one, layer types and worst tensors of each kind, and what is not among them."""
    from ..lab.page import number
    from ..lab.reports import LEGEND
    from ..lab.results import SQNR_NOTE, least_error
    from .console import out, plain_table, say

    console = out()

    def by_scheme(title: str, heading: str, rows: dict[str, list["ErrorStatistics"]], count: int) -> None:
        cells = [[name, *(number(statistics.sqnr_db, 2) for statistics in row)] for name, row in rows.items()]
        numbers = map(str, range(1, count + 1))
        console.print(plain_table(f"{title}: SQNR in dB, by scheme", [heading, *numbers], cells))

    for kind in analysis.kinds:
        totals, results = analysis.totals(kind), analysis.of_kind(kind)
        elements = next(iter(totals.values())).elements
        _show_statistics(f"{analysis.model}: {len(results)} {kind} tensors, {elements:,} elements", totals)
        for sentence in (LEGEND, least_error(totals), SQNR_NOTE):
            say(sentence, console)
        groups = {scheme: analysis.by_layer_type(kind, scheme) for scheme in totals}
        names = next(iter(groups.values()))
        types = {name: [groups[scheme][name] for scheme in totals] for name in names}
        by_scheme(f"{kind} tensors by layer", "layer type", types, len(totals))
        best = min(totals, key=lambda scheme: totals[scheme].total)
        shown = analysis.worst(kind, best, _WORST)
        worst = {r.name: list(r.statistics.values()) for r in results if r.name in shown}
        if worst:
            ordered = {name: worst[name] for name in shown}
            by_scheme(f"largest relative errors under {best}", "tensor", ordered, len(totals))
    if analysis.skipped:
        reasons = [f"{len(names)} {reason} (such as {min(names)})" for reason, names in analysis.skipped.items()]
        say(f"left out: {'; '.join(reasons)}", console)
    for note in analysis.notes:
        say(note, console)


def _show_statistics(title: str, rows: "dict[str, ErrorStatistics]") -> None:
    """Print one row per scheme; the numbers before them are the headings of the tables below."""
    from ..lab.reports import COLUMNS
    from ..lab.schemes import bits_text
    from .console import out, plain_table

    console = out()
    columns = _COLUMNS if console.width >= _WIDE else _NARROW
    cells = [
        [f"{i}  {scheme}", bits_text(scheme), *(COLUMNS[column](statistics) for column in columns)]
        for i, (scheme, statistics) in enumerate(rows.items(), 1)
    ]
    console.print(plain_table(title, ["scheme", "bits", *columns], cells))


def simulate(
    distribution: Annotated[
        Literal["gaussian", "laplace", "student-t", "uniform", "outliers"],
        typer.Option("--distribution", help="'outliers' is Gaussian with 8 of 1024 channels 30 times as large."),
    ] = "gaussian",
    elements: Annotated[int, typer.Option("--elements", min=1, max=2**32, help="Rounded up to whole rows of 1024.")] = 2
    ** 20,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    df: Annotated[float, typer.Option("--df", help="Degrees of freedom of student-t; above 2.")] = 4.0,
    scheme: SchemeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure schemes on random data, whose rows have standard deviations spread over one octave."""
    if not df > 2:
        fail(f"--df {df:g}: the variance of student-t exists for more than 2 degrees of freedom only")
    with reported_errors():
        from ..files import json_clean
        from ..lab import PAPER_SCHEMES, error_statistics, sample
        from ..lab.reports import LEGEND
        from .console import say

        x = sample(distribution, elements, seed, df)
        results = {str(s): error_statistics(x, s) for s in schemes_of(scheme or PAPER_SCHEMES)}
    of = {"df": df} if distribution == "student-t" else {}
    if as_json:
        facts = {"distribution": distribution, "elements": x.numel(), "seed": seed, **of}
        summaries = {name: statistics.summary() for name, statistics in results.items()}
        typer.echo(json.dumps(json_clean({**facts, "schemes": summaries}), indent=1, allow_nan=False))
        return
    named = f"{distribution}({df:g})" if of else distribution
    _show_statistics(f"{named}, {x.numel():,} elements, seed {seed}", results)
    say(LEGEND)
