# SPDX-License-Identifier: Apache-2.0
"""Options of a script, in a YAML file or on the command line: what TRL's parser does not do by itself."""

import argparse
import errno
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import torch
import yaml
from trl import TrlParser

from hf_mxfp4.recipes.common.help import help_text
from hf_mxfp4.utils import unknown_key_message


# TRL's own default still has the old name of this option.
warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing.*")

#: The files that come with the recipes.
CONFIGS = Path(__file__).parents[1] / "configs"
Parsed = TypeVar("Parsed")
Groups = Sequence[type]


class Parser(TrlParser):
    """TRL's parser without abbreviations: the word "none" is None for options that can be None, and an empty list for
    lists; what is wrong raises `ValueError`; `--help` is short, and `--help-all` argparse's."""

    def __init__(self, groups: Groups, **options: Any):
        super().__init__(groups, allow_abbrev=False, **options)
        self.add_argument("--help-all", action=_FullHelp, nargs=0, default=argparse.SUPPRESS, help="show all options")
        hints = {name: hint for group in groups for name, hint in get_type_hints(group).items()}
        for action in self._actions:
            can_be_none = action.nargs in ("*", "+") or NoneType in get_args(hints.get(action.dest))
            if can_be_none and action.type is not None and action.dest != "report_to":  # whose value "none" is a word
                action.type = _or_none(action.type)

    def print_help(self, file: Any = None) -> None:
        usage = self.usage or f"{self.prog} [--config FILE] [--option value ...]"
        print(help_text(usage, self.description or "", self.dataclass_types), end="", file=file)

    def error(self, message: str) -> None:
        raise ValueError(message)


class _FullHelp(argparse.Action):
    """Shows all options of all libraries."""

    def __call__(self, parser: argparse.ArgumentParser, *words: Any) -> None:
        argparse.ArgumentParser.print_help(parser)
        parser.exit()


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def converted(text: str) -> Any:
        return None if text.lower() in ("none", "null") else convert(text)

    converted.__name__ = getattr(convert, "__name__", "option")
    return converted


def names(groups: Groups) -> list[str]:
    """Return the options of dataclasses by name."""
    return [option.name for group in groups for option in fields(group) if option.init]


def read_words(argv: Sequence[str], groups: Groups, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the dataclasses ``groups`` that a command line names, `config` among them, and the words
    that belong to none. ``options``: of the parser, such as its description."""
    parser = Parser(groups, **options)
    parser.add_argument("--config", help="YAML file of options, or the name of one of ours; the command line wins")
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    found, rest = parser.parse_known_args(list(argv))
    return {name: [] if value == [None] else value for name, value in vars(found).items()}, rest


def read_command(argv: Sequence[str], groups: Groups, **options: Any) -> dict[str, Any]:
    """Read a command line that has nothing but options, as [`read_words`] does. Raises `ValueError` for another word or
    option, with the nearest names."""
    found, rest = read_words(argv, groups, **options)
    refuse_words(rest, groups)
    return found


def refuse_words(words: Sequence[str], groups: Groups) -> None:
    """Raise `ValueError` for words that belong to no option."""
    if words and words[0].startswith("--"):
        name = words[0][2:].partition("=")[0].replace("-", "_")
        refuse_unknown([name], "the command line", names(groups), removed_options(groups))
    if words:
        raise ValueError(f"{words[0]!r} is one word more than the options")


def refuse_unknown(
    found: Iterable[Any], where: str, known: Sequence[str], removed: Mapping[str, str] | None = None
) -> None:
    """Raise `ValueError` for the first name that is not ``known``, with what to write instead of ``removed`` options,
    and the nearest names of others."""
    for name in found:
        if name not in known:
            raise ValueError(unknown_key_message(where, str(name), list(known), removed))


def removed_options(groups: Groups) -> dict[str, str]:
    """Return the options that dataclasses had in earlier versions, with what to write instead."""
    return {name: instead for group in groups for name, instead in getattr(group, "REMOVED", {}).items()}


def check_mapping(
    value: Any, where: str, known: Sequence[str], removed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a mapping of options, read from YAML. Raises `ValueError` for another value, and as [`refuse_unknown`]."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold one `option: value` per line")
    refuse_unknown(value, where, known, removed)
    return value


def config_path(name: str | Path) -> Path:
    """Return the YAML file of that path, or else the one of that name that comes with the recipes. Raises `OSError`
    where there is neither."""
    path = Path(name).expanduser()
    packaged = CONFIGS / f"{path.name.removesuffix('.yaml')}.yaml"
    if not path.exists() and not packaged.exists():
        ours = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise FileNotFoundError(
            errno.ENOENT, f"No such file; the configs that come with the recipes are {ours}", str(name)
        )
    return path if path.exists() else packaged


def read_file(path: str | Path, groups: Groups) -> dict[str, Any]:
    """Read the options of a YAML file, found as by [`config_path`], and set the variables of the environment that its
    `env` names. Raises `ValueError` for an option that is not known, with the nearest names."""
    path = config_path(path)
    options = check_mapping(load_yaml(path) or {}, str(path), [*names(groups), "env"], removed_options(groups))
    os.environ.update(read_env(options.pop("env", None)))
    return options


def read_env(value: Any) -> dict[str, str]:
    """Return the variables of an option `env`. Raises `ValueError` for what is no mapping."""
    if not isinstance(value, dict | None):
        raise ValueError(f"env={value!r} must hold one `variable: value` per line")
    return {str(name): str(text) for name, text in (value or {}).items()}


def build(groups: Groups, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Make one object of each group."""
    parser = Parser(groups)
    parser.set_defaults_with_config(**options)
    return parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)


def load_yaml(path: Path) -> Any:
    """Read a YAML file. Raises `ValueError` for one that is not valid."""
    return _parse_yaml(path.read_text(encoding="utf-8", errors="replace"), f"{path} is not valid YAML")


def read_yaml(name: str, value: Any) -> Any:
    """Read an option that is YAML or JSON on a command line, and a value in a file; raise `ValueError` for neither."""
    return _parse_yaml(value, f"{name}={value!r:.200} is neither YAML nor JSON") if isinstance(value, str) else value


def _parse_yaml(text: str, refusal: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{refusal}: {error}") from None
    except RecursionError:
        raise ValueError(f"{refusal}: it is nested too deeply") from None


def exit_on_wrong_options(parse: Callable[[list[str]], Parsed], argv: list[str], gpu_hint: str = "") -> Parsed:
    """Return what ``parse`` makes of ``argv``; end with a message instead of a traceback for wrong options, and for a
    missing GPU with ``gpu_hint`` added."""
    try:
        return parse(argv)
    except OSError as error:
        raise SystemExit(f"error: cannot read {error.filename}: {error.strerror}") from error
    except (TypeError, ValueError) as error:
        no_gpu = gpu_hint and "gpu" in str(error).lower() and not torch.cuda.is_available()
        hint = f"\nThis configuration is made for a GPU and none was found. {gpu_hint}" if no_gpu else ""
        raise SystemExit(f"error: {error}{hint}") from error
