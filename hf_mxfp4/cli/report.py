# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 report`: the report of a training run, finished or not."""

from pathlib import Path
from typing import Annotated

import typer

from .options import fail, told_errors


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN_FOLDER", help="The output_dir of a training run, or one of its checkpoints."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="The HTML file. [default: run_report.html in RUN_FOLDER]")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="Draw the plots as one picture into this file (.png, .svg) instead.")
    ] = None,
) -> None:
    """Write the report of a training run, also of one that was interrupted, from the files that it left.

    Reads run_log.jsonl, or, where there is none, trainer_state.json of the newest whole checkpoint.
    """
    if out is not None and png is not None:
        fail("--out and --png are two commands")
    from ..lab.run_report.log import RunLogError
    from ..lab.run_report.report import write_run_picture, write_run_report

    with told_errors("nothing was written"):
        try:
            path = write_run_report(run, out) if png is None else write_run_picture(run, png)
        except (RunLogError, ValueError) as error:
            fail(str(error))
    typer.echo(str(path))
