# SPDX-License-Identifier: Apache-2.0
"""The size of each room of the project: files, lines and the median length of its functions, as a Markdown table.

    python -m benchmarks.rooms [FOLDER]

FOLDER is a checkout of the project, by default this one, so that two versions can be compared. Lines are those of
Python files, blank ones and comments included; a function is as long as its definition, decorators and docstring
included. The widest kernel is the `triton.jit` function with the most parameters.
"""

import argparse
import ast
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from recipes.common.records import markdown_table

from .records import ROOT


TOPS = ("hf_mxfp4", "kernels", "recipes", "benchmarks", "tests")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions(files: Iterable[Path]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods in some files."""
    trees = (ast.parse(file.read_text()) for file in files)
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, from its first decorator on."""
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return function.end_lineno - first + 1


def row(name: str, files: list[Path]) -> list[str]:
    """A row of the table, of these files together."""
    lines = sum(len(file.read_text().splitlines()) for file in files)
    lengths = [length(function) for function in functions(files)]
    return [name, str(len(files)), str(lines), f"{median(lengths):g}" if lengths else ""]


def rows(root: Path) -> list[list[str]]:
    """A row for each top folder with all below, and for each room of the first three by itself."""
    found = []
    for top in TOPS:
        files = sorted((root / top).rglob("*.py"))
        found.append(row(f"**{top}**", files))
        for room in sorted({file.parent for file in files}) if top in TOPS[:3] else ():
            found.append(row(f"`{room.relative_to(root)}`", sorted(room.glob("*.py"))))
    return found


def widest_kernel(root: Path) -> tuple[str, int]:
    """The launched Triton kernel (named ``..._kernel``) with the most parameters, and their number."""
    kernels = [found for found in functions((root / "kernels").rglob("*.py")) if found.name.endswith("_kernel")]
    widest = max((kernel for kernel in kernels if kernel.decorator_list), key=lambda kernel: len(kernel.args.args))
    return widest.name, len(widest.args.args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT)
    folder = parser.parse_args().folder
    print(markdown_table(["room", "files", "lines", "median function"], rows(folder)))
    print("widest kernel: {} with {} parameters".format(*widest_kernel(folder)))


if __name__ == "__main__":
    main()
