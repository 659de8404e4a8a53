# SPDX-License-Identifier: Apache-2.0
"""Options of a script, in a YAML file or on the command line: what its parser does not do by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from trl import TrlParser

from hf_mxfp4.suggestions import unknown_key_message
from recipes.common.schemes import put_over
from recipes.common.terminal import tell


Parsed = TypeVar("Parsed")
#: Earlier and other names of options, and what they are called here.
OTHER_NAMES = {"skip": "modules_to_not_convert", "exclude": "modules_to_not_convert"}
_TRUTH = {"true": True, "false": False}


@dataclass
class Command:
    """A command line and its YAML file.

    Attributes:
        words: of the command line, without `--config`, options under their own names.
        given: the values of these options by name, as YAML reads them.
        file: the options of the YAML file.
        path: that file; None for none.
    """

    words: list[str]
    given: dict[str, Any]
    file: dict[str, Any]
    path: Path | None

    @property
    def named(self) -> frozenset[str]:
        """The options that either names."""
        return frozenset(self.given) | frozenset(self.file)

    def read(self, path: Path, known: Sequence[str]) -> None:
        """Take the options of a YAML file. Raises `ValueError` for one that is not ``known``."""
        options = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if not isinstance(options, dict):
            raise ValueError(f"{path} must hold one `option: value` per line")
        for name in [name for name, own in OTHER_NAMES.items() if name in options and own in known]:
            _warn_of_other_name(name)
            options[OTHER_NAMES[name]] = options.pop(name)
        for name in options:
            if name not in known and name != "env":
                raise ValueError(unknown_key_message(str(path), str(name), list(known)))
        self.file, self.path = options, path

    def keep_scheme(self) -> None:
        """Drop the options of the file that a preset or mode on the command line resets, and say which."""
        self.file, dropped = put_over(self.file, self.given)
        if dropped:
            word = "preset" if "preset" in self.given else "mode"
            tell(
                "scheme",
                f"--{word} {self.given[word]} resets what {self.path.name} says of the scheme: "
                + ", ".join(f"{name}={value}" for name, value in dropped.items()),
            )


def read_command(argv: Sequence[str], groups: Iterable[type]) -> Command:
    """Read a command line and the YAML file that `--config` names.

    Options may be written with hyphens, and booleans without a value. Raises `ValueError` for an option that is in none
    of the ``groups`` (dataclasses), with the nearest names: the parsers name what they do not know, but not what was
    meant.
    """
    defaults = {option.name: option.default for group in groups for option in fields(group) if option.init}
    known = list(defaults)
    allowed = {*known, *(f"no_{name}" for name in known if defaults[name] is True), "config", "help"}
    words = underscored(argv)
    for place, word in enumerate(words):
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--") or name in allowed:
            continue
        if OTHER_NAMES.get(name) not in known:
            raise ValueError(unknown_key_message("the command line", name, known))
        _warn_of_other_name(name)
        words[place] = f"--{OTHER_NAMES[name]}{equals}{value}"
    lists = "--modules_to_not_convert"
    if sum(word.partition("=")[0] == lists for word in words) > 1:
        raise ValueError(f"{lists} is given more than once; give all modules after one: {lists} layers.0 down_proj")
    path = _take_config(words)
    given = given_options(words)
    given |= {name[3:]: False for name in list(given) if name.startswith("no_") and name not in known}
    command = Command(words, given, {}, None)
    if path is not None:
        command.read(Path(path), known)
    return command


def parse_command(command: Command, groups: Sequence[type]) -> tuple[Any, ...]:
    """Parse a command into one object of each group; the command line wins over the file, whose `env` sets variables of
    the environment."""
    file = dict(command.file)
    os.environ.update({key: str(value) for key, value in (file.pop("env", None) or {}).items()})
    parser = TrlParser(groups)
    parser.set_defaults_with_config(**file)
    return parser.parse_args_into_dataclasses(args=command.words, look_for_args_file=False)


def underscored(argv: Sequence[str]) -> list[str]:
    """Write the names of options with underscores, as in YAML."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        words.append(name.replace("-", "_").replace("__", "--", 1) + equals + value if name[:2] == "--" else word)
    return words


def given_options(words: Sequence[str]) -> dict[str, Any]:
    """The options of a command line by name, their values as YAML reads them: True without one, a list of several."""
    found: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = [value] if equals else []
        elif name is not None:
            found[name].append(word)
    return {name: _value(values) for name, values in found.items()}


def bare_flags(argv: Sequence[str], flags: Iterable[str]) -> list[str]:
    """Write `--flag true` and `--flag=true` as `--flag`, and leave out `--flag false`, for argparse's flags."""
    flags, words = set(flags), []
    for word in underscored(argv):
        name, equals, value = word.partition("=")
        truth = _TRUTH.get((value if equals else word).lower())
        if name in flags and equals and truth is not None:
            words += [name] if truth else []
        elif words and words[-1] in flags and truth is not None and not equals:
            words = words if truth else words[:-1]
        else:
            words.append(word)
    return words


def read_none(arguments: object) -> None:
    """The word "none" on the command line means no value."""
    for option in fields(arguments):
        value = getattr(arguments, option.name)
        if isinstance(value, str) and value.lower() in ("none", "null"):
            setattr(arguments, option.name, None)


def read_yaml(name: str, value: Any) -> Any:
    """An option that is YAML or JSON on a command line, and a value in a file; raises `ValueError` for neither."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{name}={value!r} is neither YAML nor JSON: {error}") from None


def _value(values: Sequence[str]) -> Any:
    if not values:
        return True
    read = []
    for text in values:
        try:
            read.append(None if text.lower() == "none" else yaml.safe_load(text))
        except yaml.YAMLError:
            read.append(text)
    return read[0] if len(read) == 1 else read


def _take_config(words: list[str]) -> str | None:
    """Take `--config` and its value out of the words; the value."""
    places = [i for i, word in enumerate(words) if word.partition("=")[0] == "--config"]
    if not places:
        return None
    if len(places) > 1:
        raise ValueError("--config is given more than once, and there is one YAML file")
    place = places[0]
    _, equals, path = words.pop(place).partition("=")
    if not equals:
        path = words.pop(place) if place < len(words) and not words[place].startswith("--") else ""
    if not path:
        raise ValueError("--config needs the name of a YAML file")
    return path


def _warn_of_other_name(name: str) -> None:
    tell("warning", f"{name} is called {OTHER_NAMES[name]} here")


def exit_on_wrong_options(parse_options: Callable[[list[str]], Parsed], argv: list[str], gpu_hint: str) -> Parsed:
    """What ``parse_options`` makes of ``argv``; a message instead of a traceback for wrong options, and for a missing
    GPU with ``gpu_hint`` added."""
    try:
        return parse_options(argv)
    except FileNotFoundError as error:
        raise SystemExit(f"error: no configuration file {error.filename}") from error
    except OSError as error:
        raise SystemExit(f"error: cannot read {error.filename}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SystemExit(f"error: the configuration is not valid YAML: {error}") from error
    except (TypeError, ValueError) as error:
        no_gpu = "gpu" in str(error).lower() and not torch.cuda.is_available()
        hint = f"\nThis configuration is made for a GPU and none was found. {gpu_hint}" if no_gpu else ""
        raise SystemExit(f"error: {error}{hint}") from error
