# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 grpo`, `sft`, `distill` and `evaluate`: the recipes, whose options these commands hand on as they are."""

import importlib
import sys
from collections.abc import Callable

import typer
from safetensors import SafetensorError

from .common import fail


#: Each recipe by its name, and what it does.
RECIPES = {
    "grpo": "Train a quantized policy by GRPO, from one YAML file: evaluated, saved and reloaded.",
    "sft": "Fine-tune a quantized model on texts or on the completions of a task, all weights or adapters.",
    "distill": "Distil a model in full precision into its quantized self.",
    "evaluate": "Evaluate a model on a task under its own scheme: greedy and sampled, with intervals.",
}
#: All words behind the name are the recipe's, `--help` too.
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def command(name: str) -> Callable[[typer.Context], None]:
    """Return the command that runs a recipe. With a launcher: `accelerate launch -m hf_mxfp4.cli NAME ...`."""

    def run_recipe(context: typer.Context) -> None:
        sys.argv = [f"hf-mxfp4 {name}", *context.args]
        try:
            recipe = importlib.import_module(f"hf_mxfp4.recipes.{name}")
        except ImportError as error:  # an extra that is not installed
            fail(str(error))
        try:
            recipe.main(context.args)
        except (OSError, SafetensorError) as error:
            if "No space left on device" not in str(error):
                raise
            fail(str(error), code=1)
        recipe.shutdown()

    return run_recipe
