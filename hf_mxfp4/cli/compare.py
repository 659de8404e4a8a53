# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 compare`: two checkpoints, a checkpoint and what was packed from it, or two schemes on one checkpoint."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import IncludeOption, JsonOption, SchemeOption, SkipOption, fail, reported_errors, schemes_of


if TYPE_CHECKING:
    from ..lab import Comparison
    from ..lab.source import Source
    from ..numerics import QuantScheme


#: Tensors of the second table on screen; the files have more.
_WORST = 10


def compare(
    model: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, as for analyze.")],
    other: Annotated[
        str | None,
        typer.Argument(metavar="[B]", help="Another checkpoint, plain or packed; without it give --scheme twice."),
    ] = None,
    scheme: SchemeOption = None,
    include: IncludeOption = None,
    exclude: SkipOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write comparison.json, comparison.csv and comparison.html to."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints under one scheme (by default A's own, or 'rceil'), an original and the packed checkpoint
    made from it, or two schemes on one checkpoint.

    For two checkpoints also the relative difference |A - B| / |A| of every tensor. Ratios are B's error over A's. Of a
    packed checkpoint (also one of compressed-tensors, Quark or gpt-oss) the weights are taken as they are stored.
    """
    with reported_errors():
        schemes = schemes_of(scheme or ())
        if other is None and len(schemes) != 2:
            fail("give a second checkpoint, or exactly two different schemes with --scheme")
        if other is not None and len(schemes) > 1:
            fail("two checkpoints are compared under one scheme; give --scheme once at most")
        from ..lab import open_source, write_comparison

        sources = [open_source(name) for name in (model, other) if name is not None]
        result = _compared(sources, schemes, include or (), exclude or ())
        _show(result, as_json)
        if out is not None:
            typer.echo(f"reports: {', '.join(map(str, write_comparison(result, out)))}", err=True)
    if result.problems:
        raise typer.Exit(1)


def _compared(sources: list["Source"], schemes: list["QuantScheme"], include, exclude) -> "Comparison":
    from ..lab import Selection, analyze_weights, compare_checkpoints, compare_packed, compare_schemes, is_packed
    from ..lab.comparison import bytes_to_compare
    from ..lab.weights import bytes_to_analyze
    from .console import WorkProgress

    packed = [source for source in sources if is_packed(source)]
    if len(sources) == 2 and len(packed) == 2:
        fail("both checkpoints store quantized weights; give the original of one of them as A")
    if len(sources) == 2 and packed:
        if schemes:
            fail(f"{packed[0].name} stores weights under a scheme of its own; give no --scheme")
        original, stored = sorted(sources, key=is_packed)
        with WorkProgress(bytes_to_compare(original, stored)) as progress:
            return compare_packed(original, stored, Selection(tuple(include), tuple(exclude)), progress)
    selections = [Selection.of(source, include, exclude) for source in sources]
    sizes = map(bytes_to_analyze, sources, selections)
    with WorkProgress(sum(sizes)) as progress:
        if len(sources) == 1:
            return compare_schemes(analyze_weights(sources[0], schemes, selections[0], on_bytes=progress))
        own = sources[0].scheme
        scheme = schemes[0] if schemes else own.weight_scheme if own else schemes_of(["rceil"])[0]
        return compare_checkpoints(*sources, scheme, tuple(selections), progress)


def _show(result: "Comparison", as_json: bool) -> None:
    from .console import out, plain_table, report_problems, say

    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    else:
        console = out()
        for line in result.lines:
            say(line, console)
        headings = ["tensors", *(title for title, *_ in result.columns)]
        for title, rows in result.tables(_WORST):
            console.print(plain_table(title, headings, rows))
        for side, names in (("A", result.only_first), ("B", result.only_second)):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                say(f"only in {side}: {', '.join(names[:5])}{more}", console)
    report_problems(result.problems)
