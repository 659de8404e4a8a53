# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 analyze`, `compare` and `simulate`: what quantization does to weights, activations and random data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .common import (
    CheckpointArgument,
    IncludeOption,
    JsonOption,
    OverwriteOption,
    SchemeOption,
    SkipOption,
    fail,
    print_json,
    print_table,
    report_folder,
    report_problems,
    say,
    schemes_of,
    work_progress,
)


if TYPE_CHECKING:
    from ..lab import Analysis, Comparison, ErrorStatistics
    from ..lab.source import Source
    from ..numerics import QuantScheme


PROGRESS_NAME = "progress.jsonl"
#: Tensors of largest error that are shown.
_WORST, _WORST_COMPARED = 5, 10
#: Columns of statistics on screen.
_COLUMNS = ("SQNR dB", "rel. MSE %", "floor %", "scale bias", "deadzone", "grid", "to zero %", "gain")


def analyze(
    model: CheckpointArgument,
    scheme: SchemeOption = None,
    include: IncludeOption = None,
    exclude: SkipOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the reports. [default: analysis/<model name>]")
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the MXFP4 error of every weight that would be quantized, and write a report.

    Schemes default to the checkpoint's own, or, for one that has none, to plain MXFP4 and the two corrections of arXiv
    2605.20402. An interrupted run resumes when the same command is given again.
    """
    from .. import __version__
    from ..lab import PAPER_SCHEMES, Selection, TensorLog, analyze_weights, open_source, write_analysis
    from ..lab.reports import analysis_summary
    from ..lab.weights import bytes_to_analyze

    source = open_source(model)
    own = source.scheme
    schemes = schemes_of(scheme or ()) or ([own.weight_scheme] if own else schemes_of(PAPER_SCHEMES))
    selection = Selection.of(source, include or (), exclude or ())
    folder = out or Path("analysis") / report_folder(model)
    path, names = folder / PROGRESS_NAME, [str(scheme) for scheme in schemes]
    with TensorLog(path, source.name, names, __version__, overwrite=overwrite) as log:
        if len(log):
            typer.echo(f"{path} holds {len(log)} tensors that are done", err=True)
        with work_progress(bytes_to_analyze(source, selection)) as progress:
            analysis = analyze_weights(source, schemes, selection, log=log, on_bytes=progress)
    facts = source.describe()
    paths = write_analysis(analysis, facts, folder)
    if as_json:
        print_json(analysis_summary(analysis, facts))
    else:
        _show(analysis)
    report_problems(analysis.problems)
    typer.echo(f"reports: {', '.join(str(path) for path in paths)}", err=True)
    if analysis.problems:
        raise typer.Exit(1)


def _show(analysis: "Analysis") -> None:
    """Print schemes, the best one, layer types and worst tensors, and what is not among them."""
    from ..lab.page import number
    from ..lab.reports import LEGEND
    from ..lab.weights import SQNR_NOTE, least_error

    if analysis.results:
        totals = analysis.totals()
        elements = next(iter(totals.values())).elements
        _show_statistics(f"{analysis.model}: {len(analysis.results)} tensors, {elements:,} elements", totals)
        for sentence in (LEGEND, least_error(totals), SQNR_NOTE):
            say(sentence)
        best = min(totals, key=lambda scheme: totals[scheme].total)
        types = {scheme: analysis.by_layer_type(scheme) for scheme in totals}
        tensors = {scheme: {r.name: r.statistics[scheme] for r in analysis.results} for scheme in totals}
        for title, heading, groups, names in (
            ("tensors by layer", "layer type", types, list(types[best])),
            (f"largest relative errors under {best}", "tensor", tensors, list(analysis.worst(best, _WORST))),
        ):
            rows = [[name, *(number(groups[scheme][name].sqnr_db, 2) for scheme in totals)] for name in names]
            numbers = [str(i) for i in range(1, len(totals) + 1)]
            print_table(f"{title}: SQNR in dB, by scheme", [heading, *numbers], rows)
    if analysis.skipped:
        reasons = [f"{len(names)} {reason} (such as {min(names)})" for reason, names in analysis.skipped.items()]
        say(f"left out: {'; '.join(reasons)}")


def _show_statistics(title: str, rows: "dict[str, ErrorStatistics]") -> None:
    """Print one row per scheme; the numbers before them are the headings of the tables below."""
    from ..lab.reports import COLUMNS
    from ..lab.schemes import bits_text

    cells = [
        [f"{i}  {scheme}", bits_text(scheme), *(COLUMNS[column](statistics) for column in _COLUMNS)]
        for i, (scheme, statistics) in enumerate(rows.items(), 1)
    ]
    print_table(title, ["scheme", "bits", *_COLUMNS], cells)


def compare(
    model: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, as for analyze.")],
    other: Annotated[str | None, typer.Argument(metavar="B", help="Another checkpoint, plain or packed.")] = None,
    scheme: SchemeOption = None,
    include: IncludeOption = None,
    exclude: SkipOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write comparison.json, comparison.csv and comparison.html to."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints under one scheme (by default A's own, or 'rceil'), or an original and the packed
    checkpoint made from it. To compare schemes, give them to analyze.

    For two checkpoints also the relative difference |A - B| / |A| of every tensor. Ratios are B's error over A's. Of a
    packed checkpoint (also one of compressed-tensors, Quark or gpt-oss) the weights are taken as they are stored.
    """
    schemes = schemes_of(scheme or ())
    if other is None:
        fail("give a second checkpoint; hf-mxfp4 analyze A --scheme X --scheme Y compares schemes")
    if len(schemes) > 1:
        fail("two checkpoints are compared under one scheme; give --scheme once at most")
    from ..lab import open_source, write_comparison

    sources = [open_source(model), open_source(other)]
    result = _compared(sources, schemes, include or (), exclude or ())
    _show_comparison(result, as_json)
    if out is not None:
        typer.echo(f"reports: {', '.join(map(str, write_comparison(result, out)))}", err=True)
    if result.problems:
        raise typer.Exit(1)


def _compared(sources: list["Source"], schemes: list["QuantScheme"], include, exclude) -> "Comparison":
    from ..lab import Selection, compare_checkpoints, compare_packed, is_packed
    from ..lab.comparison import bytes_to_compare
    from ..lab.weights import bytes_to_analyze

    packed = [source for source in sources if is_packed(source)]
    if len(packed) == 2:
        fail("both checkpoints store quantized weights; give the original of one of them as A")
    if packed:
        if schemes:
            fail(f"{packed[0].name} stores weights under a scheme of its own; give no --scheme")
        original, stored = sorted(sources, key=is_packed)
        with work_progress(bytes_to_compare(original, stored)) as progress:
            return compare_packed(original, stored, Selection(tuple(include), tuple(exclude)), progress)
    selections = tuple(Selection.of(source, include, exclude) for source in sources)
    own = sources[0].scheme
    scheme = schemes[0] if schemes else own.weight_scheme if own else schemes_of(["rceil"])[0]
    with work_progress(sum(map(bytes_to_analyze, sources, selections))) as progress:
        return compare_checkpoints(*sources, scheme, selections, progress)


def _show_comparison(result: "Comparison", as_json: bool) -> None:

    if as_json:
        print_json(result.to_dict())
    else:
        for line in result.lines:
            say(line)
        headings = ["tensors", *(title for title, *_ in result.columns)]
        for title, rows in result.tables(_WORST_COMPARED):
            print_table(title, headings, rows)
        for side, names in (("A", result.only_first), ("B", result.only_second)):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                say(f"only in {side}: {', '.join(names[:5])}{more}")
    report_problems(result.problems)


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
    from ..lab import PAPER_SCHEMES, error_statistics, sample
    from ..lab.reports import LEGEND

    x = sample(distribution, elements, seed, df)
    results = {str(s): error_statistics(x, s) for s in schemes_of(scheme or PAPER_SCHEMES)}
    of = {"df": df} if distribution == "student-t" else {}
    if as_json:
        facts = {"distribution": distribution, "elements": x.numel(), "seed": seed, **of}
        summaries = {name: statistics.summary() for name, statistics in results.items()}
        print_json({**facts, "schemes": summaries})
        return
    named = f"{distribution}({df:g})" if of else distribution
    _show_statistics(f"{named}, {x.numel():,} elements, seed {seed}", results)
    say(LEGEND)
