# SPDX-License-Identifier: Apache-2.0
"""Print the size of each package, and the graph of their imports, as Markdown for docs/architecture.md.

    python -m benchmarks.packages [FOLDER]

FOLDER is a checkout of the project, by default this one, so that two versions can be compared. Tokens are those
of Python's `tokenize` without comments, docstrings and layout, so neither squeezing nor spacing changes them. Lines
are those of files, blank lines and comments included; a function is as long as its definition with decorators and
docstring.
The graph has an arrow from a package to each package that it imports and does not reach through another one.
Exit code 1, with a sentence for each, when an import points up or packages import each other in a circle.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

from .records import ROOT, table


#: Packages from the top to the bottom: one imports none of a line above its own. Single modules have no line; they
#: only must not be part of a circle.
ORDER = (
    ("benchmarks",),
    ("cli",),
    ("recipes",),
    ("lab",),
    ("rl",),
    ("integrations.transformers", "integrations.peft", "integrations.vllm"),
    ("checkpoint",),
    ("prepare",),
    ("layers",),
    ("model",),
    ("ops",),
    ("numerics",),
    ("mxfp4_kernels",),
)
SOURCES = ("hf_mxfp4", "kernels/mxfp4_kernels", "recipes", "benchmarks")
CPP = (".cpp", ".h")
_TABLE = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)
#: Tokens that do not count as size.
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

Graph = Mapping[str, set[str]]


# ---- sizes ----------------------------------------------------------------------------------------------------------


def lines(files: Sequence[Path]) -> int:
    """Return the lines of some files."""
    return sum(len(file.read_text().splitlines()) for file in files)


def files_in(folder: Path, *suffixes: str, but: str | None = None) -> list[Path]:
    """Return the files below a folder with one of these suffixes, without those in its folder ``but``."""
    found = sorted(file for file in folder.rglob("*") if file.suffix in suffixes)
    return [file for file in found if but is None or folder / but not in file.parents]


def tokens(source: str) -> int:
    """Return the number of Python tokens in a source, without comments, docstrings, indentation and line ends."""
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.string.lstrip("rR").startswith('"""')
        if token.type not in LAYOUT and not is_docstring:
            count += 1
    return count


def sizes(root: Path) -> dict[str, int]:
    """Return the tokens of each part that `tests/test_architecture.py` limits, and the words of the docs, without the
    tables that records make."""
    found = {}
    for name in ("hf_mxfp4 without lab", "hf_mxfp4/lab", "kernels", "recipes", "benchmarks", "tests"):
        folder, _, left_out = name.partition(" without ")
        files = files_in(root / folder, ".py", but=left_out or None)
        found[name] = sum(tokens(file.read_text()) for file in files)
    pages = [_TABLE.sub("", page.read_text()) for page in (root / "docs").rglob("*.md")]
    found["docs (words)"] = sum(len(page.split()) for page in pages)
    return found


def function_lengths(files: Sequence[Path]) -> list[int]:
    """Return the lines of all functions and methods in some files."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found.append(node.end_lineno - first + 1)
    return found


def size_table(root: Path) -> str:
    """Return a row for each package: files, tokens, lines of Python and C++, and the length of its median function."""
    folders: dict[str, list[Path]] = {}
    for source in (*SOURCES, "tests"):
        for file in files_in(root / source, ".py", *CPP):
            folders.setdefault(_package_of(file.relative_to(root)), []).append(file)
    rows = []
    for name, files in folders.items():
        python = [file for file in files if file.suffix == ".py"]
        lengths = function_lengths(python)
        size = sum(tokens(file.read_text()) for file in python)
        lines_of_cpp = lines([file for file in files if file.suffix in CPP])
        rows.append(
            [
                f"`{name}`",
                str(len(python)),
                str(size),
                str(lines(python)),
                str(lines_of_cpp) if lines_of_cpp else "",
                f"{median(lengths):g}" if lengths else "",
            ]
        )
    return table(["package", "files", "tokens", "lines", "lines of C++", "median function"], rows)


def _package_of(path: Path) -> str:
    """Return the package that a file is counted to: the one below `hf_mxfp4`, or the top folder."""
    top, *folders = path.parent.parts
    if top != "hf_mxfp4" or not folders:
        return top
    # Each integration counts as a package.
    depth = 2 if folders[0] == "integrations" else 1
    return "/".join([top, *folders[:depth]])


# ---- imports --------------------------------------------------------------------------------------------------------


@cache
def imports(root: Path) -> Graph:
    """Return what each package and each single module of `hf_mxfp4` imports of the others, anywhere in its files."""
    modules = {}
    for source in SOURCES:
        for file in files_in(root / source, ".py"):
            path = file.relative_to((root / source).parent).with_suffix("")
            modules[".".join(path.parts).removesuffix(".__init__")] = file
    graph: dict[str, set[str]] = {}
    for name, file in modules.items():
        targets = (target for target in _imported(name, file, modules) if target.partition(".")[0] in _TOPS)
        graph.setdefault(_unit(name), set()).update(_unit(target) for target in targets)
    # Names of the package itself are imported on use; whatever is behind them counts where it is imported.
    graph.pop("hf_mxfp4")
    return {unit: targets - {unit, "hf_mxfp4"} for unit, targets in graph.items()}


_TOPS = tuple(source.rpartition("/")[2] for source in SOURCES)


def _imported(name: str, file: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the absolute names of modules that a module imports."""
    package = name.split(".")
    if file.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` has level 1: the package itself; each more level goes up by one.
            base = []
            if node.level:
                base = package[: len(package) + 1 - node.level]
            if node.module:
                base = [*base, node.module]
            for alias in node.names:
                imported = ".".join([*base, alias.name])
                if imported in modules:
                    yield imported
                else:
                    yield ".".join(base)


def _unit(module: str) -> str:
    """Return the package or single module that a module belongs to."""
    top, *rest = module.split(".")
    if top != "hf_mxfp4" or not rest:
        return top
    depth = 2 if rest[0] == "integrations" else 1
    return ".".join(rest[:depth])


def faults(graph: Graph) -> list[str]:
    """Return a sentence for each import that points up, and for a circle."""
    rank = {name: number for number, names in enumerate(ORDER) for name in names}
    found = [
        f"{unit} imports {target}, which is above it in benchmarks/packages.py: move what it needs down."
        for unit, targets in sorted(graph.items())
        for target in sorted(targets)
        if unit in rank and rank.get(target, len(ORDER)) < rank[unit]
    ]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"{' -> '.join(reversed(error.args[1]))} import each other in a circle: take one import out.")
    return found


def mermaid(graph: Graph) -> str:
    """Return the graph of the packages of `ORDER` for Markdown, without arrows that another way replaces."""
    names = [name for line in ORDER for name in line if name in graph]
    down = {name: {target for target in _reached(graph, name) if target in names} for name in names}
    arrows = []
    for name in names:
        behind = {further for target in down[name] for further in down[target]}
        arrows += [f"    {name} --> {target}" for target in names if target in down[name] - behind]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```\n"])


def _reached(graph: Graph, unit: str) -> set[str]:
    """Return all units that a unit imports, through others as well."""
    reached: set[str] = set()
    waiting = [unit]
    while waiting:
        new = graph.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached - {unit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT)
    root = parser.parse_args().folder.resolve()
    print(size_table(root))
    graph = imports(root)
    print(mermaid(graph))
    sys.exit("\n".join(faults(graph)) or 0)


if __name__ == "__main__":
    main()
