# SPDX-License-Identifier: Apache-2.0
"""The command line of `ablation.py`."""

import argparse


def parser(description: str) -> argparse.ArgumentParser:
    """The command line."""

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--config", required=True, help="the grid, YAML")
    result.add_argument("--out", help="folder; by default the grid's output_dir")
    result.add_argument("--jobs", type=int, default=1, help="runs at a time; each gets its share of the cores")
    result.add_argument("--only", type=words, help="cells to run, separated by commas")
    result.add_argument("--models", type=words, help="models to run, separated by commas")
    result.add_argument("--seeds", type=numbers, help="seeds instead of the grid's, separated by commas")
    result.add_argument("--rerun", action="store_true", help="run again what was run with other settings")
    result.add_argument("--dry-run", action="store_true", help="print the cells and what differs, and stop")
    result.add_argument(
        "--rehearse",
        action="store_true",
        help="try every cell on the CPU with a tiny model and a few steps, in minutes; its figures mean nothing",
    )
    result.add_argument("--records", help="an ablation.json with other runs of this grid, to report beside")
    result.add_argument("--report-only", action="store_true", help="write the results of what is finished, run nothing")
    return result
