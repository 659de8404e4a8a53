# SPDX-License-Identifier: Apache-2.0
"""Options of a script, in a YAML file or on the command line: what TRL's parser does not do by itself.

A script calls [`read_command`] for what the command line names and [`read_file`] for its YAML file, puts the first over
the second with [`merge_options`], and makes its dataclasses with [`build`].
"""

import argparse
import errno
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
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
#: Dataclasses whose fields are the options of a script.
Groups = Sequence[type]


# ---- the command line -----------------------------------------------------------------------------------------------


class Parser(TrlParser):
    """Parse options without abbreviations; raise `ValueError` for what is wrong.

    The word "none" is None for options that can be None, and an empty list for lists. `--help` is short, and
    `--help-all` shows all options of all libraries.
    """

    def __init__(self, groups: Groups, **options: Any):
        super().__init__(groups, allow_abbrev=False, **options)
        self.add_argument("--help-all", action=_FullHelp, nargs=0, default=argparse.SUPPRESS, help="show all options")
        hints: dict[str, Any] = {}
        for group in groups:
            hints.update(get_type_hints(group))
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
    def __call__(self, parser: argparse.ArgumentParser, *words: Any) -> None:
        argparse.ArgumentParser.print_help(parser)
        parser.exit()


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return what converts the word "none" to None, and other words by ``convert``."""

    def converted(text: str) -> Any:
        return None if text.lower() in ("none", "null") else convert(text)

    converted.__name__ = getattr(convert, "__name__", "option")  # argparse's messages have it
    return converted


def read_words(argv: Sequence[str], groups: Groups, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the dataclasses ``groups`` that a command line names, `config` among them, and the words
    that belong to none. ``options``: of the parser, such as its description."""
    parser = Parser(groups, **options)
    parser.add_argument("--config", help="YAML file of options, or the name of one of ours; the command line wins")
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    named, rest = parser.parse_known_args(_one_study(argv))
    return {name: [] if value == [None] else value for name, value in vars(named).items()}, rest


def read_command(argv: Sequence[str], groups: Groups, **options: Any) -> dict[str, Any]:
    """Read a command line that has nothing but options, as [`read_words`] does. Raises `ValueError` for another word or
    option, with the nearest names."""
    named, rest = read_words(argv, groups, **options)
    refuse_words(rest, groups)
    return named


def refuse_words(words: Sequence[str], groups: Groups) -> None:
    """Raise `ValueError` for words that belong to no option."""
    if not words:
        return
    if words[0].startswith("--"):
        name = words[0][2:].partition("=")[0].replace("-", "_")
        raise ValueError(unknown_key_message("the command line", name, names(groups)))
    raise ValueError(f"{words[0]!r} is one word more than the options")


def _one_study(argv: Sequence[str]) -> list[str]:
    """Return a command line whose words `--study` are one, the later put over the earlier."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--study", action="append", default=[])
    found, words = parser.parse_known_args(list(argv))
    if len(found.study) > 1:
        options: dict[str, Any] = {}
        for text in found.study:
            options = merge_options(options, {"study": text})
        found.study = [json.dumps(options["study"])]
    for text in found.study:
        words += ["--study", text]
    return words


# ---- files ----------------------------------------------------------------------------------------------------------


def config_path(name: str | Path) -> Path:
    """Return the YAML file of that path, or else the one of that name that comes with the recipes. Raises `OSError`
    where there is neither."""
    path = Path(name).expanduser()
    packaged = CONFIGS / f"{path.name.removesuffix('.yaml')}.yaml"
    if path.exists():
        return path
    if packaged.exists():
        return packaged
    ours = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
    raise FileNotFoundError(errno.ENOENT, f"No such file; the configs that come with the recipes are {ours}", str(name))


def read_file(path: str | Path, groups: Groups) -> dict[str, Any]:
    """Read the options of a YAML file, found as by [`config_path`]. Raises `ValueError` for an option that is not
    known, with the nearest names."""
    path = config_path(path)
    return check_options(load_yaml(path) or {}, str(path), groups)


def check_options(value: Any, where: str, groups: Groups) -> dict[str, Any]:
    """Return options as they are in YAML. Raises `ValueError` for what is no mapping, and for unknown names."""
    return check_mapping(value, where, names(groups))


def check_mapping(value: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    """Return a mapping that was read from YAML. Raises `ValueError` for another value, and for names that are not
    ``known``, with the nearest ones."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold one `option: value` per line")
    for name in value:
        if name not in known:
            raise ValueError(unknown_key_message(where, str(name), list(known)))
    return value


def load_yaml(path: Path) -> Any:
    """Read a YAML file. Raises `ValueError` for one that is not valid."""
    return _parse_yaml(path.read_text(encoding="utf-8", errors="replace"), f"{path} is not valid YAML")


def read_yaml(name: str, value: Any) -> Any:
    """Read an option that is YAML or JSON on a command line, and a value in a file; raise `ValueError` for neither."""
    if not isinstance(value, str):
        return value
    return _parse_yaml(value, f"{name}={value!r:.200} is neither YAML nor JSON")


def _parse_yaml(text: str, refusal: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{refusal}: {error}") from None
    except RecursionError:
        raise ValueError(f"{refusal}: it is nested too deeply") from None


# ---- both -----------------------------------------------------------------------------------------------------------


def names(groups: Groups) -> list[str]:
    """Return the options of dataclasses by name."""
    return [option.name for group in groups for option in fields(group) if option.init]


def merge_options(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Put options over others. Naming one option of a `study` leaves its others as they are."""
    merged = {**earlier, **later}
    studies = [read_yaml("study", options["study"]) for options in (earlier, later) if options.get("study")]
    if len(studies) == 2 and all(isinstance(study, Mapping) for study in studies):
        merged["study"] = {**studies[0], **studies[1]}
    return merged


def build(groups: Groups, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Make one object of each group."""
    parser = Parser(groups)
    parser.set_defaults_with_config(**options)
    return parser.parse_args_into_dataclasses(args=[], look_for_args_file=False)


def build_study(kind: type[Parsed], value: Any) -> Parsed:
    """Make a ``kind``, a dataclass of options, of the option `study`: a mapping, or YAML on the command line."""
    if isinstance(value, kind):
        return value
    given = check_options(read_yaml("study", value or {}), "study", (kind,))
    (study,) = build((kind,), given)
    return study


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
