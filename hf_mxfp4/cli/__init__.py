# SPDX-License-Identifier: Apache-2.0
"""The `hf-mxfp4` command. Heavy imports happen when a command runs."""

import functools
import io
import sys
from typing import Annotated

import typer

from .._logging import hide_import_noise
from ..recipes.common.help import RECIPES
from . import analyze, convert, evaluate, machine, recipes, training
from .common import Command


app = typer.Typer(
    name="hf-mxfp4",
    help="Train and evaluate models in MXFP4, measure what it does to them, and convert and verify checkpoints. Exit "
    "codes: 0 all well, 1 some tensors are damaged or could not be analysed, 2 wrong usage or nothing to analyse, "
    "convert or verify, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # options as recipes have them
)
_command = functools.partial(app.command, cls=Command)
_command("analyze")(analyze.analyze)
_command("compare")(analyze.compare)
_command("eval")(evaluate.evaluate)
_command("simulate")(analyze.simulate)
_command("smooth")(evaluate.smooth)
_command("gptq")(evaluate.gptq)
_command("plan")(training.plan)
_command("report")(training.report)
_command("pack")(convert.pack)
_command("export")(convert.export)
_command("import")(convert.import_)
_command("verify")(convert.verify)
_command("env")(machine.env)
_command("doctor")(machine.doctor)
for _name, _help in RECIPES.items():
    app.command(_name, help=_help, context_settings=recipes.SETTINGS)(recipes.command(_name))
app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(training.run)


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
    # Names of files need not be UTF-8.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run the command; the entry point of the console script."""
    hide_import_noise()
    app(prog_name="hf-mxfp4")
