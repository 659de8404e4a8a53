# SPDX-License-Identifier: Apache-2.0
"""Options of a script, in a YAML file or on the command line: what its parser does not do by itself."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml

from hf_mxfp4.suggestions import unknown_key_message


Parsed = TypeVar("Parsed")


def with_default_config(argv: list[str], default: Path) -> list[str]:
    """The command line, with ``--config`` and the ``default`` file added where it names none."""
    if any(word == "--config" or word.startswith("--config=") for word in argv):
        return argv
    return [*argv, "--config", str(default)]


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


def refuse_unknown(argv: list[str], defaults: dict[str, object]) -> None:
    """Raise `ValueError` for an option, on the command line or in the YAML file, that is not in ``defaults`` (options
    and their defaults): the parsers name what they do not know, but not what was meant."""
    known = list(defaults)
    allowed = {*known, *(f"no_{name}" for name in known if defaults[name] is True), "config", "help"}
    for word in argv:
        name = word[2:].split("=")[0].replace("-", "_")
        if word.startswith("--") and name not in allowed:
            raise ValueError(unknown_key_message("the command line", name, known))
    path = next((word.split("=", 1)[1] for word in argv if word.startswith("--config=")), None)
    path = path or next((argv[i + 1] for i, word in enumerate(argv[:-1]) if word == "--config"), None)
    if path is None:
        raise ValueError("--config needs the name of a YAML file")
    with open(path, encoding="utf-8") as file:
        options = yaml.safe_load(file) or {}
    if not isinstance(options, dict):
        raise ValueError(f"{path} must hold one `option: value` per line")
    for name in options:
        if name not in known and name != "env":
            raise ValueError(unknown_key_message(path, name, known))


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
