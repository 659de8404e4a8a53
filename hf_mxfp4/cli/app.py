# SPDX-License-Identifier: Apache-2.0
"""The commands put together."""

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from . import analyze, compare, convert, env, plan, report, simulate


class _Command(TyperCommand):
    """Registers the quantization method with transformers before it runs. Help and mistakes in options come before
    that, and without the seconds that importing transformers takes."""

    def invoke(self, ctx: typer.Context) -> Any:
        importlib.import_module("..quantizer", __package__)
        return super().invoke(ctx)


app = typer.Typer(
    name="hf-mxfp4",
    help="Measure, before and beside training, what MXFP4 does to a model, and convert checkpoints. Exit codes: 0 all "
    "well, 1 some tensors could not be analysed, 2 wrong usage or nothing to analyse or convert, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("analyze", cls=_Command)(analyze.analyze)
app.command("compare", cls=_Command)(compare.compare)
app.command("simulate", cls=_Command)(simulate.simulate)
app.command("plan", cls=_Command)(plan.plan)
app.command("report", cls=_Command)(report.report)
app.command("pack", cls=_Command)(convert.pack)
app.command("export", cls=_Command)(convert.export)
app.command("import", cls=_Command)(convert.import_)
app.command("env", cls=_Command)(env.env)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"hf-mxfp4 {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="hf-mxfp4")
