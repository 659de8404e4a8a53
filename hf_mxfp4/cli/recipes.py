# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 train`, `grpo`, `sft`, `distill` and `evaluate`: the recipes, which get all words as they are."""

import importlib
import sys
from collections.abc import Callable

import typer

from ..recipes.common.help import help_file
from .common import fail


#: All words behind the name are the recipe's; `--help` is answered before it is imported.
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def command(name: str) -> Callable[[typer.Context], None]:
    """Return the command that runs a recipe. With a launcher: `accelerate launch -m hf_mxfp4.cli NAME ...`."""

    def run_recipe(context: typer.Context) -> None:
        if "--help" in context.args:
            typer.echo(help_file(name).read_text(encoding="utf-8"), nl=False)
            return
        sys.argv = [f"hf-mxfp4 {name}", *context.args]
        try:
            recipe = importlib.import_module(f"hf_mxfp4.recipes.{name}")
        except ImportError as error:  # an extra that is not installed
            fail(str(error))
        recipe.main(context.args)
        recipe.shutdown()

    return run_recipe
