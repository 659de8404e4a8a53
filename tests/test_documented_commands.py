# SPDX-License-Identifier: Apache-2.0
"""Commands in README, CONTRIBUTING, docs and records name what there is, with options that exist and all that are
required."""

import argparse
import importlib
import importlib.util
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from hf_mxfp4.cli import app
from hf_mxfp4.recipes import distill, sft
from hf_mxfp4.recipes.ablation import parse as parse_ablation
from hf_mxfp4.recipes.ablations.grid import read_grid
from hf_mxfp4.recipes.common.help import RECIPES
from hf_mxfp4.recipes.common.options import config_path, names
from hf_mxfp4.recipes.evaluation.arguments import parse as parse_evaluation
from hf_mxfp4.recipes.post_training.arguments import GROUPS
from hf_mxfp4.recipes.pretraining.arguments import parse as parse_study


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: What the commands of this project begin with, behind variables of the environment and a folder.
KINDS = {
    "benchmark": r"python (?:-m benchmarks\.|benchmarks/)",
    "tool": r"hf-mxfp4 \w",
    "make": r"make \w",
    "recipe": r"(?:python|accelerate launch) .*?recipes/\w+\.py",
}


def _recorded() -> list[str]:
    """Commands of records that any machine can repeat. Those of a GPU may be of an earlier version of the project."""
    records = (record for path in sorted(RESULTS.glob("*.json")) for record in json.loads(path.read_text()))
    return list(dict.fromkeys(record["command"] for record in records if not record["hardware"].startswith("NVIDIA")))


def _documented() -> list[str]:
    """Commands of the pages: lines of shell code, and code spans in the text."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
        spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
        lines = [line for block in blocks for line in re.split(r"\n| && ", re.sub(r"\s*\\\n\s*", " ", block))]
        found += [*lines, *(" ".join(span.split()) for span in spans)]
    return found


def _of_kind(kind: str, commands: list[str]) -> list[str]:
    return [command for command in commands if re.match(rf"(?:\w+=\S* )*(?:\S*/)?{KINDS[kind]}", command)]


RECORDED = _recorded()
COMMANDS = list(dict.fromkeys([*_documented(), *RECORDED]))
BY_KIND = {kind: _of_kind(kind, COMMANDS) for kind in KINDS}
OPTIONS = {
    "train": GROUPS,
    "grpo": GROUPS,
    "sft": sft.GROUPS,
    "distill": distill.GROUPS,
}


def _words(command: str, after: str) -> list[str]:
    """The words behind the one that matches, without a comment."""
    words = shlex.split(command, comments=True)
    at = next(i for i, word in enumerate(words) if re.search(after, word))
    return words[at:]


def test_commands_are_found():
    assert {kind: len(commands) >= 10 for kind, commands in BY_KIND.items()} == dict.fromkeys(KINDS, True)
    assert set(RECORDED) <= {command for kind in ("benchmark", "make", "recipe") for command in BY_KIND[kind]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_code_can_be_parsed(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        compile(block, page.name, "exec")


class _Parser(Exception):
    """Carries the parser of a benchmark out of its `main`."""


def _benchmark_parser(module: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def parse(self: argparse.ArgumentParser, *_, **__):
        raise _Parser(self)

    with monkeypatch.context() as patched, pytest.raises(_Parser) as raised:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse)
        importlib.import_module(module).main()
    return raised.value.args[0]


@pytest.mark.parametrize("command", BY_KIND["benchmark"])
def test_benchmark(command, monkeypatch, capsys):
    module, *arguments = _words(command, r"^benchmarks\.")
    found = importlib.util.find_spec(module)
    assert found is not None
    if not arguments:
        return  # named alone; what it needs stands elsewhere
    if found.submodule_search_locations:
        module += ".__main__"
    try:
        _benchmark_parser(module, monkeypatch).parse_args(arguments)
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


@pytest.mark.parametrize("command", BY_KIND["tool"])
def test_tool(command, monkeypatch):
    name, *arguments = _words(command, r"hf-mxfp4$")[1:]
    if name == "run":  # what follows is a command of another program
        if "lm_eval" in arguments:
            harness = pytest.importorskip("lm_eval._cli.harness")
            monkeypatch.setattr("sys.argv", arguments[arguments.index("lm_eval") :])
            given = harness.HarnessCLI().parse_args()
            known = inspect.signature(importlib.import_module("lm_eval.models.huggingface").HFLM).parameters
            assert given.model == "hf"
            assert given.model_args.keys() <= known.keys()
        return
    if name in RECIPES:
        return check_recipe(name, arguments)
    known = typer.main.get_command(app).commands[name].params
    options = {option: param for param in known for option in param.opts if option.startswith("--")}
    plain = 0
    given = set()
    words = iter(arguments)
    for word in words:
        if word.startswith("-"):
            given.add(options[word].name)
            if not options[word].is_flag:
                next(words, None)
        else:
            plain += word != "..."
    places = [param for param in known if param.param_type_name == "argument"]
    assert plain <= len(places) or any(param.nargs == -1 for param in places)
    if plain and "..." not in arguments:  # a command to be typed, not a name
        assert plain >= sum(param.required for param in places)
        assert {param.name for param in options.values() if param.required} <= given


@pytest.mark.parametrize("command", BY_KIND["make"])
def test_make(command):
    _, target, *variables = _words(command, r"^make$")
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.M)
    if target == "demo":
        for variable in variables:
            check_recipe("grpo", shlex.split(variable.removeprefix("ARGS=")))


@pytest.mark.parametrize("command", BY_KIND["recipe"])
def test_recipe(command):
    for path in re.findall(r"recipes/[\w/.]+", command):
        assert (ROOT / path).is_file(), path
    script, *arguments = _words(command, r"^recipes/\w+\.py$")
    check_recipe(Path(script).stem, arguments)


def check_recipe(name, arguments):
    if name == "ablation":
        path, of_grid, options = parse_ablation(arguments)
        read_grid(ROOT / path, only=of_grid.only and of_grid.only.split(","), options=options)
    elif name == "evaluate":
        parse_evaluation([word for word in arguments if word != "N"])
    elif name == "pretrain":
        parse_study([*arguments, "--use_cpu=true", "--bf16=false", "--tf32=false"])
    else:
        given = {word[2:].split("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
        assert given <= {"config", *names(OPTIONS[name])}
        if "--config" in arguments:
            config_path(arguments[arguments.index("--config") + 1])
