# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 analyze`, `compare` and `simulate`: what quantization does to weights, activations and random data."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .. import __version__, lab
from .common import (
    CheckpointArgument,
    JsonOption,
    OverwriteOption,
    SchemeOption,
    SkipOption,
    fail,
    note,
    print_json,
    print_table,
    report_folder,
    report_problems,
    say,
    schemes_of,
    work_progress,
)


PROGRESS_NAME = "progress.jsonl"


def analyze(
    model: CheckpointArgument,
    scheme: SchemeOption = None,
    exclude: SkipOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the reports. [default: analysis/<model name>]")] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the MXFP4 error of every weight that would be quantized, and write a report.

    Schemes default to the checkpoint's own, or, for one that has none, to plain MXFP4 and the two corrections of arXiv
    2605.20402. An interrupted run resumes when the same command is given again.
    """
    source = lab.open_source(model)
    if scheme:
        schemes = schemes_of(scheme)
    else:
        own = source.weight_scheme
        schemes = schemes_of(lab.PAPER_SCHEMES) if own is None else [own]
    selection = lab.Selection.of(source, exclude or ())
    folder = out or Path("analysis") / report_folder(model)
    path = folder / PROGRESS_NAME
    names = [str(scheme) for scheme in schemes]
    with lab.TensorLog(path, source.name, names, __version__, overwrite=overwrite) as log:
        if len(log):
            note(f"{path} holds {len(log)} tensors that are done")
        with work_progress(source.n_bytes) as progress:
            analysis = lab.analyze_weights(source, schemes, selection, log=log, on_bytes=progress)
    facts = source.describe()
    paths = lab.write_analysis(analysis, facts, folder)
    if as_json:
        print_json(lab.reports.analysis_summary(analysis, facts))
    else:
        _show(analysis)
    report_problems(analysis.problems)
    note(f"reports: {', '.join(str(path) for path in paths)}")
    if analysis.problems:
        raise typer.Exit(1)


def _show(analysis: "lab.Analysis") -> None:
    """Print schemes, the best one, layer types and worst tensors, and what is not among them."""
    from ..lab.errors.weights import SQNR_NOTE, least_error

    if analysis.results:
        totals = analysis.totals()
        elements = next(iter(totals.values())).elements
        title = f"{analysis.model}: {len(analysis.results)} tensors, {elements:,} elements"
        print_table(title, *lab.reports.statistics_table(totals))
        for sentence in (lab.reports.LEGEND, least_error(totals), SQNR_NOTE):
            say(sentence)
        for table in lab.reports.sqnr_tables(analysis):
            print_table(*table)
    if analysis.skipped:
        reasons = [f"{len(names)} {reason} (such as {min(names)})" for reason, names in analysis.skipped.items()]
        say(f"left out: {'; '.join(reasons)}")


def compare(
    model: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, as for analyze.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another checkpoint, plain or packed.")],
    scheme: SchemeOption = None,
    exclude: SkipOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write comparison.json, comparison.csv and comparison.html to.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints under one scheme (by default A's own, or 'rceil'), or an original and the packed
    checkpoint made from it. To compare schemes, give them to analyze.

    For two checkpoints also the relative difference |A - B| / |A| of every tensor. Ratios are B's error over A's. Of a
    packed checkpoint (also one of compressed-tensors, Quark or gpt-oss) the weights are taken as they are stored.
    """
    schemes = schemes_of(scheme or ())
    if len(schemes) > 1:
        fail("two checkpoints are compared under one scheme; give --scheme once at most")
    first = lab.open_source(model)
    second = lab.open_source(other)
    with work_progress(first.n_bytes + second.n_bytes) as progress:
        result = lab.compare_sources(first, second, schemes[0] if schemes else None, exclude or (), progress)
    _show_comparison(result, as_json)
    if out is not None:
        note(f"reports: {', '.join(map(str, lab.write_comparison(result, out)))}")
    if result.problems:
        raise typer.Exit(1)


def _show_comparison(result: "lab.Comparison", as_json: bool) -> None:
    if as_json:
        print_json(result.to_dict())
    else:
        for line in result.lines:
            say(line)
        headings = ["tensors", *(title for title, *_ in result.columns)]
        for title, rows in result.tables(10):
            print_table(title, headings, rows)
        for side, names in (("A", result.only_first), ("B", result.only_second)):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                say(f"only in {side}: {', '.join(names[:5])}{more}")
    report_problems(result.problems)


def simulate(
    distribution: Annotated[
        Literal["gaussian", "laplace", "student-t", "uniform", "outliers"],
        typer.Option(
            help="'student-t' of 4 degrees of freedom; 'outliers': 8 of 1024 Gaussian channels are 30 x larger."
        ),
    ] = "gaussian",
    elements: Annotated[int, typer.Option(min=1, max=2**32, help="Rounded up to whole rows of 1024.")] = 2**20,
    seed: int = 0,
    scheme: SchemeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure schemes on random data, whose rows have standard deviations spread over one octave."""
    x = lab.sample(distribution, elements, seed)
    schemes = schemes_of(scheme or lab.PAPER_SCHEMES)
    results = {str(scheme): lab.error_statistics(x, scheme) for scheme in schemes}
    if as_json:
        summaries = {name: statistics.summary() for name, statistics in results.items()}
        print_json({"distribution": distribution, "elements": x.numel(), "seed": seed, "schemes": summaries})
        return
    print_table(f"{distribution}, {x.numel():,} elements, seed {seed}", *lab.reports.statistics_table(results))
    say(lab.reports.LEGEND)
