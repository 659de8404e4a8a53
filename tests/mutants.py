# SPDX-License-Identifier: Apache-2.0
"""Small faults made on purpose, to see which of them the tests find.

    pytest -n 2 --dist loadfile -m 'not large' --cov --cov-context=test --cov-report= --junitxml=tests.xml
    python -m tests.mutants run --coverage .coverage --durations tests.xml --mutants 240 --out mutants.json
    python -m tests.mutants compare mutants.json --old old.json

Each mutant changes one place of one function: a comparison, an operator, a constant, a condition, what is returned, or
a statement left out. It is written into a copy of the tree, where the tests that ran its line are run, the fastest
first, until one fails. Which mutants are made depends on the seed and the sources alone.
"""

import argparse
import ast
import contextlib
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
import xml.etree.ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple


ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("numerics", "gemm", "layers", "rl", "checkpoint")
#: What a tree needs for tests to run in it.
COPIED = ("hf_mxfp4", "kernels", "recipes", "benchmarks", "tests", "docs", "README.md", "pyproject.toml", "Makefile")
COPIED += ("constraints.txt", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", ".ci")
#: Imported once, before forks; none of them imports what is mutated.
PRELOADED = ("pytest", "hypothesis", "numpy", "torch", "transformers", "datasets", "accelerate", "peft")
PRELOADED += ("trl.trainer.grpo_trainer", "transformers.models.qwen2.modeling_qwen2", "compressed_tensors", "torchao")

#: Seconds after which a test of a mutant has failed, since it hangs.
PATIENCE = 100

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"}
OPERATORS |= {ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "&", ast.Pow: "*"}


class Mutant(NamedTuple):
    """Text between two places of a file, by line and byte, that is replaced."""

    file: str
    function: str
    start: tuple[int, int]
    end: tuple[int, int]
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.start[0]}:{self.start[1]} {self.before!r} -> {self.after!r}"


def mutants_of(path: Path) -> list[Mutant]:
    """Every mutant of one file."""
    lines = [line.encode() for line in path.read_text().splitlines(keepends=True)]
    file = str(path.relative_to(ROOT))

    def text(start: tuple[int, int], end: tuple[int, int]) -> str:
        (first, begin), (last, stop) = start, end
        if first == last:
            return lines[first - 1][begin:stop].decode()
        whole = [lines[first - 1][begin:], *lines[first : last - 1], lines[last - 1][:stop]]
        return b"".join(whole).decode()

    def visit(node: ast.AST, function: str) -> Iterator[Mutant]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                body = ast.Module(child.body[1:] if ast.get_docstring(child) else child.body, [])
                yield from visit(body, child.name)
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, "")
            elif isinstance(child, ast.AnnAssign):  # annotations are not evaluated
                yield from visit(ast.Module([child.value] if child.value else [], []), function)
            else:
                for start, end, after in replacements(child) if function else ():
                    before = text(start, end)
                    changed = after(before) if callable(after) else after
                    if changed != before:
                        yield Mutant(file, function, start, end, before, changed)
                yield from visit(child, function)

    return list(visit(ast.parse(path.read_text()), ""))


def replacements(node: ast.AST) -> Iterator[tuple]:
    """Places of a node, and what comes there: a text, or a function of the text that was there."""
    whole = (_start(node), _end(node)) if hasattr(node, "lineno") else ()
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in COMPARISONS:
            yield _end(left), _start(right), lambda old: _other_operator(old, COMPARISONS[type(operator)])
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS and not _is_text(left):
            if (left.end_lineno, right.lineno) == (node.lineno, node.lineno):
                yield _end(left), _start(right), lambda old: _other_operator(old, OPERATORS[type(operator)])
        case ast.BoolOp(op=operator, values=[left, right, *_]):
            swapped = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
            yield _end(left), _start(right), lambda old: old.replace(*swapped)
        case ast.UnaryOp(op=ast.Not()):
            yield whole[0], (node.lineno, node.col_offset + len("not")), ""
        case ast.Constant(value=bool(value)):
            yield *whole, str(not value)
        case ast.Constant(value=int(value)):
            yield *whole, str(value + 1)
        case ast.Constant(value=float(value)):
            yield *whole, repr(value * 2 + (value == 0))
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield _start(value), _end(value), "None"
        case ast.If(test=test) | ast.IfExp(test=test):
            yield _start(test), _end(test), lambda old: f"(not ({old}))"
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield *whole, "pass"


def _start(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _other_operator(old: str, new: str) -> str:
    """Keeps brackets that stand between an operator and its operands."""
    symbol = old.strip("() \t")
    return old.replace(symbol, new) if symbol else old


def chosen(count: int, seed: int, packages: tuple[str, ...] = PACKAGES) -> list[Mutant]:
    """As many mutants of each package, of as many functions as there are."""
    result = []
    for number, package in enumerate(packages):
        generator = random.Random(f"{seed} {package}")
        everything = [m for path in sorted((ROOT / "hf_mxfp4" / package).rglob("*.py")) for m in mutants_of(path)]
        generator.shuffle(everything)
        functions = defaultdict(list)
        for mutant in everything:
            functions[mutant.file, mutant.function].append(mutant)
        wanted = count // len(packages) + (number < count % len(packages))
        ranked = sorted((rank, place) for place, found in enumerate(functions.values()) for rank, _ in enumerate(found))
        lists = list(functions.values())
        result += [lists[place][rank] for rank, place in ranked[:wanted]]
    return result


class Tests(NamedTuple):
    """Which tests ran a line, and how many seconds each took."""

    lines: dict[tuple[str, int], set[str]]
    seconds: dict[str, float]

    @classmethod
    def read(cls, coverage_file: Path, durations: Path) -> "Tests":
        from coverage.numbits import numbits_to_nums

        lines: dict[tuple[str, int], set[str]] = defaultdict(set)
        with contextlib.closing(sqlite3.connect(coverage_file)) as data:
            files = dict(data.execute("select id, path from file"))
            contexts = dict(data.execute("select id, context from context"))
            tables = [table for (table,) in data.execute("select name from sqlite_master where type = 'table'")]
            if "line_bits" in tables:
                for file, context, bits in data.execute("select file_id, context_id, numbits from line_bits"):
                    for line in numbits_to_nums(bits):
                        lines[_inside(files[file]), line].add(contexts[context].split("|")[0])
            for file, context, begin, end in data.execute("select file_id, context_id, fromno, tono from arc"):
                for line in (begin, end):
                    lines[_inside(files[file]), abs(line)].add(contexts[context].split("|")[0])
        seconds = {}
        for case in xml.etree.ElementTree.parse(durations).iter("testcase"):
            module = case.get("classname", "").replace(".", "/") + ".py"
            seconds[f"{module}::{case.get('name')}"] = float(case.get("time", 0))
        return cls(lines, seconds)

    def of(self, mutant: Mutant, budget: float) -> list[str]:
        """Tests that ran the mutant's lines, the fastest first, as many as take `budget` seconds; where none did, as
        in what Dynamo traces, those that ran any line of the file."""
        lines = set(range(mutant.start[0], mutant.end[0] + 1))
        found = self._that_ran(mutant.file, lines) or self._that_ran(mutant.file, None)
        ordered = sorted(found, key=lambda test: (self.seconds.get(test, 1.0), test))
        taken, spent = [], 0.0
        for test in ordered:
            spent += self.seconds.get(test, 1.0)
            if taken and spent > budget:
                break
            taken.append(test)
        return taken

    def _that_ran(self, file: str, lines: set[int] | None) -> set[str]:
        ran = (tests for (f, line), tests in self.lines.items() if f == file and (lines is None or line in lines))
        return set().union(*ran) - {""}


def _inside(path: str) -> str:
    for top in ("hf_mxfp4/", "kernels/"):
        if f"/{top}" in path:
            return top + path.rsplit(f"/{top}", 1)[1]
    return path


def tree(folder: Path) -> Path:
    """A copy of what tests need."""
    folder.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.exists():
            shutil.copy2(source, folder / name)
    return folder


def write(mutant: Mutant, folder: Path) -> None:
    path = folder / mutant.file
    lines = [line.encode() for line in path.read_text().splitlines(keepends=True)]
    (first, begin), (last, stop) = mutant.start, mutant.end
    lines[first - 1 : last] = [lines[first - 1][:begin] + mutant.after.encode() + lines[last - 1][stop:]]
    path.write_bytes(b"".join(lines))


def run_tests(folder: Path, tests: list[str], timeout: float) -> tuple[str, str]:
    """What the tests of a tree come to: `killed`, `survived`, or what went wrong; and which test failed how."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(folder)
            paths = [str(folder / "kernels"), str(folder), str(folder / "tests")]
            sys.path[:0] = paths
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "hf_mxfp4", "conftest")]:
                del sys.modules[name]
            import pytest

            os._exit(int(pytest.main(["-x", "-q", f"--timeout={PATIENCE}", *tests])))
        os._exit(70)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            log = (folder / "log.txt").read_text(errors="replace")
            # A fault that keeps tests or their helpers from being imported ends as a wrong use of pytest does.
            if code == 4 and "while loading conftest" not in log and "ERROR collecting" not in log:
                return "not collected", ""
            # What a test logs as an error begins like one that pytest could not begin.
            found = [line for word in ("FAILED ", "ERROR ") for line in log.splitlines() if line.startswith(word)]
            return {0: "survived", 5: "not collected"}.get(code, "killed"), found[0] if found else ""
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "out of time", ""


def run(arguments: argparse.Namespace) -> None:
    tests = Tests.read(arguments.coverage, arguments.durations)
    made = chosen(arguments.mutants, arguments.seed, tuple(arguments.packages))
    if arguments.only:
        survivors = {r["name"] for r in json.loads(arguments.only.read_text()) if r["result"] != "killed"}
        made = [mutant for mutant in made if mutant.name in survivors]
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()
    trees = [tree(arguments.work / str(number)) for number in range(arguments.jobs)]

    def one(mutant: Mutant) -> dict:
        folder = trees.pop()
        try:
            selected = tests.of(mutant, arguments.budget)
            started = time.monotonic()
            result, by = "no test", ""
            if selected:
                write(mutant, folder)
                result, by = run_tests(folder, selected, 5 * arguments.budget + 2 * PATIENCE)
                shutil.copy2(ROOT / mutant.file, folder / mutant.file)
            seconds = time.monotonic() - started
            print(f"{seconds:6.1f} s  {len(selected):4} tests  {result:9} {mutant.name}  {by[:100]}", flush=True)
            return mutant._asdict() | {"name": mutant.name, "result": result, "by": by, "tests": len(selected)}
        finally:
            trees.append(folder)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(one, made))
    arguments.out.write_text(json.dumps(results, indent=1))
    table(results)


def table(results: list[dict]) -> None:
    packages = defaultdict(Counter)
    for result in results:
        packages[result["file"].split("/")[1]][result["result"]] += 1
    for package, counts in packages.items():
        print(f"{package:12} {sum(counts.values()):4} mutants", dict(counts))


def compare(arguments: argparse.Namespace) -> None:
    """What the old suite kills and the new one does not."""
    new = {result["name"]: result for result in json.loads(arguments.new.read_text())}
    old = {result["name"]: result for result in json.loads(arguments.old.read_text())}
    table(list(new.values()))
    lost = [name for name, result in old.items() if result["result"] == "killed" and new[name]["result"] != "killed"]
    print(f"{len(lost)} killed by the old tests alone", *lost, sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.set_defaults(function=run)
    command.add_argument("--coverage", type=Path, required=True, help="coverage's data, with a context for each test")
    command.add_argument("--durations", type=Path, required=True, help="pytest's --junitxml of the same run")
    command.add_argument("--mutants", type=int, default=240)
    command.add_argument("--packages", nargs="+", default=PACKAGES)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--only", type=Path, help="results of another run: only what survived there")
    command.add_argument("--budget", type=float, default=60, help="seconds of tests for each mutant")
    command.add_argument("--jobs", type=int, default=2)
    command.add_argument("--work", type=Path, required=True, help="a new folder for copies of the tree")
    command.add_argument("--out", type=Path, required=True)
    command = commands.add_parser("compare")
    command.set_defaults(function=compare)
    command.add_argument("new", type=Path)
    command.add_argument("--old", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
