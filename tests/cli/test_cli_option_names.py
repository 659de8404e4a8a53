# SPDX-License-Identifier: Apache-2.0
"""One name for each option of the command, and earlier ones."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hf_mxfp4.cli import app


COMMANDS = typer.main.get_command(app).commands


def parsed(name, *arguments):
    """Values that the command is called with."""
    return COMMANDS[name].make_context(name, [*map(str, arguments)]).params


def test_texts_modules_and_overwrite_have_one_name():
    names = {option for command in COMMANDS.values() for param in command.params for option in param.opts}
    assert not {"--dataset", "--calibrate", "--exclude"} & names
    for command in COMMANDS.values():
        options = {option for param in command.params for option in param.opts}
        assert ("--skip" in options) == ("--modules-to-not-convert" in options)


@pytest.mark.parametrize(
    ("command", "old", "now"),
    [
        ("eval MODEL", "--dataset a.jsonl", "--text a.jsonl"),
        ("analyze MODEL", "--exclude a --exclude=b", "--modules-to-not-convert a --modules-to-not-convert=b"),
        ("compare A B", "--exclude a", "--skip a"),
    ],
)
def test_earlier_names_work_with_a_warning(command, old, now, capsys):
    name, *places = command.split()
    parsed(name, *places, *now.split())
    assert capsys.readouterr().err == ""
    assert parsed(name, *places, *old.split()) == parsed(name, *places, *now.split())
    assert f"warning: {[word for word in old.split() if '--' in word][-1].split('=')[0]} is now --" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--overwrite", True),
        ("--overwrite --modules_to_not_convert a", True),
        ("--modules_to_not_convert=a", False),
    ],
)
def test_options_as_recipes_have_them(words, value, capsys):
    found = parsed("pack", "DIR", *words.split(), "OUT")
    assert found["overwrite"] is value and found["out"] == Path("OUT")
    assert list(found["skip"]) == (["a"] if "convert" in words else [])
    assert capsys.readouterr().err == ""


def test_what_is_behind_two_dashes_stays():
    assert parsed("pack", "DIR", "--", "--overwrite")["out"] == Path("--overwrite")


def test_unknown_options_are_refused_with_suggestions():
    done = CliRunner().invoke(app, ["pack", "DIR", "OUT", "--modules-to-not-covert", "a"])
    assert done.exit_code == 2 and "--modules-to-not-convert" in done.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("verify ~nobody-of-this-name/x", "~nobody-of-this-name/x: there is no such home folder"),
        ("eval MODEL --text ~nobody-of-this-name/x", "there is no such home folder"),
        ("eval MODEL --text deep.jsonl", "nested too deeply"),
        ("gptq MODEL OUT --text texts.txt --scheme config:bad.yaml", "bad.yaml cannot be read: while parsing"),
        (f"eval {'x' * 300} --text texts.txt --card", "name too long"),
        ("simulate --elements 99999999999999999999999", "--elements"),
    ],
)
def test_wrong_words_are_one_line(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("deep.jsonl").write_text("[" * 100_000)
    Path("texts.txt").write_text("some text")
    Path("bad.yaml").write_text("preset: [1")
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 2 and message in done.stderr


@pytest.mark.parametrize("option", ["--text", "--calibrate"])
def test_an_option_that_was_removed_says_what_to_use(option):
    done = CliRunner().invoke(app, ["export", "DIR", "OUT", "--format", "gguf", option, "a.txt"])
    assert done.exit_code == 2 and "was removed: run hf-mxfp4 gptq DIR ROUNDED --text FILE" in done.stderr
