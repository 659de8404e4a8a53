# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 simulate`: schemes on random data."""

import json
import math
from enum import Enum
from typing import Annotated

import typer

from .options import JsonOption, SchemeOption, fail, schemes_of


class Distribution(str, Enum):
    """The names in [`hf_mxfp4.lab.errors.distributions`]."""

    GAUSSIAN = "gaussian"
    LAPLACE = "laplace"
    STUDENT_T = "student-t"
    UNIFORM = "uniform"
    OUTLIERS = "outliers"


def simulate(
    distribution: Annotated[
        Distribution,
        typer.Option("--distribution", help="'outliers' is Gaussian with 8 of 1024 channels 30 times as large."),
    ] = Distribution.GAUSSIAN,
    elements: Annotated[int, typer.Option("--elements", min=1, max=2**32, help="Rounded up to whole rows of 1024.")] = 2
    ** 20,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    df: Annotated[float, typer.Option("--df", help="Degrees of freedom of student-t; above 2.")] = 4.0,
    scheme: SchemeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure schemes on random data, whose rows have standard deviations spread over one octave."""
    from ..lab.errors.distributions import sample
    from ..lab.errors.schemes import PAPER_SCHEMES
    from ..lab.errors.statistics import error_statistics
    from ..lab.report.columns import LEGEND
    from .console import out, statistics_table

    if not df > 2:
        fail(f"--df {df:g}: the variance of student-t exists for more than 2 degrees of freedom only")
    schemes = schemes_of(scheme or PAPER_SCHEMES)
    x = sample(distribution.value, elements, seed, df)
    results = {str(s): error_statistics(x, s) for s in schemes}
    if as_json:
        summaries = {
            name: {key: value if math.isfinite(value) else None for key, value in stats.summary().items()}
            for name, stats in results.items()
        }
        parameters = {"distribution": distribution.value, "elements": x.numel(), "seed": seed}
        if distribution is Distribution.STUDENT_T:
            parameters["df"] = df
        typer.echo(json.dumps({**parameters, "schemes": summaries}, indent=1, allow_nan=False))
        return
    named = f"{distribution.value}({df:g})" if distribution is Distribution.STUDENT_T else distribution.value
    console = out()
    console.print(statistics_table(f"{named}, {x.numel():,} elements, seed {seed}", "scheme", results))
    console.print(LEGEND, markup=False, highlight=False)
