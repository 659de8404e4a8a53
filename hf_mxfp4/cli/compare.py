# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 compare`: two checkpoints, or two schemes on one checkpoint."""

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import ExcludeOption, IncludeOption, JsonOption, SchemeOption, fail, schemes_of, told_errors


if TYPE_CHECKING:
    from ..analysis.comparison import Comparison, Pair
    from ..numerics import QuantScheme


def compare(
    model: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, as for analyze.")],
    other: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Another checkpoint; without it give --scheme twice.")
    ] = None,
    scheme: SchemeOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints under one scheme (by default A's own, or 'rceil'), or two schemes on one checkpoint.

    For two checkpoints also the relative difference |A - B| / |A| of every tensor. Ratios are B's error over A's.
    """
    schemes = schemes_of(scheme or ())
    if other is None and len(schemes) != 2:
        fail("give a second checkpoint, or exactly two different schemes with --scheme")
    if other is not None and len(schemes) > 1:
        fail("two checkpoints are compared under one scheme; give --scheme once at most")
    with told_errors("nothing was written"):
        if other is None:
            result, under = _two_schemes(model, schemes, include or (), exclude or ()), None
        else:
            result, under = _two_models(model, other, schemes, include or (), exclude or ())
    _show(result, under, as_json)
    if result.problems:
        raise typer.Exit(1)


def _two_models(model: str, other: str, schemes: list["QuantScheme"], include, exclude) -> tuple["Comparison", str]:
    from ..analysis.comparison import compare_checkpoints
    from ..analysis.source import open_source
    from ..analysis.weights import bytes_to_analyze, own_config, selection_for
    from .console import ByteProgress

    sources = (open_source(model), open_source(other))
    configs = [own_config(source) for source in sources]
    scheme = schemes[0] if schemes else configs[0].weight_scheme if configs[0] else schemes_of(["rceil"])[0]
    pairs = zip(sources, configs, strict=True)
    first, second = (selection_for(source, include, exclude, config) for source, config in pairs)
    sizes = (bytes_to_analyze(sources[0], first), bytes_to_analyze(sources[1], second))
    with ByteProgress(None if None in sizes else sum(sizes)) as progress:
        return compare_checkpoints(*sources, scheme, (first, second), progress), str(scheme)


def _two_schemes(model: str, schemes: list["QuantScheme"], include, exclude) -> "Comparison":
    from ..analysis.comparison import compare_schemes
    from ..analysis.source import open_source
    from ..analysis.weights import analyze_weights, bytes_to_analyze, own_config, selection_for
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


def _show(result: "Comparison", under: str | None, as_json: bool) -> None:
    from .console import out, plain_table, report_problems

    if as_json:
        typer.echo(json.dumps(_as_data(result, under), indent=1, allow_nan=False))
    else:
        console, headings = out(), ["A rel. MSE %", "B rel. MSE %", "B / A", "SQNR gain dB"]
        if under is not None:
            headings.append("|A-B| / |A|")
        console.print(f"A: {result.first}\nB: {result.second}", markup=False, highlight=False)
        groups = {"all": result.total(), **result.by_layer_type()} if result.pairs else {}
        worst = {name: result.pairs[name] for name in result.worst()}
        title = f"under {under}, by layer" if under else "by layer"
        for heading, rows in ((title, groups), ("where B is worst against A", worst)):
            if rows:
                cells = [[name, *_cells(pair, under is not None)] for name, pair in rows.items()]
                console.print(plain_table(heading, ["tensors", *headings], cells))
        for side, names in (("A", result.only_first), ("B", result.only_second)):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                console.print(f"only in {side}: {', '.join(names[:5])}{more}", markup=False, highlight=False)
    report_problems(result.problems)


def _cells(pair: "Pair", with_difference: bool) -> list[str]:
    from ..analysis.columns import number

    cells = [
        number(100 * pair.first.relative_mse, 4),
        number(100 * pair.second.relative_mse, 4),
        number(pair.mse_ratio, 4),
        number(pair.sqnr_gain_db, 2),
    ]
    return [*cells, number(pair.relative_difference, 6)] if with_difference else cells


def _as_data(result: "Comparison", under: str | None) -> dict[str, Any]:
    def pair_data(pair: "Pair") -> dict[str, float | None]:
        data = {
            "first_relative_mse": pair.first.relative_mse,
            "second_relative_mse": pair.second.relative_mse,
            "mse_ratio": pair.mse_ratio,
            "sqnr_gain_db": pair.sqnr_gain_db,
        }
        if under is not None:
            data["relative_difference"] = pair.relative_difference
        return {key: value if math.isfinite(value) else None for key, value in data.items()}

    return {
        "first": result.first,
        "second": result.second,
        "scheme": under,
        "total": pair_data(result.total()),
        "by_layer_type": {name: pair_data(pair) for name, pair in result.by_layer_type().items()},
        "worst": result.worst(),
        "tensors": {name: pair_data(pair) for name, pair in result.pairs.items()},
        "only_first": result.only_first,
        "only_second": result.only_second,
        "problems": [{"where": problem.where, "reason": problem.reason} for problem in result.problems],
    }
