# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 compare`: two checkpoints, a checkpoint and what was packed from it, or two schemes on one checkpoint."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .conversions import told_conversion_errors
from .options import ExcludeOption, IncludeOption, JsonOption, SchemeOption, fail, schemes_of


if TYPE_CHECKING:
    from ..lab.comparison.checkpoints import Comparison
    from ..lab.errors.source import Source
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
    exclude: ExcludeOption = None,
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
    schemes = schemes_of(scheme or ())
    if other is None and len(schemes) != 2:
        fail("give a second checkpoint, or exactly two different schemes with --scheme")
    if other is not None and len(schemes) > 1:
        fail("two checkpoints are compared under one scheme; give --scheme once at most")
    with told_conversion_errors():
        from ..lab.comparison.packed import is_packed
        from ..lab.errors.source import open_source

        if other is None:
            result = _two_schemes(model, schemes, include or (), exclude or ())
        else:
            sources = [open_source(model), open_source(other)]
            packed = [source for source in sources if is_packed(source)]
            if len(packed) == 1:
                if schemes:
                    fail(f"{packed[0].name} stores weights under a scheme of its own; give no --scheme")
                result = _with_packed(*sorted(sources, key=is_packed), include or (), exclude or ())
            elif packed:
                fail("both checkpoints store quantized weights; give the original of one of them as A")
            else:
                result = _two_models(*sources, schemes, include or (), exclude or ())
        _show(result, as_json)
        if out is not None:
            _write(result, out)
    if result.problems:
        raise typer.Exit(1)


def _with_packed(original: "Source", packed: "Source", include, exclude) -> "Comparison":
    from ..lab.comparison.packed import bytes_to_compare, compare_packed
    from ..lab.errors.weights import Selection
    from .console import ByteProgress

    with ByteProgress(bytes_to_compare(original, packed)) as progress:
        return compare_packed(original, packed, Selection(tuple(include), tuple(exclude)), progress)


def _two_models(model: "Source", other: "Source", schemes: list["QuantScheme"], include, exclude) -> "Comparison":
    from ..lab.comparison.checkpoints import compare_checkpoints
    from ..lab.errors.weights import bytes_to_analyze, own_config, selection_for
    from .console import ByteProgress

    sources = (model, other)
    configs = [own_config(source) for source in sources]
    scheme = schemes[0] if schemes else configs[0].weight_scheme if configs[0] else schemes_of(["rceil"])[0]
    pairs = zip(sources, configs, strict=True)
    first, second = (selection_for(source, include, exclude, config) for source, config in pairs)
    sizes = (bytes_to_analyze(sources[0], first), bytes_to_analyze(sources[1], second))
    with ByteProgress(None if None in sizes else sum(sizes)) as progress:
        return compare_checkpoints(*sources, scheme, (first, second), progress)


def _two_schemes(model: str, schemes: list["QuantScheme"], include, exclude) -> "Comparison":
    from ..lab.comparison.checkpoints import compare_schemes
    from ..lab.errors.source import open_source
    from ..lab.errors.weights import analyze_weights, bytes_to_analyze, own_config, selection_for
    from .console import ByteProgress

    source = open_source(model)
    selection = selection_for(source, include, exclude, own_config(source))
    with ByteProgress(bytes_to_analyze(source, selection)) as progress:
        analysis = analyze_weights(source, schemes, selection, on_bytes=progress)
    names = (str(schemes[0]), str(schemes[1]))
    rows = [(r.name, r.statistics[names[0]], r.statistics[names[1]]) for r in analysis.results]
    result = compare_schemes(source.name, rows, names)
    result.problems = analysis.problems
    return result


def _show(result: "Comparison", as_json: bool) -> None:
    from .console import out, plain_table, report_problems, say

    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    else:
        console = out()
        for line in result.lines():
            say(line, console)
        groups = {"all": result.total(), **result.by_layer_type()} if result.pairs else {}
        worst = {name: result.pairs[name] for name in result.worst(_WORST)}
        for heading, rows in ((result.groups_title, groups), (result.worst_title, worst)):
            if rows:
                cells = [[name, *(cell(pair) for cell in result.columns.values())] for name, pair in rows.items()]
                console.print(plain_table(heading, ["tensors", *result.columns], cells))
        for side, names in (("A", result.only_first), ("B", result.only_second)):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                say(f"only in {side}: {', '.join(names[:5])}{more}", console)
    report_problems(result.problems)


def _write(result: "Comparison", folder: Path) -> None:
    from .. import __version__
    from ..lab.comparison.report import write_comparison

    paths = write_comparison(result, __version__, folder)
    typer.echo(f"reports: {', '.join(str(path) for path in paths)}", err=True)
