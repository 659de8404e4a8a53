# SPDX-License-Identifier: Apache-2.0
"""The command line of `ablation.py`."""

import argparse
from collections.abc import Sequence
from typing import Any

from recipes.common.options import bare_flags, given_options


_GONE = {
    "rehearse": "--rehearse is gone: try the cells on a small model with --max_steps 2 --n_train 64 --n_test 8 "
    "--model_name_or_path SMALL_MODEL --launcher '' --out FOLDER (and on the CPU --use_cpu true --bf16 false)",
    "records": "--records is gone: copy the output folders of the other machines into this one, and give --report_only",
}


def parse(description: str, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The command line, and the options of `grpo.py` in it. Raises `ValueError` for words that are neither."""
    flags = [name for action in parser(description)._actions if action.nargs == 0 for name in action.option_strings]
    arguments, words = parser(description).parse_known_args(bare_flags(argv, flags))
    if words and not words[0].startswith("--"):
        raise ValueError(f"{words[0]!r} is one word more than the options")
    options = given_options(words)
    for name in options:
        if name in _GONE:
            raise ValueError(_GONE[name])
    return arguments, options


def parser(description: str) -> argparse.ArgumentParser:
    """The command line."""

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("--config", required=True, help="the grid, YAML")
    result.add_argument("--out", help="folder; by default the grid's output_dir")
    result.add_argument("--jobs", type=int, default=1, help="runs at a time; each gets its share of the cores")
    result.add_argument("--only", type=words, help="cells to run, separated by commas")
    result.add_argument("--models", type=words, help="models to run, separated by commas")
    result.add_argument("--seeds", type=numbers, help="seeds instead of the grid's, separated by commas")
    result.add_argument("--launcher", help="what comes before grpo.py instead of the grid's; '' for nothing")
    result.add_argument("--rerun", action="store_true", help="run again what was run with other settings")
    result.add_argument("--dry_run", action="store_true", help="print the cells and what differs, and stop")
    result.add_argument("--report_only", action="store_true", help="write the results of what is finished, run nothing")
    return result
